"""What this machine has, and which profile fits it. Reading (thin) apart from deciding (pure)."""

import platform
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from lanekit.spec import Profile

EFA_VENDOR: Final = "0x1d0f"  # Amazon's PCI vendor id, as sysfs prints it


class Gpu(msgspec.Struct, frozen=True):
    """One GPU as `nvidia-smi` names it; memory in MiB, contexts as (pid, MiB) it reports."""

    name: str
    memory_mib: int
    driver: str


class Machine(msgspec.Struct, frozen=True):
    """Facts of one host, kept in a drop as host/<host>.json. Absent is empty, never invented."""

    host: str
    kernel: str
    cpus: int
    memory_mib: int
    gpus: tuple[Gpu, ...]
    gpu_processes: tuple[int, ...]
    nics: tuple[str, ...]
    gdrdrv: str
    fi_info: str


def read() -> Machine:
    """Ask this host; a tool that is not there leaves its field empty."""
    return Machine(
        host=socket.gethostname(),
        kernel=platform.release(),
        cpus=len(psutil.Process().cpu_affinity()),
        memory_mib=psutil.virtual_memory().total >> 20,
        gpus=parse_gpus(_output("nvidia-smi", "--query-gpu=name,memory.total,driver_version")),
        gpu_processes=parse_pids(_output("nvidia-smi", "--query-compute-apps=pid")),
        nics=efa_nics(Path("/sys/class/infiniband")),
        gdrdrv=_text(Path("/sys/module/gdrdrv/version")),
        fi_info=_output("fi_info", "--version"),
    )


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """GPUs from `nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,...`."""
    rows = (line.split(", ") for line in text.splitlines() if line.count(", ") == 2)
    return tuple(Gpu(name, int(mib), driver) for name, mib, driver in rows if mib.isdigit())


def parse_pids(text: str) -> tuple[int, ...]:
    """PIDs that hold a GPU context, from `nvidia-smi --query-compute-apps=pid`."""
    return tuple(int(line) for line in text.splitlines() if line.strip().isdigit())


def efa_nics(root: Path) -> tuple[str, ...]:
    """RDMA devices below `root` whose PCI vendor is Amazon, sorted."""
    devices = sorted(root.glob("*")) if root.is_dir() else []
    return tuple(d.name for d in devices if _text(d / "device" / "vendor") == EFA_VENDOR)


def choose(machine: Machine, profiles: Sequence[Profile]) -> tuple[str, str]:
    """The best profile for a machine and why, as one sentence.

    EFA hosts first, then the largest one-host profile whose GPUs are here, else `cpu`.
    """
    gpus, nics = len(machine.gpus), len(machine.nics)
    name = machine.gpus[0].name if machine.gpus else ""
    saw = f"{gpus}x {name}" if gpus else "no NVIDIA GPU"
    if nics:
        for profile in profiles:
            if profile.nics == nics and profile.gpus == gpus and profile.gpu in name:
                return profile.name, f"{saw} and {nics} EFA NICs here"
    fits = [p for p in profiles if p.hosts == 1 and p.gpus <= gpus and p.gpu in name and p.gpus]
    if fits:
        best = max(fits, key=lambda profile: profile.gpus)
        return best.name, f"{saw} and no EFA fleet of a known profile here"
    reason = f"{saw} and {nics or 'no'} EFA NIC here"
    return "cpu", reason if not gpus else f"{reason}; no file in lanes/profiles fits these GPUs"


def _output(tool: str, *args: str) -> str:
    if shutil.which(tool) is None:
        return ""
    flags = ("--format=csv,noheader,nounits",) if tool == "nvidia-smi" else ()
    try:
        done = subprocess.run(
            (tool, *args, *flags), capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
