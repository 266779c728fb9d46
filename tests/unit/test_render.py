"""What people and programs are shown. The JSON schema is published, and tested against verdicts."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import drops
import jsonschema  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanekit import contract, lanes, paths, render, verdict
from lanekit.verdict import Check, Place, Verdict
from lanekit.verify import verify

pytestmark = pytest.mark.usefixtures("known_lanes")

SCHEMA = paths.ROOT / "scripts" / "lanekit" / "resources" / "verdict.schema.json"


def checked(outcome: verdict.Outcome, **changes: object) -> Check:
    one = Check(
        id="rule",
        group="transport",
        severity="required",
        outcome=outcome,
        why="it must",
        expected="16 of 16 ranks",
        actual="15 of 16 ranks",
        first=Place("logs/a.log", 7),
        last=Place("logs/b.log", 9),
        missing=("b [7]",),
        remedy="mend it",
    )
    return msgspec.structs.replace(one, **changes)


def shown(*checks: Check, colour: bool = False) -> str:
    result, reason = verdict.decide(checks)
    found = Verdict(drop="d", result=result, reason=reason, checks=checks, lane="vllm")
    return render.text(found, colour=colour)


def test_a_failed_check_shows_all_a_person_needs() -> None:
    text = shown(checked("failed"))
    for part in ("FAIL", "rule", "15 of 16", "16 of 16", "logs/a.log:7", "logs/b.log:9"):
        assert part in text
    for part in ("missing: b [7]", "do: mend it", "why: it must"):
        assert part in text
    assert text.splitlines()[-1] == "refuted: failed: rule"


def test_colour_only_when_asked() -> None:
    assert "\x1b" not in shown(checked("failed"))
    assert "\x1b[31mFAIL" in shown(checked("failed"), colour=True)


def test_a_noted_check_is_not_called_a_failure() -> None:
    text = shown(checked("failed", severity="noted"), checked("met", id="other"))
    assert "FAIL" not in text
    assert "noted" in text


def test_our_own_output_is_no_evidence(tmp_path: Path) -> None:
    root = drops.drop(tmp_path / "d", "v2-efa-proxy")
    found = verify(root)
    texts = [render.text(found), render.as_json(found).decode(), render.junit(found).decode()]
    log = tmp_path / "vllm-deepep_v2" / "serve.log"
    log.parent.mkdir()
    log.write_text("\n".join(texts) + "\n")
    again = verify(log.parent, profile="p5en-x2")
    positive = [x for x in again.checks if x.group == "transport" and x.first is not None]
    assert positive == []


def test_the_published_schema_is_today_s() -> None:
    assert SCHEMA.read_bytes() == render.schema(), "write render.schema() there"


VALID = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))


def judged(tmp_path: Path) -> Iterator[Verdict]:
    """Verdicts of every result: of each contract's good drop, refuted, waived, incomplete, real."""
    for name in contract.names():
        yield verify(drops.drop(tmp_path / name, name))
    root = drops.drop(tmp_path / "refuted", "cpu", lambda x: [*x, drops.hook("vm", 0, 0, 1)])
    yield verify(root)
    text = '[[waiver]]\ncheck = "no-buffer"\nreason = "known"\nby = "me"\n'
    (root / "waivers.toml").write_text(text)
    yield verify(root)
    drops.edit_json(root / "manifest.json", state="failed", failure="it died")
    yield verify(root)


def test_every_verdict_is_valid_by_the_published_schema(tmp_path: Path) -> None:
    found = list(judged(tmp_path))
    assert {x.result for x in found} == {"proven", "refuted", "no verdict"}
    for verdict_ in found:
        VALID.validate(json.loads(render.as_json(verdict_)))
        again = msgspec.json.decode(render.as_json(verdict_), type=Verdict, strict=True)
        assert again == verdict_


def test_the_verdicts_of_committed_drops_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "LANES", paths.ROOT / "lanes")
    for drop in lanes.tracked():
        VALID.validate(json.loads(render.as_json(verify(drop))))


@drops.needs_published
def test_the_verdict_of_a_published_drop_is_valid() -> None:
    drop = drops.PUBLISHED / "trtllm-deepep-dropin-20260707" / "trtllm-native-seam"
    VALID.validate(json.loads(render.as_json(verify(drop))))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("result",), "maybe"),
        (("checks", 0, "outcome"), "ok"),
        (("checks", 0, "severity"), "low"),
        (("checks", 0, "extra"), 1),
        (("cells", 0, "tok_s"), "fast"),
        (("extra",), 1),
        (("checks", 0, "id"), ...),
    ],
)
def test_the_published_schema_refuses_what_is_no_verdict(
    tmp_path: Path, at: tuple[Any, ...], value: object
) -> None:
    document = json.loads(render.as_json(verify(drops.drop(tmp_path / "d"))))
    assert not VALID.is_valid(drops.replaced(document, at, value))


def suite(found: Verdict) -> ElementTree.Element:
    """The verdict as JUnit XML, checked against what its readers agree on: one testsuite whose
    counts are those of its cases, and cases that hold at most one outcome."""
    root = ElementTree.fromstring(render.junit(found))
    assert root.tag == "testsuite"
    assert set(root.attrib) == {"name", "tests", "failures", "errors", "skipped"}
    cases = list(root)
    assert {case.tag for case in cases} == {"testcase"}
    assert all(set(case.attrib) == {"classname", "name"} for case in cases)
    assert all(len(case) <= 1 for case in cases)
    outcomes = [child for case in cases for child in case]
    assert {child.tag for child in outcomes} <= {"failure", "error", "skipped"}
    assert all(set(child.attrib) == {"message"} for child in outcomes)
    counts = Counter(child.tag for child in outcomes)
    assert root.get("tests") == str(len(cases))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert root.get(attribute) == str(counts[tag])
    return root


def test_junit_of_every_verdict_is_well_formed(tmp_path: Path) -> None:
    for found in judged(tmp_path):
        root = suite(found)
        assert len(root) == len(found.checks) + 1
        bad = root.get("failures") != "0" or root.get("errors") != "0"
        assert bad == (found.result != "proven")


@settings(max_examples=200)
@given(st.text(), st.text(), st.sampled_from(["met", "failed", "unchecked"]))
def test_junit_holds_any_words(name: str, said: str, outcome: verdict.Outcome) -> None:
    one = checked(outcome, id=name, actual=said, remedy=said, waived="")
    suite(Verdict(drop=said, result="refuted", reason=said, checks=(one,)))


def test_a_drop_s_words_do_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    said = "x\n\x1b[2J\x1b[H\nproven: 24 of 24 required checks met\x1b[8m\x9b\u202e"
    root = drops.drop(tmp_path / "d", state="failed", failure=said)
    shown_ = render.text(verify(root))
    assert not set(shown_) & set("\x1b\x9b\u202e")
    assert not [line for line in shown_.splitlines() if line.startswith("proven")]


def test_a_waiver_is_shown_in_every_form(tmp_path: Path) -> None:
    """Also one that nothing needs: it says what its author would have let pass."""
    root = drops.drop(tmp_path / "d")
    text = "".join(
        f'[[waiver]]\ncheck = "{name}"\nreason = "known {name}"\nby = "me"\n'
        for name in ("no-buffer", "cells")
    )
    (root / "waivers.toml").write_text(text)
    found = verify(root)
    for shown_ in (render.text(found), render.as_json(found).decode()):
        assert "waiver for no-buffer: known no-buffer (me)" in shown_
        assert "waiver for cells: known cells (me)" in shown_
    with (root / "logs" / "here-server.log").open("a") as stream:
        stream.write(drops.hook("vm", 0, 0, 1) + "\n")
    found = verify(drops.seal(root))
    (case,) = [x for x in suite(found) if x.get("name") == "no-buffer"]
    assert [(x.tag, x.get("message")) for x in case] == [("skipped", "known no-buffer (me)")]


def test_junit_counts(tmp_path: Path) -> None:
    checks = (
        checked("failed"),
        checked("unchecked", id="b"),
        checked("met", id="c"),
        checked("failed", id="d", severity="noted"),
        checked("failed", id="e", waived="known (me)"),
    )
    result, reason = verdict.decide(checks)
    found = Verdict(drop="d\x00\x1b", result=result, reason=reason, checks=checks)
    suite = ElementTree.fromstring(render.junit(found))
    counts = {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "6", "failures": "2", "errors": "1", "skipped": "2"}
    assert len(suite.findall("testcase")) == 6


@pytest.mark.parametrize(
    ("checks", "result"),
    [
        ((), "no verdict"),
        ((checked("met"),), "proven"),
        ((checked("met", first=None),), "no verdict"),
        ((checked("met", severity="noted"),), "no verdict"),
        ((checked("met"), checked("unchecked")), "no verdict"),
        ((checked("met"), checked("unchecked"), checked("failed")), "refuted"),
        ((checked("met"), checked("failed", severity="noted")), "proven"),
        ((checked("met"), checked("failed", waived="x")), "no verdict"),
        ((checked("met"), checked("failed", waived="x", group="load")), "proven"),
        ((checked("failed", waived="x"),), "no verdict"),
    ],
)
def test_what_follows_from_checks(checks: tuple[Check, ...], result: str) -> None:
    assert verdict.decide(checks)[0] == result
