"""Take every cell."""

from lanekit.run import Run


def measure(run: Run) -> None:
    """The ranks compile and meet."""
    run.sweep()
