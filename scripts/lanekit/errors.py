"""Errors a person can act on. Each class has its exit code; each error says what to do next.

Exit codes of every lanekit command: 0 done or proven, 1 refuted, 2 no verdict (nothing to check,
unreadable, bad usage, or the run did not get far enough to be judged).
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar


class LaneError(Exception):
    """Any expected failure: a message that names what is wrong, a remedy that says what to do."""

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class ConfigError(LaneError):
    """A lane, profile, contract, pin or option that does not exist or does not fit."""


class EnvironmentFailed(LaneError):
    """An environment could not be made from its lock."""


class ModelError(LaneError):
    """A model directory that cannot be served."""


class ServerDied(LaneError):
    """A server process ended before or during the sweep."""


class HostLost(LaneError):
    """A host that cannot be reached, or no longer."""


class CellFailed(LaneError):
    """A load point did not finish: AIPerf died, passed its deadline, or left no records."""


class Interrupted(LaneError):
    """The run was asked to stop (Ctrl-C or SIGTERM)."""

    exit_code: ClassVar[int] = 2


class Unreadable(LaneError):
    """A drop, log or export that cannot be read; never a pass."""


class ImageFailed(LaneError):
    """An image did not build, does not hold what it should, or is not the one that was pinned."""


def require_known(name: str, known: Iterable[str], what: str, *, option: str = "") -> None:
    """Refuse a name that is none of those known. Raises ConfigError: it lists them."""
    names = list(known)
    if name not in names:
        listed, where = ", ".join(names) or "none", f"{option}: " if option else ""
        raise ConfigError(f"{where}no {what} named '{name}'", remedy=f"Known {what}s: {listed}.")


@contextlib.contextmanager
def saying(path: Path, remedy: str, kind: type[LaneError] = ConfigError) -> Iterator[None]:
    """Say which file could not be read, and what to do, in an error of this kind."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path}: {error.strerror}", remedy=remedy) from error
