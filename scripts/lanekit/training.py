"""What a training lane's program leaves: its steps read, judged, and laid beside the reference."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lanekit import reading
from lanekit.errors import Unreadable
from lanekit.verdict import Check, Outcome, Place, StepRow

FORMAT: Final = 1  # of steps.jsonl
NAME: Final = "steps.jsonl"
ENGINES: Final = ("megatron-core",)
ROLES: Final = ("reference", "arm")
# Equal to three decimals, as the published campaign said of V1 and V2 (2026-07). The gradients of
# two exchanges are added in another order, so their norm is compared relatively.
LOSS_TOLERANCE: Final = 0.001
NORM_TOLERANCE: Final = 0.01


class Record(msgspec.Struct, frozen=True):
    """One line of steps.jsonl. kind: run, step, memory, bytes or done. loss in nats, ms of the
    slowest rank, tx_bytes: what the NICs of all hosts sent during the arm's steps."""

    v: int
    kind: str
    role: str = ""
    dispatcher: str = ""
    step: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    ms: float | None = None
    tx_bytes: int | None = None
    world: int | None = None
    settings: dict[str, Any] = {}


def read(path: Path) -> list[Record]:
    """The records of a cell.

    Raises:
        Unreadable: a line is no record of this format, or the file cannot be read.
    """
    lines = reading.small(path).splitlines()
    return [_record(f"{path}:{number}", line) for number, line in enumerate(lines, 1)]


def _record(where: str, line: bytes) -> Record:
    found = reading.decoded(line, Record, where)
    if found.v != FORMAT:
        raise Unreadable(
            f"{where}: format {found.v}, this harness reads {FORMAT}",
            remedy="Use the harness the drop was made with; its git commit is in the manifest.",
        )
    return found


def judge(
    cells: Mapping[str, tuple[str, Sequence[Record]]], ranks: int, *, arm: str, nics: int
) -> list[Check]:
    """The checks of every cell (name -> its file in the drop and its records): it ran to its end
    on every rank, over the arm's dispatcher, its loss fell, it agrees with the reference, and the
    NICs carried it where there are any."""
    checks = []
    for name, (file, records) in cells.items():
        asked = (
            _complete(records, ranks, arm), _learns(records), _parity(records),
            _traffic(records, nics),
        )  # fmt: skip
        place = Place(file, len(records))
        checks += [_check(name, place, *answer) for answer in asked]
    return checks


Answer = tuple[str, Outcome, str, str, str, str]  # id, outcome, why, expected, actual, remedy


def _check(cell: str, place: Place, *answer: str) -> Check:
    key, outcome, why, expected, actual, remedy = answer
    return Check(
        id=f"{cell}-{key}",
        group="load",
        severity="noted" if key == "traffic" and outcome == "unchecked" else "required",
        outcome=msgspec.convert(outcome, Outcome),
        why=why,
        expected=expected,
        actual=actual,
        first=place,
        last=place,
        remedy="" if outcome == "met" else remedy,
    )


def _steps(records: Iterable[Record], role: str) -> list[Record]:
    return [record for record in records if record.kind == "step" and record.role == role]


def _complete(records: Sequence[Record], ranks: int, arm: str) -> Answer:
    kinds = [record.kind for record in records]
    ends = kinds[:1] == ["run"] and kinds[-1:] == ["done"]
    once = kinds.count("run") == kinds.count("done") == 1
    planned = records[0].settings.get("steps") if records else None
    want = [*range(planned + 1)] if isinstance(planned, int) and planned > 0 else None
    seen = {role: [record.step for record in _steps(records, role)] for role in ROLES}
    over = {record.dispatcher for record in _steps(records, "arm")}
    worlds = {record.world for record in records if record.kind == "run"}
    whole = ends and once and worlds == {ranks} and over == {arm}
    whole = whole and all(steps == want for steps in seen.values())
    told = ", ".join(f"{role} steps {steps}" for role, steps in seen.items())
    return (
        "complete",
        "met" if whole else "failed" if records else "unchecked",
        "the warm-up and every step ran on every rank, over the reference and over the arm",
        f"world {ranks}, dispatcher {arm}, steps {want}",
        f"world {_listed(worlds)}, dispatcher {_listed(over)}, {told}",
        "Read the cell's log; run the lane again.",
    )


def _listed(found: Iterable[object]) -> str:
    return ", ".join(sorted(str(each)[:40] for each in found)) or "unknown"


def _sane(record: Record) -> bool:
    figures = (record.loss, record.grad_norm, record.ms)
    return all(each is not None and math.isfinite(each) and each > 0 for each in figures)


def _learns(records: Sequence[Record]) -> Answer:
    """A wrong exchange can be equal on both sides and still train nothing."""
    steps = _steps(records, "arm")
    losses = [record.loss for record in steps[1:] if record.loss is not None]
    sane = all(map(_sane, steps)) and len(losses) == len(steps) - 1
    fell = sane and len(losses) > 1 and losses == sorted(losses, reverse=True)
    fell = fell and losses[0] > losses[-1]
    return (
        "learns",
        "met" if fell else "failed" if steps else "unchecked",
        "loss, grad-norm and time are numbers above 0, and the loss falls with every step",
        "a falling loss",
        " -> ".join(f"{loss:.3f}" for loss in losses) if losses else "no steps",
        "Do not use these figures; read the cell's log.",
    )


def _parity(records: Sequence[Record]) -> Answer:
    pairs = list(zip(_steps(records, "reference"), _steps(records, "arm"), strict=False))
    known = [pair for pair in pairs if all(map(_sane, pair))]
    loss = max((abs(_of(a.loss) - _of(b.loss)) for a, b in known), default=math.inf)
    norm = max((abs(_of(a.grad_norm) / _of(b.grad_norm) - 1) for a, b in known), default=math.inf)
    equal = len(known) == len(pairs) and loss < LOSS_TOLERANCE and norm < NORM_TOLERANCE
    return (
        "parity",
        "met" if equal else "failed" if pairs else "unchecked",
        "the arm trains as the plain all-to-all does, from the same weights and tokens",
        f"losses equal to three decimals, grad-norms within {NORM_TOLERANCE:.0%}",
        f"loss differs by {loss:.6f}, grad-norm by {norm:.3%} at most"
        if known
        else "nothing to compare",
        "The arm's exchange is wrong, or its tokens were cut: file the shape upstream.",
    )


def _of(value: float | None) -> float:
    return math.nan if value is None else value


def _traffic(records: Sequence[Record], nics: int) -> Answer:
    sent = [record.tx_bytes for record in records if record.kind == "bytes"]
    count = sent[0] if len(sent) == 1 else None
    outcome: Outcome = "unchecked" if not nics else "met" if count else "failed"
    return (
        "traffic",
        outcome,
        "the NICs sent bytes during the arm's steps",
        "more than 0 bytes" if nics else "nothing: the fleet has no NIC",
        "no counter" if count is None else f"{count / 1e9:.3f} GB",
        "Read hw_counters/tx_bytes below /sys/class/infiniband on each host.",
    )


def rows(cell: str, records: Iterable[Record]) -> list[StepRow]:
    """One row a step of each role, the warm-up as step 0."""
    return [
        StepRow(
            cell=cell,
            role=record.role,
            dispatcher=record.dispatcher,
            step=record.step,
            loss=record.loss,
            grad_norm=record.grad_norm,
            ms=record.ms,
        )
        for record in records
        if record.kind == "step" and record.step is not None
    ]
