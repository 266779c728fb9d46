"""The drop of a run, written as the run goes: a kill at any moment leaves a readable one."""

import contextlib
import datetime
import errno
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from lanekit import paths, reading
from lanekit.errors import ConfigError, LaneError, Unreadable, saying
from lanekit.manifest import SCHEMA, Manifest, Process, Row, State
from lanekit.plan import FILES, Plan, inherited, is_secret, public

MANIFEST: Final = "manifest.json"
VERDICT: Final = "verdict.json"
RESERVE: Final = ".reserve"  # given back when the disk is full, so that the end can be recorded
ENDS: Final = ("complete", "failed", "interrupted")
ROOM: Final = 128 * 1024
SCRATCH: Final = "lane-"  # how a run's scratch folder begins


class Drop:
    """A drop being written. A change of the manifest reaches the disk before the run goes on."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def create(cls, plan: Plan) -> "Drop":
        """Make the folder and the first manifest. Raises ConfigError: the folder cannot be made or
        written."""
        path = Path(plan.drop)
        try:
            for folder in ("logs", "host"):
                (path / folder).mkdir(parents=True, exist_ok=folder != "logs")
            (path / RESERVE).write_bytes(b"\0" * 65536)
            for name, text in plan.files.items():
                (path / FILES).mkdir(exist_ok=True)
                (path / FILES / name).write_text(text)
        except OSError as error:
            raise ConfigError(
                f"cannot write the drop {path}: {error.strerror}",
                remedy="Choose a writable folder with enough room: RESULTS=DIR.",
            ) from error
        drop = cls(path, _first(plan))
        drop.save()
        return drop

    def log(self, host: str, role: str) -> Path:
        """Where the log of a role on a host goes."""
        return self.path / "logs" / f"{host}-{role}.log"

    def state(self, state: State, failure: str | None = None) -> None:
        """Record how far the run came."""
        self.manifest.state = state
        if state not in ENDS:
            self.manifest.stage = state
        self.manifest.failure = failure or self.manifest.failure
        if state in ENDS:
            self.manifest.ended = _now()
        self.save()

    def started(self, process: Process) -> None:
        """Record a process before anything else happens, so that a later run can end it."""
        self.manifest.processes.append(process)
        self.save()

    def timing(self, phase: str, seconds: float) -> None:
        """Record what a phase took."""
        self.manifest.timings[phase] = round(seconds, 3)
        self.save()

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the drop whole or not at all."""
        atomic(self.path / name, content)

    def amend(self, name: str, **fields: Any) -> None:
        """Add fields to a JSON file of the drop."""
        found = reading.decoded(reading.small(self.path / name), dict[str, Any], name)
        self.write(name, msgspec.json.format(msgspec.json.encode(found | fields)))

    def require_room(self) -> None:
        """Notice a full disk while the run goes: an engine whose log is cut serves on for hours.
        Raises LaneError: the drop's file system is full."""
        if shutil.disk_usage(self.path).free < ROOM:
            raise LaneError(
                f"the disk of {self.path} is full: {os.strerror(errno.ENOSPC)}",
                remedy="Free some room, or choose another folder with RESULTS=DIR; run it again.",
            )

    def seal(self) -> None:
        """Record the sha256 of every file: from here on the drop is complete."""
        self.give_reserve_back()
        names = (p.relative_to(self.path) for p in sorted(self.path.rglob("*")) if p.is_file())
        kept = [name for name in names if str(name) not in (MANIFEST, VERDICT)]
        self.manifest.files = {str(name): sha256(self.path / name) for name in kept}
        self.state("complete")

    def give_reserve_back(self) -> None:
        """Free the reserved block."""
        (self.path / RESERVE).unlink(missing_ok=True)

    def save(self) -> None:
        """Write the manifest whole or not at all."""
        atomic(self.path / MANIFEST, msgspec.json.format(msgspec.json.encode(self.manifest)))


def read(path: Path) -> Manifest:
    """The manifest of a drop, which may be anybody's. Raises Unreadable: it is missing, no regular
    file or too large, is not JSON, lacks a field, has a schema of another time, or names a file
    outside the drop."""
    where = path / MANIFEST
    manifest = reading.decoded(reading.small(where), Manifest, str(where))
    if manifest.schema != SCHEMA:
        raise Unreadable(
            f"{where}: schema {manifest.schema}, this harness reads {SCHEMA}",
            remedy="Use the harness the drop was made with; its git commit is in the manifest.",
        )
    for name in manifest.files:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name or not name:
            raise Unreadable(f"{where}: names a file outside the drop: {name!r}", remedy="Forged.")
    return manifest


def sha256(path: Path) -> str:
    """The sha256 of a file, in hex. Raises Unreadable: it cannot be read."""
    with saying(path, "Check the file.", Unreadable), path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def boot() -> str:
    """This boot of the machine: PIDs mean nothing beyond it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _first(plan: Plan) -> Manifest:
    import psutil  # noqa: PLC0415  (keeps `lanekit verify` free of it)

    here = Process(os.getpid(), float(psutil.Process().create_time()), "runner")
    known = inherited(plan)
    return Manifest(
        row=Row(plan.lane, plan.arm, plan.profile, tuple(plan.cells)),
        stack=plan.stack,
        state="planned",
        started=_now(),
        plan=public(plan),
        git=git(),
        environment=public({k: v for k, v in known.items() if not is_secret(k)}),
        runner=here,
        boot=boot(),
        patches=plan.patches,
        images=plan.containers.images if plan.containers else {},
    )


class Provenance(msgspec.Struct, frozen=True):
    """Where a bundle's checkout came from. files: path in it -> sha256, of all it carried."""

    git: dict[str, str]
    files: dict[str, str]


def git() -> dict[str, str]:
    """Commit and cleanliness of the checkout, or of the one a bundle was made from; else empty.

    A bundle that was changed since is as unclean as a checkout is: until 2026-11-30 it said what
    it was made from, and a line edited or a file added on the machine with the GPUs left no trace.
    """
    with contextlib.suppress(OSError, msgspec.DecodeError):
        text = (paths.ROOT / paths.PROVENANCE).read_bytes()
        known = msgspec.json.decode(text, type=Provenance)
        carried = ((paths.ROOT / name, was) for name, was in known.files.items())
        kept = all(path.is_file() and sha256(path) == was for path, was in carried)
        kept = kept and _carried() <= known.files.keys()
        return known.git if kept else known.git | {"dirty": "yes"}
    said = asked_of_git("status", "--porcelain=v2", "--branch", "-uno") or ""
    commit = re.match(r"# branch\.oid ([0-9a-f]{40,64})$", said, re.M)
    if commit is None:
        return {}
    return {"commit": commit[1], "dirty": "yes" if re.search(r"^[^#]", said, re.M) else "no"}


def asked_of_git(*words: str) -> str | None:
    """What git says of this checkout; None where git, the checkout or the thing is missing, and
    where another repository holds this folder: its commit and its remote are not ours."""
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(paths.ROOT.parent)}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        ask = ("git", "-C", str(paths.ROOT), *words)
        return subprocess.check_output(ask, text=True, stderr=subprocess.DEVNULL, env=env).strip()
    return None


def _carried() -> set[str]:
    """What stands in a bundle's folders that a run reads from; Python's own caches aside."""
    found = (p for name in ("scripts", "lanes", "patches") for p in (paths.ROOT / name).rglob("*"))
    files = (p.relative_to(paths.ROOT) for p in found if p.is_symlink() or not p.is_dir())
    return {p.as_posix() for p in files if "__pycache__" not in p.parts}


def atomic(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises LaneError: no room, or not writable; what stood
    there before is kept."""
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        with scratch.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise LaneError(
            f"cannot write {path}: {error.strerror}",
            remedy="Free some room; what was written before is kept.",
        ) from error


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
