"""pins.toml: strictly read, no version twice, every argument declared and used."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from lanekit import images, paths, pins
from lanekit.errors import ConfigError

Load = Callable[[str], pins.Pins]
HEX64 = "ab" * 32
GOOD = f"""
stacks = ["old", "new"]

[pin.base]
kind = "image"
source = "registry.example/base"
what = "a base"
newest = "2"
newest_on = "2026-11-30"
[pin.base.both]
version = "1"
digest = "sha256:{HEX64}"
cite = "its release page"

[pin.file]
kind = "archive"
source = "https://example.org/file-{{version}}.tar.gz"
what = "a file"
newest = "1.5.0"
newest_on = "2026-11-30"
[pin.file.stack.old]
version = "1.4.0"
sha256 = "{HEX64}"
cite = "its release page"
[pin.file.stack.new]
version = "1.5.0"
unrecorded = "nobody states it"

[pin.tool]
kind = "pypi"
source = "tool"
what = "a tool"
newest = "3.1"
newest_on = "2026-11-30"
[pin.tool.both]
lock = "tool.txt"

[pin.code]
kind = "git"
source = "https://example.org/code.git"
what = "some code"
newest = "aaaaaaa"
newest_on = "2026-11-30"
[pin.code.both]
commit = "{"a" * 40}"
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    locks = tmp_path / "locks"
    locks.mkdir()
    (locks / "tool.txt").write_text("other==9\ntool==3.1 \\\n    --hash=sha256:00\n")
    monkeypatch.setattr("lanekit.paths.LOCKS", locks)

    def loaded(text: str) -> pins.Pins:
        path = tmp_path / "pins.toml"
        path.write_text(text)
        return pins.load(path, locks)

    return loaded


def test_every_field_becomes_an_argument(load: Load) -> None:
    made = pins.arguments(load(GOOD), "old")
    assert made["BASE_DIGEST"] == f"sha256:{HEX64}"
    assert made["FILE_URL"] == "https://example.org/file-1.4.0.tar.gz"
    assert made["FILE_SHA256"] == HEX64
    assert made["TOOL_VERSION"] == "3.1"
    assert made["CODE_COMMIT"] == "a" * 40


def test_an_unrecorded_checksum_is_an_empty_argument_never_a_missing_one(load: Load) -> None:
    assert pins.arguments(load(GOOD), "new")["FILE_SHA256"] == ""


def test_the_table_says_what_lags_and_what_is_not_recorded(load: Load) -> None:
    lines = {line.split()[0]: line for line in pins.table(load(GOOD)).splitlines()}
    assert "lags: 2 on 2026-11-30" in lines["base"]
    assert "checksum not recorded" in lines["file"]
    assert "lags" not in lines["tool"]
    assert "lags" not in lines["code"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (f'sha256 = "{HEX64}"', 'sha256 = "abc"', "not 64 hex"),
        (f'sha256 = "{HEX64}"', "", "needs exactly one of sha256, unrecorded"),
        ('unrecorded = "nobody states it"', f'unrecorded = "x"\nsha256 = "{HEX64}"', "exactly one"),
        (f'digest = "sha256:{HEX64}"', 'digest = "latest"', "is not sha256:"),
        (f'commit = "{"a" * 40}"', 'commit = "aaaaaaa"', "not 40 hex"),
        ('cite = "its release page"', "", "say in `cite`"),
        ('lock = "tool.txt"', 'lock = "tool.txt"\nversion = "3.1"', "do not repeat"),
        ('lock = "tool.txt"', 'lock = "gone.txt"', "gone.txt is missing"),
        ('version = "1.4.0"', "", "version is missing"),
        ("[pin.file.stack.old]", "[pin.file.stack.odl]", "no such stack"),
        ("[pin.file.stack.old]", '[pin.file.both]\nversion = "1"\nunrecorded = "x"\n'
         "[pin.file.stack.old]", "both and stack"),
        ('kind = "git"', 'kind = "svn"', "svn"),
        ('what = "some code"', 'what = "some code"\nbranch = "main"', "unknown key 'branch'"),
    ],
)  # fmt: skip
def test_a_broken_pin_is_refused(load: Load, old: str, new: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as error:
        load(GOOD.replace(old, new, 1))
    assert said in error.value.message


def test_a_lock_without_the_package_is_refused(load: Load) -> None:
    found = load(GOOD.replace('source = "tool"', 'source = "too"'))
    with pytest.raises(ConfigError, match="does not hold too"):
        pins.arguments(found, "old")


def test_an_unknown_stack_names_the_known_ones(load: Load) -> None:
    with pytest.raises(ConfigError) as error:
        pins.arguments(load(GOOD), "today")
    assert "old, new" in error.value.remedy


KNOWN = {"NCCL_VERSION": "2", "EFA_URL": "u"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM base\nARG NCCL_VERSION=2\nRUN echo $NCCL_VERSION", "has a default"),
        ("FROM base\nARG NCCL_VERSION\nRUN echo", "never used"),
        ("FROM base\nARG NCCL_VERSION\nFROM base\nRUN echo $NCCL_VERSION", "never used"),
        ("FROM base\nARG NCCL_VERSION\n# ${NCCL_VERSION}\nRUN echo", "never used"),
        ("FROM base\nARG NCCL_VERSION EFA_URL\nRUN echo $NCCL_VERSION", "EFA_URL is declared"),
        ("FROM base\nARG MPI_VERSION\nRUN echo $MPI_VERSION", "is no pin's field"),
        ("FROM ubuntu:24.04\nRUN echo", "name a bake context"),
        ("FROM base\nRUN pip install torch==2.11.0", "'2.11.0' belongs"),
        ("FROM base\nRUN pip install wheel==0.45", "'0.45' belongs"),
        ("FROM base\nRUN pip install wheel[x]==45", "'45' belongs"),
        ("FROM base\nRUN curl https://example.org/installer-1.50.tar.gz", "'1.50' belongs"),
        ("FROM base\nRUN git checkout v2.6", "'v2.6' belongs"),
        ("FROM base\nRUN git checkout b306af0", "'b306af0' belongs"),
        (f"FROM base\nRUN git checkout {'a' * 40}", "belongs into pins.toml"),
        (f"FROM base\nRUN echo {HEX64}", "belongs into pins.toml"),
    ],
)
def test_the_lint_finds_what_breaks_a_rule(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "Dockerfile").write_text(text + "\n")
    assert [f for f in pins.lint(tmp_path, KNOWN) if said in f.what]


def test_the_lint_lets_prose_and_proper_use_stand(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        "# 2.30.4 did this (2026-11-30)\nFROM base\nARG NCCL_VERSION EFA_URL\n"
        'RUN echo "${NCCL_VERSION}" $EFA_URL 127.0.0.1\n'
        "RUN apt-get install python3 libnuma1 libhwloc15 && useradd --uid 10001 defaced\n"
    )
    assert pins.lint(tmp_path, KNOWN) == []


def test_the_repository_keeps_its_own_rules() -> None:
    found = pins.load()
    known = {k: v for stack in found.stacks for k, v in pins.arguments(found, stack).items()}
    assert pins.lint(images.IMAGES, known) == []


def test_a_commit_that_a_series_starts_from_is_the_pinned_one() -> None:
    """A series names its base itself, so that it can be applied without an image."""
    bases: dict[str, set[str]] = {}
    for path in (paths.ROOT / "patches").glob("*/*/series.toml"):
        source = tomllib.loads(path.read_text())["source"]
        bases.setdefault(source.get("git", ""), set()).add(source["base"])
    for name, pin in pins.load().pin.items():
        if pin.kind == "git":
            values = [pin.both] if pin.both else [*pin.stack.values()]
            commits = {value.commit for value in values}
            assert commits <= bases[pin.source.removesuffix(".git")], name


def test_packages_pinned_twice_are_equal() -> None:
    """A lock that names NCCL or NVSHMEM names a version that some stack pins."""
    found = pins.load()
    for name in ("nccl", "nvshmem"):
        pinned = {v.version for s in found.stacks if (v := pins.of_stack(found, s).get(name))}
        for lock in (
            *paths.LOCKS.glob("*-cu130.txt"),
            *paths.LOCKS.glob("*-current.txt"),
        ):
            if f"{found.pin[name].source}==" in lock.read_text():
                assert pins.locked(lock, found.pin[name].source) in pinned, lock
