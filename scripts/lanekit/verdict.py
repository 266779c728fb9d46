"""The verdict of a drop as data: what was checked, what was seen where, and what follows."""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

SCHEMA: Final = 1

Outcome = Literal["met", "failed", "unchecked"]
Severity = Literal["required", "noted"]
Result = Literal["proven", "refuted", "no verdict"]
EXIT: Final[dict[str, int]] = {"proven": 0, "refuted": 1, "no verdict": 2}


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a file of the drop, numbered from 1 as in the raw file; 0 means the whole file."""

    file: str
    line: int


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that was checked. `unchecked` is never a pass."""

    id: str
    group: Literal["drop", "transport", "answers", "load", "witness"]
    severity: Severity
    outcome: Outcome
    why: str
    expected: str
    actual: str
    first: Place | None = None
    last: Place | None = None
    missing: tuple[str, ...] = ()
    remedy: str = ""
    note: str = ""
    source: str = ""
    waived: str = ""


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a load point did: tokens/s, ms and s; None is what could not be read, never zero.

    tok_s: output tokens over the wall from the first start to the last token. tok_s_user: mean over
    requests of 1 / inter-token latency. source: `records` (recomputed) or `summary`.
    """

    requests: int | None
    errors: int | None
    tok_s: float | None
    tok_s_user: float | None
    ttft_avg_ms: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    duration_s: float | None
    source: str


class CellRow(Figures, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The figures of one load point. Rates in tokens/s, latencies in ms, duration in s; None is
    what could not be read, never zero."""

    name: str
    folder: str
    concurrency: int | None


class MicroRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One operation of the micro lane, over its repetitions. Times in microseconds, gbs in 1e9
    bytes/s at p50, spread: range of the repetitions' medians over their median. tokens: 0 for a
    floor that has no shape."""

    cell: str
    op: str
    mode: str
    dtype: str
    tokens: int
    bytes: int
    repetitions: int
    p50_us: float
    min_us: float
    max_us: float
    spread: float
    gbs: float


class StepRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training step. role: `reference` or `arm`; step 0 is the warm-up. loss in nats, grad_norm
    over all ranks, ms: wall time of the slowest rank; None is a figure that was not there. seconds:
    the named parts of a step, where its program times them. sent: bytes that the NICs of all hosts
    sent during the arm's steps, on the last of them."""

    cell: str
    role: str
    dispatcher: str
    step: int
    loss: float | None
    grad_norm: float | None
    ms: float | None
    seconds: dict[str, float] = {}
    sent: int | None = None


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a drop proves. said: what was inferred or noticed and must be known to the reader."""

    drop: str
    result: Result
    reason: str
    lane: str = ""
    arm: str = ""
    profile: str = ""
    contract: str = ""
    contract_version: int = 0
    contract_sha256: str = ""
    proves: str = ""
    said: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    cells: tuple[CellRow, ...] = ()
    micro: tuple[MicroRow, ...] = ()
    steps: tuple[StepRow, ...] = ()
    unproven: tuple[str, ...] = ()
    schema: int = SCHEMA

    @property
    def exit_code(self) -> int:
        """0 proven, 1 refuted, 2 no verdict."""
        return EXIT[self.result]


def decide(checks: Sequence[Check]) -> tuple[Result, str]:
    """The result that follows from the checks, and why in one line.

    Only required checks decide. Zero evidence never passes: at least one line that was required
    must have been found.
    """
    required = [check for check in checks if check.severity == "required"]
    counted = [check for check in required if not check.waived]
    failed = [check.id for check in counted if check.outcome == "failed"]
    unchecked = [check.id for check in counted if check.outcome == "unchecked"]
    # A number without proof in its log is no evidence, whoever answers for it.
    unchecked += [x.id for x in required if x.waived and x.group == "transport"]
    met = [check.id for check in counted if check.outcome == "met"]
    seen = any(check.first for check in counted if check.group == "transport")
    if failed:
        return "refuted", f"failed: {_listed(failed)}"
    if unchecked:
        return "no verdict", f"could not check: {_listed(unchecked)}"
    if not seen:
        return "no verdict", "no evidence"
    waived = len(required) - len(counted)
    tail = f", {waived} waived" if waived else ""
    return "proven", f"{len(met)} of {len(required)} required checks met{tail}"


def _listed(ids: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(ids))
