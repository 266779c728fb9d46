"""Take every cell."""

from lanekit.run import Run


def measure(run: Run) -> None:
    """Nothing is served."""
    run.sweep()
