"""The real CPU lane end to end: real vLLM, real AIPerf, real faults. Minutes; `make test-all`.

The first run makes the environments; the others find them. Every test asserts that nothing that
was started is left, and that the drop says how far the run came.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lanekit import drop, envs, model, paths, triage, verify
from lanekit.manifest import Manifest

pytestmark = pytest.mark.lane
START_S = 600.0  # two busy cores need minutes for what takes half a minute alone
TORN = next(x.literals[0] for x in triage.signatures() if x.id == "aiperf-prompt-torn")
LANE = (sys.executable, "-m", "lanekit", "run", "vllm", "--profile", "cpu")


class Lane:
    """Runs of the lane into one results folder."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.children: list[subprocess.Popen[str]] = []

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start a run in the background; what it says goes to a file."""
        said = (self.results.parent / f"said-{len(self.children)}.txt").open("w")
        child = subprocess.Popen(
            [*LANE, "--results", str(self.results), *args], stdout=said, stderr=said, text=True
        )
        self.children.append(child)
        return child

    def end(self, child: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for a run: its exit code and what it said."""
        code = child.wait(timeout=START_S + 600)
        said = self.results.parent / f"said-{self.children.index(child)}.txt"
        return code, said.read_text()

    def whole(self, *args: str) -> tuple[int, str]:
        """A run to its end: its exit code and what it said; once more where AIPerf tore a prompt,
        which is a race of its own that 0.12.0 has mended, and no fault of the lane."""
        code, said = self.end(self.start(*args))
        return self.end(self.start(*args)) if code and TORN in said else (code, said)

    def newest(self) -> Path:
        """The newest drop."""
        return max(self.results.glob("2*"))

    def until(self, so: Callable[[Manifest], bool], child: subprocess.Popen[str]) -> Manifest:
        """Wait until the newest manifest is so."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and child.poll() is None:
            with contextlib.suppress(Exception):
                manifest = drop.read(self.newest())
                if so(manifest):
                    return manifest
            time.sleep(0.1)
        pytest.fail(f"it did not come so far: {self.end(child)}")

    def strays(self) -> list[str]:
        """Everything alive in a session that some run of this folder started."""
        leaders = set()
        for manifest in self.results.glob("2*/manifest.json"):
            leaders |= {process.pid for process in drop.read(manifest.parent).processes}
        left = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                process = psutil.Process(pid)
                if os.getsid(pid) in leaders and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{pid} {process.cmdline()}")
        return left


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    made = Lane(tmp_path / "results")
    yield made
    for child in made.children:
        if child.poll() is None:
            child.terminate()
            child.wait(timeout=120)
    assert made.strays() == []


def sweeping(manifest: Manifest) -> bool:
    """Whether a cell is being taken and its load has begun."""
    return manifest.state == "sweeping" and any("aiperf" in p.what for p in manifest.processes)


def plan_of(lane: str) -> dict[str, Any]:
    """The printed plan of a lane on this machine's processors."""
    command = [sys.executable, "-m", "lanekit", "run", lane, "--profile", "cpu", "--plan"]
    plan: dict[str, Any] = json.loads(subprocess.check_output(command))
    return plan


def requests_served(path: Path) -> int:
    """How many completions the server's log shows."""
    return sum(log.read_bytes().count(b"POST /v1/completions") for log in path.glob("logs/*.log"))


def test_the_whole_sweep_is_proven_and_prints_its_rows(lane: Lane) -> None:
    code, said = lane.whole()
    assert code == 0, said
    path = lane.newest()
    manifest = drop.read(path)
    assert manifest.state == "complete"
    assert manifest.git.get("commit")
    assert {"install", "startup", "cell c4", "cell c8", "cell c32", "wall"} <= set(manifest.timings)
    verdict = verify.verify(path)
    assert verdict.result == "proven"
    assert [(cell.name, cell.requests, cell.errors) for cell in verdict.cells] == [
        ("c4", 40, 0), ("c8", 64, 0), ("c32", 128, 0),
    ]  # fmt: skip
    assert json.loads((path / drop.VERDICT).read_text())["result"] == "proven"
    for cell in ("c4", "c8", "c32"):
        assert f"vllm/floor/{cell} on cpu" in said
    assert "not comparable" in said
    assert "harness" in said


def test_a_cpu_drop_never_satisfies_an_efa_contract(lane: Lane) -> None:
    code, _ = lane.whole("--cells", "c4")
    assert code == 0
    log = next(lane.newest().glob("logs/*.log"))
    verdict = verify.verify(log, lane="vllm", arm="epnc1", profile="p5en-x2")
    assert verdict.result != "proven"


def test_an_engine_killed_in_the_middle_of_a_cell(lane: Lane) -> None:
    child = lane.start("--cells", "c32")
    manifest = lane.until(sweeping, child)
    while requests_served(lane.newest()) < 3:
        time.sleep(0.1)
    leader = manifest.processes[0].pid
    engine = [p for p in psutil.Process(leader).children() if "EngineCore" in " ".join(p.cmdline())]
    os.kill(engine[0].pid if engine else leader, signal.SIGKILL)
    code, said = lane.end(child)
    assert code == 2
    assert "server" in said
    found = drop.read(lane.newest())
    assert found.state == "failed"
    verdict = verify.verify(lane.newest())
    assert verdict.result == "no verdict"
    assert "incomplete, it came as far as sweeping c32" in verdict.reason


def test_aiperf_killed_in_the_middle_of_a_cell(lane: Lane) -> None:
    child = lane.start("--cells", "c32")
    manifest = lane.until(sweeping, child)
    os.kill(manifest.processes[-1].pid, signal.SIGKILL)
    code, said = lane.end(child)
    assert code == 2
    assert "c32: AIPerf ended with signal SIGKILL" in said
    assert drop.read(lane.newest()).state == "failed"


def test_interrupted_while_starting_then_killed_while_sweeping_then_sound(lane: Lane) -> None:
    child = lane.start("--cells", "c4")
    lane.until(lambda manifest: bool(manifest.processes), child)
    child.send_signal(signal.SIGINT)
    code, said = lane.end(child)
    assert code == 2
    assert "stopped by SIGINT" in said
    assert drop.read(lane.newest()).state == "interrupted"
    assert lane.strays() == []

    child = lane.start("--cells", "c32")
    lane.until(sweeping, child)
    child.kill()
    lane.end(child)
    assert lane.strays(), "the next run must have something to clean"
    assert "sweeping" in verify.verify(lane.newest()).reason

    code, said = lane.whole("--cells", "c4")
    assert code == 0, said
    assert "ended what a killed run left" in (lane.results.parent / "said-2.txt").read_text()


def test_aiperf_exits_0_with_failed_requests_and_is_refuted_all_the_same(lane: Lane) -> None:
    """Real AIPerf against a stand-in server that answers every fifth request with status 500."""
    given = plan_of("vllm")
    model.ensure(Path(given["model"]["path"]))
    envs.ensure(envs.spec("aiperf"), paths.CACHE / "envs", torch_index="none", say=print)
    driver = Path(__file__).parents[1] / "unit" / "standin" / "driver.py"
    run = subprocess.run(
        [
            *(sys.executable, str(driver), str(lane.results.parent), "run", "standin"),
            *("--arm", "flaky", "--cells", "load", "--model", given["model"]["path"]),
            *("--server-python", sys.executable, "--results", str(lane.results)),
            *("--aiperf-python", given["environments"]["aiperf"]["python"]),
        ],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    verdict = verify.verify(lane.newest())
    outcomes = {check.id: (check.outcome, check.actual) for check in verdict.checks}
    assert drop.read(lane.newest()).state == "complete", run.stdout + run.stderr
    assert outcomes["errors"][0] == "failed"
    assert outcomes["requests"][0] == "failed"
    assert verdict.cells[0].errors == 4


def test_a_model_directory_without_tokenizer_is_refused_before_anything_is_made(
    lane: Lane, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (model / "model.safetensors").write_bytes(b"\0" * 16)
    code, said = lane.end(lane.start("--model", str(model)))
    assert code == 2
    assert "tokenizer" in said
    assert not lane.results.exists()


def test_the_micro_lane_over_gloo_is_proven_and_can_be_cut_to_one_cell(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "results")
    command = [sys.executable, "-m", "lanekit", "run", "micro", "--profile", "cpu"]
    command += ["--cells", "decode", "--results", str(lane.results)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    verdict = verify.verify(lane.newest())
    assert verdict.result == "proven"
    assert {row.op for row in verdict.micro} >= {"dispatch", "combine", "pair", "all_to_all"}
    assert lane.strays() == []
