"""The command line, and make's thin calls of it: whatever is typed gets an answer in words."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lanekit import cli, paths


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
