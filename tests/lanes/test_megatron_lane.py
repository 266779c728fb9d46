"""Real Megatron Core trained on processors: the lane itself, and both flex arms over two ranks with
a stand-in of deep_ep that exchanges over gloo. Minutes; `make test-all`."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.lanes import direct

from lanekit import batch, envs, patches, paths, planning, training, verify

pytestmark = pytest.mark.lane
SERIES = "megatron-lm/0.16.1"
SHAPE = (
    *("--device=cpu", "--dtype=fp32", "--layers=2", "--seq=64", "--sequences=2", "--hidden=64"),
    *("--ffn=32", "--experts=16", "--topk=4", "--heads=4", "--groups=2", "--head-dim=16"),
    *("--vocab=512", "--lr=0.1"),
)


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the lane's own environment."""
    return envs.ensure(
        envs.spec("megatron-cpu"), paths.CACHE / "envs", torch_index="none", say=print
    ).python


@pytest.fixture(scope="module")
def seamed(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the environment's Megatron with our series applied."""
    site = next((python.parents[1] / "lib").glob("python3*/site-packages"))
    copy = tmp_path_factory.mktemp("seamed")
    for found in site.glob("megatron*"):
        shutil.copytree(found, copy / found.name)
    for patch in sorted((patches.PATCHES / SERIES).glob("*.patch")):
        with patch.open() as text:
            subprocess.run(["patch", "-s", "-p1", "--fuzz=0", "-d", copy], stdin=text, check=True)
    return copy


def train(python: Path, out: Path, arm: str, ranks: int, path: str = "", **env: str) -> str:
    """Run the program over `ranks` processes; what it said."""
    command = [
        *(str(python), "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--master-addr", "127.0.0.1", "--master-port", str(planning.free_port())),
        *(str(paths.LANES / "megatron" / "train.py"), "--arm", arm, "--out", str(out), *SHAPE),
    ]
    own = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env}
    done = direct.run(command, **own)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def losses(out: Path, role: str) -> list[float | None]:
    """The losses of a run, the warm-up first."""
    return [
        r.loss for r in training.read(out / training.NAME) if r.role == role and r.step is not None
    ]


def test_the_lane_is_proven(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "lanekit", "run", "megatron", "--profile", "cpu")
    done = subprocess.run(
        [*command, "--torch-index", "none", "--results", tmp_path],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = verify.verify(next(tmp_path.glob("2*")))
    assert verdict.result == "proven"
    assert [row.step for row in verdict.steps if row.role == "arm"] == [0, 1, 2, 3]


def test_losses_depend_neither_on_the_ranks_nor_on_the_run(python: Path, tmp_path: Path) -> None:
    for ranks in (1, 2):
        train(python, tmp_path / str(ranks), "alltoall", ranks)
    one, two = losses(tmp_path / "1", "arm"), losses(tmp_path / "2", "arm")
    assert one == pytest.approx(two, abs=1e-5)
    assert one == losses(tmp_path / "1", "reference")


@pytest.mark.parametrize(("arm", "buffer"), [("v2", "ElasticBuffer"), ("v1", "Buffer")])
def test_a_flex_arm_trains_as_the_plain_all_to_all(
    python: Path, seamed: Path, tmp_path: Path, arm: str, buffer: str
) -> None:
    cap = {"MCORE_DEEPEP_V2": "1", "MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK": "64"}
    path = f"{seamed}:{Path(__file__).parent / 'standin'}"
    said = train(python, tmp_path, arm, 2, path, **(cap if arm == "v2" else {}))
    assert said.count(f"deep_ep.{buffer} constructed") == 2
    records = training.read(tmp_path / training.NAME)
    command = ("python", "train.py", "--arm", arm, "--out", str(tmp_path), *SHAPE)
    taken = batch.Taken(records, command, batch.printed(io.BytesIO(said.encode()), records), None)
    checks = training.judge({"steps": (training.NAME, taken)}, 2, arm=arm, nics=0)
    assert [x.id for x in checks if x.outcome != "met"] == ["steps-traffic", "same-run"]
    assert losses(tmp_path, "arm") == pytest.approx(losses(tmp_path, "reference"), abs=1e-5)


def test_a_rollout_over_v2_agrees_with_the_plain_all_to_all(
    python: Path, seamed: Path, tmp_path: Path
) -> None:
    small = [word for word in SHAPE if not word.startswith(("--sequences", "--lr"))]
    command = [
        *(str(python), str(paths.LANES / "nemo-rl" / "drive.py"), "rollout", "--arm=v2"),
        *(f"--out={tmp_path}", "--ranks=2", f"--port={planning.free_port()}"),
        *(*small, "--sequences=4", "--steps=3"),
    ]
    own = {
        "MCORE_DEEPEP_V2": "1",
        "MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK": "256",
        "PYTHONPATH": f"{seamed}:{Path(__file__).parent / 'standin'}",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = direct.run(command, **own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("deep_ep.ElasticBuffer constructed") == 2
    cells = {"rollout": (training.NAME, batch.Taken(training.read(tmp_path / training.NAME)))}
    checks = training.judge(cells, 2, arm="v2-rollout", nics=0, engine="nemo-rl")
    assert [x.id for x in checks if x.outcome != "met"] == ["rollout-traffic", "same-run"]
    assert losses(tmp_path, "arm") == pytest.approx(losses(tmp_path, "reference"), abs=1e-5)


def test_an_arm_without_its_buffer_is_refused(python: Path, seamed: Path, tmp_path: Path) -> None:
    path = f"{seamed}:{Path(__file__).parent / 'standin'}"
    with pytest.raises(AssertionError, match="arm v2, but MCORE_DEEPEP_V2 is off"):
        train(python, tmp_path, "v2", 2, path)
    with pytest.raises(AssertionError, match="this Python has no deep_ep"):
        train(python, tmp_path, "v1", 2, str(seamed))
    with pytest.raises(AssertionError, match="needs two or more"):
        train(python, tmp_path, "v1", 1, path)
