"""Compare `lanekit verify` with ripgrep on a drop of gigabytes, made for the purpose and removed.

    python scripts/bench_verify.py [--gib 4] [--sealed] [--folder DIR] [--keep]

Both look for the same patterns in the same files, in turns, caches warm, best of three. The drop
is what two hosts of eight ranks leave: NCCL's start-up lines for every rank, then request lines and
engine statistics. ripgrep must be installed; it is Debian's package of that name.

Measured on 2026-11-30, 4.3 GB in memory on two cores that others kept busy (load 8 to 12), wall
and processor seconds: verify 5.8 and 2.5, ripgrep 17.8 and 7.9 in the same run; with a manifest, so
with the sha256 of it all, 12.6 and 6.0 beside 19.2 and 7.9; without Hyperscan 39.0 and 17.6 beside
15.6 and 7.8. At most 54 MiB in one process each time.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lanekit import contract

CONTRACT = "v2-efa-proxy"
HOSTS = ("ip-10-0-0-1", "ip-10-0-0-2")
GPUS = 8


def start_up(host: str, number: int) -> list[str]:
    """NCCL's and the hook's lines of the ranks of a host: the evidence, and what surrounds it."""
    lines = []
    for local in range(GPUS):
        pid, rank = 7000 + local, number * GPUS + local
        mark = f"{host}:{pid}:{pid} [{local}] NCCL INFO "
        texts = [
            "NCCL version 2.30.4+cuda13.2",
            "NET/Plugin: Loaded net plugin Libfabric (v12)",
            *(f"NET/OFI NIC group {n} device #0 0000:{n:02x}:00.0" for n in range(16)),
            "NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)",
            f"ncclCommInitRankConfig comm 0x4b3e7190 rank {rank} nranks 16 cudaDev {local} nvmlDev "
            f"{local} busId 60 commId 0x673f342b97c2f40c - Init COMPLETE",
            "Assigned NET plugin Libfabric to comm",
            "Assigned GIN plugin Libfabric to comm",
            "Using network Libfabric",
            f"comm 0x4b3e7190 rank {rank} nRanks 16 nNodes 2 localRanks 8 localRank {local}",
            *(
                f"Channel {n % 16:02d}/0 : {rank}[{local}] -> {n % 16}[{n % 8}] [send] via "
                f"NET/Libfabric/{n % 16}/GDRDMA"
                for n in range(400)
            ),
            "devCommCreate: creating 4 contexts: 4 GIN connections with 1 contexts each",
        ]
        lines += [mark + text for text in texts]
        who = f"host={host} pid={pid} rank={rank} local_rank={local} world=16"
        versions = "nccl=2.30.4 nvshmem=3.6.5"
        lines += [
            f"[lane-evidence] v=1 armed {who} {versions} hook=0.3.0 t=1796036730.000",
            f"(Worker_DP{rank}_EP{rank} pid={pid}) [lane-evidence] v=1 {who} "
            f"class=deep_ep.ElasticBuffer deep_ep=2.0.0 {versions} gin=proxy qps=17 comms=1 "
            "timeout_s=600 t=1796036730.000",
        ]
    return lines


def serving(host: str, dice: random.Random) -> list[str]:
    """What a server prints while it serves: request lines, statistics, NCCL on new connections."""
    lines = []
    for n in range(60_000):
        port = dice.randrange(30_000, 60_000)
        lines.append(
            f"(APIServer pid=3533) INFO:     127.0.0.1:{port} - "
            '"POST /v1/completions HTTP/1.1" 200 OK'
        )
        if n % 8 == 0:
            rate = dice.random() * 5000
            lines.append(
                f"(APIServer pid=3533) INFO 11-30 11:{n % 60:02d}:05 [loggers.py:259] Engine "
                f"{n % 16:03d}: Avg prompt throughput: {rate:.1f} tokens/s, Avg generation "
                f"throughput: {rate * 1.1:.1f} tokens/s, Running: {n % 32} reqs, Waiting: 0 reqs, "
                "GPU KV cache usage: 0.3%, Prefix cache hit rate: 0.0%"
            )
        if n % 4 == 0:
            local = n // 4 % GPUS
            lines.append(
                f"{host}:{7000 + local}:{7100 + local} [{local}] NCCL INFO AllGather: op {n:x} "
                f"sendbuff 0x7f3c{port:08x} recvbuff 0x7f3d{port:08x} count {port} datatype 9 op 0 "
                "root 0 comm 0x4b3e7190 [nranks=16] stream 0x3a4b"
            )
    return lines


def make(root: Path, size: int) -> list[Path]:
    """Write the logs of the drop, `size` bytes in all."""
    dice = random.Random(0)
    paths = []
    for number, host in enumerate(HOSTS):
        path = root / "logs" / f"{host}-serve.log"
        path.parent.mkdir(exist_ok=True)
        block = ("\n".join(serving(host, dice)) + "\n").encode()
        with path.open("wb") as stream:
            stream.write(("\n".join(start_up(host, number)) + "\n").encode())
            while stream.tell() < size // len(HOSTS):
                stream.write(block)
        paths.append(path)
    return paths


def seal(root: Path, paths: Sequence[Path]) -> None:
    """Make it a drop of ours: a manifest with the sha256 of every file, which verify checks."""
    digests = {}
    for path in paths:
        with path.open("rb") as stream:
            digests[str(path.relative_to(root))] = hashlib.file_digest(stream, "sha256").hexdigest()
    manifest = {
        "row": {"lane": "vllm", "arm": "v2", "profile": "p5en-x2", "cells": []},
        "stack": "2026-07",
        "state": "complete",
        "started": "2026-11-30T11:00:00+00:00",
        "plan": {"contract": CONTRACT, "contract_sha256": contract.digest(CONTRACT), "cells": {}},
        "git": {},
        "environment": {},
        "files": digests,
    }
    (root / "manifest.json").write_text(json.dumps(manifest))


class Cost(NamedTuple):
    """What a command took: wall and processor seconds."""

    wall: float
    cpu: float


def timed(command: Sequence[str]) -> Cost:
    """Run a command once; its output is read and dropped."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=False)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall, used)


def main() -> int:
    """Make, measure, print one JSON line, remove."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--sealed", action="store_true", help="with a manifest: sha256 of it all")
    parser.add_argument("--keep", action="store_true", help="leave the drop")
    args = parser.parse_args()
    if shutil.which("rg") is None:
        print("ripgrep is not installed: nothing to compare with", file=sys.stderr)
        return 2
    root = Path(tempfile.mkdtemp(prefix="bench-verify-", dir=args.folder))
    try:
        paths = make(root, int(args.gib * (1 << 30)))
        for path in paths:  # warm the page cache for both
            with path.open("rb", buffering=0) as stream:
                while stream.read(1 << 24):
                    pass
        if args.sealed:
            seal(root, paths)
        found = measure(root, paths)
        print(json.dumps(found))
        return 0 if found["evidence_met"] else 1
    finally:
        if not args.keep:
            shutil.rmtree(root)


def measure(root: Path, paths: Sequence[Path]) -> dict[str, object]:
    """Walls and processor time of both, best of three taken in turns, and the verifier's memory."""
    out = root.parent / f"{root.name}.json"
    given = [] if (root / "manifest.json").exists() else ["--lane", "vllm", "--arm", "v2"]
    verify = [sys.executable, "-m", "lanekit", "verify", str(root), *given, "--json", str(out)]
    rules = contract.bound(contract.load(CONTRACT))
    # The literals of the rules, not their patterns: ripgrep is faster on them, and the comparison
    # is with the best it can do.
    words = [word for x in dict.fromkeys(y.rule.literal for y in rules) for word in ("-e", x)]
    ripgrep = ["rg", "--no-config", "-a", "-n", "-F", *words, *map(str, paths)]
    ours = [timed(verify)]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of this one child so far
    theirs = [timed(ripgrep)]
    for _ in range(2):
        ours.append(timed(verify))
        theirs.append(timed(ripgrep))
    checks = json.loads(out.read_bytes())["checks"]
    out.unlink()
    # A drop without a plan pins no versions: that the hook's cannot be compared is no fault.
    bad = [x["id"] for x in checks if x["group"] == "transport" and x["severity"] == "required"
           and x["outcome"] != "met" and "the plan does not say" not in x["actual"]]  # fmt: skip
    wall, cpu = min(x.wall for x in ours), min(x.cpu for x in ours)
    rg_wall, rg_cpu = min(x.wall for x in theirs), min(x.cpu for x in theirs)
    return {
        "bytes": sum(path.stat().st_size for path in paths),
        "patterns": len(words) // 2,
        "verify_wall_s": round(wall, 2),
        "ripgrep_wall_s": round(rg_wall, 2),
        "wall_ratio": round(wall / rg_wall, 3),
        "verify_cpu_s": round(cpu, 2),
        "ripgrep_cpu_s": round(rg_cpu, 2),
        "peak_mib": round(peak / 1024, 1),
        "load": round(os.getloadavg()[0], 1),
        "evidence_met": not bad,
    }


if __name__ == "__main__":
    sys.exit(main())
