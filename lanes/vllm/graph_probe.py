"""Prepare, experts and finalize of one MoE layer over DeepEP V2, eager and captured, case by case.

    python lanes/vllm/graph_probe.py --world 1        one GPU plays rank 0 of 2
    python lanes/vllm/graph_probe.py --world 2        two GPUs, both ranks real
    python lanes/vllm/graph_probe.py --list

Each case runs in processes of its own under a time limit, so an illegal access ends that case
alone, and prints one JSON line: what was expected, what happened, the largest difference from a
torch reference. The reference knows nothing of ranks, padding or -1: it sums the experts' outputs.

On one GPU the buffer holds the first half of the experts only; the slots of the other half become
-1 on the way in, which is what a receiver of two ranks sees. Memory is filled with a chosen byte
before each case, because what the layer reads beyond the received rows decides how it fails.

Exit 0: every case came out as expected; 1: one did not; 2: nothing could be run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FUSED: Final = "vllm.model_executor.layers.fused_moe"
EXPERTS, TOPK, HIDDEN, INTER, BLOCK = 128, 8, 2048, 768, 128  # Qwen3-30B-A3B
CAPACITY: Final = 512  # tokens a rank, a power of two: the largest graph size of a default serve
MARK: Final = "GRAPH-PROBE "
ABSURD: Final = 1e30  # NaN and infinity as a difference: JSON has no words for them
HOSTILE: Final = 0x7F  # as an int32 index this is 8.5 GB away
TOLERANCE: Final = {"bf16": 0.02, "block": 0.08, "tensor": 0.12}  # of the reference's largest value
BACKENDS: Final = {
    "triton_bf16": ("experts.triton_moe", "TritonExperts", "bf16"),
    "triton_fp8": ("experts.triton_moe", "TritonExperts", "block"),
    "deepgemm_fp8": ("experts.deep_gemm_moe", "DeepGemmExperts", "block"),
    "cutlass_fp8": ("experts.cutlass_moe", "CutlassExpertsFp8", "tensor"),
}
# Who is chosen by which token: rows without any local expert are never received.
ROUTINGS: Final = ("even", "remote_only", "local_only", "alternate", "skewed")


@dataclass(frozen=True)
class Case:
    """One question to one process group."""

    name: str
    backend: str  # a key of BACKENDS, or "align" for the sorting kernel alone
    fill: str = "as-is"  # "as-is": the installed tree; "remote": what the patch does, from outside
    poison: int = 0  # byte that fresh memory holds
    mode: str = "eager"  # or "graph"


@dataclass(frozen=True)
class Step:
    """One forward, compared: `diff` and `peak` in units of the output."""

    routing: str
    tokens: int
    diff: float
    peak: float
    close: bool


def cases(backends: list[str]) -> list[Case]:
    """The sorting kernel, then every backend stock and mended, on clean and on hostile memory."""
    found = [Case(f"align/{fill}/{poison:02x}", "align", fill, poison)
             for fill in ("as-is", "remote") for poison in (0, HOSTILE)]  # fmt: skip
    for backend in backends:
        found += [Case(f"{backend}/as-is/{poison:02x}/eager", backend, "as-is", poison)
                  for poison in (0, HOSTILE)]  # fmt: skip
        found += [Case(f"{backend}/remote/{HOSTILE:02x}/{mode}", backend, "remote", HOSTILE, mode)
                  for mode in ("eager", "graph")]  # fmt: skip
    return found


# ---------------------------------------------------------------- inside one rank's process


def load(name: str) -> Any:
    """A module that only the GPU machine has."""
    return importlib.import_module(name)


def poison_memory(torch: Any, byte: int) -> None:
    """Let the next allocations of every size hold `byte`."""
    sizes = [512] * 512 + [1 << 12, 1 << 16, 1 << 19] * 32 + [1 << 21, 1 << 24, 1 << 26] * 4
    held = [torch.full((size,), byte, dtype=torch.uint8, device="cuda") for size in sizes]
    torch.cuda.synchronize()
    del held


def route(torch: Any, routing: str, tokens: int, seed: int) -> tuple[Any, Any]:
    """Expert ids (int64, distinct in a row) and weights (float32), both [tokens, TOPK]."""
    random = torch.Generator().manual_seed(seed)
    half = EXPERTS // 2
    scores = torch.rand((tokens, EXPERTS), generator=random)
    if routing == "remote_only":
        scores[:, :half] -= 1
    elif routing == "local_only":
        scores[:, half:] -= 1
    elif routing == "alternate":
        scores[::2, :half] -= 1
        scores[1::2, half:] -= 1
    elif routing == "skewed":
        scores[:, :TOPK] += 1
    weights, ids = scores.softmax(-1).topk(TOPK, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return ids.cuda(), weights.float().cuda()


class HalfWorld:
    """A one-rank ElasticBuffer that receives what rank 0 of two would."""

    def __init__(self, torch: Any, buffer: Any) -> None:
        self.torch, self.buffer = torch, buffer
        self.combine = buffer.combine

    def dispatch(self, *, topk_idx: Any, num_experts: int, **rest: Any) -> Any:
        """Drop the slots of the other half, then dispatch among the local experts."""
        local = num_experts // 2
        ids = self.torch.where(topk_idx < local, topk_idx, -1)
        return self.buffer.dispatch(topk_idx=ids, num_experts=local, **rest)


def quantize(torch: Any, weight: Any, kind: str) -> tuple[Any, Any]:
    """FP8 weight and float32 scale: [E, N/128, K/128] for "block", [E, 1, 1] for "tensor"."""
    experts, rows, columns = weight.shape
    tile = (BLOCK, BLOCK) if kind == "block" else (rows, columns)
    view = weight.float().view(experts, rows // tile[0], tile[0], columns // tile[1], tile[1])
    scale = view.abs().amax((2, 4), keepdim=True) / 448
    return (view / scale).to(torch.float8_e4m3fn).view_as(weight), scale[:, :, 0, :, 0].contiguous()


def dequantize(torch: Any, weight: Any, scale: Any) -> Any:
    """The bfloat16 matrix that the kernels work with."""
    rows, columns = (weight.shape[i + 1] // scale.shape[i + 1] for i in (0, 1))
    full = scale.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
    return (weight.float() * full).to(torch.bfloat16)


class Layer:
    """One MoE layer of vLLM over one buffer, with its inputs at fixed addresses."""

    def __init__(self, torch: Any, case: Case, context: SimpleNamespace) -> None:
        self.torch, self.case, self.context = torch, case, context
        group = load("torch.distributed").group.WORLD
        self.rank, self.world = group.rank(), group.size()
        self.kind = BACKENDS[case.backend][2]
        self.prefinal = load(f"{FUSED}.prepare_finalize.deepep_v2")
        self._weights()
        self._buffer(group)
        self._kernel()

    def _weights(self) -> None:
        torch, half = self.torch, EXPERTS // 2
        torch.manual_seed(7)  # the same on every rank: the reference needs all of them
        raw = [torch.randn(EXPERTS, n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
               for n, k in ((2 * INTER, HIDDEN), (HIDDEN, INTER))]  # fmt: skip
        self.first = self.rank * half
        mine = slice(self.first, self.first + half)
        if self.kind == "bf16":
            self.mats, self.local, self.scales = raw, [w[mine].contiguous() for w in raw], None
            return
        pairs = [quantize(torch, w, self.kind) for w in raw]
        self.mats = [dequantize(torch, *pair) for pair in pairs]
        self.local = [w[mine].contiguous() for w, _ in pairs]
        self.scales = [s[mine].contiguous() for _, s in pairs]

    def _buffer(self, group: Any) -> None:
        buffer = load("deep_ep").ElasticBuffer(
            group, num_max_tokens_per_rank=CAPACITY, hidden=HIDDEN, num_topk=TOPK,
            use_fp8_dispatch=self.kind == "block", allow_hybrid_mode=False,
            num_gpu_timeout_secs=40, explicitly_destroy=True,
        )  # fmt: skip
        shown = buffer if self.world > 1 else HalfWorld(self.torch, buffer)
        self.prepare = self.prefinal.DeepEPV2PrepareAndFinalize(
            buffer=shown, num_dispatchers=self.world, dp_size=self.world,
            rank_expert_offset=self.first, num_experts=EXPERTS, num_topk=TOPK,
            use_fp8_dispatch=self.kind == "block", use_cudagraph=True,
        )  # fmt: skip
        if self.case.fill == "remote" and not hasattr(self.prefinal, "_remote_expert_id"):
            self._mend()

    def _mend(self) -> None:
        """Do from outside what the patch does: a remote id for -1, None for no counts."""
        receive, remote = self.prepare._receiver, EXPERTS - 1 if self.first == 0 else 0

        def mended(*args: Any, **kwargs: Any) -> Any:
            rows, scale, meta, ids, weights = receive(*args, **kwargs)
            if meta is not None and meta.expert_num_tokens_cpu.numel() == 0:
                meta = None
            return rows, scale, meta, ids.masked_fill_(ids < 0, remote), weights

        self.prepare._receiver = mended

    def _kernel(self) -> None:
        torch, config = self.torch, load(f"{FUSED}.config")
        self.activation = load(f"{FUSED}.activation").MoEActivation.SILU
        parallel = config.FusedMoEParallelConfig(
            tp_size=1, pcp_size=1, dp_size=2, ep_size=2, tp_rank=0, pcp_rank=0, dp_rank=self.rank,
            ep_rank=self.rank, sp_size=1, use_ep=True, all2all_backend="deepep_v2",
            enable_eplb=False,
        )  # fmt: skip
        moe = config.FusedMoEConfig(
            num_experts=EXPERTS, experts_per_token=TOPK, hidden_dim=HIDDEN, intermediate_size=INTER,
            num_local_experts=EXPERTS // 2, num_logical_experts=EXPERTS, activation=self.activation,
            device="cuda", routing_method=config.RoutingMethodType.Renormalize,
            moe_parallel_config=parallel, in_dtype=torch.bfloat16, max_num_tokens=2 * CAPACITY,
        )  # fmt: skip
        quant = config.FUSED_MOE_UNQUANTIZED_CONFIG
        if self.scales is not None:
            shape = [BLOCK, BLOCK] if self.kind == "block" else None
            quant = config.fp8_w8a8_moe_quant_config(*self.scales, block_shape=shape)
        module, name, _ = BACKENDS[self.case.backend]
        experts = getattr(load(f"{FUSED}.{module}"), name)(moe_config=moe, quant_config=quant)
        self.kernel = load(f"{FUSED}.modular_kernel").FusedMoEKernel(self.prepare, experts)
        half = torch.arange(EXPERTS // 2, dtype=torch.int32, device="cuda")
        self.map = torch.full((EXPERTS,), -1, dtype=torch.int32, device="cuda")
        self.map[self.first : self.first + EXPERTS // 2] = half

    def inputs(self, tokens: int, fewer: int = 0) -> None:
        """Make the fixed input tensors: `tokens` rows, on later ranks `fewer`."""
        torch, rows = self.torch, tokens - self.rank * fewer
        self.x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.ids, self.weights = route(torch, "even", rows, 1)
        most = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([tokens]))
        self.context.dp_metadata = most  # bounds the dispatch, the same on every rank

    def feed(self, routing: str, seed: int) -> None:
        """Fill them; every rank its own."""
        torch, tokens = self.torch, self.x.shape[0]
        random = torch.Generator("cuda").manual_seed(seed + 100 * self.rank)
        self.x.normal_(generator=random)
        ids, weights = route(torch, routing, tokens, seed + 100 * self.rank)
        self.ids.copy_(ids)
        self.weights.copy_(weights)

    def forward(self) -> Any:
        """[tokens, HIDDEN] bfloat16, reduced over the ranks."""
        return self.kernel.apply(
            self.x, *self.local, self.weights, self.ids, self.activation, EXPERTS, self.map, False
        )

    def reference(self) -> Any:
        """Float32 sum of weight * W2 (silu(W1a x) * (W1b x)) over the experts of this world."""
        torch, x = self.torch, self.x
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(EXPERTS if self.world > 1 else EXPERTS // 2):
            token, slot = (self.ids == expert).nonzero(as_tuple=True)
            if token.numel():
                gate, up = (x[token] @ self.mats[0][expert].T).float().chunk(2, -1)
                act = (torch.nn.functional.silu(gate) * up).to(x.dtype)
                out = (act @ self.mats[1][expert].T).float() * self.weights[token, slot, None]
                total.index_add_(0, token, out)
        return total

    def compare(self, out: Any, routing: str) -> Step:
        """Set the output against the reference."""
        want = self.reference()
        away = self.torch.nan_to_num((out.float() - want).abs(), nan=ABSURD, posinf=ABSURD)
        diff, peak = away.max().item(), want.abs().max().item()
        close = diff <= TOLERANCE[self.kind] * max(peak, 1e-3)
        return Step(routing, self.x.shape[0], diff, peak, close)

    def eager(self) -> list[Step]:
        """Sizes off a power of two leave worst-case rows empty."""
        steps = []
        for tokens in (13, 333, CAPACITY):
            self.inputs(tokens, fewer=tokens // 3)
            for seed, routing in enumerate(ROUTINGS):
                poison_memory(self.torch, self.case.poison)
                self.feed(routing, seed)
                steps.append(self.compare(self.forward(), routing))
        return steps

    def captured(self) -> tuple[list[Step], dict[str, float]]:
        """Capture after one warm-up, then replay with other routings; microseconds a layer too."""
        steps: list[Step] = []
        micros: dict[str, float] = {}
        for tokens in (2, 16, CAPACITY):
            self.inputs(tokens)
            self.feed("even", 0)
            poison_memory(self.torch, self.case.poison)
            self.torch.cuda.empty_cache()  # a graph's pool takes fresh segments
            graph, out = self._capture()
            for seed, routing in enumerate((*ROUTINGS, "even")):
                self.feed(routing, 10 + seed)
                graph.replay()
                steps.append(self.compare(out, routing))
            micros[f"eager_{tokens}"] = self._time(self.forward)
            micros[f"graph_{tokens}"] = self._time(graph.replay)
        return steps, micros

    def _capture(self) -> tuple[Any, Any]:
        torch, side = self.torch, self.torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.forward()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            out = self.forward()
        return graph, out

    def _time(self, call: Callable[[], Any], rounds: int = 50) -> float:
        torch = self.torch
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(5):
            call()
        start.record()
        for _ in range(rounds):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(round(start.elapsed_time(end) * 1000 / rounds, 1))


def library(stem: str) -> str:
    """Path of a compiled part of vLLM, without importing vLLM."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob(f"{stem}*.so")):
            return str(path)
    raise ModuleNotFoundError(f"no {stem}*.so: vLLM's CUDA wheel is not on the path")


def align(torch: Any, case: Case) -> list[Step]:
    """moe_align_block_size alone, half the slots -1 or remote; `diff` counts wrong slots."""
    torch.ops.load_library(library("_moe_C"))
    block, steps = 16, []
    new = {"dtype": torch.int32, "device": "cuda"}
    # PyTorch may skip its pool (PYTORCH_NO_CUDA_MEMORY_CACHING=1) so that compute-sanitizer sees
    # the word in front of the prefix sums as out of bounds.
    for tokens in (16, 512, 8192):
        poison_memory(torch, case.poison)
        ids, _ = route(torch, "even", tokens, 3)
        ids = torch.where(ids < EXPERTS // 2, ids, -1 if case.fill == "as-is" else EXPERTS - 1)
        room = ids.numel() + EXPERTS * (block - 1)
        made = [torch.empty(size, **new) for size in (room, -(-room // block), 1)]
        torch.ops._moe_C.moe_align_block_size(ids, EXPERTS, block, *made, None)
        flat = ids.flatten().cpu()
        rows, owners, used = (t.cpu() for t in made)
        rows = rows[: used.item()].view(-1, block)
        owner = owners[: rows.shape[0], None].expand_as(rows)
        real = (rows >= 0) & (rows < flat.numel())
        wrong = int((flat[rows[real].long()] != owner[real]).sum())
        wrong += abs(int(real.sum()) - int((flat >= 0).sum()))
        steps.append(Step("even", tokens, float(wrong), float(flat.numel()), wrong == 0))
    return steps


@contextlib.contextmanager
def engine(torch: Any) -> Iterator[SimpleNamespace]:
    """The parts of a vLLM worker that one layer asks for; yields its forward context."""
    config, context = load("vllm.config"), SimpleNamespace(dp_metadata=None)
    with config.set_current_vllm_config(config.VllmConfig()):
        load("vllm.v1.worker.workspace").init_workspace_manager(torch.device("cuda"))
        with load("vllm.forward_context").override_forward_context(context):
            yield context


def measure(torch: Any, case: Case, rank: int, world: int, port: int) -> dict[str, Any]:
    """Run the case on this rank; what it raises is for the caller."""
    torch.cuda.set_device(rank)
    if case.backend == "align":
        return {"steps": align(torch, case)}
    dist = load("torch.distributed")
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    with engine(torch) as context, torch.inference_mode():
        layer = Layer(torch, case, context)
        if case.mode == "eager":
            return {"steps": layer.eager()}
        steps, micros = layer.captured()
        return {"steps": steps, "us_a_layer": micros}


def inside(case: Case, rank: int, world: int, port: int) -> None:
    """Measure, print, leave at once: a broken context hangs in every destructor."""
    try:
        torch = load("torch")
        found = measure(torch, case, rank, world, port)
        torch.cuda.synchronize()
        steps: list[Step] = found.pop("steps")
        bad = [asdict(step) for step in steps if not step.close]
        found |= {"steps": len(steps), "bad": bad[:6], "n_bad": len(bad)}
        found["worst"] = max((step.diff / max(step.peak, 1e-3) for step in steps), default=0.0)
        found["max_abs_diff"] = max((step.diff for step in steps), default=0.0)
        found["actual"] = "differs" if bad else "match"
    except ModuleNotFoundError as error:
        found = {"actual": "missing", "detail": str(error)}
    except Exception as error:
        text = str(error) or repr(error)
        illegal = "illegal memory" in text or "unspecified launch" in text
        found = {"actual": "illegal" if illegal else "error",
                 "detail": f"{type(error).__name__}: {text[:300]}"}  # fmt: skip
    print(MARK + json.dumps(found), flush=True)
    os._exit(0 if found["actual"] == "match" else 1)


# ---------------------------------------------------------------- outside: one line a case


def expected(case: Case) -> str:
    """`fails` on an unmended tree with -1 slots, `match` otherwise; CUTLASS is asked, not told."""
    if case.backend == "cutlass_fp8":
        return "any"
    mended = case.fill == "remote" or (case.backend != "align" and tree_is_mended())
    return "match" if mended else "fails"


def tree_is_mended() -> bool:
    """Whether the installed vLLM carries the patch."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "model_executor/layers/fused_moe/prepare_finalize/deepep_v2.py"
        return path.is_file() and "_remote_expert_id" in path.read_text()
    return False


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_report(output: str, returncode: int | None) -> dict[str, Any]:
    """The marked line of one rank, or what is left to say without it."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if lines:
        report: dict[str, Any] = json.loads(lines[-1][len(MARK) :])
        return report
    actual = "timeout" if returncode is None else "illegal" if "illegal" in output else "died"
    return {"actual": actual, "returncode": returncode, "detail": output[-400:]}


def start_rank(case: Case, rank: int, world: int, port: int, limit: float) -> dict[str, Any]:
    """One rank in a session of its own, ended with all it started when the limit is over."""
    command = [sys.executable, __file__, "--inside", json.dumps(asdict(case)),
               "--world", str(world), "--rank", str(rank), "--port", str(port)]  # fmt: skip
    # One host without a NIC: GIN off. The log lines of vLLM would bury a crash's.
    quiet = {"EP_DISABLE_GIN": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env=quiet | os.environ,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return rank_report(output, None)
    return rank_report(output, process.returncode)


ORDER: Final = ("illegal", "error", "died", "timeout", "differs", "missing", "match")


def run_case(case: Case, world: int, limit: float) -> dict[str, Any]:
    """All ranks of one case, merged: the worst outcome names it."""
    ranks, port, begin = 1 if case.backend == "align" else world, free_port(), time.monotonic()
    with ThreadPoolExecutor(ranks) as pool:
        asked = [pool.submit(start_rank, case, rank, ranks, port, limit) for rank in range(ranks)]
        reports = [one.result() for one in asked]
    worst = min(range(ranks), key=lambda rank: ORDER.index(reports[rank]["actual"]))
    want, got = expected(case), reports[worst]["actual"]
    ok = want in ("any", got) or (want == "fails" and got not in ("match", "missing"))
    line = {"case": case.name, "world": ranks, "expected": want, "actual": got, "ok": ok,
            "rank": worst, "seconds": round(time.monotonic() - begin, 1)}  # fmt: skip
    return line | {key: value for key, value in reports[worst].items() if key != "actual"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world", type=int, choices=(1, 2), default=1)
    parser.add_argument("--backend", action="append", choices=sorted(BACKENDS))
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument(
        "--jobs", type=int, default=8, help="cases at once; 1 if us_a_layer is to mean anything"
    )
    parser.add_argument("--limit", type=float, default=150, help="seconds a case")
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=29733, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Run the cases; see the module's docstring for the exit code."""
    args = parse()
    if args.inside:
        inside(Case(**json.loads(args.inside)), args.rank, args.world, args.port)
    chosen = [case for case in cases(args.backend or list(BACKENDS)) if args.only in case.name]
    if args.list:
        print("\n".join(f"{case.name}  expected: {expected(case)}" for case in chosen))
        return 0
    lines = []
    with ThreadPoolExecutor(max(1, args.jobs)) as pool:
        for line in pool.map(lambda case: run_case(case, args.world, args.limit), chosen):
            text = json.dumps(line)
            print(text, flush=True)
            lines.append(line)
            if args.out:
                with args.out.open("a") as file:
                    file.write(text + "\n")
    ran = [line for line in lines if line["actual"] != "missing"]
    if not ran:
        print("error: nothing ran; install the wheels of torch, vLLM, DeepEP", file=sys.stderr)
        return 2
    return 0 if all(line["ok"] for line in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
