"""Lane and profile files are strict: what no schema knows is refused, with the valid names."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lanekit import contract, paths, spec, toml
from lanekit.errors import ConfigError


def test_every_profile_decodes_and_bears_its_file_name() -> None:
    assert spec.profile_names()
    for name in spec.profile_names():
        assert spec.profile(name).name == name


def test_every_lane_decodes_and_its_default_arms_fit() -> None:
    assert "vllm" in spec.lane_names()
    for name in spec.lane_names():
        lane = spec.lane(name)
        assert lane.name == name
        for where, setting in lane.profiles.items():
            chosen = spec.arm(lane, setting.arm, where)
            assert chosen.contracts[where] in contract.names()


VLLM = spec.lane("vllm")


@pytest.mark.parametrize(
    ("call", "option", "valid"),
    [
        (lambda: spec.profile("p5"), "PROFILE: no profile named 'p5'", "p5en-x2"),
        (lambda: spec.lane("vlm"), "LANE: no lane named 'vlm'", "vllm"),
        (lambda: spec.arm(spec.lane("vllm"), "flor", "cpu"), "ARM: no arm named 'flor'", "floor"),
        (
            lambda: spec.cells(spec.lane("vllm"), "floor", ["c5"]),
            "CELLS: no cell named 'c5'",
            "c4, c8, c32",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(
    call: Callable[[], object], option: str, valid: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert option in caught.value.message
    assert valid in caught.value.remedy


def test_an_arm_that_does_not_fit_the_profile_names_those_that_do() -> None:
    lane = spec.lane("vllm")
    with pytest.raises(ConfigError, match="does not run on profile p6-b200-x2") as caught:
        spec.arm(lane, "floor", "p6-b200-x2")
    assert "cpu" in caught.value.message


LANE = (paths.LANES / "vllm" / "lane.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message", "remedy"),
    [
        ("[workload]\n", "[workload]\nisll = 1\n", "unknown key 'isll' at workload", "isl, osl"),
        (
            "[arms.floor]\n",
            "[arms.floor]\nargz = []\n",
            r"unknown key 'argz' at arms",
            "title, con",
        ),
        ('engine = "vllm"', "engine = 3", "engine", "Fix the value"),
        ("isl = 120", "isl = 120\nisl = 121", "not TOML", "syntax"),
        ("requests = 40", "request = 40", "unknown key 'request' at workload", "concurrency, req"),
    ],
)
def test_a_bad_lane_file_names_key_place_and_valid_keys(
    tmp_path: Path, old: str, new: str, message: str, remedy: str
) -> None:
    assert old in LANE
    path = tmp_path / "lane.toml"
    path.write_text(LANE.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        toml.load(path, spec.Lane)
    assert re.search(message, caught.value.message)
    assert remedy in caught.value.remedy
    assert str(path) in caught.value.message


def test_a_lane_that_names_an_unknown_arm_or_profile_is_refused() -> None:
    def decode(text: str) -> spec.Lane:
        return spec.checked(toml.decode(text.encode(), spec.Lane, where="lane"))

    with pytest.raises(ConfigError, match="no arm named 'flour'"):
        decode(LANE.replace('arm = "floor"', 'arm = "flour"', 1))
    with pytest.raises(ConfigError, match="no profile named 'cqu'"):
        decode(LANE.replace("[profiles.cpu", "[profiles.cqu"))
    with pytest.raises(ConfigError, match="contracts: no profile named 'p9'"):
        decode(LANE.replace('cpu = "cpu"', 'p9 = "cpu"', 1))


def test_names_that_could_leave_the_drop_and_endless_cells_are_refused() -> None:
    def decode(old: str, new: str) -> spec.Lane:
        assert old in LANE
        text = LANE.replace(old, new, 1)
        return spec.checked(toml.decode(text.encode(), spec.Lane, where="lane"))

    for name in ('"../../c4"', "warm"):
        with pytest.raises(ConfigError, match="cannot be a name"):
            decode("c4 = {", f"{name} = {{")
    for deadline in ("nan", "inf", "-1.0"):
        with pytest.raises(ConfigError, match=r"the warm-up on .* has no deadline"):
            decode('arm = "', f'warm_s = {deadline}\narm = "')
    for deadline in ("nan", "inf", "0.0"):
        with pytest.raises(ConfigError, match="has no deadline"):
            decode("requests = 40", f"requests = 40, deadline_s = {deadline}")


def test_ranks_that_do_not_follow_from_hosts_and_gpus_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (paths.PROFILES / "p5en-x2.toml").read_text()
    (tmp_path / "p5en-x2.toml").write_text(text.replace("ranks = 16", "ranks = 15"))
    monkeypatch.setattr(paths, "PROFILES", tmp_path)
    with pytest.raises(ConfigError, match="ranks = 15, but 2 hosts x 8 GPUs"):
        spec.profile("p5en-x2")


def test_a_setting_may_begin_like_another_and_only_like_a_plain_one() -> None:
    def decode(text: str) -> spec.Lane:
        return spec.settled(toml.decode(text.encode(), spec.Lane, where="lane"))

    found = decode(LANE).profiles["h200x2"]
    assert (found.arm, found.environment) == ("epnc1", "vllm-cu130")
    assert "--max-model-len=4096" in found.args
    assert found.env["VLLM_USE_DEEP_GEMM"] == "0"
    with pytest.raises(ConfigError, match="no setting named 'h200x3'"):
        decode(LANE.replace('like = "h200x1"', 'like = "h200x3"'))
    with pytest.raises(ConfigError, match="no setting named 'p5-x2'"):
        decode(
            LANE.replace(
                '[profiles.p6-b200-x2]\nlike = "p5en-x2"', '[profiles.p6-b200-x2]\nlike = "p5-x2"'
            )
        )


def test_cells_that_an_arm_or_a_sweep_names_must_be_there() -> None:
    def decode(old: str, new: str) -> spec.Lane:
        assert old in LANE
        return spec.checked(
            toml.decode(LANE.replace(old, new, 1).encode(), spec.Lane, where="lane")
        )

    with pytest.raises(ConfigError, match="no cell named 'c9'"):
        decode('sweep = ["c4"', 'sweep = ["c9"')
    with pytest.raises(ConfigError, match="no cell named 'c9'"):
        decode('cells = ["c4"', 'cells = ["c9"')


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('reference = "floor"', 'reference = "flor"', "no arm named 'flor'"),
        ('reference = "floor"', 'reference = "dense-graph"', "dense-graph does not run on cpu"),
        ('reference = "floor"', 'reference = "floor-graph"', "has a reference itself"),
    ],
)
def test_a_reference_is_an_arm_that_runs_there_and_has_none(old: str, new: str, says: str) -> None:
    text = (paths.LANES / "vllm" / "lane.toml").read_text()
    assert old in text
    with pytest.raises(ConfigError, match=re.escape(says)):
        spec.checked(toml.decode(text.replace(old, new).encode(), spec.Lane, where="here"))


def test_every_serving_arm_stands_in_the_gate() -> None:
    for name in spec.lane_names():
        lane = spec.lane(name)
        if lane.workload.driver != "aiperf":
            continue
        named = {arm.reference for arm in lane.arms.values()}
        alone = [n for n, arm in lane.arms.items() if not arm.reference and n not in named]
        assert alone == [], f"{name}: neither compared nor compared with"
