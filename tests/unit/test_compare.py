"""Measured beside published: the difference, the band, and what may not be compared."""

from pathlib import Path

import drops
import msgspec
import pytest

from lanekit import compare, published
from lanekit.compare import Line
from lanekit.verdict import CellRow, MicroRow, StepRow, Verdict
from lanekit.verify import verify

KNOWN = published.load()


def served(tok_s: float, *, arm: str = "epnc8", profile: str = "p5en-x2") -> Verdict:
    cell = CellRow(
        name="c32", folder="", concurrency=32, requests=128, errors=0, tok_s=tok_s, tok_s_user=9.0,
        ttft_avg_ms=None, ttft_p50_ms=420.0, ttft_p99_ms=None, itl_p50_ms=None, itl_p99_ms=None,
        duration_s=None, source="records",
    )  # fmt: skip
    return Verdict("d", "proven", "", lane="vllm", arm=arm, profile=profile, cells=(cell,))


def by_metric(verdict: Verdict, cell: str = "c32") -> dict[str, Line]:
    return {line.figure.metric: line for line in compare.lines(KNOWN, verdict, cell)}


@pytest.mark.parametrize(
    ("tok_s", "standing", "reproduced"),
    [
        (273.0, "within", True),
        (245.8, "within", True),  # 10.0 % below
        (245.0, "worse", False),  # 10.3 % below
        (301.0, "better", True),
    ],
)
def test_a_headline_figure_is_held_to_the_band(
    tok_s: float, standing: str, *, reproduced: bool
) -> None:
    lines = compare.lines(KNOWN, served(tok_s), "c32")
    (line,) = [x for x in lines if x.figure.metric == "tok_s"]
    assert line.standing == standing
    assert line.difference == pytest.approx((tok_s - 273.0) / 273.0)
    assert compare.reproduced(KNOWN, lines) is reproduced


def test_a_latency_that_grew_is_worse_and_no_headline() -> None:
    found = by_metric(served(273.0))
    assert found["ttft_p50_ms"].standing == "worse"
    assert compare.reproduced(KNOWN, list(found.values())) is True


def test_what_was_not_measured_is_absent_and_not_zero() -> None:
    line = by_metric(served(273.0))["itl_p50_ms"]
    assert (line.measured, line.difference, line.standing) == (None, None, "not measured")


def test_another_fleet_is_shown_and_never_judged() -> None:
    lines = compare.lines(KNOWN, served(40.0, arm="epnc1", profile="h200x2"), "c32")
    assert {x.standing for x in lines} == {"other fleet", "not measured"}
    assert compare.reproduced(KNOWN, lines) is None


def test_an_unsupported_figure_decides_nothing() -> None:
    lines = compare.lines(KNOWN, served(999.0, arm="dense"), "c32")
    assert [(x.figure.value, x.standing) for x in lines] == [(304, "better")]
    assert compare.reproduced(KNOWN, lines) is None


def test_a_row_that_nobody_published_has_no_lines() -> None:
    assert compare.lines(KNOWN, served(1.0, arm="floor", profile="cpu"), "c32") == []


def test_a_figure_without_a_direction_is_outside_not_worse() -> None:
    metric = msgspec.structs.replace(KNOWN.metrics["tok_s"], better="")
    known = msgspec.structs.replace(KNOWN, metrics={**KNOWN.metrics, "tok_s": metric})
    lines = compare.lines(known, served(999.0), "c32")
    assert next(x.standing for x in lines if x.figure.metric == "tok_s") == "outside"
    assert compare.reproduced(known, lines) is False


def times(op: str, mode: str, dtype: str, p50: float, tokens: int = 128) -> MicroRow:
    return MicroRow("decode", op, mode, dtype, tokens, 1, 1, p50, p50, p50, 0.0, 1.0)


def test_micro_takes_the_captured_fp8_times_of_the_published_shape() -> None:
    rows = (
        times("dispatch", "graph", "fp8", 180.0), times("combine", "graph", "fp8", 250.0),
        times("dispatch", "eager", "fp8", 300.0), times("dispatch", "graph", "bf16", 310.0),
        times("dispatch", "graph", "fp8", 320.0, tokens=64), times("pair", "graph", "fp8", 500.0),
    )  # fmt: skip
    verdict = Verdict("d", "proven", "", lane="micro", arm="v2", profile="p5en-x2", micro=rows)
    found = by_metric(verdict, "decode")
    assert found["dispatch_p50_us"].measured == 180.0
    assert found["dc_p50_us"].measured == 430.0
    assert compare.reproduced(KNOWN, list(found.values())) is True
    low = msgspec.structs.replace(verdict, arm="v1-ll")
    assert by_metric(low, "decode")["dc_p50_ms"].measured == 0.43


def test_the_variants_of_micro_stand_beside_those_of_the_published_run() -> None:
    ops = ("expanded-dispatch", "cached-dispatch", "reduced-combine")
    rows = tuple(times(op, "graph", "fp8", 200.0 + n) for n, op in enumerate(ops))
    verdict = Verdict("d", "proven", "", lane="micro", arm="v2-variants", profile="p5en-x2",
                      micro=rows)  # fmt: skip
    found = by_metric(verdict, "decode")
    assert {name: (line.measured, line.figure.value) for name, line in found.items()} == {
        "expanded_dispatch_p50_us": (200.0, 179.8),
        "cached_dispatch_p50_us": (201.0, 231.6),
        "reduced_combine_p50_us": (202.0, 289.8),
    }


def test_micro_falls_back_to_eager_where_nothing_was_captured() -> None:
    row = times("dispatch", "eager", "fp8", 300.0)
    verdict = Verdict("d", "proven", "", lane="micro", arm="v2", profile="p5en-x2", micro=(row,))
    found = compare.measured(verdict, "decode")
    assert found == {"dispatch_p50_us": 300.0}


def test_training_steps_stand_beside_published_ones_and_decide_nothing() -> None:
    """Their driver drew other weights and tokens: a loss is shown, and is no headline."""
    steps = tuple(
        StepRow("steps", role, "v2", step, 20.0 + step, 30.0, 1.0, sent=sent)
        for role in ("reference", "arm") for step in range(4)
        for sent in [1_096_000_000 if (role, step) == ("arm", 3) else None]
    )  # fmt: skip
    verdict = Verdict("d", "proven", "", lane="megatron", arm="v2", profile="p5-x2", steps=steps)
    assert compare.cells(verdict) == ["steps"]
    found = by_metric(verdict, "steps")
    assert (found["loss_1"].measured, found["grad_norm_3"].measured) == (21.0, 30.0)
    assert "loss_0" not in compare.measured(verdict, "steps")
    assert found["efa_tx_gb"].measured == pytest.approx(1.096)
    assert compare.reproduced(KNOWN, list(found.values())) is None


def test_a_rollout_is_all_steps_of_the_arm_and_decides_nothing() -> None:
    """Its first step holds DeepEP's compiler, as the published time does; theirs had no model."""
    steps = tuple(
        StepRow("rollout", role, "v2", step, 5.0, None, ms)
        for role, ms in (("reference", 9000.0), ("arm", 1000.0)) for step in range(9)
    )  # fmt: skip
    verdict = Verdict(
        "d", "proven", "", lane="nemo-rl", arm="v2-rollout", profile="p5-x2", steps=steps
    )
    found = by_metric(verdict, "rollout")
    assert (found["rollout_s"].measured, found["rollout_s"].figure.value) == (9.0, 9.45)
    assert compare.reproduced(KNOWN, list(found.values())) is None


@drops.needs_published
def test_the_published_seam_run_reproduces_itself() -> None:
    folder: Path = drops.PUBLISHED / "trtllm-deepep-dropin-20260707" / "trtllm-native-seam"
    verdict = verify(folder)
    for cell in ("c4", "c8", "c32"):
        lines = compare.lines(KNOWN, verdict, cell)
        assert compare.reproduced(KNOWN, lines) is True
        assert all(abs(x.difference or 0) < 0.01 for x in lines)
        assert len(lines) == 4
