"""Draw results/plots/ from the drops that git tracks, each judged anew: `make plots`.

Only what is proven is drawn. One picture of time a token for each profile with serving rows, one of
the exchanges for each profile with micro rows; the newest drop of an arm is taken.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

from lanekit import drop, lanes, paths, report, verify
from lanekit.errors import LaneError
from lanekit.verdict import MicroRow, Verdict

mpl.use("svg")
# The same drops make the same bytes: no date, no random ids, text as text.
mpl.rcParams.update({"svg.hashsalt": "lanes", "svg.fonttype": "none", "figure.figsize": (9, 4.5)})

from matplotlib import pyplot as plt  # noqa: E402

OPS: Final = {"dispatch": "C0", "combine": "C1", "all_to_all": "C2"}
DASHES: Final = {"eager": ":", "graph": "-"}


def proven(drops: Iterable[Path]) -> list[tuple[str, Verdict]]:
    """The newest proven drop of each profile, model, lane and arm, each with its model."""
    newest: dict[tuple[str, str, str, str], Verdict] = {}
    for path in drops:
        try:
            verdict = verify.verify(path)
        except LaneError:
            continue  # `lanekit verify` says why
        if verdict.result == "proven":
            model = report.model(drop.read(path))
            newest[verdict.profile, model, verdict.lane, verdict.arm] = verdict
    return [(key[1], newest[key]) for key in sorted(newest)]


def time_a_token(title: str, verdicts: Sequence[Verdict]) -> Any:
    """Median inter-token latency (ms, log scale) of every arm, grouped by cell."""
    figure, axes = plt.subplots()
    cells = list(dict.fromkeys(cell.name for v in verdicts for cell in v.cells))
    width = 0.8 / len(verdicts)
    for index, verdict in enumerate(verdicts):
        known = {cell.name: cell.itl_p50_ms for cell in verdict.cells}
        drawn = [(at, known[name]) for at, name in enumerate(cells) if known.get(name)]
        bars = axes.bar(
            [at + index * width for at, _ in drawn],
            [value or 0.0 for _, value in drawn],
            width,
            label=f"{verdict.lane}/{verdict.arm}",
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(cells))], cells)
    axes.set(yscale="log", ylabel="inter-token latency p50, ms", title=f"Time a token: {title}")
    axes.legend(fontsize=8)
    return figure


def exchange(profile: str, arm: str, rows: Iterable[MicroRow]) -> Any:
    """Dispatch and combine over tokens a rank (BF16, log scales), beside torch's all-to-all."""
    figure, axes = plt.subplots()
    shown = [row for row in rows if row.dtype == "bf16" and row.cell == "sweep" and row.tokens]
    for op, color in OPS.items():
        for mode, dash in DASHES.items():
            line = sorted((r.tokens, r.p50_us) for r in shown if (r.op, r.mode) == (op, mode))
            if line:
                axes.plot(*zip(*line, strict=True), dash, color=color, marker=".",
                          label=f"{op}, {mode}")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="tokens a rank", ylabel="p50 of the slowest rank, us",
             title=f"micro/{arm} on {profile}, BF16, hidden 7168, top-8")  # fmt: skip
    axes.legend(fontsize=8)
    return figure


def draw(drops: Iterable[Path], folder: Path) -> list[Path]:
    """Write a picture of every group of drops; returns their paths."""
    found, made = proven(drops), {}
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for model, v in found:
        if v.cells:
            groups.setdefault((v.profile, model), []).append(v)
    for (profile, model), here in groups.items():
        name = f"{profile}-{model.replace(', ', '-').replace(' ', '-')}"
        made[name] = time_a_token(f"{profile}, {model}", here)
    for _, v in found:
        if any(row.cell == "sweep" and row.dtype == "bf16" for row in v.micro):
            made[f"{v.profile}-micro-{v.arm}"] = exchange(v.profile, v.arm, v.micro)
    folder.mkdir(exist_ok=True)
    for name, figure in made.items():
        figure.tight_layout()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
    return [folder / f"{name}.svg" for name in made]


if __name__ == "__main__":
    for picture in draw(lanes.tracked(), paths.RESULTS / "plots"):
        print(picture.relative_to(paths.ROOT))
