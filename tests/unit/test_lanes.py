"""The list of lanes, and the README that shows it."""

import pytest

from lanekit import lanes, paths, spec
from lanekit.errors import ConfigError


def test_every_arm_stands_in_the_list_on_every_profile_it_fits() -> None:
    listed = {(e.lane, e.arm, e.profile) for e in lanes.entries()}
    for name in spec.lane_names():
        for arm, declared in spec.lane(name).arms.items():
            assert {(name, arm, profile) for profile in declared.contracts} <= listed


def test_the_readme_shows_the_lanes_as_they_are() -> None:
    readme = (paths.ROOT / "README.md").read_text()
    assert lanes.with_matrix(readme) == readme, "run `make readme`"


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(ConfigError, match="lost the markers"):
        lanes.with_matrix("# deepep-lanes\n")


def test_only_committed_drops_count_for_the_readme() -> None:
    states = {e.state for e in lanes.entries(committed=True)}
    assert all(state == "not run here" or state.startswith("run here 2") for state in states)
