"""Drops and logs made line by line, each as small as it can be and still be judged.

Lines are written as NCCL 2.30.4, aws-ofi-nccl, vLLM 0.24.0, uvicorn and our hook print them.
"""

import copy
import dataclasses
import hashlib
import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from lanekit import answers, batch, contract, planning, reading, spec
from lanekit.plan import CellPlan, Environment, Host, ModelPlan, Plan, options

SHARED: Final = Path(
    os.environ.get("LANES_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")
)
PUBLISHED: Final = SHARED / "published-2026-07"
needs_published = pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="needs the published drop: set LANES_SHARED_DATA"
)
needs_logs = pytest.mark.skipif(
    not (SHARED / "logs").is_dir(), reason="needs the recorded logs: set LANES_SHARED_DATA"
)

POST: Final = '(APIServer pid=3) INFO:     127.0.0.1:4 - "POST /v1/completions HTTP/1.1" 200 OK'
BEGIN: Final = "(APIServer pid=3) INFO 11-30 11:00:00 [api_utils.py:339]   version 0.24.0"
END: Final = (
    "(EngineCore pid=7) INFO 11-30 11:12:00 [core.py:1214] [shutdown] EngineCore: signal=SIGTERM"
)
MANAGER: Final = (
    "(Worker pid=9) INFO 11-30 11:05:43 [cuda_communicator.py:185] Using {} all2all manager."
)
VLLM: Final = (
    "(APIServer pid=3) INFO 11-30 11:00:01 [api_utils.py:273] non-default args: "
    "{'model': '/models/tiny', 'enable_expert_parallel': True}",
    "(EngineCore pid=7) INFO 11-30 11:00:02 [core.py:114] Initializing a V1 LLM engine (v0.24.0) "
    "with config: model='/models/tiny', load_format=auto, tensor_parallel_size=1, "
    "pipeline_parallel_size=1, data_parallel_size=1, enforce_eager=False, device_config=cpu, "
    "seed=0, served_model_name=tiny, x=1, compilation_config={'mode': <CompilationMode.NONE: 0>, "
    "'cudagraph_mode': <CUDAGraphMode.NONE: 0>, 'y': 1}",
    "(Worker pid=9) INFO 11-30 11:00:03 [parallel_state.py:1588] world_size=1 rank=0 local_rank=0 "
    "distributed_init_method=tcp://127.0.0.1:52679 backend=gloo",
)

VERSIONS: Final = {"deep_ep": "2.0.0", "nccl": "2.30.4", "nvshmem": "3.6.5"}
PINS: Final = {
    "vllm": "0.24.0", "aiperf": "0.10.0", "deep-ep": "2.0.0", "nvidia-nccl-cu13": "2.30.4",
    "nvidia-nvshmem-cu13": "3.6.5", "tensorrt-llm": "0.21.0", "sglang": "0.5.11",
}  # fmt: skip
SGLANG: Final = (
    "[2026-11-30 11:00:01] server_args=ServerArgs(model_path='/models/tiny', load_format='auto', "
    "port=8000, tp_size={1}, served_model_name='tiny', dp_size={1}, "
    "speculative_moe_a2a_backend=None, ep_size={1}, moe_a2a_backend='{0}', deepep_mode='auto')"
)
NATIVE: Final = (
    "[2026-11-30 11:05:44 TP{0} EP{0}] Initialized DeepEP v2 ElasticBuffer: world_size={1} "
    "hidden_size=2048 num_topk=8 max_dispatch_tokens_per_rank=128 use_fp8_dispatch=False"
)
ALLTOALL: Final = (
    "[11/30/2026-11:05:43] [TRT-LLM] [RANK 0] [I] CutlassFusedMoE selects alltoall_method_type "
    "<AlltoallMethodType.{}>"
)

URL: Final = "http://127.0.0.1:8000"
JOINED: Final = 1_796_036_730.0  # 2026-11-30 11:05:30 UTC: when the ranks had met

HT: Final = "--all2all-backend=deepep_high_throughput"
TINY: Final = "--model=/models/tiny"
EP: Final = "--enable-expert-parallel"
OPTIONS: Final = options([HT, TINY, "--model-path=/models/tiny"]) | {"EP_EFA_MAX_QPS": "2"}
GRAPHS: Final = (
    "(Worker pid=9) INFO 11-30 11:05:46 [gpu_model_runner.py:6656] Graph capturing finished in 2 "
    "secs, took 0.08 GiB"
)
CAPTURED: Final = (
    "[2026-11-30 11:00:09] Capture cuda graph end. Time elapsed: 3.20 s. mem usage=0.40 GB. avail "
    "mem=20.11 GB."
)

Edit = Callable[[list[str]], list[str]]


def nccl(host: str, local: int, text: str) -> str:
    """A line of NCCL's on a rank's main thread."""
    pid = 7000 + local
    return f"{host}:{pid}:{pid} [{local}] NCCL INFO {text}"


def hook(host: str, local: int, rank: int, world: int, **other: str) -> str:
    """The line of the evidence hook."""
    fields = {"class": "deep_ep.ElasticBuffer", "gin": "proxy"} | VERSIONS | other
    return (
        f"(Worker_DP{rank}_EP{rank} pid={7000 + local}) [lane-evidence] v=1 host={host} "
        f"pid={7000 + local} rank={rank} local_rank={local} world={world} class={fields['class']} "
        f"deep_ep={fields['deep_ep']} nccl={fields['nccl']} nvshmem={fields['nvshmem']} "
        f"gin={fields['gin']} qps=2 comms=1 timeout_s=600 t={JOINED:.3f}"
    )


def armed(host: str, local: int, rank: int, world: int) -> str:
    """The line of the evidence hook in a process that joined the ranks."""
    return (
        f"[lane-evidence] v=1 armed host={host} pid={7000 + local} rank={rank} local_rank={local} "
        f"world={world} nccl={VERSIONS['nccl']} nvshmem=none hook=0.3.0 t={JOINED:.3f}"
    )


def each(hosts: Iterable[str], gpus: int) -> list[tuple[str, int, int]]:
    """(host, local rank, global rank) of a fleet."""
    return [(h, i, n * gpus + i) for n, h in enumerate(hosts) for i in range(gpus)]


JOINED_COMM: Final = (
    "ncclCommInitRankConfig comm 0x39fd0cd0 rank {0} nranks {1} cudaDev {2} nvmlDev {2} busId 60 "
    "commId 0x673f342b97c2f40c - Init COMPLETE"
)


def efa(host: str, local: int, rank: int, *, gin: str = "Libfabric") -> list[str]:
    """What NCCL and the plugin print on an EFA rank."""
    texts = (
        "NET/Plugin: Loaded net plugin Libfabric (v12)",
        "NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)",
        "Assigned NET plugin Libfabric to comm",
        f"Assigned GIN plugin {gin} to comm",
        "Using network Libfabric",
        JOINED_COMM.format(rank, 16, local),
        "devCommCreate: creating 4 contexts: 4 GIN connections with 1 contexts each (17 contexts "
        "total requested)",
    )
    return [nccl(host, local, text) for text in texts]


HOSTS: Final = ("ip-10-0-0-1", "ip-10-0-0-2")
TWO: Final = each(HOSTS, 8)
ONE: Final = each(("vm",), 2)
ALONE: Final = each(("vm",), 1)
LEGACY: Final = {"class": "deep_ep.Buffer", "gin": "none"}
NVSHMEM: Final = (
    "/src/libfabric/libfabric.cpp 1524 Selected provider efa, fabric efa-direct, nic rdmap1, hmem "
    "yes"
)
SEAM: Final = (
    "[deep-ep-v2-seam] constructing deep_ep.ElasticBuffer (max_tokens/rank=8192 hidden=2048)"
)
PREPARE: Final = (
    "(Worker_DP0_EP0 pid=9) INFO 11-30 11:05:45 [fp8.py:594] Using DeepEP{}PrepareAndFinalize"
)
Fleet = list[tuple[str, int, int]]


def _net(*, gin: str = "Libfabric", without: str = "nothing") -> list[str]:
    return [x for h, i, r in TWO for x in efa(h, i, r, gin=gin) if without not in x]


def _peers() -> list[str]:
    reach = "Channel 00/0 : {0}[{0}] -> {1}[{1}] via P2P/CUMEM"
    return [
        nccl(h, i, text)
        for h, i, r in ONE
        for text in (reach.format(i, 1 - i), JOINED_COMM.format(r, len(ONE), i))
    ]


def _armed(fleet: Fleet) -> list[str]:
    return [armed(h, i, r, len(fleet)) for h, i, r in fleet]


def _built(fleet: Fleet, **other: str) -> list[str]:
    return _armed(fleet) + [hook(h, i, r, len(fleet), **other) for h, i, r in fleet]


def _said(fleet: Fleet, what: str, tail: str) -> list[str]:
    """A program's own line of each rank."""
    return [
        f"[{what}] v=1 host={h} pid={7000 + i} rank={r} local_rank={i} world={len(fleet)} {tail}"
        for h, i, r in fleet
    ]


def _vllm(manager: str, prepare: str = "") -> list[str]:
    """What vLLM says of itself on a GPU."""
    gpu = [x.replace("=cpu", "=cuda").replace("gloo", "nccl") for x in VLLM]
    if "HT" in manager:
        gpu[0] = gpu[0].replace("True}", "True, 'all2all_backend': 'deepep_high_throughput'}")
    said = [*gpu[:2], MANAGER.format(manager), GRAPHS]
    return [*said, PREPARE.format(prepare)] if prepare else said


def _transport(name: str) -> tuple[list[str], Fleet]:
    """The lines of a contract that others extend, and its ranks."""
    fleets = {
        "v2-efa-proxy": (_net() + _built(TWO), TWO),
        "v2-efa-gda": (
            _net(gin="Libfabric_GDAKI")
            + [nccl(h, i, "NET/OFI gin GDAKI: createContext done (nranks=16)") for h, i, _ in TWO]
            + _built(TWO, gin="gdaki"),
            TWO,
        ),
        "v1-efa": (_net(without="GIN") + [NVSHMEM] * 16 + _built(TWO, **LEGACY), TWO),
        "dense-efa": (_net(without="GIN") + _armed(TWO), TWO),
        "v2-nvlink": (_peers() + _built(ONE, gin="off"), ONE),
        "v1-nvlink": (_peers() + _built(ONE, **LEGACY), ONE),
        "dense-nvlink": (_peers() + _armed(ONE), ONE),
        "v2-one": (_built(ALONE, gin="off"), ALONE),
        "cpu": (_armed(ALONE), ALONE),
    }
    return fleets[name]


def _engine(kind: str, fleet: Fleet) -> list[str]:
    """What an engine says of itself beside the transport."""
    deepep, dense = ALLTOALL.format("DeepEP: 2"), ALLTOALL.format("NotEnabled: 0")
    version = ["[TensorRT-LLM] TensorRT-LLM version: 0.21.0"] * len(fleet)
    said = {
        "v2": _vllm("DeepEPV2All2AllManager", "V2") + _said(fleet, "micro", "backend=nccl"),
        "v1": _vllm("DeepEPHTAll2AllManager", "HT") + _said(fleet, "micro", "backend=nccl"),
        "dense": _vllm("AgRsAll2AllManager"),
        "sglang-v2": [NATIVE.format(r, len(fleet)) for _, _, r in fleet],
        "sglang-seam": [SGLANG.format("deepep", len(fleet))],
        "sglang-v1": [SGLANG.format("deepep", len(fleet))],
        "sglang-dense": [SGLANG.format("none", len(fleet))],
        "trtllm-seam": [*version, deepep],
        "trtllm-dense": [*version, dense],
        "megatron-v2": _said(fleet, "megatron", "backend=nccl dispatcher=v2"),
        "megatron-v1": _said(fleet, "megatron", "backend=nccl dispatcher=v1"),
        "nemo-rl-v2": ["  \u2022 Loss: 0.0123"],
        "nemo-rl-v1": ["  \u2022 Loss: 0.0123"],
    }
    return said[kind]


# As vllm-router 0.1.17 prints it, colours included (2026-11-30).
READY: Final = (
    "\x1b[2m2026-11-30 11:05:45\x1b[0m \x1b[32m INFO\x1b[0m \x1b[2mvllm_router_rs::server\x1b[0m"
    "\x1b[2m:\x1b[0m \x1b[2msrc/server.rs\x1b[0m\x1b[2m:\x1b[0m\x1b[2m1192:\x1b[0m Router ready | "
    'workers: ["http://127.0.0.1:41899", "http://127.0.0.1:60741"]'
)
STARTED: Final = '{"level":"info","msg":"EPP starting (file discovery mode)","grpcPort":9002}'
PICKED: Final = (
    '{"level":"Level(-3)","msg":"Request handled","targetModel":"t","endpoint":"10.0.0.%d:80"}'
)


def answer(pid: int) -> str:
    """An answered request of one of several engines."""
    return POST.replace("pid=3", f"pid={pid}")


def _routed(gpu: list[str], net: list[str]) -> dict[str, list[str]]:
    """Two engines of four answers each, and what stood before them."""
    answers = [answer(pid) for pid in (4, 5) for _ in range(4)]
    picked = [STARTED, *(PICKED % (n % 2 + 1) for n in range(8))]
    return {
        "routed": [*VLLM, READY, *answers],
        "picked": [*VLLM, *picked, *answers],
        "routed-efa": [*gpu, *net, READY, *answers],
        "picked-efa": [*gpu, *net, *picked, *answers],
    }


def _own(name: str) -> list[str]:
    """The lines of a contract that stands alone."""
    shim = _net(without="devComm")
    gpu = [x.replace("=cpu", "=cuda").replace("gloo", "nccl") for x in (*VLLM, GRAPHS)]
    lines = {
        "floor": [*_armed(ALONE), *gpu],
        "sglang-floor": [*_armed(ALONE), SGLANG.format("none", 1), CAPTURED],
        "cpu-gloo": _armed(ALONE) + _said(ALONE, "micro", "backend=gloo torch=2.11.0"),
        "cpu": [*_armed(ALONE), *VLLM],
        "train-gloo": _armed(ALONE) + _said(ALONE, "megatron", "backend=gloo dispatcher=alltoall"),
        "train-one": _armed(ALONE) + _said(ALONE, "megatron", "backend=nccl dispatcher=alltoall"),
        "nemo-rl-one": [*_armed(ALONE), "  \u2022 Loss: 0.0123"],
        "train-nvlink": _peers()
        + _armed(ONE)
        + _said(ONE, "megatron", "backend=nccl dispatcher=alltoall"),
        **_routed(gpu, _net()),
        "published-2026-07-trtllm": [*shim, *[SEAM] * 16, ALLTOALL.format("DeepEP: 2")],
        "published-2026-07-vllm": [
            *shim,
            "[t3-patch] constructing deep_ep.ElasticBuffer (gpu_timeout=600s cpu_timeout=600s)",
            PREPARE.format("V2"),
        ],
        "published-2026-07-sglang": [
            *shim,
            "Wave 38.8 Path B: returning raw ElasticBuffer (num_experts=128, num_max_tokens=128).",
        ],
    }
    return lines[name]


def log(name: str) -> list[str]:
    """The smallest log that satisfies a contract, loaded or run once a cell."""
    if name.startswith(("published", "train", "routed", "picked")) or name in (
        "floor",
        "sglang-floor",
        "cpu",
        "cpu-gloo",
        "nemo-rl-one",
    ):
        lines = _own(name)
    else:
        base = contract.load(name).extends or name
        lines, fleet = _transport(base)
        kind = name.removesuffix(base.partition("-")[2]).removesuffix("-")
        lines = lines + _engine(kind, fleet)
    return [BEGIN, *lines, *[POST] * 8, END]


# contract -> (lane, arm, profile) of the drops made here
SUBJECTS: Final = {
    "v2-efa-proxy": ("vllm", "v2", "p5en-x2"),
    "v2-efa-gda": ("vllm", "gda", "p5en-x2"),
    "v1-efa": ("vllm", "v1", "p5en-x2"),
    "dense-efa": ("vllm", "dense", "p5en-x2"),
    "v2-nvlink": ("vllm", "v2", "h200x2"),
    "v1-nvlink": ("vllm", "v1", "h200x2"),
    "dense-nvlink": ("vllm", "dense", "h200x2"),
    "floor": ("vllm", "floor", "h200x1"),
    "sglang-floor": ("sglang", "floor", "h200x1"),
    "cpu": ("vllm", "floor", "cpu"),
    "published-2026-07-trtllm": ("trtllm", "seam", "p5en-x2"),
    "published-2026-07-vllm": ("vllm", "epnc1", "p5en-x2"),
    "published-2026-07-sglang": ("sglang", "seam", "p5en-x2"),
    "cpu-gloo": ("micro", "gloo", "cpu"),
    "v2-one": ("micro", "v2", "h200x1"),
    "routed": ("llmd", "router", "cpu"),
    "picked": ("llmd", "epp", "cpu"),
    "routed-efa": ("llmd", "router", "p5en-x2"),
    "picked-efa": ("llmd", "epp", "p5en-x2"),
    "train-gloo": ("megatron", "alltoall", "cpu"),
    "train-one": ("megatron", "alltoall", "h200x1"),
    "train-nvlink": ("megatron", "alltoall", "h200x2"),
    "nemo-rl-one": ("nemo-rl", "alltoall-grpo", "h200x1"),
    **{
        name: (
            lane,
            name.split("-")[1] if lane == "megatron" else name.removeprefix(f"{lane}-"),
            "p5en-x2" if "efa" in name else "h200x1" if name.endswith("-one") else "h200x2",
        )
        for name in contract.names()
        for lane in ("sglang", "trtllm", "megatron", "nemo-rl")
        if name.startswith(f"{lane}-") and contract.load(name).extends
    },
}

DRIVERS: Final = {"micro": "batch", "megatron": "batch", "nemo-rl": "batch"}
ENGINES: Final = {"micro": "deepep", "llmd": "vllm", "megatron": "megatron-core"}
CELLS: Final = ("c4", "c5", "c8", "decode", "prefill")
SHAPE: Final = {"layers": 48, "hidden": 2048, "topk": 8}
LOAD: Final = {"concurrency": 4, "requests": 8}


def lanes(root: Path) -> Path:
    """Lane files that know every drop made here, and nothing else of a lane."""
    rows = [(*subject, name) for name, subject in SUBJECTS.items()]
    for lane in {row[0] for row in rows}:
        found = [row[1:] for row in rows if row[0] == lane]
        arms: dict[str, dict[str, Any]] = {}
        for arm, profile, name in found:
            args = [f"--arm={arm}"] if lane == "megatron" else []
            args += [HT] if (lane, arm) == ("vllm", "v1") else []
            args += [EP] if lane in ("vllm", "llmd") else []
            new = {"title": arm, "args": args, "contracts": {}}
            arms.setdefault(arm, new)["contracts"][profile] = name
        text = {
            "name": lane,
            "title": lane,
            "engine": ENGINES.get(lane, lane),
            "stack": "2026-07",
            "model": {"source": "none/none", "served_name": "tiny", "shape": SHAPE},
            "workload": {
                "cells": dict.fromkeys(CELLS, LOAD),
                "driver": DRIVERS.get(lane, "aiperf"),
                "isl": 120,
                "osl": 128,
            },
            "arms": arms,
            "profiles": {profile: {"arm": arm} for arm, profile, _ in found},
        }
        (root / lane).mkdir(parents=True)
        lines = "".join(f"{key} = {_inline(value)}\n" for key, value in text.items())
        (root / lane / "lane.toml").write_text(lines)
        path = "--model-path" if lane == "sglang" else "--model"
        serve = f"${{LANE_PYTHON}} -m {lane} --port ${{LANE_PORT}} {path} ${{LANE_MODEL}}"
        sizes = " ".join(f"--{kind}-size ${{LANE_RANKS}}" for kind in ("tp", "ep", "dp"))
        command = f"{serve} {sizes if lane == 'sglang' else ''} ${{LANE_ARGS}}"
        if lane in DRIVERS:
            command = (
                "${LANE_PYTHON} ${LANE_HOME}/train.py --out ${CELL_OUT} ${LANE_ARGS}"
                if lane == "megatron"
                else "${LANE_PYTHON} ${LANE_HOME}/ep_bench.py --out ${CELL_OUT} " + " ".join(MICRO)
            )
        (root / lane / "serve.yaml").write_text(f"services:\n  server:\n    command: {command}\n")
    return root


def plan_of(name: str, cells: Sequence[str]) -> dict[str, Any]:
    """A plan as the lane of a contract's drop makes it."""
    lane, arm, profile = SUBJECTS[name]
    fleet = spec.profile(profile)
    share = fleet.ranks // fleet.hosts
    made = Plan(
        lane=lane,
        arm=arm,
        profile=profile,
        profile_why="",
        stack="2026-07",
        launcher="process",
        engine=ENGINES.get(lane, lane),
        driver=DRIVERS.get(lane, "aiperf"),
        hosts=tuple(
            Host(host, f"10.0.0.{n + 1}", "worker" if n else "leader", n, n * share, share)
            for n, host in enumerate(HOSTS if fleet.hosts > 1 else ("here",))
        ),
        hosts_why="",
        ranks=fleet.ranks,
        comparable=fleet.comparable,
        contract=name,
        contract_sha256=contract.digest(name),
        model=ModelPlan("/models/tiny", "tiny", "none/none", dummy_weights=False),
        url=URL,
        port=8000,
        ports={"server": 8000},
        ready_s=0,
        environments={
            "server": Environment("given", "/env/bin/python", {}),
            "aiperf": Environment("given", "/aiperf/bin/python", {}),
        },
        services=(),
        cells=dict.fromkeys(cells, CellPlan((), {}, "", "", 0)),
        pins=PINS,
        patches={},
        inherited=(),
        drop="/drops/one",
        torch_index="",
    )  # fmt: skip
    found: dict[str, Any] = msgspec.to_builtins(planning.again(made, spec.lane(lane)))
    return found


def _inline(value: Any) -> str:
    """A value as TOML writes it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {_inline(each)}' for key, each in value.items()) + "}"
    return json.dumps(value)


# 2026-11-30 11:10:00 UTC; AIPerf's local clock below is UTC too
START: Final = 1_796_037_000.0


def record(number: int, *, start: float = START, osl: int = 128) -> dict[str, Any]:
    """A record of AIPerf 0.10.0: 100 ms to the first token, 10 ms a token after it, and every
    0.35 s another one, so that four are open at a time."""
    latency = 100.0 + 10.0 * (osl - 1)
    begin = int((start + 0.35 * number) * 1e9)
    return {
        "metadata": {
            "x_request_id": f"request-{number}",
            "request_start_ns": begin,
            "request_end_ns": begin + int(latency * 1e6),
            "benchmark_phase": "profiling",
            "was_cancelled": False,
        },
        "metrics": {
            "request_latency": {"value": latency, "unit": "ms"},
            "time_to_first_token": {"value": 100.0, "unit": "ms"},
            "output_sequence_length": {"value": osl, "unit": "tokens"},
            "input_sequence_length": {"value": 120, "unit": "tokens"},
            "output_token_count": {"value": osl, "unit": "tokens"},
            "inter_chunk_latency": {"value": [10.0] * (osl - 1), "unit": "ms"},
            "inter_token_latency": {"value": 10.0, "unit": "ms"},
            "output_token_throughput_per_user": {"value": 100.0, "unit": "tokens/sec/user"},
        },
        "error": None,
    }


def summary(requests: int, concurrency: int, *, osl: int = 128) -> dict[str, Any]:
    """AIPerf's own summary of such records."""
    wall = 0.35 * (requests - 1) + (100.0 + 10.0 * (osl - 1)) / 1000
    return {
        "schema_version": "1.3",
        "aiperf_version": "0.10.0",
        "was_cancelled": False,
        "error_summary": [],
        "start_time": "2026-11-30T11:10:00.000000",
        "end_time": f"2026-11-30T11:10:{wall:09.6f}",
        "request_count": {"unit": "requests", "avg": float(requests)},
        "output_token_throughput": {"unit": "tokens/sec", "avg": requests * osl / wall},
        "output_token_throughput_per_user": {"unit": "tokens/sec/user", "avg": 100.0},
        "time_to_first_token": {"unit": "ms", "avg": 100.0, "p50": 100.0, "p99": 100.0},
        "inter_token_latency": {"unit": "ms", "avg": 10.0, "p50": 10.0, "p99": 10.0},
        "output_sequence_length": {"unit": "tokens", "avg": float(osl)},
        "input_sequence_length": {"unit": "tokens", "avg": 120.0},
        "benchmark_duration": {"unit": "sec", "avg": wall},
        "input_config": {
            "endpoint": {"urls": [URL], "streaming": True},
            "models": {"items": [{"name": "tiny"}]},
            "datasets": [{"prompts": {"isl": {"mean": 120.0}, "osl": {"mean": float(osl)}}}],
            "phases": [{"name": "profiling", "requests": requests, "concurrency": concurrency}],
        },
    }


def aiperf(folder: Path, *, requests: int = 8, concurrency: int = 4) -> Path:
    """An AIPerf folder."""
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(record(n)) + "\n" for n in range(requests))
    (folder / "profile_export.jsonl").write_text(lines)
    (folder / "profile_export_aiperf.json").write_text(json.dumps(summary(requests, concurrency)))
    return folder


MICRO: Final = (
    "--backend=gloo", "--tokens=8", "--decode=0", "--hidden=256", "--topk=4", "--experts=32",
    "--modes=eager", "--dtypes=bf16", "--repeat=2", "--iterations=3",
)  # fmt: skip


def exchanged(
    world: int, start: float = START, *, more: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The records of the micro program: one floor and one shape, checked and then timed twice.
    more: its options."""
    program = batch._program("ep_bench.py")
    options = program.parse_options([*MICRO, *more, "--out=x"])
    (shape,) = program.shapes(options)
    peers, here = max(1, world - 1), 32 // world
    alone = math.comb(32 - here, 4) / math.comb(32, 4) if world > 1 else 0
    rows = round(8 * peers * (1 - alone) * world) / world
    out, back = round(rows * shape.dispatch_row), round(rows * shape.combine_row)
    moved = {"dispatch": out, "combine": back, "pair": out + back, "all_to_all": out}
    if options.variants:
        moved |= {"expanded-dispatch": out, "cached-dispatch": out, "reduced-combine": back}
    trips = ("", "expanded", "cached") if options.variants else ("",)
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    one = {"v": 1, "mode": "eager", **dataclasses.asdict(shape)}
    figures = {"iterations": 3, "ranks": world, "p50_us": 9.0, "min_us": 8.0, "max_us": 10.0}

    def timed(op: str, size: int, rep: int, **more: Any) -> dict[str, Any]:
        gbs = round(size / 9.0 / 1e3, 3)
        return {**more, "kind": "time", "op": op, "rep": rep, "bytes": size, **figures, "gbs": gbs}

    return [
        {"v": 1, "kind": "run", "world": world, "settings": settings, "started": start},
        *(timed("copy-local", 65536, rep, v=1, mode="eager") for rep in range(2)),
        *(
            {**one, "kind": "check", "op": op, "wrong_rows": [0] * world, "ok": True}
            for op in trips
        ),
        *(timed(op, size, rep, **one) for rep in range(2) for op, size in moved.items()),
        {"v": 1, "kind": "done", "ended": start + 9},
    ]


def micro(folder: Path, lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Write what a cell of the micro program leaves; returns what it prints at its end."""
    text = [json.dumps(line) for line in lines]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "micro.jsonl").write_text("\n".join(text) + "\n")
    program = batch._program("ep_bench.py")
    table: str = program.table(program.read_records(text))
    return table.splitlines()


def steps(world: int, arm: str = "alltoall") -> list[dict[str, Any]]:
    """The records of a training program: a warm-up and three steps of the reference and the arm."""
    losses = (6.2745, 6.2745, 6.0585, 5.9011)
    figures = [{"step": n, "loss": x, "grad_norm": 1.6, "ms": 50.0} for n, x in enumerate(losses)]
    first = {"v": 1, "kind": "step", "role": "reference", "dispatcher": "alltoall"}
    second = {"v": 1, "kind": "step", "role": "arm", "dispatcher": arm}
    asked = ["--out=x", f"--arm={arm}"]
    settings = {k: v for k, v in vars(batch._program("train.py").parse_options(asked)).items()
                if k != "out"}  # fmt: skip
    return [
        {"v": 1, "kind": "run", "world": world, "settings": settings, "started": START},
        *({**first, **each} for each in figures),
        *({**second, **each} for each in figures),
        {"v": 1, "kind": "bytes", "role": "arm", "tx_bytes": 1 << 30 if world > 2 else None},
        {"v": 1, "kind": "done", "ended": START + 9},
    ]


def told(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the training program prints of its steps."""
    return [
        f"{x['role']:<10} {x['dispatcher']:<9} step {x['step']}  loss {x['loss']:9.4f}"
        f"  grad-norm {x['grad_norm']:9.4f}  {x['ms']:9.1f} ms"
        for x in lines
        if x["kind"] == "step"
    ]


def training(folder: Path, world: int, arm: str = "alltoall") -> Path:
    """What a cell of a training program leaves."""
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(line) + "\n" for line in steps(world, arm))
    (folder / "steps.jsonl").write_text(lines)
    return folder


def asked(root: Path, lane: str, arm: str, profile: str, model: str = "none/none") -> str:
    """Lay sound answers of an arm into a drop; returns the digest of the questions."""
    held = answers.questions().ask
    header = answers.Header(
        questions=answers.digest(held),
        lane=lane,
        arm=arm,
        profile=profile,
        model=model,
        dummy_weights=False,
        drop=root.name,
    )
    found = [
        answers.Answer(
            prompt=prompt.id,
            batch=batch,
            tokens=tuple(f"{prompt.id}{n}" for n in range(held.tokens)),
            logprobs=(-0.1,) * held.tokens,
            top=tuple({f"{prompt.id}{n}": -0.1, "x": -4.0} for n in range(held.tokens)),
            prompt_tokens=3,
        )
        for batch, prompt in held.places()
    ]
    (root / answers.NAME).parent.mkdir(parents=True)
    (root / answers.NAME).write_bytes(answers.encode(header, found))
    return header.questions


def _with_gate(lines: list[str], name: str) -> list[str]:
    """A server's log with the gate's requests before the others."""
    first = next((n for n, line in enumerate(lines) if "POST" in line), len(lines) - 1)
    count = range(len(answers.questions().ask.places()))
    several = name.startswith(("routed", "picked"))
    told = [answer(4 + n % 2 if several else 3) for n in count]
    told += [PICKED % (n % 2 + 1) for n in count if name.startswith("picked")]
    return [*lines[:first], *told, *lines[first:]]


def replaced(thing: Any, at: Sequence[str | int], value: Any) -> Any:
    """The document with the value at a place replaced; `...` removes it."""
    found = copy.deepcopy(thing)
    inner = found
    for key in at[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return found


def edit_json(path: Path, **changes: Any) -> None:
    """Change top-level fields of a JSON file; None removes one."""
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))


def drop(
    root: Path,
    name: str = "cpu",
    edit: Edit = list,
    *,
    cells: Sequence[str] = ("c4",),
    plan: Mapping[str, Any] | None = None,
    **other: Any,
) -> Path:
    """A complete drop of ours, judged by the contract `name`, its log edited, sealed. It holds the
    records of c4 only, and a server's the answers of its gate, which has no reference, unless its
    plan is given another. `plan` replaces fields of its plan, `other` of its manifest."""
    lane, arm, profile = SUBJECTS[name]
    (root / "logs").mkdir(parents=True)
    fleet = spec.profile(profile)
    host, ranks = HOSTS[0] if fleet.hosts > 1 else "here", fleet.ranks
    lines = edit(log(name))
    if lane in ("megatron", "nemo-rl"):
        training(root / lane / "c4", ranks, arm.partition("-")[0])
        lines += told(steps(ranks, arm.partition("-")[0]))
    elif lane in DRIVERS:
        lines += micro(root / lane / "c4", exchanged(ranks))
    else:
        aiperf(root / "aiperf" / "c4")
    plan = dict(plan or {})
    if lane not in DRIVERS and "gate" not in plan:
        said = asked(root, str(plan.get("lane", lane)), str(plan.get("arm", arm)), profile)
        plan["gate"] = {"questions": said, "reference": ""}
        lines = _with_gate(lines, name)
    written = f"{host}-{'c4' if lane in DRIVERS else 'server'}.log"
    (root / "logs" / written).write_text("\n".join(lines) + "\n")
    full_plan = plan_of(name, cells) | plan
    if (summed := root / "aiperf" / "c4" / "profile_export_aiperf.json").is_file():
        command = reading.dig(full_plan, "cells", "c4", "command")
        edit_json(summed, run_info={"cli_command": shlex.join(map(str, command or ()))})
    facts = {"gpus": [{"name": f"NVIDIA {fleet.gpu}"}] * fleet.gpus, "nics": ["x"] * fleet.nics}
    (root / "host").mkdir()
    for each_host in HOSTS if fleet.hosts > 1 else ("here",):
        (root / "host" / f"{each_host}.json").write_text(json.dumps(facts))
    manifest = {
        "schema": 1,
        "row": {"lane": lane, "arm": arm, "profile": profile, "cells": [*cells]},
        "stack": "2026-07",
        "state": "complete",
        "started": "2026-11-30T11:00:00.000+00:00",
        "plan": full_plan,
        "patches": full_plan["patches"],
        "git": {},
        "environment": {},
        "ended": "2026-11-30T11:13:00.000+00:00",
        "timings": dict.fromkeys((f"cell {cell}" for cell in cells), 60.0),
        "runner": {"pid": 1, "started": 1.0, "what": "runner"},
    } | other
    (root / "manifest.json").write_text(json.dumps(manifest))
    return seal(root)


def seal(root: Path) -> Path:
    """Write the sha256 of every file into the manifest, as the end of a run does."""
    files = [p for p in root.rglob("*") if p.is_file() and p.name not in UNSEALED]
    digests = {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    edit_json(root / "manifest.json", files=digests)
    return root


UNSEALED: Final = ("manifest.json", "verdict.json")
