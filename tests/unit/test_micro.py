"""The micro driver's arithmetic, without torch; tests/lanes runs the whole program."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from lanekit import batch, paths, programs, spec

DRIVER = Path(__file__).parents[2] / "lanes" / "micro" / "ep_bench.py"
ep_bench = programs.load("ep_bench", DRIVER)


def record(**fields: object) -> dict[str, object]:
    base = {"v": 1, "kind": "time", "op": "dispatch", "mode": "eager", "tokens": 8, "rep": 0}
    times = {"p50_us": 10.0, "min_us": 9.0, "max_us": 20.0, "gbs": 2.0, "iterations": 3}
    return {**base, **times, "bytes": 100, "ranks": 2, **fields}


def test_the_slowest_rank_ends_an_exchange() -> None:
    timing = ep_bench.summarise([[1.0, 9.0, 3.0], [2.0, 4.0, 30.0]])
    assert (timing.p50_us, timing.min_us, timing.max_us) == (9.0, 1.0, 30.0)
    assert (timing.iterations, timing.ranks) == (3, 2)


@pytest.mark.parametrize("samples", [[], [[]], [[1.0], [1.0, 2.0]]])
def test_uneven_samples_are_refused(samples: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="uneven or empty"):
        ep_bench.summarise(samples)


def test_sizes() -> None:
    bf16 = ep_bench.Shape(128, 7168, 8, 256, 128, "bf16")
    fp8 = ep_bench.Shape(128, 7168, 8, 256, 128, "fp8")
    assert bf16.dispatch_row == 7168 * 2 + 8 * 12
    assert fp8.dispatch_row == 7168 + 56 * 4 + 8 * 12
    assert bf16.combine_row == fp8.combine_row == 7168 * 2
    assert (bf16.packed_row, fp8.packed_row) == (7168 * 2 + 16, 7168 + 56 * 4 + 16)
    assert ep_bench.powers_of_two(8192) == [1 << power for power in range(14)]
    assert ep_bench.powers_of_two(100)[-1] == 64
    assert ep_bench.gigabytes_per_second(1_000_000, 10.0) == 100.0
    assert ep_bench.gigabytes_per_second(1, 0.0) == 0.0


def test_the_sweep_shares_one_worst_case_and_decode_has_its_own() -> None:
    options = ep_bench.parse_options(["--backend", "deepep", "--out", "x", "--dtypes", "fp8"])
    shapes = list(ep_bench.shapes(options))
    assert (shapes[0].tokens, shapes[0].max_tokens) == (128, 128)
    assert [shape.tokens for shape in shapes[1:]] == ep_bench.powers_of_two(8192)
    assert {shape.max_tokens for shape in shapes[1:]} == {8192}


def test_the_sweep_is_taken_at_each_sm_count() -> None:
    chosen = ["--backend", "deepep", "--out", "x", "--tokens", "8", "--dtypes", "fp8"]
    options = ep_bench.parse_options([*chosen, "--decode", "0", "--sms", "16,32"])
    assert [(shape.tokens, shape.sms) for shape in ep_bench.shapes(options)] == [(8, 16), (8, 32)]


def test_repetitions_fold_into_one_row_with_their_spread() -> None:
    rows = ep_bench.over_repetitions(
        [
            record(rep=0, p50_us=10.0, min_us=8.0),
            record(rep=1, p50_us=12.0, max_us=50.0),
            record(rep=2, p50_us=11.0),
            record(rep=0, tokens=16),
            {"v": 1, "kind": "check", "ok": True},
        ]
    )
    assert [row["tokens"] for row in rows] == [8, 16]
    first = rows[0]
    assert (first["p50_us"], first["min_us"], first["max_us"]) == (11.0, 8.0, 50.0)
    assert (first["repetitions"], first["spread"]) == (3, round(2 / 11, 4))
    assert rows[1]["spread"] == 0.0


@pytest.mark.parametrize(
    ("line", "says"),
    [('{"v": 1, "ki', "line 2 is cut"), ('{"v": 9, "kind": "time"}', "line 2 is no"),
     ("[1]", "line 2 is no"), ('{"v": 1}', "line 2 is no")],
)  # fmt: skip
def test_a_damaged_file_names_its_line(line: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ep_bench.read_records([json.dumps(record()), line])


def test_table_shows_each_row_once() -> None:
    text = ep_bench.table([record(rep=0), record(rep=1, p50_us=12.0), record(op="copy-local")])
    assert len(text.splitlines()) == 3
    assert text.splitlines()[1].split() == [
        "dispatch", "eager", "8", "100", "11.0", "9.0", "20.0", "18.2%", "2.0"
    ]  # fmt: skip


def test_options_refuse_what_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ep_bench.parse_options(["--backend", "gloo", "--out", "x", "--dtypes", "bf16,int4"])
    assert "choose from bf16, fp8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ep_bench.parse_options(["--backend", "gloo", "--out", "x", "--hidden", "100"])
    assert "--hidden must be a multiple of 128" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["v1-ht", "v1-ll"])
def test_v1_has_no_variants(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ep_bench.parse_options(["--backend", backend, "--out", "x", "--variants", "1"])
    assert f"--variants is for deepep and gloo, not for {backend}" in capsys.readouterr().err


def test_the_variants_are_spelt_in_one_place() -> None:
    assert batch.variants() == ep_bench.VARIANTS
    for path in (paths.ROOT / "scripts" / "lanekit").glob("*.py"):
        assert [name for name in ep_bench.VARIANTS if name in path.read_text()] == [], path


def test_the_table_parts_the_longest_operation_from_its_mode() -> None:
    names = max(ep_bench.VARIANTS, key=len)
    assert ep_bench.table([record(op=names)]).splitlines()[1].split()[:2] == [names, "eager"]


def test_v1_between_hosts_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    for local, backend, modes in (
        ("8", "v1-ht", ["eager"]),
        ("8", "v1-ll", ["eager", "graph"]),
        ("8", "deepep", ["eager", "graph"]),
        ("16", "v1-ht", ["eager", "graph"]),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        options = ep_bench.parse_options(["--backend", backend, "--out", "x"])
        assert options.modes == modes
    assert "V1 waits for the host between hosts" in capsys.readouterr().err


@pytest.mark.parametrize("arm", spec.lane("micro").arms)
def test_who_judges_a_row_reads_its_modes_as_the_run_did(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's variables are the run's alone: what follows from them alone would be refuted."""
    found = spec.lane("micro")
    for profile in found.arms[arm].contracts:
        fleet = spec.profile(profile)
        words = [*found.profiles[profile].args, *found.arms[arm].args, "--out=x"]
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        judged = ep_bench.parse_options(words)
        monkeypatch.setenv("WORLD_SIZE", str(fleet.ranks))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(fleet.ranks // fleet.hosts))
        assert vars(ep_bench.parse_options(words)) == vars(judged), profile


def test_who_judges_under_torchrun_reads_them_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("ep_bench.py", "--backend=v1-ht", "--out=x")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found = batch.options(batch.Taken([], command))
    assert found is not None
    assert found[1].modes == ["eager", "graph"]
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("16", "8")


def test_hybrid_is_of_every_shape() -> None:
    options = ep_bench.parse_options(["--backend", "deepep", "--out", "x", "--hybrid", "1"])
    assert all(shape.hybrid for shape in ep_bench.shapes(options))


def test_v1_which_says_no_version_of_itself_is_known_by_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """567632d has no `__version__`: the program ended there (two H200, 2026-11-30)."""
    info = tmp_path / "deep_ep-1.2.1+1bb86a6.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deep_ep\nVersion: 1.2.1+1bb86a6\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    gpu = SimpleNamespace(get_device_name=lambda: "NVIDIA H200")
    torch = SimpleNamespace(__version__="2.11.0", cuda=gpu)
    monkeypatch.setattr(ep_bench, "torch", torch, raising=False)
    monkeypatch.setattr(ep_bench, "mapped_nccl", lambda: 23004)
    assert ep_bench.versions("v1-ll")["deep_ep"] == "1.2.1+1bb86a6"
