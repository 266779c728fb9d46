"""What the harness costs with the number of hosts: plan, launch, collect and verify, simulated.

    scripts/bench_hosts.py [--hosts 2,16,128,1024] [--json]

Every host is a process here that prints the start-up log of eight ranks (about 0.4 MB) and ends: a
no-op for a rank, but a real process, a real log, a real plan and a real judging of all ranks by the
lane's contract. What a network, a scheduler or an engine costs is not in it.
"""

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec

from bench_verify import start_up
from lanekit import case, judge, logs, machine, paths, planning, process, spec
from lanekit import drop as drops
from lanekit.plan import Plan, Service

BASE: Final = "p5en-x2"
GPUS: Final = 8
SIZES: Final = (2, 16, 128, 1024)
AT_ONCE: Final = 64  # ranks that are started before the first of them is waited for


@dataclass(frozen=True)
class Took:
    """Seconds of each phase for a number of hosts. ranks: how many the verdict found."""

    hosts: int
    plan: float
    launch: float
    collect: float
    verify: float
    ranks: str

    @property
    def total(self) -> float:
        """All phases together."""
        return self.plan + self.launch + self.collect + self.verify


@contextmanager
def fleet(hosts: int) -> Iterator[str]:
    """A profile of so many hosts and a micro lane that runs on it, in a scratch checkout."""
    name = f"p5en-x{hosts}"
    with tempfile.TemporaryDirectory(prefix="lanes-bench-") as scratch:
        before = paths.PROFILES, paths.LANES
        for folder in before:
            shutil.copytree(folder, Path(scratch) / folder.name)
        paths.PROFILES = Path(scratch) / before[0].name  # type: ignore[misc]
        paths.LANES = Path(scratch) / before[1].name  # type: ignore[misc]
        text = (paths.PROFILES / f"{BASE}.toml").read_text().replace(BASE, name)
        text = text.replace("hosts = 2", f"hosts = {hosts}")
        text = text.replace("ranks = 16", f"ranks = {hosts * GPUS}")
        (paths.PROFILES / f"{name}.toml").write_text(text)
        lane = paths.LANES / "micro" / "lane.toml"
        lane.write_text(lane.read_text().replace(f"{BASE} =", f"{name} =")
                        .replace(f'"{BASE}"', f'"{name}"')
                        .replace(f"profiles.{BASE}", f"profiles.{name}"))  # fmt: skip
        try:
            yield name
        finally:
            paths.PROFILES, paths.LANES = before  # type: ignore[misc]


def simulate(hosts: int) -> Took:
    """Plan a fleet, start a process for every host, seal the drop, judge it."""
    with fleet(hosts) as name, tempfile.TemporaryDirectory(prefix="lanes-bench-") as scratch:
        said = _logs(Path(scratch) / "said", hosts)
        marks = [time.perf_counter()]
        made = _plan(name, hosts, Path(scratch) / "results")
        marks.append(time.perf_counter())
        drop = drops.Drop.create(made)
        _launch(made, drop, said)
        marks.append(time.perf_counter())
        drop.seal()
        marks.append(time.perf_counter())
        files = tuple(sorted(drop.path.glob("logs/*")))
        found = tuple(logs.find(drop.path, files, ours=True))
        of = ("micro", "v2", name, made.contract)
        subject = case.Subject(drop.path, files, *of, found, ours=True)
        verdict = case.judged(subject, judge.Facts(spec.profile(name), None, batch=True), (), ())
        marks.append(time.perf_counter())
    seen = next(check.actual for check in verdict.checks if check.id == "elastic-proxy")
    ranks = seen.partition(";")[0]
    plan, launch, collect, verify = (b - a for a, b in itertools.pairwise(marks))
    return Took(hosts, plan, launch, collect, verify, ranks)


def _logs(folder: Path, hosts: int) -> list[Path]:
    """What each host's ranks will say; made beforehand and not counted."""
    folder.mkdir()
    found = []
    for number in range(hosts):
        text = "\n".join(start_up(f"ip-10-0-{number >> 8}-{number & 255}", number))
        world = hosts * GPUS
        text = text.replace("world=16", f"world={world}").replace("nRanks 16", f"nRanks {world}")
        found.append(folder / str(number))
        found[-1].write_text(text + "\n")
    return found


def _plan(profile: str, hosts: int, results: Path) -> Plan:
    here = machine.Machine(
        host="here", kernel="", cpus=1, memory_mib=1 << 20, gpus=(), gpu_processes=(), nics=(),
        gdrdrv="", fi_info="",
    )  # fmt: skip
    named = ",".join(f"10.0.{number >> 8}.{number & 255}" for number in range(hosts))
    return planning.make(
        planning.Options(lane="micro", profile=profile, arm="v2", hosts=named, start=False,
                         results=str(results)), here,
    )  # fmt: skip


def _launch(plan: Plan, drop: drops.Drop, said: Sequence[Path]) -> None:
    """A process a host, AT_ONCE of them at a time, each recorded before the next thing happens."""
    for first in range(0, len(plan.hosts), AT_ONCE):
        tasks = []
        for host, text in list(zip(plan.hosts, said, strict=True))[first : first + AT_ONCE]:
            service = Service("decode", host.name, ("cat", str(text)), {})
            log = drop.log(host.name, service.name)
            with log.open("wb") as stream:
                child, started = process.spawn(service.name, service.command, {}, stream)
            tasks.append(child)
            drop.manifest.processes.append(msgspec.structs.replace(started, host=host.name))
        drop.save()
        for child in tasks:
            child.wait()


def table(found: Sequence[Took]) -> str:
    """One line a size: seconds in all, and per host by phase, in milliseconds."""
    lines = [f"{'hosts':>6} {'s':>8} {'ms/host':>8}  plan launch collect verify   ranks seen"]
    for took in found:
        each = [1000 * s / took.hosts for s in (took.plan, took.launch, took.collect, took.verify)]
        shown = " ".join(f"{ms:6.2f}" for ms in each)
        lines.append(
            f"{took.hosts:>6} {took.total:>8.2f} {1000 * took.total / took.hosts:>8.2f} {shown}"
            f"   {took.ranks}"
        )
    return "\n".join(lines)


def main() -> int:
    """Print the table; 0 when every rank was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", default=",".join(map(str, SIZES)))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [simulate(int(word)) for word in options.hosts.split(",")]
    print(json.dumps([asdict(took) for took in found]) if options.json else table(found))
    whole = all(t.ranks == f"{t.hosts * GPUS} of {t.hosts * GPUS} ranks" for t in found)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
