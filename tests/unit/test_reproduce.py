"""`lanekit reproduce`: what it refuses, what it compares, and a whole run of a stand-in row."""

import shutil
import subprocess
import sys
from pathlib import Path

import drops
import msgspec
import pytest

from lanekit import cli, compare, lanes, machine, planning, published, registry, reproduce, spec
from lanekit.errors import ConfigError
from lanekit.machine import Gpu, Machine
from lanekit.published import Row
from lanekit.reproduce import Name

KNOWN = published.load()
STANDIN = Path(__file__).parent / "standin"


def h200(bare: Machine, gpus: int, nics: int = 0) -> Machine:
    """A machine with H200s and EFA NICs."""
    return msgspec.structs.replace(
        bare,
        gpus=(Gpu("NVIDIA H200", 143771, "580.0"),) * gpus,
        nics=tuple(f"rdmap{n}" for n in range(nics)),
    )


# ---------------------------------------------------------------- what ROW= may say


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("vllm/floor", "'vllm/floor' is not lane/arm/cell"),
        ("vllm//c4", "is not lane/arm/cell"),
        ("", "is not lane/arm/cell"),
        ("vllm/floor/c9", "no cell named 'c9'"),
        ("vllm/nope/c4", "lane vllm has no arm 'nope'"),
        ("nemo-rl/alltoall-rollout/grpo", "alltoall-rollout: no cell named 'grpo'"),
        ("nope/v2/c4", "no lane named 'nope'"),
        ("trtllm/shim/c4", "trtllm/shim is a published row only: retired"),
    ],
)
def test_a_row_that_is_none_is_refused_with_what_is_known(
    row: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["reproduce", row]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") >= 2, "an error and what to do next"


def test_a_published_row_without_an_arm_here_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("vllm/fancy/c4", "vllm-epnc1", "x", "records", {"tok_s": 1.0})
    monkeypatch.setattr(published, "load", lambda: msgspec.structs.replace(KNOWN, rows=(row,)))
    with pytest.raises(ConfigError, match="vllm/fancy is a published row only: not declared here"):
        reproduce.parse("vllm/fancy/c4")


# ---------------------------------------------------------------- where it cannot run


def test_a_machine_without_the_fleet_is_refused_with_what_is_missing(
    bare: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "read", lambda: bare)
    assert cli.main(["reproduce", "vllm/graph/c32"]) == 2
    said = capsys.readouterr().err
    assert "it needs 2 H200 GPUs a host and there are 0" in said
    assert "Nearest here: make reproduce ROW=vllm/floor/c32 PROFILE=cpu" in said
    assert "PLAN=1" in said


@pytest.mark.parametrize(("gpus", "nics"), [(0, 0), (8, 16)])
def test_a_fleet_without_names_is_refused_whatever_this_machine_is(
    bare: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    gpus: int, nics: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(machine, "read", lambda: h200(bare, gpus, nics))
    assert cli.main(["reproduce", "vllm/epnc8/c32"]) == 2
    said = capsys.readouterr().err
    assert "vllm/epnc8/c32 on p5en-x2 cannot run here" in said
    assert "it needs 2 hosts, named with HOSTS=" in said
    assert ("16 EFA NICs a host and there are 0" in said) is (nics == 0)


def test_a_host_of_the_fleet_lacks_nothing(bare: Machine) -> None:
    assert reproduce.lacks(spec.profile("p5en-x2"), h200(bare, 8, 16)) == []
    assert reproduce.lacks(spec.profile("p5en-x2"), h200(bare, 8)) == [
        "it needs 16 EFA NICs a host and there are 0"
    ]


def test_gpus_of_another_kind_do_not_count(bare: Machine) -> None:
    other = msgspec.structs.replace(bare, gpus=(Gpu("NVIDIA L4", 23034, "580.0"),) * 8)
    assert reproduce.lacks(spec.profile("h200x2"), other) == [
        "it needs 2 H200 GPUs a host and there are 0"
    ]


def test_the_nearest_row_keeps_the_arm_where_another_fleet_fits(bare: Machine) -> None:
    near = reproduce.nearest(Name("vllm", "floor", "c8"), h200(bare, 1))
    assert near == "make reproduce ROW=vllm/floor/c8 PROFILE=h200x1"


def test_the_nearest_row_keeps_the_lane_before_it_changes_it(bare: Machine) -> None:
    near = reproduce.nearest(Name("micro", "v1-ll", "sweep"), bare)
    assert near == "make reproduce ROW=micro/gloo/sweep PROFILE=cpu"


def test_the_nearest_row_is_one_of_its_arm_s_own_sweep(bare: Machine) -> None:
    near = reproduce.nearest(Name("nemo-rl", "v2-grpo", "grpo"), bare)
    assert near == "make reproduce ROW=nemo-rl/alltoall-rollout/rollout PROFILE=cpu"


@pytest.mark.usefixtures("known_lanes")
def test_a_lane_of_fleets_alone_sends_to_another(bare: Machine) -> None:
    near = reproduce.nearest(Name("trtllm", "seam", "c4"), bare)
    assert near == "make reproduce ROW=vllm/floor/c4 PROFILE=cpu"


# ---------------------------------------------------------------- how it would run


def settled(row: str, here: Machine, **given: str) -> planning.Options:
    options = planning.Options(lane="", start=False, **given)  # type: ignore[arg-type]
    return reproduce.settled(KNOWN, Name(*row.split("/")), options, here)


def test_a_row_without_images_runs_in_place_from_its_lock(bare: Machine) -> None:
    found = settled("vllm/floor/c4", bare)
    assert (found.profile, found.launcher, found.cells) == ("cpu", "process", ("c4",))


def test_published_images_are_preferred(
    bare: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = registry.Entry("r/x", "t", "sha256:" + "0" * 64, "")
    lock = {"2026-07": {"vllm-cpu": entry, "aiperf": entry}}
    monkeypatch.setattr(registry, "read", lambda: lock)
    assert settled("vllm/floor/c4", bare).launcher == "compose"
    assert settled("vllm/floor/c4", bare, launcher="process").launcher == "process"
    del lock["2026-07"]["aiperf"]
    assert settled("vllm/floor/c4", bare).launcher == "process"


def test_an_arm_s_own_image_and_stack_are_what_is_pulled() -> None:
    vllm, llmd = spec.lane("vllm"), spec.lane("llmd")
    assert reproduce.needed(vllm, "v1-ll", "p5en-x2") == ["vllm-v1", "aiperf"]
    assert reproduce.needed(llmd, "router", "cpu") == ["vllm-cpu", "aiperf", "llmd"]
    assert reproduce.needed(spec.lane("micro"), "gloo", "cpu")[1:] == []


def test_the_published_fleet_is_taken_where_the_arm_fits_it(bare: Machine) -> None:
    published_on = {f.run.profile for f in published.figures(KNOWN, "vllm/epnc1/c4")}
    fits = published_on & set(spec.lane("vllm").arms["epnc1"].contracts)
    found = settled("vllm/epnc1/c4", bare)
    assert found.profile in (fits or {"h200x2"})
    assert settled("vllm/epnc1/c4", bare, profile="h200x2").profile_why == ""


def test_an_arm_that_does_not_fit_the_profile_is_refused(bare: Machine) -> None:
    with pytest.raises(ConfigError, match="does not run on profile h200x2"):
        settled("vllm/floor/c4", bare, profile="h200x2")


def test_what_is_not_published_says_so_before_any_engine_is_asked(
    bare: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "read", lambda: bare)
    monkeypatch.setattr(registry, "LOCK", Path("images.lock"))
    said = ["reproduce", "vllm/floor/c4", "--profile", "cpu", "--launcher", "compose"]
    if registry.read().get("2026-07", {}).get("vllm-cpu"):
        pytest.skip("the image is published: images.lock holds its digest")
    assert cli.main(said) == 2
    told = capsys.readouterr().err
    assert "images.lock holds no digest of vllm-cpu in stack 2026-07" in told
    assert "make image-vllm-cpu" in told


def test_a_plan_is_printed_and_nothing_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "vllm/graph/c32", "--profile", "h200x2", "--server-python",
                     sys.executable, "--plan"]) == 0  # fmt: skip
    told = capsys.readouterr()
    plan = msgspec.json.decode(told.out)
    assert (plan["arm"], plan["profile"], list(plan["cells"])) == ("graph", "h200x2", ["c32"])
    assert "published: no figure of vllm/graph/c32" in told.err


DECLARED = sorted({
    row.name for row in KNOWN.rows
    if not row.name.endswith(f"/{published.ANY}") and row.arm != "trtllm/shim"
})  # fmt: skip


@pytest.mark.parametrize("row", DECLARED)
def test_every_published_row_is_planned_on_its_fleet_with_its_figures(
    row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a row that another fleet ran: its arm's own is taken and the figure is only shown."""
    assert cli.main(["reproduce", row, "--plan"]) == 0
    told = capsys.readouterr()
    plan, figures = msgspec.json.decode(told.out), published.figures(KNOWN, row)
    assert f"{plan['lane']}/{plan['arm']}/{next(iter(plan['cells']))}" == row
    assert plan["profile"] in {f.run.profile for f in figures}
    for figure in figures:
        metric = KNOWN.metrics[figure.metric]
        assert f"published: {metric.title} {figure.value} {metric.unit}" in told.err
    assert len(plan["cells"]) == 1


@pytest.mark.parametrize(("times", "says"), [(1.0, "bar 740 met"), (2.0, "bar 740 missed")])
def test_a_bar_is_shown_beside_the_band(times: float, says: str) -> None:
    found = published.figures(KNOWN, "micro/v2/decode")
    (figure,) = (f for f in found if f.metric == "dc_p50_us")
    line = compare.Line(figure, figure.value * times, times - 1, "within")
    assert says in "\n".join(reproduce._beside_published(KNOWN, [line]))


# ---------------------------------------------------------------- a drop that is already there


def test_a_published_drop_is_compared_with_its_own_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not drops.PUBLISHED.is_dir():
        pytest.skip("needs the published drop: set LANES_SHARED_DATA")
    monkeypatch.setattr(reproduce, "_require_declared", lambda name: None)
    folder = drops.PUBLISHED / "trtllm-deepep-dropin-20260707" / "trtllm-native-seam"
    assert cli.main(["reproduce", "trtllm/seam/c32", "--drop", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "output tokens, tok/s" in said
    assert "563.3" in said
    assert "within" in said
    assert "no manifest: nothing is known" in said
    assert said.rstrip().endswith("reproduced: within the 10% band, or better")


@pytest.mark.usefixtures("known_lanes", "checkout")
def test_a_drop_below_the_band_is_not_reproduced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = drops.drop(tmp_path / "drop", "v2-efa-proxy")
    measured = 8 * 128 / (7 * 0.35 + 1.37)  # what drops.record makes of it
    for published_as, rc, says in (
        (measured * 1.5, 1, "not reproduced: below the 10% band"),
        (measured * 1.05, 0, "reproduced: within"),
    ):
        row = Row("vllm/v2/c4", "vllm-epnc1", "x", "records", {"tok_s": round(published_as, 1)})
        known = msgspec.structs.replace(KNOWN, rows=(row,))
        monkeypatch.setattr(published, "load", lambda known=known: known)
        assert cli.main(["reproduce", "vllm/v2/c4", "--drop", str(folder)]) == rc
        said = capsys.readouterr().out
        assert says in said
        assert "Qwen/Qwen3-30B-A3B-FP8  " in said, "the weights of the published run"
        assert not [line for line in said.splitlines() if line.startswith("  nics ")], "both 16"


@pytest.mark.usefixtures("known_lanes", "checkout")
def test_a_refuted_drop_reproduces_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = drops.drop(tmp_path / "drop", "v2-efa-proxy")
    (folder / "logs" / "here-server.log").write_text("another log\n")
    assert cli.main(["reproduce", "vllm/v2/c4", "--drop", str(folder)]) == 1
    assert "not reproduced: refuted" in capsys.readouterr().out


@pytest.mark.usefixtures("known_lanes", "checkout")
def test_an_incomplete_drop_says_what_it_lacks_beside_a_whole_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = drops.drop(tmp_path / "whole", "cpu")
    monkeypatch.setattr(lanes, "tracked", lambda: [whole])
    folder = drops.drop(tmp_path / "drop", "cpu", cells=("c4", "c8"), state="sweeping", ended=None)
    assert cli.main(["reproduce", "vllm/floor/c8", "--drop", str(folder)]) == 2
    assert "nothing measured of c8; the drop has figures of c4" in capsys.readouterr().out
    shutil.rmtree(folder / "aiperf")
    assert cli.main(["reproduce", "vllm/floor/c4", "--drop", str(folder)]) == 2
    said = capsys.readouterr().out
    assert "nothing measured of c4; the drop has figures of no load point" in said
    (row,) = [line.split() for line in said.splitlines() if "output tokens, tok/s" in line]
    assert (row[3], row[5]) == ("-", "-")


@pytest.mark.usefixtures("known_lanes", "checkout")
def test_a_complete_drop_without_figures_says_which_checks_are_not_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = drops.drop(tmp_path / "drop", "cpu")
    shutil.rmtree(folder / "aiperf")
    assert cli.main(["reproduce", "vllm/floor/c4", "--drop", str(folder)]) in (1, 2)
    said = capsys.readouterr().out
    assert "nothing measured of c4" in said
    assert "  files: " in said


@pytest.mark.usefixtures("known_lanes", "checkout")
def test_the_drop_of_another_row_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = drops.drop(tmp_path / "drop", "cpu")
    assert cli.main(["reproduce", "vllm/v2/c4", "--drop", str(folder)]) == 2
    assert "holds vllm/floor/c4, not vllm/v2/c4" in capsys.readouterr().err


@pytest.mark.usefixtures("known_lanes", "checkout")
def test_a_plan_that_is_no_plan_is_unreadable_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = drops.drop(tmp_path / "drop", "v2-efa-proxy", plan={"launcher": ["?"]})
    row = Row("vllm/v2/c4", "vllm-epnc1", "x", "records", {"tok_s": 100.0})
    monkeypatch.setattr(published, "load", lambda: msgspec.structs.replace(KNOWN, rows=(row,)))
    assert cli.main(["reproduce", "vllm/v2/c4", "--drop", str(folder)]) == 2
    assert "Restore the drop" in capsys.readouterr().err


# ---------------------------------------------------------------- a whole run


def test_a_row_is_run_judged_and_compared(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bin" / "aiperf").symlink_to(STANDIN / "aiperf")
    done = subprocess.run(
        (sys.executable, str(STANDIN / "driver.py"), str(tmp_path), "reproduce",
         "standin/sound/quick", "--server-python", sys.executable, "--aiperf-python",
         str(tmp_path / "bin" / "python")),
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    said = done.stdout
    (drop,) = (tmp_path / "results").glob("2*")
    assert "no published figure of standin/sound/quick" in said, done.stderr
    assert "no other committed drop of standin/sound/quick on cpu" in said
    assert drop.name.endswith("cpu-standin-sound")
    last = said.rstrip().splitlines()[-1]
    assert last.startswith("not reproduced: ")
    assert done.returncode == {"refuted": 1, "no verdict": 2}[last.removeprefix("not reproduced: ")]
