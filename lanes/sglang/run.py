"""The SGLang lane: serve, wait for a real completion, ask the coherence gate, sweep with AIPerf.

`make lane-sglang` runs it; so does `.venv/bin/python lanes/sglang/run.py --help`.
"""

import sys

from lanekit import cli
from lanekit.run import Run


def measure(run: Run) -> None:
    """Start serve.yaml, ask the coherence gate, take every cell, stop."""
    with run.serving():
        run.gate()
        run.sweep()


if __name__ == "__main__":
    sys.exit(cli.main(["run", "sglang", *sys.argv[1:]]))
