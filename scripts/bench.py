"""`make bench`: the harness against its bars, each as a ratio or a share, never a lone wall time.

    scripts/bench.py [--lane] [--hosts] [--images "STACK [NAME...]"] [--gib N]

--hosts simulates fleets of up to 1024 hosts (about a minute, 1 GB of disk meanwhile);
--lane takes a real CPU lane with warm environments as well (about two minutes on two cores);
--images rebuilds container images of a stack, those named or all that are here, with one file
changed each time;
--gib sets the size of the drop that verify and ripgrep read (0 leaves that part out).
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
LANEKIT: Final = str(Path(sys.executable).with_name("lanekit"))
REPEATS: Final = 7


@dataclass(frozen=True)
class Figure:
    """One line of the table: what was measured, its value, its bar, and the raw numbers."""

    name: str
    value: float
    bar: float
    raw: str

    @property
    def met(self) -> bool:
        """Whether the value is within its bar."""
        return self.value <= self.bar


def seconds(command: Sequence[str]) -> float:
    """The median wall time of a command over REPEATS runs, after one that is not counted."""
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def commands() -> Iterator[Figure]:
    """`lanekit --help` and `make`, in parts of their bar of 0.3 s."""
    bare = seconds([sys.executable, "-c", "pass"])
    for name, command in (("lanekit --help", [LANEKIT, "--help"]), ("make", ["make"])):
        took = seconds(command)
        raw = f"{took:.3f} s; an empty Python {bare:.3f} s in the same run"
        yield Figure(f"{name} / 0.3 s", took / 0.3, 1.0, raw)


def lane() -> Iterator[Figure]:
    """A real CPU lane with warm environments: what the harness adds to server and AIPerf."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [LANEKIT, "run", "vllm", "--profile", "cpu", "--results", scratch]
        for _ in ("warm", "counted"):
            begin = time.perf_counter()
            subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
            wall = time.perf_counter() - begin
        newest = max(Path(scratch).glob("2*"))
        spent: dict[str, Any] = json.loads((newest / "manifest.json").read_text())["timings"]
    cells = sum(took for phase, took in spent.items() if phase.startswith("cell "))
    harness = wall - spent["install"] - spent["startup"] - cells
    raw = f"{harness:.2f} s of {wall:.1f} s"
    yield Figure("harness share of a lane's wall", harness / wall, 0.03, raw)
    before = spent["install"]
    yield Figure("before the server starts / 3 s", before / 3, 1.0, f"{before:.2f} s")


def verify(gib: float) -> Iterator[Figure]:
    """Verify, with all its judging, beside ripgrep on the same files in the same run."""
    if shutil.which("rg") is None:
        print("verify beside ripgrep: not run, ripgrep is not installed (Debian: ripgrep)")
        return
    bench = [sys.executable, str(ROOT / "scripts" / "bench_verify.py"), "--gib", str(gib)]
    told = json.loads(subprocess.run(bench, capture_output=True, check=True, text=True).stdout)
    raw = f"{told['verify_wall_s']} s / {told['ripgrep_wall_s']} s on {gib:g} GiB"
    yield Figure("verify / ripgrep, wall", told["wall_ratio"], 1.2, raw)
    peak = told["peak_mib"]
    yield Figure("verify's memory / 200 MB", peak / 190.7, 1.0, f"{peak} MiB")


def hosts() -> Iterator[Figure]:
    """A fleet's plan, launch, collect and verify, simulated by bench_hosts.py: what one host costs
    does not grow with their number."""
    bench = [sys.executable, str(ROOT / "scripts" / "bench_hosts.py"), "--json"]
    told = json.loads(subprocess.run(bench, capture_output=True, check=True, text=True).stdout)
    phases = ("plan", "launch", "collect", "verify")
    each = {took["hosts"]: sum(took[p] for p in phases) / took["hosts"] for took in told}
    raw = ", ".join(f"{n}: {1000 * seconds:.0f} ms" for n, seconds in each.items())
    yield Figure("a host of 1024 / a host of 128", each[1024] / each[128], 1.5, f"per host, {raw}")


def images(wanted: str) -> Iterator[Figure]:
    """Rebuilds of container images, by bench_images.py. wanted: a stack, then maybe names."""
    stack, _, named = wanted.partition(" ")
    bench = [sys.executable, str(ROOT / "scripts" / "bench_images.py"), "--json"]
    bench += [f"--stack={stack}", f"--built={named}"]
    told = json.loads(subprocess.run(bench, check=True, stdout=subprocess.PIPE, text=True).stdout)
    names = ", ".join(told["images"])
    nothing, *changed = told["rebuilds"]
    raw = f"{nothing['seconds']:.1f} s, {len(nothing['ran'])} steps: {names} of {stack}"
    yield Figure("images, nothing changed / 5 s", nothing["seconds"] / 5, 1.0, raw)
    for each in changed:
        beyond = len(each["ran"]) - each["follow"]
        raw = f"{len(each['ran'])} steps ran, {each['follow']} follow it, {each['seconds']:.1f} s"
        yield Figure(f"images, steps beyond a changed {each['changed']}", max(beyond, 0), 0, raw)
    if told["engines"]:
        raw = f"{told['unique'] / 1e9:.2f} GB over {told['largest'] / 1e9:.2f} GB, unpacked"
        name = f"{len(told['engines'])} engine images / the largest"
        yield Figure(name, told["unique"] / told["largest"], len(told["engines"]), raw)


def main() -> int:
    """Print the table; 0 when every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lane", action="store_true")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--images", metavar="STACK", default="")
    options = parser.parse_args()
    figures = [*commands()]
    figures += hosts() if options.hosts else []
    figures += images(options.images) if options.images else []
    figures += lane() if options.lane else []
    figures += verify(options.gib) if options.gib else []
    for figure in figures:
        sign = "ok  " if figure.met else "MISS"
        print(f"{sign} {figure.name:<34} {figure.value:6.3f}  bar {figure.bar:g}  ({figure.raw})")
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
