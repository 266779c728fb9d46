"""The `process` launcher: services in place, each in a session of its own, ended without a trace.

A process is known by PID and start time, never by name. Everything it forks stays in its session
(setsid), and the kernel does not reuse a PID while a session bears it, so the session of a
recorded leader holds nothing but ours.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import psutil

from lanekit.errors import ServerDied
from lanekit.manifest import Process

GRACE_S: Final = 15.0  # vLLM's engine processes need a few seconds to leave by themselves


class Task(Protocol):
    """A program that runs to its own end, such as the load of a cell."""

    @property
    def process(self) -> Process:
        """How a later run finds it."""

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""

    def outcome(self, code: int) -> str:
        """An exit status in words."""

    def end(self, grace_s: float) -> None:
        """End it and all that it forked, and wait."""


class Launcher(Protocol):
    """What a run needs of a launcher."""

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> Process:
        """Start one service; its output goes to `log`."""

    def task(self, what: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> Task:
        """Start the program that takes a cell; what: driver and cell, `aiperf c4`."""

    def check(self) -> None:
        """Raise ServerDied when a service has ended."""

    def logs(self) -> list[Path]:
        """The log of every service."""

    def stop(self) -> None:
        """End everything that was started, and wait for it."""


class ProcessTask:
    """A child process as a task."""

    def __init__(self, child: subprocess.Popen[bytes], started: Process) -> None:
        self._child = child
        self.process = started

    def poll(self) -> int | None:
        """The exit status, or None while it runs; negative is a signal."""
        return self._child.poll()

    def outcome(self, code: int) -> str:
        """An exit status in words."""
        return outcome(code)

    def end(self, grace_s: float) -> None:
        """End its session and wait for it."""
        end([self.process], grace_s)
        self._child.wait()


class ProcessLauncher:
    """Services as child processes of this one."""

    def __init__(self) -> None:
        self._children: dict[str, tuple[subprocess.Popen[bytes], Process, Path]] = {}

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> Process:
        """Start one service in a session of its own.

        Raises:
            ServerDied: the command cannot be started.
        """
        with log.open("ab") as stream:
            child, process = spawn(name, command, env, stream)
        self._children[name] = (child, process, log)
        return process

    def task(
        self, what: str, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> ProcessTask:
        """Start a program in a session of its own.

        Raises:
            ServerDied: the command cannot be started.
        """
        with log.open("wb") as stream:
            return ProcessTask(*spawn(what, command, env, stream))

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
    """Start a command in its own session, its output going to a file.

    Raises:
        ServerDied: the command cannot be started.
    """
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

    First SIGTERM, then, after `grace_s` seconds, SIGKILL. A leader whose start time differs from
    the recorded one is somebody else's process and is left alone, session and all.
    """
    leaders = [process for process in processes if not _reused(process)]
    found = list(_members(leaders))
    for victim in found:
        with suppress(psutil.Error):
            victim.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while alive := list(_members(leaders)):
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


def tail(log: Path, lines: int) -> list[str]:
    """The last lines of a log, whatever bytes it holds; empty when it cannot be read."""
    with suppress(OSError), log.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - 65536))
        return stream.read().decode(errors="replace").splitlines()[-lines:]
    return []


def _started(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def _reused(process: Process) -> bool:
    """Whether the recorded PID now belongs to somebody else."""
    started = _started(process.pid)
    return started != 0.0 and abs(started - process.started) > 0.5


def _members(leaders: Sequence[Process]) -> Iterator[psutil.Process]:
    """The living processes of the leaders' sessions, leaders included; zombies do not count."""
    sessions = {leader.pid for leader in leaders}
    for pid in psutil.pids():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(pid) in sessions:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process
