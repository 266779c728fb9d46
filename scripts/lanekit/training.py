"""What a training lane's program leaves: its steps read, judged, and laid beside the reference."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from lanekit import batch, reading
from lanekit.batch import Taken
from lanekit.verdict import Check, Outcome, Place, StepRow

SHOWN: Final = 40  # characters of a number that is not the harness's own
FORMAT: Final = 1  # of steps.jsonl
NAME: Final = "steps.jsonl"
ENGINES: Final = ("megatron-core", "nemo-rl")
KINDS: Final = {"run", "step", "memory", "bytes", "done"}
ROLES: Final = ("reference", "arm")
REFERENCE: Final = "alltoall"  # the plain dispatcher
# Equal to three decimals, as the published campaign said of V1 and V2 (2026-07). The gradients of
# two exchanges are added in another order, so their norm is compared relatively.
LOSS_TOLERANCE: Final = 0.001
NORM_TOLERANCE: Final = 0.01
# A step of a rollout is a mean over 64 tokens where one of a training is over thousands.
ROLLOUT_TOLERANCE: Final = 0.01
# Parts of a GRPO step as NeMo RL names them (grpo.py of 46be4e8): generation, training, and the
# weights' way back into the generation engine. The others lie between them.
PARTS: Final = ("generation", "policy_training", "prepare_for_generation/total")


class Record(msgspec.Struct, frozen=True):
    """One line of steps.jsonl. kind: run, step, memory, bytes or done. loss in nats, ms of the
    slowest rank, tx_bytes: what the NICs of all hosts sent during the arm's steps. seconds: named
    parts of a step, completions: of a GRPO step, tokens: their mean length. started, ended: seconds
    since the epoch."""

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
    completions: int | None = None
    reward: float | None = None
    tokens: float | None = None
    seconds: dict[str, float] = {}
    settings: dict[str, Any] = {}
    started: float | None = None
    ended: float | None = None


def read(path: Path) -> list[Record]:
    """The records of a cell. Raises Unreadable: a line is no record of this format, or the file
    cannot be read."""
    return reading.lines(path, Record, FORMAT)


class Asked(msgspec.Struct, frozen=True):
    """What the rules look at: the records of a cell, and what the row says they are of."""

    records: Sequence[Record]
    ranks: int
    dispatcher: str
    nics: int


def judge(
    cells: Mapping[str, tuple[str, Taken]],
    ranks: int,
    *,
    arm: str,
    nics: int,
    engine: str = "megatron-core",
) -> list[Check]:
    """The checks of every cell (name -> its file in the drop, and how it was taken).

    Engine and cell say what was run: what they do not know is a training. An arm's name begins with
    its dispatcher's.
    """
    checks = []
    for name, (file, taken) in cells.items():
        asked = Asked(taken.records, ranks, arm.partition("-")[0], nics)
        place = Place(file, len(taken.records))
        checks += [_check(name, place, rule(asked)) for rule in RULES.get((engine, name), TRAINING)]
        checks += _beside(name, place, taken) if engine == "megatron-core" else []
        checks += [_figures(name, place, taken)] if (engine, name) == ("nemo-rl", "grpo") else []
    return [*checks, batch.clocks({name: taken for name, (_, taken) in cells.items()})]


def _beside(name: str, place: Place, taken: Taken) -> list[Check]:
    """The records of train.py beside the planned command and the log."""
    found = batch.options(taken)
    planned = batch.check(
        f"{name}-planned",
        place,
        "it trained as planned",
        good="unchecked" if found is None or not taken.records else "met",
        wrong=found[2] if found else (),
        seen=_seen(taken),
    )
    told = batch.said(
        taken, _table(taken.records), lambda line: line[0] in ROLES and line[-1] == "ms"
    )
    return [planned, _printed(name, place, taken, told if taken.records else ("unchecked", []))]


def _figures(name: str, place: Place, taken: Taken) -> Check:
    """All records but the count of completions beside what the lane's own program makes of the
    planned command and of the log: a step left out, made up or moved is another record."""
    planned = batch.asking(taken)
    if planned is None or not taken.records:
        return _printed(name, place, taken, ("unchecked", []))
    program, asked = planned
    made = program.records(program.steps(taken.told), asked.arm, None)
    want = [program.settings(asked), *(msgspec.convert(each, Record) for each in made)]
    steps = [r for r in taken.records if r.kind not in {"run", "done"}]
    got = [taken.records[0].settings]
    got += [msgspec.structs.replace(each, completions=None) for each in steps]
    pairs = itertools.zip_longest(got, want)
    wrong = [f"recorded {x!s:.200}, planned or told {y!s:.200}" for x, y in pairs if x != y]
    return _printed(name, place, taken, ("met", wrong))


def _printed(name: str, place: Place, taken: Taken, said: tuple[Outcome, list[str]]) -> Check:
    why = "its log shows the same figures"
    good, wrong = said
    return batch.check(f"{name}-printed", place, why, good=good, wrong=wrong, seen=_seen(taken))


def _seen(taken: Taken) -> str:
    return f"{len(_steps(taken.records, 'arm'))} steps of the arm"


def _table(records: Iterable[Record]) -> Iterator[list[str]]:
    """The lines that train.py prints as it goes, as words."""
    for r in rows("", records):
        figures = [_of(x) for x in (r.loss, r.grad_norm, r.ms)]
        yield [r.role, r.dispatcher, "step", str(r.step), "loss", f"{figures[0]:.4f}",
               "grad-norm", f"{figures[1]:.4f}", f"{figures[2]:.1f}", "ms"]  # fmt: skip


Answer = tuple[str, Outcome, str, str, str, str]  # id, outcome, why, expected, actual, remedy


def _check(cell: str, place: Place, answer: Answer) -> Check:
    key, outcome, why, expected, actual, remedy = answer
    return Check(
        id=f"{cell}-{key}",
        group="load",
        severity="noted" if key == "traffic" and outcome == "unchecked" else "required",
        outcome=outcome,
        why=why,
        expected=expected,
        actual=actual,
        first=place,
        last=place,
        remedy="" if outcome == "met" else remedy,
    )


def _steps(records: Iterable[Record], role: str) -> list[Record]:
    return [record for record in records if record.kind == "step" and record.role == role]


def _complete(asked: Asked) -> Answer:
    return _whole(asked, {role: 0 for role in ROLES})


def _whole(asked: Asked, first: Mapping[str, int]) -> Answer:
    """first: role -> the number of its first step."""
    records, kinds = asked.records, [record.kind for record in asked.records]
    ends = kinds[:1] == ["run"] and kinds[-1:] == ["done"] and {*kinds} <= KINDS
    once = kinds.count("run") == kinds.count("done") == 1
    planned = records[0].settings.get("steps") if records else None
    # A forged number of steps that nobody recorded is not counted up to.
    last = planned if isinstance(planned, int) and 0 < planned <= len(records) else None
    want = {role: last and [*range(n, last + 1)] for role, n in first.items()}
    seen = {role: [record.step for record in _steps(records, role)] for role in first}
    over = {record.dispatcher for record in _steps(records, "arm")}
    worlds = {record.world for record in records if record.kind == "run"}
    whole = ends and once and worlds == {asked.ranks} and over == {asked.dispatcher}
    roles = [record.role for record in records if record.kind == "step"]
    plain = {record.dispatcher for record in _steps(records, "reference")}
    whole = whole and roles == sorted(roles, reverse=True) and plain <= {REFERENCE}
    shown = want.get("arm") or str(planned)[:SHOWN]
    told = ", ".join(f"{role} steps {steps}" for role, steps in seen.items())
    return (
        "complete",
        "met" if whole and seen == want else "failed" if records else "unchecked",
        "every step ran on every rank, over the arm and over its reference where it has one",
        f"world {asked.ranks}, dispatcher {asked.dispatcher}, steps {shown}",
        f"world {_listed(worlds)}, dispatcher {_listed(over)}, {told}",
        "Read the cell's log; run the lane again.",
    )


def _listed(found: Iterable[object]) -> str:
    return ", ".join(sorted(str(each)[:40] for each in found)) or "unknown"


def _sane(record: Record) -> bool:
    return _positive(record.loss, record.grad_norm, record.ms)


def _positive(*figures: float | None) -> bool:
    return all(each is not None and math.isfinite(each) and each > 0 for each in figures)


def _learns(asked: Asked) -> Answer:
    """A wrong exchange can be equal on both sides and still train nothing."""
    steps = _steps(asked.records, "arm")
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


def _parity(asked: Asked) -> Answer:
    pairs = _pairs(asked)
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


def _pairs(asked: Asked) -> list[tuple[Record, Record]]:
    roles = (_steps(asked.records, role) for role in ROLES)
    return list(zip(*roles, strict=False))


def _agrees(asked: Asked) -> Answer:
    """The arm of a rollout is given the reference's tokens: only their probabilities can differ."""
    pairs = _pairs(asked)
    known = [(a, b) for a, b in pairs if _positive(a.loss, b.loss, b.ms)]
    gap = max((abs(_of(a.loss) - _of(b.loss)) for a, b in known), default=math.inf)
    equal = len(known) == len(pairs) and gap < ROLLOUT_TOLERANCE
    return (
        "parity",
        "met" if equal else "failed" if pairs else "unchecked",
        "the arm gives the same tokens the same log-probabilities as the plain all-to-all does",
        f"means within {ROLLOUT_TOLERANCE} nats at every step",
        f"they differ by {gap:.6f} at most" if known else "nothing to compare",
        "The arm's exchange is wrong, or its tokens were cut: file the shape upstream.",
    )


def _rolled(asked: Asked) -> Answer:
    """Real completions, as many as were asked for, and a loss that is a number."""
    steps = _steps(asked.records, "arm")
    want = asked.records[0].settings.get("completions") if asked.records else None
    known = isinstance(want, int) and want > 0
    real = [each.completions == want and _positive(each.tokens, each.ms) for each in steps]
    finite = [each.loss is not None and math.isfinite(each.loss) for each in steps]
    met = known and all(real) and all(finite)
    return (
        "rollouts",
        "met" if met and steps else "failed" if steps else "unchecked",
        "NeMo RL logged every completion of every step, and its loss is a number",
        f"{want} completions a step",
        ", ".join(f"{each.completions} of {_of(each.tokens):.0f} tokens" for each in steps)
        or "no steps",
        "Read the log from the step's head on; the sampler may have failed.",
    )


def _split(asked: Asked) -> Answer:
    """The parts lie inside the step: more than its whole would be of another step."""
    steps = _steps(asked.records, "arm")
    shares = [_shares(each) for each in steps]
    sound = [len(each) == len(PARTS) and sum(each.values()) <= 1.001 for each in shares]
    last = shares[-1] if shares else {}
    return (
        "split",
        "met" if steps and all(sound) else "failed" if steps else "unchecked",
        "NeMo RL timed generation, training and refit of every step, inside its total",
        f"{', '.join(PARTS)}, together no more than the step",
        ", ".join(f"{name} {share:.0%}" for name, share in last.items()) or "no parts",
        "NeMo RL's timing lines have changed: compare grpo.py with lanes/nemo-rl/drive.py.",
    )


def _shares(step: Record) -> dict[str, float]:
    if step.ms is None or not _positive(step.ms):
        return {}
    held = {name: step.seconds[name] for name in PARTS if name in step.seconds}
    return {name: s * 1e3 / step.ms for name, s in held.items() if math.isfinite(s) and s >= 0}


def _of(value: float | None) -> float:
    return math.nan if value is None else value


def _traffic(asked: Asked) -> Answer:
    nics = asked.nics
    sent = [record.tx_bytes for record in asked.records if record.kind == "bytes"]
    count = sent[0] if len(sent) == 1 else None
    outcome: Outcome = "unchecked" if not nics else "met" if count else "failed"
    return (
        "traffic",
        outcome,
        "the NICs sent bytes during the arm's steps",
        "more than 0 bytes" if nics else "nothing: the fleet has no NIC",
        "no NIC to ask" if not nics else "no counter" if count is None else f"{count / 1e9:.3f} GB",
        "Read hw_counters/tx_bytes below /sys/class/infiniband on each host.",
    )


TRAINING: Final[tuple[Callable[[Asked], Answer], ...]] = (_complete, _learns, _parity, _traffic)
RULES: Final[Mapping[tuple[str, str], tuple[Callable[[Asked], Answer], ...]]] = {
    ("nemo-rl", "rollout"): (_complete, _agrees, _traffic),
    ("nemo-rl", "grpo"): (partial(_whole, first={"arm": 1}), _rolled, _split),
}


def rows(cell: str, records: Iterable[Record]) -> list[StepRow]:
    """One row a step of each role, the warm-up as step 0."""
    records = list(records)
    sent = next((record.tx_bytes for record in records if record.kind == "bytes"), None)
    found = [
        StepRow(
            cell=cell,
            role=record.role,
            dispatcher=record.dispatcher,
            step=record.step,
            loss=record.loss,
            grad_norm=record.grad_norm,
            ms=record.ms,
            seconds=record.seconds,
        )
        for record in records
        if record.kind == "step" and record.step is not None
    ]
    return [*found[:-1], *(msgspec.structs.replace(last, sent=sent) for last in found[-1:])]
