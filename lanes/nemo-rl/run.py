"""The nemo-rl lane: one program, run once a cell; no server and no AIPerf."""

import sys

from lanekit import cli
from lanekit.run import Run


def measure(run: Run) -> None:
    """Take every cell."""
    run.sweep()


if __name__ == "__main__":
    sys.exit(cli.main(["run", "nemo-rl", *sys.argv[1:]]))
