"""The steps of a serving lane."""

from lanekit.run import Run


def measure(run: Run) -> None:
    """Serve, ask those that can answer, and sweep."""
    with run.serving():
        if "answer" in run.plan.arm:
            run.gate()
        run.sweep()
