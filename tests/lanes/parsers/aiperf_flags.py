"""Parse AIPerf command lines with AIPerf's own parser, in an interpreter that holds AIPerf.

Standard input: a list of argument lists. Standard output: for each what it means, or the error.
"""

import json
import os
import sys
from typing import Any

OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what AIPerf prints while it is imported is no answer

from aiperf.cli import app  # type: ignore[import-not-found]  # noqa: E402


def meaning(argv: list[str]) -> Any:
    """What a command line sets."""
    try:
        _, bound, *_ = app.parse_args(argv, exit_on_error=False, print_error=False)
    except Exception as error:
        return {"error": str(error)}
    return json.loads(bound.arguments["cli_config"].model_dump_json())


json.dump([meaning(argv) for argv in json.load(sys.stdin)], OUT)
OUT.close()
