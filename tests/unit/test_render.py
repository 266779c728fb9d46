"""What people and programs are shown. The JSON schema is published, and tested against verdicts."""

import json
from pathlib import Path
from xml.etree import ElementTree

import drops
import msgspec
import pytest

from lanekit import contract, paths, render, verdict
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


@pytest.mark.parametrize("name", contract.names())
def test_a_verdict_has_the_published_shape(tmp_path: Path, name: str) -> None:
    document = json.loads(render.as_json(verify(drops.drop(tmp_path / "d", name))))
    shape = json.loads(SCHEMA.read_text())["$defs"]["Verdict"]
    assert set(shape["required"]) <= set(document)
    assert set(document) <= set(shape["properties"])
    again = msgspec.json.decode(json.dumps(document).encode(), type=Verdict, strict=True)
    assert again.result == document["result"]


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
        ((checked("met"), checked("failed", waived="x")), "proven"),
        ((checked("failed", waived="x"),), "no verdict"),
    ],
)
def test_what_follows_from_checks(checks: tuple[Check, ...], result: str) -> None:
    assert verdict.decide(checks)[0] == result
