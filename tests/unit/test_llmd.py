"""The llmd lane: a router before engines, planned; its programs check what they are given."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import drops
import msgspec
import pytest
import yaml

from lanekit import (
    cli,
    compose,
    contract,
    lanes,
    machine,
    paths,
    plan,
    planning,
    spec,
    variables,
    verify,
)
from lanekit.drop import Drop
from lanekit.errors import ConfigError

BIN = Path(os.environ.get("LANES_LLMD_BIN", paths.CACHE / "envs" / "llmd" / "bin"))
needs_programs = pytest.mark.skipif(
    not (BIN / "envoy").is_file(),
    reason="needs the lane's environment: make lane-llmd makes it, or LANES_LLMD_BIN names one",
)


def made(bare: machine.Machine, **options: object) -> plan.Plan:
    return planning.make(planning.Options(lane="llmd", **options), bare)  # type: ignore[arg-type]


def fleet(bare: machine.Machine, arm: str) -> plan.Plan:
    return made(bare, arm=arm, profile="p5en-x2", hosts="10.0.0.1,10.0.0.2", start=False)


def test_aiperf_asks_the_router_and_the_router_two_engines(bare: machine.Machine) -> None:
    found = made(bare)
    first, second, router = found.services
    assert [first.name, second.name, router.name] == ["first", "second", "router"]
    url = f"http://127.0.0.1:{found.ports['server']}"
    assert all(url in cell.command for cell in found.cells.values())
    at = router.command.index("--port")
    assert router.command[at + 1] == str(found.ports["server"])
    at = router.command.index("--worker-urls")
    assert router.command[at + 1 : at + 3] == found.backends
    assert str(found.ports["first"]) in first.command
    assert str(found.ports["second"]) in second.command
    assert len(set(found.ports.values())) == len(found.ports)
    assert found.pins["vllm-router"] == "0.1.17"
    assert list(found.environments["router"].locks) == ["llmd.txt"]


def test_the_picker_and_envoy_get_files_that_agree_with_the_plan(bare: machine.Machine) -> None:
    found = made(bare, arm="epp")
    assert [s.name for s in found.services] == ["first", "second", "epp", "envoy"]
    endpoints = yaml.safe_load(found.files["endpoints.yaml"])["endpoints"]
    assert [f"http://{e['address']}:{e['port']}" for e in endpoints] == [*found.backends]
    assert len({e["name"] for e in endpoints}) == 2
    picker = yaml.safe_load(found.files["picker.yaml"])
    (discovery,) = [p for p in picker["plugins"] if p["type"] == "file-discovery"]
    assert discovery["parameters"]["path"] == f"{found.drop}/files/endpoints.yaml"
    assert picker["dataLayer"]["discovery"]["pluginRef"] == discovery["name"]
    envoy = yaml.safe_load(found.files["envoy.yaml"])["static_resources"]
    (listener,) = envoy["listeners"]
    assert listener["address"]["socket_address"]["port_value"] == found.ports["server"]
    (asked,) = [c for c in envoy["clusters"] if c["name"] == "picker"]
    address = asked["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
    assert address["socket_address"]["port_value"] == found.ports["picker"]


@pytest.mark.parametrize(("arm", "beside"), [("router", ["router"]), ("epp", ["epp", "envoy"])])
def test_on_a_fleet_each_host_answers_and_the_leader_routes(
    bare: machine.Machine, arm: str, beside: list[str]
) -> None:
    found = fleet(bare, arm)
    leader, worker = (h.name for h in found.hosts)
    placed = [(s.host, s.name) for s in found.services]
    assert placed == [(leader, "first"), *((leader, name) for name in beside), (worker, "first")]
    port = found.ports["first"]
    assert found.backends == (f"http://10.0.0.1:{port}", f"http://10.0.0.2:{port}")
    engines = [s for s in found.services if s.name == "first"]
    assert all("--data-parallel-hybrid-lb" in s.command for s in engines)
    starts = [w for s in engines for w in s.command if w.startswith("--data-parallel-start-rank=")]
    assert starts == ["--data-parallel-start-rank=0", "--data-parallel-start-rank=8"]
    assert {s.environment for s in engines} == {"server"}
    assert {s.environment for s in found.services if s.name != "first"} == {"router"}
    assert found.containers
    assert found.containers.images["router"] == "lanes/llmd:2026-07"


def test_every_service_is_some_arm_s_and_every_arm_s_service_is_there() -> None:
    lane = spec.lane("llmd")
    declared = set(yaml.safe_load((paths.LANES / "llmd" / "serve.yaml").read_text())["services"])
    assert declared == {name for arm in lane.arms.values() for name in arm.services}


def test_no_row_of_the_lane_is_evidence_of_deepep() -> None:
    """Its contracts decide by routing alone: a transport's line is noted, or not looked at."""
    lane = spec.lane("llmd")
    for name in {c for arm in lane.arms.values() for c in arm.contracts.values()}:
        found = contract.load(name)
        assert not found.extends
        assert {*found.required, *found.served} <= {
            "vllm-engine-cpu", "vllm-engine-gpu", "vllm-options", "vllm-graphs",
            "vllm-graphs-lowered", "router-ready", "requests-spread", "picker-started",
            "picker-picked",
        }  # fmt: skip
        assert found.unproven[0].startswith("anything about DeepEP"), name
        assert "DeepEP" not in found.proves


def test_a_routed_fleet_has_the_variables_of_its_transport() -> None:
    for name in ("routed-efa", "picked-efa"):
        assert variables.of(name, "p5en-x2") == variables.of("v2-efa-proxy", "p5en-x2")


def test_a_container_has_its_tool_s_image_and_reads_the_laid_out_files(
    bare: machine.Machine,
) -> None:
    found = fleet(bare, "epp")
    assert found.containers
    services = compose.document(found, found.hosts[0])["services"]
    assert services["envoy"]["image"] == found.containers.images["router"]
    assert services["first"]["image"] == found.containers.images["server"]
    targets = [volume["target"] for volume in services["envoy"]["volumes"]]
    assert f"{found.drop}/files" in targets


def test_an_image_that_no_tool_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("services:\n  a:\n    image: ${LANE_IMAGE_OTHER}\n    command: x\n")
    with pytest.raises(ConfigError, match="neither the engine's nor a tool's") as caught:
        planning.services(path, {"LANE_BIN_ROUTER": "/x"}, {}, "here")
    assert "LANE_IMAGE_NAME" in caught.value.remedy


def test_what_was_laid_out_stands_in_the_drop(bare: machine.Machine, tmp_path: Path) -> None:
    found = made(bare, arm="epp", results=str(tmp_path))
    drop = Drop.create(found)
    for name, text in found.files.items():
        assert (drop.path / "files" / name).read_text() == text


@pytest.mark.skipif(shutil.which("epp") is not None, reason="the picker is installed here")
def test_a_picker_that_is_not_there_is_refused_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = tmp_path / "results"
    asked = ["run", "llmd", "--arm", "epp", "--profile", "cpu", "--results", str(results)]
    assert cli.main(asked) == 2
    said = capsys.readouterr().err
    assert "no program on PATH named epp" in said
    assert "README" in said
    assert not results.exists()


def test_the_picker_is_given_hosts_by_number_alone(bare: machine.Machine) -> None:
    """It refuses a name itself, but only once two engines have loaded their weights."""

    def planned(arm: str, hosts: str = "", launcher: str = "") -> plan.Plan:
        options = planning.Options(
            lane="llmd", profile="p5en-x2", arm=arm, start=False, hosts=hosts, launcher=launcher
        )
        return planning.make(options, bare)

    with pytest.raises(ConfigError, match=r"by IPv4 address alone, not a\.example\.com"):
        planned("epp", hosts="a.example.com,10.0.0.2")
    with pytest.raises(ConfigError, match="by IPv4 address alone"):
        planned("epp", launcher="kubernetes")
    assert planned("epp", hosts="10.0.0.1,10.0.0.2")
    assert planned("epp")  # nobody is named yet
    assert planned("router", hosts="a,b")


def test_a_profile_may_not_name_a_backend_without_a_port() -> None:
    lane = spec.lane("llmd")
    cpu = msgspec.structs.replace(lane.profiles["cpu"], backends=("third",))
    broken = {**lane.profiles, "cpu": cpu}
    with pytest.raises(ConfigError, match="backends: no port named 'third'"):
        spec.checked(msgspec.structs.replace(lane, profiles=broken))


# ---------------------------------------------------------------- the real programs


@needs_programs
def test_envoy_accepts_its_configuration(bare: machine.Machine, tmp_path: Path) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text(made(bare, arm="epp").files["envoy.yaml"])
    command = (str(BIN / "envoy"), "--mode", "validate", "-c", str(path), "--use-dynamic-base-id")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    path.write_text(path.read_text().replace("use_http_header: true", "use_http_heder: true"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0, "Envoy checks nothing"


@needs_programs
def test_the_router_accepts_its_arguments(bare: machine.Machine) -> None:
    """By its own parser, which the launcher's module makes."""
    router = made(bare).services[-1]
    ask = (
        "import argparse, json, sys; from vllm_router.router_args import RouterArgs;"
        "p = argparse.ArgumentParser(); RouterArgs.add_cli_args(p);"
        "a = p.parse_args(sys.argv[1:]);"
        "print(json.dumps([a.port, a.worker_urls, a.policy, a.health_check_interval_secs]))"
    )
    command = (str(BIN / "python"), "-c", ask, *router.command[1:])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    port, urls, policy, seconds = json.loads(done.stdout)
    at = router.command.index("--port")
    assert (str(port), policy, seconds) == (router.command[at + 1], "round_robin", 1)
    assert len(urls) == 2


def routed(tmp_path: Path) -> Path:
    """A copy of the committed row: a router before two engines on a CPU."""
    (drop,) = [x for x in lanes.tracked() if x.name.endswith("cpu-llmd-router")]
    return Path(shutil.copytree(drop, tmp_path / drop.name))


@pytest.mark.parametrize("alone", [False, True])
def test_an_engine_whose_answers_stand_in_another_s_log_stood_idle(
    tmp_path: Path, alone: bool
) -> None:
    """Their lines still name a process of their own."""
    drop = routed(tmp_path)
    first, second = (drop / "logs" / f"host-1-{name}.log" for name in ("first", "second"))
    lines = second.read_bytes().splitlines(keepends=True)
    moved = [x for x in lines if b'HTTP/1.1" 200' in x]
    second.write_bytes(b"".join(x for x in lines if x not in moved))
    first.write_bytes(first.read_bytes() + b"".join(moved))
    found = verify.verify(drops.seal(drop))
    (spread,) = [x for x in found.checks if x.id == "requests-spread"]
    assert (found.result, spread.outcome) == ("refuted", "failed")
    if alone:  # a plan without engines behind the router is not the lane's
        planned = json.loads((drop / "manifest.json").read_text())["plan"]
        drops.edit_json(drop / "manifest.json", plan=planned | {"backends": []})
        assert "lane" in verify.verify(drop).reason


@pytest.mark.parametrize("name", ["picker.yaml", "envoy.yaml"])
def test_a_program_s_file_of_another_plan_refutes(tmp_path: Path, name: str) -> None:
    drop = routed(tmp_path)
    planned = json.loads((drop / "manifest.json").read_text())["plan"]
    planned["files"][name] += "x: 1\n"
    drops.edit_json(drop / "manifest.json", plan=planned)
    found = verify.verify(drop)
    assert found.result != "proven"
    assert f"plan.files.{name}" in next(x.actual for x in found.checks if x.id == "lane")
