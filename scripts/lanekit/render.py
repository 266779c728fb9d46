"""Show a verdict: as text, JSON or JUnit XML. A renderer never decides anything, and never prints
a line of a log, so that its own output can never be taken for evidence."""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, TextIO
from xml.etree import ElementTree

import msgspec

from lanekit.verdict import CellRow, Check, MicroRow, StepRow, Verdict

Columns = tuple[tuple[str, str, str], ...]
_SIGNS: Final = {"met": "ok", "failed": "FAIL", "unchecked": "?"}
_COLOURS: Final = {
    "ok": "32", "FAIL": "31", "?": "33", "proven": "1;32", "refuted": "1;31", "no verdict": "1;33",
}  # fmt: skip
_GROUPS: Final = (
    ("drop", "Drop"),
    ("transport", "Transport"),
    ("answers", "Answers"),
    ("load", "Load"),
    ("witness", "Other evidence"),
)


def wants_colour(stream: TextIO) -> bool:
    """Colour on a terminal only, and never with NO_COLOR."""
    return stream.isatty() and "NO_COLOR" not in os.environ


def text(verdict: Verdict, *, colour: bool = False) -> str:
    """The verdict for people: the result first and last, one block a check that needs reading."""
    shown: Verdict = msgspec.convert(_printable(msgspec.to_builtins(verdict)), Verdict)
    return "\n".join(_lines(shown, colour))


def _printable(value: Any) -> Any:
    """A verdict's words, which may be a stranger's, without what moves or hides a terminal's."""
    if isinstance(value, dict):
        return {key: _printable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(each) for each in value]
    return _xml(value) if isinstance(value, str) else value


def _lines(verdict: Verdict, colour: bool) -> Iterator[str]:
    headline = f"{_paint(verdict.result, colour)}: {verdict.reason}"
    yield f"{verdict.drop}"
    if verdict.contract:
        version = f" v{verdict.contract_version}" if verdict.contract_version else ""
        yield (
            f"{verdict.lane}/{verdict.arm} on {verdict.profile}, "
            f"contract {verdict.contract}{version}"
        )
    yield from (f"note: {said}" for said in verdict.said)
    for group, title in _GROUPS:
        checks = [check for check in verdict.checks if check.group == group]
        if checks:
            yield f"\n{title}"
            for check in checks:
                yield from _check(check, colour)
    if verdict.cells:
        yield "\nFigures"
        yield from _grid(_COLUMNS, verdict.cells)
    if verdict.micro:
        yield "\nTimes in microseconds (p50 of the slowest rank, median over repetitions)"
        yield from _grid(_MICRO, verdict.micro)
    if verdict.steps:
        yield "\nSteps (step 0 is the warm-up, time in milliseconds of the slowest rank)"
        yield from _grid(_STEPS, verdict.steps)
    if verdict.unproven and verdict.checks:
        yield "\nNot proven by these logs"
        yield from (f"  - {what}" for what in verdict.unproven)
    if verdict.result == "proven" and verdict.proves:
        yield f"\n{verdict.proves}"
    yield f"\n{headline}"


def _check(check: Check, colour: bool) -> Iterator[str]:
    noted = check.severity == "noted" and check.outcome != "met"
    sign = "waived" if check.waived else "noted" if noted else _SIGNS[check.outcome]
    yield f"  {_paint(sign, colour, 6)} {check.id}: {check.actual}{_places(check)}"
    if check.waived:
        yield f"         waiver: {check.waived}"
    if check.missing:
        yield f"         missing: {'; '.join(check.missing)}"
    if check.outcome != "met" and not noted:
        yield f"         expected: {check.expected}"
        yield f"         why: {check.why}"
        if check.remedy:
            yield f"         do: {check.remedy}"
    if check.note:
        yield f"         note: {check.note}"


def _places(check: Check) -> str:
    places = [place for place in (check.first, check.last) if place is not None]
    shown = [f"{each.file}:{each.line}" if each.line else each.file for each in places]
    return f"  [{' .. '.join(dict.fromkeys(shown))}]" if shown else ""


def _paint(word: str, colour: bool, width: int = 0) -> str:
    padded = word.ljust(width)
    return f"\x1b[{_COLOURS[word]}m{padded}\x1b[0m" if colour and word in _COLOURS else padded


def _columns(told: str) -> Columns:
    """`title=attribute:format` of each column, where the title is not the attribute's name."""
    found = (re.fullmatch(r"(.+?)(?:=(\w+))?(?::(.+))?", each) for each in told.split(", "))
    return tuple((each[1], each[2] or each[1], each[3] or "s") for each in found if each)


_MICRO: Final = _columns(
    "cell, op, mode, dtype, tokens:d, bytes:d, p50=p50_us:.1f, min=min_us:.1f, max=max_us:.1f, "
    "spread:.1%, GB/s=gbs:.1f"
)
_STEPS: Final = _columns(
    "cell, role, dispatcher, step:d, loss:.4f, grad-norm=grad_norm:.4f, ms:.1f"
)
_COLUMNS: Final = _columns(
    "cell=name, tok/s=tok_s:.1f, tok/s/user=tok_s_user:.2f, TTFT p50=ttft_p50_ms:.1f, "
    "p99 ms=ttft_p99_ms:.1f, ITL p50=itl_p50_ms:.2f, p99 ms=itl_p99_ms:.2f, requests:d, errors:d, "
    "from=source"
)


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Rows of words as lines in which the columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    place = str.rjust if right else str.ljust
    return ["  ".join(map(place, row, widths)).rstrip() for row in rows]


def _grid(columns: Columns, found: Sequence[CellRow | MicroRow | StepRow]) -> Iterator[str]:
    rows = [[title for title, _, _ in columns]]
    rows += [
        ["-" if (v := getattr(each, key)) is None else format(v, form) for _, key, form in columns]
        for each in found
    ]
    yield from (f"  {line}" for line in aligned(rows, right=True))


def as_json(verdict: Verdict) -> bytes:
    """The verdict as JSON, in the published schema."""
    return msgspec.json.format(msgspec.json.encode(verdict)) + b"\n"


def schema() -> bytes:
    """The JSON schema of a verdict: resources/verdict.schema.json."""
    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    found = draft | msgspec.json.schema(Verdict)
    return msgspec.json.format(msgspec.json.encode(found, order="sorted")) + b"\n"


def junit(verdict: Verdict) -> bytes:
    """The verdict as JUnit XML: failed is a failure, what could not be checked an error."""
    suite = ElementTree.Element("testsuite", name=_xml(f"lanekit verify {verdict.drop}"))
    cases: list[tuple[str, ...]] = [
        ("verdict", verdict.result, _RESULTS[verdict.result], verdict.reason, "")
    ]
    for check in verdict.checks:
        silent = check.severity == "noted" or check.waived
        tag = "skipped" if silent else _OUTCOMES[check.outcome]
        actual = check.waived or f"{check.actual}{_places(check)}, expected {check.expected}"
        cases.append((check.group, check.id, tag, actual, check.remedy))
    for group, name, tag, message, remedy in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=group, name=_xml(name))
        if tag:
            ElementTree.SubElement(case, tag, message=_xml(message)).text = _xml(remedy)
    tags = [tag for _, _, tag, _, _ in cases]
    suite.set("tests", str(len(tags)))
    for counter, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(counter, str(tags.count(tag)))
    found: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return found + b"\n"


_RESULTS: Final = {"proven": "", "refuted": "failure", "no verdict": "error"}
_OUTCOMES: Final = {"met": "", "failed": "failure", "unchecked": "error"}


def _xml(words: str) -> str:
    """Text without characters that XML cannot hold."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
