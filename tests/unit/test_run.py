"""A run leaves a readable drop and no trace, however it ends.

The engine and AIPerf are stand-ins here (tests/unit/standin): what is tested is the harness around
them. The same faults against the real ones are in tests/lanes.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from lanekit import drop, machine, planning, process, run, triage, verify
from lanekit.errors import CellFailed, ServerDied
from lanekit.manifest import Manifest
from lanekit.progress import Progress
from lanekit.run import Run

STANDIN = Path(__file__).parent / "standin"


class Lane:
    """The stand-in lane in a scratch checkout."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.results = scratch / "results"
        self.children: list[subprocess.Popen[str]] = []
        self.name = "standin"
        self.bin = scratch / "bin"
        self.bin.mkdir()
        (self.bin / "python").symlink_to(sys.executable)
        (self.bin / "aiperf").symlink_to(STANDIN / "aiperf")

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start a run."""
        given = () if "--results" in args else ("--results", str(self.results))
        command = [sys.executable, str(STANDIN / "driver.py"), str(self.scratch), "run", self.name]
        python = ("--server-python", sys.executable, "--aiperf-python", str(self.bin / "python"))
        child = subprocess.Popen(
            [*command, *python, *given, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.children.append(child)
        return child

    def end(self, *args: str) -> tuple[int, str]:
        """A whole run: its exit code and what it said."""
        child = self.start(*args)
        said, _ = child.communicate(timeout=60)
        return child.returncode, said

    def manifest(self, results: Path | None = None) -> Manifest:
        """The manifest of the newest drop."""
        return drop.read(max((results or self.results).glob("2*")))

    def reached(self, state: str) -> Manifest:
        """Wait until the newest drop says `state`."""
        return self.until(lambda: (found := self.manifest()).state == state and found)

    def until(self, happened: Callable[[], Manifest | bool]) -> Manifest:
        """Wait until something is so."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                if isinstance(found := happened(), Manifest):
                    return found
            time.sleep(0.02)
        pytest.fail("it did not happen within 30 s")

    def strays(self, manifest: Manifest) -> list[int]:
        """What is left of the sessions a run started."""
        leaders = {process.pid for process in manifest.processes}
        left = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                alive = psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
                if os.getsid(pid) in leaders and alive:
                    left.append(pid)
        return left


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    made = Lane(tmp_path)
    yield made
    for child in made.children:
        if child.poll() is None:
            child.terminate()
            child.communicate(timeout=60)


def sweeping(lane: Lane, what: str = "aiperf") -> Callable[[], Manifest | bool]:
    """Whether a cell is being taken."""

    def happened() -> Manifest | bool:
        manifest = lane.manifest()
        return manifest if any(what in each.what for each in manifest.processes) else False

    return happened


def test_a_run_to_its_end_leaves_a_sealed_drop_and_no_process(lane: Lane) -> None:
    code, said = lane.end("--cells", "quick")
    manifest = lane.manifest()
    assert manifest.state == "complete", said
    assert "logs/" + manifest.plan["hosts"][0]["name"] + "-server.log" in manifest.files
    assert "aiperf/quick/console.log" in manifest.files
    assert {"install", "startup", "cell quick", "wall"} <= set(manifest.timings)
    assert len(manifest.processes) == 2
    assert lane.strays(manifest) == []
    assert code != 0, "a stand-in must never be proven"


def test_the_nics_are_read_before_and_after_the_sweep(lane: Lane) -> None:
    port = lane.scratch / "infiniband" / "rdmap79s0" / "ports" / "1" / "hw_counters"
    port.mkdir(parents=True)
    (port / "tx_bytes").write_text("4096\n")
    (port / "rdma_write_bytes").write_text("7\n")
    _, said = lane.end("--cells", "quick")
    assert lane.manifest().state == "complete", said
    (host,) = max(lane.results.glob("2*")).glob("host/*.json")
    one = {"rdmap79s0": {"tx_bytes": 4096, "rdma_write_bytes": 7}}
    found = json.loads(host.read_text())
    assert found["hw_counters"] == {"before": one, "after": one}
    assert found["host"] == host.stem, "what the doctor had written is kept"


def test_a_server_that_dies_at_start_is_noticed_at_once(lane: Lane) -> None:
    code, said = lane.end("--arm", "dies", "--cells", "quick")
    assert code == 2
    assert "exit status 1" in said
    assert "engine: no such device" in said
    manifest = lane.manifest()
    assert manifest.state == "failed"
    assert "no such device" in (manifest.failure or "")


def test_prompts_of_the_given_lengths_come_before_the_first_cell(lane: Lane) -> None:
    lane.end("--arm", "prefilled", "--cells", "quick")
    manifest = lane.manifest()
    assert manifest.state == "complete"
    log = next(max(lane.results.glob("2*")).glob("logs/*-server.log")).read_text()
    said = [line.removeprefix("engine: ") for line in log.splitlines() if "engine: " in line]
    assert said == ["prompt of 7 tokens", "prompt of 70 tokens"]


def test_a_prompt_that_is_not_answered_ends_the_start(lane: Lane) -> None:
    code, said = lane.end("--arm", "short", "--cells", "quick")
    assert code == 2
    assert "a prompt of 70 tokens was not answered" in said
    assert "cell quick" not in lane.manifest().timings


def test_a_server_killed_in_the_middle_of_a_cell_ends_the_cell(lane: Lane) -> None:
    child = lane.start("--cells", "endless")
    manifest = lane.until(sweeping(lane))
    os.kill(manifest.processes[0].pid, signal.SIGKILL)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 2
    assert "server" in said
    assert "signal SIGKILL" in said
    manifest = lane.manifest()
    assert manifest.state == "failed"
    assert lane.strays(manifest) == []


def test_a_killed_aiperf_is_a_failed_cell(lane: Lane) -> None:
    child = lane.start("--cells", "endless")
    manifest = lane.until(sweeping(lane))
    os.kill(manifest.processes[1].pid, signal.SIGKILL)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 2
    assert "endless: AIPerf ended with signal SIGKILL" in said
    assert lane.strays(lane.manifest()) == []


def test_a_cell_ends_by_its_deadline(lane: Lane) -> None:
    code, said = lane.end("--cells", "late")
    assert code == 2
    assert "late: AIPerf was not done within its 1 s" in said
    assert lane.strays(lane.manifest()) == []


def test_a_load_generator_that_will_wait_for_ever_ends_its_cell_at_once(lane: Lane) -> None:
    """AIPerf 0.10.0 waited until its deadline of half an hour (2026-12-01); here it has 600 s."""
    code, said = lane.end("--cells", "torn")
    assert code == 2
    assert "torn: AIPerf said 'Failed to decode conversation data'" in said
    assert "Run the lane again" in said
    assert lane.strays(lane.manifest()) == []
    first = triage.triage(max(lane.results.glob("2*"))).first
    assert first is not None
    assert first.signature is not None
    assert first.signature.id == "aiperf-prompt-torn"


def test_a_start_without_a_word_says_why(
    bare: machine.Machine, checkout: Path, tmp_path: Path
) -> None:
    """A server that says nothing is waited for: 30 to 45 s of `no line yet` (2026-12-01)."""
    made = planning.make(planning.Options(lane="vllm", profile="cpu"), bare)
    made = msgspec.structs.replace(made, drop=str(tmp_path / "drop"), ready_s=1)
    shown: list[str] = []
    progress = Progress()
    progress.now = shown.append  # type: ignore[method-assign, assignment]
    started = Run(made, drop.Drop.create(made), progress)
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    service = msgspec.structs.replace(made.services[0], command=tuple(silent))
    started._launcher.start(service, dict(os.environ), tmp_path / "here-server.log")
    with pytest.raises(ServerDied, match="no completion came back"):
        started._await_completion(time.monotonic())
    started._launcher.stop()
    assert all("engines load their libraries first" in each for each in shown)
    assert shown


def test_what_compiles_does_so_before_the_ranks_start_and_keeps_it(lane: Lane) -> None:
    lane.name = "warmed"
    _, said = lane.end()
    manifest = lane.manifest()
    assert manifest.state == "complete", said
    assert [each.what for each in manifest.processes] == ["batch warm", "batch quick"]
    assert {"warm", "cell quick"} <= set(manifest.timings)
    drop, host = max(lane.results.glob("2*")), manifest.plan["hosts"][0]["name"]
    assert (drop / "warm" / f"{host}-warm.log").read_text() == (
        f"compiling in {lane.scratch}/cache/inductor\n"
    )
    assert [path.name for path in drop.glob("logs/*")] == [f"{host}-quick.log"]


def test_a_warm_up_that_fails_ends_the_run_before_the_ranks_start(lane: Lane) -> None:
    lane.name = "warmed"
    code, said = lane.end("--arm", "broken")
    manifest = lane.manifest()
    assert code == 2
    assert "warm: the warm-up ended with exit status 3; it said last:" in said
    assert "compiling in" in said
    assert (manifest.state, manifest.stage) == ("failed", "warming")
    assert [each.what for each in manifest.processes] == ["batch warm"]


def test_a_host_that_is_late_with_its_warm_up_is_named(
    bare: machine.Machine, checkout: Path, tmp_path: Path
) -> None:
    class Late(process.ProcessTask):
        def __init__(self) -> None:
            """Nothing runs: only who is late is asked."""

        def late(self) -> list[str]:
            return ["lanes-b"]

    made = planning.make(planning.Options(lane="vllm", profile="cpu"), bare)
    made = msgspec.structs.replace(made, drop=str(tmp_path / "drop"))
    cell = msgspec.structs.replace(made.cells["c4"], deadline_s=5)
    run = Run(made, drop.Drop.create(made), Progress())
    with pytest.raises(CellFailed) as caught:
        run._watch("warm", cell, Late(), time.monotonic() - 6)
    assert caught.value.message == (
        "warm: the warm-up was not done within its 5 s, still running on host lanes-b"
    )
    assert "warm_s" in caught.value.remedy


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_leaves_nothing_running(lane: Lane, number: signal.Signals) -> None:
    child = lane.start("--cells", "endless")
    lane.until(sweeping(lane))
    child.send_signal(number)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 2
    assert f"stopped by {number.name}" in said
    manifest = lane.manifest()
    assert manifest.state == "interrupted"
    assert lane.strays(manifest) == []


def test_an_interrupted_start_leaves_nothing_running(lane: Lane) -> None:
    child = lane.start("--cells", "endless")
    lane.until(sweeping(lane, "server"))
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    manifest = lane.manifest()
    assert manifest.state == "interrupted"
    assert lane.strays(manifest) == []


def test_the_next_run_ends_what_a_killed_one_left(lane: Lane) -> None:
    child = lane.start("--cells", "endless")
    dead = lane.until(sweeping(lane))
    child.kill()
    child.communicate(timeout=60)
    assert lane.strays(dead), "the test must have something to clean"
    assert lane.manifest().state == "sweeping"
    time.sleep(1.1)  # drops are named by the second
    _, said = lane.end("--cells", "quick")
    assert "ended what a killed run left" in said
    assert lane.strays(dead) == []


def test_a_second_run_at_once_is_refused_and_the_first_goes_on(lane: Lane) -> None:
    child = lane.start("--cells", "endless")
    lane.until(sweeping(lane))
    code, said = lane.end("--cells", "quick")
    assert code == 2
    assert "another run is under way" in said
    assert child.poll() is None


def test_a_signal_while_the_server_is_being_stopped_waits_for_it(lane: Lane) -> None:
    child = lane.start("--arm", "stubborn", "--cells", "quick")
    manifest = lane.until(lambda: "cell quick" in (m := lane.manifest()).timings and m)
    time.sleep(0.5)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert lane.strays(manifest) == []


def test_a_closed_output_does_not_keep_a_run_from_ending_what_it_started(lane: Lane) -> None:
    child = lane.start("--cells", "endless")
    manifest = lane.until(sweeping(lane))
    assert child.stdout is not None
    child.stdout.close()
    child.send_signal(signal.SIGHUP)
    child.wait(timeout=60)
    assert lane.strays(manifest) == []


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * 9000, b"/no/such/drop", b"/etc"])
def test_a_lock_that_names_nonsense_stops_nobody(lane: Lane, content: bytes) -> None:
    (lane.scratch / "cache").mkdir()
    (lane.scratch / "cache" / "run.lock").write_bytes(content)
    lane.end("--cells", "quick")
    assert lane.manifest().state == "complete"


def test_what_engine_and_aiperf_leave_beside_the_drop_is_removed(lane: Lane) -> None:
    lane.end("--cells", "quick")
    manifest = lane.manifest()
    assert manifest.scratch
    assert not Path(manifest.scratch).exists()


def test_an_interrupted_drop_says_how_far_it_came(lane: Lane) -> None:
    child = lane.start("--cells", "endless")
    lane.until(sweeping(lane))
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert lane.manifest().stage == "sweeping endless"
    assert (
        "it came as far as sweeping endless" in verify.verify(max(lane.results.glob("2*"))).reason
    )


def test_a_taken_port_is_refused_before_anything_starts(lane: Lane) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = lane.end("--cells", "quick", "--port", str(port))
    assert code == 2
    assert f"port {port} is taken" in said
    assert lane.manifest().processes == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    where = tmp_path / "tiny"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_disk_ends_the_run_and_the_drop_still_says_why(lane: Lane, tiny_disk: Path) -> None:
    code, said = lane.end("--arm", "chatty", "--cells", "endless", "--results", str(tiny_disk))
    assert code == 2, said
    assert "No space left on device" in said
    manifest = lane.manifest(tiny_disk)
    assert manifest.state == "failed"
    assert "No space left" in (manifest.failure or "")
    assert lane.strays(manifest) == []


def test_a_read_only_results_folder_is_refused_at_once(lane: Lane, tiny_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    code, said = lane.end("--cells", "quick", "--results", str(tiny_disk))
    assert code == 2
    assert "is no folder that can be written" in said
    assert "RESULTS=" in said


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("vm-server",), "ready 0"),
        (("vm-first", "vm-router"), "first: ready 0 | router: ready 1"),
        (("a-server", "b-server"), "a: ready 0 | b: ready 1"),
        ((), ""),
    ],
)
def test_progress_says_whose_words_they_are(
    tmp_path: Path, names: tuple[str, ...], shown: str
) -> None:
    logs = [tmp_path / f"{name}.log" for name in names]
    for number, log in enumerate(logs):
        log.write_text(f"INFO 11-30 19:10:08 ready {number}\n")
    assert run._last(logs) == shown
