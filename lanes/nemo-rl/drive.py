"""The programs of the nemo-rl lane on one host of a fleet: a rollout, or GRPO under NeMo RL.

    python lanes/nemo-rl/drive.py rollout --arm v2 --out DIR --ranks 2
    python lanes/nemo-rl/drive.py grpo --arm v2 --out DIR --hosts 2 --node-rank 0 --ranks 8 \
        --leader ADDRESS --port 6379 --model PATH

`rollout` becomes torchrun over rollout.py. `grpo` starts Ray on this host; the leader waits for
every GPU, runs NeMo RL's own examples/run_grpo.py with the settings below, passes its log on, and
reads the log into DIR/steps.jsonl, the format of the megatron lane: one `step` record a GRPO step,
whose `ms` is NeMo RL's total step time and whose `seconds` are the parts it timed itself. The
workers follow until the leader's Ray is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

FORMAT: Final = 1
STEPS: Final = 3
PROMPTS: Final = 4
GENERATIONS: Final = 8  # a prompt: 32 completions a step, as published
JOIN_S: Final = 600.0
RECIPE: Final = "examples/configs/recipes/llm/grpo-qwen3-30ba3b-8n8g-megatron.yaml"

# What this lane changes of NeMo RL's own recipe for Qwen3-30B-A3B (46be4e8). Expert parallel over
# the whole fleet: with the published TP 4, PP 2, EP 2 an experts' group is 8 ranks of one host, and
# DeepEP crosses no network.
SETTINGS: Final = {
    "grpo.max_num_steps": STEPS,
    "grpo.num_prompts_per_step": PROMPTS,
    "grpo.num_generations_per_prompt": GENERATIONS,
    "policy.train_global_batch_size": PROMPTS * GENERATIONS,
    "policy.max_total_sequence_length": 2048,
    "policy.megatron_cfg.tensor_model_parallel_size": 1,
    "policy.megatron_cfg.pipeline_model_parallel_size": 1,
    "policy.megatron_cfg.sequence_parallel": "false",
    "policy.megatron_cfg.moe_router_dtype": "fp32",
    "checkpointing.enabled": "false",
    "logger.wandb_enabled": "false",
    "logger.tensorboard_enabled": "false",
    "logger.monitor_gpus": "false",
}
# The flex dispatcher rounds a router's FP64 to FP32, so it is FP32 above. It asserts more than one
# rank (megatron-core 0.16.1, token_dispatcher.py:1346), so one GPU has the plain all-to-all alone.
DEEPEP: Final = {
    "policy.megatron_cfg.moe_enable_deepep": "true",
    "policy.megatron_cfg.moe_token_dispatcher_type": "flex",
}

# The made data, for a machine that reaches no hub and a model that writes the made-up words of the
# harness's stand-ins: a prompt asks for a syllable, and NeMo RL's Jaccard environment rewards an
# answer by the share of its words that begin with it. A sampler of random weights hits some, so
# that rewards differ and there is something to learn; mathematics would be 0 for every answer.
MADE: Final = 32
CONSONANTS: Final = "tnshrdlcmwfgypbvkjzq"
VOWELS: Final = "eaoiu"
MADE_SETTINGS: Final = {
    "grpo.val_period": 0,
    "data.train.dataset_name": "ResponseDataset",
    "data.train.split_validation_size": 0,
    "data.default.prompt_file": "null",
    "data.default.env_name": "code_jaccard",
    "++env.code_jaccard.num_workers": 1,
    "++policy.tokenizer.chat_template": "null",
}


class Refused(SystemExit):
    """The run cannot start or came out wrong; the message says what to do."""


@dataclass
class Step:
    """One GRPO step, from NeMo RL's own lines. seconds: the parts it timed; they overlap, as
    `prepare_for_generation/total` holds the other `prepare_for_generation/`."""

    step: int
    loss: float | None = None
    reward: float | None = None
    tokens: float | None = None  # mean generation length
    total_s: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)


# Printed by nemo_rl/algorithms/grpo.py of 46be4e8, lines 1416-1424 and 2112-2149.
HEAD: Final = re.compile(r"=+ Step (\d+)/\d+ =+\s*$")
NUMBER: Final = r"(-?\d+(?:\.\d+)?|nan|-?inf)"
FIGURES: Final = {
    "loss": re.compile(rf"  • Loss: {NUMBER}\s*$"),
    "reward": re.compile(rf"  • Avg Reward: {NUMBER}\s*$"),
    "tokens": re.compile(rf"  • Mean Generation Length: {NUMBER}\s*$"),
    "total_s": re.compile(rf"  • Total step time: {NUMBER}s\s*$"),
}
PART: Final = re.compile(rf"  • ([\w/]+): {NUMBER}s \({NUMBER}%\)\s*$")


def steps(lines: Iterable[str]) -> list[Step]:
    """The steps of a NeMo RL log, in its order; what a cut log lacks is None or absent."""
    found: list[Step] = []
    for line in lines:
        head = HEAD.match(line)
        if head:
            found.append(Step(int(head[1])))
        elif found and line.startswith("  • "):
            _figure(found[-1], line)
    return found


def _figure(step: Step, line: str) -> None:
    part = PART.match(line)
    if part and step.total_s is not None:
        step.seconds[part[1]] = float(part[2])
    for name, pattern in FIGURES.items():
        figure = pattern.match(line)
        if figure:
            setattr(step, name, float(figure[1]))


def completions(folder: Path, step: int) -> int | None:
    """How many completions NeMo RL logged for a step: one line each; None where it logged none."""
    logged = sorted(folder.glob(f"**/train_data_step{step}.jsonl"))
    if not logged:
        return None
    with logged[-1].open("rb") as lines:
        return sum(1 for _ in lines)


def records(found: Iterable[Step], arm: str, logged: Path | None) -> Iterator[dict[str, object]]:
    """The records of the steps. A figure that is no number stands as null: JSON has no nan. logged:
    where NeMo RL logged completions, if it is there still."""
    for step in found:
        yield {
            "v": FORMAT, "kind": "step", "role": "arm", "dispatcher": arm, "step": step.step,
            "loss": _finite(step.loss), "reward": _finite(step.reward),
            "tokens": _finite(step.tokens),
            "completions": completions(logged, step.step) if logged else None,
            "ms": None if step.total_s is None else round(step.total_s * 1e3, 3),
            "seconds": step.seconds,
        }  # fmt: skip


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def made(path: Path) -> dict[str, Any]:
    """Write the made data, and say how NeMo RL reads it."""
    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    lines = [
        {"input": f"words of {first}:", "output": " ".join(first + second for second in syllables)}
        for first in syllables[:MADE]
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return {**MADE_SETTINGS, "++data.train.data_path": path}


def command(options: argparse.Namespace, logs: Path) -> list[str]:
    """NeMo RL's own program with this lane's settings, then what the command line adds."""
    settings: dict[str, Any] = {
        **SETTINGS,
        **(DEEPEP if options.arm != "alltoall" else {}),
        **(made(logs / "made.jsonl") if options.data == "made" else {}),
        "policy.model_name": options.model,
        "policy.megatron_cfg.expert_model_parallel_size": options.hosts * options.ranks,
        "cluster.num_nodes": options.hosts,
        "cluster.gpus_per_node": options.ranks,
        "logger.log_dir": logs,
    }
    checkout = Path(options.checkout)
    program = [sys.executable, str(checkout / "examples" / "run_grpo.py")]
    recipe = ["--config", str(checkout / RECIPE)]
    return [*program, *recipe, *(f"{k}={v}" for k, v in settings.items()), *options.overrides]


def ray(*words: str) -> list[str]:
    """A call of Ray's own command line, in this interpreter."""
    return [sys.executable, "-m", "ray.scripts.scripts", *words]


@contextmanager
def cluster(options: argparse.Namespace) -> Iterator[None]:
    """Ray's head on this host, and every GPU of the fleet with it.

    Raises:
        Refused: a worker did not join in time.
    """
    words = ("--node-ip-address", options.leader, "--port", str(options.port))
    subprocess.run(
        ray(
            "start",
            "--head",
            "--include-dashboard=false",
            "--disable-usage-stats",
            *words,
            "--num-gpus",
            str(options.ranks),
        ),
        check=True,
    )
    try:
        _await_gpus(options.hosts * options.ranks, f"{options.leader}:{options.port}")
        yield
    finally:
        subprocess.run(ray("stop"), check=False)


def _await_gpus(wanted: int, address: str) -> None:
    ask = (
        f"import ray; ray.init({address!r}, log_to_driver=False);"
        "print(int(ray.cluster_resources().get('GPU', 0)))"
    )
    deadline = time.monotonic() + JOIN_S
    while True:
        told = subprocess.run(
            [sys.executable, "-c", ask], capture_output=True, text=True, check=False
        )
        if told.stdout.split()[-1:] == [str(wanted)]:
            return
        if time.monotonic() > deadline:
            raise Refused(
                f"nemo-rl: not {wanted} GPUs in Ray at {address} within {JOIN_S:.0f} s; it told "
                f"{told.stdout.strip() or told.stderr[-300:]!r}. Check that the hosts reach it."
            )
        time.sleep(5)


def follow(options: argparse.Namespace) -> None:
    """Join the leader's Ray, and stay until it is gone."""
    words = ("--address", f"{options.leader}:{options.port}", "--num-gpus", str(options.ranks))
    deadline = time.monotonic() + JOIN_S
    while subprocess.run(ray("start", "--disable-usage-stats", *words), check=False).returncode:
        if time.monotonic() > deadline:
            raise Refused(f"nemo-rl: no Ray at {options.leader}:{options.port}")
        time.sleep(5)
    ask = ray("health-check", "--address", f"{options.leader}:{options.port}")
    while subprocess.run(ask, capture_output=True, check=False).returncode == 0:
        time.sleep(5)
    subprocess.run(ray("stop"), check=False)


def grpo(options: argparse.Namespace) -> None:
    """Lead: run NeMo RL to its end, and leave its steps as records.

    Raises:
        Refused: NeMo RL did not end well; what it came to is recorded all the same.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="nemo-rl-") as logs, cluster(options):
        run = command(options, Path(logs))
        lines: list[str] = []
        with subprocess.Popen(
            run, cwd=options.checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", env=worker_environment(os.environ, Path(logs)),
        ) as process:  # fmt: skip
            for line in process.stdout or ():
                sys.stdout.write(line)
                sys.stdout.flush()
                lines.append(line)
        write(options, steps(lines), Path(logs), whole=process.returncode == 0, started=started)
    if process.returncode:
        raise Refused(f"nemo-rl: run_grpo.py ended with {process.returncode}; read its log above")


def worker_environment(env: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Ray shows one line for equal ones of many workers, so that fifteen ranks would be missing;
    NeMo RL's workers would make environments of their own, without our hook and DeepEP; rank 0
    converts the model once, to where every host of a fleet must see it; and vLLM compiles its
    model, which a rollout's program has no use for."""
    given = {"NRL_MEGATRON_CHECKPOINT_DIR": str(scratch / "converted"), **env}
    given.pop("TORCHDYNAMO_DISABLE", None)
    return {**given, "RAY_DEDUP_LOGS": "0", "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1"}


def settings(options: argparse.Namespace) -> dict[str, object]:
    """What the records say of the run."""
    return {"steps": STEPS, "completions": PROMPTS * GENERATIONS, "command": options.overrides}


def write(
    options: argparse.Namespace, found: Sequence[Step], logs: Path, *, whole: bool, started: float
) -> None:
    """Leave steps.jsonl; its last record says that NeMo RL ended well. started: since the epoch."""
    lines: list[dict[str, object]] = [
        {
            "v": FORMAT,
            "kind": "run",
            "world": options.hosts * options.ranks,
            "settings": settings(options),
            "started": started,
        },
        *records(found, options.arm, logs),
    ]
    lines += [{"v": FORMAT, "kind": "done", "ended": time.time()}] if whole else []
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (options.out / "steps.jsonl").write_text(text, encoding="utf-8")


def rollout(options: argparse.Namespace) -> None:
    """Become torchrun over rollout.py."""
    words = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(options.hosts), "--node-rank", str(options.node_rank)),
        *("--nproc-per-node", str(options.ranks)),
        *("--master-addr", options.leader, "--master-port", str(options.port)),
        *(str(Path(__file__).with_name("rollout.py")), "--arm", options.arm),
        *("--out", str(options.out), *options.overrides),
    ]
    os.execv(sys.executable, words)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line. What it does not know goes to the program: settings of NeMo RL, or options of
    rollout.py."""
    about = __doc__.splitlines()[0] if __doc__ else None
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    add = parser.add_argument
    add("program", choices=("rollout", "grpo"))
    add("--arm", choices=("alltoall", "v1", "v2"), required=True)
    add("--out", type=Path, required=True, help="folder that gets steps.jsonl")
    add("--hosts", type=int, default=1)
    add("--node-rank", type=int, default=0)
    add("--ranks", type=int, required=True, help="of this host, one a GPU")
    add("--leader", default="127.0.0.1")
    add("--port", type=int, default=6379)
    add("--model", default="", help="grpo: a hub id or a folder")
    add(
        "--data",
        choices=("recipe", "made"),
        default="recipe",
        help="grpo: the recipe's, or made up",
    )
    add("--checkout", default="/opt/nemo-rl", help="grpo: NeMo RL's repository, with examples/")
    options, overrides = parser.parse_known_args(argv)
    options.overrides = overrides
    return options


def main() -> None:
    """Run this host's part."""
    options = parse_options()
    if options.program == "rollout":
        rollout(options)
    elif options.node_rank:
        follow(options)
    else:
        grpo(options)


if __name__ == "__main__":
    main()
