"""Whether a manifest holds together: its row, its plan, and what the lane file says of both.

Pure. A contradiction refutes; a row that no lane file knows cannot be checked, so it is no proof.
"""

import contextlib
import datetime
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from lanekit import load, spec
from lanekit.clock import Window
from lanekit.errors import ConfigError
from lanekit.manifest import Manifest, Row
from lanekit.verdict import Check

SAME: Final = ("lane", "arm", "profile")  # said by the row and by the plan


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


def check(manifest: Manifest, known: spec.Lane | None) -> Check:
    """The manifest beside itself and beside its lane."""
    row = manifest.row
    wrong = _against_itself(manifest) + (_against_lane(manifest, known) if known else [])
    strange = f"this checkout has no {row.lane}/{row.arm} on {row.profile}"
    return Check(
        id="manifest",
        group="drop",
        severity="required",
        outcome="failed" if wrong else "met" if known else "unchecked",
        why="row and plan are one, and as the lane file has them",
        expected=f"the plan of {row.lane}/{row.arm} on {row.profile}",
        actual="; ".join(wrong) or ("as planned" if known else strange),
        remedy="Restore the manifest that the run wrote."
        if wrong
        else ""
        if known
        else "Judge it with the harness that made it; its git commit is in the manifest.",
    )


def clock(manifest: Manifest) -> load.Run | None:
    """What a manifest says of time; None where it does not, which `check` refutes."""
    moments = [_utc(text) for text in (manifest.started, manifest.ended)]
    if moments[0] is None or moments[1] is None:
        return None
    return load.Run(Window(moments[0], moments[1]), manifest.timings)


def _utc(text: str | None) -> datetime.datetime | None:
    with contextlib.suppress(ValueError, OverflowError):
        found = datetime.datetime.fromisoformat(text or "")
        if found.tzinfo is not None:
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
    return [*wrong, *cells(row, plan), *_times(manifest)]


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
    row, plan = manifest.row, manifest.plan
    arm = known.arms[row.arm]
    wanted = {
        "contract": arm.contracts[row.profile],
        "driver": known.workload.driver,
        "engine": known.engine,
        "ranks": spec.profile(row.profile).ranks,
    }
    wrong = [
        f"{name} {_shown(plan.get(name))}, the lane has {value}"
        for name, value in wanted.items()
        if plan.get(name) != value
    ]
    gate = plan.get("gate")
    if isinstance(gate, dict) and arm.reference and not gate.get("reference"):
        wrong.append(f"answers compared with nobody, the lane has {arm.reference}")
    if sorted(manifest.patches) != sorted(arm.patches):
        wrong.append(f"patches {_listed(manifest.patches)}, the lane has {_listed(arm.patches)}")
    return wrong


def _shown(value: object) -> str:
    return str(value)[:80]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))[:200] or "none"
