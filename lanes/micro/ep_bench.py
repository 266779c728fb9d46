"""Expert-parallel dispatch and combine on one host, checked first and timed second.

    torchrun --nproc-per-node 2 lanes/micro/ep_bench.py --backend deepep --out DIR
    torchrun --nproc-per-node 2 lanes/micro/ep_bench.py --backend gloo --out DIR    (no GPU needed)

Backends: `deepep` is V2 (deep_ep.ElasticBuffer); `v1-ht` and `v1-ll` are V1 (deep_ep.Buffer) in its
high-throughput and its low-latency mode; `gloo` is torch's all_to_all on the CPU.

Each shape first makes a round trip through identity experts, which must come back exactly; a shape
that fails is not timed. Then dispatch, combine and the pair are timed eagerly and as a captured
graph, beside floors of the same run: a copy (device to device, or to the peer), an empty kernel and
torch's own all_to_all_single of the same bytes. One JSON object a line goes to DIR/micro.jsonl.

The numbers: `p50_us` is the median over iterations of the slowest rank, because an exchange is over
when its last rank has it; `min_us` and `max_us` are over all iterations and ranks. `gbs` counts the
bytes that a rank receives from others (from itself in a world of one), mean over ranks, in 1e9
bytes a second at p50. A graph holds GRAPH_OPS operations and is divided by them, so that its launch
is shared. The cache is warm: no L2 flush between iterations.

With --variants=1 each shape is also exchanged in the other ways that DeepEP's own test times
(tests/elastic/test_ep.py, b306af06): `expanded-dispatch` gives a row for each expert chosen,
`cached-dispatch` sends tokens over the layout of a dispatch before it, `reduced-combine` takes
expanded rows and adds those of one token before they travel. Each has a round trip of its own that
is checked first. Their bytes are those of the plain dispatch or combine, as that test counts them.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

try:
    import torch  # type: ignore[import-not-found,unused-ignore]
    import torch.distributed as dist  # type: ignore[import-not-found,unused-ignore]
except ModuleNotFoundError:  # the pure half (shapes, statistics, table) is used without it
    torch = dist = None

FORMAT: Final = 1
GRAPH_OPS: Final = 10
FP8_BLOCK: Final = 128
LL_HEADER: Final = 16  # one int4 before each low-latency row (DeepEP tests/legacy, b306af06)
# With --variants: the round trip of TRIPS that is checked first, and whose bytes they move.
VARIANTS: Final = {
    "expanded-dispatch": ("expanded", "dispatch"),
    "cached-dispatch": ("cached", "dispatch"),
    "reduced-combine": ("expanded", "combine"),
}
WEIGHT_STEP: Final = 8  # weights are k/8, so that every product and sum below is exact in BF16
Record = dict[str, Any]


class Refused(SystemExit):
    """The run cannot start or its result is wrong; the message says what to do."""


@dataclass(frozen=True)
class Shape:
    """One exchange. `max_tokens` sizes the worst case; DeepEP compiles one kernel set for each.

    sms: how many SMs a V2 kernel may use; 0 leaves it to DeepEP. hybrid: V2's two-level exchange,
    NVLink inside a host and NICs between hosts.
    """

    tokens: int
    hidden: int
    topk: int
    experts: int
    max_tokens: int
    dtype: str  # of the dispatch: bf16 or fp8 (with one FP32 scale per 128 values)
    sms: int = 0
    hybrid: bool = False

    @property
    def values_row(self) -> int:
        """Bytes of one token's values, and of its scales where it is FP8."""
        return self.hidden * 2 if self.dtype == "bf16" else self.hidden + self.hidden // 32

    @property
    def dispatch_row(self) -> int:
        """Bytes of one dispatched token: values, scales, and its expert ids and weights."""
        return self.values_row + self.topk * (8 + 4)

    @property
    def packed_row(self) -> int:
        """Bytes of one low-latency message: values, scales, and a header (its source token)."""
        return self.values_row + LL_HEADER

    @property
    def combine_row(self) -> int:
        """Bytes of one combined token: always BF16."""
        return self.hidden * 2


@dataclass(frozen=True)
class Timing:
    """Microseconds of one measured operation, over iterations and ranks."""

    p50_us: float
    min_us: float
    max_us: float
    iterations: int
    ranks: int


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4 ... up to and including `limit`."""
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]


def summarise(per_rank: Sequence[Sequence[float]]) -> Timing:
    """Fold the times of each rank (microseconds, one list a rank) into one Timing.

    Raises ValueError where a rank has no samples or another number than the first.
    """
    if not per_rank or not per_rank[0] or len({len(times) for times in per_rank}) != 1:
        raise ValueError(f"uneven or empty samples: {[len(times) for times in per_rank]}")
    slowest = [max(times) for times in zip(*per_rank, strict=True)]
    every = [value for times in per_rank for value in times]
    p50 = statistics.median(slowest)
    return Timing(p50, min(every), max(every), len(slowest), len(per_rank))


def gigabytes_per_second(count: float, microseconds: float) -> float:
    """Bytes over microseconds in 1e9 bytes a second; 0 where no time passed."""
    return round(count / microseconds / 1e3, 3) if microseconds > 0 else 0.0


def read_records(lines: Iterable[str]) -> list[Record]:
    """The records of a micro.jsonl. Raises ValueError naming the line that is no record."""
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"micro.jsonl line {number} is cut or damaged: {error}") from error
        if not isinstance(record, dict) or record.get("v") != FORMAT or "kind" not in record:
            raise ValueError(f"micro.jsonl line {number} is no record of format {FORMAT}")
        records.append(record)
    return records


def over_repetitions(records: Iterable[Record]) -> list[Record]:
    """One row for each operation and shape: median p50 over repetitions, and their spread.

    `spread` is (largest - smallest) / median of the p50s of the repetitions; 0 for a single one.
    """
    varying = ("rep", "p50_us", "min_us", "max_us", "gbs", "iterations")
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record["kind"] == "time":
            fixed = {key: value for key, value in record.items() if key not in varying}
            groups.setdefault(json.dumps(fixed, sort_keys=True), []).append(record)
    return [_fold(group) for group in groups.values()]


def _fold(group: Sequence[Record]) -> Record:
    p50s = [record["p50_us"] for record in group]
    middle = statistics.median(p50s)
    return {
        **{key: value for key, value in group[0].items() if key != "rep"},
        "p50_us": round(middle, 2),
        "min_us": min(record["min_us"] for record in group),
        "max_us": max(record["max_us"] for record in group),
        "gbs": statistics.median(record["gbs"] for record in group),
        "repetitions": len(group),
        "spread": round((max(p50s) - min(p50s)) / middle, 4) if middle else 0.0,
    }


def table(records: Iterable[Record]) -> str:
    """The rows as fixed-width text, one line for each operation and shape."""
    head = f"{'op':<18}{'mode':<12}{'dtype':<6}{'tokens':>7}{'max':>7}{'bytes':>13}"
    head += f"{'p50 us':>11}{'min us':>11}{'max us':>11}{'spread':>8}{'GB/s':>9}"
    body = [
        f"{row['op']:<18}{row['mode']:<12}{row.get('dtype', ''):<6}{row.get('tokens', ''):>7}"
        f"{row.get('max_tokens', ''):>7}{row['bytes']:>13.0f}{row['p50_us']:>11.1f}"
        f"{row['min_us']:>11.1f}{row['max_us']:>11.1f}{row['spread']:>8.1%}{row['gbs']:>9.1f}"
        for row in over_repetitions(records)
    ]
    return "\n".join([head, *body])


@dataclass
class Batch:
    """What one rank puts in: tokens (scaled if FP8), expert ids, weights, and the exact answer."""

    values: Any  # [tokens, hidden] BF16, or float8_e4m3fn
    plain: Any  # [tokens, hidden] BF16: the same tokens, for a buffer that scales them itself
    scales: Any  # [tokens, hidden / 128] FP32, or None
    experts: Any  # [tokens, topk] int64, distinct in a row
    weights: Any  # [tokens, topk] FP32
    answer: Any  # [tokens, hidden] BF16


def make_batch(shape: Shape, seed: int, device: str) -> Batch:
    """Random tokens whose weighted sum is exact: integers to 4, weights k/8, scales powers of 2.

    The largest numerator is 4 * 3 * topk, at most 240 below topk 20: 8 bits, as BF16 holds.
    """
    random = torch.Generator().manual_seed(seed)
    rows, blocks = shape.tokens, shape.hidden // FP8_BLOCK
    whole = torch.randint(-4, 5, (rows, shape.hidden), generator=random).float()
    weights = torch.randint(1, 4, (rows, shape.topk), generator=random).float() / WEIGHT_STEP
    scores = torch.rand((rows, shape.experts), generator=random)
    experts = scores.topk(shape.topk, dim=1).indices
    scales = None
    values, plain = whole.bfloat16(), whole
    if shape.dtype == "fp8":
        scales = 2.0 ** torch.randint(-2, 3, (rows, blocks), generator=random).float()
        values = whole.to(torch.float8_e4m3fn)
        plain = whole * scales.repeat_interleave(FP8_BLOCK, 1)
    answer = (plain * weights.sum(1, keepdim=True)).bfloat16()
    columns = (values, plain.bfloat16(), scales, experts, weights, answer)
    return Batch(*(None if column is None else column.to(device) for column in columns))


@dataclass(frozen=True)
class Received:
    """What dispatch gave this rank. Rows past the received count hold no meaning."""

    values: Any
    scales: Any
    experts: Any  # [rows, topk] ids local to this rank, -1 where the choice went elsewhere; or None
    weights: Any  # [rows, topk], [rows] without `experts`, or None where combine applies them
    handle: Any


def identity_experts(got: Received) -> Any:
    """[..., hidden] BF16: each row, times the weights of its choices on this rank."""
    plain = got.values.float()
    if got.scales is not None:
        # Not repeat_interleave: it may wait for the GPU, which a capture does not allow.
        plain = (plain.unflatten(-1, (-1, FP8_BLOCK)) * got.scales[..., None]).flatten(-2)
    if got.weights is not None and got.experts is None:
        plain = plain * got.weights[:, None]
    elif got.weights is not None:
        plain = plain * torch.where(got.experts >= 0, got.weights, 0.0).sum(1, keepdim=True)
    return plain.bfloat16()


class Transport(Protocol):
    """The exchange under test. `per_choice`: a row for each expert chosen, not for each rank."""

    device: str
    per_choice: bool

    def dispatch(self, batch: Batch, shape: Shape, *, cpu_sync: bool) -> Received:
        """Send each token to every rank that holds one of its experts."""

    def combine(self, rows: Any, got: Received) -> Any:
        """Bring the rows back and add those of one token: [tokens, hidden] BF16."""

    def barrier(self) -> None:
        """Wait, on the device where there is one, until every rank is here."""

    def close(self) -> None:
        """Release the buffers."""


class Varied(Transport, Protocol):
    """An exchange that also has VARIANTS."""

    def dispatch_expanded(self, batch: Batch, shape: Shape, *, cpu_sync: bool) -> Received:
        """As dispatch, with a row for each expert chosen."""

    def dispatch_cached(self, batch: Batch, shape: Shape, before: Received) -> Received:
        """As the dispatch before, which had the same experts and weights, without its layout."""


class GlooTransport:
    """all_to_all over gloo on the CPU: the same program and check where there is no GPU."""

    device = "cpu"
    per_choice = False

    def dispatch(self, batch: Batch, shape: Shape, *, cpu_sync: bool) -> Received:
        """Send each token once to every rank that holds one of its experts."""
        del cpu_sync  # the CPU always knows the counts
        world, rank = dist.get_world_size(), dist.get_rank()
        per_rank = shape.experts // world
        goes = [(batch.experts // per_rank == peer).any(1).nonzero()[:, 0] for peer in range(world)]
        sent = [len(index) for index in goes]
        arriving = torch.empty(world, dtype=torch.int64)
        dist.all_to_all_single(arriving, torch.tensor(sent))
        order, counts = torch.cat(goes), arriving.tolist()
        columns = (batch.values, batch.scales, batch.experts, batch.weights)
        moved = [
            None if column is None else self._rows(column[order], sent, counts)
            for column in columns
        ]
        here = moved[2] // per_rank == rank
        local = torch.where(here, moved[2] % per_rank, -1)
        return Received(moved[0], moved[1], local, moved[3], (order, sent, counts, shape.tokens))

    def dispatch_expanded(self, batch: Batch, shape: Shape, *, cpu_sync: bool) -> Received:
        """As dispatch, with a row for each expert chosen, in the order of the experts."""
        got = self.dispatch(batch, shape, cpu_sync=cpu_sync)
        row, choice = (got.experts >= 0).nonzero(as_tuple=True)
        by_expert = got.experts[row, choice].argsort(stable=True)
        row, choice = row[by_expert], choice[by_expert]
        scales = None if got.scales is None else got.scales[row]
        handle = (*got.handle, row)
        return Received(got.values[row], scales, None, got.weights[row, choice], handle)

    def dispatch_cached(self, batch: Batch, shape: Shape, before: Received) -> Received:
        """Send values and scales alone: the rest is known."""
        del shape
        order, sent, counts, _ = before.handle
        values, scales = (
            None if column is None else self._rows(column[order], sent, counts)
            for column in (batch.values, batch.scales)
        )
        return replace(before, values=values, scales=scales)

    def combine(self, rows: Any, got: Received) -> Any:
        """Bring the rows back and add those of one token: [tokens, hidden] BF16."""
        order, sent, counts, tokens, *expanded = got.handle
        for row in expanded:
            one = torch.zeros(sum(counts), rows.shape[1])
            rows = one.index_add_(0, row, rows.float()).bfloat16()
        back = self._rows(rows, counts, sent).float()
        return torch.zeros(tokens, rows.shape[1]).index_add_(0, order, back).bfloat16()

    @staticmethod
    def _rows(rows: Any, sent: list[int], counts: list[int]) -> Any:
        """Exchange rows as bytes, because gloo knows neither BF16 nor FP8."""
        raw = rows.contiguous().view(torch.uint8)
        out = torch.empty((sum(counts), raw.shape[1]), dtype=torch.uint8)
        dist.all_to_all_single(out, raw, counts, sent)
        return out.view(rows.dtype)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.barrier()

    def close(self) -> None:
        """Nothing is held."""


class DeepEPTransport:
    """deep_ep.ElasticBuffer, direct mode, receive rows sized for the worst case."""

    device = "cuda"
    per_choice = False

    def __init__(self, shape: Shape) -> None:
        # A GPU, NCCL and nvcc are needed for this import; the gloo arm has none of them.
        import deep_ep  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415

        self.buffer = deep_ep.ElasticBuffer(
            dist.group.WORLD, num_max_tokens_per_rank=shape.max_tokens, hidden=shape.hidden,
            num_topk=shape.topk, allow_hybrid_mode=shape.hybrid, prefer_overlap_with_compute=False,
            explicitly_destroy=True,
        )  # fmt: skip
        self.topk_dtype = deep_ep.topk_idx_t

    def dispatch(self, batch: Batch, shape: Shape, *, cpu_sync: bool) -> Received:
        """Send each token once to every rank that holds one of its experts."""
        return self._dispatch(batch, shape, do_cpu_sync=cpu_sync, do_expand=False)

    def dispatch_expanded(self, batch: Batch, shape: Shape, *, cpu_sync: bool) -> Received:
        """As dispatch, with a row for each expert chosen; without cpu_sync for the worst case."""
        return self._dispatch(batch, shape, do_cpu_sync=cpu_sync, do_expand=True)

    def _dispatch(self, batch: Batch, shape: Shape, **how: bool) -> Received:
        values = batch.values if batch.scales is None else (batch.values, batch.scales)
        got, experts, weights, handle, _ = self.buffer.dispatch(
            values, batch.experts.to(self.topk_dtype), batch.weights, num_experts=shape.experts,
            num_max_tokens_per_rank=shape.max_tokens, num_sms=shape.sms, **how,
        )  # fmt: skip
        rows, scales = got if isinstance(got, tuple) else (got, None)
        return Received(rows, scales, experts, weights, handle)

    def dispatch_cached(self, batch: Batch, shape: Shape, before: Received) -> Received:
        """Send values, scales and ids over the layout of the dispatch before; no weights travel."""
        values = batch.values if batch.scales is None else (batch.values, batch.scales)
        # b306af06 asks num_experts for its SM count before it looks at the handle.
        got, experts, _, handle, _ = self.buffer.dispatch(
            values, num_experts=shape.experts, num_sms=shape.sms, handle=before.handle
        )
        rows, scales = got if isinstance(got, tuple) else (got, None)
        return Received(rows, scales, experts, before.weights, handle)

    def combine(self, rows: Any, got: Received) -> Any:
        """Bring the rows back and add those of one token: [tokens, hidden] BF16."""
        return self.buffer.combine(rows, got.handle)[0]

    def barrier(self) -> None:
        """On the current stream, so that ranks leave it together and the CPU runs ahead."""
        self.buffer.barrier(use_comm_stream=False)

    def close(self) -> None:
        """Collective: every rank must come here."""
        self.buffer.destroy()


class NormalTransport:
    """deep_ep.Buffer, high-throughput mode. Without `cpu_sync` receive rows are the worst case."""

    device = "cuda"
    per_choice = False

    def __init__(self, shape: Shape) -> None:
        import deep_ep  # noqa: PLC0415

        world, row = dist.get_world_size(), shape.hidden * 2
        make = deep_ep.Buffer
        configs = [make.get_dispatch_config(world), make.get_combine_config(world)]
        near = max(config.get_nvl_buffer_size_hint(row, world) for config in configs)
        far = max(config.get_rdma_buffer_size_hint(row, world) for config in configs)
        self.buffer = make(dist.group.WORLD, near, far, explicitly_destroy=True)
        self.one_host = far == 0
        self.topk_dtype = getattr(deep_ep, "topk_idx_t", torch.int64)

    def dispatch(self, batch: Batch, shape: Shape, *, cpu_sync: bool) -> Received:
        """Send each token once to every rank that holds one of its experts."""
        values = batch.values if batch.scales is None else (batch.values, batch.scales)
        chosen = batch.experts.to(self.topk_dtype)
        to_rank, to_host, to_expert, goes, _ = self.buffer.get_dispatch_layout(
            chosen, shape.experts
        )
        # Between hosts V1 has no worst-case receive: its dispatch asserts num_worst_tokens == 0.
        free = self.one_host and not cpu_sync
        got, experts, weights, _, handle, _ = self.buffer.dispatch(
            values, num_tokens_per_rank=to_rank, num_tokens_per_rdma_rank=to_host,
            is_token_in_rank=goes, num_tokens_per_expert=to_expert, topk_idx=chosen,
            topk_weights=batch.weights,
            num_worst_tokens=dist.get_world_size() * shape.max_tokens if free else 0,
        )  # fmt: skip
        rows, scales = got if isinstance(got, tuple) else (got, None)
        return Received(rows, scales, experts, weights, handle)

    def combine(self, rows: Any, got: Received) -> Any:
        """Bring the rows back and add those of one token: [tokens, hidden] BF16."""
        return self.buffer.combine(rows, got.handle)[0]

    def barrier(self) -> None:
        """Wait on the device: the buffer has no barrier of its own, so NCCL's is used."""
        dist.all_reduce(torch.zeros(1, device=self.device))

    def close(self) -> None:
        """Collective: every rank must come here."""
        self.buffer.destroy()


class LowLatencyTransport:
    """deep_ep.Buffer, low-latency mode: rows packed by local expert, weights applied by combine.

    FP8 is made by the dispatch kernel itself, with scales that are powers of two, so that the round
    trip stays exact.
    """

    device = "cuda"
    per_choice = True

    def __init__(self, shape: Shape) -> None:
        import deep_ep  # noqa: PLC0415

        world = dist.get_world_size()
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            shape.max_tokens, shape.hidden, world, shape.experts
        )
        self.buffer = deep_ep.Buffer(
            dist.group.WORLD, num_rdma_bytes=size, low_latency_mode=True,
            num_qps_per_rank=shape.experts // world, explicitly_destroy=True,
        )  # fmt: skip
        self.topk_dtype = getattr(deep_ep, "topk_idx_t", torch.int64)

    def dispatch(self, batch: Batch, shape: Shape, *, cpu_sync: bool) -> Received:
        """Send each token to each of its experts."""
        del cpu_sync  # never waits for the host
        chosen, fp8 = batch.experts.to(self.topk_dtype), shape.dtype == "fp8"
        got, _, handle, _, _ = self.buffer.low_latency_dispatch(
            batch.plain, chosen, shape.max_tokens, shape.experts, use_fp8=fp8, round_scale=fp8
        )
        rows, scales = got if isinstance(got, tuple) else (got, None)
        return Received(rows, scales, None, None, (chosen, batch.weights, handle))

    def combine(self, rows: Any, got: Received) -> Any:
        """Bring the rows back, weigh them and add those of one token: [tokens, hidden] BF16."""
        return self.buffer.low_latency_combine(rows, *got.handle)[0]

    def barrier(self) -> None:
        """Wait on the device: the buffer has no barrier of its own, so NCCL's is used."""
        dist.all_reduce(torch.zeros(1, device=self.device))

    def close(self) -> None:
        """Collective: every rank must come here."""
        self.buffer.destroy()


BACKENDS: Final[dict[str, Callable[[Shape], Transport]]] = {
    "deepep": DeepEPTransport,
    "v1-ht": NormalTransport,
    "v1-ll": LowLatencyTransport,
    "gloo": lambda _: GlooTransport(),
}
VARIED: Final = ("deepep", "gloo")


@dataclass(frozen=True)
class Bench:
    """One rank's place in the run, and how often it measures."""

    backend: str
    device: str
    rank: int
    world: int
    control: Any  # a gloo group: results never travel over what is measured
    warmup: int
    iterations: int
    sink: Any  # the open micro.jsonl on rank 0, None elsewhere

    def write(self, kind: str, **fields: object) -> None:
        """Append one record and flush it: a crash later must not lose it."""
        if self.sink is not None:
            self.sink.write(json.dumps({"v": FORMAT, "kind": kind, **fields}) + "\n")
            self.sink.flush()

    def everyone(self, value: object) -> list[Any]:
        """The value of each rank, in rank order."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def measure(self, call: Callable[[], object], ready: Callable[[], None]) -> list[float]:
        """Microseconds of each call on this rank; `ready` lines the ranks up and is not timed."""
        for _ in range(self.warmup):
            ready()
            call()
        if self.device == "cpu":
            return [_wall_time(call, ready) for _ in range(self.iterations)]
        torch.cuda.synchronize()
        pairs = [_event_pair(call, ready) for _ in range(self.iterations)]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def time(
        self, call: Callable[[], object], ready: Callable[[], None], *, count: float, per: int = 1,
        **fields: object,
    ) -> None:  # fmt: skip
        """Measure on every rank and write one record; `per` operations are in one call."""
        mine = [value / per for value in self.measure(call, ready)]
        timing = summarise(self.everyone(mine))
        rounded = {key: round(value, 2) for key, value in asdict(timing).items()}
        gbs = gigabytes_per_second(count, timing.p50_us)
        self.write("time", **fields, bytes=round(count), **rounded, gbs=gbs)


def _wall_time(call: Callable[[], object], ready: Callable[[], None]) -> float:
    ready()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _event_pair(call: Callable[[], object], ready: Callable[[], None]) -> tuple[Any, Any]:
    """One call between two events; the host waits for the last one, as an eager engine would."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ready()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start, end


def capture(call: Callable[[], object], times: int = 1) -> Any:
    """The call, `times` over, as a CUDA graph. Run it eagerly before: JIT must be done by then."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: the watchdog thread of torch's NCCL group polls events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(times):
            call()
    torch.cuda.synchronize()
    return graph


def round_trip(transport: Transport, batch: Batch, shape: Shape, *, cpu_sync: bool) -> Any:
    """Dispatch, identity experts, combine: [tokens, hidden] BF16, equal to batch.answer."""
    got = transport.dispatch(batch, shape, cpu_sync=cpu_sync)
    return transport.combine(identity_experts(got), got)


def expanded_trip(transport: Varied, batch: Batch, shape: Shape, *, cpu_sync: bool) -> Any:
    """A round trip of a row for each expert chosen, which combine adds before they travel."""
    got = transport.dispatch_expanded(batch, shape, cpu_sync=cpu_sync)
    return transport.combine(identity_experts(got), got)


def cached_trip(transport: Varied, batch: Batch, shape: Shape, *, cpu_sync: bool) -> Any:
    """A round trip over the layout of a dispatch of zeros, which come back if nothing is sent."""
    zeros = [None if x is None else torch.zeros_like(x) for x in (batch.values, batch.scales)]
    before = replace(batch, values=zeros[0], scales=zeros[1])
    layout = transport.dispatch(before, shape, cpu_sync=cpu_sync)
    got = transport.dispatch_cached(batch, shape, layout)
    return transport.combine(identity_experts(got), got)


# What a check is of: the plain exchange, or VARIANTS.
TRIPS: Final[dict[str, Callable[..., Any]]] = {
    "": round_trip, "expanded": expanded_trip, "cached": cached_trip,
}  # fmt: skip


def graph_trip(
    trip: Callable[..., Any], transport: Transport, shape: Shape, seed: int
) -> tuple[Any, Any]:
    """Replay a captured round trip on input it was not captured with: (result, answer)."""
    static = make_batch(shape, seed, transport.device)
    trip(transport, static, shape, cpu_sync=False)  # kernels are compiled outside the capture
    out: list[Any] = []
    graph = capture(lambda: out.append(trip(transport, static, shape, cpu_sync=False)))
    fresh = make_batch(shape, seed + 1, transport.device)
    for name in ("values", "plain", "scales", "experts", "weights"):
        if getattr(static, name) is not None:
            getattr(static, name).copy_(getattr(fresh, name))
    graph.replay()
    torch.cuda.synchronize()  # the graph is gone when this returns
    return out[0], fresh.answer


def check(
    bench: Bench, transport: Transport, batch: Batch, shape: Shape, mode: str, *, of: str = ""
) -> None:
    """The round trip of TRIPS must be exact on every rank. Raises Refused with what differed."""
    trip, named = TRIPS[of], {"op": of} if of else {}
    if mode == "graph":
        result, answer = graph_trip(trip, transport, shape, 1000 + bench.rank)
    else:
        cpu_sync = mode == "eager-sync"
        result, answer = trip(transport, batch, shape, cpu_sync=cpu_sync), batch.answer
    wrong = bench.everyone(int((result != answer).any(1).sum()))
    bench.write("check", **named, mode=mode, **asdict(shape), wrong_rows=wrong, ok=not any(wrong))
    if any(wrong):
        what = f"{of} {mode} {shape.dtype}".strip()
        raise Refused(
            f"micro: {what}, {shape.tokens} tokens: {wrong} rows came back wrong on the ranks, so "
            "nothing was timed. Keep micro.jsonl and file the shape upstream."
        )


def received_bytes(
    bench: Bench, batch: Batch, shape: Shape, *, per_choice: bool
) -> tuple[float, float]:
    """Mean bytes that a rank receives in (dispatch, combine), its own left out if it has peers."""
    owner = batch.experts // (shape.experts // bench.world)
    peers = [peer for peer in range(bench.world) if peer != bench.rank or bench.world == 1]
    chosen = [owner == peer for peer in peers]
    sent = sum(int((goes if per_choice else goes.any(1)).sum()) for goes in chosen)
    mean = statistics.mean(bench.everyone(sent))  # all sends together are all receives together
    row = shape.packed_row if per_choice else shape.dispatch_row
    return mean * row, mean * shape.combine_row


def operations(
    transport: Any, batch: Batch, shape: Shape, *, cpu_sync: bool, variants: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is timed of a shape, by name, in the order of the records."""
    got = transport.dispatch(batch, shape, cpu_sync=cpu_sync)
    rows = identity_experts(got)
    dispatch = partial(transport.dispatch, batch, shape, cpu_sync=cpu_sync)
    yield "dispatch", dispatch
    yield "combine", partial(transport.combine, rows, got)
    yield "pair", lambda: transport.combine(rows, dispatch())
    if variants:
        expanded = partial(transport.dispatch_expanded, batch, shape, cpu_sync=cpu_sync)
        wide = expanded()
        yield "expanded-dispatch", expanded
        yield "cached-dispatch", partial(transport.dispatch_cached, batch, shape, got)
        yield "reduced-combine", partial(transport.combine, identity_experts(wide), wide)


def time_shape(
    bench: Bench, transport: Transport, shape: Shape, mode: str, rep: int, *, variants: bool
) -> None:
    """Time dispatch, combine and the pair of one shape in one mode, and VARIANTS where asked."""
    batch = make_batch(shape, bench.rank, transport.device)
    for of in TRIPS if variants else ("",):
        if rep == 0:
            check(bench, transport, batch, shape, mode, of=of)
    cpu_sync, per = mode == "eager-sync", GRAPH_OPS if mode == "graph" else 1
    out, back = received_bytes(bench, batch, shape, per_choice=transport.per_choice)
    moved = {"dispatch": out, "combine": back, "pair": out + back}
    moved |= {op: moved[like] for op, (_, like) in VARIANTS.items()}
    for op, call in operations(transport, batch, shape, cpu_sync=cpu_sync, variants=variants):
        graph = capture(call, GRAPH_OPS) if mode == "graph" else None
        bench.time(
            call if graph is None else graph.replay, transport.barrier,
            count=moved[op], per=per, op=op, mode=mode, rep=rep, **asdict(shape),
        )  # fmt: skip


def time_all_to_all(
    bench: Bench, ready: Callable[[], None], shape: Shape, *, count: float, mode: str, rep: int
) -> None:
    """torch's all_to_all_single of the bytes that this shape's dispatch moves, split evenly."""
    share = max(1, round(count / max(1, bench.world - 1)))  # to each peer, and to itself
    sent = torch.zeros(share * bench.world, dtype=torch.uint8, device=bench.device)
    got = torch.empty_like(sent)

    def call() -> None:
        dist.all_to_all_single(got, sent)

    call()
    graph = capture(call, GRAPH_OPS) if mode == "graph" else None
    bench.time(
        call if graph is None else graph.replay, ready, count=count,
        per=GRAPH_OPS if graph else 1, op="all_to_all", mode=mode, rep=rep, **asdict(shape),
    )  # fmt: skip


def copy_to_peer(target: Any, source: Any) -> None:
    """Copy on the current stream. Tensor.copy_ also waits for the peer's stream: no capture."""
    library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (target, source))
    kind = 4  # cudaMemcpyDefault: the addresses say where they lie
    failed = library.cudaMemcpyAsync(*pointers, ctypes.c_size_t(source.numel()), kind, stream)
    if failed:
        raise Refused(f"micro: cudaMemcpyAsync to the peer failed with CUDA error {failed}")


def time_floor(
    bench: Bench, transport: Transport, shape: Shape, *, count: float, mode: str, rep: int
) -> None:
    """A dispatch and a combine cannot end before two exchanges that depend on each other do.

    Each is a copy of the dispatch's bytes to the next rank and the buffer's own barrier.
    """
    size, here = max(1, round(count)), torch.cuda.current_device()
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty(size, dtype=torch.uint8, device=f"cuda:{(here + 1) % bench.world}")

    def call() -> None:
        for _ in range(2):
            copy_to_peer(target, source)
            transport.barrier()

    call()
    graph = capture(call, GRAPH_OPS) if mode == "graph" else None
    bench.time(
        call if graph is None else graph.replay, transport.barrier, count=2 * count,
        per=GRAPH_OPS if graph else 1, op="floor", mode=mode, rep=rep, **asdict(shape),
    )  # fmt: skip


def time_copies(bench: Bench, ready: Callable[[], None], rep: int, largest: int) -> None:
    """Copies of 64 KiB to `largest` bytes: to the peer in both directions at once, or local."""
    peer, op = bench.device, "copy-local"
    if bench.device == "cuda" and bench.world > 1:
        peer, op = f"cuda:{(torch.cuda.current_device() + 1) % bench.world}", "copy-peer"
    for size in (1 << power for power in range(16, largest.bit_length())):
        source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
        target = torch.empty(size, dtype=torch.uint8, device=peer)
        copy = partial(target.copy_, source, non_blocking=True)
        bench.time(copy, ready, count=size, op=op, mode="eager", rep=rep)


def time_launches(bench: Bench, ready: Callable[[], None], rep: int) -> None:
    """A kernel that does nothing: alone, in a run of GRAPH_OPS, and in a graph of GRAPH_OPS."""

    def empty() -> None:
        torch.cuda._sleep(0)

    def many() -> None:
        for _ in range(GRAPH_OPS):
            empty()

    bench.time(empty, ready, count=0, op="launch", mode="eager", rep=rep)
    bench.time(many, ready, count=0, per=GRAPH_OPS, op="launch", mode="eager-run", rep=rep)
    graph = capture(empty, GRAPH_OPS)
    bench.time(graph.replay, ready, count=0, per=GRAPH_OPS, op="launch", mode="graph", rep=rep)


def shapes(options: argparse.Namespace) -> Iterator[Shape]:
    """The decode shape with a worst case of its own, then the sweep under one worst case."""
    hidden, topk, experts = options.hidden, options.topk, options.experts
    sweep = options.tokens or powers_of_two(options.largest)
    for dtype in options.dtypes:
        if options.decode:
            yield Shape(
                options.decode, hidden, topk, experts, options.decode, dtype, hybrid=options.hybrid
            )
        for tokens in sweep:
            for sms in options.sms:
                yield Shape(tokens, hidden, topk, experts, max(sweep), dtype, sms, options.hybrid)


def measure_all(bench: Bench, options: argparse.Namespace) -> None:
    """Floors first, then every shape: eager modes before graphs, which may end the process."""
    groups: dict[int, list[Shape]] = {}
    one_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for shape in shapes(options):
        groups.setdefault(shape.max_tokens, []).append(shape)
    for rep in range(options.repeat):
        time_copies(bench, _lined_up(bench), rep, options.copy_largest)
        if bench.device == "cuda":
            time_launches(bench, _lined_up(bench), rep)
    for mode in options.modes:
        for group in groups.values():
            transport = BACKENDS[bench.backend](group[0])
            for rep in range(options.repeat):
                for shape in group:
                    time_shape(bench, transport, shape, mode, rep, variants=options.variants)
                    batch = make_batch(shape, bench.rank, transport.device)
                    out, _ = received_bytes(bench, batch, shape, per_choice=transport.per_choice)
                    if mode != "eager-sync":
                        time_all_to_all(
                            bench, transport.barrier, shape, count=out, mode=mode, rep=rep
                        )
                    if isinstance(transport, DeepEPTransport) and 1 < bench.world <= one_host:
                        time_floor(bench, transport, shape, count=out, mode=mode, rep=rep)
            transport.close()


def _lined_up(bench: Bench) -> Callable[[], None]:
    """A barrier for the floors, before any buffer of the transport exists."""
    if bench.device == "cpu":
        return dist.barrier  # type: ignore[no-any-return]
    one = torch.zeros(1, device=bench.device)
    return lambda: dist.all_reduce(one)


def mapped_nccl() -> int:
    """ncclGetVersion of the loaded library; torch.cuda.nccl.version() is that of its build."""
    code = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    return code.value


def versions(backend: str) -> Record:
    """What ran, for the first record of the file."""
    found: Record = {"python": sys.version.split()[0], "torch": torch.__version__}
    if backend != "gloo":
        found["deep_ep"] = importlib.metadata.version("deep_ep")  # V1 has no __version__
        found |= {"gpu": torch.cuda.get_device_name(), "nccl": mapped_nccl()}
    return found


def say_who(rank: int, world: int, backend: str) -> None:
    """One line a rank, after the group exists: the log's own word for who took part over what."""
    words = f"host={socket.gethostname()} pid={os.getpid()} rank={rank}"
    words += f" local_rank={os.environ.get('LOCAL_RANK', '0')} world={world} backend={backend}"
    os.write(1, f"[micro] v=1 {words}\n".encode())  # one write, so that ranks do not tear


def run(options: argparse.Namespace) -> str:
    """Measure on this rank. Rank 0 returns the table, the others an empty string."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if options.experts % world or options.topk > min(options.experts, 20):
        raise Refused(
            f"micro: {options.experts} experts, top-{options.topk} do not fit {world} ranks"
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    device = "cpu" if options.backend == "gloo" else "cuda"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=world)
    control = dist.new_group(backend="gloo")
    say_who(rank, world, dist.get_backend())
    path = options.out / "micro.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    sink = path.open("w", encoding="utf-8") if rank == 0 else None
    bench = Bench(options.backend, device, rank, world, control, options.warmup,
                  options.iterations, sink)  # fmt: skip
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    bench.write("run", world=world, settings=settings, graph_ops=GRAPH_OPS, started=time.time(),
                **versions(options.backend))  # fmt: skip
    try:
        measure_all(bench, options)
    except Refused:  # on every rank. Left alone, gloo's threads abort at exit: 134, not 1.
        dist.destroy_process_group()
        raise
    bench.write("done", ended=time.time())
    dist.destroy_process_group()
    return table(read_records(path.read_text().splitlines())) if rank == 0 else ""


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line. A list is comma-separated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--backend", choices=tuple(BACKENDS), required=True)
    add("--out", type=Path, required=True, help="folder that gets micro.jsonl")
    add("--tokens", type=_numbers, default=[], help="token counts; default powers of 2")
    add("--largest", type=int, default=8192, help="end of the default sweep")
    add("--decode", type=int, default=128, help="decode shape with its own worst case; 0 for none")
    add("--hidden", type=int, default=7168)
    add("--topk", type=int, default=8)
    add("--experts", type=int, default=256)
    add("--dtypes", type=_among("bf16", "fp8"), default=["bf16", "fp8"])
    add("--modes", type=_among("eager", "eager-sync", "graph"), default=["eager", "graph"])
    add("--hybrid", type=int, choices=(0, 1), default=0, help="between hosts; V2 in two levels")
    add("--variants", type=int, choices=(0, 1), default=0, help=", ".join(VARIANTS) + ", too")
    add("--sms", type=_numbers, default=[0], help="SM counts of V2's kernels in the sweep")
    add("--warmup", type=int, default=5)
    add("--iterations", type=int, default=30)
    add("--repeat", type=int, default=3)
    add("--copy-largest", type=int, default=1 << 30, help="bytes")
    options = parser.parse_args(argv)
    options.hybrid, options.variants = bool(options.hybrid), bool(options.variants)
    if "graph" in options.modes and (why := _uncapturable(options)):
        options.modes = [mode for mode in options.modes if mode != "graph"]
        print(f"micro: {why}; the graph mode is left out", file=sys.stderr)
    if options.variants and options.backend not in VARIED:
        parser.error(f"--variants is for {' and '.join(VARIED)}, not for {options.backend}")
    if options.hidden % FP8_BLOCK:
        parser.error(f"--hidden must be a multiple of {FP8_BLOCK}")
    return options


def _uncapturable(options: argparse.Namespace) -> str:
    """Why a backend cannot be captured here; empty where it can. The lane says --hybrid=1 between
    hosts, and whoever judges its records has no torchrun around that would tell."""
    here, everywhere = (os.environ.get(name, "1") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if options.backend == "v1-ht" and (options.hybrid or here != everywhere):
        return "V1 waits for the host between hosts"
    return "gloo has no CUDA graphs" if options.backend == "gloo" else ""


def _numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def _among(*names: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(names):
            raise argparse.ArgumentTypeError(f"choose from {', '.join(names)}")
        return chosen

    return parse


def main() -> None:
    """Run and print the table on rank 0."""
    options = parse_options()
    if torch is None:
        raise Refused("micro: this Python has no torch; run it in the server environment")
    print(run(options), end="\n" if os.environ.get("RANK", "0") == "0" else "")


if __name__ == "__main__":
    main()
