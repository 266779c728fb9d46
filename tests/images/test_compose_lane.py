"""The CPU lane in containers: same drop and verdict as without Docker, and nothing left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lanekit import alone, compose, drop, images
from lanekit.manifest import Manifest

NEEDED = ("vllm-cpu", "aiperf")


def _missing() -> list[str]:
    try:
        tags = {tag for image in images.docker().image.list() for tag in image.repo_tags or ()}
    except Exception:
        return list(NEEDED)
    return [name for name in NEEDED if images.local(name, images.DEFAULT_STACK) not in tags]


pytestmark = pytest.mark.skipif(bool(_missing()), reason="needs images vllm-cpu and aiperf")


def labelled(results: Path) -> list[str]:
    """The containers of runs under a results folder, running or not."""
    found = images.docker().container.list(all=True, filters=[("label", compose.LABEL)])
    mine = [c for c in found if (c.config.labels or {})[compose.LABEL].startswith(str(results))]
    return [container.id for container in mine]


def volumes() -> set[str]:
    """Every volume but what a host keeps for the next run, which the first run on it makes."""
    named = {volume.name for volume in images.docker().volume.list()}
    return {name for name in named if not name.startswith("lanes-kept-")}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def run() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "lanekit", "run", "vllm", "--profile=cpu", "--cells=c4"]
        child = subprocess.Popen(
            [*command, "--launcher=compose", f"--results={tmp_path}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(child)
        return child

    yield run
    for child in started:
        if child.poll() is None:
            child.terminate()
            child.communicate(timeout=120)


def until(results: Path, happened: Callable[[Manifest], bool], seconds: float = 300) -> Manifest:
    """Wait until the newest drop's manifest says so: at a load of 20, 120 s were too short."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            manifest = drop.read(max(results.glob("2*")))
            if happened(manifest):
                return manifest
        time.sleep(0.1)
    pytest.fail(f"it did not happen within {seconds:.0f} s")


def contained(manifest: Manifest) -> bool:
    return any(each.container for each in manifest.processes)


def test_the_lane_in_containers_is_proven_and_leaves_nothing(
    start: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    before = volumes()
    for _ in range(2):  # AIPerf tears a prompt now and then, its own race that 0.12.0 has mended
        said, _ = (child := start()).communicate(timeout=1200)
        if "Failed to decode conversation data" not in said:
            break
    assert child.returncode == 0, said
    assert "proven" in said
    assert labelled(tmp_path) == []
    assert volumes() == before
    manifest = drop.read(max(tmp_path.glob("2*")))
    assert manifest.state == "complete"
    assert set(manifest.images) == {"server", "aiperf"}
    assert all(digest.startswith("sha256:") for digest in manifest.images.values())
    assert {
        f"compose/{manifest.plan['hosts'][0]['name']}.yaml",
        "aiperf/c4/profile_export.jsonl",
    } <= set(manifest.files)


def test_an_interrupted_run_removes_its_containers(
    start: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start()
    until(tmp_path, contained)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=120)
    assert child.returncode == 2
    assert labelled(tmp_path) == []


def test_what_a_killed_run_left_is_removed_by_the_next(
    start: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start()
    manifest = until(tmp_path, contained)
    child.kill()
    child.communicate(timeout=60)
    left = labelled(tmp_path)
    assert left == [each.container for each in manifest.processes if each.container]
    said: list[str] = []
    with alone.holding("", said.append):
        pass
    assert labelled(tmp_path) == []
    assert any(left[0][:12] in line for line in said)


def test_a_container_the_kill_left_unrecorded_is_found_by_its_label(
    start: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start()
    until(tmp_path, contained)
    child.kill()
    child.communicate(timeout=60)
    path = max(tmp_path.glob("2*"))
    unrecorded = drop.read(path)
    unrecorded.processes.clear()
    removed, _ = compose.end_the_dead(path, unrecorded, print)
    assert len(removed) == 1
    assert labelled(tmp_path) == []


def test_the_server_is_no_root_and_cannot_write_its_root(
    start: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start()
    manifest = until(tmp_path, contained)
    (identity,) = [each.container for each in manifest.processes if each.container]
    told = images.docker().container.inspect(identity)
    assert told.config.user not in ("", "0", "root", "0:0")
    assert told.host_config.readonly_rootfs
    assert told.host_config.memory
    assert told.host_config.pids_limit
    assert told.host_config.network_mode == "host"
    probe = ["docker", "exec", identity, "sh", "-c", "touch /opt/x"]
    assert subprocess.run(probe, capture_output=True, check=False).returncode != 0
    os.kill(child.pid, signal.SIGTERM)
    child.communicate(timeout=120)
    assert labelled(tmp_path) == []
