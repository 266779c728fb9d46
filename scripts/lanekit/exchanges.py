"""Judge a cell of the micro lane: its records, beside its plan, its log and the run's clock. Pure,
but for the program's own reading of its options."""

import argparse
import contextlib
import datetime
import functools
import importlib.util
import io
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Final

import msgspec

from lanekit import load, paths
from lanekit.errors import ConfigError
from lanekit.micro import NAME, Record, Shape, rows
from lanekit.verdict import Check, Outcome, Place

PROGRAM: Final = "ep_bench.py"
EXCHANGES: Final = ("dispatch", "combine", "pair")
LINE: Final = 1 << 16  # bytes of a log's line that are looked at; a row has 110
EPOCHS: Final = (946_684_800, 4_102_444_800)  # seconds: 2000 to 2100
SHOWN: Final = 8  # of what is wrong


class Taken(msgspec.Struct, frozen=True):
    """A cell as it was taken. command: the planned one. log: words of the lines that it printed and
    that may be rows of its table. run: what the manifest says of time."""

    records: Sequence[Record]
    command: tuple[str, ...]
    log: frozenset[tuple[str, ...]]
    run: load.Run | None


def printed(stream: BinaryIO) -> frozenset[tuple[str, ...]]:
    """The lines of a log that may be rows of the program's table, as words."""
    lines = iter(lambda: stream.readline(LINE), b"")
    split = (line.decode(errors="replace").split() for line in lines)
    return frozenset(tuple(words) for words in split if 8 <= len(words) <= 11)


def judge(cells: Mapping[str, Taken], ranks: int) -> list[Check]:
    """The checks of every cell: it ran to its end on every rank, what it timed had come back right,
    its figures can be of one measurement, it measured what was planned, and its log says the same.

    A shape that was timed before it was checked refutes: fast garbage is not a result.
    """
    found = [check for name, taken in cells.items() for check in _cell(name, taken, ranks)]
    return [*found, _clocks(cells)]


def _cell(name: str, taken: Taken, ranks: int) -> Iterator[Check]:
    records, place = taken.records, Place(f"micro/{name}/{NAME}", len(taken.records))
    timed = {r.shape for r in records if r.kind == "time" and r.op in EXCHANGES}
    whole, figures = list(_whole(records, ranks)), list(_figures(records, ranks))
    planned, said = _as_planned(taken), list(_said(taken))
    empty: Outcome = "met" if records else "unchecked"
    answers: tuple[tuple[str, Outcome, Sequence[str], str], ...] = (
        ("complete", empty, whole, "the program ran to its end on every rank"),
        ("correct", "met" if timed else "unchecked", figures,
         "every shape came back exactly through identity experts before it was timed, and its "
         "figures can be of one measurement"),
        ("planned", "unchecked" if planned is None else empty, planned or (),
         "it measured the planned shapes, as often as planned"),
        ("printed", "unchecked" if len(said) in (1, 2) else empty, said,
         "its log shows the same figures"),
    )  # fmt: skip
    for what, good, wrong, why in answers:
        bad: Outcome = good if good == "unchecked" else "failed"
        yield Check(
            id=f"{name}-{what}",
            group="load",
            severity="required",
            outcome=bad if wrong else good,
            why=why,
            expected=f"{len(timed)} shapes on {ranks} ranks",
            actual="; ".join(wrong[:SHOWN]) or f"{len(timed)} shapes",
            first=place,
            last=place,
            remedy="Read the cell's log; run the lane again." if wrong or good != "met" else "",
        )


def _whole(records: Sequence[Record], ranks: int) -> Iterator[str]:
    """What is wrong with the run as a whole: its ends, its ranks, the order of its records."""
    kinds = [r.kind for r in records]
    if kinds[:1] != ["run"] or kinds[-1:] != ["done"]:
        yield "it does not begin with its start and end with its end"
    if kinds.count("run") != 1 or kinds.count("done") != 1:
        yield f"{kinds.count('run')} starts, {kinds.count('done')} ends"
    worlds = {r.world for r in records if r.kind == "run"} | {
        r.ranks for r in records if r.kind == "time"
    }
    if worlds != {ranks}:
        yield f"world {', '.join(sorted(map(str, worlds))) or 'unknown'}, not {ranks}"
    groups = list(dict.fromkeys((r.mode, r.max_tokens) for r in records if r.tokens))
    places = [(groups.index((r.mode, r.max_tokens)) if r.tokens else -1, r.rep)
              for r in records if r.kind in ("check", "time")]  # fmt: skip
    if places != sorted(places):
        yield "floors, modes and repetitions are not in order"


def _figures(records: Sequence[Record], ranks: int) -> Iterator[str]:
    """Shapes that were not checked first, and figures that no measurement gives."""
    checked: set[tuple[str, Shape]] = set()
    moved: dict[Shape, dict[str, int]] = defaultdict(dict)
    for r in records:
        if r.kind == "check":
            if r.ok is not True or r.wrong_rows != (0,) * ranks:
                yield f"{_named(r)} came back wrong"
            else:
                checked.add((r.mode, r.shape))
        elif r.kind == "time":
            if not _sane(r):
                yield f"{r.op} {_named(r)}: its times or its GB/s cannot be"
            if r.tokens and moved[r.shape].setdefault(r.op, r.bytes) != r.bytes:
                yield f"{r.op} {_named(r)}: other bytes in another repetition"
            if r.op in EXCHANGES and (r.mode, r.shape) not in checked:
                yield f"{r.op} {_named(r)}: timed before it was checked"
    for shape, found in moved.items():
        if why := _carried(shape, found, ranks):
            yield f"{shape.dtype} {shape.tokens}: {why}"


def _named(r: Record) -> str:
    return f"{r.way} {r.dtype} {r.tokens or r.bytes}"


def _sane(r: Record) -> bool:
    """Whether a time's figures can be of one set of measurements, and GB/s be theirs."""
    least, middle, most = r.min_us, r.p50_us, r.max_us
    if least is None or middle is None or most is None or not 0 < least <= middle <= most:
        return False
    gbs = r.bytes / middle / 1e3
    # p50 is written to 0.01 us and GB/s to 0.001, after it was worked out of more digits
    return r.gbs is not None and abs(r.gbs - gbs) <= 0.001 + gbs * 0.006 / middle


def _carried(shape: Shape, moved: Mapping[str, int], ranks: int) -> str:
    """Why bytes cannot be those of a shape: rows of its size, as many as its tokens reach."""
    dtype, tokens, hidden, topk, experts = shape[:5]
    if (
        not hidden
        or not topk
        or not experts
        or topk > experts
        or experts % ranks
        or not {*EXCHANGES} <= {*moved}
    ):
        return "the size of its tokens, or an exchange, is not said"
    values = hidden * 2 if dtype == "bf16" else hidden + hidden // 32
    rows = moved["combine"] / (hidden * 2)
    each = moved["dispatch"] / rows if rows else values + topk * 12
    # V2 and V1 send a token once to a rank with its ids and weights; low latency once to an expert,
    # behind a header of 16 bytes.
    once = abs(each - values - topk * 12) < 1
    if not once and abs(each - values - 16) >= 1:
        return f"{each:.0f} bytes a row dispatched"
    if abs(moved["pair"] - moved["dispatch"] - moved["combine"]) > 1:
        return "the pair is not dispatch and combine"
    if abs(moved.get("all_to_all", moved["dispatch"]) - moved["dispatch"]) > 1:
        return "all_to_all does not move the bytes of the dispatch"
    peers, here = max(1, ranks - 1), experts // ranks
    alone = math.comb(experts - here, topk) / math.comb(experts, topk)  # no expert of a peer chosen
    tries, chance = (peers, 1 - alone) if once else (topk, peers / ranks if ranks > 1 else 1.0)
    mean = tokens * tries * chance
    spread = 6 * math.sqrt(tokens * tries * chance * (1 - chance) / ranks) + 1
    return "" if abs(rows - mean) <= spread else f"{rows:.1f} rows, {mean:.1f} expected"


def _as_planned(taken: Taken) -> list[str] | None:
    """What was measured and not planned, or planned and not measured; None where the command does
    not say what was planned."""
    program = _program()
    at = next((n for n, word in enumerate(taken.command) if word.endswith(f"/{PROGRAM}")), None)
    options = None if at is None else _options(taken.command[at + 1 :])
    usual = _options(["--backend", options.backend, "--out", "."]) if options else None
    if options is None or usual is None:
        return None
    said = next((r.settings for r in taken.records if r.kind == "run"), {})
    settings = {**vars(usual), **said}  # an option that is newer than the records was not set
    wrong = [
        f"{key} {settings[key]}, planned {value}"
        for key, value in vars(options).items()
        if key != "out" and settings[key] != value
    ]
    shapes = [Shape(x.dtype, x.tokens, x.hidden, x.topk, x.experts, x.max_tokens, x.sms)
              for x in program.shapes(options)]  # fmt: skip
    seen: dict[tuple[str, str, Shape | int], list[int]] = defaultdict(list)
    for r in taken.records:
        if r.kind == "time":
            seen[r.op, r.mode, r.shape if r.tokens else r.bytes].append(r.rep)
            if r.iterations != options.iterations:
                wrong.append(f"{r.op} {_named(r)}: {r.iterations} iterations")
    for op, mode, each in itertools.product(EXCHANGES, options.modes, shapes):
        seen[op, mode, each] += []
    for (op, mode, shape), reps in seen.items():
        planned = not isinstance(shape, Shape) or (mode in options.modes and shape in shapes)
        if not planned or reps != list(range(options.repeat)):
            size = f"{shape.dtype} {shape.tokens}" if isinstance(shape, Shape) else shape
            wrong.append(f"{op} {mode} {size}: repetitions {reps or 'none'}, " + (
                f"{options.repeat} planned" if planned else "not planned"))  # fmt: skip
    return wrong


def _options(words: Sequence[str]) -> argparse.Namespace | None:
    """The program's options as words state them; None where it would not start with them."""
    quiet = io.StringIO()
    with contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet):
        try:
            found: argparse.Namespace = _program().parse_options(words)
        except SystemExit:
            return None
    return found


@functools.cache
def _program() -> Any:
    """lanes/micro/ep_bench.py, which alone knows its options and what follows from them."""
    name = "lane_micro_ep_bench"
    made = importlib.util.spec_from_file_location(name, paths.ROOT / "lanes" / "micro" / PROGRAM)
    if made is None or made.loader is None:
        raise ConfigError(f"lanes/micro/{PROGRAM} is missing", remedy="Restore it.")
    module = importlib.util.module_from_spec(made)
    sys.modules[name] = module  # where dataclasses look for their annotations
    made.loader.exec_module(module)
    return module


def _said(taken: Taken) -> Iterator[str]:
    """Rows that the cell's log does not hold: the program prints them all at its end."""
    for row in rows("", taken.records):
        tokens = [row.dtype, str(row.tokens)] if row.tokens else []
        figures = [f"{x:.1f}" for x in (row.p50_us, row.min_us, row.max_us)] + [f"{row.spread:.1%}"]
        wanted = [row.op, row.mode.partition(",")[0], *tokens, str(row.bytes), *figures]
        if not any(_within(wanted, line) for line in taken.log):
            yield f"{row.op} {row.mode} {row.dtype} {row.tokens or row.bytes}: not in the log"


def _within(wanted: Sequence[str], line: Sequence[str]) -> bool:
    """Whether a line holds all words in their order."""
    left = iter(line)
    return all(word in left for word in wanted)


def _clocks(cells: Mapping[str, Taken]) -> Check:
    """Every cell ran within the run that its manifest tells of. Records of before 2026-12 state no
    time: that is noted."""
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
    return load.one_time(wrong, absent, required=len(absent) < len(cells))
