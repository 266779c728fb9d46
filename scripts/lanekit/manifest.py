"""The manifest of a drop: what was planned, how far the run came, and the sha256 of every file."""

from typing import Any, Literal

import msgspec

SCHEMA = 1

State = Literal[
    "planned", "installing", "warming", "starting", "ready", "asking", "sweeping", "collecting",
    "complete", "failed", "interrupted",
]  # fmt: skip


class Row(msgspec.Struct, frozen=True):
    """Which row a drop holds: lane, arm and the cells that were planned, on a profile."""

    lane: str
    arm: str
    profile: str
    cells: tuple[str, ...]


class Process(msgspec.Struct, frozen=True):
    """A process the run started, named so that a later run can end exactly it.

    started: seconds since the epoch as the kernel tells it; a PID alone is reused. container: the
    id of a container, which is removed instead; its pid is 0. host: where the container is, by its
    name in the plan.
    """

    pid: int
    started: float
    what: str
    container: str = ""
    host: str = ""


class Manifest(msgspec.Struct):
    """`manifest.json`, rewritten atomically at every step of a run.

    stage: the last state that was not an end, with the cell where one was being taken.
    started, ended: UTC, ISO 8601. timings: seconds by phase. files: path in the drop -> sha256,
    complete only when `state` is `complete`. plan: the frozen plan, as `PLAN=1` prints it.
    redacted: names of the machine were replaced afterwards, and `files` renewed. left: what could
    not be ended, since its host was lost; a later run tries again.
    """

    row: Row
    stack: str
    state: State
    started: str
    plan: dict[str, Any]
    git: dict[str, str]
    environment: dict[str, str]
    schema: int = SCHEMA
    ended: str | None = None
    failure: str | None = None
    stage: str = ""
    scratch: str = ""
    boot: str = ""
    runner: Process | None = None
    processes: list[Process] = []
    timings: dict[str, float] = {}
    images: dict[str, str] = {}
    patches: dict[str, str] = {}
    files: dict[str, str] = {}
    redacted: bool = False
    left: list[str] = []
