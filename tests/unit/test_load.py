"""AIPerf judged from its records: every way a load point can lie, and what stands beside logs."""

import copy
import datetime
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import captured
import drops
import pytest

from lanekit import capture, clock, machine, spec, witness
from lanekit.errors import ConfigError, Unreadable
from lanekit.verdict import Check, Verdict, decide
from lanekit.verify import verify

pytestmark = pytest.mark.usefixtures("known_lanes")

SUMMARY = "profile_export_aiperf.json"
RECORDS = "profile_export.jsonl"


def check(found: Verdict, name: str) -> Check:
    return next(x for x in found.checks if x.id == name)


def with_cell(root: Path, change: Callable[[Path], object], name: str = "cpu") -> Verdict:
    """The verdict of a drop whose load point was changed before it was sealed."""
    drop = drops.drop(root / "d", name)
    change(drop / "aiperf" / "c4")
    return verify(drops.seal(drop))


def summary(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: drops.edit_json(folder / SUMMARY, **changes)


def records(edit: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / RECORDS
        found = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(x) + "\n" for x in edit(found)))

    return change


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / SUMMARY
        found = json.loads(path.read_text())
        found["input_config"] |= changes
        path.write_text(json.dumps(found))

    return change


def failed_one(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last record is an error, as AIPerf writes one: without its times."""
    lines[-1] |= {"error": {"code": 500, "type": "Internal Server Error"}, "metrics": {}}
    return lines


def slower_one(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines[3]["metrics"]["time_to_first_token"]["value"] = 400.0
    return lines


def longer(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last answer 5 tokens longer than its other figures say."""
    lines[-1]["metrics"]["output_sequence_length"]["value"] += 5
    return lines


def short_prompts(folder: Path) -> None:
    """Prompts of 20 tokens, alike in summary and records."""
    lines = [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]
    for line in lines:
        line["metrics"]["input_sequence_length"]["value"] = 20
    (folder / RECORDS).write_text("".join(json.dumps(x) + "\n" for x in lines))
    drops.edit_json(folder / SUMMARY, input_sequence_length={"avg": 20.0})


def unmeasured(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for line in lines:
        del line["metrics"]["input_sequence_length"]
    return lines


def told(old: str, new: str) -> Callable[[Path], None]:
    """AIPerf says of itself that it was given other options."""

    def change(folder: Path) -> None:
        said = json.loads((folder / SUMMARY).read_text())["run_info"]["cli_command"]
        assert old in said
        drops.edit_json(folder / SUMMARY, run_info={"cli_command": said.replace(old, new)})

    return change


def unchunked(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for line in lines:
        del line["metrics"]["inter_chunk_latency"]
    return lines


def whole(requests: int, osl: int) -> Callable[[Path], None]:
    """Another load, alike in summary and records; only the configuration is as planned."""

    def change(folder: Path) -> None:
        said = json.loads((folder / SUMMARY).read_text())
        asked = {key: said[key] for key in ("input_config", "run_info")}
        lines = [drops.record(n, osl=osl) for n in range(requests)]
        (folder / RECORDS).write_text("".join(json.dumps(x) + "\n" for x in lines))
        other = drops.summary(requests, 4, osl=osl) | asked
        (folder / SUMMARY).write_text(json.dumps(other))

    return change


REFUTED = [
    ("requests", whole(7, 128)),
    ("output-length", whole(8, 100)),
    ("requests", summary(request_count={"avg": 7.0})),
    ("requests", records(lambda x: x[:-1])),
    ("requests", records(lambda x: [*x, x[0]])),
    ("requests", records(lambda x: [*x[:-1], x[0]])),
    ("errors", summary(error_request_count={"avg": 1.0})),
    ("errors", summary(error_summary=[{"count": 1, "error_details": {"code": 500}}])),
    ("errors", records(failed_one)),
    ("cancelled", summary(was_cancelled=True)),
    ("output-length", records(lambda _: [drops.record(n, osl=100) for n in range(8)])),
    ("output-length", short_prompts),
    ("as-planned", told("--streaming", "")),
    ("as-planned", told("--streaming", "--streaming --request-rate 9")),
    ("as-planned", told("ignore_eos:true", "ignore_eos:false")),
    ("as-planned", summary(aiperf_version="0.9.0")),
    ("as-planned", config(models={"items": [{"name": "other"}]})),
    ("as-planned", config(phases=[{"name": "profiling", "requests": 8, "concurrency": 5}])),
    ("records", summary(output_token_throughput={"avg": 999.0})),
    ("records", summary(output_token_throughput_per_user={"avg": 999.0})),
    ("records", summary(time_to_first_token={"p50": 1.0, "p99": 100.0})),
    ("records", summary(time_to_first_token={"p50": 100.0, "p99": 1.0})),
    ("records", summary(inter_token_latency={"p50": 1.0, "p99": 10.0})),
    ("records", summary(inter_token_latency={"p50": 10.0, "p99": 1.0})),
    ("records", summary(benchmark_duration={"avg": 1.0})),
    ("records", records(slower_one)),
    ("records", records(longer)),
    ("as-planned", config(endpoint={"urls": ["http://other:1"], "streaming": True})),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), REFUTED)
def test_a_load_point_that_lies_is_refuted(
    tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    found = with_cell(tmp_path, change)
    assert (found.result, check(found, name).outcome) == ("refuted", "failed")


UNCHECKED = [
    ("requests", summary(request_count=None)),
    ("errors", summary(error_summary=None)),
    ("cancelled", summary(was_cancelled=None)),
    ("as-planned", summary(aiperf_version=None)),
    ("as-planned", summary(run_info=None)),
    ("as-planned", summary(run_info={"cli_command": "an 'open quotation"})),
    ("output-length", records(unmeasured)),
    ("as-planned", config(endpoint={"streaming": True})),
    ("records", records(unchunked)),
    ("records", lambda folder: (folder / RECORDS).unlink()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), UNCHECKED)
def test_a_missing_field_is_never_zero(
    tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    found = with_cell(tmp_path, change)
    assert found.result != "proven"
    assert check(found, name).outcome in ("unchecked", "failed")


def test_each_load_check_alone_decides(tmp_path: Path) -> None:
    seen = set()
    for number, (name, change) in enumerate([*REFUTED, *UNCHECKED]):
        found = with_cell(tmp_path / str(number), change)
        bad = [x.id for x in found.checks if x.severity == "required" and x.outcome != "met"]
        if bad == [name]:
            seen.add(name)
    assert seen == {"requests", "errors", "cancelled", "output-length", "as-planned", "records"}


def test_an_export_of_0_13_reads_alike(tmp_path: Path) -> None:
    """Schema 1.4 adds fields and a kind to phases, and takes none away (read 2026-11-30)."""

    def newer(folder: Path) -> None:
        drops.edit_json(folder / SUMMARY, schema_version="1.4", is_complete=True, extra={"a": [1]})
        phases = [
            {"name": "warmup", "kind": "warmup", "requests": 2, "concurrency": 1},
            {"name": "profiling", "kind": "profiling", "requests": 8, "concurrency": 4},
        ]
        config(phases=phases)(folder)
        warm = copy.deepcopy(drops.record(99))
        warm["metadata"] |= {"benchmark_phase": "warmup", "phase_index": 0}
        records(lambda x: [warm, *x])(folder)

    assert with_cell(tmp_path, newer).result == "proven"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def zeros(path: Path) -> None:
    path.write_bytes(b"\0" * 500)


def deep(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


def encoded(path: Path) -> None:
    path.write_bytes(b"\xff\xfe{}")


def wrong_type(path: Path) -> None:
    path.write_text('{"metadata": 3, "metrics": 4, "request_count": "many"}')


@pytest.mark.parametrize("damage", [cut, zeros, deep, encoded, wrong_type])
@pytest.mark.parametrize("name", [SUMMARY, RECORDS])
def test_a_damaged_export_is_unreadable(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    with pytest.raises(Unreadable, match=name):
        with_cell(tmp_path, lambda folder: damage(folder / name))


# --- the clock


@pytest.mark.parametrize(
    ("shift", "result"),
    [
        (datetime.timedelta(0), "proven"),
        (datetime.timedelta(days=-1), "refuted"),
        (datetime.timedelta(hours=3), "refuted"),
        (datetime.timedelta(minutes=3), "refuted"),
    ],
)
def test_the_log_of_another_run_refutes(
    tmp_path: Path, shift: datetime.timedelta, result: str
) -> None:
    start = datetime.datetime(2026, 11, 30, 11, 10) + shift
    end = start + datetime.timedelta(seconds=3.82)
    times = {"start_time": start.isoformat(), "end_time": end.isoformat()}
    moved = records(lambda _: [drops.record(n, start=drops.START + shift.total_seconds())
                               for n in range(8)])  # fmt: skip

    def change(folder: Path) -> None:
        summary(**times)(folder)
        moved(folder)

    found = with_cell(tmp_path, change)
    assert (found.result, check(found, "same-run").outcome) == (
        result, "met" if result == "proven" else "failed",
    )  # fmt: skip


def test_a_log_in_utc_fits_an_aiperf_in_another_zone(tmp_path: Path) -> None:
    times = {"start_time": "2026-11-30T06:10:00", "end_time": "2026-11-30T06:10:03.82"}
    assert with_cell(tmp_path, summary(**times)).result == "proven"


TIMELESS = lambda x: [re.sub(r"\d\d-\d\d \d\d:\d\d:\d\d ", "", y) for y in x]  # noqa: E731


@pytest.mark.parametrize(
    ("change", "edit"),
    [
        (summary(start_time=None), list),
        (summary(end_time=None), list),
        (summary(start_time="0001-01-01T00:00:00"), list),
        (records(lambda _: []), list),
        (lambda folder: (folder / RECORDS).unlink(), list),
        (lambda _: None, TIMELESS),
    ],
)
def test_a_clock_that_is_not_there_is_no_pass(
    tmp_path: Path, change: Callable[[Path], object], edit: drops.Edit
) -> None:
    root = drops.drop(tmp_path / "d", "cpu", edit)
    change(root / "aiperf" / "c4")
    found = verify(drops.seal(root))
    assert (found.result != "proven", check(found, "same-run").outcome) == (True, "unchecked")


def shifted(**by: float) -> Callable[[Path], None]:
    """Every record later, the summary as it was."""
    more = datetime.timedelta(**by).total_seconds()
    return records(lambda _: [drops.record(n, start=drops.START + more) for n in range(8)])


HOURS = "its summary's start 11-30 11:10:00 is 12-01 09:10:00 in its records"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shifted(days=40), "its summary's start"),
        (shifted(hours=22), HOURS),
        (shifted(hours=1), "ran 11-30 12:10:00 to 11-30 12:10:03, the run 11-30 11:00:00"),
        (shifted(hours=-1), "ran 11-30 10:10:00"),
        (shifted(seconds=5), "its summary's start"),
        (summary(end_time="2026-11-30T11:10:09"), "its summary's end"),
    ],
)
def test_records_of_another_time_than_their_summary_s_or_the_run_s_refute(
    tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    found = check(with_cell(tmp_path, change), "same-run")
    assert (found.outcome, said in found.actual) == ("failed", True), found.actual


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"started": "2026-11-30T11:10:03+00:00"}, "c4: ran"),
        ({"ended": "2026-11-30T11:10:01+00:00"}, "c4: ran"),
        ({"started": "2026-10-21T11:00:00+00:00", "ended": "2026-10-21T11:13:00+00:00"}, "c4: ran"),
        ({"timings": {"cell c4": 1.0}}, "took 4 s, its cell 1 s"),
        ({"timings": {"cell c4": -1e308}}, "took 4 s, its cell -"),
        ({"started": "2026-11-30T11:05:00+00:00"}, "the log spans 11-30 11:00:00"),
        ({"ended": "2026-11-30T11:10:50+00:00"}, "the log spans 11-30 11:00:00"),
    ],
)
def test_a_run_whose_times_do_not_hold_its_load_points_or_its_log_refutes(
    tmp_path: Path, other: dict[str, Any], said: str
) -> None:
    found = check(verify(drops.drop(tmp_path / "d", **other)), "same-run")
    assert (found.outcome, said in found.actual) == ("failed", True), found.actual


def test_a_load_point_that_began_before_the_one_before_it_ended_refutes(tmp_path: Path) -> None:
    """A cell that is a copy of another under other request ids."""
    root = drops.drop(tmp_path / "d", cells=("c4", "c5"))
    drops.aiperf(root / "aiperf" / "c5")
    found = check(verify(drops.seal(root)), "same-run")
    assert "c5: began at 11:10:00, before the one planned before it was over" in found.actual


def test_records_of_a_time_no_clock_shows_are_faults(tmp_path: Path) -> None:
    moved = records(lambda _: [drops.record(n, start=1e10) for n in range(8)])
    assert "no clock shows" in check(with_cell(tmp_path, moved), "records").actual


def test_a_log_that_ends_in_request_lines_is_not_held_to_its_end(tmp_path: Path) -> None:
    """Request lines carry no time: 64 KiB of them hide the last one that was stated."""
    root = drops.drop(tmp_path / "d", "cpu", lambda x: [y for y in x if y != drops.END] + FULL)
    found = verify(root)
    assert (found.result, check(found, "same-run").outcome) == ("proven", "met")


FULL = [drops.POST.replace("/v1/completions", "/tokenize")] * 2000


@pytest.mark.parametrize(
    ("line", "moment"),
    [
        (b"(APIServer pid=1) INFO 12-31 23:59:58 [x.py:1] a", "2026-12-31T23:59:58"),
        (b"[07/07/2026-12:23:53] [TRT-LLM] [I] a", "2026-07-07T12:23:53"),
        (b"[2026-11-30 11:04:52 TP0] a", "2026-11-30T11:04:52"),
        (b"INFO 13-45 99:00:00 [x]", None),
        (b"nothing", None),
    ],
)
def test_times_of_lines(line: bytes, moment: str | None) -> None:
    near = datetime.datetime(2027, 1, 1)
    found = clock.window(line, b"", near)
    assert (found.first.isoformat() if found else None) == moment


# --- counters, NICs, images

P5EN = spec.profile("p5en-x2")
SHAPE = {"layers": 48, "hidden": 2048, "topk": 8}
PLAN = {"model": {"shape": SHAPE}}


def host(sent: int, nics: int = 16) -> dict[str, Any]:
    reading = {"tx_bytes": 10, "rdma_write_bytes": 20}
    after = {"tx_bytes": 10, "rdma_write_bytes": 20 + sent}
    counters = {"before": {"rdmap0": reading}, "after": {"rdmap0": after}}
    return {"nics": [f"rdmap{n}" for n in range(nics)], "hw_counters": counters}


def witnessed(hosts: dict[str, Any], tokens: int | None = 1000, **plan: Any) -> dict[str, Check]:
    return {x.id: x for x in witness.checks(hosts, P5EN, tokens, PLAN | plan)}


def test_counters_above_the_lower_bound_are_met_and_below_refute() -> None:
    least = 1000 * 48 * 2048 * (1 - 2**-8)
    enough = witnessed({"a": host(int(least)), "b": host(1)})
    assert enough["efa-bytes"].outcome == "met"
    short = witnessed({"a": host(1000), "b": host(1000)})["efa-bytes"]
    assert (short.outcome, short.severity) == ("failed", "required")


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        (captured.FI_INFO, "met"),
        (captured.FI_INFO.replace("rdmap79s0", "rdmap80s0"), "unchecked"),
        (captured.FI_INFO.replace("efa-direct", "efa"), "unchecked"),
        ("no such thing", "unchecked"),
        (None, "unchecked"),
    ],
)
def test_what_the_host_s_libfabric_offers_is_shown(said: str | None, outcome: str) -> None:
    asked = {"captured": {"fi_info": {"rc": 0, "out": said}}}
    hosts = {name: host(1) | asked for name in ("a", "b")}
    found = witnessed(hosts)["fi-info"]
    assert (found.outcome, found.severity) == (outcome, "noted")
    for odd in (None, {}, {"captured": 1}, {"captured": {"fi_info": {"rc": 127, "out": said}}}):
        found = witnessed({**hosts, "b": host(1) | (odd or {})})["fi-info"]
        assert found.outcome == "unchecked"


@pytest.mark.parametrize(
    "hosts",
    [
        {},
        {"a": host(1 << 40)},
        {"a": host(1 << 40), "b": {"nics": []}},
        {"a": host(1 << 40), "b": host(-5)},
        {"a": host(1 << 40), "b": {"hw_counters": {"before": {}, "after": {}}}},
        {"a": host(1 << 40), "b": {"hw_counters": [1]}},
        {"a": host(1 << 40), "b": {"hw_counters": {"before": {"x": 1}, "after": {"x": 2}}}},
    ],
)
def test_counters_that_are_absent_or_ran_back_could_not_be_checked(hosts: dict[str, Any]) -> None:
    found = witnessed(hosts)["efa-bytes"]
    assert (found.outcome, found.severity) == ("unchecked", "noted")


def test_without_the_model_s_shape_there_is_no_bound() -> None:
    found = witnessed({"a": host(1), "b": host(1)}, model={"served_name": "x"})["efa-bytes"]
    assert found.outcome == "unchecked"


def test_a_host_with_fewer_nics_refutes() -> None:
    found = witnessed({"a": host(1), "b": host(1, nics=15)})["nics"]
    assert (found.outcome, found.actual) == ("failed", "a: 16, b: 15")


def test_an_image_by_tag_refutes() -> None:
    assert witnessed({}, images={"x": "repo@sha256:0"})["images"].outcome == "met"
    assert witnessed({}, images={"x": "repo:latest"})["images"].outcome == "failed"


def test_facts_of_hosts_are_read_from_the_drop(tmp_path: Path) -> None:
    root = drops.drop(tmp_path / "d", "v2-efa-proxy")
    one, other = sorted((root / "host").iterdir())
    drops.edit_json(one, nics=["x"] * 3)
    other.write_text("{torn")
    found = verify(drops.seal(root))
    assert (found.result, check(found, "nics").actual) == ("refuted", "ip-10-0-0-1: 3")
    assert check(found, "gpus").outcome == "unchecked"


def test_a_drop_that_says_nothing_of_its_hosts_is_no_proof(tmp_path: Path) -> None:
    for kind in ("v2-nvlink", "train-nvlink", "v2-one"):
        root = drops.drop(tmp_path / kind, kind)
        shutil.rmtree(root / "host")
        found = verify(drops.seal(root))
        assert (found.result, found.reason) == ("no verdict", "could not check: gpus")


@pytest.mark.parametrize(
    ("gpus", "outcome", "said"),
    [
        ([{"name": "NVIDIA H200"}] * 2, "met", "here: 2"),
        ([{"name": "NVIDIA A100"}] * 2, "failed", "here: 0"),
        ([{"name": "NVIDIA H200"}], "failed", "here: 1"),
        ([{}, 3], "failed", "here: 0"),
        (None, "unchecked", "no inventory"),
        ("NVIDIA H200", "unchecked", "no inventory"),
    ],
)
def test_gpus_are_those_of_the_profile(
    tmp_path: Path, gpus: object, outcome: str, said: str
) -> None:
    root = drops.drop(tmp_path / "d", "v2-nvlink")
    (root / "host" / "here.json").write_text(json.dumps({"gpus": gpus}))
    found = check(verify(drops.seal(root)), "gpus")
    assert (found.outcome, found.severity, found.actual) == (outcome, "required", said)


# hw_counters of an EFA device as sysfs has them, one file a counter; values made up.
COUNTERS = """rdmap79s0 rdma_read_bytes 0
rdmap79s0 rdma_write_bytes 1048576
rdmap79s0 rx_bytes 64
rdmap79s0 tx_bytes 4096
rdmap80s0 tx_bytes 7
rdmap80s0 tx_bytes 8
"""


def test_counters_are_added_up_over_ports() -> None:
    found = machine.parse_counters(COUNTERS)
    assert found["rdmap79s0"] == {
        "rdma_read_bytes": 0, "rdma_write_bytes": 1048576, "rx_bytes": 64, "tx_bytes": 4096,
    }  # fmt: skip
    assert found["rdmap80s0"] == {"tx_bytes": 15}
    with pytest.raises(ValueError, match="Permission denied"):
        machine.parse_counters("rdmap79s0 tx_bytes Permission denied")


def test_the_probe_reads_counters_as_sysfs_has_them(tmp_path: Path) -> None:
    port = tmp_path / "rdmap79s0" / "ports" / "1" / "hw_counters"
    port.mkdir(parents=True)
    for name, value in (("tx_bytes", 4096), ("rdma_write_bytes", 9), ("tx_pkts", 3)):
        (port / name).write_text(f"{value}\n")
    text = capture.probes()["counters"].run.replace("/sys/class/infiniband", str(tmp_path))
    said = subprocess.run(("sh", "-c", text), capture_output=True, text=True, check=True).stdout
    assert machine.parse_counters(said) == {"rdmap79s0": {"tx_bytes": 4096, "rdma_write_bytes": 9}}


def test_readings_around_the_sweep_are_joined_with_the_drop(tmp_path: Path) -> None:
    """As a run leaves them: the lower bound is worked out from the lane's model."""
    root = drops.drop(tmp_path / "d", "v2-efa-proxy")
    least = 8 * (120 + 128 - 1) * 48 * 2048 * (1 - 2**-8)
    for more, outcome in ((least / 2 + 1, "met"), (least / 2 - 1, "failed")):
        for path in (root / "host").iterdir():
            drops.edit_json(path, hw_counters=host(int(more))["hw_counters"])
        found = check(verify(drops.seal(root)), "efa-bytes")
        assert found.outcome == outcome
    for path in (root / "host").iterdir():
        drops.edit_json(path, hw_counters=None)
    found = check(verify(drops.seal(root)), "efa-bytes")
    assert (found.outcome, found.severity) == ("unchecked", "noted")


def test_the_same_bytes_in_two_files_count_once(tmp_path: Path) -> None:
    root = drops.drop(tmp_path / "d")
    log = root / "logs" / "here-server.log"
    shutil.copy(log, root / "logs" / "there-server.log")
    os.link(log, root / "logs" / "linked-server.log")
    (root / "logs" / "empty-a.log").write_bytes(b"")
    (root / "logs" / "empty-b.log").write_bytes(b"")
    found = verify(drops.seal(root))
    assert (found.result, check(found, "copies").outcome) == ("refuted", "failed")
    names = "logs/here-server.log = logs/linked-server.log = logs/there-server.log"
    assert check(found, "copies").actual == names


def test_a_stranger_s_log_under_several_names_is_read_once(tmp_path: Path) -> None:
    root = tmp_path / "trtllm-native-seam"
    drops.aiperf(root / "c4")
    log = root / "serve.log"
    log.write_text("\n".join(drops.log("published-2026-07-trtllm")) + "\n")
    shutil.copy(log, root / "again.log")
    os.link(log, root / "linked.log")
    (root / "pointed.log").symlink_to("serve.log")
    found = verify(root)
    assert check(found, "seam-elastic-trtllm").actual == "16 lines"
    assert check(found, "copies").outcome == "met"


def test_a_stranger_s_copied_records_refute(tmp_path: Path) -> None:
    root = tmp_path / "vllm-deepep_v2"
    for number, name in enumerate(("a", "b")):
        drops.aiperf(root / name, concurrency=4 + number)
    assert check(verify(root, profile="p5en-x2"), "copies").outcome == "failed"


def test_copies_of_one_record_without_its_id_are_not_counted_as_requests(tmp_path: Path) -> None:
    def copies(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for each in found:
            del each["metadata"]["x_request_id"]
        return found

    found = with_cell(tmp_path, records(copies))
    assert (found.result, check(found, "requests").outcome) == ("no verdict", "unchecked")
    assert check(found, "requests").actual.endswith("8 of them without a request id")


def test_two_exports_of_one_cell_are_refused(tmp_path: Path) -> None:
    """The later one by name would have stood for both."""
    with pytest.raises(Unreadable, match=r"cell c4 has more than one export: .*c4/zz"):
        with_cell(tmp_path, lambda folder: shutil.copytree(folder, folder / "zz"))


@pytest.mark.parametrize("name", [RECORDS, SUMMARY])
def test_a_link_to_another_cell_s_export_is_no_export(tmp_path: Path, name: str) -> None:
    root = drops.drop(tmp_path / "d", cells=("c4", "c5"))
    copy = root / "aiperf" / "c5"
    copy.mkdir()
    for each in (RECORDS, SUMMARY):
        source = root / "aiperf" / "c4" / each
        if each == name:
            (copy / each).symlink_to(source)
        else:
            (copy / each).write_bytes(source.read_bytes())
    drops.seal(root)
    if name == RECORDS:
        with pytest.raises(Unreadable, match="not a regular file"):
            verify(root)
    else:
        assert check(verify(root), "cells").missing == ("c5",)


def test_a_linked_log_is_not_read_twice(tmp_path: Path) -> None:
    """Its answered requests would count again."""
    root = drops.drop(tmp_path / "d", edit=lambda x: [y for n, y in enumerate(x) if n != 5])
    (root / "logs" / "more-server.log").symlink_to("here-server.log")
    assert check(verify(root), "requests-served").actual == "38 lines"


# --- waivers


def waive(root: Path, text: str) -> Verdict:
    drop = drops.drop(root / "d", "cpu", lambda x: [*x, drops.hook("vm", 0, 0, 1)])
    (drop / "waivers.toml").write_text(text)
    return verify(drop)


def test_a_waiver_of_the_transport_is_shown_and_proves_nothing(tmp_path: Path) -> None:
    text = '[[waiver]]\ncheck = "no-buffer"\nreason = "known"\nby = "me"\n'
    found = waive(tmp_path, text)
    assert (found.result, check(found, "no-buffer").waived) == ("no verdict", "known (me)")
    assert "waiver for no-buffer: known (me)" in found.said
    assert found.reason == "could not check: no-buffer"


def test_a_waiver_of_the_load_is_shown_and_counts(tmp_path: Path) -> None:
    drop = drops.drop(tmp_path / "d", cells=("c4", "c8"))
    text = '[[waiver]]\ncheck = "cells"\nreason = "known"\nby = "me"\n'
    (drop / "waivers.toml").write_text(text)
    found = check(verify(drop), "cells")
    assert (found.outcome, found.waived) == ("failed", "known (me)")
    held = [x for x in verify(drop).checks if x.outcome == "met" or x.waived]
    result, reason = decide(held)
    assert result == "proven"
    assert reason.endswith("1 waived")


@pytest.mark.parametrize(
    "text",
    [
        '[[waiver]]\ncheck = "files"\nreason = "x"\nby = "me"\n',
        '[[waiver]]\ncheck = "nonesuch"\nreason = "x"\nby = "me"\n',
        '[[waiver]]\ncheck = "no-buffer"\nreason = " "\nby = "me"\n',
        '[[waiver]]\ncheck = "no-buffer"\nreason = "x"\n',
        "not toml",
    ],
)
def test_a_waiver_needs_a_known_check_a_reason_and_a_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        waive(tmp_path, text)


def test_everything_waived_proves_nothing(tmp_path: Path) -> None:
    drop = tmp_path / "trtllm-native-seam"
    drop.mkdir()
    (drop / "serve.log").write_text("nothing\n")
    known = verify(drop).checks
    ids = [x.id for x in known if x.severity == "required" and x.group != "drop"]
    lines = (f'[[waiver]]\ncheck = "{name}"\nreason = "x"\nby = "me"\n' for name in ids)
    (drop / "waivers.toml").write_text("".join(lines))
    found = verify(drop)
    assert found.result == "no verdict"
    assert found.reason.startswith("could not check: ")


def test_fewer_requests_at_once_than_planned_refute(tmp_path: Path) -> None:
    """One after another, whatever the configuration says."""
    slow = records(lambda _: [drops.record(n, start=drops.START + n) for n in range(8)])
    found = check(with_cell(tmp_path, slow), "records")
    assert (found.outcome, found.actual) == ("failed", "c4: 2 requests at once, not 4")


@pytest.mark.parametrize(
    ("metric", "right"),
    [
        ("request_latency", {"avg": 1370.0, "min": 1370.0, "p1": 1370.0, "p95": 1370.0}),
        ("request_throughput", {"avg": 8 / 3.82, "p50": 7.0}),
        ("total_output_tokens", {"avg": 1024.0}),
        ("output_sequence_length", {"avg": 128.0, "max": 128.0}),
        ("time_to_first_token", {"avg": 100.0, "p50": 100.0, "p99": 100.0, "p25": 100.0}),
    ],
)
def test_every_statistic_of_a_summary_must_follow_from_its_records(
    tmp_path: Path, metric: str, right: dict[str, float]
) -> None:
    """Those too that no row shows. Of a whole, only the average means anything."""
    found = with_cell(tmp_path / "a", summary(**{metric: right}))
    assert check(found, "records").outcome == "met"
    name = list(right)[-1] if metric != "request_throughput" else "avg"
    wrong = right | {name: right[name] * 1.01}
    found = with_cell(tmp_path / "b", summary(**{metric: wrong}))
    assert (found.result, check(found, "records").outcome) == ("refuted", "failed")
    assert f"{metric} {name} " in check(found, "records").actual
