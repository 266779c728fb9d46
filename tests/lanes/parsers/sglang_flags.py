"""Parse SGLang command lines with the parser of a released wheel: sglang_flags.py FOLDER.

The wheel pins a torch, a transformers and a triton of its own, about 6 GB, and its parser uses none
of them. What runs is the wheel's own ServerArgs.add_cli_args with the modules that define arguments
(REAL); everything else that those import is an empty stand-in, so a flag whose choices come from
there cannot be judged here (no lane uses one).

Standard input: a list of argument lists. Standard output: for each what it means, or the error.
"""

import argparse
import contextlib
import importlib.abc
import io
import json
import os
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import Any

ROOT = os.path.abspath(sys.argv[1])
REAL = ("sglang.srt.server_args", "sglang.srt.environ", "sglang.srt.arg_groups", "msgspec")
PACKAGES = {"sglang": f"{ROOT}/sglang", "sglang.srt": f"{ROOT}/sglang/srt"}
# What Python asks of an object to find out what it is; a stand-in is none of it.
ABSENT = {
    "__wrapped__", "__set_name__", "__signature__", "__origin__", "__args__", "__parameters__",
    "__isabstractmethod__", "__index__", "__fspath__",
}  # fmt: skip


class Nothing:
    """Stands for whatever is imported from a module that is not there: empty, and false."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def __call__(self, *_args: object, **_kwargs: object) -> "Nothing":
        return Nothing()

    def __getattr__(self, name: str) -> "Nothing":
        if name in ABSENT:
            raise AttributeError(name)
        return Nothing()

    def __mro_entries__(self, _bases: object) -> tuple[type, ...]:
        return ()

    def __getitem__(self, _key: object) -> "Nothing":
        return Nothing()

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __or__(self, _other: object) -> "Nothing":
        return Nothing()

    __ror__ = __add__ = __radd__ = __or__


class Absent(types.ModuleType):
    """A module that is not there."""

    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Nothing()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module that is neither of the standard library nor one that defines arguments."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        real = any(name == each or name.startswith(f"{each}.") for each in REAL)
        if real or top in sys.stdlib_module_names:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = [PACKAGES[module.__name__]] if module.__name__ in PACKAGES else []


def meaning(parser: argparse.ArgumentParser, argv: list[str]) -> dict[str, Any]:
    """What a command line sets; argparse itself only exits."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = vars(parser.parse_args(argv))
    except SystemExit:
        return {"error": said.getvalue().strip().splitlines()[-1]}
    return {k: v for k, v in found.items() if isinstance(v, bool | int | float | str | list)}


def main() -> None:
    """Parse all of them."""
    sys.meta_path.insert(0, Finder())
    from sglang.srt.server_args import (  # type: ignore[import-not-found]  # noqa: PLC0415
        ServerArgs,
    )

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        json.dump([meaning(parser, argv) for argv in json.load(sys.stdin)], out)


main()
