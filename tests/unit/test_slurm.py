"""What sbatch is given, and what its answers mean; a real Slurm runs it in tests/slurm."""

import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lanekit import drop as drops
from lanekit import machine, planning, slurm, spec
from lanekit.errors import ConfigError
from lanekit.plan import Containers, Plan, Service

HELD = Containers(
    project="x", images={"server": "ghcr.io/deepep-lanes/vllm@sha256:" + "1" * 64},
    user="10001:10001", memory=1, gpus=8, nics=16,
)  # fmt: skip


@pytest.fixture
def plan(bare: machine.Machine, checkout: Path) -> Plan:
    options = planning.Options(lane="micro", profile="cpu-x2", launcher="slurm", start=False)
    return planning.make(options, bare)


def test_nodes_that_nobody_named_are_filled_in_by_the_job(plan: Plan) -> None:
    assert [host.address for host in plan.hosts] == ["${LANE_NODE_0}", "${LANE_NODE_1}"]
    (worker,) = plan.cells["decode"].workers
    text = slurm.script(worker, Path("/drop/logs/b.log"), "/drop")
    assert '--master-addr "${LANE_NODE_0}"' in text
    assert "--node-rank 1" in text
    assert "export LANEKIT_RUN=/drop" in text
    ran = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("word", ["plain", "a b", "$HOME", 'q"q', "back`tick`", "it's", "\\n"])
def test_a_word_reaches_the_program_as_the_plan_has_it(word: str) -> None:
    """With and without a node's name in it; nothing else is filled in, nothing is run."""
    for given, seen in ((word, word), (f"{word}${{LANE_NODE_0}}x", f"{word}nodex")):
        command = f"LANE_NODE_0=node; printf %s {slurm.quote(given)}"
        assert subprocess.check_output(["bash", "-c", command], text=True) == seen


def on(named: str, bare: machine.Machine) -> Plan:
    """Two ranks of the micro lane on the named hosts."""
    options = planning.Options(
        lane="micro", profile="cpu-x2", launcher="slurm", start=False, hosts=named
    )
    return planning.make(options, bare)


def test_named_hosts_are_asked_for_and_numbered_as_the_plan_has_them(
    bare: machine.Machine, checkout: Path
) -> None:
    made = on("z9,a1", bare)
    text = slurm.batch(made, "decode", ["decode"], 15)
    assert "#SBATCH --nodelist=z9,a1" in text
    assert "export LANE_NUMBERS='[z9]=0 [a1]=1'" in text


def test_hosts_that_look_like_placeholders_are_still_named(
    bare: machine.Machine, checkout: Path
) -> None:
    made = on("host-1,host-2", bare)
    assert [host.address for host in made.hosts] == ["host-1", "host-2"]
    assert "#SBATCH --nodelist=host-1,host-2" in slurm.batch(made, "decode", ["decode"], 15)


def test_a_secret_given_by_env_reaches_the_ranks_by_its_name_alone(
    bare: machine.Machine, checkout: Path, tmp_path: Path
) -> None:
    """What sbatch is asked and finds in its environment, which a program in its place writes down;
    it wins over the inherited value, and is in no file."""
    options = planning.Options(
        lane="micro", profile="cpu-x2", launcher="slurm", start=False,
        env=("MY_TOKEN=hf_given", "HF_TOKEN=hf_given", "PATH=/nowhere"),
    )  # fmt: skip
    made = planning.make(options, bare)
    made = msgspec.structs.replace(made, drop=str(tmp_path / "drop"), containers=None)
    drop = drops.Drop.create(made)
    (drop.path / slurm.FOLDER).mkdir()
    asked = tmp_path / "asked"
    program = tmp_path / "sbatch"
    program.write_text(f'#!/bin/bash\necho "$@" $MY_TOKEN $HF_TOKEN >{asked}; echo 7\n')
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HF_TOKEN": "inherited"}
    cell = made.cells["decode"]
    launcher = slurm.SlurmLauncher(made, drop, env, lambda _: None)
    launcher.task("decode", cell, {**env, **cell.env}, [tmp_path / "a", tmp_path / "b"])
    _, exported, _, *values = asked.read_text().split()
    assert {"MY_TOKEN", "HF_TOKEN", "PATH"} <= {*exported.removeprefix("--export=").split(",")}
    assert values == ["hf_given", "hf_given"]
    for path in (drop.path / slurm.FOLDER).iterdir():
        assert "hf_given" not in path.read_text()


@pytest.mark.parametrize(
    ("folder", "change"),
    [("a b", {}), ("a\nb", {}), ("a%j", {}), ('a"b', {}),
     ("a,b", {"containers": HELD}), ("a:b", {"containers": HELD}),
     ("a", {"containers": HELD, "models": "/x,/etc:/y"})],
)  # fmt: skip
def test_a_path_that_slurm_would_misread_is_refused(
    plan: Plan, tmp_path: Path, folder: str, change: dict[str, Any]
) -> None:
    leader = msgspec.structs.replace(plan.hosts[0], models=change.get("models", ""))
    made = msgspec.structs.replace(
        plan, drop=str(tmp_path / folder), hosts=(leader, *plan.hosts[1:]),
        containers=change.get("containers"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="Slurm cannot be given the path") as caught:
        slurm.require(made)
    assert "RESULTS=DIR" in caught.value.remedy


def test_a_plan_that_no_job_could_run_is_not_printed_either(
    bare: machine.Machine, checkout: Path
) -> None:
    asked = partial(planning.Options, launcher="slurm", start=False)
    with pytest.raises(ConfigError, match="lane vllm serves; the slurm launcher runs batch lanes"):
        planning.make(asked(lane="vllm", profile="cpu"), bare)
    with pytest.raises(ConfigError, match="Slurm cannot be given the path"):
        planning.make(asked(lane="micro", profile="cpu-x2", results="/a b"), bare)


def test_a_job_asks_for_every_node_whole_and_for_its_gpus(plan: Plan) -> None:
    full = spec.profile("p5en-x2")
    made = msgspec.structs.replace(plan, profile=full.name, containers=HELD)
    text = slurm.batch(made, "decode", ["decode"], 15)
    wanted = ["nodes=2", "ntasks-per-node=1", "exclusive", "gpus-per-node=8", "time=15"]
    for line in [*(f"#SBATCH --{each}" for each in wanted), "--kill-on-bad-exit=1"]:
        assert line in text
    # enroot writes a registry before a #; the digest stays.
    image = f"--container-image=ghcr.io#deepep-lanes/vllm@sha256:{'1' * 64}"
    assert image in text.replace("'", "")
    assert f"{plan.drop}:{plan.drop}" in text


def test_nothing_secret_is_written(plan: Plan) -> None:
    text = slurm.script(Service("x", "h", ("true",), {"HF_TOKEN": "hf_x", "A": "1"}), Path("l"), "")
    assert "hf_x" not in text
    assert "export A=1" in text


@pytest.mark.parametrize(
    ("shown", "alive", "code"),
    [
        ("JobId=1 JobState=PENDING Reason=Resources ExitCode=0:0 NodeList=", True, 0),
        ("JobId=1 JobState=COMPLETED Reason=None ExitCode=0:0 NodeList=a", False, 0),
        ("JobId=1 JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0 NodeList=a[1-2]", False, 3),
        ("JobId=1 JobState=CANCELLED Reason=None ExitCode=0:15 NodeList=a", False, -15),
        ("JobId=1 JobState=NODE_FAIL Reason=None ExitCode=0:0 NodeList=a", False, 0),
    ],
)
def test_a_jobs_state_in_its_own_words(shown: str, alive: bool, code: int) -> None:
    found = slurm.state(shown)
    assert (found.alive, found.code) == (alive, code)


def test_an_answer_of_another_form_is_none() -> None:
    with pytest.raises(ValueError, match="slurm_load_jobs"):
        slurm.state("slurm_load_jobs error")


def test_without_slurm_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sinfo here"):
        slurm.command({}, "sinfo")


def test_an_image_that_was_not_pushed_is_refused(bare: machine.Machine, checkout: Path) -> None:
    options = planning.Options(lane="micro", profile="cpu-x2", launcher="slurm")
    with pytest.raises(ConfigError, match="was not pushed") as caught:
        planning.make(options, bare)
    assert "make push-vllm-cpu" in caught.value.remedy
