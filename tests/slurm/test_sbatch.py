"""The slurm launcher through a real controller and two nodes: real sbatch, srun and scancel.

In place (SERVER_PYTHON=): pyxis and enroot are not Debian's, so that form is only rendered
(tests/unit/test_slurm.py). Both nodes are this machine, so that ranks of the gloo arm meet on one
of them alone; on two a program shows what it was given.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.slurm.rig import Slurm

from lanekit import alone, drop, paths, triage, verify
from lanekit.manifest import Manifest

SLOW = """
import sys, time
print('up', flush=True)
time.sleep(600)
"""


@pytest.fixture
def run(slurm: Slurm, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts the micro lane through Slurm with an interpreter."""

    def start(python: str, *args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "lanekit", "run", "micro", "--profile=cpu",
                   "--launcher=slurm", "--cells=decode", f"--server-python={python}",
                   f"--results={tmp_path}", *args]  # fmt: skip
        return subprocess.Popen(command, env=slurm.environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    return start


@pytest.fixture
def sleeper(tmp_path: Path) -> str:
    """An interpreter whose program never ends: what it is asked to run does not matter."""
    path = tmp_path / "python"
    program = tmp_path / "sleep.py"
    program.write_text(SLOW)
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\n'
                    f"exec {sys.executable} {program}\n")  # fmt: skip
    path.chmod(0o755)
    return str(path)


def manifest(results: Path) -> Manifest:
    return drop.read(max(results.glob("2*")))


def running(slurm: Slurm, results: Path) -> bool:
    logs = list(results.glob("2*/logs/*.log"))
    return bool(logs) and b"up" in logs[0].read_bytes()


def until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            if so():
                return
        time.sleep(0.2)
    pytest.fail("it did not happen within 120 s")


def left(slurm: Slurm, results: Path) -> list[str]:
    """Jobs that wait or run, and processes with the mark of a run."""
    found = slurm.say("squeue", "--noheader", "--format=%i").split()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("LANEKIT_RUN", "").startswith(str(results)):
                found.append(f"pid {process.pid}")
    return found


def test_the_gloo_arm_through_sbatch_is_proven(
    slurm: Slurm, run: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    python = paths.CACHE / "envs" / "vllm-cpu" / "bin" / "python"
    if not python.is_file():
        pytest.skip("needs the environment that `make lane-micro` makes")
    child = run(str(python))
    said, _ = child.communicate(timeout=900)
    assert child.returncode == 0, said
    path = max(tmp_path.glob("2*"))
    assert verify.verify(path).result == "proven"
    assert {"slurm/decode.sbatch", "slurm/decode-0.sh"} <= set(manifest(tmp_path).files)
    assert left(slurm, tmp_path) == []


def telling(folder: Path) -> str:
    """A Python that only says where it was started, and with what."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\n'
                       'echo "$SLURMD_NODENAME $*"\n')  # fmt: skip
    program.chmod(0o755)
    return str(program)


def test_each_node_gets_its_own_command_with_the_names_that_slurm_chose(
    slurm: Slurm, run: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = run(telling(tmp_path), "--profile=cpu-x2")
    said, _ = child.communicate(timeout=120)
    assert manifest(tmp_path).state == "complete", said
    logs = [max(tmp_path.glob("2*")) / "logs" / f"host-{n}-decode.log" for n in (1, 2)]
    for number, log in enumerate(logs):
        text = log.read_text()
        assert text.startswith(f"node-{number + 1} "), text
        assert f"--node-rank {number} " in text
        assert "--master-addr node-1 " in text
    assert left(slurm, tmp_path) == []


def test_named_nodes_keep_the_order_of_the_plan(
    slurm: Slurm, run: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = run(telling(tmp_path), "--profile=cpu-x2", "--hosts=node-2,node-1")
    said, _ = child.communicate(timeout=120)
    assert manifest(tmp_path).state == "complete", said
    text = (max(tmp_path.glob("2*")) / "logs" / "node-2-decode.log").read_text()
    assert text.startswith("node-2 ")
    assert "--node-rank 0 " in text
    assert "--master-addr node-2 " in text


def test_a_rank_that_is_killed_fails_the_job(
    slurm: Slurm, run: Callable[..., subprocess.Popen[str]], tmp_path: Path, sleeper: str
) -> None:
    child = run(sleeper)
    until(lambda: running(slurm, tmp_path))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[-1:] == [str(tmp_path / "sleep.py")]:
                process.kill()
    said, _ = child.communicate(timeout=120)
    assert child.returncode == 2
    assert "FAILED" in said
    assert "SIGKILL" in said or "137" in said
    assert manifest(tmp_path).state == "failed"
    first = triage.triage(max(tmp_path.glob("2*"))).first
    assert first is not None
    assert first.who[0] == "node-1"
    assert left(slurm, tmp_path) == []


def test_a_node_that_is_lost_ends_the_job_and_is_named(
    slurm: Slurm, run: Callable[..., subprocess.Popen[str]], tmp_path: Path, sleeper: str
) -> None:
    child = run(sleeper)
    until(lambda: running(slurm, tmp_path))
    slurm.say("scontrol", "update", "nodename=node-1", "state=down", "reason=lost")
    try:
        said, _ = child.communicate(timeout=120)
    finally:
        slurm.say("scontrol", "update", "nodename=node-1", "state=idle")
    assert child.returncode == 2
    assert "NODE_FAIL" in said
    assert "node-1" in (manifest(tmp_path).failure or "")
    first = triage.triage(max(tmp_path.glob("2*"))).first
    assert first is not None
    assert first.who[0] == "node-1"
    until(lambda: left(slurm, tmp_path) == [])


def test_an_interrupted_run_cancels_its_job(
    slurm: Slurm, run: Callable[..., subprocess.Popen[str]], tmp_path: Path, sleeper: str
) -> None:
    child = run(sleeper)
    until(lambda: running(slurm, tmp_path))
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=120)
    assert child.returncode == 2
    assert manifest(tmp_path).state == "interrupted"
    assert left(slurm, tmp_path) == []


def test_the_next_run_cancels_what_a_killed_one_left(
    slurm: Slurm,
    run: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    sleeper: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(os.environ, "SLURM_CONF", slurm.environment["SLURM_CONF"])
    child = run(sleeper)
    until(lambda: running(slurm, tmp_path))
    child.kill()
    child.communicate(timeout=60)
    assert left(slurm, tmp_path), "the test must have something to clean"
    with alone.holding(str(tmp_path / "next"), print):
        pass
    assert left(slurm, tmp_path) == []


def test_sbatch_that_rejects_says_why_and_leaves_nothing(
    slurm: Slurm, run: Callable[..., subprocess.Popen[str]], tmp_path: Path, sleeper: str
) -> None:
    slurm.say("scontrol", "update", "partition=all", "state=inactive")
    try:
        child = run(sleeper)
        said, _ = child.communicate(timeout=60)
    finally:
        slurm.say("scontrol", "update", "partition=all", "state=up")
    assert child.returncode == 2
    assert "sbatch rejected" in said
    assert "partition" in said.lower()
    assert "sbatch rejected" in (manifest(tmp_path).failure or "")
    assert left(slurm, tmp_path) == []


def test_a_controller_that_does_not_answer_is_an_error(
    slurm: Slurm, tmp_path: Path, sleeper: str
) -> None:
    command = [sys.executable, "-m", "lanekit", "run", "micro", "--profile=cpu",
               "--launcher=slurm", "--cells=decode", f"--server-python={sleeper}",
               f"--results={tmp_path}"]  # fmt: skip
    dead = tmp_path / "slurm.conf"
    text = (slurm.root / "slurm.conf").read_text()
    dead.write_text(text.replace("SlurmctldPort=", "SlurmctldPort=1 # "))
    env = {**slurm.environment, "SLURM_CONF": str(dead), "SLURM_TIMEOUT": "2"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "sbatch" in done.stderr
    assert manifest(tmp_path).state == "failed"
