"""The vLLM lane: serve, wait for a real completion, sweep with AIPerf.

`make lane-vllm` runs it; so does `.venv/bin/python lanes/vllm/run.py --help`.
"""

import sys

from lanekit import cli
from lanekit.run import Run


def measure(run: Run) -> None:
    """Start serve.yaml, take every cell, stop."""
    with run.serving():
        run.sweep()


if __name__ == "__main__":
    sys.exit(cli.main(["run", "vllm", *sys.argv[1:]]))
