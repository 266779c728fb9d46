"""The command `lanekit`; make targets are thin calls of it. Imports stay inside the commands."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lanekit.errors import ConfigError, LaneError

if TYPE_CHECKING:
    from lanekit import planning

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done or proven, 1 refuted, 2 no verdict."""
    try:
        args = _parser().parse_args(argv)
        command: Command = args.command
        return command(args)
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
    parser = argparse.ArgumentParser(prog="lanekit", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a lane, keep its drop, judge it, print the row")
    _add_run_arguments(run)
    run.set_defaults(command=_run)
    again = commands.add_parser("reproduce", help="run one row again and set it beside its figures")
    _add_reproduce_arguments(again)
    again.set_defaults(command=_reproduce)
    verify = commands.add_parser("verify", help="judge a drop or a log, offline")
    _add_verify_arguments(verify)
    verify.set_defaults(command=_verify)
    doctor = commands.add_parser("doctor", help="is this machine fit for a profile and a lane?")
    _add_doctor_arguments(doctor)
    doctor.set_defaults(command=_doctor)
    logs = commands.add_parser("logs", help="the logs of all hosts as one stream")
    logs.add_argument("drop", type=Path, nargs="?", help="a drop; the newest one when not given")
    logs.add_argument("--follow", action="store_true", help="go on until the run has ended")
    logs.set_defaults(command=_logs)
    triage = commands.add_parser("triage", help="name the first rank that died, and why")
    _add_triage_arguments(triage)
    triage.set_defaults(command=_triage)
    redact = commands.add_parser("redact", help="copy a drop without what names its machine")
    _add_redact_arguments(redact)
    redact.set_defaults(command=_redact)
    lanes = commands.add_parser("lanes", help="list every lane and arm with where it runs")
    lanes.add_argument("--readme", action="store_true", help="renew the READMEs' generated parts")
    lanes.set_defaults(command=_lanes)
    image = commands.add_parser("image", help="build, push, pull or draw the images")
    _add_image_arguments(image)
    image.set_defaults(command=_image)
    pins = commands.add_parser("pins", help="print every pin, or check that none stands elsewhere")
    pins.add_argument("--lint", action="store_true", help="check the Dockerfiles against pins.toml")
    pins.set_defaults(command=_pins)
    report = commands.add_parser("report", help="write results/RESULTS.md from the drops")
    report.set_defaults(command=_report)
    bundle = commands.add_parser("bundle", help="pack a lane for a machine without network")
    _add_bundle_arguments(bundle)
    bundle.set_defaults(command=_bundle)
    patches = commands.add_parser("patches", help="apply our patch series to their public roots")
    _add_patches_arguments(patches)
    patches.set_defaults(command=_patches)
    return parser


def _number(option: str) -> Callable[[str], int]:
    """What reads a whole number for argparse, whose own words for a wrong one are its usage."""

    def read(word: str) -> int:
        if not word.isdecimal():
            raise ConfigError(
                f"{option}: '{word}' is no number", remedy=f"Give a whole number, or no {option}=."
            )
        return int(word)

    return read


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("lane", help="a folder of lanes/")
    add("--arm", default="", help="the variant; the lane's default on the profile when not given")
    add("--cells", default="", help="load points, comma-separated; all when not given")
    add("--results", default="", help="where the drop goes; results/ when not given")
    add("--redact", action="store_true", help="leave a redacted copy in redacted/ too")
    _add_start_arguments(parser)


def _add_start_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command takes that starts a run."""
    add = parser.add_argument
    add("--profile", default="", help="the fleet; chosen from this machine when not given")
    add("--model", default="", help="a local directory or a hub id instead of the lane's model")
    add(
        "--port",
        type=_number("PORT"),
        default=0,
        help="the server's port; a free one when not given",
    )
    add(
        "--launcher",
        default="",
        help="process, compose, kubernetes or slurm; one that fits when not given",
    )
    add("--hosts", default="", help="[user@]address[:port],... or an inventory file")
    add("--torch-index", default="", help="index of CPU torch builds, taken when it answers")
    add("--server-python", default="", help="an interpreter that already holds the engine")
    add("--aiperf-python", default="", help="an interpreter that already holds AIPerf")
    add("--env", default="", help="extra variables for every process: 'A=1 B=2'")
    add("--coherence-from", default="", metavar="DIR", help="a drop whose answers these must equal")
    add("--plan", action="store_true", help="print the frozen plan and start nothing")


def _add_reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("row", help="lane/arm/cell, as `lanekit lanes` lists them")
    add("--drop", type=Path, help="a drop that is already there, instead of a run")
    add("--registry", default="", help="a mirror of the images; digests stay")
    _add_start_arguments(parser)
    parser.set_defaults(lane="", arm="", cells="", results="")


def _add_image_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=("build", "push", "pull", "graph", "table"), help="what to do")
    add("names", nargs="*", help="images of the graph; for build also a lane: all that it needs")
    add("--all", action="store_true", help="every image")
    add("--exact", action="store_true", help="a name is an image, never a lane")
    add("--stack", default="", help="the set of pins; the lanes' own when not given")
    add("--profile", default="", help="for a lane: the fleet it will run on")
    add("--registry", default="", help="where images are pushed to and pulled from")
    add("--plan", action="store_true", help="print what would be built and build nothing")


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    from lanekit import verify  # noqa: PLC0415

    verify.add_arguments(parser)


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    from lanekit import doctor  # noqa: PLC0415

    doctor.add_arguments(parser)


def _doctor(args: argparse.Namespace) -> int:
    from lanekit import doctor  # noqa: PLC0415

    return doctor.run(args)


def _add_triage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drop", type=Path, help="a drop, or a log")


def _logs(args: argparse.Namespace) -> int:
    from lanekit import follow, paths  # noqa: PLC0415

    for line in follow.stream(args.drop or follow.newest(paths.RESULTS), follow=args.follow):
        print(line)
    return 0


def _triage(args: argparse.Namespace) -> int:
    from lanekit import triage  # noqa: PLC0415

    found = triage.triage(args.drop)
    print(triage.text(found))
    return found.exit_code


def _add_redact_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("drop", type=Path, help="the folder of a drop, ours or a stranger's")
    add("--out", type=Path, required=True, help="a new folder for the copy")


def _redact(args: argparse.Namespace) -> int:
    from lanekit import redact  # noqa: PLC0415

    redact.redact(args.drop, args.out)
    print(f"redacted: {args.out}")
    return 0


def _add_bundle_arguments(parser: argparse.ArgumentParser) -> None:
    from lanekit import bundle  # noqa: PLC0415

    bundle.add_arguments(parser)


def _bundle(args: argparse.Namespace) -> int:
    from lanekit import bundle  # noqa: PLC0415

    return bundle.run(args)


def _run(args: argparse.Namespace) -> int:
    from lanekit import machine, plan, planning  # noqa: PLC0415

    made = planning.make(_options(args), machine.read())
    for said in planning.warnings(made):
        print(f"warning: {said}", file=sys.stderr)
    if args.plan:
        print(plan.render(made))
        return 0
    planning.require_hosts(made)
    from lanekit import run  # noqa: PLC0415
    from lanekit.progress import Progress  # noqa: PLC0415

    try:
        return run.main(made, Progress())
    finally:
        if args.redact and Path(made.drop).is_dir():
            from lanekit import redact  # noqa: PLC0415

            print(f"redacted: {redact.beside(Path(made.drop))}")


def _reproduce(args: argparse.Namespace) -> int:
    from lanekit import reproduce  # noqa: PLC0415

    return reproduce.run(args, _options(args))


def _options(args: argparse.Namespace) -> "planning.Options":
    from lanekit import planning  # noqa: PLC0415

    return planning.Options(
        lane=args.lane,
        profile=args.profile,
        arm=args.arm,
        cells=tuple(args.cells.replace(",", " ").split()),
        model=args.model,
        port=args.port,
        launcher=args.launcher,
        hosts=args.hosts,
        start=not args.plan,
        results=args.results,
        torch_index=args.torch_index,
        server_python=args.server_python,
        aiperf_python=args.aiperf_python,
        env=tuple(args.env.split()),
        coherence_from=args.coherence_from,
    )


def _verify(args: argparse.Namespace) -> int:
    from lanekit import verify  # noqa: PLC0415

    return verify.run(args)


def _lanes(args: argparse.Namespace) -> int:
    from lanekit import drop, lanes  # noqa: PLC0415

    if args.readme:
        for readme, generated in lanes.readmes().items():
            drop.atomic(readme, lanes.renewed(readme.read_text(), generated).encode())
    else:
        print(lanes.text())
    return 0


def _image(args: argparse.Namespace) -> int:
    from lanekit import image_commands  # noqa: PLC0415

    return image_commands.run(args)


def _pins(args: argparse.Namespace) -> int:
    from lanekit import image_commands  # noqa: PLC0415

    return image_commands.pins_command(lint=args.lint)


def _report(_args: argparse.Namespace) -> int:
    from lanekit import report  # noqa: PLC0415

    print(report.write())
    return 0


def _add_patches_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("series", nargs="*", help="folders under patches/, or how they begin; all by default")
    add("--refresh", action="store_true", help="try the newer bases and say which hunks moved")
    add("--out", default="", help="where to leave the patched trees")


def _patches(args: argparse.Namespace) -> int:
    from lanekit import patches  # noqa: PLC0415

    return patches.main(args.series, again=args.refresh, out=args.out)
