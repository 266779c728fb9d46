"""What the unit tests share."""

from pathlib import Path

import drops
import pytest

from lanekit import alone, machine, paths


@pytest.fixture(autouse=True)
def no_run_beside(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a test's own: a lane that runs in this checkout is no matter of a test."""
    monkeypatch.setattr(alone, "LOCK", tmp_path_factory.mktemp("alone") / "run.lock")


@pytest.fixture
def bare() -> machine.Machine:
    """A machine with nothing but processors."""
    return machine.Machine(
        host="here", kernel="6.1", cpus=2, memory_mib=24000, gpus=(), gpu_processes=(), nics=(),
        gdrdrv="", fi_info="",
    )  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's writable places, moved to a scratch folder."""
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    return tmp_path


@pytest.fixture
def known_lanes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout whose lanes are those of the drops that tests make."""
    monkeypatch.setattr(paths, "LANES", drops.lanes(tmp_path_factory.mktemp("lanes")))
