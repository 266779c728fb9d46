"""Whether a manifest holds together: its row, its plan, and what the lane file says of both.

Pure. A contradiction refutes; a row that no lane file knows cannot be checked, so it is no proof.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from lanekit import spec
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
    wrong += cells(row, plan)
    return wrong if manifest.ended else [*wrong, "complete, but it never ended"]


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
    if sorted(manifest.patches) != sorted(arm.patches):
        wrong.append(f"patches {_listed(manifest.patches)}, the lane has {_listed(arm.patches)}")
    return wrong


def _shown(value: object) -> str:
    return str(value)[:80]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))[:200] or "none"
