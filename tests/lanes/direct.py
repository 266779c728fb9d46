"""A program of a lane, or of an engine, started without a run around it."""

import os
import subprocess
import tempfile
from collections.abc import Sequence


def run(
    command: Sequence[str], told: str | None = None, **env: str
) -> "subprocess.CompletedProcess[str]":
    """What it says when it is told something.

    Its TMPDIR goes with it, as a run's does: torchrun leaves logs there, Inductor a cache.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        own = {**os.environ, **env, "TMPDIR": folder}
        return subprocess.run(
            command, env=own, input=told, capture_output=True, text=True, timeout=600, check=False
        )
