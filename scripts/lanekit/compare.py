"""Measured figures beside published ones. Pure: it compares; it neither judges logs nor prints."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from lanekit import batch, published, spec
from lanekit.published import Figure, Published
from lanekit.verdict import MicroRow, StepRow, Verdict

BAND: Final = 0.10  # the published guide's own bar for identical hardware (2026-07)
SERVING: Final = ("tok_s", "tok_s_user", "ttft_p50_ms", "itl_p50_ms")
MICRO_TOKENS: Final = 128  # the published shape; its dispatch is FP8

Standing = Literal["within", "better", "worse", "outside", "other fleet", "not measured"]


class Line(msgspec.Struct, frozen=True):
    """One figure of a row, published and measured. difference: of the measured one from the
    published, as a share. standing: against BAND, on the published fleet only."""

    figure: Figure
    measured: float | None
    difference: float | None
    standing: Standing


def cells(verdict: Verdict) -> list[str]:
    """The load points that a drop has figures of, in its order."""
    names = [row.name for row in verdict.cells] + [row.cell for row in verdict.micro]
    return list(dict.fromkeys(names + [row.cell for row in verdict.steps]))


def measured(verdict: Verdict, cell: str) -> dict[str, float]:
    """The figures of one load point by published metric name; what could not be read is absent."""
    found: dict[str, float | None] = {}
    for row in verdict.cells:
        if row.name == cell:
            found |= {name: getattr(row, name) for name in SERVING}
    found |= _micro([row for row in verdict.micro if row.cell == cell])
    for step in verdict.steps:
        if (step.cell, step.role) == (cell, "arm") and step.step:  # 0 is the warm-up
            found |= {f"loss_{step.step}": step.loss, f"grad_norm_{step.step}": step.grad_norm}
    steps = [row for row in verdict.steps if row.cell == cell]
    found["efa_tx_gb"] = next((row.sent / 1e9 for row in steps if row.sent is not None), None)
    found |= _rollout(steps) if cell == "rollout" else _grpo(steps)
    return {name: value for name, value in found.items() if value is not None}


def _micro(rows: Sequence[MicroRow]) -> Mapping[str, float]:
    """DeepEP's own program times kernels alone; nearest to that is a captured graph, which holds
    no launch (dispatch at 128 tokens over NVLink: 108.9 us eager, 16.1 captured, 14.5 by the
    profiler; 2026-11-30)."""
    shaped = [row for row in rows if row.tokens == MICRO_TOKENS and row.dtype == "fp8"]
    mode = "graph" if any(row.mode == "graph" for row in shaped) else "eager"
    times = {row.op: row.p50_us for row in shaped if row.mode == mode}
    found = {f"{op}_p50_us": times[op] for op in ("dispatch", "combine") if op in times}
    found |= {"dc_p50_us": sum(found.values())} if len(found) == 2 else {}
    variants = {
        f"{op.replace('-', '_')}_p50_us": times[op] for op in batch.variants() if op in times
    }
    return found | variants


def _rollout(rows: Sequence[StepRow]) -> Mapping[str, float]:
    """All steps of the arm, its first with DeepEP's compiler in it, as published."""
    times = [row.ms for row in rows if row.role == "arm" and row.ms is not None]
    return {"rollout_s": sum(times) / 1e3} if times else {}


def _grpo(rows: Sequence[StepRow]) -> Mapping[str, float]:
    """The split of the last GRPO step, as published."""
    last = rows[-1] if rows else None
    if last is None or not last.ms or not last.seconds:
        return {}
    refit = last.seconds.get("prepare_for_generation/transfer_and_update_weights")
    parts = {
        "generation_percent": last.seconds.get("generation"),
        "training_percent": last.seconds.get("policy_training"),
        "refit_percent": refit,
    }
    found = {name: 1e5 * s / last.ms for name, s in parts.items() if s is not None}
    return found | ({"refit_s": refit} if refit is not None else {})


def lines(known: Published, verdict: Verdict, cell: str) -> list[Line]:
    """Every published figure of a row, with what a drop measured of it."""
    found = measured(verdict, cell)
    if "dc_p50_us" in found:  # V1's is printed in another unit
        found["dc_p50_ms"] = found["dc_p50_us"] / 1e3
    name = f"{verdict.lane}/{verdict.arm}/{cell}"
    return [
        _line(known, figure, found.get(figure.metric), verdict.profile)
        for figure in published.figures(known, name)
    ]


def _line(known: Published, figure: Figure, value: float | None, profile: str) -> Line:
    if value is None:
        return Line(figure, None, None, "not measured")
    share = change(value, figure.value)
    if profile != figure.run.profile or not spec.profile(profile).comparable:
        return Line(figure, value, share, "other fleet")
    if abs(share) <= BAND:
        return Line(figure, value, share, "within")
    better = known.metrics[figure.metric].better
    beyond: Standing = "better" if (share > 0) == (better == "higher") else "worse"
    return Line(figure, value, share, beyond if better else "outside")


def change(value: float, reference: float) -> float:
    """The difference from a reference as a share of it; infinite from zero."""
    return (value - reference) / reference if reference else float("inf")


def reproduced(known: Published, found: Sequence[Line]) -> bool | None:
    """Whether every headline figure that is backed stands within the band or better; None where
    none can tell: not published, not measured, not on that fleet, or not supported."""
    told = [
        line.standing in ("within", "better")
        for line in found
        if line.standing not in ("other fleet", "not measured")
        and known.metrics[line.figure.metric].headline
        and line.figure.row.supported
    ]
    return all(told) if told else None
