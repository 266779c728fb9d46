"""One run at a time in a checkout, and the processes of a killed run ended before the next one."""

import contextlib
import fcntl
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
    with LOCK.open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            stream.seek(0)
            raise ConfigError(
                f"another run is under way here: {stream.read().strip() or 'just starting'}",
                remedy="Wait for it or end it; two at once would spoil each other's figures.",
            ) from error
        _end_the_dead(stream, say)
        _name(stream, drop)
        yield
        _name(stream, "")


def _end_the_dead(stream: TextIO, say: Say) -> None:
    stream.seek(0)
    dead = stream.read().strip()
    if not dead or not (Path(dead) / drops.MANIFEST).is_file():
        return
    with contextlib.suppress(LaneError):
        manifest = drops.read(Path(dead))
        ended = process.end(each for each in manifest.processes if not each.container)
        if ended:
            pids = ", ".join(map(str, ended))
            say(f"ended what a killed run left: pids {pids} ({dead})")
        removed = compose.end_the_dead(Path(dead), manifest.processes)
        if removed:
            ids = ", ".join(identity[:12] for identity in removed)
            say(f"removed what a killed run left: containers {ids} ({dead})")


def _name(stream: TextIO, text: str) -> None:
    stream.seek(0)
    stream.truncate()
    stream.write(text)
    stream.flush()
