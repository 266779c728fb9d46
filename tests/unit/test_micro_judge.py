"""The micro lane is judged by its records: whole, on every rank, correct before timed."""

import json
from pathlib import Path

import pytest

from lanekit import micro
from lanekit.errors import Unreadable

RUN = {"v": 1, "kind": "run", "world": 2}
CHECK = {"v": 1, "kind": "check", "mode": "graph", "dtype": "fp8", "tokens": 128, "ok": True}
TIME = {
    "v": 1, "kind": "time", "op": "pair", "mode": "graph", "dtype": "fp8", "tokens": 128,
    "bytes": 1000, "p50_us": 20.0, "min_us": 18.0, "max_us": 25.0, "rep": 0,
}  # fmt: skip
DONE = {"v": 1, "kind": "done"}


def judged(tmp_path: Path, *lines: dict[str, object]) -> dict[str, str]:
    path = tmp_path / micro.NAME
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {c.id: c.outcome for c in micro.judge({"decode": micro.read(path)}, ranks=2)}


def test_a_whole_and_correct_cell_is_met(tmp_path: Path) -> None:
    found = judged(tmp_path, RUN, CHECK, TIME, DONE)
    assert found == {"decode-complete": "met", "decode-correct": "met"}


@pytest.mark.parametrize(
    ("lines", "rule", "outcome"),
    [
        ((RUN, CHECK, TIME), "decode-complete", "failed"),
        (({**RUN, "world": 1}, CHECK, TIME, DONE), "decode-complete", "failed"),
        ((RUN, TIME, DONE), "decode-correct", "failed"),
        ((RUN, {**CHECK, "ok": False}, TIME, DONE), "decode-correct", "failed"),
        ((RUN, {**CHECK, "mode": "eager"}, TIME, DONE), "decode-correct", "failed"),
        ((RUN, {**CHECK, "tokens": 64}, TIME, DONE), "decode-correct", "failed"),
        ((RUN, TIME, CHECK, DONE), "decode-correct", "failed"),
        ((RUN, CHECK, {**TIME, "p50_us": 30.0}, DONE), "decode-correct", "failed"),
        ((RUN, CHECK, {**TIME, "p50_us": 17.0}, DONE), "decode-correct", "failed"),
        ((RUN, CHECK, {**TIME, "min_us": 0.0}, DONE), "decode-correct", "failed"),
        ((RUN, CHECK, {**TIME, "max_us": None}, DONE), "decode-correct", "failed"),
        ((RUN, CHECK, TIME, {**TIME, "op": "copy-peer", "tokens": None, "p50_us": 1.0}, DONE),
         "decode-correct", "failed"),
        ((RUN, RUN, CHECK, TIME, DONE), "decode-complete", "failed"),
        ((RUN, CHECK, TIME, DONE, DONE), "decode-complete", "failed"),
        ((CHECK, RUN, TIME, DONE), "decode-complete", "failed"),
        ((RUN, CHECK, DONE, TIME), "decode-complete", "failed"),
        ((RUN, DONE), "decode-correct", "unchecked"),
        ((), "decode-complete", "unchecked"),
    ],
)  # fmt: skip
def test_what_is_not_whole_or_not_correct_is_not_met(
    tmp_path: Path, lines: tuple[dict[str, object], ...], rule: str, outcome: str
) -> None:
    assert judged(tmp_path, *lines)[rule] == outcome


def test_repetitions_fold_into_one_row_with_their_spread(tmp_path: Path) -> None:
    path = tmp_path / micro.NAME
    times = [{**TIME, "rep": n, "p50_us": p} for n, p in enumerate((20.0, 22.0, 21.0))]
    path.write_text("".join(json.dumps(line) + "\n" for line in times))
    (row,) = micro.rows("decode", micro.read(path))
    assert (row.p50_us, row.min_us, row.max_us, row.repetitions) == (21.0, 18.0, 25.0, 3)
    assert row.spread == pytest.approx(2 / 21, abs=1e-4)


def test_a_chosen_sm_count_is_a_row_and_a_check_of_its_own(tmp_path: Path) -> None:
    lines = ({**CHECK, "sms": 16}, {**TIME, "sms": 16}, {**CHECK, "sms": 32}, {**TIME, "sms": 32})
    assert judged(tmp_path, RUN, *lines, DONE)["decode-correct"] == "met"
    modes = [row.mode for row in micro.rows("decode", micro.read(tmp_path / micro.NAME))]
    assert modes == ["graph, 16 SMs", "graph, 32 SMs"]
    assert judged(tmp_path, RUN, *lines[:2], lines[3], DONE)["decode-correct"] == "failed"


@pytest.mark.parametrize("text", ["{", "[]", '{"v": 2, "kind": "run"}', "\0\0"])
def test_a_damaged_record_is_unreadable_and_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / micro.NAME
    path.write_text(json.dumps(RUN) + "\n" + text + "\n")
    with pytest.raises(Unreadable, match=r"micro\.jsonl:2"):
        micro.read(path)


def test_a_file_larger_than_any_sweep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / micro.NAME
    with path.open("wb") as stream:
        stream.truncate(3 << 30)
    with pytest.raises(Unreadable, match="larger than"):
        micro.read(path)


def test_a_time_without_its_extremes_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / micro.NAME
    path.write_text(json.dumps({**TIME, "min_us": None, "max_us": None}) + "\n")
    assert micro.rows("decode", micro.read(path)) == []
