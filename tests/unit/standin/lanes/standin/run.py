"""The steps of a serving lane."""

from lanekit.run import Run


def measure(run: Run) -> None:
    """Serve and sweep."""
    with run.serving():
        run.sweep()
