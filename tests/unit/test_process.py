"""Processes are ended by PID and start time, with all that they forked, and nothing else is."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lanekit import process
from lanekit.errors import ServerDied
from lanekit.manifest import Process
from lanekit.plan import Service

STUBBORN = (
    "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(600)"
)
FAMILY = (
    "import subprocess,sys,time;"
    "subprocess.Popen([sys.executable,'-c','import time; time.sleep(600)']);"
    "print('up', flush=True); time.sleep(600)"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs" / "here-server.log"


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    yield child
    child.kill()
    child.wait()


def service(*command: str) -> Service:
    return Service("server", "here", command, {})


def start(code: str, log: Path) -> tuple[process.ProcessLauncher, Process]:
    launcher = process.ProcessLauncher()
    started = launcher.start(service(sys.executable, "-c", code), dict(os.environ), log)
    deadline = time.monotonic() + 30
    while b"up" not in log.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.02)
    return launcher, started


def check_until_dead(launcher: process.ProcessLauncher) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        launcher.check()


def session(pid: int) -> list[int]:
    found = []
    for each in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getsid(each) == pid and psutil.Process(each).status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def test_stop_ends_a_process_and_what_it_forked(log: Path) -> None:
    launcher, started = start(FAMILY, log)
    assert len(session(started.pid)) == 2
    launcher.stop()
    assert session(started.pid) == []


def test_a_process_that_ignores_sigterm_is_killed(log: Path) -> None:
    launcher, started = start(STUBBORN, log)
    begin = time.monotonic()
    process.end([started], grace_s=0.3)
    assert session(started.pid) == []
    assert time.monotonic() - begin >= 0.3
    launcher.stop()


def test_orphans_of_a_dead_leader_are_found_by_its_session(log: Path) -> None:
    _, started = start(FAMILY, log)
    psutil.Process(started.pid).kill()
    psutil.Process(started.pid).wait()
    assert len(session(started.pid)) == 1
    assert len(process.end([started])) == 1
    assert session(started.pid) == []


def test_a_reused_pid_is_left_alone(stranger: subprocess.Popen[bytes]) -> None:
    old = Process(
        pid=stranger.pid, started=psutil.Process(stranger.pid).create_time() - 60, what="x"
    )
    assert process.end_left("/drop", [old]) == []
    assert stranger.poll() is None


def test_a_marked_process_is_found_without_any_record(tmp_path: Path) -> None:
    marked = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, process.MARK: str(tmp_path)},
        start_new_session=True,
    )
    assert process.end_left(f"{tmp_path}-other", []) == []
    assert process.end_left(str(tmp_path), []) == [marked.pid]
    assert marked.wait() == -15


def test_what_has_no_readable_environment_is_known_by_a_recorded_session(log: Path) -> None:
    """vLLM's and AIPerf's processes overwrite theirs with a title; an empty one looks the same."""
    launcher = process.ProcessLauncher()
    started = launcher.start(service(sys.executable, "-c", FAMILY), {}, log)
    while b"up" not in log.read_bytes():
        time.sleep(0.02)
    time.sleep(1.1)  # a process that has only begun is never judged by its environment
    assert process.end_left("/drop", []) == []
    assert len(process.end_left("/drop", [started])) == 2
    assert session(started.pid) == []
    launcher.stop()


def test_init_and_this_process_are_never_ended() -> None:
    forged = [Process(pid=pid, started=0.0, what="x") for pid in (0, 1, os.getpid())]
    assert process.end_left("/drop", forged) == []


def test_an_ended_service_is_noticed_with_its_status_and_last_words(log: Path) -> None:
    launcher, _ = start("print('up'); import sys; print('no such model'); sys.exit(3)", log)
    with pytest.raises(ServerDied, match=r"exit status 3.*\n(.*\n)*.*no such model"):
        check_until_dead(launcher)
    launcher.stop()


def test_a_command_that_does_not_exist_is_an_error_with_a_remedy(log: Path) -> None:
    with pytest.raises(ServerDied, match="cannot start server: /no/such/python") as caught:
        process.ProcessLauncher().start(service("/no/such/python"), {}, log)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit status 0"), (-9, "signal SIGKILL"), (-99, "signal 99")]
)
def test_an_outcome_in_words(code: int, words: str) -> None:
    assert process.outcome(code) == words


def test_the_tail_of_a_log_survives_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\n" * 100_000 + b"\xff\x00last\n")
    assert process.tail(path, 1) == ["\ufffd\x00last"]
    assert process.tail(tmp_path / "none", 1) == []


@pytest.mark.parametrize(
    "beside",
    [
        "[W1130 18:25:03.843120488 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy",
        "[rank0]:[W1130 18:25:03.843120488 ProcessGroupGloo.cpp:1] Warning: no interface",
        "W1130 18:24:04.026000 3923 torch/utils/flop_counter.py:29] triton not found",
        "(APIServer pid=3923) WARNING 11-30 18:24:23 [arg_utils.py:1590] The global random seed",
        "x/torch/cuda.py:1: UserWarning: no CUDA here\n  warnings.warn(",
        "host-1:5:5 [0] NCCL INFO Channel 21/0 : 0[0] -> 1[1] via P2P/CUMEM",
        "[lane-evidence] v=1 armed host=vm pid=9654 rank=0 local_rank=0 world=1 nccl=2.28.9",
        "\x1b[33mWARN\x1b[0m something\n\n(EngineCore pid=7) \n",
    ],
)
def test_progress_shows_what_the_program_says_itself(tmp_path: Path, beside: str) -> None:
    log = tmp_path / "a.log"
    log.write_text(
        f"(EngineCore pid=7) \x1b[1mINFO\x1b[0m 11-30 18:25:04 loading shard 3\n{beside}\n"
    )
    assert process.said(log) == "loading shard 3"
    log.write_text(f"{beside}\n")
    assert process.said(log) == ""
    assert process.said(tmp_path / "none") == ""


def test_a_line_cut_by_the_window_is_no_word_of_anybody(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("x" * 70_000 + " end of a long one\n" + "  indented\n")
    assert process.said(log) == ""
    assert process.tail(log, 5) == ["  indented"]
    log.write_text("y" * 70_000)
    assert len(process.tail(log, 1)[0]) == 65536


def test_a_word_in_a_line_that_is_written_in_two_is_counted_once_it_is_whole(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    found = process.Occurrences(log, b"POST /v1")
    assert found.count() == 0, "no log yet"
    for piece, so_far in (("a POST", 0), (" /v1\n", 1), ("POST /v1", 1), (" POST /v1\n", 3)):
        with log.open("a") as stream:
            stream.write(piece)
        assert found.count() == so_far
