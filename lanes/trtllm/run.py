"""The TensorRT-LLM lane: mpirun, a real completion, the sweep with AIPerf.

`make lane-trtllm` runs it; so does `.venv/bin/python lanes/trtllm/run.py --help`.
"""

import sys

from lanekit import cli
from lanekit.run import Run


def measure(run: Run) -> None:
    """Start serve.yaml, take every cell, stop."""
    with run.serving():
        run.sweep()


if __name__ == "__main__":
    sys.exit(cli.main(["run", "trtllm", *sys.argv[1:]]))
