"""`lanekit logs DIR`: the logs of all hosts of a drop as one stream, host and ranks in front.

It reads the drop's own files as they grow, so it works beside a run of any launcher, and after it.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lanekit import drop as drops
from lanekit import hosts, logs, paths
from lanekit.errors import Unreadable

POLL_S: Final = 0.2
BLOCK: Final = 1 << 20
SHOWN: Final = ("warm", "logs")
KINDS: Final = ("*.log", *(f"*.log{packed}" for packed in logs.PACKED))


def run(args: argparse.Namespace) -> int:
    """`lanekit logs`."""
    for line in stream(args.drop or newest(paths.RESULTS), follow=args.follow):
        print(line)
    return 0


def stream(root: Path, *, follow: bool) -> Iterator[str]:
    """The lines of every log, each with its host and ranks; a file's own lines stay in order.

    follow: go on until the run has ended. Raises Unreadable: it is no drop of a run, or no log of
    it holds a line.
    """
    manifest = drops.read(root)
    ranks = {host.name: hosts.with_ranks(host) for host in hosts.of(manifest.plan)}
    at: dict[Path, int] = {}
    rest: dict[Path, bytes] = {}
    empty = True
    while True:
        # Asked first: what was written before the end was recorded is still read below.
        ended = not follow or drops.read(root).state in drops.ENDS
        for path in _logs(root):
            host, _, role = path.name.partition(".log")[0].rpartition("-")
            for line in _new(path, at, rest, ended=ended):
                empty = False
                yield f"{ranks.get(host, host)} {role} | {line}"
        if ended and empty:
            raise Unreadable(
                f"{root}: no log holds a line; its run is {drops.read(root).state}",
                remedy="`make triage RESULTS=DIR` says how far it came.",
            )
        if ended:
            return
        time.sleep(POLL_S)


def _logs(root: Path) -> Iterator[Path]:
    for where in SHOWN:
        yield from sorted(path for kind in KINDS for path in (root / where).glob(kind))


def _new(path: Path, at: dict[Path, int], rest: dict[Path, bytes], *, ended: bool) -> Iterator[str]:
    """The whole lines that a file has got since the last look; at the end also half of one."""
    packed = path.suffix in logs.PACKED
    if path in at and packed:  # packed after the run: it has all of it
        return
    with logs.opened(path) as stream_:
        if not packed:
            stream_.seek(at.get(path, 0))
        while block := stream_.read(BLOCK):
            *lines, rest[path] = (rest.get(path, b"") + block).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
        at[path] = 0 if packed else stream_.tell()
    if ended and (half := rest.pop(path, b"")):
        yield half.decode(errors="replace")


def newest(results: Path) -> Path:
    """The newest drop of a results folder. Raises Unreadable: there is none."""
    found = sorted(results.glob("2*/manifest.json"), key=lambda path: path.parent.name)
    if not found:
        raise Unreadable(f"{results}: no drop in it", remedy="Say which: RESULTS=DIR.")
    return found[-1].parent
