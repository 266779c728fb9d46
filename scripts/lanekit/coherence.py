"""Judge a gate's answers: by themselves, over batch sizes, and against a reference arm's. Pure.

Two greedy answers are compared position by position as long as their tokens agree, and at the
first position where they do not: up to there both had the same context. `lanes/contracts/
coherence.toml` holds the numbers and why they are what they are.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from lanekit.answers import SILENT, Answer, Answers, Ask, Header, Tolerance, digest
from lanekit.verdict import Check, Outcome, Severity

SHOWN: Final = 3  # faults of a check
SAME: Final = ("lane", "profile", "model", "dummy_weights", "questions")  # of two files of answers


@dataclasses.dataclass(frozen=True)
class Gate:
    """What a drop has of its gate. reference: the arm that the plan compares with, empty where
    there is none to compare with; theirs: its answers, None where none were found. untrue: what is
    wrong with the file they were copied into. subject: fields of the header that ours must have."""

    ask: Ask
    tolerance: Tolerance
    reference: str
    ours: Answers | None
    theirs: Answers | None
    untrue: str = ""
    subject: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Apart:
    """How far two answers are apart. positions: compared ones. decisive: those whose first token
    leads clearly. off: (nats, where) of positions beyond the tolerance. worst: nats."""

    positions: int
    decisive: int
    off: tuple[tuple[float, str], ...]
    worst: float


def checks(gate: Gate) -> list[Check]:
    """The checks of a gate; every one is required but where nothing could be claimed."""
    if gate.ours is None:
        return [_check("answers", "failed", "no answers", "every question answered")]
    if other := _others(gate.ours.header, gate.subject):
        return [_check("answers", "failed", other, "answers of the row that was planned")]
    whole = _whole(gate.ours, gate.ask)
    if whole.outcome != "met":
        return [whole]  # the others would only repeat it
    return [whole, _alike(gate.ours), _batches(gate, gate.ours), _reference(gate, gate.ours)]


def absent(remains: str) -> Check:
    """What a drop gets whose plan has no gate. remains: what tells that it had one."""
    if remains:
        return _check("answers", "failed", f"no gate in the plan, but {remains}", "a planned gate")
    said = "not compared: the run had no coherence gate"
    return _check("answers-reference", "unchecked", said, "answers")


def _others(header: Header, subject: Mapping[str, object]) -> str:
    """How answers are not of the row and the plan they lie beside."""
    return ", ".join(
        f"their {key} is {found}, not {wanted}"
        for key, wanted in subject.items()
        if (found := getattr(header, key)) != wanted
    )


_WHY: Final = {
    "answers": "every question got as many tokens as asked, with finite logprobs, greedily",
    "answers-alike": "different prompts get different answers, not one token for ever",
    "answers-batches": "a prompt gets the same answer alone and beside others",
    "answers-reference": "the reference arm gives the same answers: fast garbage is refuted",
}
_REMEDY: Final = {
    "answers": "Read the server's log at the gate's requests.",
    "answers-alike": "The model answers noise: compare with the reference arm, layer by layer.",
    "answers-batches": "Padding or captured sizes change answers: try each batch size alone.",
    "answers-reference": "The transport or its kernels change what the model says.",
}


def _check(
    name: str,
    outcome: Outcome,
    actual: str,
    expected: str,
    *,
    severity: Severity = "required",
    missing: Iterable[str] = (),
) -> Check:
    return Check(
        id=name,
        group="answers",
        severity=severity,
        outcome=outcome,
        why=_WHY[name],
        expected=expected,
        actual=actual,
        missing=tuple(missing),
        remedy="" if outcome == "met" else _REMEDY[name],
    )


def _whole(ours: Answers, ask: Ask) -> Check:
    expected = f"{len(ask.places())} answers of {ask.tokens} tokens"
    if ours.header.questions != digest(ask):
        said = "other questions were asked than today's: judge it with the harness that made it"
        return _check("answers", "unchecked", said, expected)
    if ours.answers and all(each.error.startswith(SILENT) for each in ours.answers):
        return _check("answers", "unchecked", "the engine gives no logprobs", expected)
    want = [(prompt.id, batch) for batch, prompt in ask.places()]
    have = [each.place for each in ours.answers]
    missing = [_named(place) for place in want if place not in have]
    faults = [f"{_named(x.place)}: {why}" for x in ours.answers if (why := _fault(x, ask))]
    faults += ["an answer that nobody asked for, or twice"] if len(have) > len(want) else []
    shown = "; ".join(faults[:SHOWN]) or f"{len(have)} answers of {ask.tokens} tokens"
    outcome: Outcome = "failed" if missing or faults else "met"
    return _check("answers", outcome, shown, expected, missing=missing)


def _named(place: tuple[str, int]) -> str:
    return f"{place[0]} in a batch of {place[1]}"


def _fault(answer: Answer, ask: Ask) -> str:
    """What is wrong with an answer by itself."""
    if answer.error:
        return answer.error
    if not len(answer.tokens) == len(answer.logprobs) == len(answer.top) == ask.tokens:
        return f"{len(answer.tokens)} tokens, {ask.tokens} asked"
    for position, (token, top) in enumerate(zip(answer.tokens, answer.top, strict=True)):
        values = [
            value for value in (*top.values(), answer.logprobs[position]) if value is not None
        ]
        if len(values) <= len(top) or not top:
            return f"a logprob at position {position} is no finite number"
        if token not in top or max(values) > values[list(top).index(token)]:
            return f"the token at position {position} is not the most probable one"
    return ""


def _alike(ours: Answers) -> Check:
    """Garbage that is the same everywhere. With dummy weights every answer is noise."""
    by_prompt = {each.prompt: each.tokens for each in ours.answers}
    stuck = sorted(prompt for prompt, tokens in by_prompt.items() if len(set(tokens)) == 1)
    distinct = len(set(by_prompt.values()))
    bad = distinct == 1 < len(by_prompt) or 2 * len(stuck) > len(by_prompt)
    said = f"{distinct} different answers to {len(by_prompt)} prompts"
    said += f", {len(stuck)} of them one token for ever" if stuck else ""
    wanted = "not all alike, at most half of them one token for ever"
    if bad and ours.header.dummy_weights:
        said += "; dummy weights: says nothing"
        return _check("answers-alike", "unchecked", said, wanted, severity="noted")
    return _check("answers-alike", "failed" if bad else "met", said, wanted)


def _batches(gate: Gate, ours: Answers) -> Check:
    """Each prompt's answers in bigger batches beside its first one."""
    first: dict[str, Answer] = {}
    pairs = []
    for each in ours.answers:
        if each.prompt in first:
            pairs.append((first[each.prompt], each))
        first.setdefault(each.prompt, each)
    return _compared("answers-batches", pairs, gate.tolerance, dummy=ours.header.dummy_weights)


def _reference(gate: Gate, ours: Answers) -> Check:
    name, wanted = "answers-reference", f"those of {gate.reference or 'nobody'}"
    if not gate.reference:
        said = f"not compared: {ours.header.arm} is what other arms are compared with"
        return _check(name, "met", said, wanted, severity="noted")
    if gate.theirs is None and not gate.untrue:
        said = f"not compared: no answers of arm {gate.reference} were at hand"
        return _check(name, "unchecked", said, wanted, severity="noted")
    if gate.theirs is None or (wrong := gate.untrue or _unfit(gate, ours, gate.theirs)):
        return _check(name, "failed", wrong if gate.theirs else gate.untrue, wanted)
    broken = _whole(gate.theirs, gate.ask)
    if broken.outcome != "met":
        return _check(name, "unchecked", f"the reference: {broken.actual}", wanted)
    pairs = _paired(gate.theirs, ours)
    return _compared(name, pairs, gate.tolerance, dummy=ours.header.dummy_weights)


def _unfit(gate: Gate, ours: Answers, theirs: Answers) -> str:
    """Why a reference is none for these answers."""
    other = another(ours.header, theirs.header)
    if other or theirs.header.arm != gate.reference:
        return f"the reference does not fit: {other or f'its arm is {theirs.header.arm}'}"
    told = [
        f"{_named(got.place)}: {got.prompt_tokens} prompt tokens, {want.prompt_tokens} there"
        for want, got in _paired(theirs, ours)
        if want.prompt_tokens != got.prompt_tokens
    ]
    return told[0] if told else ""


def _paired(theirs: Answers, ours: Answers) -> list[tuple[Answer, Answer]]:
    by_place = {each.place: each for each in theirs.answers}
    return [(by_place[x.place], x) for x in ours.answers if x.place in by_place]


def another(ours: Header, theirs: Header) -> str:
    """How the subject of two files of answers differs; empty where it does not."""
    return ", ".join(
        f"its {key} is {getattr(theirs, key)}, not {getattr(ours, key)}"
        for key in SAME
        if getattr(theirs, key) != getattr(ours, key)
    )


def _compared(
    name: str, pairs: Sequence[tuple[Answer, Answer]], allowed: Tolerance, *, dummy: bool
) -> Check:
    """Of a model without weights too few decisive positions are expected, and no fault."""
    found = [apart(want, got, allowed) for want, got in pairs]
    positions, decisive = sum(x.positions for x in found), sum(x.decisive for x in found)
    off = sorted((each for x in found for each in x.off), reverse=True)
    wanted = (
        f"within {allowed.logprob} nats at every position, {allowed.outliers:.0%} of them within "
        f"{allowed.far}"
    )
    said = (
        f"{positions} positions compared ({decisive} decisive), worst "
        f"{max((x.worst for x in found), default=0):.3f} nats, {len(off)} beyond {allowed.logprob}"
    )
    if off and (off[0][0] > allowed.far or len(off) > allowed.outliers * positions):
        said += f": {'; '.join(where for _, where in off[:SHOWN])}"
        return _check(name, "failed", said, wanted)
    if decisive < allowed.decisive:
        said += f"; too few decisive ones to claim anything: {allowed.decisive} are needed"
        severity: Severity = "noted" if dummy else "required"
        return _check(name, "unchecked", f"not compared: {said}", wanted, severity=severity)
    return _check(name, "met", said, wanted)


def apart(want: Answer, got: Answer, allowed: Tolerance) -> Apart:
    """Compare two sound answers to the same prompt up to where their tokens part."""
    positions = decisive = 0
    off, worst = [], 0.0
    for place, (left, right) in enumerate(zip(want.top, got.top, strict=True)):
        distance, token = _distance(left, right)
        positions += 1
        first, second, *_ = (*sorted(_numbers(left).values(), reverse=True), math.inf)
        decisive += first - second > 2 * allowed.logprob
        worst = max(worst, distance)
        if distance > allowed.logprob:
            where = f"{_named(got.place)}, position {place}, token {token}: {distance:.3f} nats"
            off.append((distance, where))
        if want.tokens[place] != got.tokens[place]:
            break
    return Apart(positions, decisive, tuple(off), worst)


def _distance(left: dict[str, float | None], right: dict[str, float | None]) -> tuple[float, str]:
    """The largest difference of one token's logprob. A token that a list does not hold is at most
    as probable there as its last one, which gives the least that it can differ."""
    a, b = _numbers(left), _numbers(right)
    low_a, low_b = min(a.values()), min(b.values())
    both = {token: abs(a[token] - b[token]) for token in a.keys() & b.keys()}
    only_a = {token: max(0.0, a[token] - low_b) for token in a.keys() - b.keys()}
    only_b = {token: max(0.0, b[token] - low_a) for token in b.keys() - a.keys()}
    return max((nats, token) for token, nats in (both | only_a | only_b).items())


def _numbers(top: dict[str, float | None]) -> dict[str, float]:
    return {token: value for token, value in top.items() if value is not None}
