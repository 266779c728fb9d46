"""What lanes/micro/ep_bench.py leaves: its records read, judged, and folded over repetitions."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from lanekit import reading
from lanekit.verdict import MicroRow

FORMAT: Final = 1  # of micro.jsonl
NAME: Final = "micro.jsonl"


class Shape(NamedTuple):
    """One exchange, as lanes/micro/ep_bench.py describes it."""

    dtype: str
    tokens: int
    hidden: int
    topk: int
    experts: int
    max_tokens: int
    sms: int


class Record(msgspec.Struct, frozen=True):
    """One line of micro.jsonl. kind: run, check, time or done. Times in microseconds; started and
    ended in seconds since the epoch."""

    v: int
    kind: str
    op: str = ""
    mode: str = ""
    dtype: str = ""
    tokens: int | None = None
    hidden: int = 0
    topk: int = 0
    experts: int = 0
    max_tokens: int = 0
    sms: int = 0
    rep: int = 0
    bytes: int = 0
    p50_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    iterations: int | None = None
    ranks: int | None = None
    gbs: float | None = None
    ok: bool | None = None
    wrong_rows: tuple[int, ...] = ()
    world: int | None = None
    settings: dict[str, Any] = {}
    started: float | None = None
    ended: float | None = None

    @property
    def shape(self) -> Shape:
        """What was exchanged."""
        return Shape(self.dtype, self.tokens or 0, self.hidden, self.topk, self.experts,
                     self.max_tokens, self.sms)  # fmt: skip

    @property
    def way(self) -> str:
        """The mode, with the SM count where the run chose one."""
        return f"{self.mode}, {self.sms} SMs" if self.sms else self.mode


def read(path: Path) -> list[Record]:
    """The records of a cell. Raises Unreadable: a line is no record of this format, or the file
    cannot be read."""
    return reading.lines(path, Record, FORMAT)


def rows(cell: str, records: Iterable[Record]) -> list[MicroRow]:
    """Times folded over repetitions: p50 is the median of the repetitions' p50, min and max over
    all, spread their range over that median."""
    groups: dict[tuple[str, str, str, int, int], list[Record]] = {}
    for r in records:
        if r.kind == "time" and None not in (r.p50_us, r.min_us, r.max_us):
            groups.setdefault((r.op, r.way, r.dtype, r.tokens or 0, r.bytes), []).append(r)
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
