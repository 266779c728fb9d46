"""A cell of a program that is run once a cell (driver = "batch"): its records beside its plan, its
log and the run's clock. Judges nothing that only one program knows; pure, but for a program's own
reading of its options.
"""

import argparse
import contextlib
import datetime
import functools
import io
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Final

import msgspec

from lanekit import load, paths, programs
from lanekit.errors import Unreadable
from lanekit.verdict import Check, Outcome, Place

# file -> lane
PROGRAMS: Final = {"ep_bench.py": "micro", "train.py": "megatron", "drive.py": "nemo-rl"}
LINE: Final = 1 << 16  # bytes of a log's line that are looked at; a row has 110
EPOCHS: Final = (946_684_800, 4_102_444_800)  # seconds: 2000 to 2100
ROWS: Final = 1 << 14  # of a log's table; the largest sweep prints 150
FIRSTS: Final = frozenset(  # how rows of the two programs begin
    b"copy-local copy-peer launch dispatch combine pair all_to_all floor reference arm".split()
)
TOLD: Final = (b"=", "  • ".encode())  # how the head of a NeMo RL step and its figures begin
SHOWN: Final = 8  # of what is wrong
TORCHRUN: Final = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")  # what a program's options follow from, too


class Taken(msgspec.Struct, frozen=True):
    """A cell as it was taken. records: have `kind`, `settings`, `started`, `ended`. command: the
    planned one. log: words of the lines that it printed and that may be rows of its table. told:
    lines that NeMo RL's steps are read from. run: what the manifest says of time."""

    records: Sequence[Any]
    command: tuple[str, ...] = ()
    log: frozenset[tuple[str, ...]] = frozenset()
    run: load.Run | None = None
    told: tuple[str, ...] = ()


def printed(stream: BinaryIO, records: Iterable[Any]) -> frozenset[tuple[str, ...]]:
    """The lines of a log that may be rows of its records' table, as words: they begin with an
    operation, or a role, whether or not a record has it. Raises Unreadable: there are more than
    ROWS."""
    firsts = {(getattr(r, "op", "") or getattr(r, "role", "")).encode() for r in records} - {b""}
    firsts |= FIRSTS | {op.encode() for op in variants()}
    found: set[tuple[str, ...]] = set()
    whole: Any = stream  # unbuffered: a line would be read byte by byte
    buffered = io.BufferedReader(whole, 1 << 20)
    for line in iter(lambda: buffered.readline(LINE), b""):
        if line.partition(b" ")[0] in firsts:
            words = tuple(line.decode(errors="replace").split(None, 12))
            if 8 <= len(words) <= 11:
                found.add(words)
        _require_few(found)
    return frozenset(found)


def told(stream: BinaryIO) -> tuple[str, ...]:
    """The lines of a log that NeMo RL's steps are read from, in its order. Raises Unreadable: there
    are more than ROWS."""
    found: list[str] = []
    whole: Any = stream
    buffered = io.BufferedReader(whole, 1 << 20)
    for line in iter(lambda: buffered.readline(LINE), b""):
        if line.startswith(TOLD):
            found.append(line.decode(errors="replace"))
        _require_few(found)
    return tuple(found)


def _require_few(found: Collection[object]) -> None:
    if len(found) > ROWS:
        raise Unreadable(
            f"a cell's log holds more than {ROWS} rows of its table",
            remedy="No program prints so many: fetch the log again.",
        )


def check(
    name: str, place: Place, why: str, *, good: Outcome, wrong: Sequence[str], seen: str
) -> Check:
    """A required check. good: its outcome where nothing is wrong; what could not be looked at is
    not refuted."""
    outcome: Outcome = good if good == "unchecked" or not wrong else "failed"
    return Check(
        id=name,
        group="load",
        severity="required",
        outcome=outcome,
        why=why,
        expected=seen,
        actual="; ".join(wrong[:SHOWN]) or seen,
        first=place,
        last=place,
        remedy="" if outcome == "met" else "Read the cell's log; run the lane again.",
    )


def said(
    taken: Taken, rows: Iterable[Sequence[str]], like: Callable[[Sequence[str]], bool]
) -> tuple[Outcome, list[str]]:
    """Whether the log holds every row that the program prints and no other, and what it does not or
    should not. like: whether a line is such a row. Another rank's line can have torn one or two:
    that is no verdict, and no forgery either."""
    shown = {told for line in taken.log for told in _told(line)}
    known = {tuple(row) for row in rows}
    wrong = [f"not in the log: {' '.join(row)}" for row in sorted(known - shown)]
    extra = sorted(line for line in taken.log if like(line) and not known & {*_told(line)})
    wrong += [f"only in the log: {' '.join(line)}" for line in extra]
    return "unchecked" if len(wrong) in (1, 2) else "met", wrong


def _told(line: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    """What a line can tell: itself (train.py), without GB/s at its end, and also without the worst
    case in its fifth column (ep_bench.py). Looked up, since each row against each line did not end
    on 43 MB (2026-11-30)."""
    return line, line[:-1], line[:4] + line[5:-1]


def options(taken: Taken) -> tuple[Any, argparse.Namespace, list[str]] | None:
    """The program of a planned command, its options, and what the records say otherwise of them;
    None where the command is no program's or would not start."""
    planned = asking(taken)
    if planned is None:
        return None
    program, asked = planned
    known: dict[str, Any] = next((r.settings for r in taken.records if r.kind == "run"), {})
    # An option that is newer than the records was not set: it had its default.
    needed = [f"--{key}={getattr(asked, key)}" for key in ("backend", "arm") if hasattr(asked, key)]
    usual = _parsed(program, [*needed, "--out=."])
    settings = {**(vars(usual) if usual else {}), **known}
    wrong = [
        f"{key} {settings.get(key)}, planned {value}"
        for key, value in vars(asked).items()
        if key != "out" and settings.get(key) != value
    ]
    return program, asked, wrong


def asking(taken: Taken) -> tuple[Any, argparse.Namespace] | None:
    """The program of a planned command and its options; None as for `options`."""
    at = next((n for n, x in enumerate(taken.command) if x.rpartition("/")[2] in PROGRAMS), None)
    if at is None:
        return None
    program = _program(taken.command[at].rpartition("/")[2])
    asked = _parsed(program, taken.command[at + 1 :])
    return None if asked is None else (program, asked)


def _parsed(program: Any, words: Sequence[str]) -> argparse.Namespace | None:
    quiet = io.StringIO()
    with contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet), _alone():
        try:
            found: argparse.Namespace = program.parse_options(words)
        except SystemExit:
            return None
    return found


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without the variables of whoever judges: with an ambient WORLD_SIZE=16 a drop of two ranks
    was refuted (2026-11-30)."""
    held = {name: os.environ.pop(name) for name in TORCHRUN if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


@functools.cache
def _program(name: str) -> Any:
    """A lane's program, which alone knows its options and what follows from them."""
    path = paths.ROOT / "lanes" / PROGRAMS[name] / name
    return programs.load(f"lane_{PROGRAMS[name]}", path)


def variants() -> dict[str, tuple[str, str]]:
    """The micro program's own table: variant -> its check, and the exchange whose bytes it moves.

    Of its run with --variants; as lanes/micro/ep_bench.py has it.
    """
    found: dict[str, tuple[str, str]] = _program("ep_bench.py").VARIANTS
    return found


def clocks(cells: Mapping[str, Taken]) -> Check:
    """Every cell ran within the run that its manifest tells of."""
    absent, wrong = [], []
    after: datetime.datetime | None = None
    for name, taken in cells.items():
        starts = [r.started for r in taken.records if r.started is not None]
        ends = [r.ended for r in taken.records if r.ended is not None]
        if len(starts) != 1 or len(ends) != 1 or taken.run is None:
            absent.append(f"{name}: its records state no time")
        elif not EPOCHS[0] <= starts[0] <= ends[0] < EPOCHS[1]:
            wrong.append(f"{name}: its records state a time that no clock shows")
        else:
            window = load.window(starts[0], ends[0])
            wrong += [f"{name}: {why}" for why in load.against_run(name, window, after, taken.run)]
            after = window.last
    return load.one_time(wrong, absent)
