"""Put together what is judged: a drop, ours or a stranger's, its plan, logs and load points."""

import concurrent.futures
import contextlib
import datetime
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from lanekit import (
    answers,
    batch,
    coherence,
    contract,
    exchanges,
    judge,
    logs,
    micro,
    reading,
    records,
    row,
    spec,
    toml,
    training,
    witness,
)
from lanekit import drop as drops
from lanekit import load as loading
from lanekit.contract import Contract
from lanekit.drop import MANIFEST
from lanekit.errors import ConfigError, Unreadable
from lanekit.judge import Facts
from lanekit.load import Load
from lanekit.manifest import Manifest
from lanekit.plan import GatePlan, options
from lanekit.verdict import CellRow, Check, Place, Verdict, decide

WAIVERS: Final = "waivers.toml"
# The only files of our drop that its manifest cannot name. A waiver may be written later: it is
# always shown.
UNLISTED: Final = (MANIFEST, drops.VERDICT, WAIVERS)
# Answers to readiness: one an engine, and some that came after nobody waited for them any more. The
# smallest cell of a lane has 40 requests.
READY: Final = 16
SHOWN: Final = 40  # of a list of whatever length
TEXT: Final = 4000  # of a sentence made from a drop's own words


class Subject(msgspec.Struct, frozen=True):
    """What is judged: where, as what, and what of that was guessed from the path."""

    root: Path
    files: tuple[Path, ...]
    lane: str
    arm: str
    profile: str
    contract: str
    logs: tuple[logs.Log, ...]
    said: tuple[str, ...] = ()
    ours: bool = False


class Waiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A failed or impossible check that somebody answers for."""

    check: str
    reason: str
    by: str


class _Waivers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    waiver: tuple[Waiver, ...]


_NOTHING: Final[tuple[str, ...]] = ()


def ours(drop: Path, files: Sequence[Path], given: Mapping[str, str | None]) -> Verdict:
    """The verdict of a drop with a manifest; the options may not contradict it."""
    manifest = drops.read(drop)
    held, plan = manifest.row, manifest.plan
    for option, wanted in given.items():
        if wanted not in (None, getattr(held, option)):
            raise ConfigError(
                f"{drop}: its manifest says {option} {getattr(held, option)}, not {wanted}",
                remedy=f"Leave --{option} away: a drop with a manifest is judged by it.",
            )
    known = row.lane(held)
    name, said = str(plan.get("contract")), _NOTHING
    if manifest.state == "complete":
        name, said = _contract(drop, manifest, known)
    said = (*said, *row.said(manifest, known))
    found = tuple(logs.find(drop, files, ours=True))
    subject = Subject(
        drop, tuple(files), held.lane, held.arm, held.profile, name, found, said, ours=True
    )
    if manifest.state != "complete":
        return _incomplete(subject, manifest)
    checks = [
        _integrity(subject, manifest.files),
        _copies(subject),
        row.logs(plan, (log.unpacked for log in found)),
    ]
    checks += row.checks(manifest, known)
    seen = {**plan, "images": row.images(manifest)}
    profile = spec.profile(held.profile)
    checks += witness.checks(_hosts(drop, files), profile, _tokens(plan), seen)
    if row.driver(known, plan) == "batch":
        return _batch(subject, manifest, checks)
    loads, unplanned = _planned(subject, plan)
    windows = (x.cell.records.window for x in loads if x.cell and x.cell.records)
    gated = reading.dig(plan, "gate", "questions")  # they stand in the server's log, too
    asked = len(answers.questions().ask.places()) if gated else 0
    facts = Facts(
        profile=profile,
        requests=_total(loads, asked=asked),
        engine_version=row.version(plan),
        served_name=reading.text(reading.dig(plan, "model", "served_name")),
        versions=_versions(plan),
        loaded=min((window[0] for window in windows if window), default=None),
        apart=bool(plan.get("backends")),
        options=row.options(plan),
        started=row.started(manifest),
        beyond=_beyond(plan),
    )
    checks += loading.load(loads, unplanned)
    checks += gate(drop, files, manifest)
    return judged(subject, facts, loads, checks, run=row.clock(manifest))


def gate(drop: Path, files: Sequence[Path], manifest: Manifest) -> list[Check]:
    """The checks of a drop's coherence gate; one that says so where the drop is older than it.
    Raises Unreadable: a file of answers that is none."""
    known, plan = answers.questions(), _gate_plan(manifest)
    if plan is None:
        return [coherence.absent(_gate_remains(drop, files, manifest))]
    ours, theirs = (
        answers.read(drop / name) if drop / name in files else None
        for name in (answers.NAME, answers.REFERENCE)
    )
    held, served = manifest.row, reading.table(manifest.plan.get("model"))
    return coherence.checks(
        coherence.Gate(
            ask=known.ask,
            tolerance=known.tolerance,
            reference=plan.reference,
            ours=ours,
            theirs=theirs,
            untrue=_untrue(plan, drop / answers.REFERENCE, there=theirs is not None),
            subject={
                "lane": held.lane, "arm": held.arm, "profile": held.profile,
                "model": served.get("source"), "dummy_weights": served.get("dummy_weights"),
            },
        )
    )  # fmt: skip


def _gate_plan(manifest: Manifest) -> GatePlan | None:
    """The planned gate; None where there is none, or one that asks nothing."""
    with contextlib.suppress(msgspec.ValidationError):
        found = msgspec.convert(manifest.plan.get("gate"), GatePlan)
        return found if found.questions else None
    return None


def _gate_remains(drop: Path, files: Sequence[Path], manifest: Manifest) -> str:
    """What a drop without a sound gate in its plan still has of one."""
    if manifest.plan.get("gate") is not None:
        return "something that is none"
    if any(path.is_relative_to((drop / answers.NAME).parent) for path in files):
        return "answers in the drop"
    return "a time that it took" if "coherence" in manifest.timings else ""


def _untrue(plan: GatePlan, path: Path, *, there: bool) -> str:
    """What is wrong with the file of the reference, which the plan names by its digest."""
    if not plan.sha256 and not plan.drop:
        return "a reference that was not planned" if there else ""
    if there and drops.sha256(path) == plan.sha256:
        return ""
    return "the reference is not the file that was planned"


def _beyond(plan: Mapping[str, Any]) -> int:
    """Answers that a run gets before and between its cells: warm-up and prefill requests, and what
    readiness asks every engine. More of them are of a cell that nobody tells of."""
    cells = reading.table(plan.get("cells")).values()
    given = (row.given(cell).get("--warmup-request-count", "0") for cell in cells)
    warm = sum(int(each) for each in given if each.isdecimal())
    return warm + len(reading.array(plan.get("prefill"))) + READY


def _contract(
    drop: Path, manifest: Manifest, known: spec.Lane | None
) -> tuple[str, tuple[str, ...]]:
    """The contract that judges, and what a reader must know about it."""
    planned = manifest.plan.get("contract")
    if not isinstance(planned, str):
        raise Unreadable(f"{drop / MANIFEST}: its plan names no contract", remedy="Restore it.")
    contract.load(planned)
    held = manifest.row
    today = known.arms[held.arm].contracts[held.profile] if known else planned
    name = contract.judging(planned, today)
    if name != planned:
        return name, (f"made for contract {planned}; judged by {name}, which extends it",)
    if manifest.plan.get("contract_sha256") == contract.digest(name):
        return name, ()
    return name, (f"contract {name} has changed since this drop was made; judged by today's",)


def _batch(subject: Subject, manifest: Manifest, checks: Sequence[Check]) -> Verdict:
    """A lane that ran a program once a cell, judged by what the program recorded."""
    profile, plan = spec.profile(subject.profile), manifest.plan
    trains = plan.get("engine") in training.ENGINES
    name = training.NAME if trains else micro.NAME
    files: dict[str, Path] = {}
    for cell, planned in reading.table(plan.get("cells")).items():
        path = subject.root / str(reading.dig(planned, "artifacts")) / name
        if path not in subject.files:
            raise Unreadable(f"{path}: not in the drop", remedy="Run the lane again.")
        if path in files.values():
            raise Unreadable(f"{path}: stands for more than one cell", remedy="Run the lane again.")
        files[cell] = path
    facts = Facts(
        profile, None, row.version(plan), versions=_versions(plan), batch=True,
        options=row.options(plan), started=row.started(manifest),
    )  # fmt: skip
    checks = [*checks, _all_cells(manifest)]
    if trains:
        return _trained(subject, manifest, facts, files, checks)
    cells = {c: _taken(subject, manifest, c, micro.read(path)) for c, path in files.items()}
    found = judged(subject, facts, (), [*checks, *exchanges.judge(cells, profile.ranks)],
                   run=row.clock(manifest))  # fmt: skip
    rows = (each for cell, taken in cells.items() for each in micro.rows(cell, taken.records))
    return msgspec.structs.replace(found, micro=tuple(rows))


def _taken(subject: Subject, manifest: Manifest, cell: str, found: Sequence[Any]) -> batch.Taken:
    """A cell's records beside its command, its log and the run's clock."""
    planned = reading.dig(manifest.plan, "cells", cell)
    name, command = str(reading.dig(planned, "log")), reading.array(reading.dig(planned, "command"))
    taken = batch.Taken(found, tuple(map(str, command)), run=row.clock(manifest))
    for log in (each.path for each in subject.logs if each.unpacked == name):
        with logs.opened(log) as stream:
            more = (
                {"told": batch.told(stream)}
                if subject.lane == "nemo-rl"
                else {"log": batch.printed(stream, found)}
            )
        taken = msgspec.structs.replace(taken, **more)
    return taken


def _trained(
    subject: Subject,
    manifest: Manifest,
    facts: Facts,
    files: Mapping[str, Path],
    checks: Sequence[Check],
) -> Verdict:
    """A lane that trained: its steps beside those of the reference."""
    cells = {
        cell: (
            path.relative_to(subject.root).as_posix(),
            _taken(subject, manifest, cell, training.read(path)),
        )
        for cell, path in files.items()
    }
    ranks, nics = facts.profile.ranks, facts.profile.nics
    engine = str(manifest.plan["engine"])
    steps = training.judge(cells, ranks, arm=subject.arm, nics=nics, engine=engine)
    found = judged(subject, facts, (), [*checks, *steps], run=row.clock(manifest))
    rows = (x for cell, (_, taken) in cells.items() for x in training.rows(cell, taken.records))
    return msgspec.structs.replace(found, steps=tuple(rows))


def _all_cells(manifest: Manifest) -> Check:
    """At least one cell, and those of the row: without any there is nothing to refute."""
    wrong = row.cells(manifest.row, manifest.plan)
    return Check(
        id="cells",
        group="load",
        severity="required",
        outcome="failed" if wrong else "met",
        why="every planned cell was run, and no other",
        expected=", ".join(manifest.row.cells) or "at least one cell",
        actual="; ".join(wrong) or ", ".join(manifest.row.cells),
        remedy="Run the lane again." if wrong else "",
    )


def _incomplete(subject: Subject, manifest: Manifest) -> Verdict:
    said, rows = [], []
    for folder in records.find(subject.root):
        try:
            where = str(folder.relative_to(subject.root))
            rows.append(_row(folder.name, where, records.read(folder)))
        except Unreadable as error:
            said.append(error.message)
    why = f": {manifest.failure}" if manifest.failure else ""
    return Verdict(
        drop=str(subject.root),
        result="no verdict",
        reason=f"incomplete, it came as far as {manifest.stage or manifest.state}{why}",
        lane=subject.lane,
        arm=subject.arm,
        profile=subject.profile,
        contract=subject.contract,
        said=tuple(said),
        cells=tuple(rows),
    )


def _integrity(subject: Subject, listed: Mapping[str, str]) -> Check:
    """Every file is the one the run left; the verdict's own file and the manifest aside. A log that
    was packed since is its contents."""
    there = {path.relative_to(subject.root).as_posix(): path for path in subject.files}
    for log in subject.logs:
        if log.unpacked in listed and log.unpacked not in there:
            there[log.unpacked] = there.pop(log.name)
    missing = sorted(set(listed) - set(there))
    added = sorted(set(there) - set(listed) - set(UNLISTED))
    both = sorted(set(listed) & set(there))
    with concurrent.futures.ThreadPoolExecutor() as pool:  # hashing leaves the interpreter free
        digests = list(pool.map(lambda name: _digest(there[name], name), both))
    changed = [name for name, digest in zip(both, digests, strict=True) if digest != listed[name]]
    bad = [f"changed: {n}" for n in changed] + [f"added: {n}" for n in added]
    shown = [*bad[:SHOWN], *([f"{len(bad) - SHOWN} more"] if len(bad) > SHOWN else [])]
    first = Place((changed + added)[0], 0) if bad else None
    return Check(
        id="files",
        group="drop",
        severity="required",
        outcome="failed" if bad or missing else "met" if listed else "unchecked",
        why="every file is the one that the run left",
        expected=f"{len(listed)} files with the sha256 of the manifest",
        actual="; ".join(shown) or f"{len(both)} of {len(listed)} files",
        first=first,
        last=first,
        missing=tuple(missing),
        remedy=""
        if not bad and not missing
        else "Fetch the drop again."
        if changed or missing
        else "Remove what was put there.",
    )


def _digest(path: Path, name: str) -> str:
    """The sha256 of a file, or of what was packed into it under another name."""
    return (drops.sha256 if path.name == PurePosixPath(name).name else logs.digest)(path)


def _copies(subject: Subject) -> Check:
    """Evidence that is there twice was seen once: copies, and links that look like files. A run of
    ours leaves none. A stranger may have kept a log under two names: it is read once."""
    names = (records.RECORDS, records.SUMMARY, micro.NAME, training.NAME)
    kept = [path for path in subject.files if path.name in names]
    twins = _twins([*kept, *(log.path for log in subject.logs)] if subject.ours else kept)
    same = [" = ".join(p.relative_to(subject.root).as_posix() for p in group) for group in twins]
    return Check(
        id="copies",
        group="drop",
        severity="required",
        outcome="failed" if same else "met",
        why="no log and no record counts twice",
        expected="no two of the same bytes",
        actual="; ".join(same[:SHOWN]) or "none",
        remedy="Remove the copies, and judge what the run left." if same else "",
    )


def _twins(paths: Iterable[Path]) -> list[list[Path]]:
    """Files of the same bytes, by whatever names; empty ones aside."""
    sized: dict[int, list[Path]] = defaultdict(list)
    for path in sorted(set(paths)):
        sized[path.stat().st_size].append(path)
    by_digest: dict[str, list[Path]] = defaultdict(list)
    for path in (path for size, same in sized.items() if size and len(same) > 1 for path in same):
        by_digest[drops.sha256(path)].append(path)
    return [same for same in by_digest.values() if len(same) > 1]


def _planned(subject: Subject, plan: Mapping[str, Any]) -> tuple[list[Load], list[str]]:
    """The load points of a plan, and AIPerf folders that it does not name."""
    cells = reading.table(plan.get("cells"))
    root = subject.root / "aiperf"
    folders: dict[str, Path] = {}
    for found in records.find(subject.root):
        inside = found.is_relative_to(root) and found != root
        name = found.relative_to(root).parts[0] if inside else str(found)
        if name in folders:
            raise Unreadable(
                f"{subject.root}: cell {name} has more than one export: "
                f"{folders[name].relative_to(subject.root)} and {found.relative_to(subject.root)}",
                remedy="A cell is run once, into a folder of its own: run the lane again.",
            )
        folders[name] = found
    loads = []
    for name, cell in cells.items():
        folder = folders.pop(name, None)
        loads.append(
            Load(
                name=name,
                folder=str(folder.relative_to(subject.root)) if folder else "",
                cell=records.read(folder) if folder else None,
                concurrency=_int(reading.dig(cell, "concurrency")),
                requests=_int(reading.dig(cell, "requests")),
                isl=_int(reading.dig(cell, "isl")),
                osl=_int(reading.dig(cell, "osl")),
                version=reading.text(reading.dig(plan, "pins", "aiperf")),
                model=reading.text(reading.dig(plan, "model", "served_name")),
                url=reading.text(plan.get("url")),
                command=options(map(str, reading.array(reading.dig(cell, "command")))),
            )
        )
    return loads, sorted(folders)


def _hosts(drop: Path, files: Sequence[Path]) -> dict[str, Any]:
    """host/<host>.json by host; one that is no JSON object is left out, so "could not check"."""
    found = {}
    for path in files:
        if path.parent == drop / "host" and path.suffix == ".json":
            with contextlib.suppress(Unreadable):
                found[path.stem] = reading.decoded(reading.small(path), dict[str, Any], path.name)
    return found


def foreign(drop: Path, files: Sequence[Path], given: Mapping[str, str | None]) -> Verdict:
    """The verdict of a drop without manifest, or of a log alone."""
    alone = logs.Log(drop, drop.name, "", drop.name, 0)
    found = (alone,) if drop.is_file() else tuple(logs.find(drop, files, ours=False))
    if not found and not records.find(drop):
        raise Unreadable(
            f"{drop}: no manifest, no log and no AIPerf export",
            remedy="Give the directory that a run left, or a serve log.",
        )
    subject = msgspec.structs.replace(_inferred(drop, files, given), logs=found)
    loads = _own_loads(drop) if drop.is_dir() else []
    facts = Facts(profile=spec.profile(subject.profile), requests=_total(loads))
    checks = [_copies(subject), *loading.load(loads, ())] if drop.is_dir() else []
    return judged(subject, facts, loads, checks)


def _says(words: str, row: contract.Foreign) -> bool:
    return all(word in words for word in row.words)


def _unknown(
    drop: Path, given: Mapping[str, str | None], table: Sequence[contract.Foreign]
) -> ConfigError:
    """What to do about a drop that nothing says the lane and arm of."""
    if within := sorted(path.parent.name for path in drop.glob(f"*/{MANIFEST}")):
        return ConfigError(
            f"{drop}: no drop, but a folder of {len(within)}",
            remedy=f"Give one of them, as in RESULTS={drop / within[-1]}.",
        )
    arms = ", ".join(dict.fromkeys(f"{row.lane}/{row.arm}" for row in table))
    lane, arm = given["lane"], given["arm"]
    asked = f"{lane or 'any lane'}/{arm or 'any arm'} is not judged without one"
    return ConfigError(
        f"{drop}: no manifest, and "
        + (asked if lane or arm else "neither path nor options tell a known lane and arm"),
        remedy="Give the folder with its manifest, or --lane, --arm and --profile (make: LANE=, "
        f"ARM=, PROFILE=). Known without manifest: {arms}.",
    )


def _inferred(drop: Path, files: Sequence[Path], given: Mapping[str, str | None]) -> Subject:
    """What the words of the path say a drop is, overruled by what was given."""
    words = "/".join(drop.resolve().parts[-4:]).lower()
    table = contract.foreign()
    fits = [
        row
        for row in table
        if (given["lane"] or row.lane) == row.lane
        and (given["arm"] or row.arm) == row.arm
        and (given["lane"] is not None or _says(words, row))
    ]
    fits.sort(key=lambda row: not _says(words, row))  # what the path says before what comes first
    if not fits:
        raise _unknown(drop, given, table)
    row = fits[0]
    fleet = given["profile"] or next((n for n in row.contracts if n in words), row.profile)
    spec.profile(fleet)
    if fleet not in row.contracts:
        raise ConfigError(
            f"{row.lane}/{row.arm} has no contract on profile {fleet}",
            remedy=f"It has one on: {', '.join(row.contracts)}.",
        )
    told = {"lane": row.lane, "arm": row.arm, "profile": fleet}
    guessed = ", ".join(f"{name} {told[name]}" for name in told if given[name] is None)
    how = "inferred from the path" if _says(words, row) or fleet in words else "assumed"
    said = [f"no manifest: {guessed} {how}" if guessed else "no manifest"]
    if drop.is_file():
        said.append("a log alone: the transport is judged, nothing is known about the load")
    name = row.contracts[fleet]
    return Subject(drop, tuple(files), row.lane, row.arm, fleet, name, (), tuple(said))


def _own_loads(drop: Path) -> list[Load]:
    """The load points a stranger's drop holds, planned as AIPerf's own configuration says."""
    loads: dict[str, Load] = {}
    for folder in records.find(drop):
        cell = records.read(folder)
        name = f"c{cell.concurrency}" if cell.concurrency else folder.name
        if name in loads:
            raise ConfigError(
                f"{drop}: holds more than one run: {loads[name].folder} and "
                f"{folder.relative_to(drop)} are both {name}",
                remedy="Judge each run on its own: their evidence must not be added up.",
            )
        loads[name] = Load(
            name=name,
            folder=str(folder.relative_to(drop)),
            cell=cell,
            concurrency=cell.concurrency,
            requests=cell.asked,
            isl=cell.isl_asked,
            osl=cell.osl_asked,
            version=cell.version,
            model=cell.model,
        )
    return sorted(loads.values(), key=lambda x: (x.concurrency or 0, x.name))


def judged(
    subject: Subject,
    facts: Facts,
    loads: Sequence[Load],
    checks: Sequence[Check],
    *,
    run: loading.Run | None = None,
) -> Verdict:
    """Read the logs, judge them by the subject's contract, and decide. run: the times of ours."""
    found = contract.load(subject.contract)
    _fits(found, facts.profile)
    served = facts.requests is not None and not facts.batch
    rules = contract.bound(found, served=served, batch=facts.batch)
    errors, lost, rate = contract.always()
    rules = judge.applying((*rules, *(errors,) * served, *(lost,) * subject.ours), facts)
    serve = _serve_logs(subject)
    evidence = logs.read(serve, (*rules, rate), facts.profile.ranks)
    checks = [*checks, *judge.transport(rules, evidence, facts)]
    due = any(bound.id == "vllm-options" for bound in rules)
    checks += _rate(rate, loads, evidence, facts, due=due)
    checks += [loading.same_run(loads, evidence.ends, run)] if loads and serve else []
    checks += [judge.hook_clock(evidence, run.window)] if run and evidence.armed else []
    checks = _excused(subject, [_short(check) for check in checks])
    checks, waived = _waived(subject, checks)
    result, reason = decide(checks)
    if not serve and result == "no verdict":
        reason = "no serve log"
    return Verdict(
        drop=str(subject.root),
        result=result,
        reason=reason,
        lane=subject.lane,
        arm=subject.arm,
        profile=subject.profile,
        contract=found.name,
        contract_version=found.version,
        contract_sha256=contract.digest(found.name),
        proves=found.proves,
        said=(*subject.said, *waived),
        checks=tuple(checks),
        cells=tuple(_row(x.name, x.folder, x.cell) for x in loads if x.cell is not None),
        unproven=found.unproven,
    )


def _rate(
    rate: contract.Bound, loads: Sequence[Load], evidence: judge.Logs, facts: Facts, *, due: bool
) -> list[Check]:
    """The check of the server's own rate, where one server alone said any. due: it is one that
    does, so that of a long load point its rates may not be absent."""
    said = [(x, dict(x.evidence.values)) for x in evidence.lines.get(rate.id, ())]
    every = _every(facts)
    due = due and loading.lasting(loads, every)
    if not loads or facts.apart or not (said or due):
        return []
    rates = [
        (values["at"], values["engine"], float(values["rate"]))
        for x, values in said
        for _ in range(x.evidence.count)
    ]
    outcome, actual = loading.server_rate(loads, rates, every)
    if outcome == "unchecked" and due:
        actual = "of a load point that was long the server's rates are absent"
    return [
        Check(
            id=rate.id,
            group="load",
            severity="noted" if outcome == "unchecked" and not due else "required",
            outcome=outcome,
            why=rate.rule.why,
            expected=f"within {loading.RATE_TOLERANCE:.0%} of the records, over 40 s and more",
            actual=actual,
            first=said[0][0].first if said else None,
            last=said[-1][0].last if said else None,
            remedy="" if outcome == "met" else rate.rule.remedy,
            source=rate.rule.source,
        )
    ]


def _every(facts: Facts) -> datetime.timedelta:
    """How often vLLM says its rate: as planned, else every 10 s."""
    with contextlib.suppress(ValueError, OverflowError):
        seconds = float((facts.options or {}).get("VLLM_LOG_STATS_INTERVAL", ""))
        if seconds > 0:
            return datetime.timedelta(seconds=seconds)
    return loading.RATE_EVERY


def _excused(subject: Subject, checks: Sequence[Check]) -> Sequence[Check]:
    """What one of our own older drops could not have is noted: of exactly that drop, byte by byte,
    since a date is easily forged."""
    manifest = subject.root / MANIFEST
    known = contract.older().get(drops.sha256(manifest)) if subject.ours else None
    if known is None:
        return checks
    return [
        msgspec.structs.replace(check, severity="noted", note=f"{known.drop}: {known.why}")
        if check.outcome == "unchecked" and check.id in known.lacks
        else check
        for check in checks
    ]


def _short(check: Check) -> Check:
    """A check whose words, which are the drop's, cannot outgrow a screen."""
    more = len(check.missing) - SHOWN
    tail = (f"{more} more",) if more > 0 else ()
    return msgspec.structs.replace(
        check, actual=check.actual[:TEXT], missing=(*check.missing[:SHOWN], *tail)
    )


def _fits(found: Contract, profile: spec.Profile) -> None:
    if found.fabric != profile.fabric.kind:
        raise ConfigError(
            f"contract {found.name} judges fabric {found.fabric}; profile {profile.name} has "
            f"{profile.fabric.kind}",
            remedy="Choose the arm or the profile that the drop was run with.",
        )


def _serve_logs(subject: Subject) -> list[logs.Log]:
    """The logs to read: of those with the same bytes the first, and none that was packed and kept
    beside what came of it (`gzip -k`)."""
    again = {path for same in _twins(log.path for log in subject.logs) for path in same[1:]}
    plain = {log.name: log.path for log in subject.logs if log.name == log.unpacked}
    for log in subject.logs:
        if (whole := plain.get(log.unpacked)) and whole != log.path:
            again |= {log.path} if logs.digest(log.path) == drops.sha256(whole) else set()
    return [log for log in subject.logs if log.path not in again]


def _waived(subject: Subject, checks: Sequence[Check]) -> tuple[list[Check], list[str]]:
    """Apply the drop's waivers. Raises ConfigError: a bad waiver file, or one that names an unknown
    check or the drop's own files."""
    path = subject.root / WAIVERS
    if path not in subject.files:
        return list(checks), []
    known = [check.id for check in checks if check.group != "drop"]
    reasons: dict[str, str] = {}
    for waiver in toml.load(path, _Waivers).waiver:
        if waiver.check not in known or not waiver.reason.strip() or not waiver.by.strip():
            raise ConfigError(
                f"{path}: no check '{waiver.check}' that can be waived, or no reason or name given",
                remedy=f"Checks: {', '.join(known)}.",
            )
        reasons[waiver.check] = f"{waiver.reason} ({waiver.by})"
    applied = [
        msgspec.structs.replace(check, waived=reasons[check.id])
        if check.id in reasons and check.outcome != "met"
        else check
        for check in checks
    ]
    return applied, [f"waiver for {name}: {why}" for name, why in reasons.items()]


def _row(name: str, folder: str, cell: records.Cell) -> CellRow:
    figures = msgspec.structs.asdict(cell.figures)
    return CellRow(name=name, folder=folder, concurrency=cell.concurrency, **figures)


def _total(loads: Iterable[Load], *, asked: int = 0) -> int | None:
    planned = [x.requests for x in loads]
    known = [number for number in planned if number is not None]
    return asked + sum(known) if planned and len(known) == len(planned) else None


def _tokens(plan: Mapping[str, Any]) -> int | None:
    """Tokens that pass the layers, over all planned requests: the last one out does not."""
    rows = list(reading.table(plan.get("cells")).values())
    parts = [[_int(reading.dig(row, key)) for key in ("requests", "isl", "osl")] for row in rows]
    if not rows or any(number is None for row in parts for number in row):
        return None
    return sum((r or 0) * ((i or 0) + (o or 0) - 1) for r, i, o in parts) or None


def _versions(plan: Mapping[str, Any]) -> dict[str, str]:
    """What the plan pins of the libraries that the evidence hook reads."""
    return {
        name: version
        for name in ("nccl", "nvshmem", "deep_ep")
        for distribution in row.DISTRIBUTIONS[name]
        if (version := reading.text(reading.dig(plan, "pins", distribution)))
    }


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
