"""Bundles: what goes in, the parts, and a real installation on this machine without an index."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from lanekit import bundle, cli, drop, paths, pins
from lanekit.errors import ConfigError, EnvironmentFailed

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
LANEKIT_NEEDS = ("msgspec", "psutil", "pyyaml", "requests", "urllib3", "idna", "certifi",
                 "charset-normalizer", "zstandard")  # fmt: skip
LOCK = """\
# resolved by uv
torch==2.11.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
nvidia-nccl-cu13==2.30.4 \\
    --hash=sha256:cc
Ruamel.YAML==0.18.17 \\
    --hash=sha256:dd
uv==0.13.9 \\
    --hash=sha256:ee
setuptools==81.0.0 \\
    --hash=sha256:ff
"""


def test_requirements_keep_their_hashes() -> None:
    torch, nccl, yaml, uv, _ = pins.requirements(LOCK)
    assert torch == "torch==2.11.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb"
    assert bundle.name_and_version(nccl) == ("nvidia-nccl-cu13", "2.30.4")
    assert bundle.name_and_version(yaml) == ("ruamel-yaml", "0.18.17")
    assert bundle.name_and_version(uv) == ("uv", "0.13.9")


def test_an_unpinned_requirement_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a pinned requirement: 'torch>=2'"):
        bundle.name_and_version("torch>=2")


def test_present_packages() -> None:
    text = "torch==2.11.0\nNumPy\n# a comment\n-e /somewhere\nmsgspec==0.23.0  # why\n"
    assert bundle.read_present(text) == {"torch": "2.11.0", "numpy": "", "msgspec": "0.23.0"}


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Locks and one lane of this test's own."""
    profiles = paths.PROFILES
    folder = tmp_path / "locks"
    folder.mkdir()
    for name in ("engine", "aiperf", "lanekit"):
        (folder / f"{name}.txt").write_text(LOCK)
    (tmp_path / "lanes" / "one").mkdir(parents=True)
    (tmp_path / "lanes" / "one" / "lane.toml").write_text(
        'name="one"\ntitle="t"\nengine="e"\nstack="s"\n[model]\nsource="a/b"\nserved_name="b"\n'
        "[workload]\nisl=1\nosl=1\n[workload.cells]\nc1={concurrency=1,requests=1}\n"
        '[arms.a]\ntitle="t"\ncontracts={h200x1="v2-one"}\n'
        '[profiles.h200x1]\narm="a"\nenvironment="engine"\n[profiles.p5en-x2]\narm="a"\n'
    )
    monkeypatch.setattr(paths, "LOCKS", folder)
    monkeypatch.setattr(paths, "LANES", tmp_path / "lanes")
    monkeypatch.setattr(paths, "PROFILES", profiles)
    return folder


def wheel(folder: Path, name: str = "tiny") -> Path:
    """A real wheel of one module."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"{name}.py", "ANSWER = 42\n")
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        made.writestr(f"{info}/WHEEL", tags)
        made.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
    return path


def test_what_the_machine_has_is_linked(locks: Path, tmp_path: Path) -> None:
    present = tmp_path / "freeze.txt"
    present.write_text("torch==2.11.0\nnvidia-nccl-cu13==2.28.9\nruamel_yaml\n")
    deepep = wheel(tmp_path, "deep_ep")
    planned = bundle.plan_environments("one", "h200x1", deepep_wheel=deepep, present=present)
    assert set(planned) == {"server", "aiperf", "lanekit"}
    server = planned["server"]
    assert server.linked == ("torch==2.11.0", "ruamel-yaml")
    carried = [bundle.name_and_version(item)[0] for item in server.carried]
    assert carried == ["nvidia-nccl-cu13", "setuptools"]  # engines import setuptools, never uv
    assert server.extra == (deepep,)


def test_a_lane_on_gpus_needs_a_deep_ep_wheel(locks: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs deep_ep") as caught:
        bundle.plan_environments("one", "h200x1", deepep_wheel=None, present=None)
    assert "DEEPEP_WHEEL=" in caught.value.remedy
    with pytest.raises(ConfigError, match="no wheel at"):
        bundle.plan_environments("one", "h200x1", deepep_wheel=tmp_path / "x.whl", present=None)


@pytest.mark.parametrize(
    ("lane", "profile", "asks"),
    [
        ("vllm", "cpu", False),  # its lock holds NCCL, which PyPI's torch brings
        ("vllm", "h200x1", False),  # one rank: nobody to exchange with
        ("vllm", "h200x2", True),
        ("micro", "h200x1", True),
        ("megatron", "h200x1", False),
    ],
)
def test_deep_ep_is_asked_for_where_an_arm_builds_a_buffer(
    lane: str, profile: str, asks: bool
) -> None:
    refused = pytest.raises(ConfigError, match="needs deep_ep")
    with refused if asks else contextlib.nullcontext():
        bundle.plan_environments(lane, profile, deepep_wheel=None, present=None)


def test_a_lane_with_tools_beside_its_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs router beside its engine"):
        bundle.plan_environments("llmd", "cpu", deepep_wheel=None, present=None)


def test_deep_ep_may_be_on_the_machine_already(locks: Path, tmp_path: Path) -> None:
    present = tmp_path / "freeze.txt"
    present.write_text("deep_ep==2.0.0+b8a69a8\n")
    planned = bundle.plan_environments("one", "h200x1", deepep_wheel=None, present=present)
    assert planned["server"].linked == ("deep-ep",)
    assert planned["server"].extra == ()


def test_a_lane_without_an_environment_there_is_refused(locks: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to bundle") as caught:
        bundle.plan_environments("one", "p5en-x2", deepep_wheel=None, present=None)
    assert caught.value.remedy == "Choose PROFILE= one of: h200x1."


def test_a_plan_packs_nothing(
    locks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["bundle", "one", "--profile", "h200x1", "--out", str(tmp_path / "out"), "--plan"]
    given += ["--deepep-wheel", str(wheel(tmp_path, "deep_ep")), "--present", f"{tmp_path}/freeze"]
    assert cli.main(given) == 2
    assert "PRESENT: no file at" in capsys.readouterr().err
    (tmp_path / "freeze").write_text("torch==2.11.0\n")
    assert cli.main(given) == 0
    carried, linked, *_ = capsys.readouterr().out.splitlines()
    assert carried.startswith("server carries: nvidia-nccl-cu13==2.30.4 ")
    assert carried.endswith(" deep_ep-1.0-py3-none-any.whl")
    assert linked == "server links: torch==2.11.0"
    assert not (tmp_path / "out").exists()


def test_a_missing_lock_is_named(locks: Path) -> None:
    (locks / "engine.txt").unlink()
    with pytest.raises(ConfigError, match=r"no lock engine\.txt"):
        bundle.plan_environments("one", "h200x1", deepep_wheel=None, present=None)


@pytest.mark.parametrize(("limit", "sizes"), [(0, [10]), (4, [4, 4, 2]), (5, [5, 5]), (99, [10])])
def test_parts(tmp_path: Path, limit: int, sizes: list[int]) -> None:
    writer = bundle.PartWriter(tmp_path, limit)
    assert writer.write(b"0123456") == 7
    writer.write(b"789")
    sums = writer.close()
    names = [bundle.ARCHIVE] if not limit else [f"bundle.tar.{n:03d}" for n in range(len(sizes))]
    assert list(dict.fromkeys([*names, bundle.ARCHIVE])) == list(sums)
    data = [(tmp_path / name).read_bytes() for name in names]
    assert ([len(part) for part in data], b"".join(data)) == (sizes, b"0123456789")
    assert sums[bundle.ARCHIVE] == hashlib.sha256(b"0123456789").hexdigest()
    for name, part in zip(names, data, strict=True):
        assert sums[name] == hashlib.sha256(part).hexdigest()


# From here on a bundle of this checkout is made, installed and run for real, without an index.


def python_with_pip() -> str:
    for python in (sys.executable, shutil.which("python3") or ""):
        asked = [python, "-m", "pip", "--version"]
        if python and subprocess.run(asked, capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip("no pip for this Python: the installer needs one")


def packed(out: Path, environments: Mapping[str, bundle.Environment], python: str) -> Path:
    bundle.pack(environments, {"format": 1, "python": python}, out=out, part_bytes=200_000)
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    lanekit = bundle.Environment((), LANEKIT_NEEDS, (wheel(root),))
    return packed(root / "bundle", {"lanekit": lanekit}, HERE)


def install(source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    python_with_pip()
    command = ["sh", str(source / bundle.INSTALLER), "--python", sys.executable, *arguments]
    return subprocess.run(command, text=True, capture_output=True, check=False)


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "media"))


def test_install_and_run_a_command(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = install(copied, "--to", str(tmp_path / "lane"), "--", "lanes")
    assert done.returncode == 0, done.stderr
    assert "1 installed, 9 linked" in done.stdout
    assert "vllm/" in done.stdout
    python = tmp_path / "lane" / "env" / "lanekit" / "bin" / "python"
    code = "import tiny, msgspec; print(tiny.ANSWER, msgspec.__file__)"
    said = subprocess.run([python, "-c", code], text=True, capture_output=True, check=True).stdout
    assert said.startswith(f"42 {tmp_path}/lane/env/lanekit/")
    tree = tmp_path / "lane" / "bundle" / "tree"
    carried = json.loads((tree / paths.PROVENANCE).read_text())
    assert set(carried["git"]) == {"commit", "dirty"}
    noted = carried["git"] | {"dirty": "no"}  # also where this test's own checkout is changed
    (tree / paths.PROVENANCE).write_text(json.dumps(carried | {"git": noted}))
    monkeypatch.setattr(paths, "ROOT", tree)
    assert drop.git() == noted
    (tree / "results/RESULTS.md").write_text("renewed by a run\n")
    assert drop.git() == noted
    (tree / "scripts/lanekit/__pycache__").mkdir(exist_ok=True)
    (tree / "scripts/lanekit/__pycache__/row.pyc").write_text("")
    assert drop.git() == noted
    for added in ("scripts/lanekit/newhook.py", "patches/9999-x.patch", "lanes/micro/x.py"):
        (tree / added).write_text("")
        assert drop.git() == noted | {"dirty": "yes"}
        (tree / added).unlink()
    assert drop.git() == noted
    with (tree / "lanes/micro/ep_bench.py").open("a") as file:
        file.write("# a line edited there\n")
    assert drop.git() == noted | {"dirty": "yes"}
    again = install(copied, "--to", str(tmp_path / "lane"))
    assert again.stdout == f"bundle: already installed in {tmp_path}/lane\n"


def test_missing_and_damaged_parts_are_all_named(copied: Path, tmp_path: Path) -> None:
    parts = sorted(copied.glob("bundle.tar.*"))
    assert len(parts) > 2
    parts[0].unlink()
    data = bytearray(parts[1].read_bytes())
    data[100] ^= 1
    parts[1].write_bytes(data)
    done = install(copied, "--to", str(tmp_path / "lane"))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "bundle: missing: bundle.tar.000",
        "bundle: damaged: bundle.tar.001",
        "Copy the named files again.",
    ]
    assert not (tmp_path / "lane" / "lanekit").exists()


def test_a_cut_part_is_damaged(copied: Path, tmp_path: Path) -> None:
    last = sorted(copied.glob("bundle.tar.*"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    done = install(copied, "--to", str(tmp_path / "lane"))
    assert (done.returncode, f"damaged: {last.name}" in done.stderr) == (2, True)


def test_without_the_sums_nothing_is_installed(copied: Path, tmp_path: Path) -> None:
    (copied / bundle.SUMS).unlink()
    done = install(copied, "--to", str(tmp_path / "lane"))
    assert (done.returncode, done.stderr) == (2, "bundle: missing: bundle.sha256\n")


def test_a_part_too_many_is_noticed(copied: Path, tmp_path: Path) -> None:
    (copied / "bundle.tar.999").write_bytes(b"from another bundle")
    done = install(copied, "--to", str(tmp_path / "lane"))
    assert done.returncode == 2
    assert "do not make up the whole" in done.stderr


def on_disk_of(mib: int, source: Path, at: Path) -> subprocess.CompletedProcess[str]:
    """The installer on a file system of its own, in a mount namespace of its own."""
    python_with_pip()
    at.mkdir()
    alone = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespace here: a small disk cannot be mounted")
    script = f'mount -t tmpfs -o size={mib}m tmpfs "$1" && shift && sh "$@"'
    call = [str(source / bundle.INSTALLER), "--python", sys.executable, "--to", f"{at}/lane"]
    command = [*alone, "sh", "-c", script, "sh", str(at), *call]
    return subprocess.run(command, text=True, capture_output=True, check=False)


def test_a_disk_that_cannot_suffice_is_refused_before_anything_is_written(
    copied: Path, tmp_path: Path
) -> None:
    done = on_disk_of(2, copied, tmp_path / "small")
    assert done.returncode == 2
    assert "MiB free, needs" in done.stderr
    assert "--to DIR" in done.stderr


def test_a_disk_that_fills_up_on_the_way_is_said(copied: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in copied.glob("bundle.tar*"))
    done = on_disk_of(2 * (size >> 20) + 3, copied, tmp_path / "small")
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "then run this again" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bundle_over_another_keeps_results_and_nothing_else(copied: Path, tmp_path: Path) -> None:
    lane = tmp_path / "lane"
    assert install(copied, "--to", str(lane)).returncode == 0
    stale, result = lane / "bundle/tree/scripts/lanekit/old.py", lane / "bundle/tree/results/d/m"
    result.parent.mkdir(parents=True)
    for path in (stale, result, lane / "bundle/wheels/old.whl", lane / "bundle/old.wheels"):
        path.write_text("")
    (lane / "installed.sha256").write_text("another bundle's")
    (lane / "env/lanekit/bin/python").unlink()  # and that one had broken off
    done = install(copied, "--to", str(lane), "--", "lanes")
    assert (done.returncode, done.stderr) == (0, "")
    assert result.exists()
    assert not stale.exists()
    assert not [*(lane / "bundle").rglob("old.*")]


def test_an_option_without_its_value_is_named(copied: Path) -> None:
    done = install(copied, "--to")
    assert (done.returncode, done.stderr) == (2, "bundle: --to needs a value\n")


def test_another_python_is_refused(tmp_path: Path) -> None:
    source = packed(tmp_path / "media", {"lanekit": bundle.Environment((), ())}, "2.7")
    done = install(source, "--to", str(tmp_path / "lane"))
    assert done.returncode == 2
    assert f"made for Python 2.7, but {sys.executable} is {HERE}" in done.stderr


def test_a_package_that_the_machine_lacks_is_named(tmp_path: Path) -> None:
    linked = ("msgspec", "no-such-package", "pyyaml==0.0.1")
    source = packed(tmp_path / "media", {"server-like": bundle.Environment((), linked)}, HERE)
    done = install(source, "--to", str(tmp_path / "lane"))
    assert done.returncode == 2
    assert "no-such-package: not found by" in done.stderr
    assert "pyyaml==0.0.1: " in done.stderr
    assert "msgspec:" not in done.stderr


def test_equal_input_gives_an_equal_archive(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "b").mkdir(parents=True)
    (root / "b" / "one").write_text("1")
    (root / "a").write_text("2")
    first = bundle._write_parts(root, tmp_path, 0)
    os.utime(root / "a", (1, 1))
    assert bundle._write_parts(root, tmp_path, 0) == first


def test_parts_of_an_earlier_bundle_are_removed(tmp_path: Path) -> None:
    (tmp_path / "bundle.tar.007").write_text("old")
    (tmp_path / "root").mkdir()
    bundle._write_parts(tmp_path / "root", tmp_path, 0)
    assert [path.name for path in tmp_path.glob("bundle.tar*")] == ["bundle.tar"]


def test_parts_of_a_bundle_that_broke_off_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of one beside the sums of the one before would be copied, and found out there."""
    (tmp_path / "root").mkdir()
    (tmp_path / bundle.SUMS).write_text("of an earlier bundle")
    start = bundle.PartWriter._start

    def full(writer: bundle.PartWriter) -> None:
        if writer._sums:
            raise OSError(errno.ENOSPC, "No space left on device")
        start(writer)

    monkeypatch.setattr(bundle.PartWriter, "_start", full)
    with pytest.raises(OSError, match="No space left"):
        bundle._write_parts(tmp_path / "root", tmp_path, 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_what_a_killed_pack_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "media" / ".bundle-killed" / "wheels").mkdir(parents=True)
    packed(tmp_path / "media", {"lanekit": bundle.Environment((), ())}, HERE)
    assert not [*(tmp_path / "media").glob(".bundle-*")]


def test_a_pack_that_is_stopped_leaves_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(bundle, "_own_wheel", stopped)
    assert cli.main(["bundle", "micro", "--profile", "cpu", "--out", str(tmp_path / "b")]) == 2
    said = capsys.readouterr().err
    assert "stopped by SIGTERM" in said
    assert "No part of it stays" in said
    assert not [*(tmp_path / "b").iterdir()]


def test_a_full_disk_is_said_and_not_to_be_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "bundle/bundle.tar")

    monkeypatch.setattr(bundle, "pack", full)
    asked = ["bundle", "micro", "--profile", "cpu", "--out", "x"]
    assert cli.main(asked) == 2
    said = capsys.readouterr().err
    assert "No space left on device: 'bundle/bundle.tar'" in said
    assert "Free space there" in said
    assert "report" not in said


def test_a_wheel_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")  # a unit test asks no index
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wanted = ["no-such-thing==1.0 \\\n    --hash=sha256:" + "0" * 64]
    with pytest.raises(EnvironmentFailed, match="uv tool failed") as caught:
        bundle.fetch(wanted, tmp_path / "wheels")
    assert "package index" in caught.value.remedy


def test_unknown_option_prints_usage(copied: Path) -> None:
    done = install(copied, "--frobnicate")
    assert done.returncode == 2
    assert "unknown option --frobnicate" in done.stderr
    assert "--to DIR" in done.stderr
