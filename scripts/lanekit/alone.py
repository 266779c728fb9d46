"""One run at a time in a checkout, and the processes of a killed run ended before the next one."""

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from lanekit import compose, paths, process
from lanekit import drop as drops
from lanekit.errors import ConfigError, LaneError
from lanekit.progress import Say

LOCK: Final = paths.CACHE / "run.lock"


@contextlib.contextmanager
def holding(drop: str, say: Say) -> Iterator[None]:
    """One run at a time in a checkout: a second one would disturb the first one's figures.

    The lock dies with its holder, so what it still names is a dead run, whose processes are ended.
    """
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("a+", errors="replace") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another run is under way here: {_read(stream) or 'just starting'}",
                remedy="Wait for it or end it; two at once would spoil each other's figures.",
            ) from error
        _end_the_dead(_read(stream), say)
        _name(stream, drop)
        try:
            yield
        finally:
            _name(stream, "")


def _read(stream: TextIO) -> str:
    """What the lock names: a drop, or nothing. Whatever else may stand there is no path."""
    stream.seek(0)
    text = stream.read(4096).strip()
    return text if text.startswith("/") and "\0" not in text else ""


def _end_the_dead(dead: str, say: Say) -> None:
    """End what the run that left the drop `dead` started; its manifest may be gone or forged."""
    if not dead:
        return
    manifest = None
    with contextlib.suppress(LaneError, OSError):
        manifest = drops.read(Path(dead))
    known = manifest.processes if manifest and manifest.boot == drops.boot() else []
    ended = process.end_left(dead, [each for each in known if not each.container])
    if ended:
        pids = ", ".join(map(str, ended))
        say(f"ended what a killed run left: pids {pids} ({dead})")
    if manifest is None:
        return
    scratch = Path(manifest.scratch)
    if scratch.name.startswith(drops.SCRATCH) and scratch.parent == Path(tempfile.gettempdir()):
        shutil.rmtree(scratch, ignore_errors=True)
    removed = compose.end_the_dead(Path(dead), manifest.processes)
    if removed:
        ids = ", ".join(identity[:12] for identity in removed)
        say(f"removed what a killed run left: containers {ids} ({dead})")


def _name(stream: TextIO, text: str) -> None:
    stream.seek(0)
    stream.truncate()
    stream.write(text)
    stream.flush()
