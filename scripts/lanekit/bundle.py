"""Pack what a machine without network, registry or Docker needs to run one lane.

The archive holds wheels for three environments (server, aiperf, lanekit), this checkout and the
installer. It is written as parts of a given size, for media and copy windows that take no more.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final, cast

import msgspec

from lanekit import contract, drop, interrupt, paths, pins, spec
from lanekit.errors import ConfigError, EnvironmentFailed, Interrupted

FORMAT: Final = 1
ARCHIVE: Final = "bundle.tar"
SUMS: Final = "bundle.sha256"
SCRATCH: Final = ".bundle-"
INSTALLER: Final = "bundle-install.sh"
ENVIRONMENT_INSTALLER: Final = "bundle_environment.py"
PYTHON: Final = "3.12"
NEWEST_GLIBC: Final = 35  # minor of 2.35, Ubuntu 22.04; one of vLLM's wheels needs 2.31
# Environments are made from wheels there, so the tool that makes them from locks stays out (20 MB).
# setuptools does not: an engine imports it at run time, and one whose bundle lacked it ended in "No
# module named 'setuptools'" (vLLM 0.20.2 and SGLang 0.5.11 on an H200, 2026-12-01).
NOT_NEEDED_THERE: Final = frozenset({"uv"})
BLOCK: Final = 1 << 20


@dataclass(frozen=True)
class Bundle:
    """What was written. size: bytes of the archive, all parts together."""

    parts: tuple[Path, ...]
    sums: Path
    installer: Path
    size: int


@dataclass(frozen=True)
class Environment:
    """One environment of the bundle.

    carried: pinned requirements with their hashes, as the lock writes them. linked: what the
    machine has already, `name==version`, or `name` where any version will do. extra: wheels that
    come in no lock.
    """

    carried: tuple[str, ...]
    linked: tuple[str, ...]
    extra: tuple[Path, ...] = ()


def plan_environments(
    lane: str, profile: str, *, deepep_wheel: Path | None, present: Path | None
) -> dict[str, Environment]:
    """What each environment of the bundle carries and links, by name.

    present: a file like `pip freeze` of what the machine already has, which is linked there instead
    of carried. Raises ConfigError: the lane does not run there, or a wheel or file that it needs is
    not there.
    """
    if present and not present.is_file():
        raise ConfigError(
            f"PRESENT: no file at {present}",
            remedy="Give a file that holds what `pip freeze` prints on that machine.",
        )
    found = spec.lane(lane)
    if profile not in found.profiles or not found.profiles[profile].environment:
        fits = [name for name, setting in found.profiles.items() if setting.environment]
        raise ConfigError(
            f"lane {lane} has no environment of its own on profile {profile}: nothing to bundle",
            remedy=f"Choose PROFILE= one of: {', '.join(fits) or 'none'}.",
        )
    if tools := found.profiles[profile].tools:
        raise ConfigError(
            f"lane {lane} needs {', '.join(tools)} beside its engine, and a bundle holds no tools",
            remedy="Take its images instead, or bundle the engine's own lane.",
        )
    locks = {"server": found.profiles[profile].environment, "lanekit": "lanekit"}
    if found.workload.driver == "aiperf":
        locks["aiperf"] = "aiperf"
    has = read_present(present.read_text() if present else "")
    planned = {name: _environment(paths.LOCKS / f"{lock}.txt", has) for name, lock in locks.items()}
    asked = [arm.contracts[profile] for arm in found.arms.values() if profile in arm.contracts]
    needed = spec.profile(profile).gpus > 0 and any(map(contract.builds, asked))
    planned["server"] = _with_deep_ep(planned["server"], deepep_wheel, has, needed=needed)
    return planned


def _with_deep_ep(
    server: Environment, deepep_wheel: Path | None, present: Mapping[str, str], *, needed: bool
) -> Environment:
    """The environment with deep_ep, which is in no lock: a wheel, or linked where it is present."""
    if deepep_wheel is not None:
        if deepep_wheel.suffix != ".whl" or not deepep_wheel.is_file():
            raise ConfigError(
                f"DEEPEP_WHEEL: no wheel at {deepep_wheel}",
                remedy="Give the path of a deep_ep-*.whl built for the machine's Python.",
            )
        return replace(server, extra=(deepep_wheel,))
    if "deep-ep" in present:
        return replace(server, linked=(*server.linked, "deep-ep"))
    if needed:
        raise ConfigError(
            "this lane needs deep_ep, which no package index carries",
            remedy="Build it (images/transport-v2/README.md) and name it: DEEPEP_WHEEL=path.whl",
        )
    return server


def _environment(lock: Path, present: Mapping[str, str]) -> Environment:
    if not lock.is_file():
        raise ConfigError(
            f"no lock {lock.name} in locks/", remedy="See locks/README.md for how one is resolved."
        )
    carried, linked = [], []
    for requirement in pins.requirements(lock.read_text()):
        name, version = name_and_version(requirement)
        if name in NOT_NEEDED_THERE:
            continue
        if present.get(name) in ("", version):
            linked.append(f"{name}=={version}" if present[name] else name)
        else:
            carried.append(requirement)
    return Environment(tuple(carried), tuple(linked))


def name_and_version(requirement: str) -> tuple[str, str]:
    """Normalised name and pinned version. Raises ConfigError where nothing is pinned."""
    found = re.match(r"([\w.-]+)(?:\[[^]]*\])?==([^\s;\\]+)", requirement)
    if found is None:
        raise ConfigError(
            f"not a pinned requirement: {requirement.splitlines()[0]!r}",
            remedy="A lock pins every package: resolve it again (locks/README.md).",
        )
    return normalised(found[1]), found[2]


def normalised(name: str) -> str:
    """The name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_present(text: str) -> dict[str, str]:
    """Name -> version of a `pip freeze`; the version is empty for a line that is a name alone."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([\w.-]+)(?:==(\S+))?", line.split("#")[0].strip())
        if match:
            found[normalised(match[1])] = match[2] or ""
    return found


def pack(
    environments: Mapping[str, Environment],
    about: Mapping[str, object],
    *,
    out: Path,
    part_bytes: int,
) -> Bundle:
    """Fetch the wheels, lay the bundle out and write it into `out` as parts."""
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob(f"{SCRATCH}*"):  # of a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=SCRATCH) as scratch:
        root = Path(scratch) / "bundle"
        (root / "wheels").mkdir(parents=True)
        evidence = _own_wheel(Path(scratch))
        for name, environment in environments.items():
            extra = (*environment.extra, *((evidence,) if name == "server" else ()))
            _lay_out(root, name, environment, extra, Path(scratch) / f"fetched-{name}")
        _copy_checkout(root / "tree")
        shutil.copy(_resource(ENVIRONMENT_INSTALLER), root)
        names = {"environments": sorted(environments)}
        (root / "bundle.json").write_text(json.dumps({**about, **names}, indent=1) + "\n")
        sums = _write_parts(root, out, part_bytes)
    installer = Path(shutil.copy(_resource(INSTALLER), out))
    manifest = out / SUMS
    manifest.write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    parts = tuple(out / name for name in sums if name != ARCHIVE or len(sums) == 1)
    return Bundle(parts, manifest, installer, sum(part.stat().st_size for part in parts))


def _lay_out(
    root: Path, name: str, environment: Environment, extra: Iterable[Path], scratch: Path
) -> None:
    """Put an environment's wheels into wheels/ and its two lists beside them."""
    wheels = [*fetch(environment.carried, scratch), *extra]
    for wheel in wheels:
        if not (root / "wheels" / wheel.name).exists():
            shutil.copy(wheel, root / "wheels")
    listed = "".join(f"{wheel.name}\n" for wheel in wheels)
    (root / f"{name}.wheels").write_text(listed)
    (root / f"{name}.linked").write_text("".join(f"{item}\n" for item in environment.linked))


def fetch(carried: Iterable[str], folder: Path) -> list[Path]:
    """Download the wheels of pinned, hashed requirements for the target's Python. Raises
    EnvironmentFailed: one of them could not be had."""
    folder.mkdir(parents=True)
    listed = "\n".join(carried)
    if not listed:
        return []
    (folder / "requirements.txt").write_text(listed + "\n")
    _uv(
        *("tool", "run", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
        *("--only-binary=:all:", "--disable-pip-version-check", *_target_tags()),
        *("--dest", str(folder), "--requirement", str(folder / "requirements.txt")),
    )
    return sorted(folder.glob("*.whl"))


def _target_tags() -> list[str]:
    """The target as pip is told: it compares tags literally, so each older glibc is named."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 4, -1)]
    tags += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    abis = [f"cp{PYTHON.replace('.', '')}", "abi3", "none"]
    told = ["--python-version", PYTHON, "--implementation", "cp"]
    told += [item for abi in abis for item in ("--abi", abi)]
    return told + [item for tag in tags for item in ("--platform", tag)]


def _own_wheel(scratch: Path) -> Path:
    """The evidence hook as a wheel."""
    source = paths.ROOT / "scripts" / "evidence"
    _uv("build", "--quiet", "--wheel", "--out-dir", str(scratch / "own"), str(source))
    (wheel,) = (scratch / "own").glob("*.whl")
    return wheel


def _uv(*arguments: str) -> None:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv") or "uv"
    done = subprocess.run([uv, *arguments], text=True, capture_output=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith(("ERROR", "error"))]
        raise EnvironmentFailed(
            f"uv {arguments[0]} failed: {' / '.join(errors[-2:]) or done.stderr[-300:].strip()}",
            remedy="Bundles are made where the package index answers; check UV_ and PIP_ settings.",
        )


def _copy_checkout(target: Path) -> None:
    """The files that git knows, as they are now; past drops and tests stay. The published figures
    go along: the report at the end of a run sets its rows beside them."""
    ask = ["git", "-C", str(paths.ROOT), "ls-files", "-z", "--", ":!results/*/**", ":!tests/"]
    listed = subprocess.run(ask, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise ConfigError("this is no git checkout", remedy="Make the bundle from a clone.")
    target.mkdir()
    files = {}
    for name in filter(None, listed.stdout.split("\0")):
        source = paths.ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)
            if not name.startswith("results/"):  # a run renews its tables
                files[name] = drop.sha256(target / name)
    (target / paths.PROVENANCE).write_bytes(msgspec.json.encode(drop.Provenance(drop.git(), files)))


def _resource(name: str) -> Path:
    return Path(__file__).parent / "resources" / name


def _write_parts(root: Path, out: Path, part_bytes: int) -> dict[str, str]:
    """Write the tar as parts; returns name -> sha256 of every part and of the whole, last. Parts
    that do not make up a whole do not stay."""
    _remove_parts(out)
    try:
        writer = PartWriter(out, part_bytes)
        with tarfile.open(mode="w|", fileobj=cast(IO[bytes], writer)) as tar:
            tar.add(root, arcname="bundle", filter=_anonymous)
        return writer.close()
    except BaseException:
        _remove_parts(out)
        raise


def _remove_parts(out: Path) -> None:
    for old in (*out.glob(f"{ARCHIVE}*"), out / SUMS):
        old.unlink(missing_ok=True)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The entry without who made it and when, so that equal input gives an equal archive."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


class PartWriter:
    """A stream that starts a new file whenever one is full, and knows every checksum."""

    def __init__(self, out: Path, part_bytes: int) -> None:
        self._out, self._limit = out, part_bytes
        self._whole, self._part = hashlib.sha256(), hashlib.sha256()
        self._sums: dict[str, str] = {}
        self._file: IO[bytes] | None = None
        self._room = 0

    def write(self, data: bytes) -> int:
        """Append to the current part, going on in the next."""
        self._whole.update(data)
        rest = memoryview(data)
        while rest:
            if self._file is None:
                self._start()
            piece = rest[: self._room] if self._limit else rest
            assert self._file is not None
            self._file.write(piece)
            self._part.update(piece)
            self._room -= len(piece)
            rest = rest[len(piece) :]
            if self._limit and not self._room:
                self._finish()
        return len(data)

    def _start(self) -> None:
        name = f"{ARCHIVE}.{len(self._sums):03d}" if self._limit else ARCHIVE
        self._file = (self._out / name).open("wb")
        self._part, self._room = hashlib.sha256(), self._limit

    def _finish(self) -> None:
        if self._file is not None:
            self._file.close()
            self._sums[Path(self._file.name).name] = self._part.hexdigest()
            self._file = None

    def close(self) -> dict[str, str]:
        """End the last part; name -> sha256, the whole under the archive's own name at the end."""
        self._finish()
        return {**self._sums, ARCHIVE: self._whole.hexdigest()}


def run(args: argparse.Namespace) -> int:
    """Make the bundle and say what to do with it."""
    wheel = Path(args.deepep_wheel) if args.deepep_wheel else None
    present = Path(args.present) if args.present else None
    planned = plan_environments(args.lane, args.profile, deepep_wheel=wheel, present=present)
    if args.plan:
        for name, needs in planned.items():
            carried = [*map("==".join, map(name_and_version, needs.carried))]
            print(f"{name} carries: {' '.join([*carried, *(path.name for path in needs.extra)])}")
            print(f"{name} links: {' '.join(needs.linked) or 'nothing'}")
        return 0
    about = {"format": FORMAT, "lane": args.lane, "profile": args.profile, "python": PYTHON}
    try:
        with interrupt.raising():
            made = pack(planned, about, out=Path(args.out), part_bytes=args.part_mib << 20)
    except Interrupted as error:
        raise Interrupted(error.message, remedy="No part of it stays: make it again.") from error
    print(f"{made.size / 1e6:.0f} MB in {len(made.parts)} part(s) in {made.sums.parent}/")
    print(f"Copy the folder, then there: sh {INSTALLER} --to DIR -- run {args.lane}")
    return 0
