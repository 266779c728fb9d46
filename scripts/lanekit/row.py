"""Whether a manifest holds together: its row, its plan, and what the lane file says of both.

Pure. A contradiction refutes; a row that no lane file knows cannot be checked, so it is no proof.
"""

import contextlib
import datetime
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from lanekit import contract, load, paths, spec
from lanekit.clock import Window
from lanekit.contract import Severity
from lanekit.errors import ConfigError
from lanekit.given import Given
from lanekit.manifest import Manifest, Row
from lanekit.plan import FILES, INHERITED, OPTION, Plan, public
from lanekit.plan import options as options_of
from lanekit.reading import array, table
from lanekit.verdict import Check, Outcome

SAME: Final = ("lane", "arm", "profile")  # said by the row and by the plan


# What an engine, or a library that the evidence hook reads, is installed as.
DISTRIBUTIONS: Final[dict[str, tuple[str, ...]]] = {
    "trtllm": ("tensorrt-llm",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "nvshmem": ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"),
    "deep_ep": ("deep-ep", "sgl-deep-ep"),
}


def version(plan: Mapping[str, Any]) -> str | None:
    """The engine's pinned version; its CPU build, or its distribution, has a name of its own."""
    engine, pins = str(plan.get("engine")), table(plan.get("pins"))
    names = (engine, f"{engine}-cpu", *DISTRIBUTIONS.get(engine, ()))
    return next((found for name in names if isinstance(found := pins.get(name), str)), None)


def options(plan: Mapping[str, Any]) -> dict[str, str]:
    """Options and variables of what a plan starts, by name; of a server before a load generator."""
    found: dict[str, str] = {}
    for each in (*table(plan.get("cells")).values(), *array(plan.get("services"))):
        found |= given(each)
    return found


def given(started: object) -> dict[str, str]:
    """Options and variables of one cell or service."""
    held, found = table(started), dict[str, str]()
    with contextlib.suppress(ValueError):  # an open quotation
        found |= options_of(str(word) for word in array(held.get("command")))
    return found | {name: str(value) for name, value in table(held.get("env")).items()}


def images(manifest: Manifest) -> dict[str, Any]:
    """The images of a run, as its manifest and its plan say."""
    planned = table(table(manifest.plan.get("containers")).get("images"))
    return {**manifest.images, **planned}


def lane(row: Row) -> spec.Lane | None:
    """The lane of a row; None where this checkout has no such lane, arm, or arm on that profile."""
    try:
        found = spec.lane(row.lane)
        spec.arm(found, row.arm, row.profile)
    except ConfigError:
        return None
    return found


def driver(known: spec.Lane | None, plan: Mapping[str, Any]) -> object:
    """How a drop was made: as its lane says, and only for an unknown lane as its plan says."""
    return known.workload.driver if known else plan.get("driver")


def models_own(manifest: Manifest, known: spec.Lane | None) -> bool:
    """Whether a drop is of its lane's own model."""
    return known is None or _source(manifest) == _lane_s(manifest, known)


def _source(manifest: Manifest) -> object:
    return table(manifest.plan.get("model")).get("source")


def _lane_s(manifest: Manifest, known: spec.Lane) -> str:
    return (known.profiles[manifest.row.profile].model or known.model).source


def said(manifest: Manifest, known: spec.Lane | None) -> Iterator[str]:
    """What no check decides, and a reader must know."""
    if known and not models_own(manifest, known):
        source, lane_s = _source(manifest), _lane_s(manifest, known)
        yield f"with MODEL=: {_shown(source)}, the lane has {lane_s}"
    given = table(manifest.plan.get("extra_env"))
    if given:
        yield f"with ENV=: {_listed(f'{name}={value}' for name, value in given.items())}"
    ambient = {name: value for name, value in _inherited(manifest).items()
               if name.startswith("NCCL_") and name not in given}  # fmt: skip
    if ambient:
        yield f"inherited: {_listed(f'{name}={value}' for name, value in ambient.items())}"
    if manifest.git.get("dirty") == "yes":
        yield "run from a checkout with changes that no commit holds"


def checks(manifest: Manifest, known: spec.Lane | None) -> list[Check]:
    """The manifest beside itself, and beside its lane."""
    row = manifest.row
    wrong = _against_itself(manifest) + (_against_lane(manifest, known) if known else [])
    strange = f"this checkout has no {row.lane}/{row.arm} on {row.profile}"
    first = _check(
        "manifest",
        "failed" if wrong else "met" if known else "unchecked",
        "row and plan are one, and of the lane's kind",
        "; ".join(wrong) or ("as planned" if known else strange),
        manifest,
    )
    return [first, _as_lane(manifest, known)] if known else [first]


def _check(name: str, outcome: Outcome, why: str, actual: str, manifest: Manifest) -> Check:
    row, commit = manifest.row, manifest.git.get("commit", "")[:12] or "an unknown commit"
    remedies = {
        "failed": "Restore the manifest that the run wrote.",
        "unchecked": f"Judge it with the harness that made it: git commit {commit}.",
    }
    return Check(
        id=name,
        group="drop",
        severity="required",
        outcome=outcome,
        why=why,
        expected=f"the plan of {row.lane}/{row.arm} on {row.profile}",
        actual=actual,
        remedy=remedies.get(outcome, ""),
    )


def _as_lane(manifest: Manifest, known: spec.Lane) -> Check:
    """The plan beside what the lane's file here makes of the same choices. Where that file is
    another than the drop was made with, a difference may be later tuning: it refutes nothing, and
    proves nothing, since a plan could claim any digest. Of a patch series the text may be another,
    which its prose can make: that is noted."""
    from lanekit import planning  # noqa: PLC0415  (0.2 s, and no stranger's drop needs it)

    row = manifest.row
    unchanged = planning.digest(known, row.arm, row.profile) == manifest.plan.get("lane_sha256")
    told, moved = _planned_again(manifest, known)
    said = told or moved
    found = _check(
        "lane",
        "met" if not said else "failed" if unchanged and told else "unchecked",
        "commands, variables, load and patches are those that the lane plans",
        "as the lane plans"
        if not said
        else said
        if unchanged
        else f"the lane has changed since, or the plan: {said}",
        manifest,
    )
    severity: Severity = "noted" if moved and not told else "required"
    return msgspec.structs.replace(found, severity=severity)


def _planned_again(manifest: Manifest, known: spec.Lane) -> tuple[str, str]:
    """Where a plan is not the lane's; and where only a patch series is another, as its prose alone
    made it before 2026-12."""
    from lanekit import planning  # noqa: PLC0415

    try:
        plan = msgspec.convert(manifest.plan, Plan)
        today = planning.again(plan, known)
    except (msgspec.ValidationError, LookupError, ValueError, ConfigError) as error:
        return f"cannot be planned again: {error}", ""
    differ = list(_differences(public(today), msgspec.to_builtins(plan), "plan"))
    series = {f"plan.patches.{name} " for name in plan.patches if name in today.patches}
    moved = [each for each in differ if each.startswith(tuple(series))] if series else []
    return "; ".join(each for each in differ if each not in moved), "; ".join(moved)


def _differences(ours: Any, theirs: Any, at: str) -> Iterator[str]:
    """Where a plan is not the one worked out anew: place, what it says, what the lane says."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}, key=str):
            if (at, key) != ("plan", "lane_sha256"):
                yield from _differences(ours.get(key), theirs.get(key), f"{at}.{key}")
    elif isinstance(ours, tuple | list) and isinstance(theirs, tuple | list):
        for number, (our, their) in enumerate(itertools.zip_longest(ours, theirs)):
            yield from _differences(our, their, f"{at}.{number}")
    elif not _same(ours, theirs):
        yield f"{at} {_shown(theirs)}, the lane has {_shown(ours)}"


def _same(ours: object, theirs: object) -> bool:
    """Equal, but for where a checkout stood: its lanes, its cache; and what a redacted path calls
    the folder of a drop's files."""
    if ours == theirs or not isinstance(ours, str) or not isinstance(theirs, str):
        return ours == theirs
    roots = (str(paths.LANES), str(paths.CACHE))
    for root in roots:  # a word that is such a path: the folders above may have spaces in them
        inside = ours.removeprefix(f"{root}/")
        if ours != inside and not re.search(r"\s", inside):
            return theirs.startswith("/") and theirs.endswith(f"/{inside}")
    pattern = re.escape(ours)
    for folder in (*roots, f"/{FILES}/"):
        pattern = pattern.replace(re.escape(folder), r"/\S*")
    return re.fullmatch(pattern, theirs) is not None


def logs(plan: Mapping[str, Any], found: Iterable[str]) -> Check:
    """Every log is of a service or a cell that the plan started: what another program left there
    is no evidence, nor is a part that was put before or behind a log: no run of ours rotates one.
    found: logs of the drop, without what packing put behind."""
    planned = {name for name, _ in _programs(plan) if name.startswith("logs/")}
    strange = sorted(set(found) - planned)
    return Check(
        id="logs",
        group="drop",
        severity="required",
        outcome="failed" if strange and planned else "met" if planned else "unchecked",
        why="every log is of something that the plan started",
        expected=_listed(planned) if planned else "services or cells with a log",
        actual=f"also {_listed(strange)}" if strange and planned else "no other",
        remedy="Remove what the run did not write." if strange else "",
    )


def _programs(plan: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Every program that a plan starts, behind the name of the log that it writes."""
    cells = table(plan.get("cells"))
    for service in map(table, array(plan.get("services"))):
        yield f"logs/{service.get('host')}-{service.get('name')}.log", service
    for name, cell in ((name, table(cell)) for name, cell in cells.items()):
        yield str(cell.get("log")), cell
        for worker in map(table, array(cell.get("workers"))):
            yield f"logs/{worker.get('host')}-{name}.log", worker


def started(manifest: Manifest) -> dict[str, Given]:
    """What each program of a run was given, by its log: its own, and what a run inherits."""
    return {
        log: Given(
            {name: value for name, value in own.items() if name.startswith(OPTION)},
            {**_inherited(manifest), **own},
        )
        for log, program in _programs(manifest.plan)
        for own in (given(program),)
    }


def _inherited(manifest: Manifest) -> dict[str, str]:
    """What the run took from its surroundings: a manifest that names more excuses no variable."""
    return {name: value for name, value in manifest.environment.items() if name in INHERITED}


def clock(manifest: Manifest) -> load.Run | None:
    """What a manifest says of time; None where it does not, which `check` refutes."""
    moments = [_utc(text) for text in (manifest.started, manifest.ended)]
    if moments[0] is None or moments[1] is None:
        return None
    return load.Run(Window(moments[0], moments[1]), manifest.timings)


def _utc(text: str | None) -> datetime.datetime | None:
    with contextlib.suppress(ValueError, OverflowError):
        found = datetime.datetime.fromisoformat(text or "")
        if found.tzinfo is not None and 2000 <= found.year < 2100:
            return found.astimezone(datetime.UTC).replace(tzinfo=None)
    return None


def cells(row: Row, plan: Mapping[str, Any]) -> list[str]:
    """What is wrong with the planned cells: none at all, or others than the row's."""
    planned = plan.get("cells")
    names = sorted(planned) if isinstance(planned, dict) else []
    if names and names == sorted(row.cells):
        return []
    return [f"cells {_listed(names)} planned, {_listed(row.cells)} in the row"]


def _against_itself(manifest: Manifest) -> list[str]:
    row, plan = manifest.row, manifest.plan
    pairs = [(name, plan.get(name), getattr(row, name)) for name in SAME]
    wrong = [f"{n} {_shown(said)} planned, {want} in the row" for n, said, want in pairs
             if said != want]  # fmt: skip
    if manifest.patches != plan.get("patches"):
        wrong.append("other patches than planned")
    if manifest.stack != plan.get("stack"):
        wrong.append(f"stack {_shown(manifest.stack)}, planned {_shown(plan.get('stack'))}")
    if manifest.failure:
        wrong.append(f"complete, but it failed: {manifest.failure}")
    return [*wrong, *cells(row, plan), *_timed(manifest), *_times(manifest), *_started(manifest)]


def _timed(manifest: Manifest) -> Iterator[str]:
    """Cells that took time, and are not those of the row."""
    timed = {n.removeprefix("cell ") for n in manifest.timings if n.startswith("cell ")}
    if hidden := timed - set(manifest.row.cells):
        yield f"cells {_listed(hidden)} were run, and are not in the row"


def _started(manifest: Manifest) -> Iterator[str]:
    """What a complete run must have started, and out of what."""
    plan, runner = manifest.plan, manifest.runner
    if runner is None or runner.pid <= 0:
        yield "no process ran it"
    if plan.get("driver") == "aiperf":
        # Envoy is told where to listen by a file of the lane, which the plan holds as filled.
        files = map(str, table(plan.get("files")).values())
        said = " ".join((_words(plan.get("services")), *files))
        model = plan.get("model")
        wanted = (plan.get("port"), model.get("path") if isinstance(model, dict) else None)
        lacks = [str(word) for word in wanted if not word or str(word) not in said]
        if lacks:
            yield f"the server's command lacks {', '.join(lacks)}"
        yield from _addressed(plan)
    lost = [name for name, cell in table(plan.get("cells")).items() if not _takes(cell)]
    if lost:
        yield f"no command that takes {_listed(lost)}"
    if not plan.get("pins") or (plan.get("driver") == "aiperf" and version(plan) is None):
        yield f"no version of {plan.get('engine')} is pinned"
    contained = plan.get("launcher") not in ("process", "slurm") or plan.get("containers")
    if contained and not images(manifest):  # Slurm also runs in place
        yield "containers without an image"


def _addressed(plan: Mapping[str, Any]) -> Iterator[str]:
    """Cells whose load went elsewhere than to the planned server."""
    url = plan.get("url")
    for name, cell in table(plan.get("cells")).items():
        words = [str(word) for word in array(table(cell).get("command"))]
        given = [
            at.partition("=")[2] if "=" in at else after
            for at, after in itertools.zip_longest(words, words[1:], fillvalue="")
            if at == "--url" or at.startswith("--url=") or at == "-u"
        ]
        if words and (not url or given != [url]):
            yield f"{name} was sent to {_listed(given)}, not to {_shown(url)}"


def _words(services: object) -> str:
    commands = (array(table(each).get("command")) for each in array(services))
    return " ".join(str(word) for command in commands for word in command)


def _takes(cell: object) -> bool:
    """Whether a cell's command names the folder that its records are in."""
    held = table(cell)
    return any(
        str(word).endswith(f"/{held.get('artifacts')}") for word in array(held.get("command"))
    )


def _times(manifest: Manifest) -> Iterator[str]:
    """What is wrong with the times of a complete run."""
    run = clock(manifest)
    if run is None or run.window.last is None:
        yield "complete, but it does not say when it began and ended"
        return
    lasted = (run.window.last - run.window.first).total_seconds()
    spent = [run.spent.get(f"cell {name}", 0.0) for name in manifest.row.cells]
    if min(spent, default=0) <= 0:
        yield "a cell whose time was not taken"
    if lasted + 1 < sum(spent):
        yield f"cells of {sum(spent):.0f} s in a run of {lasted:.0f} s"


def _against_lane(manifest: Manifest, known: spec.Lane) -> list[str]:
    from lanekit import variables  # noqa: PLC0415

    row, plan = manifest.row, manifest.plan
    arm = known.arms[row.arm]
    profile = spec.profile(row.profile)
    planned, today = str(plan.get("contract")), arm.contracts[row.profile]
    wanted = {
        "contract": planned if contract.judging(planned, today) == today else today,
        "driver": known.workload.driver,
        "engine": known.engine,
        "ranks": profile.ranks,
    }
    hosts = plan.get("hosts")
    count = len(hosts) if isinstance(hosts, list) else 0
    wrong = [] if count == profile.hosts else [f"{count} hosts, the profile has {profile.hosts}"]
    wrong += [
        f"{name} {_shown(plan.get(name))}, the lane has {value}"
        for name, value in wanted.items()
        if plan.get(name) != value
    ]
    gate = plan.get("gate")
    if isinstance(gate, dict) and arm.reference and not gate.get("reference"):
        wrong.append(f"answers compared with nobody, the lane has {arm.reference}")
    given = table(plan.get("extra_env"))
    # Also what only another arm sets: EP_NUM_COMMS=8 makes epnc8 of epnc1.
    wrong += variables.remade(known, row.arm, given)
    needed = variables.series(known, row.arm, row.profile, given)
    if sorted(manifest.patches) != sorted(needed):
        wrong.append(f"patches {_listed(manifest.patches)}, the lane has {_listed(needed)}")
    return wrong


def _shown(value: object) -> str:
    return str(value)[:80]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))[:200] or "none"
