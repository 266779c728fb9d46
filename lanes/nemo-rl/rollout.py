"""A rollout over Megatron Core alone: prompts in, greedy tokens and their log-probabilities out.

    torchrun --nproc-per-node 2 lanes/nemo-rl/rollout.py --arm v2 --out DIR

NeMo RL calls DeepEP nowhere itself: its policy's experts exchange tokens in Megatron's
fused_a2a.py. This is that path with the shape of a rollout and without NeMo RL: the model and its
random weights are the megatron lane's (lanes/megatron/train.py). The reference, over the plain
all-to-all, chooses `--steps` tokens for every prompt; the arm is given the same tokens, so that one
near tie does not make two texts of one. Each token is one forward pass over everything before it.

steps.jsonl is that of a training; there `loss` is the mean negative log-probability of the tokens
chosen in a step, in nats, and step 0 is the warm-up, the first pass, whose token is chosen again.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

# The sibling lane's program; a lane folder is no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))
train: Any = importlib.import_module("train")
torch: Any = train.torch

PROMPTS: Final = 64  # as many as the published driver made up (2026-04-29)


def choose(model: Any, tokens: Any, forced: Any) -> tuple[Any, float]:
    """The next token of every row, [rows], or the forced one, and its mean negative log-prob."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    logits = model(tokens, positions, None)[:, -1].float()
    chosen = logits.argmax(-1) if forced is None else forced
    nll = -torch.log_softmax(logits, -1).gather(-1, chosen[:, None])
    return chosen, float(nll.mean())


def roll(options: argparse.Namespace, place: Any, role: str, dispatcher: str, forced: Any) -> Any:
    """One pass: the chosen tokens, [steps, rows]; each step is a record."""
    model = train.make_model(options, place, dispatcher).eval()
    tokens = train.make_batch(options, place)["input_ids"]
    chosen: list[Any] = []
    for step in range(options.steps + 1):
        train.settle(place)
        begin = time.perf_counter()
        given = None if forced is None else forced[max(step, 1) - 1]
        with torch.no_grad():
            token, nll = choose(model, tokens, given)
        train.settle(place)
        loss, ms = place.sum(nll) / place.world, place.max((time.perf_counter() - begin) * 1e3)
        place.write("step", role=role, dispatcher=dispatcher, step=step, loss=round(loss, 6),
                    ms=round(ms, 3))  # fmt: skip
        if step:
            tokens = torch.cat([tokens, token[:, None]], 1)
            chosen.append(token)
    return torch.stack(chosen)


def measure(options: argparse.Namespace, place: Any) -> None:
    """The reference chooses, the arm follows; the time of the arm includes DeepEP's compiler."""
    forced = roll(options, place, "reference", train.REFERENCE, None)
    train.clear(place)
    with train.counted(place):
        roll(options, place, "arm", options.arm, forced)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line: --sequences prompts of --seq tokens, --steps new ones."""
    parser: argparse.ArgumentParser = train.make_parser(__doc__)
    parser.set_defaults(sequences=PROMPTS, seq=64, steps=8)
    return parser.parse_args(argv)


if __name__ == "__main__":
    train.start(parse_options(), measure)
