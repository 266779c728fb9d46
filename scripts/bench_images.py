"""Measure the image graph: `make bench-images`. Prints ratios and seconds, judges nothing.

* a rebuild of everything that is here, with nothing changed
* the steps that run again when the evidence hook changes, and when a lane's file does
* the bytes of all engine images together, over those of the largest: what shared layers save
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lanekit import images, paths
from lanekit.errors import LaneError

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def bake(names: list[str], stack: str, **contexts: str) -> tuple[float, str]:
    """Build without keeping anything; seconds and bake's own report."""
    given = images.roots(os.environ)
    made: dict[str, Any] = images.definition(stack, given)
    for body in made["target"].values():
        body["output"] = ["type=cacheonly"]
    for name in ("transport-v1", "transport-v2"):
        made["target"][name]["contexts"] |= contexts
    files = ["-f", str(images.GRAPH), "-f", str(images.write(made, f"bench-{stack}"))]
    begin = time.monotonic()
    ran = subprocess.run(
        ["docker", "buildx", "bake", "--progress=plain", *files, *names],
        cwd=paths.ROOT, env=os.environ | images.variables(stack), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if ran.returncode:
        raise SystemExit(ran.stderr[-2000:])
    return time.monotonic() - begin, ran.stderr


def ran(report: str) -> list[str]:
    """The RUN and COPY steps that were not taken from the cache."""
    steps = dict(re.findall(r"^#(\d+) \[(.*? \d+/\d+\]) (?:RUN|COPY)", report, re.M))
    cached = set(re.findall(r"^#(\d+) CACHED", report, re.M))
    return sorted(f"[{name}" for number, name in steps.items() if number not in cached)


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


def main(stack: str) -> None:
    """Measure what is here."""
    names = here(stack)
    if not names:
        raise SystemExit("bench-images: no image is here; build one first")
    print(f"images: {', '.join(names)} (stack {stack})")
    seconds, report = bake(names, stack)
    print(f"rebuild with nothing changed: {seconds:.1f} s, {len(ran(report))} steps ran")
    contexts = json.dumps(images.definition(stack, images.Roots())["target"])
    print(f"contexts under lanes/: {contexts.count(str(paths.LANES))}")
    if any(name.startswith("transport-v") for name in names):
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / "evidence"
            shutil.copytree(paths.ROOT / "scripts" / "evidence", copy)
            (copy / "lane_evidence.py").open("a").write("# touched\n")
            _, report = bake(names, stack, evidence=str(copy))
        print(f"steps that ran after the hook changed: {', '.join(ran(report)) or 'none'}")
    engines = [n for n in names if not n.startswith("transport") and images.ancestors(n)]
    if engines:
        parts = [layers(images.local(name, stack)) for name in engines]
        unique = sum({k: v for part in parts for k, v in part.items()}.values())
        largest = max(sum(part.values()) for part in parts)
        print(f"bytes of {', '.join(engines)} over the largest: {unique / largest:.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else images.DEFAULT_STACK)
