"""Measure the image graph: `make bench IMAGES=STACK`. Judges nothing.

    scripts/bench_images.py [--stack STACK] [--built NAMES] [--json]

* a rebuild of everything that is here, with nothing changed
* the steps that run again when a lane's file, the guard or the evidence hook changes, each in a
  copy of what bake reads, so that the checkout stays as it is
* the bytes of all engine images together, over those of the largest: what shared layers save

What is not here is not measured: build it first, with the same roots (BASE_IMAGE= SRC_NAME=).
--built names the images to measure, where not all that are here had the same roots.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lanekit import images, paths
from lanekit.errors import LaneError

UNITS: Final = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
READ: Final = ("images", "patches", "scripts/evidence", "lanes")
# What is touched, and how the step that brings it into an image is known in a recipe.
TOUCHED: Final = {
    "lane": ("lanes/vllm/lane.toml", ""),
    "guard": ("images/guard/guard.py", "from=guard"),
    "hook": ("scripts/evidence/lane_evidence.py", "from=evidence"),
}


@dataclass(frozen=True)
class Rebuild:
    """One build with one file changed. ran: RUN and COPY steps not taken from the cache.
    follow: how many steps its recipes have from the changed file on."""

    changed: str
    seconds: float
    ran: list[str]
    follow: int


@dataclass(frozen=True)
class Measured:
    """Everything. unique, largest: unpacked bytes of all engine images, and of the largest."""

    images: list[str]
    stack: str
    rebuilds: list[Rebuild]
    engines: list[str]
    unique: float
    largest: float


def bake(names: list[str], stack: str, root: Path) -> tuple[float, str]:
    """Build from a copy of the checkout without keeping anything; seconds and bake's own report."""
    made: dict[str, Any] = images.definition(stack, images.roots(os.environ))
    for body in made["target"].values():
        body["output"] = ["type=cacheonly"]
    files = ["-f", "images/docker-bake.hcl", "-f", str(images.write(made, f"bench-{stack}"))]
    begin = time.monotonic()
    ran = subprocess.run(
        ["docker", "buildx", "bake", "--progress=plain", *files, *images.asked(names)],
        cwd=root, env=os.environ | images.variables(stack), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if ran.returncode:
        raise SystemExit(ran.stderr[-2000:])
    return time.monotonic() - begin, ran.stderr


def ran(report: str) -> list[str]:
    """The RUN and COPY steps that were not taken from the cache."""
    steps = dict(re.findall(r"^#(\d+) \[(.*? \d+/\d+)\] (?:RUN|COPY)", report, re.M))
    cached = set(re.findall(r"^#(\d+) CACHED", report, re.M))
    return sorted(name for number, name in steps.items() if number not in cached)


def following(name: str, mark: str) -> int:
    """How many steps a recipe has from the first on that mounts what changed."""
    steps = (images.folder(name) / "Dockerfile").read_text().split("\nRUN ")[1:]
    first = next((n for n, step in enumerate(steps) if mark and mark in step), len(steps))
    return len(steps) - first


def rebuild(changed: str, names: list[str], stack: str) -> Rebuild:
    """Build once with a file changed, or with none.

    The hook is measured on the images that bring it: all of an engine follows it, as it must.
    """
    path, mark = TOUCHED.get(changed, ("", ""))
    if changed == "hook":
        names = [name for name in names if following(name, mark)]
    if not names:  # bake would take none for all
        return Rebuild(changed, 0.0, [], 0)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for folder in READ:
            shutil.copytree(paths.ROOT / folder, root / folder)
        if path:
            (root / path).open("a").write(f"# touched {time.time_ns()}\n")
        seconds, report = bake(names, stack, root)
    return Rebuild(changed, seconds, ran(report), sum(following(name, mark) for name in names))


def layers(reference: str) -> dict[str, float]:
    """What an image is made of: step -> bytes, unpacked."""
    told = subprocess.run(
        ["docker", "history", "--no-trunc", "--format", "{{json .}}", reference],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found: dict[str, float] = {}
    for line in told.splitlines():
        step = json.loads(line)
        number, unit = re.fullmatch(r"([\d.]+)(\w+)", step["Size"]).groups()  # type: ignore[union-attr]
        found[f"{step['CreatedAt']} {step['CreatedBy']} {step['Size']}"] = (
            float(number) * UNITS[unit]
        )
    return found


def here(stack: str) -> list[str]:
    """The images of the graph that are on this machine."""
    found = []
    for name in images.targets():
        with contextlib.suppress(LaneError):
            images.identify(name, stack)
            found.append(name)
    return found


def measure(stack: str, built: str = "") -> Measured:
    """Measure what is here, or what is named.

    Raises:
        SystemExit: nothing is.
    """
    names = built.split() or here(stack)
    if not names:
        raise SystemExit(f"no image of stack {stack} is here: build one first")
    rebuild("", names, stack)  # what is here may be older than the recipes
    rebuilds = [rebuild(changed, names, stack) for changed in ("", *TOUCHED)]
    engines = [n for n in names if not n.startswith("transport") and images.ancestors(n)]
    parts = [layers(images.local(name, stack)) for name in engines]
    unique = sum({k: v for part in parts for k, v in part.items()}.values())
    largest = max((sum(part.values()) for part in parts), default=0)
    return Measured(names, stack, rebuilds, engines, unique, largest)


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stack", default=images.DEFAULT_STACK)
    parser.add_argument("--built", default="")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.stack, options.built)
    if options.json:
        print(json.dumps(asdict(found)))
        return
    print(f"images: {', '.join(found.images)} (stack {found.stack})")
    for each in found.rebuilds:
        steps = f"{len(each.ran)} steps ran, {each.follow} follow: {', '.join(each.ran) or 'none'}"
        print(f"{each.changed or 'nothing'} changed: {each.seconds:.1f} s, {steps}")
    if found.engines:
        share = found.unique / found.largest
        print(f"bytes of {', '.join(found.engines)} over the largest: {share:.2f}")


if __name__ == "__main__":
    main()
