"""What lanes/micro/ep_bench.py leaves: its records read, judged, and folded over repetitions."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lanekit import reading
from lanekit.errors import Unreadable
from lanekit.verdict import Check, MicroRow, Place

FORMAT: Final = 1  # of micro.jsonl
NAME: Final = "micro.jsonl"


class Record(msgspec.Struct, frozen=True):
    """One line of micro.jsonl. kind: run, check, time or done. Times in microseconds."""

    v: int
    kind: str
    op: str = ""
    mode: str = ""
    dtype: str = ""
    tokens: int | None = None
    sms: int = 0
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
    lines = reading.small(path).splitlines()
    return [_record(f"{path}:{number}", line) for number, line in enumerate(lines, 1)]


def _record(where: str, line: bytes) -> Record:
    found = reading.decoded(line, Record, where)
    if found.v != FORMAT:
        raise Unreadable(
            f"{where}: format {found.v}, this harness reads {FORMAT}",
            remedy="Use the harness the drop was made with; its git commit is in the manifest.",
        )
    return found


def judge(cells: Mapping[str, Sequence[Record]], ranks: int) -> list[Check]:
    """One check a cell and rule: it ran to its end, on every rank, and every shape came back right.

    A shape that was timed before it was checked refutes: fast garbage is not a result.
    """
    return [check for name in cells for check in _cell(name, cells[name], ranks)]


def _cell(name: str, records: Sequence[Record], ranks: int) -> Iterable[Check]:
    place = Place(f"micro/{name}/{NAME}", len(records))
    worlds = {r.world for r in records if r.kind == "run"}
    kinds = [r.kind for r in records]
    ends = f"{kinds.count('run')} starts, {kinds.count('done')} ends"
    order = kinds[:1] == ["run"] and kinds[-1:] == ["done"]
    once = kinds.count("run") == kinds.count("done") == 1
    whole = order and once and worlds == {ranks}
    yield Check(
        id=f"{name}-complete",
        group="load",
        severity="required",
        outcome="met" if whole else "failed" if records else "unchecked",
        why="the program ran to its end on every rank",
        expected=f"one start first, one end last, world {ranks}",
        actual=f"{ends}{'' if order else ', out of order'}, world "
        f"{', '.join(sorted(map(str, worlds))) or 'unknown'}",
        first=place,
        last=place,
        remedy="Read the cell's log; run the lane again.",
    )
    checked: set[Shape] = set()
    timed: set[Shape] = set()
    wrong: set[Shape] = set()
    for r in records:
        if r.kind == "check":
            (checked if r.ok is True else wrong).add(_shape(r))
        elif r.kind == "time" and not _sane(r):
            wrong.add(_shape(r))
        elif r.kind == "time" and r.tokens and r.op in EXCHANGES:
            timed.add(_shape(r))
            wrong |= {_shape(r)} - checked  # a check that comes later says nothing of this time
    bad = sorted(wrong)
    yield Check(
        id=f"{name}-correct",
        group="load",
        severity="required",
        outcome="failed" if bad else "met" if timed else "unchecked",
        why="every shape came back exactly through identity experts before it was timed, and its "
        "times are in order",
        expected=f"{len(timed)} shapes checked",
        actual=f"{len(timed - wrong)} of {len(timed)}",
        first=place,
        last=place,
        missing=tuple(" ".join(map(str, shape)) for shape in bad),
        remedy="Do not use these times: file the shape upstream." if bad else "",
    )


EXCHANGES: Final = ("dispatch", "combine", "pair")


Shape = tuple[str, str, int]


def _shape(record: Record) -> Shape:
    return _mode(record), record.dtype, record.tokens or 0


def _mode(record: Record) -> str:
    """The mode, with the SM count where the run chose one."""
    return f"{record.mode}, {record.sms} SMs" if record.sms else record.mode


def _sane(record: Record) -> bool:
    """Whether a time's figures can be of one set of measurements."""
    least, middle, most = record.min_us, record.p50_us, record.max_us
    if least is None or middle is None or most is None:
        return False
    return 0 < least <= middle <= most


def rows(cell: str, records: Iterable[Record]) -> list[MicroRow]:
    """Times folded over repetitions: p50 is the median of the repetitions' p50, min and max over
    all, spread their range over that median."""
    groups: dict[tuple[str, str, str, int, int], list[Record]] = {}
    for r in records:
        if r.kind == "time" and None not in (r.p50_us, r.min_us, r.max_us):
            groups.setdefault((r.op, _mode(r), r.dtype, r.tokens or 0, r.bytes), []).append(r)
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
