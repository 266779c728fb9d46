"""`lanekit image` and `lanekit pins`: what a person sees of the image graph."""

import argparse
import json
import os
import sys
import time

from lanekit import images, machine, pins, spec
from lanekit.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    """One action on the graph; returns the exit code."""
    stack = args.stack or images.DEFAULT_STACK
    if args.action == "graph":
        print(images.tree())
        return 0
    found = pins.load()
    pins.of_stack(found, stack)  # refuses an unknown one
    names = args.names
    if args.all:
        names = [name for name in images.targets() if stack in images.stacks(name, found)]
    if args.action == "build" and not args.exact:
        names = wanted(names, args.profile)
    if not names:
        raise ConfigError("no image named", remedy="Name one; `lanekit image graph` lists them.")
    images.require(names)
    if args.action == "build":
        return _build(names, stack, plan=args.plan)
    if args.action == "table":
        from lanekit import contents  # noqa: PLC0415

        return contents.renew(names, stack)
    from lanekit import registry  # noqa: PLC0415

    for name in names:
        act = registry.push if args.action == "push" else registry.pull
        print(act(name, stack, args.registry))
    return 0


def wanted(names: list[str], profile: str) -> list[str]:
    """Images by name; a lane's name stands for all that the lane needs on a profile."""
    return list(dict.fromkeys(image for name in names for image in _of(name, profile)))


def _of(name: str, profile: str) -> list[str]:
    if name not in spec.lane_names():
        return [name]  # an image of the graph that is no lane's name
    lane = spec.lane(name)
    if not profile:
        known = [spec.profile(p) for p in spec.profile_names() if p in lane.profiles]
        profile, why = machine.choose(machine.read(), known)
        # Not on the stream of PLAN=1, which a program reads.
        said = f"image-{name}: for profile {profile} ({why}); PROFILE= chooses another"
        print(said, file=sys.stderr)
    if profile not in lane.profiles:
        raise ConfigError(
            f"lane {name} has no setting for profile {profile}",
            remedy=f"It runs on: {', '.join(lane.profiles)}.",
        )
    found = lane.profiles[profile]
    image = spec.image(lane, found.arm, profile)
    return [image, "aiperf", *found.tools.values()]


def _build(names: list[str], stack: str, *, plan: bool) -> int:
    given = images.roots(os.environ)
    if plan:
        print(json.dumps(images.plan(names, stack, given), indent=2))
        return 0
    begin = time.monotonic()
    built = images.build(names, stack, given)
    for name, digest in built.items():
        print(f"{images.local(name, stack)}  {digest}")
    for pin in images.unrecorded(names, stack, given):
        print(f"{pin}: taken without a checksum; its own: /usr/share/lanes/unrecorded in the image")
    print(f"built {', '.join(names)} in {time.monotonic() - begin:.1f} s")
    return 0


def pins_command(args: argparse.Namespace) -> int:
    """The table of pins, or the findings of the lint."""
    found = pins.load()
    if not args.lint:
        print(pins.table(found))
        return 0
    known: dict[str, str] = {}
    for stack in found.stacks:
        known |= pins.arguments(found, stack)
    findings = pins.lint(images.IMAGES, known)
    for finding in findings:
        print(f"{finding.path}:{finding.line}: {finding.what}")
    return 1 if findings else 0
