"""The SGLang lane: serve, wait for a real completion, sweep with AIPerf.

`make lane-sglang` runs it; so does `.venv/bin/python lanes/sglang/run.py --help`.
"""

import sys

from lanekit import cli
from lanekit.run import Run


def measure(run: Run) -> None:
    """Start serve.yaml, take every cell, stop."""
    with run.serving():
        run.sweep()


if __name__ == "__main__":
    sys.exit(cli.main(["run", "sglang", *sys.argv[1:]]))
