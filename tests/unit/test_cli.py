"""The command line, and make's thin calls of it: whatever is typed gets an answer in words."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lanekit import cli, paths, pins


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run", "vllm", "--port=abc"], "PORT: 'abc' is no number"),
        (["run", "vllm", "--port=-1"], "PORT: '-1' is no number"),
        (["run", "vllm", "--port=65536"], "PORT: 65536 is no port"),
        (["bundle", "vllm", "--profile=cpu", "--part-mib=1G"], "PART_MIB: '1G' is no number"),
    ],
)
def test_a_number_that_is_none_is_said_in_words(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert error == f"error: {said}"
    assert remedy.startswith("  Give ")


@pytest.mark.parametrize("python", ["/nope/python", "false", "old"])
def test_a_python_that_is_none_is_said_before_anything_is_made(tmp_path: Path, python: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    if python == "old":
        python = str(tmp_path / "python3.10")
        code = "import sys; sys.version_info = (3, 10, 1); exec(sys.argv[1])"
        Path(python).write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$2"\n')
        Path(python).chmod(0o755)
    ask = ["make", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}", "setup"]
    ran = subprocess.run(ask, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert f"error: {python} is no Python 3.11, 3.12 or 3.13 with venv" in ran.stderr
    assert "PYTHON=" in ran.stderr.splitlines()[1]
    assert not (tmp_path / "venv").exists()


def made(*words: str) -> str:
    """What make would run."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    ask = ["make", "-n", *words]
    ran = subprocess.run(ask, cwd=paths.ROOT, capture_output=True, text=True, check=True)
    return ran.stdout


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("lane-vllm", "PLAN"), "--plan"),
        (("lane-vllm", "REDACT"), "--redact"),
        (("reproduce", "ROW=vllm/epnc8/c32", "PLAN"), "--plan"),
        (("doctor", "REAP"), "--reap"),
        (("doctor", "JSON"), "--json"),
        (("image-vllm", "PLAN"), "--plan"),
        (("patches", "REFRESH"), "--refresh"),
    ],
)
def test_a_switch_is_on_for_1_and_off_for_0(words: tuple[str, ...], flag: str) -> None:
    *target, name = words
    assert flag in made(*target, f"{name}=1")
    assert flag not in made(*target, f"{name}=0")
    assert flag not in made(*target)


def test_a_value_reaches_the_command_as_it_was_typed() -> None:
    recipe = made("lane-vllm", "ENV=A=it's", "PORT=-1").partition("exec .venv/bin/lanekit")[2]
    said = ["sh", "-c", f"printf '%s\\n' {recipe}"]
    found = subprocess.run(said, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "--env=A=it's" in found
    assert "--port=-1" in found


@pytest.mark.parametrize(
    ("target", "tools"),
    [("lane-vllm", False), ("verify-logs", False), ("image-vllm", False), ("test", True),
     ("lint", True), ("test-images", True)],
)  # fmt: skip
def test_only_tests_and_linters_wait_for_linters(target: str, tools: bool, tmp_path: Path) -> None:
    """Nobody's first lane waits for mypy and matplotlib (31 to 124 s, 2026-12-01)."""
    recipe = made(target, f"VENV={tmp_path}/venv", "RESULTS=x")
    assert "-r locks/lanekit.txt" in recipe
    assert ("-r locks/dev.txt" in recipe) is tools


def test_the_tools_lock_holds_what_lanekit_needs_at_the_same_versions() -> None:
    ours, all_of_it = (pins.packages(paths.LOCKS / f"{name}.txt") for name in ("lanekit", "dev"))
    assert ours.items() <= all_of_it.items()
    declared = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", each)[0] for each in declared["dependencies"]}  # type: ignore[index]
    assert {*names, "setuptools"} <= ours.keys()
