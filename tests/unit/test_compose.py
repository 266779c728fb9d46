"""The Compose file of a plan: what it lets a container do, without a Docker engine."""

import shutil
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lanekit import capture, compose, machine, planning
from lanekit.errors import ConfigError
from lanekit.manifest import Manifest, Row
from lanekit.plan import Containers, Plan

HELD = Containers(
    project="lanes-x",
    images={"server": "sha256:" + "1" * 64, "aiperf": "sha256:" + "2" * 64},
    user="10001:10001",
    memory=1 << 30,
    gpus=0,
    nics=0,
)


@pytest.fixture
def plan(bare: machine.Machine, checkout: Path) -> Plan:
    made = planning.make(planning.Options(lane="vllm", profile="cpu", env=("A=$B",)), bare)
    return msgspec.structs.replace(made, launcher="compose", containers=HELD)


def services(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = compose.document(plan, plan.hosts[0])["services"]
    return found


def test_every_service_and_every_cell_is_there_from_its_own_image(plan: Plan) -> None:
    found = services(plan)
    assert set(found) == {"server", *(f"aiperf-{cell}" for cell in plan.cells)}
    assert found["server"]["image"] == HELD.images["server"]
    assert found["aiperf-c4"]["image"] == HELD.images["aiperf"]
    assert found["aiperf-c4"]["profiles"] == ["cell"]  # `up` alone starts the services


def test_no_container_is_root_or_may_write_its_root_or_is_without_limits(plan: Plan) -> None:
    for body in services(plan).values():
        assert body["user"] == "10001:10001"
        assert body["read_only"] is True
        assert body["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in body["security_opt"]
        assert body["mem_limit"]
        assert body["pids_limit"]
        assert body["labels"] == {compose.LABEL: plan.drop}
        assert body["restart"] == "no"


def test_only_a_cells_own_folder_can_be_written(plan: Plan) -> None:
    for name, body in services(plan).items():
        writable = {v["source"]: v for v in body["volumes"] if not v.get("read_only")}
        own = "kept" if name == "server" else f"{plan.drop}/aiperf/{name.removeprefix('aiperf-')}"
        assert list(writable) == [own]
        # No volume that could be left: the one that is kept is none of the project's.
        assert all(v["type"] == "bind" or v is writable[own] for v in body["volumes"])
    assert compose.document(plan, plan.hosts[0])["volumes"] == {
        "kept": {"name": "lanes-kept-" + "1" * 12, "external": True}
    }


def test_what_an_engine_compiles_is_kept_and_aiperf_keeps_nothing(plan: Plan) -> None:
    found = services(plan)
    assert "HOME=/kept/10001" in found["server"]["environment"]
    assert "TORCHINDUCTOR_CACHE_DIR=/kept/10001/inductor" in found["server"]["environment"]
    assert "HOME=/tmp" in found["aiperf-c4"]["environment"]
    own = msgspec.structs.replace(plan.hosts[0], cache="/var/lanes")
    there = compose.document(plan, own)
    assert there["volumes"] == {}
    assert {"type": "bind", "target": "/kept", "source": "/var/lanes"} in there["services"][
        "server"
    ]["volumes"]


def test_secrets_pass_by_name_and_the_hosts_paths_do_not(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    environment = services(plan)["server"]["environment"]
    assert "HF_TOKEN" in environment
    assert not any("hf_secret" in each for each in environment)
    assert not any(each.startswith(("PATH=", "LD_LIBRARY_PATH=")) for each in environment)


def test_a_dollar_reaches_the_program(plan: Plan) -> None:
    assert "A=$$B" in services(plan)["server"]["environment"]


def test_gpus_and_nics_are_passed_in_where_the_profile_has_them(plan: Plan) -> None:
    held = msgspec.structs.replace(HELD, gpus=8, nics=16)
    body = services(msgspec.structs.replace(plan, containers=held))["server"]
    assert body["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert body["devices"] == ["/dev/infiniband:/dev/infiniband"]
    assert body["ulimits"] == {"memlock": -1}
    assert "devices" not in services(plan)["server"]


def test_a_drop_of_processes_asks_no_docker(tmp_path: Path) -> None:
    dead = Manifest(Row("l", "a", "p", ()), "s", "failed", "", {}, {}, {})
    assert compose.end_the_dead(tmp_path, dead, print) == ([], [])


def test_hosts_of_a_dead_run_that_are_gone_are_said_and_given_up_on(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts that take a connection and say nothing, as one that hangs does."""
    if shutil.which("ssh") is None:
        pytest.skip("needs ssh")
    monkeypatch.setattr(capture, "CONNECT_S", 1)
    (tmp_path / compose.FOLDER).mkdir()
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        fleet = [msgspec.structs.replace(plan.hosts[0], name=name, ssh=where) for name in "ab"]
        held = {"hosts": msgspec.to_builtins(fleet)}
        dead = Manifest(Row("l", "a", "p", ()), "s", "failed", "", held, {}, {})
        gone, unreached = compose.end_the_dead(tmp_path, dead, said.append)
    assert said == [f"looking for what a dead run left on a, b ({tmp_path})"]
    assert gone == []
    assert [each.partition(":")[0] for each in unreached] == ["a", "b"]


def test_an_unknown_launcher_names_the_known_ones(bare: machine.Machine) -> None:
    with pytest.raises(ConfigError) as error:
        planning.make(planning.Options(lane="vllm", profile="cpu", launcher="podman"), bare)
    assert "process, compose" in error.value.remedy


@pytest.fixture
def two(bare: machine.Machine, checkout: Path) -> Plan:
    """The micro lane on two hosts, neither of which is this machine."""
    options = planning.Options(
        lane="micro", profile="cpu-x2", hosts="10.0.0.1,10.0.0.2", start=False,
        env=("MY_TOKEN=abc",),
    )  # fmt: skip
    made = planning.make(options, bare)
    return msgspec.structs.replace(made, containers=HELD)


def test_a_remote_host_gets_volumes_of_its_own_and_nothing_of_this_machine(two: Plan) -> None:
    for host in two.hosts:
        body = compose.document(two, host)["services"]["batch-decode"]
        assert {v["type"] for v in body["volumes"]} == {"volume"}
        assert body["hostname"] == host.name
        assert body["extra_hosts"] == ["ip-10-0-0-1=10.0.0.1", "ip-10-0-0-2=10.0.0.2"]


@pytest.fixture
def entered(bare: machine.Machine, checkout: Path) -> Plan:
    """A lane whose ranks mpirun starts on two hosts."""
    options = planning.Options(
        lane="trtllm", profile="p5en-x2", hosts="10.0.0.1,10.0.0.2", start=False
    )
    made = planning.make(options, bare)
    assert made.containers is not None
    held = msgspec.structs.replace(made.containers, user="1000:1000")
    return msgspec.structs.replace(made, containers=held)


def test_what_mpirun_enters_waits_for_a_key_in_its_memory(entered: Plan) -> None:
    for host in entered.hosts:
        services = compose.document(entered, host)["services"]
        body = services["server"]
        assert body["command"][:2] == ["sh", "-c"]
        assert 'exec "$$@"' in body["command"][2]
        assert "/lane/ssh:mode=700,uid=10001,gid=10001" in body["tmpfs"]
        assert body["user"] == "10001:10001"  # a name that SSH can look up, unlike 1000
        loaders = [each for name, each in services.items() if name != "server"]
        assert {each["user"] for each in loaders} <= {"1000:1000"}
        assert not any("/lane/ssh" in str(each) for each in loaders)
    leader, worker = (compose.document(entered, h)["services"]["server"] for h in entered.hosts)
    assert leader["command"][4].endswith("mpirun")
    assert worker["command"][4].endswith("sshd")
    port = str(entered.ports["ssh"])
    assert f"-p {port} " in " ".join(leader["command"])
    assert worker["command"][worker["command"].index("-p") + 1] == port


def test_a_remote_host_is_not_bounded_by_the_memory_of_this_machine(plan: Plan, two: Plan) -> None:
    for host in two.hosts:
        for body in compose.document(two, host)["services"].values():
            assert not {"mem_limit", "shm_size"} & set(body)
            assert "/dev/shm:mode=1777" in body["tmpfs"]  # else 64 MiB
    here = services(plan)["server"]
    assert here["shm_size"] == here["mem_limit"] // 4 == HELD.memory // 4
    assert not any(each.startswith("/dev/shm") for each in here["tmpfs"])


def test_nobody_else_gets_a_key(plan: Plan, two: Plan) -> None:
    for each in (plan, two):
        assert "/lane/ssh" not in str(compose.document(each, each.hosts[0]))


def test_each_host_runs_its_own_rank(two: Plan) -> None:
    said = [compose.document(two, h)["services"]["batch-decode"]["command"] for h in two.hosts]
    assert [words[words.index("--node-rank") + 1] for words in said] == ["0", "1"]


def test_what_is_secret_by_its_name_is_never_written_down(two: Plan) -> None:
    text = str(compose.document(two, two.hosts[0]))
    assert "abc" not in text
    assert "'MY_TOKEN'" in text


def test_a_model_of_the_hosts_is_mounted_and_a_built_one_is_copied(
    bare: machine.Machine, checkout: Path, tmp_path: Path
) -> None:
    options = planning.Options(
        lane="vllm", profile="cpu", launcher="compose", hosts="10.0.0.1", start=False
    )
    for model, kind in (("", "volume"), (str(tmp_path), "bind")):
        made = planning.make(msgspec.structs.replace(options, model=model), bare)
        body = compose.document(made, made.hosts[0])["services"]["server"]
        held = {v["target"]: v["type"] for v in body["volumes"]}
        assert held[made.model.path] == kind
