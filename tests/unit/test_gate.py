"""The coherence gate in a run and in a drop: asked before the sweep, kept, compared, judged.

The engine is a stand-in (tests/unit/standin); the CPU lane of tests/lanes asks a real one.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import drops
import msgspec
import pytest
from test_run import Lane, lane  # noqa: F401  (a fixture)

from lanekit import answers, contract, machine, planning, redact, report, verify
from lanekit.drop import read as read_manifest
from lanekit.drop import sha256
from lanekit.errors import ConfigError
from lanekit.manifest import SCHEMA
from lanekit.verdict import Check, Verdict


def newest(lane: Lane) -> Path:  # noqa: F811
    return max(lane.results.glob("2*"))


def check(path: Path, name: str) -> Check:
    (found,) = [each for each in verify.verify(path).checks if each.id == name]
    return found


def test_a_run_asks_before_it_sweeps_and_keeps_the_answers(lane: Lane) -> None:  # noqa: F811
    _, said = lane.end("--cells", "quick", "--arm", "answers")
    drop = newest(lane)
    found = answers.read(drop / answers.NAME)
    assert len(found.answers) == 31, said
    assert (found.header.arm, found.header.model) == ("answers", "standin/none")
    assert said.index("coherence gate") < said.index("quick: 1 requests")
    manifest = read_manifest(drop)
    assert answers.NAME in manifest.files
    assert "coherence" in manifest.timings
    assert check(drop, "answers").outcome == "met"
    assert check(drop, "answers-batches").outcome == "met"
    assert check(drop, "answers-reference").actual.startswith("not compared: answers is what")


def test_the_newest_answers_of_the_reference_arm_are_found_and_kept(lane: Lane) -> None:  # noqa: F811
    for arm in ("answers", "answers-too", "answers-otherwise"):
        lane.end("--cells", "quick", "--arm", arm)
    first, *rest = sorted(lane.results.glob("2*"), key=lambda x: read_manifest(x).started)
    outcomes = {}
    for drop in rest:
        manifest = read_manifest(drop)
        assert manifest.plan["gate"]["drop"] == str(first)
        kept = drop / answers.REFERENCE
        assert kept.read_bytes() == (first / answers.NAME).read_bytes()
        outcomes[manifest.row.arm] = check(drop, "answers-reference")
    assert outcomes["answers-too"].outcome == "met"
    assert "496 positions compared (496 decisive)" in outcomes["answers-too"].actual
    assert outcomes["answers-otherwise"].outcome == "failed"
    assert verify.verify(rest[-1]).exit_code == 1, "fast garbage is refuted"


def test_a_failed_request_is_an_answer_with_its_error(lane: Lane) -> None:  # noqa: F811
    _, said = lane.end("--cells", "quick", "--arm", "answers-nan")
    found = check(newest(lane), "answers")
    assert found.outcome == "failed", said
    assert "shout in a batch of 20: HTTP 500" in found.actual
    assert read_manifest(newest(lane)).state == "complete", "a failed gate does not end the run"


def test_a_server_that_dies_at_the_gate_is_noticed(lane: Lane) -> None:  # noqa: F811
    code, said = lane.end("--cells", "quick", "--arm", "answers-once")
    manifest = read_manifest(newest(lane))
    assert (code, manifest.state, manifest.stage) == (2, "failed", "asking"), said
    assert lane.strays(manifest) == []


known = pytest.mark.usefixtures("known_lanes")


def gated(root: Path) -> Path:
    """A drop of arm vllm/v2 on h200x2 with sound answers and no reference, though one is named."""
    drop = drops.drop(root, "v2-nvlink")
    plan = json.loads((drop / "manifest.json").read_text())["plan"]
    plan["gate"]["reference"] = "dense"
    drops.edit_json(drop / "manifest.json", plan=plan)
    return drop


@known
def test_a_drop_without_reference_is_marked_in_its_row(tmp_path: Path) -> None:
    drop = gated(tmp_path / "d")
    rows = report.rows(drop, Verdict("d", "proven", "", profile="h200x2",
                                     checks=(check(drop, "answers-reference"),),
                                     cells=verify.verify(drop).cells))  # fmt: skip
    assert [row.verdict for row in rows] == ["proven, answers not compared"]
    assert [row.model for row in rows] == ["tiny"]


@known
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"source": "built:shape", "dummy_weights": True}, "shape, dummy weights"),
        ({"source": "Qwen/Qwen3-30B-A3B-FP8", "served_name": "x"}, "Qwen3-30B-A3B-FP8"),
        ({"source": "/srv/models/mine/"}, "mine"),
        (None, "unknown"),
    ],
)
def test_a_row_says_what_was_served(tmp_path: Path, model: object, said: str) -> None:
    drop = drops.drop(tmp_path / "d", "v2-nvlink", plan={"model": model})
    assert report.model(read_manifest(drop)) == said


@known
def test_the_gate_s_requests_do_not_stand_for_aiperf_s(tmp_path: Path) -> None:
    def only_those(lines: list[str]) -> list[str]:
        return [x for x in lines if x != drops.POST]

    found = check(drops.drop(tmp_path / "d", "v2-nvlink", only_those), "requests-served")
    assert (found.outcome, found.expected) == ("failed", "at least 39 lines")


@known
def test_a_gate_that_was_planned_and_left_nothing_is_refuted(tmp_path: Path) -> None:
    drop = gated(tmp_path / "d")
    (drop / answers.NAME).unlink()
    drops.seal(drop)
    assert check(drop, "answers").outcome == "failed"


@known
def test_answers_behind_a_link_are_none(tmp_path: Path) -> None:
    drop = gated(tmp_path / "d")
    shutil.move(drop / answers.NAME, drop / "kept.jsonl")
    (drop / answers.NAME).symlink_to(drop / "kept.jsonl")
    drops.seal(drop)
    assert check(drop, "answers").outcome == "failed"


def gateless(root: Path, **other: Any) -> Path:
    """A drop without a gate."""
    return drops.drop(root / "d", "v2-nvlink", plan={"gate": None}, **other)


@known
@pytest.mark.parametrize("hour", ["10:59:59", "11:00:00"])
def test_a_drop_without_a_gate_is_no_proof_whatever_its_date(tmp_path: Path, hour: str) -> None:
    drop = gateless(tmp_path, started=f"2026-11-30T{hour}+00:00")
    found = check(drop, "answers-reference")
    assert (found.outcome, found.severity) == ("unchecked", "required")
    assert found.actual == "not compared: the run had no coherence gate"


@known
@pytest.mark.parametrize("gate", [None, "x", {}, {"questions": ""}, {"questions": 1}])
def test_a_gate_is_not_switched_off_by_spoiling_its_plan(tmp_path: Path, gate: object) -> None:
    drop = gated(tmp_path / "d")
    plan = json.loads((drop / "manifest.json").read_text())["plan"]
    drops.edit_json(drop / "manifest.json", plan=plan | {"gate": gate})
    found = check(drop, "answers")
    assert (found.outcome, found.severity) == ("failed", "required")


@known
def test_a_gate_that_took_time_was_one(tmp_path: Path) -> None:
    drop = gateless(tmp_path, timings={"cell c4": 60.0, "coherence": 3.0})
    assert "a time that it took" in check(drop, "answers").actual


@known
@pytest.mark.parametrize(
    ("key", "value"),
    [("lane", "sglang"), ("arm", "dense"), ("profile", "cpu"), ("model", "other"),
     ("dummy_weights", True)],
)  # fmt: skip
def test_answers_of_another_row_are_none_of_this(tmp_path: Path, key: str, value: Any) -> None:
    drop = gated(tmp_path / "d")
    header(drop, **{key: value})
    drops.seal(drop)
    found = check(drop, "answers")
    assert (found.outcome, found.severity) == ("failed", "required")
    assert f"their {key} is {value}, not" in found.actual


def referenced(root: Path, **gate: str) -> Path:
    """A drop with a file of reference answers, and what its plan says of that."""
    drop = gated(root / "d")
    shutil.copy(drop / answers.NAME, drop / answers.REFERENCE)
    manifest = json.loads((drop / "manifest.json").read_text())
    manifest["plan"]["gate"].update(gate)
    (drop / "manifest.json").write_text(json.dumps(manifest))
    return drops.seal(drop)


@known
@pytest.mark.parametrize("redacted", [False, True])
def test_a_reference_that_was_exchanged_is_refuted(tmp_path: Path, redacted: bool) -> None:
    drop = referenced(tmp_path, sha256="0" * 64)
    drops.edit_json(drop / "manifest.json", redacted=redacted)
    assert "not the file that was planned" in check(drop, "answers-reference").actual


@known
@pytest.mark.parametrize("gate", [{"drop": "/d"}, {"sha256": "0" * 64}])
def test_a_planned_reference_that_is_gone_is_refuted(tmp_path: Path, gate: dict[str, str]) -> None:
    drop = referenced(tmp_path, **gate)
    (drop / answers.REFERENCE).unlink()
    found = check(drops.seal(drop), "answers-reference")
    assert (found.outcome, found.severity) == ("failed", "required")


@known
def test_a_reference_that_nobody_planned_is_refuted(tmp_path: Path) -> None:
    assert "not planned" in check(referenced(tmp_path), "answers-reference").actual


@known
def test_a_redacted_reference_is_still_the_planned_one(tmp_path: Path) -> None:
    drop = referenced(tmp_path)
    header(drop, arm="dense", name=answers.REFERENCE, drop="/home/me/one")
    sha = hashlib.sha256((drop / answers.REFERENCE).read_bytes()).hexdigest()
    plan = json.loads((drop / "manifest.json").read_text())["plan"]
    plan["gate"]["sha256"] = sha
    drops.edit_json(drop / "manifest.json", plan=plan)
    redact.redact(drops.seal(drop), tmp_path / "out")
    assert read_manifest(tmp_path / "out").plan["gate"]["sha256"] != sha
    for each in (drop, tmp_path / "out"):
        assert check(each, "answers-reference").outcome == "met"


H200 = planning.Options(
    lane="vllm", profile="h200x2", arm="graph", server_python="/usr/bin/python3"
)


def header(path: Path, name: str = answers.NAME, **change: Any) -> None:
    """Change the header of a drop's answers."""
    first, _, rest = (path / name).read_bytes().partition(b"\n")
    changed = msgspec.json.encode(json.loads(first) | change)
    (path / name).write_bytes(changed + b"\n" + rest)


def planned(bare: machine.Machine, results: Path, **options: str) -> object:
    given = msgspec.structs.replace(
        H200, results=str(results), model="built:tiny-qwen3-moe", cells=("c4",), env=(), **options
    )
    return planning.make(given, bare).gate


def as_reference(results: Path, name: str) -> Path:
    """A complete drop of the reference arm, as far as a plan looks at it."""
    drops.asked(results / name, "vllm", "dense-graph", "h200x2", "built:tiny-qwen3-moe")
    row = {"lane": "vllm", "arm": "dense-graph", "profile": "h200x2", "cells": []}
    manifest = {"row": row, "stack": "2026-07", "state": "complete", "started": "2026-11-30"}
    empty = {"plan": {}, "git": {}, "environment": {}, "schema": SCHEMA}
    (results / name / "manifest.json").write_text(json.dumps(manifest | empty))
    return results / name


def test_the_plan_names_the_newest_reference_that_fits(
    bare: machine.Machine, tmp_path: Path
) -> None:
    as_reference(tmp_path, "20261130T100000Z-h200x2-vllm-dense-graph")
    want = as_reference(tmp_path, "20261130T110000Z-h200x2-vllm-dense-graph")
    other = as_reference(tmp_path, "20261130T120000Z-h200x2-vllm-dense-graph")
    header(other, model="built:other")
    broken = as_reference(tmp_path, "20261130T130000Z-h200x2-vllm-dense-graph")
    drops.edit_json(broken / "manifest.json", state="failed")
    gate = planned(bare, tmp_path)
    assert gate.reference == "dense-graph"  # type: ignore[attr-defined]
    assert gate.drop == str(want)  # type: ignore[attr-defined]
    assert gate.sha256 == sha256(want / answers.NAME)  # type: ignore[attr-defined]


def test_a_given_reference_wins_and_must_fit(bare: machine.Machine, tmp_path: Path) -> None:
    given = as_reference(tmp_path / "far", "x")
    header(given, arm="dense")
    gate = planned(bare, tmp_path, coherence_from=str(given))
    assert (gate.reference, gate.drop) == ("dense", str(given))  # type: ignore[attr-defined]
    header(given, model="built:other")
    with pytest.raises(ConfigError, match="its model is built:other, not built:tiny-qwen3-moe"):
        planned(bare, tmp_path, coherence_from=str(given))
    with pytest.raises(ConfigError, match="COHERENCE_FROM"):
        planned(bare, tmp_path, coherence_from=str(tmp_path))


def test_a_reference_arm_looks_for_nothing(bare: machine.Machine, tmp_path: Path) -> None:
    as_reference(tmp_path, "20261130T100000Z-h200x2-vllm-dense-graph")
    gate = planned(bare, tmp_path, arm="dense-graph")
    assert (gate.reference, gate.drop) == ("", "")  # type: ignore[attr-defined]


def test_the_gate_s_file_is_no_contract() -> None:
    assert "coherence" not in contract.names()
