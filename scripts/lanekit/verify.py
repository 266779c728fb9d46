"""Judge a drop, ours or a stranger's, offline: `lanekit verify DIR`. Reading only; judging is in
lanekit.judge and printing in lanekit.render."""

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from lanekit import contract, judge, logs, micro, records, spec
from lanekit.contract import Contract
from lanekit.errors import ConfigError, Unreadable
from lanekit.judge import Facts, Load
from lanekit.manifest import SCHEMA, Manifest
from lanekit.verdict import CellRow, Check, Place, Verdict, decide

MANIFEST: Final = "manifest.json"
VERDICT: Final = "verdict.json"
UNLISTED: Final = (MANIFEST, VERDICT)  # the only files of our drop that its manifest cannot name


class Subject(msgspec.Struct, frozen=True):
    """What is judged: where, as what, and what of that was guessed from the path."""

    root: Path
    files: tuple[Path, ...]
    lane: str
    arm: str
    profile: str
    contract: str
    said: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lanekit verify`."""
    add = parser.add_argument
    add("drop", type=Path, help="a drop, or a log")
    add("--lane", help="for a drop without manifest; else inferred from its path")
    add("--arm", help="likewise")
    add("--profile", help="likewise: the fleet it ran on")
    add("--json", type=Path, metavar="FILE", help="write the verdict as JSON")
    add("--junit", type=Path, metavar="FILE", help="write the verdict as JUnit XML")


def run(args: argparse.Namespace) -> int:
    """Judge, print, write; returns 0 proven, 1 refuted, 2 no verdict."""
    from lanekit import render  # noqa: PLC0415

    found = verify(args.drop, lane=args.lane, arm=args.arm, profile=args.profile)
    print(render.text(found, colour=render.wants_colour(sys.stdout)))
    for path, content in ((args.json, render.as_json), (args.junit, render.junit)):
        if path:
            try:
                path.write_bytes(content(found))
            except OSError as error:
                raise ConfigError(
                    f"cannot write {path}: {error.strerror}", remedy="Choose another file."
                ) from error
    return found.exit_code


def verify(
    drop: Path, *, lane: str | None = None, arm: str | None = None, profile: str | None = None
) -> Verdict:
    """The verdict of a drop or of a single log.

    Raises:
        Unreadable: it is missing, empty, or holds a file that cannot be read.
        ConfigError: lane, arm or profile cannot be told, do not exist or do not fit.
    """
    if not drop.exists():
        raise Unreadable(f"{drop}: no such file or directory", remedy="Check the path.")
    files = [drop] if drop.is_file() else list(logs.inside(drop))
    if not files or not any(path.stat().st_size for path in files):
        raise Unreadable(f"{drop}: empty", remedy="Nothing was collected: run the lane again.")
    if drop / MANIFEST in files:
        return _ours(drop, files, {"lane": lane, "arm": arm, "profile": profile})
    return _foreign(drop, files, lane, arm, profile)


def _ours(drop: Path, files: Sequence[Path], given: Mapping[str, str | None]) -> Verdict:
    manifest = _manifest(drop / MANIFEST)
    row, plan = manifest.row, manifest.plan
    for option, wanted in given.items():
        if wanted not in (None, getattr(row, option)):
            raise ConfigError(
                f"{drop}: its manifest says {option} {getattr(row, option)}, not {wanted}",
                remedy=f"Leave --{option} away: a drop with a manifest is judged by it.",
            )
    name = plan.get("contract")
    subject = Subject(drop, tuple(files), row.lane, row.arm, row.profile, str(name or ""), ())
    if manifest.state != "complete":
        return _incomplete(subject, manifest)
    if not isinstance(name, str):
        raise Unreadable(f"{drop / MANIFEST}: its plan names no contract", remedy="Restore it.")
    if plan.get("driver") == "batch":
        return _batch(subject, manifest)
    loads, unplanned = _planned(subject, plan)
    said = () if plan.get("contract_sha256") in _digests(name) else (
        f"contract {name} has changed since this drop was made; judged by today's",)  # fmt: skip
    facts = Facts(
        profile=spec.profile(row.profile),
        requests=_total(loads),
        engine_version=_version(plan),
        served_name=_at(plan, "model", "served_name"),
    )
    checks = [_integrity(drop, files, manifest.files), *judge.load(loads, unplanned)]
    return _judged(subject, facts, loads, checks, said)


def _batch(subject: Subject, manifest: Manifest) -> Verdict:
    """A lane that ran a program once a cell, judged by what the program recorded."""
    drop, plan = subject.root, manifest.plan
    profile = spec.profile(subject.profile)
    cells = {
        name: micro.read(drop / str(_at(cell, "artifacts")) / micro.NAME)
        for name, cell in plan["cells"].items()
    }
    checks = [
        _integrity(drop, subject.files, manifest.files),
        *micro.judge(cells, profile.ranks),
    ]
    found = _judged(subject, Facts(profile=profile, requests=None), (), checks, ())
    rows = (row for name, records_ in cells.items() for row in micro.rows(name, records_))
    return msgspec.structs.replace(found, micro=tuple(rows))


def _digests(name: str) -> tuple[str, str]:
    alone = hashlib.sha256(spec.contract_path(name).read_bytes()).hexdigest()
    return contract.digest(name), alone


def _manifest(path: Path) -> Manifest:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise Unreadable(f"{path}: {error}", remedy="Restore the manifest.") from error
    if found.schema != SCHEMA:
        raise Unreadable(
            f"{path}: schema {found.schema}, this harness reads {SCHEMA}",
            remedy="Use the harness the drop was made with; its git commit is in the manifest.",
        )
    for name in found.files:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name or not name:
            raise Unreadable(f"{path}: names a file outside the drop: {name!r}", remedy="Forged.")
    return found


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
        reason=f"incomplete, it came as far as {manifest.state}{why}",
        lane=subject.lane,
        arm=subject.arm,
        profile=subject.profile,
        contract=subject.contract,
        said=tuple(said),
        cells=tuple(rows),
    )


def _integrity(drop: Path, files: Sequence[Path], listed: Mapping[str, str]) -> Check:
    """Every file is the one the run left; the verdict's own file and the manifest aside."""
    there = {path.relative_to(drop).as_posix(): path for path in files}
    missing = sorted(set(listed) - set(there))
    added = sorted(set(there) - set(listed) - set(UNLISTED))
    changed = sorted(n for n in set(listed) & set(there) if _sha256(there[n]) != listed[n])
    bad = [f"changed: {n}" for n in changed] + [f"added: {n}" for n in added]
    first = Place((changed + added)[0], 0) if bad else None
    return Check(
        id="files",
        group="drop",
        severity="required",
        outcome="failed" if bad or missing else "met" if listed else "unchecked",
        why="every file is the one that the run left",
        expected=f"{len(listed)} files with the sha256 of the manifest",
        actual="; ".join(bad) or f"{len(listed) - len(missing)} of {len(listed)} files",
        first=first,
        last=first,
        missing=tuple(missing),
        remedy="Fetch the drop again; a waiver belongs into waivers.toml before it is sealed."
        if bad or missing
        else "",
    )


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}", remedy="Check the file.") from error


def _planned(subject: Subject, plan: Mapping[str, Any]) -> tuple[list[Load], list[str]]:
    """The load points of a plan, and AIPerf folders that it does not name."""
    cells = plan.get("cells")
    cells = cells if isinstance(cells, dict) else {}
    root = subject.root / "aiperf"
    folders = {_cell_name(root, f): f for f in records.find(subject.root)}
    loads = []
    for name, cell in cells.items():
        folder = folders.pop(name, None)
        loads.append(
            Load(
                name=name,
                folder=str(folder.relative_to(subject.root)) if folder else "",
                cell=records.read(folder) if folder else None,
                concurrency=_int(_at(cell, "concurrency")),
                requests=_int(_at(cell, "requests")),
                osl=_int(_at(cell, "osl")),
                version=_at(plan, "pins", "aiperf"),
                model=_at(plan, "model", "served_name"),
            )
        )
    return loads, sorted(folders)


def _cell_name(root: Path, folder: Path) -> str:
    inside = folder.is_relative_to(root) and folder != root
    return folder.relative_to(root).parts[0] if inside else str(folder)


def _foreign(
    drop: Path, files: Sequence[Path], lane: str | None, arm: str | None, profile: str | None
) -> Verdict:
    if not drop.is_file() and not logs.find(drop, files, ours=False) and not records.find(drop):
        raise Unreadable(
            f"{drop}: no manifest, no log and no AIPerf export",
            remedy="Give the directory that a run left, or a serve log.",
        )
    subject = _inferred(drop, files, lane, arm, profile)
    loads = _own_loads(drop) if drop.is_dir() else []
    facts = Facts(profile=spec.profile(subject.profile), requests=_total(loads))
    if drop.is_file():
        alone = ["a log alone: the transport is judged, nothing is known about the load"]
        return _judged(subject, facts, (), [], alone)
    return _judged(subject, facts, loads, judge.load(loads, ()), [])


def _inferred(
    drop: Path, files: Sequence[Path], lane: str | None, arm: str | None, profile: str | None
) -> Subject:
    """What the words of the path say a drop is, overruled by what was given."""
    words = "/".join(drop.resolve().parts[-4:]).lower()
    table = contract.foreign()
    fits = [
        row
        for row in table
        if (lane or row.lane) == row.lane
        and (arm or row.arm) == row.arm
        and (lane is not None or all(word in words for word in row.words))
    ]
    if not fits:
        arms = ", ".join(dict.fromkeys(f"{row.lane}/{row.arm}" for row in table))
        raise ConfigError(
            f"{drop}: no manifest, and neither path nor options tell a known lane and arm",
            remedy=f"Give --lane, --arm and --profile. Known without manifest: {arms}.",
        )
    row = fits[0]
    fleet = profile or next((n for n in row.contracts if n in words), row.profile)
    spec.profile(fleet)
    if fleet not in row.contracts:
        raise ConfigError(
            f"{row.lane}/{row.arm} has no contract on profile {fleet}",
            remedy=f"It has one on: {', '.join(row.contracts)}.",
        )
    guessed = [f"{n} {v}" for n, v, given in (("lane", row.lane, lane), ("arm", row.arm, arm),
               ("profile", fleet, profile)) if given is None]  # fmt: skip
    said = (f"no manifest: {', '.join(guessed)} inferred from the path",) if guessed else (
        "no manifest: judged as given",)  # fmt: skip
    name = row.contracts[fleet]
    return Subject(drop, tuple(files), row.lane, row.arm, fleet, name, said)


def _own_loads(drop: Path) -> list[Load]:
    """The load points a stranger's drop holds, planned as AIPerf's own configuration says."""
    loads: list[Load] = []
    for folder in records.find(drop):
        cell = records.read(folder)
        name = f"c{cell.concurrency}" if cell.concurrency else folder.name
        if name in (x.name for x in loads):
            name = f"{name} ({folder.relative_to(drop)})"
        loads.append(
            Load(
                name=name,
                folder=str(folder.relative_to(drop)),
                cell=cell,
                concurrency=cell.concurrency,
                requests=cell.asked,
                osl=cell.osl_asked,
                version=cell.version,
                model=cell.model,
            )
        )
    return sorted(loads, key=lambda x: (x.concurrency or 0, x.name))


def _judged(
    subject: Subject,
    facts: Facts,
    loads: Sequence[Load],
    checks: Sequence[Check],
    said: Sequence[str],
) -> Verdict:
    found = contract.load(subject.contract)
    _fits(found, facts.profile)
    rules = contract.bound(found)
    serve = _serve_logs(subject)
    evidence = logs.read(serve, rules, facts.profile.ranks)
    said = [*subject.said, *said]
    checks = [*checks, *judge.transport(rules, evidence, facts)]
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
        said=tuple(said),
        checks=tuple(checks),
        cells=tuple(_row(x.name, x.folder, x.cell) for x in loads if x.cell is not None),
        unproven=found.unproven,
    )


def _fits(found: Contract, profile: spec.Profile) -> None:
    if found.fabric != profile.fabric.kind:
        raise ConfigError(
            f"contract {found.name} judges fabric {found.fabric}; profile {profile.name} has "
            f"{profile.fabric.kind}",
            remedy="Choose the arm or the profile that the drop was run with.",
        )


def _serve_logs(subject: Subject) -> list[logs.Log]:
    if subject.root.is_file():
        name = subject.root.name
        return [logs.Log(subject.root, name, "", name, 0)]
    ours = subject.root / MANIFEST in subject.files
    return logs.find(subject.root, subject.files, ours=ours)


def _row(name: str, folder: str, cell: records.Cell) -> CellRow:
    figures = cell.figures
    values = {key: getattr(figures, key) for key in (*records.COMPARED, "source")}
    return CellRow(name=name, folder=folder, concurrency=cell.concurrency, **values)


def _total(loads: Sequence[Load]) -> int | None:
    asked = [x.requests for x in loads if x.requests is not None]
    return sum(asked) if asked and len(asked) == len(loads) else None


def _version(plan: Mapping[str, Any]) -> str | None:
    """The engine's pinned version; its CPU build has a name of its own."""
    engine = _at(plan, "engine") or ""
    found = _at(plan, "pins", engine) or _at(plan, "pins", f"{engine}-cpu")
    return found if isinstance(found, str) else None


def _at(thing: Any, *path: str) -> Any:
    for step in path:
        thing = thing.get(step) if isinstance(thing, dict) else None
    return thing


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
