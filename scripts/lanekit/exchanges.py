"""Judge a cell of the micro lane: its records, beside its plan, its log and the run's clock."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from lanekit import batch
from lanekit.batch import Taken
from lanekit.micro import NAME, Record, Shape, rows
from lanekit.verdict import Check, Outcome, Place

SHAPES: Final = 1 << 12  # of a sweep; the largest has 72
SHOWN: Final = 16  # repetitions
LARGEST: Final = (1 << 16, 1 << 10)  # experts and topk of a shape; models of 2026 have 512 and 16
EXCHANGES: Final = ("dispatch", "combine", "pair")


def judge(cells: Mapping[str, Taken], ranks: int) -> list[Check]:
    """The checks of every cell: it ran to its end on every rank, what it timed had come back right,
    its figures can be of one measurement, it measured what was planned, and its log says the same.

    A shape that was timed before it was checked refutes: fast garbage is not a result.
    """
    found = [check for name, taken in cells.items() for check in _cell(name, taken, ranks)]
    return [*found, batch.clocks(cells)]


def _cell(name: str, taken: Taken, ranks: int) -> Iterator[Check]:
    records, place = taken.records, Place(f"micro/{name}/{NAME}", len(taken.records))
    timed = {r.shape for r in records if r.kind == "time" and r.op in EXCHANGES}
    whole, figures = list(_whole(records, ranks)), list(_figures(records, ranks))
    planned = _as_planned(taken)
    told, unsaid = batch.said(
        taken, _table(records), lambda line: line[-2].endswith("%") and "." in line[-1]
    )
    empty: Outcome = "met" if records else "unchecked"
    answers: tuple[tuple[str, Outcome, Sequence[str], str], ...] = (
        ("complete", empty, whole, "the program ran to its end on every rank"),
        ("correct", "met" if timed else "unchecked", figures,
         "every shape came back exactly through identity experts before it was timed, and its "
         "figures can be of one measurement"),
        ("planned", "unchecked" if planned is None else empty, planned or (),
         "it measured the planned shapes, as often as planned"),
        ("printed", told if records else "unchecked", unsaid, "its log shows the same figures"),
    )  # fmt: skip
    seen = f"{len(timed)} shapes on {ranks} ranks"
    for what, good, wrong, why in answers:
        yield batch.check(f"{name}-{what}", place, why, good=good, wrong=wrong, seen=seen)


def _whole(records: Sequence[Record], ranks: int) -> Iterator[str]:
    """What is wrong with the run as a whole: its ends, its ranks, the order of its records."""
    kinds = [r.kind for r in records]
    if kinds[:1] != ["run"] or kinds[-1:] != ["done"]:
        yield "it does not begin with its start and end with its end"
    if strange := sorted({*kinds} - {"run", "check", "time", "done"}):
        yield f"records of an unknown kind: {', '.join(strange)}"
    if kinds.count("run") != 1 or kinds.count("done") != 1:
        yield f"{kinds.count('run')} starts, {kinds.count('done')} ends"
    worlds = {r.world for r in records if r.kind == "run"} | {
        r.ranks for r in records if r.kind == "time"
    }
    if worlds != {ranks}:
        yield f"world {', '.join(sorted(map(str, worlds))) or 'unknown'}, not {ranks}"
    groups: dict[tuple[str, int], int] = {}
    for r in records:
        if r.tokens:
            groups.setdefault((r.mode, r.max_tokens), len(groups))
    places = [(groups[r.mode, r.max_tokens] if r.tokens else -1, r.rep)
              for r in records if r.kind in ("check", "time")]  # fmt: skip
    if places != sorted(places):
        yield "floors, modes and repetitions are not in order"


def _figures(records: Sequence[Record], ranks: int) -> Iterator[str]:
    """Shapes that were not checked first, and figures that no measurement gives."""
    checked: set[tuple[str, str, Shape]] = set()
    moved: dict[Shape, dict[str, int]] = defaultdict(dict)
    for r in records:
        if r.kind == "check":
            if r.ok is not True or r.wrong_rows != (0,) * ranks:
                yield f"{_named(r)} came back wrong"
            else:
                checked.add((r.op, r.mode, r.shape))
        elif r.kind == "time":
            if not _sane(r):
                yield f"{r.op} {_named(r)}: its times or its GB/s cannot be"
            if r.tokens and moved[r.shape].setdefault(r.op, r.bytes) != r.bytes:
                yield f"{r.op} {_named(r)}: other bytes in another repetition"
            of = "" if r.op in EXCHANGES else batch.variants().get(r.op, (None,))[0]
            if of is not None and (of, r.mode, r.shape) not in checked:
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
        or experts > LARGEST[0]
        or topk > LARGEST[1]
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
    for op, (_, like) in batch.variants().items():
        if moved.get(op, moved[like]) != moved[like]:
            return f"{op} does not move the bytes of {like}"
    peers, here = max(1, ranks - 1), experts // ranks
    alone = math.comb(experts - here, topk) / math.comb(experts, topk)  # no expert of a peer chosen
    tries, chance = (peers, 1 - alone) if once else (topk, peers / ranks if ranks > 1 else 1.0)
    mean = tokens * tries * chance
    spread = 6 * math.sqrt(tokens * tries * chance * (1 - chance) / ranks) + 1
    return "" if abs(rows - mean) <= spread else f"{rows:.1f} rows, {mean:.1f} expected"


def _as_planned(taken: Taken) -> list[str] | None:
    """What was measured and not planned, or planned and not measured; None where the command does
    not say what was planned."""
    found = batch.options(taken)
    if found is None:
        return None
    program, options, wrong = found
    shapes = dict.fromkeys(
        Shape(x.dtype, x.tokens, x.hidden, x.topk, x.experts, x.max_tokens, x.sms)
        for x in itertools.islice(program.shapes(options), SHAPES + 1)
    )
    if len(shapes) > SHAPES:
        return [f"more than {SHAPES} shapes planned"]
    seen: dict[tuple[str, str, Shape | int], list[int]] = defaultdict(list)
    for r in taken.records:
        if r.kind == "time":
            seen[r.op, r.mode, r.shape if r.tokens else r.bytes].append(r.rep)
            if r.iterations != options.iterations:
                wrong.append(f"{r.op} {_named(r)}: {r.iterations} iterations")
    wanted = {*EXCHANGES, *(batch.variants() if options.variants else ())}
    for op, mode, each in itertools.product(sorted(wanted), options.modes, shapes):
        seen[op, mode, each] += []
    for (op, mode, shape), reps in seen.items():
        planned = not isinstance(shape, Shape) or (mode in options.modes and shape in shapes)
        planned &= op not in batch.variants() or op in wanted
        if not planned or len(reps) != options.repeat or reps != list(range(len(reps))):
            size = f"{shape.dtype} {shape.tokens}" if isinstance(shape, Shape) else shape
            wrong.append(f"{op} {mode} {size}: repetitions {reps[:SHOWN] or 'none'}, " + (
                f"{options.repeat} planned" if planned else "not planned"))  # fmt: skip
    return wrong


def _table(records: Sequence[Record]) -> Iterator[list[str]]:
    """The rows that the program prints at its end, as words."""
    for row in rows("", records):
        tokens = [row.dtype, str(row.tokens)] if row.tokens else []
        figures = [f"{x:.1f}" for x in (row.p50_us, row.min_us, row.max_us)]
        yield [row.op, row.mode.partition(",")[0], *tokens, str(row.bytes), *figures,
               f"{row.spread:.1%}"]  # fmt: skip
