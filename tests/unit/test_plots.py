"""The pictures hold what the proven drops hold, and nothing else."""

from pathlib import Path
from typing import Any

import drops
import pytest

from lanekit import programs
from lanekit.verdict import MicroRow

pytestmark = pytest.mark.usefixtures("known_lanes")
ROOT = Path(__file__).parents[2]
plots = programs.load("plots", ROOT / "scripts" / "plots.py")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A results folder with one serving drop and one of the micro lane."""
    drops.drop(tmp_path / "20261130T110000Z-cpu-vllm-floor", "cpu")
    drops.drop(tmp_path / "20261130T110000Z-cpu-micro-gloo", "cpu-gloo")
    return tmp_path


def test_the_same_drops_make_the_same_pictures(results: Path) -> None:
    first = {
        path.name: path.read_bytes()
        for path in plots.draw(sorted(results.glob("2*")), results / "plots")
    }
    assert set(first) == {"cpu-tiny.svg"}
    assert {
        path.name: path.read_bytes()
        for path in plots.draw(sorted(results.glob("2*")), results / "plots")
    } == first


def test_a_bar_is_labelled_with_its_arm_cell_and_figure(results: Path) -> None:
    plots.draw(sorted(results.glob("2*")), results / "plots")
    text = (results / "plots" / "cpu-tiny.svg").read_text()
    assert all(f">{label}<" in text for label in ("vllm/floor", "c4", "10.0"))


def test_what_is_not_proven_is_not_drawn(results: Path) -> None:
    log = next(results.glob("*floor/logs/*"))
    log.write_text(log.read_text() + "edited\n")
    assert plots.draw(sorted(results.glob("2*")), results / "plots") == []


def test_an_exchange_has_a_line_for_each_operation_and_mode() -> None:
    shape: dict[str, Any] = {
        "cell": "sweep",
        "dtype": "bf16",
        "bytes": 1,
        "repetitions": 1,
        "gbs": 1.0,
    }
    times: dict[str, Any] = {"min_us": 1.0, "max_us": 9.0, "spread": 0.0}
    rows = [
        MicroRow(op=op, mode=mode, tokens=tokens, p50_us=5.0, **shape, **times)
        for op in ("dispatch", "combine", "copy-peer")
        for mode in ("eager", "graph")
        for tokens in (8, 1)
    ]
    (axes,) = plots.exchange("h200x2", "v2", rows).axes
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    assert lines == {
        f"{op}, {mode}": [1, 8] for op in ("dispatch", "combine") for mode in ("eager", "graph")
    }
