"""Interruption that leaves nothing half done: a signal becomes an exception, at a safe point."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final

from lanekit.errors import Interrupted

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _State:
    """Whether an interruption must wait, and the one that waits."""

    held = 0
    pending = 0


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Turn the first of SIGNALS into Interrupted; later ones are ignored while things are ended."""
    _State.pending = 0
    before = {each: signal.signal(each, _interrupt) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Put an interruption off to the end of the block: what starts is also recorded."""
    _State.held += 1
    try:
        yield
    finally:
        _State.held -= 1
        if _State.pending and not _State.held:
            _raise(_State.pending)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if _State.held:
        _State.pending = number
    else:
        _raise(number)


def _raise(number: int) -> None:
    _State.pending = 0
    raise Interrupted(
        f"stopped by {signal.Signals(number).name}",
        remedy="What it started is ended; the drop says how far it came.",
    )
