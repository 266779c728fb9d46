"""Judge evidence against a contract. Pure: takes what was scanned and read, returns checks.

A judge never reads a file and never prints. Evidence is distinct ranks, not lines.
"""

import dataclasses
import datetime
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final

from lanekit import given, ranks, scan
from lanekit.clock import SLACK, Window, shown
from lanekit.contract import AT_MOST, Bound, Rule
from lanekit.plan import OPTION
from lanekit.spec import Profile
from lanekit.verdict import Check, Outcome, Place

SPREAD: Final = 20  # an endpoint is loaded from this fraction of the planned requests on


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
    """What all logs of a drop gave.

    first_request: stream -> (part, line) of its first answered request. overflow: probes that gave
    more than is kept. files: logs that hold anything. ends: the times that the first and last
    bytes of each log state. armed: the lines of processes that the evidence hook was in;
    watched: those processes, pid -> hosts; times: when such a line was printed, in seconds since
    the epoch.
    """

    lines: Mapping[str, Sequence[Line]]
    known: ranks.Identities
    first_request: Mapping[str, tuple[int, int]]
    overflow: frozenset[str]
    files: int
    ends: Sequence[tuple[bytes, bytes]] = ()
    armed: Sequence[Line] = ()
    watched: Mapping[str, Set[str]] = dataclasses.field(default_factory=dict)
    times: Mapping[Place, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the `$names` of rules stand for, and how many requests were planned. None: unknown.
    versions: what the plan pins of nccl, nvshmem and deep_ep. loaded: when the first planned
    request was sent, in seconds since the epoch. batch: the program was started once a cell, so
    that a rank has had several processes. apart: each engine wrote a log of its own.
    options: what the plan starts is given, options and variables by name; None where nothing is
    planned. started: the same of each program apart, by its log. beyond: answers beside those to
    `requests` that a run of ours explains; None where
    others may have asked too."""

    profile: Profile
    requests: int | None
    engine_version: str | None = None
    served_name: str | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    loaded: float | None = None
    batch: bool = False
    apart: bool = False
    options: Mapping[str, str] | None = None
    started: Mapping[str, given.Given] | None = None
    beyond: int | None = None

    def value(self, wanted: str) -> str | None:
        """The value of an expectation, with `$name` looked up."""
        if wanted.startswith(AT_MOST):
            limit = self.value(wanted.removeprefix(AT_MOST))
            return None if limit is None else AT_MOST + limit
        if not wanted.startswith("$"):
            return wanted
        name, _, usual = wanted[1:].partition("|")
        if name.isupper() or name.startswith(OPTION):
            return None if self.options is None else self.options.get(name, usual) or None
        fabric = self.profile.fabric
        known: dict[str, object] = {
            "ranks": self.profile.ranks, "nics": self.profile.nics,
            "provider": fabric.provider, "fabric": fabric.fabric,
            "engine_version": self.engine_version, "served_name": self.served_name,
            **{name: self.versions.get(name) for name in ("nccl", "nvshmem", "deep_ep")},
        }  # fmt: skip
        found = known[name]
        return None if found is None else str(found)


def applying(rules: Iterable[Bound], facts: Facts) -> tuple[Bound, ...]:
    """The rules that say something of this run: what is held to a plan needs one, and what an
    option switches off is not asked for where the plan gives it."""
    return tuple(
        bound
        for bound in rules
        if (not bound.rule.planned or facts.started is not None)
        and _asked(bound.rule.unless, facts)
    )


def _asked(unless: str, facts: Facts) -> bool:
    if unless == given.ANYTHING:
        return facts.started is None
    return not unless or (facts.options is not None and unless not in facts.options)


def transport(rules: Iterable[Bound], logs: Logs, facts: Facts) -> list[Check]:
    """One check for each rule of a contract."""
    return [_rule(bound, logs, facts) for bound in rules]


def _rule(bound: Bound, logs: Logs, facts: Facts) -> Check:
    rule, every = bound.rule, logs.lines.get(bound.id, ())
    lines, undated = _in_phase(rule, every, logs, facts)
    wrong, unread, unknown = _unexpected(rule, every, facts)  # wrong is wrong at any time
    outcome, expected, actual, missing = _NEEDS[rule.needs](rule, lines, logs, facts)
    if outcome == "met" and (doubt := _doubt(rule, lines, undated, logs, facts)):
        outcome, actual = "unchecked", f"{actual}; {doubt}"
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
    places = _span(lines or every or (logs.armed if rule.sensor == "hook" else ()))
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


def _in_phase(
    rule: Rule, lines: Sequence[Line], logs: Logs, facts: Facts
) -> tuple[Sequence[Line], Sequence[Line]]:
    """The lines that stand in the rule's phase, and those of them of which that cannot be told. A
    stream without a request line (a host that only works for another) has no phases of its own:
    there the time counts that the hook printed."""
    if rule.phase == "any" or facts.batch or not logs.first_request:
        return lines, ()
    early, undated = [], []
    for x in lines:
        when, begin = logs.times.get(x.first), logs.first_request.get(x.stream)
        if begin is not None:
            early += [x] if (x.part, x.first.line) < begin else []
        elif when is None or facts.loaded is None:
            undated.append(x)
        elif when < facts.loaded:
            early.append(x)
    return [*early, *undated], undated


def _doubt(
    rule: Rule, lines: Sequence[Line], undated: Sequence[Line], logs: Logs, facts: Facts
) -> str:
    """Why lines that are all there may not be this run's, or not have come in time; else empty."""
    if undated:
        return f"nothing dates {undated[0].first.file}:{undated[0].first.line}"
    ours = [x for x in lines if not _unwatched(x, logs)]
    known = rule.needs not in ("ranks", "one") or not logs.armed or len(ours) == len(lines)
    if known or _NEEDS[rule.needs](rule, ours, logs, facts)[0] == "met":
        return ""
    return "some are of processes that the evidence hook was not in"


def _unexpected(
    rule: Rule, lines: Sequence[Line], facts: Facts
) -> tuple[list[str], list[str], list[str]]:
    """Captures that contradict the rule, captures the program itself could not read, and names
    of expectations that neither profile nor plan knows."""
    wrong, unread, unknown = [], [], []
    for group, options in rule.wanted():
        allowed = [facts.value(option) for option in options]
        if None in allowed:
            unknown.append(options[0].lstrip("<=$").partition("|")[0].replace("_", " "))
            continue
        for line in lines:
            value = dict(line.evidence.values).get(group, "")
            if value == "unknown":
                unread.append(f"{group} at {line.first.file}:{line.first.line}")
            elif not any(_allows(str(each), value) for each in allowed):
                seen = f"{group} = {value} at {line.first.file}:{line.first.line}"
                wrong.append(f"{seen}, expected {' or '.join(map(str, allowed))}")
    unplanned = (said for line in lines for said in _unplanned(rule, line, facts))
    wrong += itertools.islice(unplanned, 1)  # of lines that a stranger made, however many
    return wrong, unread, unknown


def _allows(allowed: str, value: str) -> bool:
    """Whether a value is one that a rule allows: that one, or a number that is at most so much. A
    limit of 0 is none, as in DeepEP's."""
    if not allowed.startswith(AT_MOST):
        return value == allowed
    limit = allowed.removeprefix(AT_MOST)
    return limit == "0" or (value.isdecimal() and limit.isdecimal() and int(value) <= int(limit))


def _unplanned(rule: Rule, line: Line, facts: Facts) -> list[str]:
    """Where a program says that it was given another thing than the plan gives it."""
    plan = (facts.started or {}).get(line.stream)
    values, at = dict(line.evidence.values), f" at {line.first.file}:{line.first.line}"
    if not rule.planned:
        return []
    if plan is None:
        return [f"a program that nothing planned speaks{at}"]
    if rule.planned == "options":
        return [x + at for x in given.options(values["options"], plan.options, rule.usual)]
    name, said = values["name"], values["value"]
    found = given.variable(name, said, plan.variables, rule.usual)
    return [found + at] if found else []


def hook_clock(logs: Logs, run: Window) -> Check:
    """The ranks say of themselves that they met during the run (UTC)."""
    told = [x for x in logs.armed if x.first in logs.times]
    silent = [x for x in logs.armed if x.first not in logs.times]
    early = (run.first - SLACK).replace(tzinfo=datetime.UTC).timestamp()
    late = ((run.last or run.first) + SLACK).replace(tzinfo=datetime.UTC).timestamp()
    wrong = [x for x in told if not early <= logs.times[x.first] <= late]
    bad = wrong or silent
    where = f" at {bad[0].first.file}:{bad[0].first.line}" if bad else ""
    return Check(
        id="hook-clock",
        group="transport",
        severity="required",
        outcome="failed" if wrong else "unchecked" if silent else "met",
        why="the ranks met while the run was under way",
        expected=f"{shown(run)} UTC by the evidence hook's clock",
        actual=f"another time{where}" if wrong else f"no time{where}" if silent else "they did",
        first=bad[0].first if bad else told[0].first,
        last=bad[0].first if bad else told[-1].first,
        remedy="This log is of another run." if wrong else
        "Run it again with this checkout's evidence hook, which prints the time." if silent else "",
    )  # fmt: skip


def _unwatched(line: Line, logs: Logs) -> str:
    """The process that a line names, where the evidence hook was not in it; else empty. A host's
    name may be glued to the end of another line's."""
    values = dict(line.evidence.values)
    pid, host = values.get("pid", ""), ranks.short(values.get("host", ""))
    seen = logs.watched.get(pid, ())
    # In containers the same few pids are on every host: the whole name is looked up first.
    if not pid or host in seen or any(host.endswith(name) for name in seen):
        return ""
    return f"{host} process {pid}".strip()


def _expected(rule: Rule, what: str, facts: Facts) -> str:
    parts = []
    for group, options in rule.wanted():
        shown = " or ".join(facts.value(option) or option for option in options)
        parts.append(f"{group} {shown}")
    return f"{what} with {', '.join(parts)}" if parts else what


Judged = tuple[Outcome, str, str, list[str]]


def _none_seen(rule: Rule, logs: Logs, facts: Facts) -> Outcome:
    """No evidence: refuted where the log would have held it, else it could not be checked."""
    return "failed" if rule.sensor and not _blind(rule, logs, facts) else "unchecked"


def _blind(rule: Rule, logs: Logs, facts: Facts) -> list[str]:
    """Where the rule's sensor was not: there, the absence of a line says nothing."""
    if rule.sensor == "nccl":
        return [] if ranks.TALKING.id in logs.lines else ["every rank"]
    if rule.sensor != "hook":
        return []
    world = ("world", str(facts.profile.ranks))
    armed = [x.evidence for x in logs.armed if world in x.evidence.values]
    seen = {key for x in armed if (key := ranks.key(x, logs.known, ""))}
    if not seen:
        return ["every rank"]
    said = (x for lines in logs.lines.values() for x in lines)
    unwatched = sorted({who for x in said if (who := _unwatched(x, logs))})
    return ranks.compare(seen, facts.profile)[0] + unwatched


def _ranks(rule: Rule, lines: Sequence[Line], logs: Logs, facts: Facts) -> Judged:
    want = facts.profile.ranks
    expected = f"{want} of {want} ranks"
    found = {ranks.key(x.evidence, logs.known, x.host) for x in lines}
    seen = ranks.untorn({key for key in found if key is not None}, facts.profile.hosts)
    if not lines:
        return _none_seen(rule, logs, facts), expected, "no such line", []
    if not seen:
        return "unchecked", expected, "lines, but none says its rank", []
    missing, extra = ranks.compare(seen, facts.profile)
    extra += [] if facts.batch else _twice(lines, logs)
    actual = f"{len(seen)} of {want} ranks"
    if extra:
        return "failed", expected, f"{actual}, unexpected: {'; '.join(extra)}", missing
    return ("failed" if missing else "met"), expected, actual, missing


def _one(rule: Rule, lines: Sequence[Line], logs: Logs, facts: Facts) -> Judged:
    """Every rank names the same communicator; smaller ones do not count."""
    want = facts.profile.ranks
    groups: dict[str, list[Line]] = defaultdict(list)
    for x in lines:
        values = dict(x.evidence.values)
        if values["nranks"] == str(want):
            groups[values["comm"]].append(x)
    found = [_ranks(rule, group, logs, facts) for group in groups.values()]
    best = next((x for x in found if x[0] == "met"), found[0] if found else None)
    expected = f"{want} ranks in one communicator"
    if best is None:
        return _none_seen(rule, logs, facts), expected, "no such communicator", []
    return best[0], expected, f"{best[2]} in one of {len(found)}", best[3]


def _twice(lines: Sequence[Line], logs: Logs) -> list[str]:
    """A rank that two processes claim: the logs hold two runs, or a restart in the middle."""
    pids: dict[ranks.Key, set[str]] = defaultdict(set)
    for x in lines:
        rank, pid = ranks.key(x.evidence, logs.known, x.host), ranks.process(x.evidence)
        if rank is not None and pid:
            pids[rank].add(pid)
    twice = sorted((rank, found) for rank, found in pids.items() if len(found) > 1)
    shown = ((f"{r.host} [{r.local}]".strip(), " and ".join(sorted(p))) for r, p in twice[:1])
    return [f"{who} by processes {pids}" for who, pids in shown]


def _any(rule: Rule, lines: Sequence[Line], logs: Logs, facts: Facts) -> Judged:
    """As many lines as there are: what they say is judged, not that they are there."""
    expected = "no line that says otherwise"
    if not lines and (blind := _blind(rule, logs, facts)):
        return "unchecked", expected, f"none, but {rule.sensor} was not everywhere", blind
    return "met", expected, f"{sum(x.evidence.count for x in lines)} lines", []


def _line(rule: Rule, lines: Sequence[Line], logs: Logs, facts: Facts) -> Judged:
    count = sum(x.evidence.count for x in lines)
    if not lines:
        return _none_seen(rule, logs, facts), "at least one line", "no such line", []
    return "met", "at least one line", _values(rule, lines) or f"{count} lines", []


def _count(rule: Rule, lines: Sequence[Line], logs: Logs, facts: Facts) -> Judged:
    want, count = facts.profile.ranks, sum(x.evidence.count for x in lines)
    expected = f"{want} lines" if rule.needs == "count" else f"at least {want} lines"
    if not lines:
        return _none_seen(rule, logs, facts), expected, "no such line", []
    met = count == want if rule.needs == "count" else count >= want
    return ("met" if met else "failed"), expected, f"{count} lines", []


def _requests(rule: Rule, lines: Sequence[Line], logs: Logs, facts: Facts) -> Judged:
    count = sum(x.evidence.count for x in lines)
    if facts.requests is None:
        return "unchecked", "as many lines as planned requests", f"{count} lines; no plan", []
    expected = f"at least {facts.requests} lines"
    if not lines:
        return _none_seen(rule, logs, facts), expected, "no such line", []
    if facts.beyond is not None and count > facts.requests + facts.beyond:
        said = f"{count} lines, more than the plan explains: {facts.requests + facts.beyond}"
        return "failed", expected, said, []
    return ("met" if count >= facts.requests else "failed"), expected, f"{count} lines", []


def _spread(rule: Rule, lines: Sequence[Line], logs: Logs, facts: Facts) -> Judged:
    """As many lines as requests, over several endpoints: engines, where each has a log of its own,
    whatever process its lines name. One with a few lines does not count: every engine was asked
    once before the router was."""
    outcome, expected, actual, missing = _requests(rule, lines, logs, facts)
    counts: dict[str, int] = defaultdict(int)
    for x in lines:
        process = f"{x.evidence.source.label} {x.evidence.source.pid}".strip()
        who = x.stream if facts.apart else process
        counts[dict(x.evidence.values).get("endpoint", who)] += x.evidence.count
    counts.pop("", None)
    least = max(2, (facts.requests or 0) // SPREAD)
    loaded = sum(count >= least for count in counts.values())
    if outcome == "met" and loaded < 2:
        outcome = "failed"
    told = " and ".join(str(count) for count in sorted(counts.values(), reverse=True))
    shown = f"{actual} over {loaded} loaded endpoints" + (f" ({told})" if told else "")
    return outcome, f"{expected} over at least 2 endpoints", shown, missing


def _none(rule: Rule, lines: Sequence[Line], logs: Logs, facts: Facts) -> Judged:
    count = sum(x.evidence.count for x in lines)
    if logs.files == 0:
        return "unchecked", "no such line", "no log to look into", []
    if lines:
        return "failed", "no such line", f"{count} lines{_who(lines, logs)}", []
    if blind := _blind(rule, logs, facts):
        return "unchecked", "no such line", f"none, but {rule.sensor} was not everywhere", blind
    return "met", "no such line", "none", []


_NEEDS: Final = {
    "ranks": _ranks, "one": _one, "line": _line, "any": _any, "count": _count, "lines": _count,
    "requests": _requests, "spread": _spread, "none": _none,
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
