"""The llmd lane: engines, a router before them, AIPerf through the router.

`make lane-llmd` runs it; so does `.venv/bin/python lanes/llmd/run.py --help`.
"""

import sys

from lanekit import cli
from lanekit.run import Run


def measure(run: Run) -> None:
    """Start serve.yaml, ask the coherence gate and take every cell through the router, stop."""
    with run.serving():
        run.sweep()


if __name__ == "__main__":
    sys.exit(cli.main(["run", "llmd", *sys.argv[1:]]))
