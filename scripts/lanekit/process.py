"""The `process` launcher: services in place, each in a session of its own, ended without a trace.

A process is known by PID and start time or by the run's mark in its environment, never by name.
Everything it forks stays in its session (setsid), and the kernel does not reuse a PID while a
session bears it.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import psutil

from lanekit.errors import ConfigError, LaneError, ServerDied
from lanekit.manifest import Process
from lanekit.plan import CellPlan, Service
from lanekit.prefix import ANSI

MARK: Final = "LANEKIT_RUN"  # in the environment of all that a run starts: the path of its drop
UNKILLABLE_S: Final = 10.0
GRACE_S: Final = 15.0  # vLLM's engine processes need a few seconds to leave by themselves


class Task(Protocol):
    """A program that runs to its own end, such as the load of a cell."""

    @property
    def processes(self) -> list[Process]:
        """How a later run finds it."""

    @property
    def log(self) -> Path:
        """What it says; of whoever failed first, where it is several programs."""

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""

    def outcome(self, code: int) -> str:
        """An exit status in words."""

    def late(self) -> list[str]:
        """The hosts where it still runs, as far as somebody knows."""

    def end(self, grace_s: float) -> None:
        """End it and all that it forked, and wait."""


class Launcher(Protocol):
    """What a run needs of a launcher."""

    def start(self, service: Service, env: Mapping[str, str], log: Path) -> Process:
        """Start one service on its host; its output goes to `log`."""

    def task(self, name: str, cell: CellPlan, env: Mapping[str, str], logs: Sequence[Path]) -> Task:
        """Start the program that takes the cell `name`; logs: the leader's, then each worker's."""

    def check(self) -> None:
        """Raise ServerDied when a service has ended, HostLost when a host is gone."""

    def logs(self) -> list[Path]:
        """The log of every service, the leader's first."""

    def stop(self) -> None:
        """End everything that was started, and wait for it."""


class ProcessTask:
    """A child process as a task."""

    def __init__(self, child: subprocess.Popen[bytes], started: Process, log: Path) -> None:
        self._child = child
        self.processes = [started]
        self.log = log

    def poll(self) -> int | None:
        """The exit status, or None while it runs; negative is a signal."""
        return self._child.poll()

    def outcome(self, code: int) -> str:
        """An exit status in words."""
        return outcome(code)

    def late(self) -> list[str]:
        """None by name: it is this machine."""
        return []

    def end(self, grace_s: float) -> None:
        """End its session and wait for it."""
        end(self.processes, grace_s)
        self._child.wait()


class ProcessLauncher:
    """Services as child processes of this one."""

    def __init__(self) -> None:
        self._children: dict[str, tuple[subprocess.Popen[bytes], Process, Path]] = {}

    def start(self, service: Service, env: Mapping[str, str], log: Path) -> Process:
        """Start one service in a session of its own. Raises ServerDied: the command cannot be
        started."""
        with log.open("ab") as stream:
            child, process = spawn(service.name, service.command, env, stream)
        self._children[service.name] = (child, process, log)
        return process

    def task(
        self, name: str, cell: CellPlan, env: Mapping[str, str], logs: Sequence[Path]
    ) -> ProcessTask:
        """Start a program in a session of its own. Raises ServerDied: the command cannot be
        started."""
        kind = "aiperf" if cell.requests else "batch"
        with logs[0].open("wb") as stream:
            return ProcessTask(*spawn(f"{kind} {name}", cell.command, env, stream), logs[0])

    def check(self) -> None:
        """Raise ServerDied, with the log's last words, when a service has ended."""
        for name, (child, process, log) in self._children.items():
            code = child.poll()
            if code is not None:
                raise ServerDied(
                    f"{name} (pid {process.pid}) ended with {outcome(code)}; its log ends:\n"
                    + "\n".join(f"    {line}" for line in tail(log, 12)),
                    remedy=f"Read {log}; `make triage RESULTS={log.parents[1]}` names the cause.",
                )

    def logs(self) -> list[Path]:
        """The log of every service."""
        return [log for _, _, log in self._children.values()]

    def stop(self) -> None:
        """End every service and all that it forked."""
        end([process for _, process, _ in self._children.values()])
        for child, _, _ in self._children.values():
            child.wait()
        self._children.clear()


def spawn(
    what: str, command: Sequence[str], env: Mapping[str, str], output: BinaryIO
) -> tuple[subprocess.Popen[bytes], Process]:
    """Start a command in its own session, its output going to a file. Raises ServerDied: the
    command cannot be started."""
    try:
        child = subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise ServerDied(
            f"cannot start {what}: {command[0]}: {error.strerror}",
            remedy="Check that the environment exists and the file can be run.",
        ) from error
    return child, Process(pid=child.pid, started=_started(child.pid), what=what)


def end(processes: Iterable[Process], grace_s: float = GRACE_S) -> list[int]:
    """End every process of the sessions that `processes` lead; returns the PIDs signalled.

    For children of this process: while one is not waited for, nobody else can have its PID. Raises
    LaneError: something would not die.
    """
    sessions = {process.pid for process in processes if process.pid > 1}
    return _end(lambda: [each for each in _all() if _session(each.pid) in sessions], grace_s)


def end_left(mark: str, processes: Iterable[Process], grace_s: float = GRACE_S) -> list[int]:
    """End what a dead run left: all that carries its mark, and the sessions of its processes.

    A process proves that it is the run's by MARK in its environment. One that overwrote its
    environment with a title, as vLLM and AIPerf do, has to be in a session that the run recorded or
    that holds a marked process. Whatever has an environment without the mark is left alone: PIDs
    are reused, clocks step, and a manifest may be anybody's. Raises LaneError: something would not
    die.
    """
    recorded = {process.pid for process in processes if process.pid > 1}
    return _end(lambda: left(mark, recorded), grace_s)


def left(drop: str, recorded: set[int]) -> list[psutil.Process]:
    """What is a run's: all that bears its mark, and the titled ones of its sessions (end_left)."""
    mark = f"{MARK}={drop}".encode()
    environs = {each: _environ(each.pid) for each in _all()}
    marked = {each for each, environ in environs.items() if mark in environ}
    sessions = recorded | {_session(each.pid) for each in marked}
    titled = {
        each
        for each, environ in environs.items()
        if not any(b"PATH=" in e for e in environ) and _settled(each)
    }
    return [each for each in environs if each in marked
            or (each in titled and _session(each.pid) in sessions)]  # fmt: skip


def marks(pids: Iterable[int]) -> set[str]:
    """The drops named by the marks of processes and of all that stand in their sessions."""
    sessions = {_session(pid) for pid in pids}
    found = {e for each in _all() if _session(each.pid) in sessions for e in _environ(each.pid)}
    return {os.fsdecode(e.partition(b"=")[2]) for e in found if e.startswith(f"{MARK}=".encode())}


def alive(process: Process) -> bool:
    """Whether a process that was recorded is still the one that has its PID."""
    with suppress(psutil.Error):
        found = psutil.Process(process.pid)
        began = abs(found.create_time() - process.started) < 0.1
        return began and found.status() != psutil.STATUS_ZOMBIE
    return False


def end_exactly(victims: Sequence[psutil.Process], grace_s: float = GRACE_S) -> list[int]:
    """End these processes and no other; psutil compares PID and start before every signal. Raises
    LaneError: one would not die."""

    def living() -> list[psutil.Process]:
        with suppress(psutil.Error):
            return [v for v in victims if v.is_running() and v.status() != psutil.STATUS_ZOMBIE]
        return []

    return _end(living, grace_s)


def _end(find: Callable[[], list[psutil.Process]], grace_s: float) -> list[int]:
    """SIGTERM, then after `grace_s` seconds SIGKILL, and at last give up aloud."""
    found = find()
    for victim in found:
        with suppress(psutil.Error):
            victim.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while alive := find():
        if time.monotonic() > deadline + UNKILLABLE_S:
            raise LaneError(
                f"cannot end pids {', '.join(str(each.pid) for each in alive)}",
                remedy="They do not react to SIGKILL: look at them before the next run.",
            )
        if time.monotonic() > deadline:
            for victim in alive:
                with suppress(psutil.Error):
                    victim.kill()
        time.sleep(0.05)
    return [victim.pid for victim in found]


def outcome(code: int) -> str:
    """An exit status in words; negative is a signal, as subprocess has it."""
    if code >= 0:
        return f"exit status {code}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def exited(code: int) -> str:
    """A container's exit status in words; above 128 it is a signal."""
    return outcome(code if code < 128 else 128 - code)


def asked(
    words: Sequence[str], env: Mapping[str, str], seconds: float, deaf: Callable[[str], LaneError]
) -> str:
    """What a command of a scheduler says; it finds its server as the user's own commands do. Raises
    ConfigError: it is not here; what `deaf` makes of why it refused or did not answer."""
    try:
        done = subprocess.run(
            words, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise ConfigError(
            f"no {words[0]} here", remedy="Install it, or run this on a machine that has it."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise deaf(f"{words[0]} got no answer within {seconds:.0f} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise deaf(f"{words[0]}: {said[-1]}")
    return done.stdout


class Occurrences:
    """How often a word stands in a growing log; every call reads only the lines that are new."""

    def __init__(self, log: Path, word: bytes) -> None:
        self._log, self._word = log, word
        self._at = self._found = 0

    def count(self) -> int:
        """The number so far."""
        with suppress(OSError), self._log.open("rb") as stream:
            stream.seek(self._at)
            new = stream.read()
            new = new[: new.rfind(b"\n") + 1]
            self._at += len(new)
            self._found += new.count(self._word)
        return self._found


def tail(log: Path, lines: int) -> list[str]:
    """The last lines of a log, whatever bytes it holds; empty when it cannot be read."""
    with suppress(OSError), log.open("rb") as stream:
        cut = stream.seek(max(0, stream.seek(0, os.SEEK_END) - 65536)) > 0
        found = stream.read().decode(errors="replace").splitlines()
        return (found[1:] if cut and len(found) > 1 else found)[-lines:]  # the first is a part
    return []


# What libraries say beside a program: warnings of glog, logging and Python with the source line
# that Python puts under one, what NCCL and the evidence hook write for a verdict, empty frames.
_BESIDE: Final = re.compile(
    r"^\s|^\W*$|^(?:\[\w+\]:)?\[?[WE]\d{4} \d|\bWARN(?:ING)?\b|Warning: "
    r"|NCCL (?:INFO|WARN)|\[lane-evidence\]"
)
# Who speaks, how loud and when: a line of progress has its own time and little room.
_SPEAKER: Final = re.compile(
    r"^(?:\(\w+ pid=\d+\) ?)?(?:(?:INFO|DEBUG) +)?"
    r"(?:(?:\d{4}-)?\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?\s+(?:(?:INFO|DEBUG) +)?)?"
)


def said(log: Path) -> str:
    """The last line of a log that its program says itself; empty where there is none yet."""
    for line in reversed(tail(log, 200)):
        words = _SPEAKER.sub("", ANSI.sub(b"", line.encode()).decode(errors="replace"))
        if not _BESIDE.search(words):
            return words
    return ""


def _started(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def _all() -> Iterator[psutil.Process]:
    """Every living process but init and this one; zombies do not count."""
    for pid in psutil.pids():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if pid > 1 and pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _settled(process: psutil.Process) -> bool:
    """Whether a process is past its start, when its environment cannot be read yet."""
    with suppress(psutil.Error):
        return time.time() - process.create_time() > 1.0
    return False


def _session(pid: int) -> int:
    with suppress(OSError):
        return os.getsid(pid)
    return 0


def _environ(pid: int) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return [b"PATH="]  # gone, or not ours to read: left alone
