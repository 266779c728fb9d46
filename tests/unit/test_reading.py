"""Small files of anybody's drop are read whole, or refused in one clear line."""

import os
import tracemalloc
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


@pytest.mark.parametrize(
    "text",
    [
        b"a = " + b"[" * 10**5,
        b"a" + b".a" * 2000 + b" = 1",
        b"[x" + b' . "a.b"' * 40 + b"]",
        b"#" * (1 << 19),
    ],
)
def test_toml_without_end_is_refused_and_named(text: bytes) -> None:
    with pytest.raises(ConfigError, match=r"here: "):
        toml.decode(text, Fabric, where="here")


def test_dots_that_are_no_key_s_are_as_many_as_one_likes() -> None:
    text = b"# " + b"." * 99 + b'\nprovider = "' + b"a." * 99 + b'"\n'
    with pytest.raises(ConfigError, match=r"missing required field|unknown key"):
        toml.decode(text, Fabric, where="here")


def test_an_inventory_of_one_endless_key_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    """120 kB took more memory than there was (2026-11-30)."""
    path = tmp_path / "fleet.toml"
    path.write_bytes(b"a" + b".a" * 60_000 + b" = 1")
    tracemalloc.start()
    with pytest.raises(ConfigError, match="a key of more than 32 parts"):
        toml.load(path, Fabric)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 << 20


@pytest.mark.parametrize(
    "before",
    [
        b'x = {s = """a"b""", ',  # a quote in a string of several lines, and a key on its line
        b"x = {s = '''a'b''', ",
        b'x = {s = """a"""", ',  # a string that ends in a quote of its own
        b'x = {s = """a\\"""", ',
        b'# """\n',
        b"y = 1 # it's\n",
    ],
)
@pytest.mark.parametrize(
    ("parts", "said"), [(2, "missing required field|unknown key"), (40, "a key of more than 32")]
)
def test_a_deep_key_hides_behind_no_string_and_no_comment(
    before: bytes, parts: int, said: str
) -> None:
    after = b"}" if b"{" in before else b""
    text = before + b".".join([b"a"] * parts) + b" = '\"'" + after
    with pytest.raises(ConfigError, match=said):
        toml.decode(text, Fabric, where="here")


def test_dots_in_strings_of_several_lines_are_no_key_s() -> None:
    dots = b".a" * 99
    text = b'x = """\n' + dots + b'"' + dots + b"\"\"\"\ny = '''" + dots + b"'" + dots + b"'''"
    with pytest.raises(ConfigError, match=r"missing required field|unknown key"):
        toml.decode(text, Fabric, where="here")
