"""Serve until the test has seen enough."""

import time

from lanekit.run import Run


def measure(run: Run) -> None:
    """Start the ranks, and stop when a file says so."""
    with run.serving():
        while not (run.drop.path.parent / "seen").exists():
            run._alive()
            time.sleep(0.1)
