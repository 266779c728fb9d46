"""Small files of anybody's drop are read whole, or refused in one clear line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lanekit import reading, toml
from lanekit.errors import ConfigError, Unreadable
from lanekit.spec import Fabric


def piped(path: Path) -> None:
    os.mkfifo(path)


def linked(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def folder(path: Path) -> None:
    path.mkdir()


def vast(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


def absent(_: Path) -> None:
    pass


@pytest.mark.parametrize("make", [piped, linked, folder, vast, absent])
def test_what_is_no_small_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x")
    with pytest.raises(Unreadable, match=r"x: "):
        reading.small(tmp_path / "x")


@pytest.mark.parametrize("text", [b"[" * 10**6, b"[" * 10**6 + b"]" * 10**6, b"\xff", b"", b"{"])
def test_what_is_no_json_is_refused_and_named(text: bytes) -> None:
    with pytest.raises(Unreadable, match=r"here: "):
        reading.decoded(text, Any, "here")


@pytest.mark.parametrize("text", [b"a = " + b"[" * 10**5, b"a" + b".a" * 2000 + b" = 1"])
def test_toml_without_end_is_refused_and_named(text: bytes) -> None:
    with pytest.raises(ConfigError, match=r"here: "):
        toml.decode(text, Fabric, where="here")
