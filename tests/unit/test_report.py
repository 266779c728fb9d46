"""RESULTS.md holds what is committed: a run of one's own must not change a committed file."""

import gzip
import json
import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import drops
import msgspec
import pytest

from lanekit import answers, lanes, logs, paths, planning, published, records, report, spec, verify
from lanekit.plan import Plan, public


def test_in_a_checkout_only_tracked_drops_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    other = next(x for x in lanes.tracked() if x.name.endswith("-cpu-micro-gloo"))
    for name in ("20261130T110000Z-cpu-vllm-floor", "20261130T120000Z-cpu-vllm-floor"):
        drops.drop(results / name, "cpu")
    published = (paths.RESULTS / "published.toml").read_bytes()
    (results / "published.toml").write_bytes(published)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "RESULTS", results)
    report.write()
    both = (results / "RESULTS.md").read_text()
    assert both.count("vllm/floor/c4") >= 2, "outside a checkout every drop is shown"
    git = ("git", "-C", str(tmp_path))
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "results/20261130T110000Z-cpu-vllm-floor"], check=True)
    report.write()
    text = (results / "RESULTS.md").read_text()
    assert "20261130T110000Z" in text
    assert "20261130T120000Z" not in text
    (waiting,) = [line for line in text.splitlines() if line.startswith("- not run yet: ")]
    assert "micro/gloo on cpu" in waiting
    shutil.copytree(other, results / other.name)
    report.write()
    assert (results / "RESULTS.md").read_text() == text, "one's own run is not counted as measured"


@pytest.mark.parametrize("drop", lanes.tracked(), ids=lambda drop: drop.name)
def test_a_committed_row_is_proven_and_says_so_itself(drop: Path) -> None:
    """A later rule or contract that a committed row does not meet takes the row with it."""
    found = verify.verify(drop)
    assert found.result == "proven", found.reason
    stored = json.loads((drop / "verdict.json").read_text())
    assert (stored["result"], stored["contract"]) == (found.result, found.contract)


def test_the_committed_report_shows_the_published_figures_of_today() -> None:
    shown = (paths.RESULTS / "RESULTS.md").read_text()
    assert shown.endswith(report._published(published.load())), "run `make report`"
    assert "443.6 us (bar 740)" in shown


def test_a_committed_row_cannot_be_sold_as_another_arm_s(tmp_path: Path) -> None:
    """Captured graphs as the eager arm: row, plan and answers agree, every sha256 is renewed, and
    the engine's own line says otherwise (2026-11-30: it was proven)."""
    (row,) = [x for x in lanes.tracked() if x.name.endswith("cpu-vllm-floor-graph")]
    drop = Path(shutil.copytree(row, tmp_path / row.name))
    manifest = json.loads((drop / "manifest.json").read_text())
    manifest["row"]["arm"] = manifest["plan"]["arm"] = "floor"
    plan = planning.again(msgspec.convert(manifest["plan"], Plan), spec.lane("vllm"))
    manifest["plan"] = public(plan) | {"gate": manifest["plan"]["gate"] | {"reference": ""}}
    manifest["plan"]["gate"] |= {"drop": "", "sha256": ""}
    (drop / answers.REFERENCE).unlink()
    found = answers.read(drop / answers.NAME)
    header = msgspec.structs.replace(found.header, arm="floor")
    (drop / answers.NAME).write_bytes(answers.encode(header, found.answers))
    (drop / "manifest.json").write_text(json.dumps(manifest))
    assert verify.verify(drops.seal(drop)).reason == "failed: vllm-engine-cpu, vllm-options"


def faster(folder: Path, factor: float) -> None:
    """A load point whose times are all shorter, alike in summary and records."""
    lines = [json.loads(x) for x in (folder / records.RECORDS).read_text().splitlines()]
    begin = min(x["metadata"]["request_start_ns"] for x in lines)
    for x in lines:
        for key in ("request_start_ns", "request_end_ns"):
            x["metadata"][key] = begin + round((x["metadata"][key] - begin) * factor)
        for name in ("request_latency", "time_to_first_token", "inter_token_latency"):
            x["metrics"][name]["value"] *= factor
        x["metrics"]["output_token_throughput_per_user"]["value"] /= factor
        chunks = x["metrics"]["inter_chunk_latency"]
        chunks["value"] = [each * factor for each in chunks["value"]]
    (folder / records.RECORDS).write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = json.loads((folder / records.SUMMARY).read_text())
    for name, metric in found.items():
        by = 1 / factor if "throughput" in name else factor
        if isinstance(metric, dict) and ("throughput" in name or "latency" in name or name in (
            "time_to_first_token", "benchmark_duration")):  # fmt: skip
            found[name] = {k: v * by if isinstance(v, float) else v for k, v in metric.items()}
    start = datetime.fromisoformat(found["start_time"])
    took = datetime.fromisoformat(found["end_time"]) - start
    found["end_time"] = (start + took * factor).isoformat()
    (folder / records.SUMMARY).write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("factor", "failed"), [(1.0, []), (0.97, []), (0.7, ["server-rate"]), (1.5, ["server-rate"])]
)
def test_a_row_is_not_made_faster_than_its_server_counted(
    tmp_path: Path, factor: float, failed: list[str]
) -> None:
    """Records, summary and digests all agree; only the server's log knows better (2026-11-30)."""
    drop = Path(shutil.copytree(next(paths.RESULTS.glob("20261130T154924Z-*")), tmp_path / "d"))
    faster(drop / "aiperf" / "c4", factor)
    found = {x.id: x.outcome for x in verify.verify(drops.seal(drop)).checks}
    timed = {"same-run"} if factor > 1 else set()
    assert [n for n, o in found.items() if o == "failed" and n not in timed] == failed
    assert found["server-rate"] == ("failed" if failed else "met")


@pytest.mark.parametrize(
    ("factor", "cut", "result"), [(0.2, False, "refuted"), (0.5, True, "no verdict")]
)
def test_a_row_is_not_made_so_fast_that_its_server_has_nothing_to_say(
    tmp_path: Path, factor: float, cut: bool, result: str
) -> None:
    """Fewer than four rates within a load point, or none at all in the log (2026-11-30)."""
    drop = Path(shutil.copytree(next(paths.RESULTS.glob("20261130T154924Z-*")), tmp_path / "d"))
    for cell in (drop / "aiperf").iterdir():
        faster(cell, factor)
    if cut:
        log = drop / "logs" / "host-1-server.log"
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(x for x in lines if "Avg generation" not in x))
    manifest = json.loads((drop / "manifest.json").read_text())
    off = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
    manifest["plan"]["extra_env"] = dict(zip(off, "011", strict=True))  # as its services have them
    (drop / "manifest.json").write_text(json.dumps(manifest))
    found = verify.verify(drops.seal(drop))
    (rate,) = [each for each in found.checks if each.id == "server-rate"]
    assert (found.result, rate.severity) == (result, "required")
    wrong = {x.id for x in found.checks if x.outcome != "met" and x.severity == "required"}
    assert wrong == {"server-rate"}


def test_engines_with_logs_of_their_own_are_not_added_up() -> None:
    """Each of them says its own rate of a load that all of them carried."""
    (apart,) = paths.RESULTS.glob("*-cpu-llmd-router")
    assert "server-rate" not in {each.id for each in verify.verify(apart).checks}


def test_a_row_of_another_model_than_the_lane_s_says_so() -> None:
    (small,) = paths.RESULTS.glob("20261130T154035Z-*")
    assert any(x.startswith("with MODEL=: built:qwen3-moe-4l") for x in verify.verify(small).said)
    (own,) = paths.RESULTS.glob("20261130T154645Z-*")
    assert not any("MODEL=" in x for x in verify.verify(own).said)


@pytest.mark.parametrize("kind", ["vllm-floor", "micro-gloo", "megatron-alltoall"])
def test_logs_that_were_packed_since_are_what_is_in_them(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "d"
    ours = next(x for x in lanes.tracked() if x.match(f"2*-cpu-{kind}"))  # not a run of one's own
    shutil.copytree(ours, root)
    for log in (root / "logs").glob("*.log"):
        (root / "logs" / f"{log.name}.gz").write_bytes(gzip.compress(log.read_bytes()))
        log.unlink()
    assert verify.verify(root).result == "proven"
    packed = next((root / "logs").glob("*.gz"))
    packed.write_bytes(gzip.compress(gzip.decompress(packed.read_bytes()) + b"one line more\n"))
    changed = f"changed: logs/{packed.name.removesuffix('.gz')}"
    assert next(x for x in verify.verify(root).checks if x.id == "files").actual == changed


def test_a_drop_s_logs_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch drop listed them again for each of its cells."""
    drop = next(x for x in lanes.tracked() if x.name.endswith("cpu-micro-gloo"))
    listed: list[Path] = []

    def find(root: Path, *rest: Any, **given: Any) -> list[logs.Log]:
        listed.append(root)
        return real(root, *rest, **given)

    real = logs.find
    monkeypatch.setattr(logs, "find", find)
    assert verify.verify(drop).result == "proven"
    assert listed == [drop]
