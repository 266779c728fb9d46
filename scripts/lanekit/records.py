"""AIPerf's files of one load point: the figures recomputed from its records, beside its summary.

Reads exports of AIPerf 0.10 to 0.13. A missing field is None, never zero.
"""

import contextlib
import dataclasses
import datetime
import itertools
import math
import os
import re
import shlex
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lanekit import reading
from lanekit.errors import Unreadable
from lanekit.plan import options
from lanekit.reading import dig, text
from lanekit.verdict import Figures

SUMMARY: Final = "profile_export_aiperf.json"
RECORDS: Final = "profile_export.jsonl"
FAULTS: Final = 20  # shown of a load point
EPOCHS: Final = (946_684_800 * 10**9, 4_102_444_800 * 10**9)  # ns: 2000 to 2100, no clock's others
ROUNDED: Final = 5e-6  # s: a summary states its start and end to the microsecond
WATCHED: Final = 0.25  # s more than the benchmark: 2 to 19 ms in 41 load points (2026-11-30)
RECORD_LIMIT: Final = 4 << 20  # a record of 10^5 tokens with its chunk latencies is about 2 MB
RECORDS_LIMIT: Final = 1 << 19  # of one load point: 110 MB while they are sorted (2026-11-30)


COMPARED: Final = tuple(name for name in Figures.__struct_fields__ if name != "source")
PERCENTILES: Final = (1, 5, 10, 25, 50, 75, 90, 95, 99)
Stated = dict[str, dict[str, float]]  # metric -> statistic -> value, as the summary names them


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of a load point. osl, isl: mean tokens out and in. duplicates: request ids, or
    start and end to the nanosecond, seen again. unnamed: records without a request id, of which
    nobody can say whether they are copies. faults: records whose own numbers contradict each other.
    window: first start and last end, seconds since the epoch. in_flight: the most requests open at
    once. chunked: records that state when each chunk of their answer came. stated: what a summary
    may state of them beside its figures."""

    figures: Figures
    osl: float | None
    isl: float | None
    duplicates: int
    unnamed: int
    faults: tuple[str, ...]
    window: tuple[float, float] | None
    in_flight: int
    chunked: int
    stated: Stated


@dataclasses.dataclass(frozen=True)
class Cell:
    """A load point as AIPerf left it; records is None where no JSONL was exported.

    concurrency, asked, isl_asked, osl_asked, model: AIPerf's own configuration. error_kinds: its
    error_summary, None when absent. start, end: its local clock, without zone. url: whom it asked,
    None where it says none, or several. stated: the statistics of its summary. command: the options
    that it says it was given; None where it says none.
    """

    folder: Path
    summary: Figures
    records: Records | None
    version: str | None
    model: str | None
    concurrency: int | None
    asked: int | None
    isl_asked: float | None
    osl_asked: float | None
    osl: float | None
    cancelled: bool | None
    error_kinds: int | None
    start: datetime.datetime | None
    end: datetime.datetime | None
    url: str | None
    streaming: bool
    stated: Stated
    command: dict[str, str] | None

    @property
    def figures(self) -> Figures:
        """The figures to show: recomputed ones where there are records."""
        return self.records.figures if self.records else self.summary


class _Value(msgspec.Struct, frozen=True):
    value: float | None = None


class _Values(msgspec.Struct, frozen=True):
    value: list[float] | None = None


class _Metrics(msgspec.Struct, frozen=True):
    request_latency: _Value = _Value()
    time_to_first_token: _Value = _Value()
    output_sequence_length: _Value = _Value()
    input_sequence_length: _Value = _Value()
    inter_chunk_latency: _Values = _Values()
    output_token_count: _Value = _Value()
    reasoning_token_count: _Value = _Value()
    inter_token_latency: _Value = _Value()
    output_token_throughput_per_user: _Value = _Value()


class _Meta(msgspec.Struct, frozen=True):
    x_request_id: str | None = None
    request_start_ns: int | None = None
    request_end_ns: int | None = None
    benchmark_phase: str = "profiling"
    was_cancelled: bool = False


class _Record(msgspec.Struct, frozen=True):
    metadata: _Meta
    metrics: _Metrics
    error: msgspec.Raw = msgspec.Raw(b"null")  # whatever it says, it is not unpacked


class _Metric(msgspec.Struct, frozen=True):
    avg: float | None = None
    min: float | None = None
    max: float | None = None
    p1: float | None = None
    p5: float | None = None
    p10: float | None = None
    p25: float | None = None
    p50: float | None = None
    p75: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


class _Summary(msgspec.Struct, frozen=True):
    aiperf_version: str | None = None
    was_cancelled: bool | None = None
    error_summary: list[Any] | None = None
    start_time: str | None = None
    end_time: str | None = None
    request_count: _Metric = _Metric()
    error_request_count: _Metric | None = None
    request_latency: _Metric = _Metric()
    request_throughput: _Metric = _Metric()
    total_output_tokens: _Metric = _Metric()
    output_token_throughput: _Metric = _Metric()
    output_token_throughput_per_user: _Metric = _Metric()
    time_to_first_token: _Metric = _Metric()
    inter_token_latency: _Metric = _Metric()
    output_sequence_length: _Metric = _Metric()
    input_sequence_length: _Metric = _Metric()
    run_info: Any = None
    benchmark_duration: _Metric = _Metric()
    input_config: Any = None

    def stated(self) -> Stated:
        """Every statistic that follows from the records."""
        metrics = {name: getattr(self, name) for name in (*_PER_RECORD, *_WHOLE)}
        metrics["request_throughput"] = _Metric(avg=self.rate(self.request_throughput))
        return {
            name: {k: v for k in metric.__struct_fields__ if (v := getattr(metric, k)) is not None}
            for name, metric in metrics.items()
        }

    def rate(self, metric: _Metric) -> float | None:
        """A rate over the time from the first request to the last token. From 0.12 on AIPerf states
        it over the time that it watched, its start_time to its end_time: 2 % longer in a load point
        of 0.8 s (0.13.0, 2026-11-30). A shorter time, or an older AIPerf's, makes no rate higher.
        """
        tokens, lasted = self.total_output_tokens.avg, self.benchmark_duration.avg
        stated, start, end = (
            self.output_token_throughput.avg, _time(self.start_time), _time(self.end_time),
        )  # fmt: skip
        if metric.avg and tokens and stated and lasted and start and end and self.watches():
            over = tokens / stated
            longer = -ROUNDED < over - lasted < WATCHED
            if longer and abs(over - (end - start).total_seconds()) < ROUNDED:
                return metric.avg * over / lasted
        return metric.avg

    def watches(self) -> bool:
        """Whether this AIPerf states its rates over the time that it watched: from 0.12 on."""
        found = re.match(r"(\d{1,4})\.(\d{1,4})\b", self.aiperf_version or "")
        return found is not None and (int(found[1]), int(found[2])) >= (0, 12)


_PER_RECORD: Final = (
    "request_latency", "time_to_first_token", "inter_token_latency", "output_sequence_length",
    "input_sequence_length",
)  # fmt: skip
_WHOLE: Final = ("request_throughput", "total_output_tokens")  # only their average means anything


def find(root: Path) -> list[Path]:
    """Every AIPerf folder under root, sorted; links are not followed and do not count."""
    found = (Path(at) for at, _, names in os.walk(root) if SUMMARY in names)
    return sorted(folder for folder in found if not (folder / SUMMARY).is_symlink())


def read(folder: Path) -> Cell:
    """Everything the verifier needs of a load point. Raises Unreadable: no summary, or a file that
    is not what AIPerf writes."""
    path = folder / SUMMARY
    found = reading.decoded(reading.small(path), _Summary, str(path))
    config = found.input_config
    phase = _phase(config)
    return Cell(
        folder=folder,
        summary=_summary_figures(found),
        records=_records(folder / RECORDS) if os.path.lexists(folder / RECORDS) else None,
        version=found.aiperf_version,
        model=text(dig(config, "models", "items", 0, "name")),
        concurrency=_whole(phase.get("concurrency")),
        asked=_whole(phase.get("requests")),
        isl_asked=_number(dig(config, "datasets", 0, "prompts", "isl", "mean")),
        osl_asked=_number(dig(config, "datasets", 0, "prompts", "osl", "mean")),
        osl=found.output_sequence_length.avg,
        cancelled=found.was_cancelled,
        error_kinds=None if found.error_summary is None else len(found.error_summary),
        start=_time(found.start_time),
        end=_time(found.end_time),
        url=_url(dig(config, "endpoint", "urls")),
        streaming=dig(config, "endpoint", "streaming") is True,
        stated=found.stated(),
        command=_command(text(dig(found.run_info, "cli_command"))),
    )


def _command(said: str | None) -> dict[str, str] | None:
    """The options of a command line; None where it is none."""
    with contextlib.suppress(ValueError):  # an open quotation
        return options(shlex.split(said)) if said else None
    return None


def _url(listed: Any) -> str | None:
    one = isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], str)
    return listed[0].rstrip("/") if one else None


def _summary_figures(found: _Summary) -> Figures:
    failed = found.error_request_count
    errors = 0 if failed is None else _whole(failed.avg)
    return Figures(
        tok_s=found.rate(found.output_token_throughput),
        tok_s_user=found.output_token_throughput_per_user.avg,
        ttft_avg_ms=found.time_to_first_token.avg,
        ttft_p50_ms=found.time_to_first_token.p50,
        ttft_p99_ms=found.time_to_first_token.p99,
        itl_p50_ms=found.inter_token_latency.p50,
        itl_p99_ms=found.inter_token_latency.p99,
        requests=_whole(found.request_count.avg),
        errors=errors if found.error_summary is not None or failed is not None else None,
        duration_s=found.benchmark_duration.avg,
        source="summary",
    )


def _phase(config: Any) -> dict[str, Any]:
    """The measured phase of AIPerf's configuration: `profiling`, or the last one."""
    listed = dig(config, "phases")
    phases = [p for p in listed if isinstance(p, dict)] if isinstance(listed, list) else []
    named = [p for p in phases if p.get("name") == "profiling"]
    return (named or phases or [{}])[-1]


class _Tally:
    """What is kept of the records read so far: numbers, never text, so that memory is bounded.

    ids, spans: hashes of request ids and of their times, 64 bits: two alike by chance among
    RECORDS_LIMIT are one in 100 million files.
    """

    def __init__(self) -> None:
        self.ids, self.spans = array("q"), array("q")
        self.starts, self.ends, self.answered = array("q"), array("q"), array("q")
        self.ttft, self.itl = array("d"), array("d")
        self.latency, self.length, self.prompt = array("d"), array("d"), array("d")
        self.failed = self.unnamed = self.chunked = 0
        self.faults: list[str] = []

    def add(self, record: _Record, where: str) -> None:
        """Count one record of the measured phase."""
        meta = record.metadata
        if meta.x_request_id is None:
            self.unnamed += 1
        else:
            self.ids.append(hash(meta.x_request_id))
        if bytes(record.error) != b"null" or meta.was_cancelled:
            self.failed += 1
            return
        fault, times = _times(meta, record.metrics)
        if fault or times is None:
            self.faults += [f"{where} {fault}"] if len(self.faults) < FAULTS else []
            return
        begin, end, wait, per_token, length = times
        self.spans.append(hash((begin, end)))
        self.starts.append(begin)
        self.ends.append(end)
        self.answered.append(begin + round((record.metrics.request_latency.value or 0) * 1e6))
        self.latency.append(record.metrics.request_latency.value or 0)
        self.length.append(length)
        if (prompt := record.metrics.input_sequence_length.value) is not None:
            self.prompt.append(prompt)
        self.chunked += record.metrics.inter_chunk_latency.value is not None
        self.ttft.append(wait)
        if per_token is not None:
            self.itl.append(per_token)

    def records(self) -> Records:
        """The load point that the records add up to."""
        done = len(self.starts)
        window = (min(self.starts) / 1e9, max(self.ends) / 1e9) if done else None
        # As AIPerf does: until the last token. A stream may end later, by 5 ms on two busy cores,
        # and a wall of 4.4 s then differed in the fourth digit (2026-11-30).
        wall = (max(self.answered) - min(self.starts)) / 1e9 if done else None
        tokens = sum(self.length)
        kept = (self.latency, self.ttft, self.itl, self.length, self.prompt)
        each = dict(zip(_PER_RECORD, kept, strict=True))
        stated = {name: _statistics(values) for name, values in each.items()}
        stated["total_output_tokens"] = {"avg": tokens}
        stated["request_throughput"] = {"avg": done / wall} if wall else {}
        return Records(
            figures=Figures(
                tok_s=tokens / wall if wall else None,
                tok_s_user=_rate_a_user(self.itl),
                ttft_avg_ms=sum(self.ttft) / done if done else None,
                ttft_p50_ms=percentile(self.ttft, 50),
                ttft_p99_ms=percentile(self.ttft, 99),
                itl_p50_ms=percentile(self.itl, 50),
                itl_p99_ms=percentile(self.itl, 99),
                requests=done,
                errors=self.failed,
                duration_s=wall,
                source="records",
            ),
            osl=tokens / done if done else None,
            isl=sum(self.prompt) / done if done and len(self.prompt) == done else None,
            duplicates=max(_again(self.ids), _again(self.spans)),
            unnamed=self.unnamed,
            faults=tuple(self.faults),
            window=window,
            in_flight=_in_flight(self.starts, self.ends),
            chunked=self.chunked,
            stated=stated,
        )


def _records(path: Path) -> Records:
    """Recompute a load point from its JSONL, one line in memory at a time."""
    tally = _Tally()
    for number, record in _lines(path):
        if record.metadata.benchmark_phase == "profiling":
            tally.add(record, f"{path.name}:{number}")
    return tally.records()


def _again(values: Sequence[int]) -> int:
    """How many values stood before among the values."""
    return sum(a == b for a, b in itertools.pairwise(sorted(values)))


def _in_flight(starts: Sequence[int], ends: Sequence[int]) -> int:
    """The most intervals open at one time; one that ends as another starts is closed by then."""
    closed, most = 0, 0
    over = sorted(ends)
    for opened, start in enumerate(sorted(starts), 1):
        while closed < len(over) and over[closed] <= start:
            closed += 1
        most = max(most, opened - closed)
    return most


def _rate_a_user(itl: Sequence[float]) -> float | None:
    """Mean over requests of 1 / inter-token latency; like AIPerf's, it leaves out a request whose
    tokens all came at once (seen at concurrency 8 on two busy cores, 2026-11-30)."""
    rates = [1000 / each for each in itl if each > 0]
    return sum(rates) / len(rates) if rates else None


def _times(
    meta: _Meta, metrics: _Metrics
) -> tuple[str, tuple[int, int, float, float | None, float] | None]:
    """(start ns, end ns, TTFT ms, ITL ms, tokens) of a record, or what is wrong with it."""
    latency, wait = metrics.request_latency.value, metrics.time_to_first_token.value
    length, start, stop = (
        metrics.output_sequence_length.value,
        meta.request_start_ns,
        meta.request_end_ns,
    )
    if latency is None or wait is None or length is None or start is None or stop is None:
        return "lacks a time or a length", None
    if not EPOCHS[0] <= start <= stop < EPOCHS[1]:
        return "states a time that no clock shows", None
    took = (stop - start) / 1e6
    # The latency ends with the last token, the request with its stream: 0.11 ms apart at most in
    # the published records (2026-07), 29 ms on two busy cores (2026-11-30). Never the other way.
    if (
        not 0 < wait <= latency
        or length < 1
        or not -5.0 < took - latency < max(250.0, latency * 0.05)
    ):
        return f"its latency {latency:.1f} ms is not its end minus its start {took:.1f} ms", None
    chunks = metrics.inter_chunk_latency.value
    if chunks and abs(wait + sum(chunks) - latency) > 0.001:
        return f"its chunks do not add up to its latency {latency:.1f} ms", None
    per_token = (latency - wait) / (length - 1) if length > 1 else None
    if not _bears_out(metrics, length, per_token):
        return f"its own figures are not those of {length:.0f} tokens", None
    return "", (start, stop, wait, per_token, length)


def _bears_out(metrics: _Metrics, length: float, per_token: float | None) -> bool:
    """Whether what a record states beside its length fits it, as in all of 18 real load points
    (AIPerf 0.10.0, 2026-07 and 2026-11-30): tokens counted, time a token, and tokens a second."""
    count, thought = metrics.output_token_count.value, metrics.reasoning_token_count.value
    if count is not None and count + (thought or 0) != length:
        return False
    said, rate = metrics.inter_token_latency.value, metrics.output_token_throughput_per_user.value
    if said is not None and per_token is not None and not _alike(said, per_token):
        return False
    return not rate or not per_token or _alike(rate, 1000 / per_token)


def _alike(said: float, found: float) -> bool:
    return math.isclose(said, found, rel_tol=TOLERANCE, abs_tol=1e-9)


def _lines(path: Path) -> Iterator[tuple[int, _Record]]:
    number = 0
    reading.regular(path)
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(iter(lambda: stream.readline(RECORD_LIMIT), b""), 1):
                if len(line) >= RECORD_LIMIT or number > RECORDS_LIMIT:
                    raise Unreadable(
                        f"{path}:{number}: a record of {RECORD_LIMIT} bytes, or more than "
                        f"{RECORDS_LIMIT} records",
                        remedy="No load point leaves so much: split it.",
                    )
                if line.strip():
                    yield number, reading.decoded(line, _Record, f"{path}:{number}")
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}", remedy="Restore the file.") from error


def _statistics(values: Sequence[float]) -> dict[str, float]:
    """What AIPerf states of a metric, but for its deviation."""
    if not values:
        return {}
    ordered = sorted(values)
    found = {"avg": sum(ordered) / len(ordered), "min": ordered[0], "max": ordered[-1]}
    return found | {f"p{percent}": _between(ordered, percent) for percent in PERCENTILES}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between order statistics, as AIPerf's numpy does."""
    return _between(sorted(values), percent) if values else None


def _between(ordered: Sequence[float], percent: float) -> float:
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


# Recomputed and exported figures of 18 load points were equal to the last digit or two of a float
# (AIPerf 0.10.0, 2026-07 and 2026-11-30).
TOLERANCE: Final = 1e-6
# From 0.12 on AIPerf keeps its times since the epoch, in ns, as floats of 256 ns: half a
# microsecond of a load point's duration (0.12.0 and 0.13.0, 2026-11-30).
GRAIN: Final = 5.2e-7
_TIMED: Final = ("tok_s", "duration_s", "request_throughput")


def disagreements(cell: Cell) -> list[str]:
    """Figures of the summary that its records do not bear out: `name summary != records`."""
    if cell.records is None:
        return []
    lines = []
    for name in COMPARED:
        said, found = getattr(cell.summary, name), getattr(cell.records.figures, name)
        if said is None and found is None:
            continue
        if said is None or found is None or not _agree(name, said, found, cell.records):
            lines.append(f"{name} {_shown(said)} != {_shown(found)}")
    return lines or list(_otherwise(cell.stated, cell.records))


def _agree(name: str, said: float, found: float, records: Records) -> bool:
    """Whether a stated figure is the recomputed one, as exactly as AIPerf reckons it."""
    lasted = records.figures.duration_s
    grain = GRAIN / lasted if name in _TIMED and lasted else 0
    return math.isclose(said, found, rel_tol=max(TOLERANCE, grain))


def _otherwise(said: Stated, records: Records) -> Iterator[str]:
    """What the summary states beside the figures shown, and its records do not bear out."""
    for metric, values in said.items():
        for name, value in values.items():
            known = records.stated[metric].get(name)
            if metric in _WHOLE and name != "avg":
                continue
            if known is None or not _agree(metric, value, known, records):
                yield f"{metric} {name} {_shown(value)} != {_shown(known)}"


def _shown(value: float | None) -> str:
    return "absent" if value is None else f"{value:.6g}"


def _number(value: Any) -> float | None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    return float(value) if ok else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == int(number) else None


def _time(value: str | None) -> datetime.datetime | None:
    """A local time; None for what is none, and for years that only a forger needs."""
    try:
        found = datetime.datetime.fromisoformat(value) if value else None
    except ValueError:
        return None
    return found.replace(tzinfo=None) if found and 2000 <= found.year < 2100 else None
