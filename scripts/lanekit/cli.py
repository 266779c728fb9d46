"""The command `lanekit`; make targets are thin calls of it. resources/commands.toml holds what each
command takes; what does the work is imported when it is asked for."""

import argparse
import errno
import importlib
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lanekit.errors import ConfigError, LaneError

if TYPE_CHECKING:
    from lanekit import planning

COMMANDS: Final = Path(__file__).parent / "resources" / "commands.toml"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done or proven, 1 refuted, 2 no verdict."""
    try:
        args = _parser().parse_args(argv)
        module, _, name = args.call.partition(".")
        command = getattr(importlib.import_module(f"lanekit.{module}"), name)
        return int(command(args))
    except LaneError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.remedy:
            print(f"  {error.remedy}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: stopped", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            print(f"error: {error}", file=sys.stderr)
            print("  Free space there, then run it again.", file=sys.stderr)
            return 2
        # 1 would read as "refuted": whatever else goes wrong is no verdict.
        if "LANEKIT_DEBUG" in os.environ:
            raise
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        print("  LANEKIT_DEBUG=1 shows where; please report it.", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    table = tomllib.loads(COMMANDS.read_text())
    parser = argparse.ArgumentParser(prog="lanekit", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command, each in table["command"].items():
        made = commands.add_parser(command, help=each["help"])
        made.set_defaults(call=each["call"])
        taken = (table["group"].get(word, [word]) for word in each.get("takes", ()))
        for name in (name for group in taken for name in group):
            made.add_argument(name.rpartition("/")[2], **_argument(name, table["argument"][name]))
    return parser


def _argument(name: str, said: dict[str, Any]) -> dict[str, Any]:
    """An argument of the table as argparse takes it."""
    kinds: dict[str, dict[str, Any]] = {
        "": {"default": ""},
        "path": {"type": Path},
        "switch": {"action": "store_true"},
        "number": {"type": _number(name.upper().strip("-").replace("-", "_")), "default": 0},
        "many": {"nargs": "*"},
    }
    own = {key: value for key, value in said.items() if key != "kind"}
    return kinds[said.get("kind", "")] | own


def _number(option: str) -> Callable[[str], int]:
    """What reads a whole number for argparse, whose own words for a wrong one are its usage."""

    def read(word: str) -> int:
        if not word.isdecimal():
            raise ConfigError(
                f"{option}: '{word}' is no number", remedy=f"Give a whole number, or no {option}=."
            )
        return int(word)

    return read


def start(args: argparse.Namespace) -> int:
    """`lanekit run`: plan, and unless that is all that was asked for, run, judge and print."""
    from lanekit import machine, plan, planning  # noqa: PLC0415

    made = planning.make(options(args), machine.read())
    for said in planning.warnings(made):
        print(f"warning: {said}", file=sys.stderr)
    if args.plan:
        print(plan.render(made))
        return 0
    planning.require_hosts(made)
    from lanekit import redact, run  # noqa: PLC0415
    from lanekit.progress import Progress  # noqa: PLC0415

    try:
        return run.main(made, Progress())
    finally:
        if args.redact and Path(made.drop).is_dir():
            print(f"redacted: {redact.beside(Path(made.drop))}")


def reproduce(args: argparse.Namespace) -> int:
    """`lanekit reproduce`."""
    from lanekit import reproduce  # noqa: PLC0415

    return reproduce.run(args, options(args))


def options(args: argparse.Namespace) -> "planning.Options":
    """What was said of a run."""
    import msgspec  # noqa: PLC0415

    from lanekit import planning  # noqa: PLC0415

    said = {"lane": "", "cells": "", **vars(args), "start": not args.plan}
    said |= {"cells": said["cells"].replace(",", " ").split(), "env": args.env.split()}
    known = planning.Options.__struct_fields__
    return msgspec.convert({name: said[name] for name in known if name in said}, planning.Options)
