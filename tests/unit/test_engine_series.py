"""A series that an arm needs: put into images by images/tools/patched, asked for before a start."""

import subprocess
import sys
import venv
from pathlib import Path

import msgspec
import pytest

from lanekit import alone, cli, images, machine, patches, paths, planning, run
from lanekit.errors import ConfigError
from lanekit.plan import Environment, Plan

TOOL = images.IMAGES / "tools" / "patched"
PATCH = "--- a/pkg/m.py\n+++ b/pkg/m.py\n@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n"


def patched(series: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """The tool as a Dockerfile calls it, with the site-packages named."""
    return subprocess.run(
        [str(TOOL), str(series), str(site)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "site/pkg").mkdir(parents=True)
    (tmp_path / "site/pkg/m.py").write_text("a\nb\nc\n")
    (tmp_path / "series").mkdir()
    (tmp_path / "series/0001-x.patch").write_text(PATCH)
    return tmp_path / "site"


def test_an_engine_without_the_series_is_refused_before_a_drop_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    given = ["--env", "EP_NUM_COMMS=2", "--server-python", sys.executable]
    asked = ["run", "micro", "--profile", "cpu", "--cells", "decode", "--results", str(results)]
    assert cli.main([*asked, *given]) == 2
    assert "the engine does not hold series deepep/b306af06" in capsys.readouterr().err
    assert not results.exists()


def test_an_interpreter_without_the_engine_is_refused_before_a_drop_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until 2026-11-30 the server's death alone told it, and triage did not know it."""
    results = tmp_path / "results"
    bare = tmp_path / "bare"
    venv.create(bare)
    asked = ["run", "vllm", "--profile", "cpu", "--results", str(results)]
    assert cli.main([*asked, "--server-python", str(bare / "bin/python")]) == 2
    said = capsys.readouterr().err
    assert "holds no module vllm" in said
    assert "SERVER_PYTHON=" in said
    assert not results.exists()


def test_a_run_that_is_tried_here_does_not_ask_for_this_checkouts_lock() -> None:
    """`make test` beside a running lane found the lock taken (2026-11-30)."""
    assert not alone.LOCK.is_relative_to(paths.ROOT)


def test_a_series_is_applied_once_and_not_twice(site: Path) -> None:
    assert patched(site.parent / "series", site).returncode == 0
    assert (site / "pkg/m.py").read_text() == "a\nB\nc\n"
    assert patched(site.parent / "series", site).returncode == 1


def test_a_version_without_a_series_is_said_and_an_empty_series_is_refused(site: Path) -> None:
    ran = patched(site.parent / "vllm" / "9.9", site)
    assert (ran.returncode, ran.stdout) == (0, "patched: no series for vllm 9.9\n")
    (site.parent / "series/0001-x.patch").unlink()
    ran = patched(site.parent / "series", site)
    assert ran.returncode == 1
    assert "holds no patch" in ran.stderr


def test_a_hunk_that_does_not_fit_fails_the_build(site: Path) -> None:
    (site / "pkg/m.py").write_text("a\nother\nc\n")
    assert patched(site.parent / "series", site).returncode == 1


@pytest.mark.parametrize(
    ("image", "folder"),
    [
        ("vllm", "vllm"),
        ("sglang", "sglang"),
        ("trtllm", "tensorrt-llm"),
        ("megatron", "megatron-lm"),
    ],
)
def test_the_image_applies_the_series_of_its_pinned_version(image: str, folder: str) -> None:
    target = images.definition("2026-07", images.Roots())["target"][image]
    version = target["args"][f"{image.upper()}_VERSION"]
    assert (patches.PATCHES / folder / version / "series.toml").is_file()
    text = (images.IMAGES / image / "Dockerfile").read_text()
    assert f'"/patches/{folder}/${{{image.upper()}_VERSION}}"' in text


@pytest.fixture
def plan(bare: machine.Machine, checkout: Path, tmp_path: Path) -> Plan:
    """A plan whose engine is a bare interpreter of its own."""
    venv.create(tmp_path / "engine", with_pip=False)
    options = planning.Options(lane="vllm", arm="graph", profile="h200x2", start=False)
    python = str(tmp_path / "engine/bin/python")
    environments = {"server": Environment("given", python, {})}
    return msgspec.structs.replace(planning.make(options, bare), environments=environments)


def test_an_engine_without_the_series_is_refused_and_one_with_it_is_not(
    plan: Plan, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="does not hold series vllm/") as caught:
        run._require_patched("vllm/0.24.0", plan)
    assert "patches/README.md" in caught.value.remedy
    lib = tmp_path / f"engine/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    for gate in patches.load(patches.PATCHES / "vllm/0.24.0").gate:
        (lib / gate.path).parent.mkdir(parents=True, exist_ok=True)
        (lib / gate.path).write_text(gate.text)
    run._require_patched("vllm/0.24.0", plan)
