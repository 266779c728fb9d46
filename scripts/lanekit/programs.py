"""Python files outside the package, loaded as modules: a lane's run.py, the programs it starts."""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load(name: str, path: Path) -> Any:
    """The file as module `name`, which its dataclasses look up in sys.modules. Raises OSError:
    there is no such file."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
