"""Progress for people: what happens now, since when, and what the log last said."""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

Say = Callable[[str], None]

QUIET_S: Final = 15.0  # without a terminal, a sign of life this often


class Progress:
    """Lines with the seconds since the start; on a terminal also one line that is rewritten."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._begin = self._spoke = time.monotonic()
        self._live = stream.isatty()
        self._pending = False

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._clear()
        self._write(f"[{time.monotonic() - self._begin:7.1f}s] {text}\n")
        self._spoke = time.monotonic()

    def now(self, text: str) -> None:
        """Show the current step; kept to one line, and rare where no terminal rewrites it."""
        if self._live:
            elapsed = time.monotonic() - self._begin
            self._write(f"\r\x1b[K[{elapsed:7.1f}s] {text[:110]}")
            self._pending = True
        elif time.monotonic() - self._spoke > QUIET_S:
            self.say(text[:110])

    def _clear(self) -> None:
        if self._pending:
            self._write("\r\x1b[K")
            self._pending = False

    def _write(self, text: str) -> None:
        """Never raise: a closed terminal must not keep a run from ending what it started."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
