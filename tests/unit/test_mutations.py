"""One random change of a proven drop, sealed anew as a forger would: it proves no more than before.

What stays proven must claim exactly what the drop claimed, figure by figure; and a change of what a
figure or a proof rests on never stays proven.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drops
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanekit import paths, render
from lanekit.errors import LaneError
from lanekit.plan import Plan
from lanekit.verdict import Verdict
from lanekit.verify import verify

KINDS = {
    "cpu": ("aiperf/c4/profile_export.jsonl", "aiperf/c4/profile_export_aiperf.json"),
    "v2-one": ("micro/c4/micro.jsonl",),
    "train-gloo": ("megatron/c4/steps.jsonl",),
}
Path_ = tuple[str | int, ...]
many = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A proven drop of each kind."""
    root = tmp_path_factory.mktemp("mutations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "LANES", drops.lanes(root / "lanes"))
        yield {kind: drops.drop(root / kind, kind) for kind in KINDS}


def claims(found: Verdict) -> list[str]:
    """What a verdict shows people, in any order and wherever it stands: what was run, how fast."""
    lines = render.text(msgspec.structs.replace(found, drop="")).splitlines()
    return sorted(re.sub(r"  \[\S.*\]$", "", line) for line in lines)


def judged(drop: Path, name: str, text: str) -> Verdict | None:
    """The verdict of the drop with one file replaced, every sha256 renewed; None: refused."""
    other = drop.with_name(f"{drop.name}-mutated")
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(drop, other)
    (other / name).write_text(text)
    try:
        return verify(drops.seal(other))
    except LaneError:
        return None


def leaves(thing: Any, at: Path_ = ()) -> Iterator[Path_]:
    """The place of every value that holds no others."""
    if isinstance(thing, dict | list) and thing:
        pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
        for key, value in pairs:
            yield from leaves(value, (*at, key))
    else:
        yield at


def value_at(thing: Any, at: Path_) -> Any:
    for key in at:
        thing = thing[key]
    return thing


odd = st.sampled_from(
    [..., None, 0, -1, 1, 2, 1.5, 1e308, 1 << 62, True, False, "", "x", [], [1.0], {}, {"avg": 1}]
)


def other_value(draw: Callable[[st.SearchStrategy[Any]], Any], old: Any) -> Any:
    """Another value than the old one: an odd one, or one that lies near."""
    if isinstance(old, int | float) and not isinstance(old, bool) and draw(st.booleans()):
        near = draw(st.sampled_from([0.5, 0.9, 0.99, 0.999, 1.001, 1.01, 1.1, 2.0]))
        return type(old)(old * near)
    return draw(odd)


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in KINDS.items() for n in names])
@many
@given(data=st.data())
def test_a_changed_value_claims_nothing_new(
    proven: dict[str, Path], kind: str, name: str, data: st.DataObject
) -> None:
    drop = proven[kind]
    text = (drop / name).read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    at = data.draw(st.sampled_from(list(leaves(lines))))
    old = value_at(lines, at)
    new = other_value(data.draw, old)
    if new == old and type(new) is type(old):
        return
    changed = drops.replaced(lines, at, new)
    found = judged(drop, name, "".join(json.dumps(line) + "\n" for line in changed))
    if found is not None and found.result == "proven":
        assert claims(found) == claims(verify(drop)), f"{at}: {old} became {new}"


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in KINDS.items() for n in names])
@many
@given(data=st.data())
def test_lines_removed_copied_or_moved_claim_nothing_new(
    proven: dict[str, Path], kind: str, name: str, data: st.DataObject
) -> None:
    lines = (proven[kind] / name).read_text().splitlines()
    here, there = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    how = data.draw(st.sampled_from(["remove", "copy", "move"]))
    changed = list(lines)
    line = changed[here]
    if how != "copy":
        del changed[here]
    if how != "remove":
        changed.insert(there, line)
    if changed == lines:
        return
    found = judged(proven[kind], name, "\n".join(changed) + "\n")
    if found is not None and found.result == "proven":
        figures = "x_request_id" in line or '"time"' in line or '"step"' in line
        assert how == "move" or not figures, f"{how} {here} {there}"
        assert claims(found) == claims(verify(proven[kind])), f"{how} {here} {there}"


# Of a plan: everything that a lane decides. The rest is where it ran, and why.
DECIDED = (
    "lane", "arm", "profile", "contract", "engine", "driver", "ranks", "stack", "services",
    "cells", "prefill", "comparable", "ready_s", "patches", "url", "extra_env",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@many
@given(data=st.data())
def test_a_changed_plan_proves_nothing(
    proven: dict[str, Path], kind: str, data: st.DataObject
) -> None:
    found = json.loads((proven[kind] / "manifest.json").read_text())
    chosen = [at for at in leaves(found["plan"]) if at[0] in DECIDED]
    at = data.draw(st.sampled_from(chosen))
    old = value_at(found["plan"], at)
    new = other_value(data.draw, old)
    if new == old and type(new) is type(old):
        return
    before, found["plan"] = found["plan"], drops.replaced(found["plan"], at, new)
    with contextlib.suppress(msgspec.ValidationError):
        if msgspec.convert(found["plan"], Plan) == msgspec.convert(before, Plan):
            return  # what was removed had its default
    verdict = judged(proven[kind], "manifest.json", json.dumps(found))
    assert verdict is None or verdict.result != "proven", f"{at}: {old} became {new}"
