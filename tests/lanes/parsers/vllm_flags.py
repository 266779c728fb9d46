"""Parse vLLM command lines with vLLM's own parser, in an interpreter that holds vLLM.

Standard input: a list of argument lists. Standard output: for each what it means, or the error.
"""

import contextlib
import io
import json
import os
import sys
from typing import Any

OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM logs to standard output, also while it is imported

from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found]  # noqa: E402
from vllm.entrypoints.openai.cli_args import make_arg_parser  # type: ignore[import-not-found]  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]  # noqa: E402

SHOWN = (
    "model", "headless", "data_parallel_size", "data_parallel_size_local", "enforce_eager",
    "data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port",
    "all2all_backend", "enable_expert_parallel", "load_format", "max_num_batched_tokens",
)  # fmt: skip


def meaning(argv: list[str]) -> dict[str, Any]:
    """What a command line sets; argparse itself only exits."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
            engine = AsyncEngineArgs.from_cli_args(found)
    except (SystemExit, KeyError, ValueError) as error:
        return {"error": f"{error!r} {said.getvalue()[-300:]}"}
    graphs = engine.compilation_config
    return {
        **{name: getattr(found, name) for name in SHOWN},
        "model": found.model_tag or found.model,
        "cudagraph_mode": graphs.cudagraph_mode.name if graphs.cudagraph_mode else "",
    }


json.dump([meaning(argv) for argv in json.load(sys.stdin)], OUT)
OUT.close()
