"""Judge the load points that AIPerf left, against their plan, their records and every clock.

Pure. A figure is never taken from a summary that its records do not bear out.
"""

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from lanekit import clock, records
from lanekit.clock import Window
from lanekit.verdict import Check, Outcome, Place

# Of prompts and answers. AIPerf 0.3 gave 300 tokens where 1023 were asked (ai-dynamo/aiperf#339);
# the prompts of all 38 real load points were as long as asked to the token (2026-11-30).
TOLERANCE: Final = 0.05
# What vLLM counted and what the records add up to were 3 % apart at most over five load points of
# 44 to 163 s; of one that is shorter than some of its 10 s nothing can be said (2026-11-30).
RATE_TOLERANCE: Final = 0.25
RATE_EVERY: Final = datetime.timedelta(seconds=10)
RATE_LEAST: Final = 4
IN_FLIGHT: Final = 0.9  # of the concurrency, at the least, open at one time
SLACK: Final = datetime.timedelta(seconds=2)  # 9 ms at most on busy cores (2026-11-30)


@dataclasses.dataclass(frozen=True)
class Load:
    """A planned load point beside what AIPerf left of it. folder: in the drop. url: whom a run of
    ours asked; command: with which options."""

    name: str
    folder: str
    cell: records.Cell | None
    concurrency: int | None
    requests: int | None
    isl: float | None
    osl: float | None
    version: str | None
    model: str | None
    url: str | None = None
    command: Mapping[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """What the manifest says of time. window: start to end, UTC; spent: seconds by phase."""

    window: Window
    spent: Mapping[str, float]


def same_run(loads: Sequence[Load], ends: Sequence[tuple[bytes, bytes]], run: Run | None) -> Check:
    """Records, summaries, logs and manifest tell of one time. ends: the first and last bytes of
    each log. run: None for a stranger's drop, whose log may be an excerpt that ends early."""
    found = [(x, x.cell, x.cell.records) for x in loads if x.cell is not None]
    absent, wrong = [], []
    after: datetime.datetime | None = None
    for x, cell, kept in found:
        if cell.start is None or cell.end is None or kept is None or kept.window is None:
            absent.append(f"{x.name}: its summary or its records state no time")
            continue
        load = window(*kept.window)
        zone = _zone(cell.start - load.first)
        logs = [w for each in ends if (w := clock.window(*each, near=cell.start)) is not None]
        if not logs:
            absent.append("the logs state no time")
            break
        wrong += [f"{x.name}: {why}" for why in (
            *_summary(cell.start, cell.end, load, zone),
            *against_run(x.name, load, after, run),
            *clock.outside(load, logs, zone, run.window if run else None),
        )]  # fmt: skip
        after = load.last
    if not found:
        absent.append("no load point to check")
    return one_time(wrong, absent)


Tick = tuple[datetime.datetime, float]  # when a server said its rate, and tokens a second


def server_rate(
    loads: Sequence[Load],
    said: Sequence[tuple[str, str, float]],
    every: datetime.timedelta = RATE_EVERY,
) -> tuple[Outcome, str]:
    """Whether a server's own rates bear out the records. said: when, as `MM-DD HH:MM:SS` of the
    server's clock, which engine, and its tokens a second over the time before. every: how often."""
    told: dict[bool, list[str]] = {True: [], False: []}
    there = sorted(((x, *timed) for x in loads if (timed := _timed(x))), key=lambda x: x[1].first)
    for number, (x, over, zone) in enumerate(there):
        after = there[number + 1] if number + 1 < len(there) else None
        ticks = _ticks(said, over.first.year, every)
        each = [ticks, [(at - zone, r) for at, r in ticks]]  # its clock says UTC, or local time
        shown = max(each, key=lambda t: sum(_within(over, at, every) for at, _ in t))
        inside = [(at, r) for at, r in shown if _within(over, at, every)]
        told_of = inside[-1][0] - inside[0][0] + every if inside else datetime.timedelta(0)
        claimed = (x.cell and x.cell.records and x.cell.records.figures.tok_s) or 0.0
        second = datetime.timedelta(seconds=1)  # stamps say no parts of one
        if len(inside) >= RATE_LEAST and told_of >= RATE_LEAST * RATE_EVERY - second:
            mean = sum(r for _, r in inside) * (every / told_of)
            fits = abs(mean - claimed) <= RATE_TOLERANCE * claimed
            told[fits].append(f"{x.name}: {mean:.1f} tok/s, its records {claimed:.1f}")
        if not zone and (why := _busy(x, over, after, shown, every)):
            told[False].append(f"{x.name}: {why}")
    if told[False] or told[True]:
        return ("failed" if told[False] else "met"), "; ".join(told[False] or told[True])
    return "unchecked", "no load point lasted long enough"


def _timed(x: Load) -> tuple[Window, datetime.timedelta] | None:
    """When a load point was, by its records, and what AIPerf's local clock was ahead of UTC."""
    kept = x.cell.records if x.cell else None
    if x.cell is None or x.cell.start is None or kept is None or kept.window is None:
        return None
    over = window(*kept.window)
    return over, _zone(x.cell.start - over.first)


def _busy(
    x: Load,
    over: Window,
    after: tuple[Load, Window, datetime.timedelta] | None,
    ticks: Sequence[Tick],
    every: datetime.timedelta,
) -> str:
    """How a server went on with a load point that was over by its records: it made more tokens
    before the next one began than that one warms up with. Records whose times are all shorter are
    else held to too few rates (2026-11-30)."""
    if x.command is None:  # a stranger's server may serve others
        return ""
    warm = (after[0].command or {}).get("--warmup-request-count", "0") if after else "0"
    known = (int(warm) if warm.isdecimal() else 0) * ((after and after[0].osl) or 0)
    begin = (over.last or over.first) + SLACK + every / 2  # a stamp may come late
    end = after[1].first if after else datetime.datetime.max
    made = sum(r for at, r in ticks if begin <= at - every and at <= end) * every.total_seconds()
    most = (1 + RATE_TOLERANCE) * known + (x.concurrency or 0)
    return f"{made:.0f} tokens after it, {known:.0f} to warm up" if made > most else ""


def _ticks(
    said: Sequence[tuple[str, str, float]], year: int, every: datetime.timedelta
) -> list[Tick]:
    """Rates of all engines together; they speak one after another, perhaps over a second's end."""
    found: list[Tick] = []
    spoke: set[str] = set()
    for text, engine, rate in sorted(said):
        with contextlib.suppress(ValueError):
            at = datetime.datetime.fromisoformat(f"{year}-{text.replace(' ', 'T')}")
            if found and engine not in spoke and at - found[-1][0] <= min(SLACK, every / 2):
                found[-1] = (found[-1][0], found[-1][1] + rate)
                spoke.add(engine)
            else:
                found.append((at, rate))
                spoke = {engine}
    return found


def _within(over: Window, at: datetime.datetime, every: datetime.timedelta) -> bool:
    """Whether the time that a rate is over lies within a load point; a stamp says no parts of a
    second."""
    second = datetime.timedelta(seconds=1)
    return over.first + second <= at - every and at <= (over.last or over.first) + second


def lasting(loads: Iterable[Load], every: datetime.timedelta) -> bool:
    """Whether a load point was so long that a server said enough rates of it, by its records."""
    found = (timed[0] for x in loads if (timed := _timed(x)))
    least = (RATE_LEAST + 2) * max(every, RATE_EVERY)
    return any((x.last or x.first) - x.first >= least for x in found)


def one_time(wrong: Sequence[str], absent: Sequence[str]) -> Check:
    """The check that all clocks tell of one time. absent: those that could not be looked at."""
    return Check(
        id="same-run",
        group="load",
        severity="required",
        outcome="failed" if wrong else "unchecked" if absent else "met",
        why="records, summary, log and manifest are of one run",
        expected="every clock tells of one time",
        actual="; ".join(wrong or absent) or "they do",
        remedy="These files are of different runs, or were edited." if wrong else
        "Keep exports and whole logs, with their times." if absent else "",
    )  # fmt: skip


def window(first: float, last: float) -> Window:
    """Seconds since the epoch, between the years 2000 and 2100, as UTC."""
    found = (datetime.datetime.fromtimestamp(x, datetime.UTC) for x in (first, last))
    return Window(*(x.replace(tzinfo=None) for x in found))


def _zone(ahead: datetime.timedelta) -> datetime.timedelta:
    """AIPerf's offset from UTC, from its local and its epoch clock, to a quarter of an hour; none
    where it is farther than the globe is wide."""
    quarters = round(ahead / datetime.timedelta(minutes=15))
    return datetime.timedelta(minutes=15 * quarters if abs(quarters) <= 14 * 4 else 0)


def _summary(
    start: datetime.datetime, end: datetime.datetime, load: Window, zone: datetime.timedelta
) -> Iterator[str]:
    for what, said, seen in (("start", start, load.first), ("end", end, load.last or load.first)):
        if abs(said - zone - seen) > SLACK:
            yield f"its summary's {what} {said:%m-%d %X} is {seen:%m-%d %X} in its records"


def against_run(
    name: str, load: Window, after: datetime.datetime | None, run: Run | None
) -> Iterator[str]:
    """Whether a load point fits the run: within it, after the one before, no longer than it was
    given."""
    if run is None or load.last is None:
        return
    whole, spent = run.window, run.spent.get(f"cell {name}")
    if load.first < whole.first - SLACK or load.last > (whole.last or load.last) + SLACK:
        yield f"ran {clock.shown(load)}, the run {clock.shown(whole)}"
    if after is not None and load.first < after - SLACK:
        yield f"began at {load.first:%H:%M:%S}, before the one planned before it was over"
    took = (load.last - load.first).total_seconds()
    if spent is not None and took > spent + SLACK.total_seconds():
        yield f"took {took:.0f} s, its cell {spent:.0f} s"


def load(loads: Sequence[Load], unplanned: Sequence[str]) -> list[Check]:
    """The checks of AIPerf's files, each over all load points."""
    names = ", ".join(x.name for x in loads) or "at least one load point"
    absent = [x.name for x in loads if x.cell is None]
    there = [x for x in loads if x.cell is not None]
    seen = ", ".join(x.name for x in there) or "none"
    outcome = _present(loads, there, unplanned)
    present = Check(
        id="cells",
        group="load",
        severity="required",
        outcome=outcome,
        why="every planned load point was run, and no other",
        expected=names,
        actual=seen + (f"; not planned: {', '.join(unplanned)}" if unplanned else ""),
        missing=tuple(absent),
        remedy="" if outcome == "met" else "Run what is missing, or judge what was planned.",
    )
    return [present, *(_over_cells(there, asked) for asked in _LOAD_CHECKS)]


def _present(loads: Sequence[Load], there: Sequence[Load], unplanned: Sequence[str]) -> Outcome:
    if unplanned or 0 < len(there) < len(loads):
        return "failed"
    return "met" if loads and there else "unchecked"


Answer = tuple[Outcome, str]


def _over_cells(loads: Sequence[Load], asked: "_LoadCheck") -> Check:
    answers = [(x, *asked.ask(x, x.cell)) for x in loads if x.cell is not None]
    place, outcome, shown = None, answers[0][1] if answers else "unchecked", answers
    for worst in ("failed", "unchecked"):
        bad = [answer for answer in answers if answer[1] == worst]
        if bad:
            place, outcome, shown = (
                Place(f"{bad[0][0].folder}/{records.SUMMARY}", 0),
                bad[0][1],
                bad,
            )
            break
    return Check(
        id=asked.id,
        group="load",
        severity="required",
        outcome=outcome,
        why=asked.why,
        expected=asked.expected,
        actual="; ".join(f"{x.name}: {said}" for x, _, said in shown) or "no load point to check",
        first=place,
        last=place,
        remedy="" if outcome == "met" else asked.remedy,
    )


def _ask_count(x: Load, cell: records.Cell) -> Answer:
    done, kept = cell.summary.requests, cell.records
    if x.requests is None or done is None:
        return "unchecked", "the planned or the completed number is absent"
    said = f"{x.requests} planned, {done} completed"
    if kept is None:
        return ("met" if done == x.requests else "failed"), f"{said}, no records"
    total = (kept.figures.requests or 0) + (kept.figures.errors or 0)
    said += f", {total} records"
    if kept.duplicates:
        return "failed", f"{said}, {kept.duplicates} of them seen before"
    if x.requests == done == total and kept.unnamed:
        return "unchecked", f"{said}, {kept.unnamed} of them without a request id"
    return ("met" if x.requests == done == total else "failed"), said


def _ask_errors(_x: Load, cell: records.Cell) -> Answer:
    said, kept, kinds = cell.summary.errors, cell.records, cell.error_kinds
    if said is None or kinds is None:
        return "unchecked", "error_summary is absent"
    failed = max(said, kept.figures.errors or 0) if kept else said
    return ("failed" if failed or kinds else "met"), f"{max(failed, kinds)} errors"


def _ask_cancelled(_x: Load, cell: records.Cell) -> Answer:
    if cell.cancelled is None:
        return "unchecked", "was_cancelled is absent"
    return ("failed", "cancelled") if cell.cancelled else ("met", "ran to its end")


def _ask_osl(x: Load, cell: records.Cell) -> Answer:
    kept = cell.records
    osl, source = (kept.osl, "records") if kept else (cell.osl, "summary")
    if osl is None or not x.osl:
        return "unchecked", "the planned or the measured length is absent"
    if kept and x.isl and (kept.isl is None or _off(kept.isl, x.isl)):
        asked = "an absent number" if kept.isl is None else f"{kept.isl:.1f}"
        outcome: Outcome = "unchecked" if kept.isl is None else "failed"
        return outcome, f"prompts of {asked} of {x.isl:.0f} tokens ({source})"
    outcome = "failed" if _off(osl, x.osl) else "met"
    return outcome, f"{osl:.1f} of {x.osl:.0f} tokens ({source})"


def _off(measured: float, planned: float) -> bool:
    return abs(measured - planned) > TOLERANCE * planned


def _ask_plan(x: Load, cell: records.Cell) -> Answer:
    pairs: tuple[tuple[str, object, object], ...] = (
        ("AIPerf", x.version, cell.version),
        ("model", x.model, cell.model),
        ("concurrency", x.concurrency, cell.concurrency),
        ("requests", x.requests, cell.asked),
        ("isl", x.isl, cell.isl_asked),
        ("osl", x.osl, cell.osl_asked),
    )
    if x.url is not None:  # a stranger plans none
        pairs = (*pairs, ("url", x.url.rstrip("/"), cell.url))
    known = [pair for pair in pairs if None not in pair[1:]]
    absent = [n for n, want, got in pairs if want is None or got is None]
    wrong = [f"{n} {got}, planned {want}" for n, want, got in known if want != got]
    if x.command is not None:
        said = cell.command or {}
        absent += [] if cell.command else ["command"]
        wrong += [
            f"{name} {said.get(name, 'nothing')}, planned {x.command.get(name, 'nothing')}"
            for name in sorted({*said, *x.command} if cell.command else ())
            if said.get(name, "").casefold() != x.command.get(name, "").casefold()
        ]
    if wrong:
        return "failed", ", ".join(wrong)
    if absent:
        return "unchecked", f"{', '.join(absent)} absent"
    return "met", f"AIPerf {x.version}, concurrency {x.concurrency}"


def _ask_records(x: Load, cell: records.Cell) -> Answer:
    if cell.records is None:
        return "unchecked", f"no {records.RECORDS}: every figure is from the summary only"
    if cell.records.faults:
        return "failed", cell.records.faults[0]
    # All of 18 real load points had exactly as many open at once (2026-07 and 2026-11-30).
    most = min(x.concurrency or 0, cell.records.figures.requests or 0)
    if not IN_FLIGHT * most <= cell.records.in_flight <= most:
        return "failed", f"{cell.records.in_flight} requests at once, not {most}"
    wrong = records.disagreements(cell)
    if wrong:
        return "failed", "; ".join(wrong)
    if cell.streaming and not cell.records.chunked:
        return "unchecked", "no record of a stream states when its chunks came"
    return "met", "agree"


@dataclasses.dataclass(frozen=True)
class _LoadCheck:
    id: str
    why: str
    expected: str
    remedy: str
    ask: Callable[[Load, records.Cell], Answer]


_LOAD_CHECKS: Final = (
    _LoadCheck(
        "requests",
        "every planned request completed and has its own record",
        "planned = completed = records",
        "Look at AIPerf's log; run the load point again.",
        _ask_count,
    ),
    _LoadCheck(
        "errors",
        "no request failed (AIPerf exits 0 with failed requests)",
        "error_summary empty, no errors",
        "Look at error_summary and at the server's log.",
        _ask_errors,
    ),
    _LoadCheck(
        "cancelled",
        "the load point ran to its end",
        "was_cancelled false",
        "Give the load point more time and run it again.",
        _ask_cancelled,
    ),
    _LoadCheck(
        "output-length",
        "prompts and answers were as long as asked",
        f"within {TOLERANCE:.0%} of the plan",
        "Set ignore_eos and check the tokenizer.",
        _ask_osl,
    ),
    _LoadCheck(
        "as-planned",
        "AIPerf ran as planned",
        "version, model, concurrency, requests and output length as planned",
        "Run it with the planned flags.",
        _ask_plan,
    ),
    _LoadCheck(
        "records",
        "the figures follow from the raw records",
        "summary = records",
        "Keep profile_export.jsonl beside the summary, and edit neither.",
        _ask_records,
    ),
)
