"""The published figures: the file, its refusals, and what the published records say of them."""

import json
import os
import shutil
from pathlib import Path

import drops
import pytest

from lanekit import published, records, spec
from lanekit.errors import ConfigError
from lanekit.published import Row
from lanekit.verify import verify

FOUND = published.load()

# What the campaign's own front pages print, typed here once more from them: row -> metric -> value.
HEADLINES = {
    "micro/v2/decode": {"dc_p50_us": 443.6, "dispatch_p50_us": 185.4, "combine_p50_us": 258.2},
    "micro/v2-gda/decode": {"dispatch_p50_us": 338.5, "combine_p50_us": 480.7},
    "micro/v1-ll/decode": {"dc_p50_ms": 0.82},
    "vllm/epnc1/c4": {"tok_s": 19.5},
    "vllm/epnc1/c8": {"tok_s": 38.8},
    "vllm/epnc1/c32": {"tok_s": 144.6},
    "vllm/epnc8/c4": {"tok_s": 39.4},
    "vllm/epnc8/c8": {"tok_s": 76.5},
    "vllm/epnc8/c32": {"tok_s": 273.0},
    "sglang/v2/c4": {"tok_s": 34.5},
    "sglang/v2/c8": {"tok_s": 67.2},
    "sglang/v2/c32": {"tok_s": 255.2},
    "trtllm/seam/c4": {"tok_s": 67.6},
    "trtllm/seam/c8": {"tok_s": 142.4},
    "trtllm/seam/c32": {"tok_s": 563.3},
    "trtllm/shim/c4": {"tok_s": 66.5},
    "trtllm/shim/c8": {"tok_s": 147.5},
    "trtllm/shim/c32": {"tok_s": 586.7},
    "megatron/v2/steps": {"loss_1": 26.41, "loss_2": 25.10, "loss_3": 24.61, "efa_tx_gb": 1.096},
    "nemo-rl/v2-rollout/rollout": {"rollout_s": 9.45, "world": 16},
    "nemo-rl/v1-grpo/grpo": {"refit_s": 3.4, "generation_percent": 62, "training_percent": 8},
}


def last_digit(value: float) -> float:
    """The unit of the last digit that was printed: 0.1 for 273.0, 1.0 for 280."""
    if isinstance(value, int):
        return 1.0
    return float(10.0 ** -len(repr(value).partition(".")[2]))


def bears_out(value: float, recomputed: float) -> bool:
    """Whether a recomputed figure is the printed one, but for rounding twice: 474.49 became 474.5
    and then 475 in print (vllm/epnc1/c4, 2026-07)."""
    return abs(value - recomputed) <= last_digit(value)


@pytest.mark.parametrize("name", HEADLINES)
def test_every_headline_figure_is_there(name: str) -> None:
    best = {figure.metric: figure.value for figure in published.figures(FOUND, name)}
    assert HEADLINES[name].items() <= best.items()


def test_the_proxy_side_of_the_type_5_campaign_is_kept_and_marked() -> None:
    (proxy,) = [row for row in FOUND.of("micro/v2/decode") if row.run == "gda"]
    assert proxy.figures["dispatch_p50_us"] == 391.6
    assert proxy.figures["combine_p50_us"] == 543.4
    assert not proxy.supported
    assert "four days older" in proxy.why


def test_a_supported_figure_comes_before_a_newer_one_that_is_not() -> None:
    (dispatch,) = [
        f for f in published.figures(FOUND, "micro/v2/decode") if f.metric == "dispatch_p50_us"
    ]
    assert (dispatch.value, dispatch.row.supported) == (185.4, True)


@pytest.mark.parametrize("row", [r for r in FOUND.rows if not r.retired], ids=lambda r: r.name)
def test_a_published_row_of_a_lane_here_is_one_of_its_rows(row: Row) -> None:
    """So that reproduce finds it: by arm and load point, on the profile it was measured on."""
    lane, arm, cell = row.name.split("/")
    if cell == published.ANY or lane not in spec.lane_names():
        return
    declared = spec.lane(lane)
    if arm in declared.arms:
        assert cell in declared.workload.cells


# ---------------------------------------------------------------- what the file may not say


def _with(tmp_path: Path, old: str, new: str) -> Path:
    text = published.FILE.read_text()
    assert old in text
    path = tmp_path / "published.toml"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('evidence = "records"', 'evidence = "trust"', "Invalid enum value"),
        ('evidence = "records"\n', 'evidence = "statement"\n', "supported by a bare statement"),
        ('name = "vllm/epnc1/c4"', 'name = "vllm/epnc1"', "is not lane/arm/cell"),
        ('run = "vllm-epnc8"', 'run = "vllm-epnc9"', "no run 'vllm-epnc9'"),
        ("figures = { tok_s = 39.4,", "figures = { toks = 39.4,", "no metric 'toks'"),
        ("figures = { speedup = 2.02 }", "figures = {}", "no figures"),
        ('source = "v1"', 'source = "v3"', "no source 'v3'"),
        ('profile = "p5-x2"', 'profile = "p4"', "no profile 'p4'"),
        ("figures = { speedup = 2.02 }", "figures = { tok_s = 2.02 }", "tok_s of run vllm-epnc8"),
        ("supported = false", "suported = false", "unknown key 'suported'"),
        ("date = 2026-07-06", 'date = "July"', "date"),
    ],
)
def test_a_bad_file_is_refused_with_what_is_wrong(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        published.load(_with(tmp_path, old, new))
    assert says in caught.value.message
    assert caught.value.remedy


def test_an_unsupported_figure_needs_a_reason(tmp_path: Path) -> None:
    why = 'why = "no log is published"\n'
    with pytest.raises(ConfigError, match="not supported, and no reason"):
        published.load(_with(tmp_path, why, ""))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        published.load(tmp_path / "published.toml")


@pytest.mark.parametrize(
    ("printed", "found", "same"),
    [(475, 474.49, True), (273.0, 273.038, True), (10.0, 9.947, True), (9.45, 9.47, False),
     (563.3, 563.5, False), (280, 281.2, False)],
)  # fmt: skip
def test_a_printed_figure_is_held_to_its_last_digit(
    printed: float, found: float, *, same: bool
) -> None:
    assert bears_out(printed, found) is same


# ---------------------------------------------------------------- against the published records

CHECKOUT = Path(os.environ.get("LANES_PUBLISHED_CHECKOUT", drops.PUBLISHED))


def _export(row: Row, scratch: Path) -> Path | None:
    """The AIPerf folder of a row: in the published drop, or in a checkout of its whole source."""
    for path in (CHECKOUT / FOUND.path(row), CHECKOUT / FOUND.path(row).removeprefix("results/")):
        if path.is_file():  # a summary alone, under a name of its own
            shutil.copy(path, scratch / records.SUMMARY)
            return scratch
        if path.is_dir():
            return path
    return None


@drops.needs_published
@pytest.mark.parametrize(
    "row", [r for r in FOUND.rows if "tok_s_user" in r.figures and r.supported],
    ids=lambda r: f"{r.name}-{r.run}",
)  # fmt: skip
def test_a_supported_serving_row_is_what_its_export_says(row: Row, tmp_path: Path) -> None:
    folder = _export(row, tmp_path)
    if folder is None:
        pytest.skip(f"{FOUND.path(row)} is not in the data here: set LANES_PUBLISHED_CHECKOUT")
    cell = records.read(folder)
    assert (row.evidence == "records") == (cell.records is not None)
    assert not records.disagreements(cell)
    wrong = {
        metric: (value, getattr(cell.figures, metric))
        for metric, value in row.figures.items()
        if not bears_out(value, getattr(cell.figures, metric))
    }
    assert not wrong
    assert cell.figures.errors == 0


@drops.needs_published
def test_the_seam_s_log_bears_out_its_ranks_and_constructions() -> None:
    found = verify(drops.PUBLISHED / "trtllm-deepep-dropin-20260707" / "trtllm-native-seam")
    (row,) = [r for r in FOUND.rows if r.name == "trtllm/seam/*"]
    assert found.result == "proven"
    assert FOUND.runs[row.run].transport == "proven"
    said = {check.id: check.actual for check in found.checks}
    assert said["efa-provider"].startswith(f"{row.figures['efa_ranks']} of 16")
    assert said["seam-elastic-trtllm"].startswith(f"{row.figures['constructions']}")


@drops.needs_published
def test_vllm_s_own_summary_contradicts_sixteen_of_each() -> None:
    (row,) = [r for r in FOUND.rows if r.name == "vllm/epnc1/*"]
    name = FOUND.path(row).removeprefix("results/")
    counted = json.loads((drops.PUBLISHED / name).read_text())["backend_proof"].values()
    assert {8, 3656} <= set(counted)
    assert not row.supported
    assert "8 provider lines and 3656" in row.why


@drops.needs_published
def test_the_micro_row_is_its_summary_s_and_its_sum_is_a_sum() -> None:
    first, variants, total = [r for r in FOUND.rows if r.run == "micro"]
    said = json.loads((drops.PUBLISHED / FOUND.path(first).removeprefix("results/")).read_text())
    for metric, value in {**first.figures, **variants.figures}.items():
        if metric != "world":
            phase = metric.removesuffix("_p50_us").replace("_", " ")
            assert said["phases_us"][phase]["p50"] == value
    assert said["config"]["skip_check"] is True
    both = first.figures["dispatch_p50_us"] + first.figures["combine_p50_us"]
    assert total.figures["dc_p50_us"] == pytest.approx(both)


@drops.needs_published
def test_the_type_5_campaign_set_a_new_figure_beside_an_old_one() -> None:
    said = json.loads((drops.PUBLISHED / "gda-campaign-summary.json").read_text())
    banked, matrix = said["banked_2026_07_14"], said["ab_matrix_2026_07_10"]
    for op in ("dispatch", "combine"):
        assert bears_out(banked[f"proxy_{op}_p50_us"], matrix[f"proxy_{op}_us"])
        assert matrix[f"type5_{op}_us"] > matrix[f"proxy_{op}_us"]
