"""The list of lanes, and the README that shows it."""

import datetime
import shutil
from pathlib import Path

import drops
import msgspec
import pytest

from lanekit import lanes, paths, spec
from lanekit.drop import read as drops_read
from lanekit.errors import ConfigError


def test_every_arm_stands_in_the_list_on_every_profile_it_fits() -> None:
    listed = {(e.lane, e.arm, e.profile) for e in lanes.entries()}
    for name in spec.lane_names():
        for arm, declared in spec.lane(name).arms.items():
            assert {(name, arm, profile) for profile in declared.contracts} <= listed


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(ConfigError, match="lost the markers"):
        lanes.renewed("# deepep-lanes\n", "")


def test_only_committed_drops_count_for_the_readme() -> None:
    tracked = {path.name for path in lanes.tracked()}
    found = {m.drop for e in lanes.entries(committed=True) for m in e.measured}
    assert found
    assert found <= tracked


def test_no_arm_is_called_failing_that_has_been_proven_since() -> None:
    for entry in lanes.entries(committed=True):
        proven = [m for m in entry.measured if entry.failing and m.result == "proven"]
        assert all(m.day <= str(entry.failing.since) for m in proven if entry.failing), entry


def found(lane: str, arm: str, profile: str) -> lanes.Entry:
    (entry,) = [e for e in lanes.entries() if (e.lane, e.arm, e.profile) == (lane, arm, profile)]
    return entry


@pytest.mark.usefixtures("known_lanes")
def test_a_row_without_a_drop_says_what_it_needs(checkout: Path) -> None:
    assert found("vllm", "v2", "p5en-x2").detail == "needs hardware: p5en-x2"
    assert found("vllm", "floor", "cpu").detail == "not run yet"


@pytest.mark.usefixtures("known_lanes")
def test_a_row_with_a_drop_says_when_and_what_it_proves_today(checkout: Path) -> None:
    drops.drop(checkout / "results" / "one", "cpu")
    entry = found("vllm", "floor", "cpu")
    others = ",".join(entry.lacking)
    assert set(entry.lacking) == set(drops.CELLS) - {"c4"}
    assert entry.detail == f"run here c4 2026-11-30: proven (one); not run: {others}"
    assert entry.state == f"run here: proven, but not {others}"
    assert "vllm/floor" in lanes.text()
    assert ", 1 run here: proven" in lanes.text()


@pytest.mark.usefixtures("known_lanes")
def test_a_drop_that_no_longer_holds_is_shown_as_refuted(checkout: Path) -> None:
    folder = drops.drop(checkout / "results" / "one", "cpu")
    (folder / "logs" / "here-server.log").write_text("other\n")
    assert found("vllm", "floor", "cpu").measured[0].result == "refuted"


@pytest.mark.usefixtures("known_lanes")
def test_the_newest_drop_of_a_row_speaks_for_it(checkout: Path) -> None:
    drops.drop(checkout / "results" / "new", "cpu", lambda log: log[:1])
    drops.drop(checkout / "results" / "old", "cpu", started="2026-11-29T11:00:00.000+00:00")
    assert found("vllm", "floor", "cpu").measured == (
        lanes.Measured("new", "2026-11-30", "refuted", ("c4",)),
    )


@pytest.mark.usefixtures("known_lanes")
def test_a_drop_of_another_model_speaks_only_where_no_other_does(checkout: Path) -> None:
    """The lane's own model is what its row promises (2026-11-30)."""
    results = checkout / "results"
    source = spec.lane("vllm").model.source
    drops.drop(results / "own", "cpu", plan={"model": {"source": source}},
               started="2026-11-29T11:00:00.000+00:00")  # fmt: skip
    drops.drop(results / "new", "cpu", plan={"model": {"source": "x/y"}})
    (other,) = found("vllm", "floor", "cpu").measured
    assert other.drop == "own"
    shutil.rmtree(results / "own")
    (other,) = found("vllm", "floor", "cpu").measured
    assert other.drop == "new"


def test_a_row_s_cells_are_of_the_drops_that_hold_them() -> None:
    held = {(e.lane, e.arm, e.profile): e for e in lanes.entries(committed=True)}
    exchanged = held["micro", "v1-ht", "h200x2"]
    assert [m.cells for m in exchanged.measured] == [("decode",), ("sweep",)]
    assert exchanged.state == "run here: proven"
    for entry in held.values():
        for each in entry.measured:
            holds = drops_read(paths.RESULTS / each.drop).row.cells
            assert set(each.cells) <= set(holds), each


@pytest.mark.usefixtures("known_lanes")
def test_an_interrupted_run_is_no_run(checkout: Path) -> None:
    drops.drop(checkout / "results" / "cut", "cpu", state="interrupted")
    assert found("vllm", "floor", "cpu").state == "not run yet"


def test_no_row_is_left_without_a_reason() -> None:
    """Run here, known failing, or what it needs: "not run yet" tells a stranger nothing."""
    listed = lanes.entries(committed=True)
    assert not [f"{e.lane}/{e.arm} on {e.profile}" for e in listed if "not run yet" in e.states]
    (picker,) = [e for e in listed if (e.lane, e.arm, e.profile) == ("llmd", "epp", "cpu")]
    assert picker.measured or picker.detail.startswith("needs artefact: llm-d's endpoint picker")
    (seam,) = [e for e in listed if (e.lane, e.arm, e.profile) == ("trtllm", "seam", "p5en-x2")]
    assert seam.measured or seam.detail.startswith("needs hardware: p5en-x2, and NVIDIA's wheel")


FAILING = (
    '"known_failing" = { since = 2026-11-30, what = "dies in capture", profiles = ["h200x2"], '
    'issue = "https://github.com/vllm-project/vllm/issues/1" }'
)


@pytest.mark.usefixtures("known_lanes")
def test_a_known_failing_arm_is_dated_and_filed_where_it_fails(checkout: Path) -> None:
    lane = paths.LANES / "vllm" / "lane.toml"
    title = '"title" = "v2"'
    assert title in lane.read_text()
    lane.write_text(lane.read_text().replace(title, f"{title}, {FAILING}"))
    drops.drop(checkout / "results" / "one", "v2-nvlink")
    here = found("vllm", "v2", "h200x2")
    assert here.detail == (
        "known failing since 2026-11-30: dies in capture "
        "(https://github.com/vllm-project/vllm/issues/1)"
    )
    assert found("vllm", "v2", "p5en-x2").state == "needs hardware"
    assert "h200x2 (known failing since 2026-11-30)" in lanes.markdown()


def test_a_failure_on_a_profile_that_the_arm_does_not_fit_is_refused() -> None:
    lane = msgspec.structs.replace(spec.lane("vllm"))
    failing = spec.KnownFailing(datetime.date(2026, 11, 30), "x", profiles=("p5-x2",))
    arm = msgspec.structs.replace(lane.arms["floor"], known_failing=failing)
    broken = msgspec.structs.replace(lane, arms={**lane.arms, "floor": arm})
    with pytest.raises(ConfigError, match="known_failing: no profile named 'p5-x2'"):
        spec.checked(broken)


def test_what_was_published_without_an_arm_here_is_listed() -> None:
    rows = lanes.published_only(lanes.entries())
    assert ("trtllm/shim", "p5en-x2", "c4,c8,c32,*", "published only, retired") in rows
    assert not [arm for arm, *_ in rows if arm == "vllm/epnc1"]


def test_a_row_that_only_a_wheel_of_a_series_proves_says_so() -> None:
    """No gate of a run sees which source a wheel was built from: its drop has no patches."""
    (told,) = [line for line in lanes.markdown().splitlines() if "| micro/v1-ll |" in line]
    assert "wheel of series deepep/567632dd" in told


ASKED = ("What it proves", "What it needs", "One command", "How long", "What pass looks like")


@pytest.mark.parametrize("name", spec.lane_names())
def test_the_readme_of_a_lane_answers_what_a_stranger_asks(name: str) -> None:
    text = (paths.LANES / name / "README.md").read_text()
    assert not [each for each in ASKED if f"**{each}.**" not in text]
    assert "nown failures" in text
    assert f"make lane-{name}" in text
