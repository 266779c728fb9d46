"""One row again, by the same plan and the same run: pulled, run, judged, set beside the published.

lanekit reproduce vllm/epnc8/c32                  on the fleet that it was published on
lanekit reproduce vllm/floor/c4 --profile cpu     a row of this project, on this machine
lanekit reproduce vllm/epnc8/c32 --drop DIR       a drop that is already there
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from lanekit import (
    compare,
    hosts,
    lanes,
    machine,
    plan,
    planning,
    published,
    registry,
    render,
    spec,
)
from lanekit import drop as drops
from lanekit.errors import ConfigError, LaneError, Unreadable, require_known
from lanekit.machine import Machine
from lanekit.manifest import Manifest
from lanekit.plan import Plan
from lanekit.published import Published
from lanekit.verdict import Verdict
from lanekit.verify import verify

NOT_COMPARED: Final = ("gin", "qps", "sms", "communicators", "check", "timing", "program")
FALLBACKS: Final = ("vllm", "micro")  # lanes whose rows run on any machine
LACKING: Final = 8  # checks that are named


class Name(msgspec.Struct, frozen=True):
    """A row as ROW= names it."""

    lane: str
    arm: str
    cell: str

    def __str__(self) -> str:
        return f"{self.lane}/{self.arm}/{self.cell}"


def parse(text: str) -> Name:
    """`lane/arm/cell` as a row of this checkout. Raises ConfigError: it has not that shape, or
    names what does not exist; a published row without an arm here says so."""
    words = text.split("/")
    if len(words) != 3 or not all(words):
        raise ConfigError(
            f"ROW: '{text}' is not lane/arm/cell",
            remedy="As in ROW=vllm/epnc8/c32; `make lanes` lists every row.",
        )
    name = Name(*words)
    _require_declared(name)
    return name


def _require_declared(name: Name) -> None:
    """Refuse a row that no lane file has, with what is known of it."""
    declared = name.lane in spec.lane_names() and name.arm in spec.lane(name.lane).arms
    if not declared:
        rows = [row for row in published.load().rows if row.arm == f"{name.lane}/{name.arm}"]
        if rows:
            why = "retired" if all(row.retired for row in rows) else "not declared here"
            raise ConfigError(
                f"ROW: {name.lane}/{name.arm} is a published row only: {why}",
                remedy="RESULTS.md shows its figures; `make lanes` lists the rows that can be run.",
            )
    found = spec.lane(name.lane)
    if not declared:
        known = ", ".join(found.arms)
        raise ConfigError(
            f"ROW: lane {name.lane} has no arm '{name.arm}'", remedy=f"Known: {known}."
        )
    spec.cells(found, name.arm, [name.cell])
    if own := found.arms[name.arm].cells:  # a rollout's arm starts no GRPO
        require_known(name.cell, own, "cell", option=f"ROW: {name.lane}/{name.arm}")


def run(args: argparse.Namespace, options: planning.Options) -> int:
    """Reproduce a row; returns 0 reproduced or nothing to hold it to, 1 refuted or below the band,
    2 no verdict. Raises LaneError: it cannot be run here; nothing was started."""
    name, known = parse(args.row), published.load()
    if args.drop:
        return _shown(known, name, args.drop)
    here = machine.read()
    options = settled(known, name, options, here)
    made = planning.make(msgspec.structs.replace(options, start=False), here)
    if args.plan:
        _say(_before(known, name, made))
        print(plan.render(made))
        return 0
    require(name, made, here)
    _say(_before(known, name, made))
    if made.containers is not None:
        for ssh in dict.fromkeys(host.ssh for host in made.hosts):
            for image in needed(spec.lane(name.lane), name.arm, made.profile):
                _say([registry.pull(image, made.stack, args.registry, ssh=ssh)])
    made = planning.make(options, here)
    planning.require_hosts(made)
    from lanekit import run as runs  # noqa: PLC0415
    from lanekit.progress import Progress  # noqa: PLC0415

    runs.main(made, Progress())
    return _shown(known, name, Path(made.drop))


def settled(
    known: Published, name: Name, options: planning.Options, here: Machine
) -> planning.Options:
    """The options with profile and launcher chosen: the published fleet where the row has one, and
    images where they are published, else the engine's lock. Raises ConfigError: the arm does not
    fit the profile."""
    lane = spec.lane(name.lane)
    fleets = [figure.run.profile for figure in published.figures(known, str(name))]
    fits = [fleet for fleet in fleets if fleet in lane.arms[name.arm].contracts]
    profile = options.profile or (fits[0] if fits else _own(lane, name.arm, here))
    why = "the fleet it was published on" if fits else "the nearest to this machine that it has"
    spec.arm(lane, name.arm, profile)
    return msgspec.structs.replace(
        options,
        lane=name.lane,
        arm=name.arm,
        cells=(name.cell,),
        profile=profile,
        profile_why=options.profile_why or ("" if options.profile else why),
        launcher=options.launcher or _launcher(lane, name.arm, profile, options),
    )


def _own(lane: spec.Lane, arm: str, here: Machine) -> str:
    """The profile of an arm that this machine is, else its first."""
    fits = [spec.profile(name) for name in lane.arms[arm].contracts]
    name, _ = machine.choose(here, fits)
    return name if name in lane.arms[arm].contracts else fits[0].name


def needed(lane: spec.Lane, arm: str, profile: str) -> list[str]:
    """The images of the graph that an arm runs in: engine, load generator, tools."""
    loader = ["aiperf"] if lane.workload.driver == "aiperf" else []
    return [spec.image(lane, arm, profile), *loader, *lane.profiles[profile].tools.values()]


def _launcher(lane: spec.Lane, arm: str, profile: str, options: planning.Options) -> str:
    """Containers where every image is published or nothing else holds the engine; else in place."""
    held = registry.read().get(lane.arms[arm].stack or lane.stack, {})
    if all(image in held for image in needed(lane, arm, profile)):
        return "compose"
    in_place = options.server_python or lane.profiles[profile].environment
    return "process" if in_place and spec.profile(profile).hosts == 1 else "compose"


def require(name: Name, made: Plan, here: Machine) -> None:
    """Refuse before anything is pulled or started where the fleet is not there. Raises ConfigError:
    what is missing, and the nearest row that this machine can run."""
    profile = spec.profile(made.profile)
    unnamed = made.hosts_why == hosts.UNNAMED
    if made.hosts[0].ssh and not unnamed:  # the leader is another machine: doctor asks it
        return
    missing = lacks(profile, here)
    if unnamed:
        missing.append(f"it needs {profile.hosts} hosts, named with HOSTS=")
    if missing:
        raise ConfigError(
            f"{name} on {profile.name} cannot run here: {', '.join(missing)}",
            remedy=f"Nearest here: {nearest(name, here)}. On the fleet: "
            f"make reproduce ROW={name} PROFILE={profile.name}"
            + (" HOSTS=a,b" if profile.hosts > 1 else "")
            + ". PLAN=1 prints the plan; RESULTS=DIR compares a drop from there.",
        )


def lacks(profile: spec.Profile, here: Machine) -> list[str]:
    """What this machine has not of a host of the fleet."""
    fits = [gpu for gpu in here.gpus if profile.gpu in gpu.name]
    missing = []
    if len(fits) < profile.gpus:
        missing.append(
            f"it needs {profile.gpus} {profile.gpu} GPUs a host and there are {len(fits)}"
        )
    if len(here.nics) < profile.nics:
        missing.append(f"it needs {profile.nics} EFA NICs a host and there are {len(here.nics)}")
    return missing


def nearest(name: Name, here: Machine) -> str:
    """The command of the row closest to one that cannot run here: the same arm on another fleet,
    another arm of its lane, or another lane."""
    for lane in map(spec.lane, dict.fromkeys((name.lane, *FALLBACKS))):
        same = lane.arms.get(name.arm) if lane.name == name.lane else None
        for profiles in (list(same.contracts) if same else [], list(lane.profiles)):
            fits = [p for p in map(spec.profile, profiles) if not lacks(p, here) and p.hosts == 1]
            if fits:
                best = max(fits, key=lambda profile: profile.gpus).name
                arm = name.arm if same and best in same.contracts else lane.profiles[best].arm
                cells = list(spec.cells(lane, arm))  # its own sweep: a rollout has no GRPO step
                cell = name.cell if name.cell in cells else cells[0]
                return f"make reproduce ROW={lane.name}/{arm}/{cell} PROFILE={best}"
    return "make verify-logs RESULTS=DIR"


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def _before(known: Published, name: Name, made: Plan) -> list[str]:
    """What is known of the row before it runs."""
    found = published.figures(known, str(name))
    lines = [
        f"published: {known.metrics[f.metric].title} {f.value} {known.metrics[f.metric].unit} "
        f"on {f.run.profile}, {f.run.date} ({backing(f.row)})"
        for f in found
    ] or [f"published: no figure of {name}"]
    failing = lanes.failing(spec.lane(name.lane).arms[name.arm], made.profile)
    if failing:
        lines.append(
            f"known failing since {failing.since}: {failing.what} {failing.issue}".rstrip()
        )
    how = "images by digest" if made.containers else "in place, from locks with hashes"
    lines += [f"warning: {said}" for said in planning.warnings(made)]
    return [*lines, f"{name} on {made.profile} ({made.profile_why}), {made.launcher}: {how}"]


def backing(row: published.Row) -> str:
    """What stands behind a published figure, in a word."""
    return row.evidence if row.supported else f"not supported: {row.why}"


# ---------------------------------------------------------------- after it


def _shown(known: Published, name: Name, folder: Path) -> int:
    """Judge a drop, print it beside what was published and what this project committed."""
    manifest = drops.read(folder) if (folder / drops.MANIFEST).is_file() else None
    verdict = _judged(name, folder, manifest)
    found = compare.lines(known, verdict, name.cell)
    lines = [f"\n{name} on {verdict.profile}: {verdict.result} ({verdict.reason})"]
    lines += _lacking(verdict, name.cell)
    lines += _beside_published(known, found) if found else [f"no published figure of {name}"]
    if found:
        rows = differs(found[0], manifest, folder)
        lines += render.aligned([("what differs", "published", "here"), *rows])
    lines += _beside_own(known, name, verdict, folder)
    print("\n".join([*lines, _outcome(known, name, verdict, found)]))
    if verdict.result != "proven":
        return verdict.exit_code
    return 1 if compare.reproduced(known, found) is False else 0


def _lacking(verdict: Verdict, cell: str) -> Iterator[str]:
    """Why a drop has no figure of a load point: how far its run came, what is not met."""
    if compare.measured(verdict, cell):
        return
    held = ", ".join(compare.cells(verdict)) or "no load point"
    yield f"nothing measured of {cell}; the drop has figures of {held}"
    yield from (f"  {said}" for said in verdict.said)
    unmet = [x for x in verdict.checks if x.severity == "required" and x.outcome != "met"]
    yield from (f"  {x.id}: {x.actual or x.expected}" for x in unmet[:LACKING])
    if len(unmet) > LACKING:
        yield f"  and {len(unmet) - LACKING} more checks: `make verify-logs RESULTS=DIR`"


def _judged(name: Name, folder: Path, manifest: Manifest | None) -> Verdict:
    """The verdict of the drop of that row. Raises ConfigError: it holds another row."""
    given = {} if manifest else {"lane": name.lane, "arm": name.arm}
    verdict = verify(folder, **given)
    seen = set(compare.cells(verdict))
    cells = set(manifest.row.cells) if manifest else seen
    if (verdict.lane, verdict.arm) != (name.lane, name.arm) or name.cell not in cells:
        held = ", ".join(f"{verdict.lane}/{verdict.arm}/{cell}" for cell in sorted(cells))
        raise ConfigError(
            f"{folder}: holds {held or 'no load point'}, not {name}",
            remedy="Name its row with ROW=, or give another drop with RESULTS=.",
        )
    return verdict


def _beside_published(known: Published, found: Sequence[compare.Line]) -> list[str]:
    rows = [("figure", "measured", "published", "difference", "", "backed by")]
    for line in found:
        metric, run = known.metrics[line.figure.metric], line.figure.run
        rows.append(
            (
                f"{metric.title}, {metric.unit}".rstrip(", "),
                "-" if line.measured is None else f"{line.measured:.1f}",
                str(line.figure.value),
                "-" if line.difference is None else f"{line.difference:+.1%}",
                f"{line.standing}{_bar(known, line)}",
                f"{backing(line.figure.row)}; {run.profile}, {run.date}",
            )
        )
    return render.aligned(rows)


def _bar(known: Published, line: compare.Line) -> str:
    """Whether a figure meets the bar that was set for it, wherever it was measured."""
    bar = line.figure.row.bars.get(line.figure.metric)
    if bar is None or line.measured is None:
        return ""
    higher = known.metrics[line.figure.metric].better == "higher"
    met = line.measured >= bar if higher else line.measured <= bar
    return f", bar {bar:g} {'met' if met else 'missed'}"


def _beside_own(known: Published, name: Name, verdict: Verdict, folder: Path) -> list[str]:
    """This project's newest committed drop of the same row and fleet."""
    for other in reversed(lanes.tracked()):
        if other.resolve() == folder.resolve():
            continue
        try:
            held = drops.read(other).row
            same = (held.lane, held.arm, held.profile) == (name.lane, name.arm, verdict.profile)
            before = verify(other) if same and name.cell in held.cells else None
        except LaneError:
            continue
        if before is not None:
            said = f"this project's own row, shown and not judged ({other.name}: {before.result}):"
            return [said, *_own_rows(known, name.cell, verdict, before)]
    return [f"no other committed drop of {name} on {verdict.profile}"]


def _own_rows(known: Published, cell: str, verdict: Verdict, before: Verdict) -> list[str]:
    now, then = compare.measured(verdict, cell), compare.measured(before, cell)
    rows = [("figure", "measured", "committed", "difference")]
    for metric in then:
        told = known.metrics[metric]
        share = f"{compare.change(now[metric], then[metric]):+.1%}" if metric in now else "-"
        measured = f"{now[metric]:.1f}" if metric in now else "-"
        rows.append((f"{told.title}, {told.unit}", measured, f"{then[metric]:.1f}", share))
    return render.aligned(rows)


def _outcome(known: Published, name: Name, verdict: Verdict, found: Sequence[compare.Line]) -> str:
    if verdict.result != "proven":
        return f"not reproduced: {verdict.result}"
    told = compare.reproduced(known, found)
    band = f"{compare.BAND:.0%} band"
    if told is None:
        return f"{name}: proven; no published figure of this fleet to hold it to"
    return (
        f"reproduced: within the {band}, or better" if told else f"not reproduced: below the {band}"
    )


def differs(
    line: compare.Line, manifest: Manifest | None, folder: Path
) -> list[tuple[str, str, str]]:
    """(what, published, here) of everything that is not the same, or that nobody stated."""
    run = line.figure.run
    if manifest is None:
        return [("everything", run.profile, "no manifest: nothing is known")]
    here = _here(manifest, folder)
    nics = str(spec.profile(run.profile).nics)
    said: dict[str, str] = {"profile": run.profile, "nics": nics, **run.differs}  # type: ignore[dict-item]
    rows = [(what, said.get(what, "not stated"), here[what]) for what in here]
    rows += [(what, said[what], "see the drop") for what in NOT_COMPARED if what in said]
    return [row for row in rows if row[1] != row[2] and row[1:] != ("not stated", "none")]


class _Model(msgspec.Struct, frozen=True):
    source: str = "not stated"
    dummy_weights: bool = False


class _Planned(msgspec.Struct, frozen=True):
    """What is compared of a plan, which may be a stranger's."""

    engine: str = ""
    launcher: str = ""
    pins: dict[str, str] = {}
    model: _Model = _Model()


class _Gpu(msgspec.Struct, frozen=True):
    driver: str = ""


class _Host(msgspec.Struct, frozen=True):
    """What is compared of host/<host>.json."""

    gpus: tuple[_Gpu, ...] = ()
    nics: tuple[str, ...] = ()
    gdrdrv: str = ""


def _here(manifest: Manifest, folder: Path) -> dict[str, str]:
    """The same traits of our drop, from its manifest and its first host's facts."""
    try:
        planned = msgspec.convert(manifest.plan, _Planned)
        facts = [path.read_bytes() for path in sorted((folder / "host").glob("*.json"))[:1]]
        host = msgspec.json.decode(facts[0], type=_Host) if facts else _Host()
    except (OSError, msgspec.DecodeError) as error:
        raise Unreadable(f"{folder}: {error}", remedy="Restore the drop.") from error
    engine, pins, model = planned.engine, planned.pins, planned.model
    held = next((name for name in (engine, f"{engine}-cpu", "deep-ep") if name in pins), "")
    source = model.source.removesuffix("/none")
    return {
        "profile": manifest.row.profile,
        "stack": manifest.stack,
        "engine": f"{held} {pins[held]}" if held else engine,
        "launcher": planned.launcher,
        "weights": "random" if model.dummy_weights else source,
        "driver": host.gpus[0].driver if host.gpus else "none",
        "nics": str(len(host.nics)),
        "gdrdrv": host.gdrdrv or "none",
        "aiperf": pins.get("aiperf", "none"),
    }
