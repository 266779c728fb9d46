"""The nemo-rl lane: NeMo RL's log read, its commands made, its drops judged.

LOG has the lines that nemo_rl/algorithms/grpo.py of 46be4e8 prints (1416-1424, 2112-2149); the
parser was also run over what that code itself printed (2026-11-30); results/ holds a run's log.
"""

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lanekit import batch, compare, paths, programs, published, training
from lanekit.batch import Taken
from lanekit.load import Run, window
from lanekit.verdict import Verdict

BEGIN = """\
▶ Worker Initialization Timing:
  • vllm: 9.00s (1.0%)
========================= Epoch 1/1 =========================
"""
LOG = """\

========================= Step {step}/3 =========================
▶ Preparing batch...
(MegatronPolicyWorker pid=9) [lane-evidence] v=1 host=a pid=9 rank=0 local_rank=0 world=16

📊 Training Results:
  • Loss: {loss}
  • Generation KL Error: 0.0004
  • Avg Reward: 0.3750
  • Mean Generation Length: 927.0312

⏱️  Timing:
  • Total step time: 85.00s
  • generation: 52.70s (62.0%)
  • policy_and_reference_logprobs: 9.10s (10.7%)
  • policy_training: 6.80s (8.0%)
  • prepare_for_generation/total: 3.60s (4.2%)
  • prepare_for_generation/transfer_and_update_weights: 3.40s (4.0%)
  • Average Token Imbalance: 3.20%
"""


@pytest.fixture(scope="module")
def drive() -> ModuleType:
    module: ModuleType = programs.load("drive", paths.LANES / "nemo-rl" / "drive.py")
    return module


def log(*losses: str) -> list[str]:
    text = "".join(LOG.format(step=n, loss=loss) for n, loss in enumerate(losses, 1))
    return (BEGIN + text).splitlines(keepends=True)


def test_every_figure_of_a_step_is_read(drive: ModuleType) -> None:
    first, second = drive.steps(log("0.0123", "-0.0456"))
    assert (first.step, second.step) == (1, 2)
    assert (first.loss, second.loss) == (0.0123, -0.0456)
    assert (first.reward, first.tokens, first.total_s) == (0.375, 927.0312, 85.0)
    assert first.seconds == {
        "generation": 52.7,
        "policy_and_reference_logprobs": 9.1,
        "policy_training": 6.8,
        "prepare_for_generation/total": 3.6,
        "prepare_for_generation/transfer_and_update_weights": 3.4,
    }


def test_a_cut_log_gives_what_it_holds(drive: ModuleType) -> None:
    cut = log("0.1", "0.2")
    cut = cut[: cut.index("  • Total step time: 85.00s\n")] + cut[-3:]
    (step,) = drive.steps(cut)
    assert step.total_s is None
    assert step.seconds == {}
    assert drive.steps([]) == []


def test_a_loss_that_is_no_number_is_null(drive: ModuleType, tmp_path: Path) -> None:
    (record,) = drive.records(drive.steps(log("nan")), "v1", tmp_path)
    assert json.loads(json.dumps(record))["loss"] is None


def test_completions_are_counted_where_nemo_rl_logged_them(
    drive: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "exp_001").mkdir()
    (tmp_path / "exp_001" / "train_data_step1.jsonl").write_text("{}\n" * 32)
    assert drive.completions(tmp_path, 1) == 32
    assert drive.completions(tmp_path, 2) is None


def options(drive: ModuleType, *more: str) -> Any:
    words = ("grpo", "--arm=v2", "--out=x", "--hosts=2", "--ranks=8", "--model=M")
    return drive.parse_options([*words, *more])


def test_the_command_spans_the_fleet_and_takes_more_settings(drive: ModuleType) -> None:
    command = drive.command(options(drive, "--checkout=/c", "grpo.seed=7"), Path("logs"))
    assert command[1] == "/c/examples/run_grpo.py"
    for setting in (
        "cluster.num_nodes=2",
        "cluster.gpus_per_node=8",
        "policy.megatron_cfg.expert_model_parallel_size=16",
        "policy.megatron_cfg.moe_enable_deepep=true",
        "policy.model_name=M",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=8",
        "grpo.max_num_steps=3",
    ):
        assert setting in command
    assert command[-1] == "grpo.seed=7"


def test_one_gpu_trains_on_made_data_without_deepep(drive: ModuleType, tmp_path: Path) -> None:
    chosen = options(drive, "--data=made", "policy.max_total_sequence_length=256")
    chosen.arm, chosen.hosts, chosen.ranks = "alltoall", 1, 1
    command = drive.command(chosen, tmp_path)
    assert "policy.megatron_cfg.expert_model_parallel_size=1" in command
    assert not [word for word in command if "deepep" in word or "flex" in word]
    assert command[-1] == "policy.max_total_sequence_length=256"
    (path,) = [word.partition("=")[2] for word in command if "data_path" in word]
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert len(rows) == 32
    assert all(word.startswith("te") for word in rows[0]["output"].split())
    assert len({row["input"] for row in rows}) == 32


def test_a_fleet_takes_the_data_of_the_recipe(drive: ModuleType, tmp_path: Path) -> None:
    assert not [x for x in drive.command(options(drive), tmp_path) if x.startswith("data.")]
    assert not list(tmp_path.iterdir())


def test_no_rank_s_evidence_is_folded_away(drive: ModuleType) -> None:
    env = {"A": "1", "TORCHDYNAMO_DISABLE": "1"}
    assert drive.worker_environment(env, Path("/s")) == {
        "A": "1",
        "NRL_MEGATRON_CHECKPOINT_DIR": "/s/converted",
        "RAY_DEDUP_LOGS": "0",
        "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
    }
    shared = {"NRL_MEGATRON_CHECKPOINT_DIR": "/fleet"}
    assert drive.worker_environment(shared, Path("/s"))["NRL_MEGATRON_CHECKPOINT_DIR"] == "/fleet"


# --- judged


Edit = Callable[[list[dict[str, Any]]], object]


@pytest.fixture
def grpo(drive: ModuleType, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Outcomes by rule of a whole run's records, after an edit."""

    def outcomes(
        edit: Edit = list, arm: str = "v2-grpo", change: Callable[[list[str]], list[str]] = list
    ) -> dict[str, str]:
        logged = tmp_path / "logged"
        logged.mkdir()
        for step in (1, 2, 3):
            (logged / f"train_data_step{step}.jsonl").write_text("{}\n" * 32)
        chosen = options(drive)
        chosen.out = tmp_path
        begun = time.time()
        told = log("0.1000", "-0.2000", "0.3000")
        drive.write(chosen, drive.steps(told), logged, whole=True, started=begun)
        path = tmp_path / training.NAME
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        edit(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        run = Run(window(begun - 60, begun + 60), {"cell grpo": 12.0})
        shown = batch.told(io.BytesIO("".join(change(told)).encode()))
        words = ("python", "drive.py", "grpo", "--arm=v2", "--out=x", "--hosts=2", "--ranks=8")
        taken = Taken(training.read(path), words, run=run, told=shown)
        cells = {"grpo": (training.NAME, taken)}
        checks = training.judge(cells, 16, arm=arm, nics=16, engine="nemo-rl")
        return {x.id.removeprefix("grpo-"): x.outcome for x in checks}

    return outcomes


def step(number: int, **fields: object) -> Edit:
    return lambda lines: lines[number].update(fields)


def test_a_whole_run_meets_every_rule(grpo: Callable[..., dict[str, str]]) -> None:
    assert grpo() == dict.fromkeys(("complete", "rollouts", "split", "printed", "same-run"), "met")


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (lambda lines: lines.pop(), "complete"),
        (lambda lines: lines.remove(lines[2]), "complete"),
        (step(0, world=8), "complete"),
        (step(2, dispatcher="v1"), "complete"),
        (step(2, completions=31), "rollouts"),
        (step(2, completions=None), "rollouts"),
        (step(2, loss=None), "rollouts"),
        (step(2, tokens=0.0), "rollouts"),
        (step(2, seconds={}), "split"),
        (step(2, ms=None), "split"),
        (step(2, ms=60_000.0), "split"),
        (step(2, seconds={"generation": 1.0, "policy_training": 1.0}), "split"),
        (step(2, loss=-0.25), "printed"),
        (step(2, reward=0.5), "printed"),
        (step(2, tokens=900.0), "printed"),
        (step(2, ms=84_000.0), "printed"),
        (step(2, grad_norm=1.0), "printed"),
        (lambda lines: lines[1]["seconds"].update(generation=0.01), "printed"),
        (lambda lines: lines.insert(4, {**lines[3], "step": 4}), "printed"),
        (lambda lines: lines.insert(1, {**lines[1], "role": "reference"}), "printed"),
        (lambda lines: lines.insert(4, {"v": 1, "kind": "bytes", "tx_bytes": 9}), "printed"),
        (lambda lines: lines[0]["settings"].update(completions=9, steps=4), "printed"),
        (lambda lines: lines[0]["settings"].update(command=["grpo.seed=7"]), "printed"),
        (lambda lines: [each.update(loss=0.3) for each in lines[1:4]], "printed"),
    ],
)
def test_a_broken_run_fails_its_rule(
    grpo: Callable[..., dict[str, str]], edit: Edit, rule: str
) -> None:
    assert grpo(edit)[rule] == "failed"


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told[: len(told) * 2 // 3],
        lambda told: [line.replace("Step 2/3", "Step 4/3") for line in told],
        lambda told: [line for line in told if "Step 3/3" not in line],
        lambda told: [line.replace("0.2000", "0.2001") for line in told],
        lambda told: [line.replace("52.70s", "52.71s") for line in told],
    ],
)
def test_a_log_of_other_steps_fails_its_rule(
    grpo: Callable[..., dict[str, str]], change: Callable[[list[str]], list[str]]
) -> None:
    assert grpo(change=change)["printed"] == "failed"


def test_another_arm_than_the_row_s_is_refused(grpo: Callable[..., dict[str, str]]) -> None:
    assert grpo(arm="v1-grpo")["complete"] == "failed"


def rollout(tmp_path: Path, edit: Edit = list, engine: str = "nemo-rl") -> dict[str, str]:
    lines: list[dict[str, Any]] = [{"v": 1, "kind": "run", "world": 2, "settings": {"steps": 2}}]
    for role, dispatcher in (("reference", "alltoall"), ("arm", "v2")):
        fixed = {"v": 1, "kind": "step", "role": role, "dispatcher": dispatcher, "ms": 9.0}
        lines += [{**fixed, "step": n, "loss": 5.7 + n / 10} for n in (0, 1, 2)]
    lines += [{"v": 1, "kind": "bytes", "tx_bytes": 5}, {"v": 1, "kind": "done"}]
    edit(lines)
    path = tmp_path / training.NAME
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cells = {"rollout": (training.NAME, Taken(training.read(path)))}
    checks = training.judge(cells, 2, arm="v2-rollout", nics=16, engine=engine)
    return {x.id.removeprefix("rollout-"): x.outcome for x in checks if x.id != "same-run"}


def test_a_rollout_agrees_with_its_reference(tmp_path: Path) -> None:
    assert rollout(tmp_path) == {"complete": "met", "parity": "met", "traffic": "met"}


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (step(5, loss=5.82), "parity"),
        (step(5, loss=None), "parity"),
        (step(5, ms=0.0), "parity"),
        (lambda lines: lines.remove(lines[6]), "complete"),
        (step(7, tx_bytes=0), "traffic"),
    ],
)
def test_a_broken_rollout_fails_its_rule(tmp_path: Path, edit: Edit, rule: str) -> None:
    assert rollout(tmp_path, edit)[rule] == "failed"


def test_a_training_cannot_be_judged_as_a_rollout(tmp_path: Path) -> None:
    assert rollout(tmp_path, engine="megatron-core")["learns"] == "failed"


def test_the_split_stands_beside_the_published_one(drive: ModuleType, tmp_path: Path) -> None:
    lines = drive.records(drive.steps(log("0.1", "0.2", "0.3")), "v1", tmp_path)
    read = [training.Record(**each) for each in lines]
    verdict = Verdict(
        "d", "proven", "", lane="nemo-rl", arm="v1-grpo", profile="p5en-x2",
        steps=tuple(training.rows("grpo", read)),
    )  # fmt: skip
    found = compare.measured(verdict, "grpo")
    found = {name: value for name, value in found.items() if not name.startswith("loss_")}
    assert found == pytest.approx(
        {"generation_percent": 62.0, "training_percent": 8.0, "refit_percent": 4.0, "refit_s": 3.4}
    )
    beside = {line.figure.metric for line in compare.lines(published.load(), verdict, "grpo")}
    assert set(found) <= beside
