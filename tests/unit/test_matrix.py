"""Every lane and arm on every profile: planned where it fits, refused with the reason elsewhere.

Whatever lane, arm or profile is added is covered: all of it comes from the files.
"""

import contextlib
import functools
import itertools
import re
import shlex

import drops
import msgspec
import pytest
import readers
import yaml

from lanekit import (
    contract,
    drop,
    images,
    machine,
    patches,
    paths,
    plan,
    planning,
    row,
    spec,
    variables,
)
from lanekit.errors import ConfigError
from lanekit.manifest import Manifest

LANES = {name: spec.lane(name) for name in spec.lane_names()}
ALL = [
    (lane, arm, profile)
    for lane, found in LANES.items()
    for arm, profile in itertools.product(found.arms, spec.profile_names())
]
FITS = [(lane, arm, where) for lane, arm, where in ALL if where in LANES[lane].arms[arm].contracts]
REST = [row for row in ALL if row not in FITS]
NOWHERE = machine.Machine(
    host="here", kernel="6.1", cpus=2, memory_mib=24000, gpus=(), gpu_processes=(), nics=(),
    gdrdrv="", fi_info="",
)  # fmt: skip


@functools.cache  # frozen, and asked for by most tests
def made(lane: str, arm: str, profile: str, **more: object) -> plan.Plan:
    """The plan of a row, as `PLAN=1` prints it: it needs neither hosts nor images."""
    options = planning.Options(lane=lane, arm=arm, profile=profile, start=False, **more)  # type: ignore[arg-type]
    return planning.make(options, NOWHERE)


def commands(found: plan.Plan) -> list[tuple[str, ...]]:
    """Every command of a plan, of services and cells, on every host."""
    workers = (worker.command for cell in found.cells.values() for worker in cell.workers)
    cells = (cell.command for cell in found.cells.values())
    return [*(service.command for service in found.services), *cells, *workers]


def given(found: plan.Plan) -> dict[str, str]:
    """Every variable that something of a plan's engine is given."""
    parts = [service.env for service in found.services]
    if found.driver == "batch":
        parts += [cell.env for cell in found.cells.values()]
        parts += [worker.env for cell in found.cells.values() for worker in cell.workers]
    return {name: value for part in parts for name, value in part.items()}


@pytest.mark.parametrize(("lane", "arm", "profile"), FITS)
def test_an_arm_is_planned_wherever_it_fits(lane: str, arm: str, profile: str) -> None:
    found, fleet = made(lane, arm, profile), spec.profile(profile)
    assert found.contract == LANES[lane].arms[arm].contracts[profile]
    assert found.contract in contract.names()
    assert found.cells
    assert not [word for command in commands(found) for word in command if re.search(r"\$\{", word)]
    assert plan.render(found)
    # In place in an interpreter that is given (SERVER_PYTHON=), only that can say its versions.
    assert found.pins or (found.containers is None and not found.environments["server"].locks)
    busy = {host.name for host in found.hosts}
    assert len(busy) == fleet.hosts
    assert sum(host.ranks for host in found.hosts) == found.ranks == fleet.ranks
    assert LANES[lane].workload.driver == "batch" or found.services


@pytest.mark.parametrize(("lane", "arm", "profile"), [row for row in FITS if row[0] != "llmd"])
def test_an_arm_arms_the_hook(lane: str, arm: str, profile: str) -> None:
    """Without it nothing shows that no buffer was there: sglang/dense on one H200 was no row for
    want of a transport of its contract's name (2026-12-01). Routing is judged by its own logs."""
    assert given(made(lane, arm, profile))["LANE_EVIDENCE"] == "1"


def told(lane: str, arm: str, profile: str, launcher: str) -> plan.Plan | None:
    """The plan of a row with its hosts; None where a launcher that is asked for refuses it."""
    fleet = spec.profile(profile)
    named = ",".join(f"10.0.0.{n + 1}" for n in range(fleet.hosts)) if fleet.hosts > 1 else ""
    refusals = (ConfigError,) if launcher else ()
    with contextlib.suppress(*refusals):
        return made(lane, arm, profile, hosts=named, launcher=launcher)
    return None


@pytest.mark.parametrize("launcher", ["", "kubernetes"])
@pytest.mark.parametrize(("lane", "arm", "profile"), FITS)
def test_the_manifest_of_a_run_as_planned_is_not_refuted(
    lane: str, arm: str, profile: str, launcher: str
) -> None:
    """A rule that no run of an arm can meet makes it a row that cannot be proven."""
    found = told(lane, arm, profile, launcher)
    if found is None:
        return
    timings = {f"cell {cell}": 10.0 for cell in found.cells}
    whole = {"state": "complete", "started": "2026-11-30T11:00:00.000+00:00", "timings": timings}
    written = msgspec.to_builtins(drop._first(found)) | whole
    manifest = msgspec.convert(
        written | {"ended": "2026-11-30T12:00:00.000+00:00"}, Manifest, strict=False
    )
    wrong = {x.id: x.actual for x in row.checks(manifest, LANES[lane]) if x.outcome != "met"}
    # In place in an image's own interpreter only that can say its versions.
    server = found.environments["server"]
    unsaid = found.containers is None and not server.locks
    unasked = {"manifest": f"no version of {found.engine} is pinned"} if unsaid else {}
    assert wrong in ({}, unasked)


@pytest.mark.parametrize(
    ("lane", "arm", "held"),
    [
        ("vllm", "epnc8", {"vllm": "0.24.0", "nvidia-nccl-cu13": "2.30.4", "aiperf": "0.10.0"}),
        ("vllm", "v1-ll", {"vllm": "0.24.0", "nvidia-nvshmem-cu13": "3.7.0"}),  # over the lock's
        ("sglang", "v2-native", {"nvidia-nccl-cu13": "2.31.2", "sgl-deep-ep": "0.1.2.post1"}),
        ("trtllm", "seam", {"tensorrt-llm": "0.21.0", "nvidia-nccl-cu13": "2.30.4"}),
        ("llmd", "router", {"vllm-router": "0.1.17", "vllm": "0.24.0"}),
    ],
)
def test_a_printed_plan_says_what_its_images_are_built_with(
    lane: str, arm: str, held: dict[str, str]
) -> None:
    found = made(lane, arm, "p5en-x2").pins
    assert found | held == found
    assert lane != "trtllm" or "torch" not in found  # its wheel brings its own, in no lock


@pytest.mark.parametrize(("lane", "arm", "profile"), REST)
def test_an_arm_is_refused_elsewhere_and_the_reason_names_what_fits(
    lane: str, arm: str, profile: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        made(lane, arm, profile)
    assert "does not run on profile" in caught.value.message or "no setting" in caught.value.message
    fits = [name for _, other, name in FITS if other == arm] or list(LANES[lane].profiles)
    told = f"{caught.value.message} {caught.value.remedy}"
    assert any(name in told for name in fits)


@pytest.mark.parametrize(("lane", "arm", "profile"), FITS)
def test_every_variable_of_an_arm_has_a_reader_that_its_image_brings(
    lane: str, arm: str, profile: str
) -> None:
    image = spec.image(LANES[lane], arm, profile)
    faults = list(readers.faults(LANES[lane], image, given(made(lane, arm, profile))))
    assert faults == []


@pytest.mark.parametrize(("lane", "arm", "profile"), FITS)
def test_an_arm_asks_for_every_series_that_its_variables_need(
    lane: str, arm: str, profile: str
) -> None:
    """A variable that only our patches read says nothing to an engine without them."""
    found, table = made(lane, arm, profile), variables.load().series
    needed = {table[name] for name in given(found) if name in table}
    assert needed <= set(found.patches)
    assert {patches.load(patches.PATCHES / each).stack for each in needed} <= {found.stack}


def test_a_variable_that_our_patches_add_names_its_series() -> None:
    # Upstream's own in 0.5.23, which v2-native runs; in 0.5.11 SGLANG_DEEPEP_USE_V2 goes with it.
    # A meeting place is torch's; TensorRT-LLM's seam reads it too.
    upstream = {"SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "MASTER_ADDR", "MASTER_PORT"}
    added: dict[str, str] = {}
    for path in patches.PATCHES.glob("*/*/*.patch"):
        lines = [line for line in path.read_text().splitlines() if line.startswith("+")]
        folder = str(path.parent.relative_to(patches.PATCHES))
        added[folder] = "\n".join([added.get(folder, ""), *lines])
    names = {name for row in FITS for name in given(made(*row))} - upstream
    ours = {n for n in names if any(re.search(rf"\b{n}\b", text) for text in added.values())}
    table = variables.load().series
    assert ours == set(table)
    for name, series in table.items():
        assert re.search(rf"\b{name}\b", added[series]), name


def test_a_variable_given_by_env_asks_for_its_series() -> None:
    plain = made("vllm", "epnc1", "h200x2")
    assert plain.patches == {}
    assert list(made("vllm", "epnc1", "h200x2", env=("EP_NUM_COMMS=2",)).patches) == [
        "deepep/b306af06"
    ]


def test_no_reader_is_stated_for_a_variable_that_nobody_sets() -> None:
    seen: dict[str, set[str]] = {name: set() for name in LANES}
    for lane, arm, profile in FITS:
        seen[lane] |= set(given(made(lane, arm, profile)))
    # What HOSTS= adds for a host whose interface it names.
    seen["vllm"] |= {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    assert list(readers.unused(LANES, seen)) == []


@drops.needs_published
@pytest.mark.parametrize(("arm", "profile"), [row[1:] for row in FITS if row[0] == "trtllm"])
def test_trtllm_is_given_options_that_its_pinned_release_took(arm: str, profile: str) -> None:
    """TensorRT-LLM's wheel cannot be had here, so no parser can be asked; what 0.21.0 was started
    with on 2026-07-07, and took, stands in a published log. Its settings file it prints, too."""
    log = drops.PUBLISHED / "trtllm-deepep-dropin-20260707" / "trtllm" / "serve_log_head.log"
    text = log.read_text(errors="replace")
    started = next(line for line in text.splitlines() if line.startswith("+ mpirun "))
    asked = shlex.split(started.partition("trtllm-serve ")[2])
    server = made("trtllm", arm, profile).services[0].command
    ours = server[server.index("trtllm-serve") + 1 :]
    given, values = ({w: v for w, v in zip(words, [*words[1:], ""], strict=True)
                      if w.startswith("-")} for words in (ours, asked))  # fmt: skip
    assert given.keys() <= values.keys()
    assert {w for w in given if given[w] != values[w]} == {
        "--host", "--port", "--extra_llm_api_options",
    }  # fmt: skip
    assert (ours[0], asked[0]) == ("serve", "serve")
    options = yaml.safe_load((paths.LANES / "trtllm" / "options.yaml").read_text())
    assert options.pop("enable_attention_dp") is True  # without it no all-to-all is selected
    for name, value in options.items():
        assert re.search(rf"PyTorchConfig\(.*\b{name}='?{value}\b", text), name
    env = made("trtllm", arm, profile).services[0].env
    assert arm != "seam" or all(
        f"-x {name}={env[name]} " in started
        for name in ("TRTLLM_CAN_USE_DEEP_EP", "TRTLLM_MOE_DISABLE_ALLTOALLV")
    )


def test_a_fleet_of_several_hosts_shows_what_each_of_them_runs() -> None:
    found = made("vllm", "epnc8", "p5en-x2")
    roles = [(service.name, service.host) for service in found.services]
    assert roles == [("server", "host-1"), ("worker", "host-2")]
    server, worker = (service.command for service in found.services)
    assert "--headless" in worker
    assert "--data-parallel-start-rank=8" in worker
    assert [w for w in server if w.startswith("--data-parallel-address")] == [
        w for w in worker if w.startswith("--data-parallel-address")
    ]
    assert "--headless" not in server
    assert "worker" not in [s.name for s in made("vllm", "epnc1", "h200x2").services]


def test_every_transport_of_an_arm_on_efa_sets_what_its_fabric_needs() -> None:
    for lane, arm, profile in FITS:
        fabric = spec.profile(profile).fabric
        if fabric.kind == "efa":
            name = LANES[lane].arms[arm].contracts[profile]
            env = variables.of(name, profile)
            assert env.get("FI_PROVIDER") == fabric.provider, f"{lane}/{arm}: {name}"


def test_the_settings_of_a_transport_follow_profile_and_likeness() -> None:
    p5en = variables.of("v2-efa-proxy", "p5en-x2")
    assert (p5en["NCCL_NET"], p5en["EP_EFA_MAX_QPS"]) == ("Libfabric", "2")
    assert "EP_EFA_MAX_QPS" not in variables.of("v2-efa-proxy", "p5-x2")
    assert variables.of("v2-efa-gda", "p5en-x2")["NCCL_GIN_TYPE"] == "5"
    assert variables.of("sglang-seam-efa-proxy", "p5en-x2") == p5en
    assert variables.of("published-2026-07-vllm", "p5en-x2") == {}


def test_every_transport_is_the_name_of_a_contract_and_every_image_one_of_the_graph() -> None:
    for name in variables.load().transport:
        assert contract.digest(name)
    known = {*images.targets(), *images.parents().values()}
    for name, reader in readers.readers().items():
        assert set(reader.image) <= known, name


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"OFI_NCCL_GIN_MAX_REQUESTS": "512"}, "is set and stands under `dropped`"),
        ({"NCCL_NOBODY": "1"}, "nobody is stated to read it"),
        ({"EP_NUM_COMMS": "8"}, "read by deepep-v2, which image vllm-v1 does not bring"),
        ({"NVSHMEM_DEBUG": "INFO", "NCCL_DEBUG": "INFO"}, ""),
    ],
)
def test_a_variable_nobody_reads_is_found(env: dict[str, str], said: str) -> None:
    faults = list(readers.faults(LANES["vllm"], "vllm-v1", env))
    assert [said in fault for fault in faults] == ([True] if said else [])


def test_an_arm_may_sweep_other_cells_than_the_lane() -> None:
    lane = LANES["vllm"]
    assert list(spec.cells(lane, "epnc1")) == ["c4", "c8", "c32"]
    assert "decode-c32" in spec.cells(lane, "v1-ll")
    assert list(spec.cells(lane, "v1-ll", ["c8"])) == ["c8"]
    cell = made("vllm", "v1-ll", "p5en-x2", cells=("prefill-c4",)).cells["prefill-c4"]
    assert (cell.isl, cell.osl, cell.requests) == (2048, 128, 64)
    at = cell.command.index("--synthetic-input-tokens-mean")
    assert cell.command[at + 1] == "2048"
