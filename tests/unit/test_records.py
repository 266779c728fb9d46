"""Figures recomputed from AIPerf's records: what a busy machine does, and what is forged."""

import json
from pathlib import Path

import pytest
from drops import record

from lanekit import records


def written(folder: Path, *found: dict[str, object]) -> records.Cell:
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(each) + "\n" for each in found)
    (folder / "profile_export.jsonl").write_text(lines)
    (folder / "profile_export_aiperf.json").write_text("{}")
    return records.read(folder)


def shifted(milliseconds: float) -> dict[str, object]:
    """A record whose stream ended that much after its last token."""
    one = record(0)
    one["metadata"]["request_end_ns"] += int(milliseconds * 1e6)
    return one


@pytest.mark.parametrize("gap", [0.0, 0.11, 29.0])
def test_a_stream_that_ends_a_little_after_its_last_token_is_sound(
    tmp_path: Path, gap: float
) -> None:
    cell = written(tmp_path / "c4", shifted(gap))
    assert cell.records is not None
    assert cell.records.faults == ()
    assert cell.figures.requests == 1


@pytest.mark.parametrize("gap", [-20.0, 400.0])
def test_a_latency_that_its_own_clock_contradicts_is_a_fault(tmp_path: Path, gap: float) -> None:
    cell = written(tmp_path / "c4", shifted(gap))
    assert cell.records is not None
    assert "is not its end minus its start" in cell.records.faults[0]


def test_a_request_whose_tokens_all_came_at_once_has_no_rate_of_its_own(tmp_path: Path) -> None:
    burst = record(1)
    burst["metrics"]["time_to_first_token"]["value"] = burst["metrics"]["request_latency"]["value"]
    cell = written(tmp_path / "c4", record(0), burst)
    assert cell.figures.requests == 2
    assert cell.figures.tok_s_user == pytest.approx(100.0)


def test_a_time_beyond_any_number_is_a_fault(tmp_path: Path) -> None:
    far = record(0)
    far["metadata"]["request_end_ns"] = 10**400
    cell = written(tmp_path / "c4", far)
    assert cell.records is not None
    assert "no clock shows" in cell.records.faults[0]


def test_faults_are_counted_only_as_far_as_they_are_shown(tmp_path: Path) -> None:
    empty: dict[str, object] = {"metadata": {}, "metrics": {}}
    cell = written(tmp_path / "c4", *[empty] * 100)
    assert cell.records is not None
    assert len(cell.records.faults) == 20


@pytest.mark.parametrize("year", ["0001", "9999"])
def test_a_year_that_no_arithmetic_can_shift_is_no_time(tmp_path: Path, year: str) -> None:
    written(tmp_path / "c4", record(0))
    text = json.dumps({"end_time": f"{year}-01-01T00:00:00+05:00"})
    (tmp_path / "c4" / "profile_export_aiperf.json").write_text(text)
    assert records.read(tmp_path / "c4").end is None
