"""Serve and sweep."""

from lanekit.run import Run


def measure(run: Run) -> None:
    """Start both hosts' ranks, take the cell, stop."""
    with run.serving():
        run.sweep()
