"""Find the drop whose answers a run's must equal."""

from pathlib import Path

import msgspec

from lanekit import answers, coherence
from lanekit import drop as drops
from lanekit.answers import Header
from lanekit.errors import ConfigError, LaneError


def newest(results: Path, wanted: Header) -> Path | None:
    """The newest complete drop that holds the answers of the wanted arm; None without one.

    wanted: the header those answers must have; its drop does not matter. Without an arm there is
    nothing to look for.
    """
    if not wanted.arm:
        return None
    for folder in sorted(results.glob(f"*-{wanted.profile}-{wanted.lane}-{wanted.arm}*"))[::-1]:
        try:
            held = drops.read(folder)
            fits = _header(folder) == msgspec.structs.replace(wanted, drop=folder.name)
        except LaneError:
            continue
        if held.state == "complete" and fits:
            return folder
    return None


def given(folder: Path, wanted: Header) -> str:
    """The arm of a drop that a person named. Raises ConfigError: it holds no answers, or answers of
    another lane, profile, model or question."""
    try:
        header = _header(folder)
    except LaneError as error:
        raise ConfigError(
            f"COHERENCE_FROM: {error.message}", remedy="Name the drop of a run with a gate."
        ) from error
    if said := coherence.another(wanted, header):
        raise ConfigError(
            f"COHERENCE_FROM: {folder} does not fit this run: {said}",
            remedy="Run the reference arm with the same lane, profile and model first.",
        )
    return header.arm


def _header(folder: Path) -> Header:
    return answers.read(folder / answers.NAME).header
