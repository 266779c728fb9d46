"""Our patch series: take a public root, apply a series to it without fuzz, say what changed.

patches/<upstream>/<base>/ holds series.toml and its patches; patches/README.md describes both.
A root is never written to: every series is applied in a scratch repository of its own.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final, Literal

import msgspec

from lanekit import paths, toml
from lanekit.errors import ConfigError, LaneError, Unreadable

PATCHES: Final = paths.ROOT / "patches"
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
PYTHON: Final = "3.12"  # the interpreter of the images whose wheels are patched


class Refused(LaneError):
    """A step that does not apply, changes nothing, or leaves another tree than recorded."""

    exit_code: ClassVar[int] = 1


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public root. SRC_<name> replaces where it is taken from, not which commit is.

    git or pypi: where it stands. base: a commit of 40 digits, or a version. paths: the only files
    to take of a root that is big or holds more than itself. newer: what REFRESH=1 tries.
    """

    name: str
    base: str
    git: str = ""
    pypi: str = ""
    paths: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()


class Fetched(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A patch that stands in somebody's public file, taken at build time and never kept here.

    The lines between the first that ends with `begin` and the next that is `end`, by their sha256.
    """

    name: str
    git: str
    commit: str
    path: str
    begin: str
    end: str
    sha256: str


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change: a `patch` of ours, an upstream commit to `pick`, or a patch to be `fetched`.

    upstream: issue or pull request and its state. switch: how to turn it off. tested: what was run
    and seen. drop: when it is no longer needed.
    """

    what: str
    why: str
    upstream: str
    tested: str
    drop: str
    patch: str = ""
    pick: str = ""
    fetched: Fetched | None = None
    switch: str = ""

    @property
    def label(self) -> str:
        """What a report calls the step."""
        fetched = f"{self.fetched.name} patch" if self.fetched else ""
        return self.patch or self.pick[:7] or fetched


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text that the file must hold once the series is applied, and must not hold before."""

    path: str
    text: str


class Unrun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a series has yet to show: on which hardware, by which command, the lines to expect."""

    needs: str
    command: str
    expect: str


class Series(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """series.toml. tree: the git tree which the series makes of the base; unrecorded: why not."""

    what: str
    stack: Literal["2026-07", "current"]
    source: Source
    step: tuple[Step, ...]
    tree: str = ""
    unrecorded: str = ""
    gate: tuple[Gate, ...] = ()
    unrun: tuple[Unrun, ...] = ()


class Hunk(msgspec.Struct, frozen=True):
    """A hunk that did not fit where it stands. offset: lines that it moved, 0 if refused."""

    path: str
    number: int
    offset: int

    def __str__(self) -> str:
        """As a report shows it."""
        where = f"{self.path} hunk {self.number}" if self.number else self.path
        return f"{where} moved by {self.offset}" if self.offset else f"{where} refused"


def find(names: Sequence[str] = ()) -> list[Path]:
    """Folders of the series: all, or those whose path under patches/ is one of `names`, or begins
    with one that is none. Raises ConfigError: a name fits no series."""
    folders = [one.parent for one in PATCHES.glob("*/*/series.toml")]
    known = {f"{folder.parent.name}/{folder.name}": folder for folder in folders}
    found = {
        name: [name] if name in known else [key for key in known if key.startswith(name)]
        for name in names
    }
    for name, keys in found.items():
        if not keys:
            raise ConfigError(
                f"no patch series '{name}'", remedy=f"Known: {', '.join(sorted(known)) or 'none'}."
            )
    wanted = {key for keys in found.values() for key in keys} if names else set(known)
    return [known[key] for key in sorted(wanted)]


def load(folder: Path) -> Series:
    """The series of a folder. Raises ConfigError: series.toml is wrong, or it and the folder's
    patches disagree."""
    where = folder / "series.toml"
    series = toml.load(where, Series)
    for fault in _faults(series, folder):
        raise ConfigError(f"{where}: {fault}", remedy="patches/README.md describes the file.")
    return series


def _faults(series: Series, folder: Path) -> Iterator[str]:
    source = series.source
    if bool(source.git) == bool(source.pypi):
        yield "source needs git or pypi, and not both"
    if not re.fullmatch(r"[A-Z][A-Z0-9_]*", source.name):
        yield f"source.name '{source.name}' is no name for SRC_<NAME>"
    if source.git and not COMMIT.fullmatch(source.base):
        yield f"source.base '{source.base}' is not a commit of 40 digits"
    if not source.base.startswith(folder.name.partition("-")[0]):
        yield f"the folder is not named after source.base '{source.base}'"
    if series.tree and not COMMIT.fullmatch(series.tree):
        yield f"tree '{series.tree}' is not a git tree of 40 digits"
    if bool(series.tree) == bool(series.unrecorded):
        yield "needs tree or, where it cannot be known, unrecorded"
    if not series.step:
        yield "no step"
    yield from _step_faults(series, folder)


def _step_faults(series: Series, folder: Path) -> Iterator[str]:
    for number, step in enumerate(series.step, 1):
        if [bool(step.patch), bool(step.pick), bool(step.fetched)].count(True) != 1:
            yield f"step {number} needs one of patch, pick and fetched"
        elif step.pick and not COMMIT.fullmatch(step.pick):
            yield f"step {number} picks '{step.pick}', not a commit of 40 digits"
        elif step.pick and (series.source.pypi or series.source.paths):
            yield f"step {number} picks a commit of a root that has no history"
        elif step.patch and not (folder / step.patch).is_file():
            yield f"step {number} names {step.patch}, which is not in the folder"
        elif step.patch and not step.switch:
            yield f"step {number} ({step.patch}) does not say how to switch it off"
    listed = {step.patch for step in series.step}
    for unlisted in sorted(one.name for one in folder.glob("*.patch") if one.name not in listed):
        yield f"{unlisted} is in the folder and in no step"


def digest(folder: Path) -> str:
    """The sha256 of what a series does, for a manifest: its base and its steps, in their order. Not
    of what it says of itself, so that a word about a test makes no other series of it."""
    series = load(folder)
    total = hashlib.sha256(series.source.base.encode())
    for step in series.step:
        fetched = step.fetched.sha256 if step.fetched else ""
        text = (folder / step.patch).read_bytes() if step.patch else b""
        total.update(f"\n{step.pick}{fetched} ".encode() + hashlib.sha256(text).digest())
    return total.hexdigest()


def hunks(output: str) -> list[Hunk]:
    """The hunks that `git apply --reject --verbose` moved or refused, by its output."""
    found: list[Hunk] = []
    path = ""
    for line in output.splitlines():
        if match := re.match(
            r"(?:Checking|Applying) patch (.+?)(?: with \d+ rejects?)?\.\.\.$", line
        ):
            path = match[1]
        elif match := re.match(r"Hunk #(\d+) succeeded at \d+ \(offset (-?\d+) lines?\)", line):
            found.append(Hunk(path, int(match[1]), int(match[2])))
        elif match := re.match(r"Rejected hunk #(\d+)", line):
            found.append(Hunk(path, int(match[1]), 0))
        elif match := re.match(
            r"error: (.+): (?:No such file|already exists|does not exist)", line
        ):
            found.append(Hunk(match[1], 0, 0))
    return list(dict.fromkeys(found))


def _git(folder: Path, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """git in `folder`, free of the caller's repository and of a person's hooks and identity."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    me = ("-c", "user.name=deepep-lanes", "-c", "user.email=deepep-lanes@example.invalid")
    calm = ("-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null")
    exact = ("-c", "core.autocrlf=false", "-c", "apply.whitespace=nowarn", "-c", "gc.auto=0")
    done = subprocess.run(
        ["git", *me, *calm, *exact, *command],
        cwd=folder,
        env=env | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if check and done.returncode:
        words = " ".join(command[:2])
        raise Unreadable(f"git {words}: {done.stderr.strip() or done.stdout.strip()}")
    return done


def _override(name: str) -> str:
    return os.environ.get(f"SRC_{name}", "")


def _tree(scratch: Path) -> str:
    return _git(scratch, "rev-parse", "HEAD^{tree}").stdout.strip()


@contextmanager
def checkout(source: Source, base: str, picks: Sequence[str] = ()) -> Iterator[Path]:
    """A scratch repository that stands at `base`, removed at the end. Raises Unreadable: the root
    cannot be fetched or read, or does not hold the commits."""
    override = _override(source.name)
    with tempfile.TemporaryDirectory(prefix="patches-") as name:
        scratch = Path(name)
        _git(scratch, "init", "--quiet")
        try:
            _fill(source, base, picks, override, scratch)
        except (LaneError, OSError, KeyError, zipfile.BadZipFile) as error:
            raise Unreadable(
                f"{override or source.git or source.pypi} at {base}: {error}",
                remedy=f"Give a path or a URL that holds it: SRC_{source.name}=...",
            ) from error
        yield scratch


def _fill(source: Source, base: str, picks: Sequence[str], override: str, scratch: Path) -> None:
    place = Path(override)
    if override and place.suffix == ".whl" and place.is_file():
        _commit_files(scratch, lambda: _unpack(place, source.paths, scratch))
    elif override and place.is_dir() and not _is_repository(place):
        _commit_files(scratch, lambda: _copy(place, source.paths, scratch))
    elif source.pypi and not override:
        wheel = download(source.pypi, base)
        _commit_files(scratch, lambda: _unpack(wheel, source.paths, scratch))
    else:
        _from_repository(source, [base, *picks], override or source.git, scratch)


def _commit_files(scratch: Path, fill: Callable[[], object]) -> None:
    fill()
    _git(scratch, "add", "--all", "--force")
    _git(scratch, "commit", "--quiet", "--message", "the public root")


def _unpack(wheel: Path, wanted: Sequence[str], scratch: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch, wanted or None)


def _copy(place: Path, wanted: Sequence[str], scratch: Path) -> None:
    if not wanted:
        shutil.copytree(place, scratch, dirs_exist_ok=True)
    for name in wanted:
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(place / name, scratch / name)


def _is_repository(place: Path) -> bool:
    return (place / ".git").exists() or (
        (place / "HEAD").is_file() and (place / "objects").is_dir()
    )


def download(name: str, version: str) -> Path:
    """The wheel of a distribution, from the index that pip is configured for, kept for later."""
    cache = paths.CACHE / "patches" / f"{name}-{version}"
    if not list(cache.glob("*.whl")):
        download = "-m pip download --quiet --no-deps --only-binary=:all: --implementation=cp"
        tags = [f"--platform=manylinux_{tag}_x86_64" for tag in ("2_34", "2_28", "2_17")]
        wanted = [sys.executable, *download.split(), *tags, "--platform=any"]
        wanted += [f"--python-version={PYTHON}", f"--dest={cache}", f"{name}=={version}"]
        done = subprocess.run(wanted, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unreadable("".join(done.stderr.strip().splitlines()[-1:]) or "pip download")
    return next(cache.glob("*.whl"))


def _from_repository(source: Source, commits: Sequence[str], where: str, scratch: Path) -> None:
    """Take the commits from a repository by sharing its objects; only `paths` are copied out."""
    store = _store(where, commits, lazily=bool(source.paths))
    if source.paths:
        _commit_files(scratch, lambda: _copy_out(store, commits[0], source.paths, scratch))
        return
    git_path = [
        (store / _git(store, "rev-parse", "--git-path", name).stdout.strip()).resolve()
        for name in ("objects", "shallow")
    ]
    (scratch / ".git/objects/info/alternates").write_text(f"{git_path[0]}\n")
    if git_path[1].is_file():
        shutil.copy(git_path[1], scratch / ".git/shallow")
    _git(scratch, "checkout", "--quiet", "--detach", commits[0])


def _store(where: str, commits: Sequence[str], *, lazily: bool) -> Path:
    """A repository on this machine that holds the commits: the one named, or our copy of it."""
    local = Path(where)
    store = local if local.is_dir() else _fetched(where, commits, lazily=lazily)
    for commit in commits:
        if _git(store, "cat-file", "-e", f"{commit}^{{commit}}", check=False).returncode:
            raise Unreadable(f"does not hold commit {commit}")
    return store


def _copy_out(store: Path, commit: str, wanted: Sequence[str], scratch: Path) -> None:
    archive = scratch / ".git/root.tar"
    _git(store, "archive", "--format=tar", f"--output={archive}", commit, "--", *wanted)
    # Not tarfile: Debian 12's Python 3.11.2 has no extraction filter yet; tar refuses `..` itself.
    subprocess.run(["tar", "-xf", archive, "-C", scratch], check=True)


def _fetched(url: str, commits: Sequence[str], *, lazily: bool) -> Path:
    """A repository of our own that holds the commits of a remote one, and their parents."""
    cache = paths.CACHE / "patches" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.git"
    if not cache.is_dir():
        cache.mkdir(parents=True)
        _git(cache, "init", "--quiet", "--bare")
        _git(cache, "remote", "add", "origin", url)
    held = [_git(cache, "cat-file", "-e", f"{one}^{{commit}}", check=False) for one in commits]
    missing = [one for one, done in zip(commits, held, strict=True) if done.returncode]
    if missing:
        some = ["--filter=blob:none"] if lazily else []
        _git(cache, "fetch", "--quiet", "--no-tags", "--depth=2", *some, "origin", *missing)
    return cache


def resolve(source: Source, ref: str) -> str:
    """The commit of a ref of the root, or the version itself. Raises Unreadable: there is no such
    ref."""
    if source.pypi or COMMIT.fullmatch(ref):
        return ref
    where = _override(source.name) or source.git
    # In full: "main" alone is also every other repository's that a copy keeps, refs/remotes/*/main.
    names = (f"refs/heads/{ref}", f"refs/tags/{ref}", f"refs/tags/{ref}^{{}}")
    listed = _git(paths.ROOT, "ls-remote", where, *names).stdout.split()
    if not listed:
        raise Unreadable(f"{where} has no ref {ref}", remedy="Correct `newer` in series.toml.")
    return listed[-2]


def _pick(scratch: Path, commit: str) -> str:
    """Cherry-pick; returns why it was refused, or nothing."""
    # Where upstream moved the lines since, a second application can fit, and duplicate them.
    ancestor = _git(scratch, "merge-base", "--is-ancestor", commit, "HEAD", check=False)
    if not ancestor.returncode:
        return "changes nothing, it is already there"
    done = _git(scratch, "cherry-pick", commit, check=False)
    if not done.returncode:
        return ""
    files = _git(scratch, "diff", "--name-only", "--diff-filter=U").stdout.split()
    _git(scratch, "reset", "--quiet", "--hard")
    return f"conflicts in {', '.join(files)}" if files else "changes nothing, it is already there"


def _apply(scratch: Path, patch: Path) -> list[Hunk]:
    """Apply where every hunk fits somewhere; returns the hunks that moved, or those refused. Raises
    Refused: git cannot read the patch."""
    trial = _git(scratch, "apply", "--reject", "--verbose", str(patch), check=False)
    found = hunks(trial.stdout + trial.stderr)
    refused = [hunk for hunk in found if not hunk.offset]
    _git(scratch, "reset", "--quiet", "--hard")
    _git(scratch, "clean", "--quiet", "--force", "-d", "-x")
    if refused or trial.returncode:
        if not refused:
            raise Refused(f"{patch.name}: {trial.stderr.strip()}", remedy="Write it again.")
        return refused
    _git(scratch, "apply", "--index", str(patch))
    _git(scratch, "commit", "--quiet", "--allow-empty", "--message", patch.name)
    return found


@contextmanager
def _patch(folder: Path, step: Step) -> Iterator[Path]:
    """The patch of a step: a file of the series, or what is fetched for the moment. Raises
    Unreadable: the patch cannot be fetched. Refused: it is another one than recorded."""
    if step.fetched is None:
        yield folder / step.patch
        return
    where = step.fetched
    place = _override(where.name) or where.git
    try:
        store = _store(place, [where.commit], lazily=True)
        text = _git(store, "show", f"{where.commit}:{where.path}").stdout
    except Unreadable as error:
        remedy = f"Give a path or a URL that holds it: SRC_{where.name}=..."
        raise Unreadable(f"{place}: {error.message}", remedy=remedy) from error
    body = re.search(
        rf"^.*{re.escape(where.begin)}$\n(.*?)^{re.escape(where.end)}$", text, re.M | re.S
    )
    found = hashlib.sha256(body[1].encode()).hexdigest() if body else "nothing"
    if body is None or found != where.sha256:
        message = f"{step.label}: sha256 is {found}, series.toml records {where.sha256}"
        raise Refused(message, remedy="Read what changed there before recording it.")
    with tempfile.TemporaryDirectory(prefix="patches-") as name:
        patch = Path(name) / "fetched.patch"
        patch.write_text(body[1])
        yield patch


def apply(folder: Path, series: Series, scratch: Path) -> Iterator[str]:
    """Apply a series to a scratch repository at its base; yields a line per step. Raises Refused: a
    step does not apply as it stands, changes nothing, or a gate does not hold."""
    for gate in series.gate:
        if _holds(scratch, gate):
            raise Refused(f"{gate.path} holds '{gate.text}' before any step", remedy=_NO_PROOF)
    for step in series.step:
        before = _tree(scratch)
        if step.pick:
            if reason := _pick(scratch, step.pick):
                raise Refused(f"{step.label} {reason}", remedy="Take the step out.")
        else:
            with _patch(folder, step) as patch:
                moved = _apply(scratch, patch)
            if moved:
                raise Refused(f"{step.label}: {'; '.join(map(str, moved))}", remedy=_REGENERATE)
        if _tree(scratch) == before:
            raise Refused(f"{step.label} changes nothing", remedy="Take the step out.")
        counted = _git(scratch, "show", "--shortstat", "--format=").stdout.strip()
        yield f"{'picked' if step.pick else 'applied'} {step.label}: {counted}"
    for gate in series.gate:
        if not _holds(scratch, gate):
            raise Refused(f"{gate.path} does not hold '{gate.text}'", remedy=_NO_PROOF)


_REGENERATE: Final = "The base is pinned, so every hunk has to fit where it stands: write it again."
_NO_PROOF: Final = "The gate proves nothing: correct it, or the step that should make it true."


def _holds(scratch: Path, gate: Gate) -> bool:
    path = scratch / gate.path
    return path.is_file() and gate.text in path.read_text(errors="replace")


def judge(folder: Path, out: Path | None = None) -> Iterator[str]:
    """Apply one series to its public root and compare the tree; yields a line per step.

    out: where to leave the patched files, in a folder named like the series. Raises ConfigError:
    the series is wrong. Unreadable: its root is. Refused: it does not apply.
    """
    series = load(folder)
    target = out / folder.parent.name / folder.name if out is not None else None
    if target is not None and target.exists():
        raise ConfigError(f"{target} is there already", remedy="Remove it, or give another OUT=.")
    picks = [step.pick for step in series.step if step.pick]
    with checkout(series.source, series.source.base, picks) as scratch:
        yield from apply(folder, series, scratch)
        tree = _tree(scratch)
        if series.tree and tree != series.tree:
            raise Refused(
                f"the tree is {tree}, series.toml records {series.tree}",
                remedy="Record the new tree once the steps were tested again.",
            )
        known = "as recorded" if series.tree else f"not recorded: {series.unrecorded}"
        yield f"tree {tree[:12]} {known}; series {digest(folder)[:12]}"
        if target is not None:
            shutil.copytree(scratch, target, ignore=shutil.ignore_patterns(".git"))
            yield f"left in {target}"


def refresh(folder: Path) -> Iterator[str]:
    """Try a series on the newer bases of its root; yields a line per base and step. Raises
    ConfigError: the series is wrong. Unreadable: a base is."""
    series = load(folder)
    picks = [step.pick for step in series.step if step.pick]
    if not series.source.newer:
        yield "no newer base named"
    for ref in series.source.newer:
        base = resolve(series.source, ref)
        yield f"on {ref} ({base[:12]}):"
        with checkout(series.source, base, picks) as scratch:
            for step in series.step:
                yield f"  {step.label}: {_try(folder, step, scratch)}"


def _try(folder: Path, step: Step, scratch: Path) -> str:
    if step.pick:
        return _pick(scratch, step.pick) or "fits"
    with _patch(folder, step) as patch:
        found = _apply(scratch, patch)
    return "; ".join(map(str, found)) or "fits"


def run(args: argparse.Namespace) -> int:
    """Judge or refresh every series; prints a report. 0: every series applies. 1: one is refused.
    2: one could not be read or fetched."""
    codes, out = {0}, Path(args.out) if args.out else None
    for folder in find(args.series):
        print(f"{folder.parent.name}/{folder.name}", flush=True)
        lines = refresh(folder) if args.refresh else judge(folder, out)
        try:
            for line in lines:
                print(f"  {line}", flush=True)
        except LaneError as error:
            print(f"  error: {error.message}\n    {error.remedy}", file=sys.stderr, flush=True)
            codes.add(error.exit_code)
    return 1 if 1 in codes else max(codes)
