"""Judge a drop, ours or a stranger's, offline: `lanekit verify DIR`.

lanekit.case puts together what is judged, lanekit.judge judges it, lanekit.render prints it.
"""

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lanekit.errors import ConfigError, Unreadable

if TYPE_CHECKING:
    from lanekit.verdict import Verdict


FILES: Final = 10_000  # in a drop; a sweep of three cells on two hosts leaves 30


def run(args: argparse.Namespace) -> int:
    """Judge, print, write; returns 0 proven, 1 refuted, 2 no verdict."""
    from lanekit import render  # noqa: PLC0415
    from lanekit.drop import VERDICT  # noqa: PLC0415

    root = Path(os.path.realpath(args.drop))  # unlike resolve() it takes links that loop
    for path in (args.json, args.junit):
        if str(path) in {"0", "1"}:  # a switch elsewhere: make doctor JSON=1
            raise ConfigError(
                f"{path} is no name of a file for the verdict",
                remedy="Name one: JSON=FILE or JUNIT=FILE.",
            )
        to = Path(os.path.realpath(path or "/"))
        if path and to.is_relative_to(root) and to != root / VERDICT:
            raise ConfigError(
                f"{path} is in what is judged: nothing there may be written",
                remedy="Choose a file beside it.",
            )
    asked = {name: getattr(args, name) or None for name in ("lane", "arm", "profile")}
    found = verify(args.drop, **asked)
    print(render.text(found, colour=render.wants_colour(sys.stdout)))
    for path, content in ((args.json, render.as_json), (args.junit, render.junit)):
        if path:
            try:
                path.write_bytes(content(found))
            except OSError as error:
                raise ConfigError(
                    f"cannot write {path}: {error.strerror}", remedy="Choose another file."
                ) from error
    return found.exit_code


def verify(
    drop: Path, *, lane: str | None = None, arm: str | None = None, profile: str | None = None
) -> "Verdict":
    """The verdict of a drop or of a single log.

    Raises:
        Unreadable: it is missing, empty, or holds a file that cannot be read.
        ConfigError: lane, arm or profile cannot be told, do not exist or do not fit.
    """
    try:
        return _verify(drop, {"lane": lane, "arm": arm, "profile": profile})
    except (RecursionError, OSError, ValueError, OverflowError, RuntimeError) as error:
        # Bytes made to break a reader (nesting, absurd numbers, looping links) are no verdict.
        shown = ascii(str(drop))[1:-1][:300]
        raise Unreadable(
            f"{shown}: cannot be read: {type(error).__name__}: {str(error)[:200]}",
            remedy="Fetch the drop again.",
        ) from error


def _verify(drop: Path, given: dict[str, str | None]) -> "Verdict":
    from lanekit import case, logs  # noqa: PLC0415
    from lanekit.drop import MANIFEST  # noqa: PLC0415

    str(drop).encode()
    if not drop.exists():
        link = "a link that leads nowhere" if drop.is_symlink() else "no such file or directory"
        raise Unreadable(f"{drop}: {link}", remedy="Check the path.")
    files = [drop] if drop.is_file() else list(itertools.islice(logs.inside(drop), FILES + 1))
    if len(files) > FILES:
        raise Unreadable(f"{drop}: more than {FILES} files", remedy="Give one run's drop.")
    if not files or not any(path.stat().st_size for path in files):
        raise Unreadable(f"{drop}: empty", remedy="Nothing was collected: run the lane again.")
    ours = drop / MANIFEST in files
    if not ours and os.path.lexists(drop / MANIFEST):
        raise Unreadable(f"{drop / MANIFEST}: not a regular file", remedy="Restore it.")
    return case.ours(drop, files, given) if ours else case.foreign(drop, files, given)
