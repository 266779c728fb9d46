"""Figures recomputed from AIPerf's records: what a busy machine does, and what is forged."""

import dataclasses
import datetime
import json
import shutil
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from drops import START, aiperf, edit_json, record

from lanekit import records
from lanekit.errors import Unreadable
from lanekit.load import Load, load, server_rate


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


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("output_token_count", 123),
        ("inter_token_latency", 9.9),
        ("output_token_throughput_per_user", 101.0),
    ],
)
def test_a_figure_of_another_length_is_a_fault(tmp_path: Path, metric: str, value: float) -> None:
    one = record(0)
    one["metrics"][metric]["value"] = value
    cell = written(tmp_path / "c4", one)
    assert cell.records is not None
    assert "its own figures are not those of 128 tokens" in cell.records.faults[0]


@pytest.mark.parametrize("gap", [-20.0, 400.0])
def test_a_latency_that_its_own_clock_contradicts_is_a_fault(tmp_path: Path, gap: float) -> None:
    cell = written(tmp_path / "c4", shifted(gap))
    assert cell.records is not None
    assert "is not its end minus its start" in cell.records.faults[0]


def test_a_request_whose_tokens_all_came_at_once_has_no_rate_of_its_own(tmp_path: Path) -> None:
    burst = record(1)
    burst["metrics"]["time_to_first_token"]["value"] = burst["metrics"]["request_latency"]["value"]
    burst["metrics"]["inter_token_latency"]["value"] = 0.0
    for absent in ("inter_chunk_latency", "output_token_throughput_per_user"):
        del burst["metrics"][absent]
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


def test_chunks_that_do_not_add_up_to_the_latency_are_a_fault(tmp_path: Path) -> None:
    one = record(0)
    one["metrics"]["inter_chunk_latency"]["value"][5] += 1.0
    cell = written(tmp_path / "c4", one)
    assert cell.records is not None
    assert "chunks do not add up" in cell.records.faults[0]


@pytest.mark.parametrize("length", [0, 0.5, -3])
def test_an_answer_of_less_than_a_token_is_a_fault(tmp_path: Path, length: float) -> None:
    one = record(0)
    one["metrics"]["output_sequence_length"]["value"] = length
    cell = written(tmp_path / "c4", one)
    assert cell.records is not None
    assert len(cell.records.faults) == 1


def test_copies_under_other_ids_are_duplicates(tmp_path: Path) -> None:
    copies = [record(0) for _ in range(5)]
    for number, copy in enumerate(copies):
        copy["metadata"]["x_request_id"] = str(number)
    cell = written(tmp_path / "c4", *copies)
    assert cell.records is not None
    assert cell.records.duplicates == 4


@pytest.mark.parametrize(
    ("spans", "most"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 1), (1, 2)], 1),
        ([(0, 2), (1, 3)], 2),
        ([(0, 9), (1, 2), (3, 4), (3, 5)], 3),
        ([(5, 5)], 0),
    ],
)
def test_requests_open_at_once(spans: list[tuple[int, int]], most: int) -> None:
    starts, ends = [x for x, _ in spans], [x for _, x in spans]
    assert records._in_flight(starts, ends) == most


def test_a_file_of_more_records_than_any_load_point_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "RECORDS_LIMIT", 10)
    written(tmp_path / "c4", *map(record, range(10)))
    with pytest.raises(Unreadable, match="more than 10 records"):
        written(tmp_path / "c5", *map(record, range(11)))


def test_a_record_without_an_end_is_read_no_further_than_its_limit(tmp_path: Path) -> None:
    """Two gigabytes on one line, which take no room on the disk and must not in memory."""
    written(tmp_path / "c4", record(0))
    with (tmp_path / "c4" / "profile_export.jsonl").open("r+b") as stream:
        stream.truncate(2 << 30)
    tracemalloc.start()
    with pytest.raises(Unreadable):
        records.read(tmp_path / "c4")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * records.RECORD_LIMIT


def test_what_an_error_holds_is_not_unpacked(tmp_path: Path) -> None:
    one = record(0) | {"error": [[]] * 100_000}
    tracemalloc.start()
    cell = written(tmp_path / "c4", one)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert cell.figures.errors == 1
    assert peak < 5 << 20


def test_memory_is_a_few_numbers_for_each_record(tmp_path: Path) -> None:
    folder = tmp_path / "c4"
    folder.mkdir()
    (folder / "profile_export_aiperf.json").write_text("{}")
    with (folder / "profile_export.jsonl").open("w") as stream:
        for number in range(20_000):
            one = record(number)
            del one["metrics"]["inter_chunk_latency"]
            one["metadata"]["x_request_id"] = str(number) * 40
            stream.write(json.dumps(one) + "\n")
    tracemalloc.start()
    records.read(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000 * 250


def test_the_wall_ends_with_the_last_token_not_with_its_stream(tmp_path: Path) -> None:
    folder = aiperf(tmp_path / "c4")
    path = folder / records.RECORDS
    *rest, last = path.read_text().splitlines()
    changed = json.loads(last)
    changed["metadata"]["request_end_ns"] += 5_000_000  # as seen on two busy cores
    path.write_text("\n".join([*rest, json.dumps(changed)]) + "\n")
    assert records.disagreements(records.read(folder)) == []


# Four real requests of each release to vLLM 0.24.0 on a CPU, 2026-11-30, cut to what is read.
# 0.10's exports are those of the committed drops.
EXPORTS = sorted((Path(__file__).parent / "golden").glob("aiperf-*"))


@pytest.mark.parametrize("folder", EXPORTS, ids=lambda path: path.name)
def test_the_exports_of_later_releases_are_borne_out_by_their_records(folder: Path) -> None:
    cell = records.read(folder)
    asked = Load(
        name="c2", folder=folder.name, cell=cell, concurrency=2, requests=4, isl=120, osl=8,
        version=folder.name.removeprefix("aiperf-"), model="tiny-qwen3-moe",
        url="http://127.0.0.1:18231",
    )  # fmt: skip
    assert {check.outcome for check in load([asked], ())} == {"met"}


def edited(folder: Path, root: Path, **changes: object) -> records.Cell:
    """A real export whose summary was edited."""
    other = shutil.copytree(folder, root / "c2")
    edit_json(other / "profile_export_aiperf.json", **changes)
    return records.read(other)


def test_a_rate_over_the_time_that_aiperf_watched_is_held_to_that_time(tmp_path: Path) -> None:
    newest = EXPORTS[-1]
    stated = json.loads((newest / "profile_export_aiperf.json").read_text())
    rate = stated["output_token_throughput"]["avg"]
    better = {"unit": "tokens/sec", "avg": rate * 1.02}
    assert (
        "tok_s"
        in records.disagreements(edited(newest, tmp_path / "rate", output_token_throughput=better))[
            0
        ]
    )
    later = stated["end_time"].replace(".", ".9", 1)[:26]
    assert "tok_s" in records.disagreements(edited(newest, tmp_path / "time", end_time=later))[0]


@pytest.mark.parametrize(
    ("release", "seconds", "agrees"),
    [
        ("0.13.0", 0.1, True),
        ("0.13.0", -0.04, False),
        ("0.13.0", 30, False),
        ("0.11.0", 0.1, False),
    ],
)
def test_a_watch_that_ends_early_or_late_makes_no_other_rate(
    tmp_path: Path, release: str, seconds: float, agrees: bool
) -> None:
    """4.3 s that ended 1.7 s early by their summary were proven at 1978 tokens a second, of 1194.
    seconds: how much longer AIPerf says that it watched than the benchmark lasted."""
    folder = next(path for path in EXPORTS if path.name == f"aiperf-{release}")
    stated = json.loads((folder / "profile_export_aiperf.json").read_text())
    over = stated["benchmark_duration"]["avg"] + seconds
    begin = datetime.datetime.fromisoformat(stated["start_time"])
    said: dict[str, object] = {"end_time": (begin + datetime.timedelta(seconds=over)).isoformat()}
    for name, of in (
        ("output_token_throughput", stated["total_output_tokens"]["avg"]),
        ("request_throughput", stated["request_count"]["avg"]),
    ):
        said[name] = {**stated[name], "avg": of / over}
    assert (not records.disagreements(edited(folder, tmp_path, **said))) is agrees


def said(
    rate: float, *, ticks: int = 6, zone: int = 0, step: int = 10
) -> list[tuple[str, str, float]]:
    """Rates of two engines, each half, over a minute from START on, across the ends of seconds."""
    begin = datetime.datetime.fromtimestamp(START, datetime.UTC) + datetime.timedelta(hours=zone)
    times = [begin + datetime.timedelta(seconds=step * n + step) for n in range(ticks)]
    second = datetime.timedelta(seconds=1)
    pairs = [(at, at + second * (n % 2)) for n, at in enumerate(times)]
    stamps = [[f"{at:%m-%d %H:%M:%S}" for at in pair] for pair in pairs]
    return [
        (at, engine, rate / 2) for pair in stamps for at, engine in zip(pair, "01", strict=True)
    ]


def a_minute(root: Path, *, zone: int = 0) -> Load:
    """A load point of 100 tokens a second over a minute, as AIPerf's local clock says."""
    cell = records.read(aiperf(root / "c4"))
    assert cell.records is not None
    assert cell.start is not None
    figures = msgspec.structs.replace(cell.records.figures, tok_s=100.0)
    kept = dataclasses.replace(cell.records, figures=figures, window=(START, START + 60.0))
    local = cell.start + datetime.timedelta(hours=zone)
    held = dataclasses.replace(cell, records=kept, start=local)
    return Load("c4", "c4", held, 4, 8, 120, 128, "0.10.0", "tiny")


@pytest.mark.parametrize(
    ("rates", "outcome"),
    [
        (said(100.0), "met"),
        (said(78.0), "met"),
        (said(60.0), "failed"),
        (said(140.0), "failed"),
        (said(60.0, ticks=3), "unchecked"),  # nothing much can be said
        (said(60.0, zone=3), "unchecked"),  # of another time
        ([("13-41 99:99:99", "0", 60.0)], "unchecked"),
        ([], "unchecked"),
    ],
)
def test_a_server_s_own_rate_bears_out_a_load_point_that_lasted(
    tmp_path: Path, rates: list[tuple[str, str, float]], outcome: str
) -> None:
    assert server_rate([a_minute(tmp_path)], rates)[0] == outcome


def test_a_server_s_clock_may_be_local(tmp_path: Path) -> None:
    assert server_rate([a_minute(tmp_path, zone=3)], said(60.0, zone=3))[0] == "failed"


@pytest.mark.parametrize(("rate", "outcome"), [(100.0, "met"), (60.0, "failed")])
@pytest.mark.parametrize("every", [1, 5, 20])
def test_a_server_may_say_its_rate_more_often_or_less(
    tmp_path: Path, every: int, rate: float, outcome: str
) -> None:
    """Each second by VLLM_LOG_STATS_INTERVAL=1: rates of one engine were added up."""
    ticks = said(rate, ticks=240 // every, step=every)
    held = a_minute(tmp_path)
    assert held.cell is not None
    assert held.cell.records is not None
    kept = dataclasses.replace(held.cell.records, window=(START, START + 240.0))
    held = dataclasses.replace(held, cell=dataclasses.replace(held.cell, records=kept))
    interval = datetime.timedelta(seconds=every)
    assert server_rate([held], ticks, interval)[0] == outcome
