"""The published figures of results/published.toml: each with its source, date, fleet and backing.

Strict: a figure that nothing backs must say so, or the file is refused.
"""

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from lanekit import paths, spec, toml
from lanekit.errors import ConfigError

FILE: Final = paths.ROOT / "results" / "published.toml"
ANY: Final = "*"  # the cell of a figure that belongs to no load point
UNBACKED: Final = ("statement", "unread")

Evidence = Literal["records", "log", "summary", "excerpt", "statement", "unread"]
Trait = Literal[
    "stack", "engine", "launcher", "weights", "driver", "gin", "gdrdrv", "aiperf", "check",
    "timing", "qps", "sms", "communicators", "program",
]  # fmt: skip


class Metric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a figure counts. better: the direction of an improvement, empty where there is none.
    headline: whether a row counts as reproduced by it."""

    title: str
    unit: str
    better: Literal["higher", "lower", ""]
    headline: bool = False


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public place that figures come from."""

    title: str
    url: str
    commit: str


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the rows of one published run share. profile: the fleet it ran on. folder: in the
    source. transport: what the published logs prove of it. differs: what to know before another
    run is set beside it."""

    source: str
    profile: str
    date: datetime.date
    folder: str
    transport: Literal["proven", "part", "stated", "none"]
    differs: dict[Trait, str]


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures of one row in one published run: metric -> value as printed, so its last digit is
    the precision that was published. why: what limits them; never empty when not supported.
    retired: an arm that this project does not carry. bars: metric -> what it had to reach there,
    whatever was measured."""

    name: str
    run: str
    file: str
    evidence: Evidence
    figures: dict[str, int | float]
    bars: dict[str, int | float] = {}
    supported: bool = True
    why: str = ""
    retired: bool = False

    @property
    def arm(self) -> str:
        """lane/arm."""
        return self.name.rpartition("/")[0]

    @property
    def cell(self) -> str:
        """The load point, or ANY."""
        return self.name.rpartition("/")[2]


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    metrics: dict[str, Metric]
    sources: dict[str, Source]
    runs: dict[str, Run]
    rows: tuple[Row, ...]

    def of(self, name: str) -> list[Row]:
        """The rows of that name, the newest run first."""
        found = [row for row in self.rows if row.name == name]
        return sorted(found, key=lambda row: self.runs[row.run].date, reverse=True)

    def path(self, row: Row) -> str:
        """Where the figures of a row stand in their source."""
        root, below = row.file.startswith("/"), row.file.lstrip("/")
        return below if root else f"{self.runs[row.run].folder}/{below}"

    def address(self, row: Row) -> str:
        """The public address of the file that a row's figures stand in; of its source where that
        could not be read."""
        source = self.sources[self.runs[row.run].source]
        unread = row.evidence == "unread"
        return source.url if unread else f"{source.url}/blob/{source.commit}/{self.path(row)}"


class Figure(msgspec.Struct, frozen=True):
    """One published figure with all that a reader needs of it."""

    row: Row
    run: Run
    metric: str
    value: int | float


def load(path: Path = FILE) -> Published:
    """Read and check the published figures. Raises ConfigError: the file is missing or breaks its
    schema, a row refers to a run, source, metric or profile that does not exist, says that an
    unbacked figure is supported, or gives one figure of a run twice."""
    found = toml.load(path, Published)
    for wrong, remedy in _faults(found):
        raise ConfigError(f"{path}: {wrong}", remedy=remedy)
    return found


def _faults(found: Published) -> Iterator[tuple[str, str]]:
    """What no schema sees, with what to do about it."""
    for name, run in found.runs.items():
        for what, value, known in (
            ("source", run.source, list(found.sources)),
            ("profile", run.profile, spec.profile_names()),
        ):
            if value not in known:
                yield f"run {name}: no {what} '{value}'", f"Known: {', '.join(known)}."
    given: set[tuple[str, str, str]] = set()
    for row in found.rows:
        yield from _row_faults(found, row)
        for metric in row.figures:
            key = (row.name, row.run, metric)
            if key in given:
                yield f"row {row.name}: {metric} of run {row.run} stands twice", "Keep one."
            given.add(key)


def _row_faults(found: Published, row: Row) -> Iterator[tuple[str, str]]:
    if row.run not in found.runs:
        yield f"row {row.name}: no run '{row.run}'", f"Known: {', '.join(found.runs)}."
    if row.name.count("/") != 2:
        yield f"row '{row.name}' is not lane/arm/cell", f"Write the cell, or {ANY} for none."
    if not row.figures:
        yield f"row {row.name}: no figures", "Give at least one, or remove the row."
    for metric in row.figures:
        if metric not in found.metrics:
            yield f"row {row.name}: no metric '{metric}'", "Add it to [metrics], with its unit."
    if row.supported and row.evidence in UNBACKED:
        yield (
            f"row {row.name}: supported by a bare {row.evidence}",
            "Name the file that backs it, or set supported = false and say why.",
        )
    if not row.supported and not row.why:
        yield f"row {row.name}: not supported, and no reason", "Say in `why` what is missing."


def figures(found: Published, name: str) -> list[Figure]:
    """The figures of a row, one a metric: a supported one before an unsupported, then the newest.

    name: lane/arm/cell.
    """
    best: dict[str, Figure] = {}
    ordered = sorted(found.of(name), key=lambda row: not row.supported)
    for row in ordered:
        for metric, value in row.figures.items():
            best.setdefault(metric, Figure(row, found.runs[row.run], metric, value))
    return list(best.values())
