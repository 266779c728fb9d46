"""`lanekit doctor`: is this machine, or fleet, fit for a profile and a lane? Before any run.

Exit codes: 0 fit, 1 not fit, 2 could not check (a check that stops a run could not be made) or bad
usage. `lanekit run` makes the same checks of its own host before it starts anything.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from lanekit import capture, checks, machine, paths, spec
from lanekit.capture import Capture, Probe
from lanekit.checks import Case, Rule
from lanekit.errors import ConfigError, LaneError
from lanekit.plan import Host, Plan
from lanekit.progress import Say

if TYPE_CHECKING:
    import psutil

Outcome = Literal["failed", "unknown", "met"]
Result = Literal["fit", "not fit", "could not check"]
EXIT: Final[Mapping[Result, int]] = {"fit": 0, "not fit": 1, "could not check": 2}
GROUPS: Final[Mapping[Outcome, str]] = {
    "failed": "Failed", "unknown": "Could not check", "met": "Ok",
}  # fmt: skip
FLEET: Final = "fleet"  # checks that apply to hosts together, once
PORTS: Final = (29500,)  # torch's rendezvous, tried between hosts where no port was named


class Finding(msgspec.Struct, frozen=True):
    """One check on one host; host is empty for a check of the fleet. stops: keeps a run from
    starting. said: what was seen, or why nobody can say. remedy: what to do, empty when met."""

    check: str
    host: str
    outcome: Outcome
    stops: bool
    said: str
    remedy: str = ""


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints. hosts: their facts, as host/<host>.json of a drop keeps them."""

    profile: str
    lane: str
    arm: str
    result: Result
    findings: tuple[Finding, ...]
    hosts: tuple[machine.Machine, ...]
    schema: int = 1


def applicable(case: Case) -> dict[str, Rule]:
    """The checks that a profile, and a plan where there is one, call for; declared order."""
    profile, plan = case.profile, case.plan
    has = {
        "gpus": profile.gpus > 0,
        "peers": profile.gpus > 1,
        "nics": profile.nics > 0,
        "ports": bool(case.ports),
        "plan": plan is not None,
        "containers": plan is not None and plan.containers is not None,
        FLEET: profile.hosts > 1 or len(case.hosts) > 1,
    }
    return {
        name: rule
        for name, rule in case.rules.check.items()
        if all(has[word] for word in rule.when)
    }


def questions(case: Case) -> dict[str, Probe]:
    """The probes that the applicable checks read, and those whose facts a drop keeps."""
    found = applicable(case).values()
    kept = {*machine.BRIEF, "gdrdrv", *(["libfabric"] if case.profile.nics else [])}
    wanted = kept | {name for rule in found for name in rule.reads}
    return {name: probe for name, probe in case.rules.probe.items() if name in wanted}


def examine(case: Case) -> tuple[Finding, ...]:
    """Make every applicable check: of each host, or once of the fleet."""
    found = []
    for name, rule in applicable(case).items():
        if FLEET in rule.when or "plan" in rule.when:
            found.append(_finding(name, rule, case, case.hosts[0], ""))
        else:
            asked = (host for host in case.hosts if not host.error)
            found += [_finding(name, rule, case, host, host.host) for host in asked]
    return tuple(found)


def _finding(name: str, rule: Rule, case: Case, host: Capture, where: str) -> Finding:
    outcome: Outcome = "met"
    try:
        answered = sum(not each.error for each in case.hosts)
        if FLEET in rule.when and name != "hosts" and answered < 2:  # one is alike with itself
            raise checks.Unknown("fewer than two hosts answered")
        said = checks.TABLE[name](rule, case, host)
    except checks.Failed as error:
        outcome, said = "failed", str(error)
    except checks.Unknown as error:
        outcome, said = "unknown", str(error)
    except (ValueError, KeyError) as error:
        line = (str(error).strip().splitlines() or ["nothing"])[0]
        outcome, said = "unknown", f"an answer of another form: {line[:120]}"
    policy = {"met": "warns", "failed": rule.failed, "unknown": rule.unknown}[outcome]
    remedy = {"met": "", "failed": rule.remedy, "unknown": _answerable(rule, case)}[outcome]
    return Finding(name, where, outcome, policy == "stops", said, remedy)


def _answerable(rule: Rule, case: Case) -> str:
    """What to do where nobody can say: the command that has to answer."""
    if not rule.reads or FLEET in rule.when:
        return case.rules.check["hosts" if FLEET in rule.when else "floors"].remedy
    asked = case.rules.probe[rule.reads[0]].run.strip().splitlines()[0]
    return f"Make this answer there: {asked[:150]}"


def result(findings: Iterable[Finding]) -> Result:
    """Not fit where a check that stops a run failed; could not check where one is unknown."""
    stopping = {finding.outcome for finding in findings if finding.stops}
    if "failed" in stopping:
        return "not fit"
    return "could not check" if "unknown" in stopping else "fit"


def require(plan: Plan, say: Say) -> dict[str, machine.Machine]:
    """The facts of every host of a plan by its name, refused where a check that stops a run is not
    met; what only warns is said. On one host the ports are bound right before the start instead.
    Raises ConfigError: a host is not fit for the plan, with each check, what was seen and a
    remedy."""
    profile = spec.profile(plan.profile)
    ports = tuple(plan.ports.values()) if len(plan.hosts) > 1 else ()
    case = Case(profile, (), checks.rules(), plan, ports, pinned=_pinned(plan))
    case = ask(case, plan.hosts, folder(plan.drop))
    found = examine(case)
    for finding in found:
        if finding.outcome == "failed" and not finding.stops:
            say(f"warning: {finding.check}: {finding.said}. {finding.remedy}")
    if bad := [finding for finding in found if finding.stops]:
        where = ", ".join(dict.fromkeys(finding.host for finding in bad if finding.host))
        raise ConfigError(
            f"{where or 'the fleet'} not fit for profile {plan.profile}: "
            + "; ".join(f"{finding.check}: {finding.said}" for finding in bad),
            remedy="\n  ".join(dict.fromkeys(finding.remedy for finding in bad))
            + f"\n  `make doctor PROFILE={plan.profile}` shows all; PLAN=1 prints the plan.",
        )
    return {host.host: machine.of(host) for host in case.hosts}


def ask(case: Case, hosts: Sequence[Host], place: Path) -> Case:
    """The case with every host asked, all at once, and between hosts each way tried on each port.

    place: where the drop goes, on this machine.
    """
    asked = questions(case)
    with ThreadPoolExecutor(min(len(hosts), 32)) as pool:
        jobs = [
            pool.submit(capture.capture, host.name, asked, ssh=host.ssh, folder=place)
            for host in hosts
        ]
        captures = tuple(job.result() for job in jobs)
        tried = {
            host.name: pool.submit(capture.capture, host.name, _ways(host, hosts, case.ports),
                                   ssh=host.ssh)
            for host, found in zip(hosts, captures, strict=True)
            if len(hosts) > 1 and not found.error
        }  # fmt: skip
        reached = {name: job.result().texts for name, job in tried.items()}
    return msgspec.structs.replace(case, hosts=captures, reached=reached)


def _ways(source: Host, hosts: Sequence[Host], ports: Iterable[int]) -> dict[str, Probe]:
    """A connection attempt to every other host on every port, by `address:port`."""
    return {
        f"{peer.address}:{port}": Probe(f"bash -c ': </dev/tcp/{peer.address}/{port}'", seconds=5)
        for peer in hosts
        if peer.name != source.name
        for port in ports
    }


def _pinned(plan: Plan | None) -> dict[str, str]:
    """The EFA installer, NCCL and NVSHMEM of a plan's stack."""
    from lanekit import images, pins  # noqa: PLC0415

    stack = plan.stack if plan else images.DEFAULT_STACK
    v1 = plan is not None and "v1" in plan.contract
    known, found = pins.load().pin, {}
    for name in ("efa", "nccl", "nvshmem"):
        pin = known["nvshmem_v1" if v1 and name == "nvshmem" else name]
        value = pin.both or pin.stack.get(stack)
        found[name] = value.version if value else ""
    return found


def text(report: Report, rules: Mapping[str, Rule]) -> str:
    """The report for people, on one screen: what failed, what nobody can say, what is well."""
    where = ", ".join(host.host for host in report.hosts)
    lane = f", {report.lane}/{report.arm}" if report.lane else ""
    lines = [f"{report.profile} on {where}{lane}"]
    for outcome, title in GROUPS.items():
        found = [finding for finding in report.findings if finding.outcome == outcome]
        if found:
            lines += ["", title, *_group(found, rules, len(report.hosts) > 1)]
    return "\n".join([*lines, "", _headline(report)])


def _group(found: Sequence[Finding], rules: Mapping[str, Rule], many: bool) -> Iterator[str]:
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in found:
        alike.setdefault((finding.check, finding.said), []).append(finding)
    for (name, said), same in alike.items():
        hosts = ", ".join(finding.host for finding in same if finding.host)
        sign = "" if same[0].outcome == "met" else "stops " if same[0].stops else "warns "
        yield f"  {sign}{name:10} {said}{f'  [{hosts}]' if hosts and many else ''}"
        if same[0].remedy:
            yield f"        do: {same[0].remedy}"
        if rules[name].note:
            yield f"        note: {rules[name].note}"


def _headline(report: Report) -> str:
    counts = {o: sum(f.outcome == o for f in report.findings) for o in GROUPS}
    return (
        f"{report.result}: {counts['met']} ok, {counts['failed']} failed, "
        f"{counts['unknown']} could not be checked"
    )


def markdown() -> str:
    """The table of every check, for lanes/profiles/README.md."""
    lines = ["| check | what | applies with | failed | could not check |", "|---|---|---|---|---|"]
    for name, rule in checks.rules().check.items():
        when = " and ".join(rule.when) or "always"
        source = f" ({rule.source})" if rule.source else ""
        lines.append(
            f"| `{name}` | {rule.title}{source} | {when} | {rule.failed} | {rule.unknown} |"
        )
    return "\n".join(lines)


def reap(contexts: Sequence[machine.Context], named: Iterable[int]) -> list[int]:
    """End processes of this user that hold a GPU here: what a dead run left, and those named.

    A leftover bears its run's mark, or stands in a session of the run, whose runner is gone. Each
    is known by PID and start: one that began later than it was seen to hold a GPU is not touched.

    Raises:
        ConfigError: a named PID holds no GPU here or is somebody else's.
        LaneError: something would not die.
    """
    from lanekit import process  # noqa: PLC0415

    own = {each.pid: found for each in contexts if (found := _own(each)) is not None}
    for pid in named:
        if pid not in own:
            raise ConfigError(
                f"pid {pid} holds no GPU here as a process of yours; nothing was ended",
                remedy=f"Yours that do: {', '.join(map(str, own)) or 'none'}.",
            )
    left = {each.pid for mark, known in _dead_runs(own) for each in process.left(mark, known)}
    return process.end_exactly([own[pid] for pid in own if pid in {*named} | left])


def _own(context: machine.Context) -> "psutil.Process | None":
    """The living process that was seen, if it is this user's; psutil checks its start again before
    each signal."""
    import psutil  # noqa: PLC0415

    with contextlib.suppress(psutil.Error, OSError, ValueError, IndexError):
        found = psutil.Process(context.pid)
        stat = Path(f"/proc/{context.pid}/stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[19])
        if ticks == context.ticks and found.uids().effective == os.geteuid():
            return found
    return None


def _dead_runs(own: Iterable[int]) -> Iterator[tuple[str, set[int]]]:
    """Marks of runs whose runner is gone, each with the PIDs that its drop recorded."""
    from lanekit import drop, process  # noqa: PLC0415

    for mark in process.marks(own):
        known: set[int] = set()
        with contextlib.suppress(LaneError, OSError):
            manifest = drop.read(Path(mark))
            here = manifest.boot == drop.boot()
            if here and manifest.runner and process.alive(manifest.runner):
                continue
            known = {each.pid for each in manifest.processes if here}
        yield mark, known


def run(args: argparse.Namespace) -> int:
    """Examine, print, and say by the exit code what it means."""
    here = machine.read()
    case = _case(args, here)
    if args.pids and not args.reap:
        raise ConfigError("PIDS= ends processes, with REAP=1 alone", remedy="Add REAP=1.")
    if args.reap:
        ended = reap(_contexts(case), _numbers(args.pids, "PIDS", below=1 << 22))
        print(f"ended: {', '.join(map(str, ended)) or 'none'}", file=sys.stderr)
    case = ask(case, _hosts(args, case, here), folder(args.results))
    findings = examine(case)
    report = Report(
        profile=case.profile.name,
        lane=args.lane,
        arm=case.plan.arm if case.plan else args.arm,
        result=result(findings),
        findings=findings,
        hosts=tuple(map(machine.of, case.hosts)),
    )
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print(text(report, case.rules.check))
    return EXIT[report.result]


def _case(args: argparse.Namespace, here: machine.Machine) -> Case:
    from lanekit import planning  # noqa: PLC0415

    known = [spec.profile(name) for name in spec.profile_names()]
    profile = spec.profile(args.profile or machine.choose(here, known)[0])
    plan = None
    if args.lane:
        options = planning.Options(
            args.lane, profile=profile.name, arm=args.arm, hosts=args.hosts,
            launcher=args.launcher, start=False,
        )  # fmt: skip
        plan = planning.make(options, here)
    ports = _numbers(args.ports, "PORTS", below=1 << 16) or (PORTS if profile.hosts > 1 else ())
    return Case(profile, (), checks.rules(), plan, ports, pinned=_pinned(plan))


def _hosts(args: argparse.Namespace, case: Case, here: machine.Machine) -> tuple[Host, ...]:
    """The hosts that are named; this machine alone where a fleet's are not."""
    from lanekit import hosts  # noqa: PLC0415

    fleet, why = hosts.fleet(args.hosts, case.profile, here.host)
    alone = msgspec.structs.replace(fleet[0], name=here.host, address="127.0.0.1", ssh="")
    return (alone,) if why == hosts.UNNAMED else fleet


def _contexts(case: Case) -> Sequence[machine.Context]:
    """Who holds GPUs here."""
    asked = {"contexts": case.rules.probe["contexts"]}
    return machine.of(capture.capture("", asked)).contexts


def folder(results: str) -> Path:
    """Where drops go, or the nearest folder above it that exists."""
    place = Path(results).resolve() if results else paths.RESULTS
    return next(each for each in (place, *place.parents) if each.is_dir())


def _numbers(words: str, option: str, *, below: int) -> tuple[int, ...]:
    found = words.replace(",", " ").split()
    bad = [word for word in found if not word.isdecimal() or not 0 < int(word) < below]
    if bad:
        raise ConfigError(
            f"{option}: '{bad[0]}' is no number below {below}", remedy=f"Write {option}=1,2."
        )
    return tuple(int(word) for word in found)
