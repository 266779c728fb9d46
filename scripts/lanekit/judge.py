"""Judge evidence against a contract. Pure: takes what was scanned and read, returns checks.

A judge never reads a file and never prints. Evidence is distinct ranks, not lines.
"""

import contextlib
import dataclasses
import datetime
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from lanekit import clock, ranks, records, scan
from lanekit.contract import Bound, Rule
from lanekit.spec import Profile
from lanekit.verdict import Check, Outcome, Place

OSL_TOLERANCE: Final = (
    0.05  # AIPerf 0.3 gave 300 tokens where 1023 were asked (ai-dynamo/aiperf#339)
)


@dataclasses.dataclass(frozen=True)
class Line:
    """One kind of evidence in one file, with its places resolved.

    host: the host that the file's name says. stream, part: a rotated log is one stream of parts.
    """

    evidence: scan.Evidence
    first: Place
    last: Place
    host: str
    stream: str
    part: int


@dataclasses.dataclass(frozen=True)
class Logs:
    """What all logs of a drop gave. first_request: stream -> (part, line) of its first answered
    request. overflow: probes that gave more than is kept. files: logs that hold anything. ends:
    the first and last bytes of each log, where times are looked for. armed: the lines of processes
    that the evidence hook was in."""

    lines: Mapping[str, Sequence[Line]]
    known: ranks.Identities
    first_request: Mapping[str, tuple[int, int]]
    sensors: frozenset[str]
    overflow: frozenset[str]
    files: int
    ends: Sequence[tuple[bytes, bytes]] = ()
    armed: Sequence[Line] = ()


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the `$names` of rules stand for, and how many requests were planned. None: unknown.
    batch: the program was started once a cell, so that a rank has had several processes."""

    profile: Profile
    requests: int | None
    engine_version: str | None = None
    served_name: str | None = None
    batch: bool = False

    def value(self, wanted: str) -> str | None:
        """The value of an expectation, with `$name` looked up."""
        if not wanted.startswith("$"):
            return wanted
        fabric = self.profile.fabric
        known: dict[str, object] = {
            "ranks": self.profile.ranks, "nics": self.profile.nics,
            "provider": fabric.provider, "fabric": fabric.fabric,
            "engine_version": self.engine_version, "served_name": self.served_name,
        }  # fmt: skip
        found = known[wanted[1:]]
        return None if found is None else str(found)


@dataclasses.dataclass(frozen=True)
class Load:
    """A planned load point beside what AIPerf left of it. folder: in the drop."""

    name: str
    folder: str
    cell: records.Cell | None
    concurrency: int | None
    requests: int | None
    osl: float | None
    version: str | None
    model: str | None


def transport(rules: Iterable[Bound], logs: Logs, facts: Facts) -> list[Check]:
    """One check for each rule of a contract."""
    return [_rule(bound, logs, facts) for bound in rules]


def _rule(bound: Bound, logs: Logs, facts: Facts) -> Check:
    rule, every = bound.rule, logs.lines.get(bound.id, ())
    lines = _in_phase(rule, every, logs)
    wrong, unread, unknown = _unexpected(rule, every, facts)  # wrong is wrong at any time
    outcome, expected, actual, missing = _NEEDS[rule.needs](rule, lines, logs, facts)
    if unknown and outcome == "met":
        outcome, actual = "unchecked", f"{actual}; the plan does not say {', '.join(unknown)}"
    if unread and outcome == "met":
        outcome, actual = "unchecked", f"{actual}; {len(unread)} could not be read: {unread[0]}"
    if wrong:
        outcome, actual = "failed", f"{actual}; {wrong[0]}"
    if every and not lines and rule.needs != "none":
        outcome, actual = "failed", f"lines, but none {rule.phase.replace('_', ' ')}"
    if bound.id in logs.overflow:  # then some of its lines are not kept, forbidden ones included
        outcome, actual = "failed", f"{actual}; more different lines than any run prints"
    places = _span(lines or every or (logs.armed if rule.watched else ()))
    return Check(
        id=bound.id,
        group="transport",
        severity=bound.severity,
        outcome=outcome,
        why=rule.why,
        expected=_expected(rule, expected, facts),
        actual=actual,
        first=places[0],
        last=places[1],
        missing=tuple(missing),
        remedy="" if outcome == "met" else rule.remedy,
        note=rule.note,
        source=rule.source,
    )


def _in_phase(rule: Rule, lines: Sequence[Line], logs: Logs) -> Sequence[Line]:
    """The lines that stand in the rule's phase. A stream without a request line (a host that only
    works for another) has no phases: its lines count."""
    if rule.phase == "any":
        return lines
    return [x for x in lines if (x.part, x.first.line) < logs.first_request.get(x.stream, _NEVER)]


_NEVER = (sys.maxsize, 0)


def _unexpected(
    rule: Rule, lines: Sequence[Line], facts: Facts
) -> tuple[list[str], list[str], list[str]]:
    """Captures that contradict the rule, captures the program itself could not read, and names
    of expectations that neither profile nor plan knows."""
    wrong, unread, unknown = [], [], []
    for group, wanted in rule.expect.items():
        options = (wanted,) if isinstance(wanted, str) else wanted
        allowed = [facts.value(option) for option in options]
        if None in allowed:
            unknown.append(options[0].removeprefix("$").replace("_", " "))
            continue
        for line in lines:
            value = dict(line.evidence.values).get(group, "")
            if value == "unknown":
                unread.append(f"{group} at {line.first.file}:{line.first.line}")
            elif value not in allowed:
                seen = f"{group} = {value} at {line.first.file}:{line.first.line}"
                wrong.append(f"{seen}, expected {' or '.join(map(str, allowed))}")
    return wrong, unread, unknown


def _expected(rule: Rule, what: str, facts: Facts) -> str:
    parts = []
    for group, wanted in rule.expect.items():
        options = (wanted,) if isinstance(wanted, str) else wanted
        shown = " or ".join(facts.value(option) or option for option in options)
        parts.append(f"{group} {shown}")
    return f"{what} with {', '.join(parts)}" if parts else what


Judged = tuple[Outcome, str, str, list[str]]


def _none_seen(rule: Rule, logs: Logs) -> Outcome:
    """No evidence: refuted where the log would have held it, else it could not be checked."""
    return "failed" if rule.sensor in logs.sensors else "unchecked"


def _ranks(rule: Rule, lines: Sequence[Line], logs: Logs, facts: Facts) -> Judged:
    want = facts.profile.ranks
    expected = f"{want} of {want} ranks"
    found = {ranks.key(x.evidence, logs.known, x.host) for x in lines}
    seen = ranks.untorn({key for key in found if key is not None}, facts.profile.hosts)
    if not lines:
        return _none_seen(rule, logs), expected, "no such line", []
    if not seen:
        return "unchecked", expected, "lines, but none says its rank", []
    missing, extra = ranks.compare(seen, facts.profile)
    extra += [] if facts.batch else _twice(lines, logs)
    actual = f"{len(seen)} of {want} ranks"
    if extra:
        return "failed", expected, f"{actual}, unexpected: {'; '.join(extra)}", missing
    return ("failed" if missing else "met"), expected, actual, missing


def _twice(lines: Sequence[Line], logs: Logs) -> list[str]:
    """A rank that two processes claim: the logs hold two runs, or a restart in the middle."""
    pids: dict[ranks.Key, set[str]] = defaultdict(set)
    for x in lines:
        rank, pid = ranks.key(x.evidence, logs.known, x.host), ranks.process(x.evidence)
        if rank is not None and pid:
            pids[rank].add(pid)
    twice = sorted((rank, found) for rank, found in pids.items() if len(found) > 1)
    return [f"{r.host} [{r.local}] by processes {' and '.join(sorted(p))}" for r, p in twice[:1]]


def _line(rule: Rule, lines: Sequence[Line], logs: Logs, _facts: Facts) -> Judged:
    count = sum(x.evidence.count for x in lines)
    if not lines:
        return _none_seen(rule, logs), "at least one line", "no such line", []
    return "met", "at least one line", _values(rule, lines) or f"{count} lines", []


def _count(rule: Rule, lines: Sequence[Line], logs: Logs, facts: Facts) -> Judged:
    want, count = facts.profile.ranks, sum(x.evidence.count for x in lines)
    expected = f"{want} lines" if rule.needs == "count" else f"at least {want} lines"
    if not lines:
        return _none_seen(rule, logs), expected, "no such line", []
    met = count == want if rule.needs == "count" else count >= want
    return ("met" if met else "failed"), expected, f"{count} lines", []


def _requests(rule: Rule, lines: Sequence[Line], logs: Logs, facts: Facts) -> Judged:
    count = sum(x.evidence.count for x in lines)
    if facts.requests is None:
        return "unchecked", "as many lines as planned requests", f"{count} lines; no plan", []
    expected = f"at least {facts.requests} lines"
    if not lines:
        return _none_seen(rule, logs), expected, "no such line", []
    return ("met" if count >= facts.requests else "failed"), expected, f"{count} lines", []


def _none(rule: Rule, lines: Sequence[Line], logs: Logs, facts: Facts) -> Judged:
    count = sum(x.evidence.count for x in lines)
    if logs.files == 0:
        return "unchecked", "no such line", "no log to look into", []
    if lines:
        return "failed", "no such line", f"{count} lines{_who(lines, logs)}", []
    if rule.sensor and rule.sensor not in logs.sensors:
        return "unchecked", "no such line", f"none, but no{rule.sensor}line either", []
    if rule.watched:
        return _unwatched(logs, facts)
    return "met", "no such line", "none", []


def _unwatched(logs: Logs, facts: Facts) -> Judged:
    """No line of the hook's: that says something of the ranks that the hook was in."""
    want = facts.profile.ranks
    world = ("world", str(want))
    armed = [x.evidence for x in logs.armed if world in x.evidence.values]
    found = {ranks.key(evidence, logs.known, "") for evidence in armed}
    seen = {key for key in found if key is not None}
    missing, _ = ranks.compare(seen, facts.profile)
    actual = f"none; the hook was in {len(seen)} of {want} ranks"
    outcome: Outcome = "unchecked" if missing or not seen else "met"
    return outcome, "no such line where the hook would print it", actual, missing


_NEEDS: Final = {
    "ranks": _ranks, "line": _line, "count": _count, "lines": _count,
    "requests": _requests, "none": _none,
}  # fmt: skip


def _values(rule: Rule, lines: Sequence[Line]) -> str:
    seen: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        for group, value in line.evidence.values:
            if group in rule.expect:
                seen[group].add(value)
    return ", ".join(f"{group} {' and '.join(sorted(v))}" for group, v in seen.items())


def _who(lines: Sequence[Line], logs: Logs) -> str:
    found = {ranks.key(x.evidence, logs.known, x.host) for x in lines} - {None}
    named = [f"{k.host} [{k.local}]" for k in sorted(k for k in found if k is not None)]
    return f" from {', '.join(named)}" if named else ""


def _span(lines: Sequence[Line]) -> tuple[Place | None, Place | None]:
    if not lines:
        return None, None
    first = min((x.first for x in lines), key=lambda p: (p.file, p.line))
    last = max((x.last for x in lines), key=lambda p: (p.file, p.line))
    return first, last


def same_run(loads: Sequence[Load], logs: Logs, *, whole: bool) -> Check:
    """The logs were written while the load points ran. A stranger's excerpt may end early, so only
    a whole log (`whole`) must reach to the end. Noted where no clock can be compared."""
    outcome: Outcome = "unchecked"
    said = []
    for x in loads:
        if x.cell is None or x.cell.start is None or x.cell.end is None:
            continue
        start, end = x.cell.start, x.cell.end
        windows = [w for ends in logs.ends if (w := clock.window(*ends, near=start)) is not None]
        if not windows:
            break
        if not whole:
            windows.append(clock.Window(windows[0].first, windows[0].first + _DAY))
        zone = _zone(x.cell)
        why = clock.outside(clock.Window(start, end), windows, zone)
        said += [f"{x.name}: {why}"] if why else []
        outcome = "failed" if said else "met"
    return Check(
        id="same-run",
        group="load",
        severity="required" if outcome == "failed" else "noted",
        outcome=outcome,
        why="the log was written while the load points ran",
        expected="every load point inside the log's times",
        actual="; ".join(said) or ("inside" if outcome == "met" else "no clocks to compare"),
        remedy="This log is of another run." if said else "",
    )


_DAY: Final = datetime.timedelta(days=1)


def _zone(cell: records.Cell) -> datetime.timedelta:
    """AIPerf's offset from UTC, to a quarter of an hour, from its local and its epoch clock."""
    if cell.start is None or cell.records is None or cell.records.window is None:
        return datetime.timedelta(0)
    with contextlib.suppress(ValueError, OverflowError, OSError):  # records may say any number
        utc = datetime.datetime.fromtimestamp(cell.records.window[0], datetime.UTC)
        quarters = round((cell.start - utc.replace(tzinfo=None)).total_seconds() / 900)
        if abs(quarters) <= 64:
            return datetime.timedelta(minutes=15 * quarters)
    return datetime.timedelta(0)


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
    met = abs(osl - x.osl) <= OSL_TOLERANCE * x.osl
    return ("met" if met else "failed"), f"{osl:.1f} of {x.osl:.0f} tokens ({source})"


def _ask_plan(x: Load, cell: records.Cell) -> Answer:
    pairs = (
        ("AIPerf", x.version, cell.version),
        ("model", x.model, cell.model),
        ("concurrency", x.concurrency, cell.concurrency),
        ("requests", x.requests, cell.asked),
        ("osl", x.osl, cell.osl_asked),
    )
    known = [pair for pair in pairs if None not in pair[1:]]
    absent = [n for n, want, got in pairs if want is None or got is None]
    wrong = [f"{n} {got}, planned {want}" for n, want, got in known if want != got]
    if wrong:
        return "failed", ", ".join(wrong)
    if absent:
        return "unchecked", f"{', '.join(absent)} absent"
    return "met", f"AIPerf {x.version}, concurrency {x.concurrency}"


def _ask_records(_x: Load, cell: records.Cell) -> Answer:
    if cell.records is None:
        return "unchecked", f"no {records.RECORDS}: every figure is from the summary only"
    if cell.records.faults:
        return "failed", cell.records.faults[0]
    wrong = records.disagreements(cell)
    return ("failed", "; ".join(wrong)) if wrong else ("met", "agree")


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
        "answers were as long as asked",
        f"within {OSL_TOLERANCE:.0%} of the plan",
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
        "summary = records within 0.5 %",
        "Keep profile_export.jsonl beside the summary, and edit neither.",
        _ask_records,
    ),
)
