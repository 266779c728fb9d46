"""A rank that compiles before it meets the others, as engines do: jit.py NUMBER HOSTS LEADER PORT,
or nothing more where it only fills its host's cache."""

import datetime
import os
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]
from torch._inductor import config  # type: ignore[import-not-found]

# One small kernel is enough: not all of torch's headers first, and no trials of what the processor
# can, which took minutes on two busy cores (2026-11-30).
config.cpp_cache_precompile_headers = False
config.cpp.vec_isa_ok = False


def built() -> int:
    """How many libraries Inductor has compiled here."""
    return sum(1 for _ in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so"))


before = built()
torch.compile(lambda x: torch.relu(x * 2 + 1).sum())(torch.ones(4096))
print(f"[jit] before={before} built={built() - before}", flush=True)
if len(sys.argv) > 1:
    number, hosts, leader, port = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"tcp://{leader}:{port}", rank=int(number), world_size=int(hosts),
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    dist.barrier()
    print("[jit] met", flush=True)
