"""One run at a time in a checkout, and what dead runs left ended before the next one."""

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from lanekit import compose, kubernetes, paths, process, slurm
from lanekit import drop as drops
from lanekit.errors import ConfigError, LaneError
from lanekit.progress import Say

LOCK: Final = paths.CACHE / "run.lock"


@contextlib.contextmanager
def holding(drop: str, say: Say) -> Iterator[None]:
    """One run at a time in a checkout: a second one would disturb the first one's figures.

    The lock dies with its holder, so what it still names are dead runs: what they left is ended. A
    run whose hosts were lost stays named until they are back.
    """
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("a+", errors="replace") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another run is under way here: {''.join(_read(stream)[-1:]) or 'just starting'}",
                remedy="Wait for it or end it; two at once would spoil each other's figures.",
            ) from error
        waiting = [dead for dead in _read(stream) if not _ended(dead, say)]
        _name(stream, [*waiting, drop])
        try:
            yield
        finally:
            _name(stream, [*waiting, *([drop] if _left(drop) else [])])


def _read(stream: TextIO) -> list[str]:
    """The drops that the lock names. Whatever else may stand there is no path."""
    stream.seek(0)
    lines = stream.read(65536).splitlines()
    return [
        line for line in lines if line.startswith("/") and "\0" not in line and len(line) < 4096
    ]


def _left(drop: str) -> bool:
    """Whether a run that ended left something on a host that was lost."""
    with contextlib.suppress(LaneError, OSError):
        return bool(drops.read(Path(drop)).left)
    return False


def _ended(dead: str, say: Say) -> bool:
    """End what the run that left the drop `dead` started; its manifest may be gone or forged.

    False where a host of it cannot be reached: then the next run has to try again.
    """
    manifest = None
    with contextlib.suppress(LaneError, OSError):
        manifest = drops.read(Path(dead))
    known = manifest.processes if manifest and manifest.boot == drops.boot() else []
    ended = process.end_left(dead, [each for each in known if not each.container])
    if ended:
        pids = ", ".join(map(str, ended))
        say(f"ended what a killed run left: pids {pids} ({dead})")
    if manifest is None:
        return True
    scratch = Path(manifest.scratch)
    if scratch.name.startswith(drops.SCRATCH) and scratch.parent == Path(tempfile.gettempdir()):
        shutil.rmtree(scratch, ignore_errors=True)
    removed, unreached = compose.end_the_dead(Path(dead), manifest, say)
    if removed:
        ids = ", ".join(identity[:12] for identity in removed)
        say(f"removed what a dead run left: containers {ids} ({dead})")
    unreached += kubernetes.end_the_dead(Path(dead)) + slurm.end_the_dead(Path(dead))
    for host in unreached:
        say(f"what a dead run may have left is still there ({dead}): {host}")
    return not unreached


def _name(stream: TextIO, runs: list[str]) -> None:
    stream.seek(0)
    stream.truncate()
    stream.write("".join(f"{run}\n" for run in runs))
    stream.flush()
