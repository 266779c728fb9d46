"""What lanes/micro/ep_bench.py leaves: its records read, judged, and folded over repetitions."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lanekit.errors import Unreadable
from lanekit.verdict import Check, MicroRow, Place

FORMAT: Final = 1  # of micro.jsonl
NAME: Final = "micro.jsonl"
LIMIT: Final = 16 << 20  # the longest sweep measured leaves 0.2 MiB


class Record(msgspec.Struct, frozen=True):
    """One line of micro.jsonl. kind: run, check, time or done. Times in microseconds."""

    v: int
    kind: str
    op: str = ""
    mode: str = ""
    dtype: str = ""
    tokens: int | None = None
    rep: int = 0
    bytes: int = 0
    p50_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    gbs: float | None = None
    ok: bool | None = None
    world: int | None = None


def read(path: Path) -> list[Record]:
    """The records of a cell.

    Raises:
        Unreadable: a line is no record of this format, or the file cannot be read.
    """
    try:
        if path.stat().st_size > LIMIT:
            raise Unreadable(f"{path}: larger than {LIMIT >> 20} MiB", remedy="Not the program's.")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}", remedy="Run the lane again.") from error
    return [_record(path, number, line) for number, line in enumerate(lines, 1)]


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        found = msgspec.json.decode(line, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(f"{path}:{number}: {error}", remedy="The run was cut: again.") from error
    if found.v != FORMAT:
        raise Unreadable(
            f"{path}:{number}: format {found.v}, this harness reads {FORMAT}",
            remedy="Use the harness the drop was made with; its git commit is in the manifest.",
        )
    return found


def judge(cells: Mapping[str, Sequence[Record]], ranks: int) -> list[Check]:
    """One check a cell and rule: it ran to its end, on every rank, and every shape came back right.

    A shape that was timed but not checked refutes: fast garbage is not a result.
    """
    return [check for name in cells for check in _cell(name, cells[name], ranks)]


def _cell(name: str, records: Sequence[Record], ranks: int) -> Iterable[Check]:
    place = Place(f"micro/{name}/{NAME}", len(records))
    worlds = {r.world for r in records if r.kind == "run"}
    done = [r for r in records if r.kind == "done"]
    yield Check(
        id=f"{name}-complete",
        group="load",
        severity="required",
        outcome="met" if done and worlds == {ranks} else "failed" if records else "unchecked",
        why="the program ran to its end on every rank",
        expected=f"one end, world {ranks}",
        actual=f"{len(done)} ends, world {', '.join(map(str, sorted(map(str, worlds))))}",
        first=place,
        last=place,
        remedy="Read the cell's log; run the lane again.",
    )
    checked = {_shape(r) for r in records if r.kind == "check" and r.ok is True}
    wrong = {_shape(r) for r in records if r.kind == "check" and r.ok is not True}
    timed = {_shape(r) for r in records if r.kind == "time" and r.tokens and r.op in EXCHANGES}
    bad = sorted(wrong | (timed - checked))
    yield Check(
        id=f"{name}-correct",
        group="load",
        severity="required",
        outcome="failed" if bad else "met" if timed else "unchecked",
        why="every shape that was timed came back exactly through identity experts first",
        expected=f"{len(timed)} shapes checked",
        actual=f"{len(timed & checked)} of {len(timed)}",
        first=place,
        last=place,
        missing=tuple(" ".join(map(str, shape)) for shape in bad),
        remedy="Do not use these times: file the shape upstream." if bad else "",
    )


EXCHANGES: Final = ("dispatch", "combine", "pair")


def _shape(record: Record) -> tuple[str, str, int]:
    return record.mode, record.dtype, record.tokens or 0


def rows(cell: str, records: Iterable[Record]) -> list[MicroRow]:
    """Times folded over repetitions: p50 is the median of the repetitions' p50, min and max over
    all, spread their range over that median."""
    groups: dict[tuple[str, str, str, int, int], list[Record]] = {}
    for r in records:
        if r.kind == "time" and None not in (r.p50_us, r.min_us, r.max_us):
            groups.setdefault((r.op, r.mode, r.dtype, r.tokens or 0, r.bytes), []).append(r)
    return [_row(cell, key, found) for key, found in groups.items()]


def _row(cell: str, key: tuple[str, str, str, int, int], found: list[Record]) -> MicroRow:
    op, mode, dtype, tokens, size = key
    p50s: list[float] = [r.p50_us for r in found if r.p50_us is not None]
    p50 = statistics.median(p50s)
    extremes: list[Any] = [r.min_us for r in found] + [r.max_us for r in found]
    return MicroRow(
        cell=cell,
        op=op,
        mode=mode,
        dtype=dtype,
        tokens=tokens,
        bytes=size,
        repetitions=len(found),
        p50_us=round(p50, 2),
        min_us=min(x for x in extremes if x is not None),
        max_us=max(x for x in extremes if x is not None),
        spread=round((max(p50s) - min(p50s)) / p50, 4) if p50 else 0.0,
        gbs=round(size / p50 / 1e3, 1) if p50 else 0.0,
    )
