"""What a host has, and which profile fits it. Parsers are pure functions over captured text.

A parser raises ValueError where the text is not of its command's form: then nobody can say.
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from lanekit import capture
from lanekit.capture import Capture, Text
from lanekit.plan import Host
from lanekit.spec import Profile

T = TypeVar("T")
Counters = dict[str, dict[str, int]]

EFA_VENDOR: Final = "0x1d0f"  # Amazon's PCI vendor id, as sysfs prints it
LISTENING: Final = "0A"  # the state of a listening socket in /proc/net/tcp


class Gpu(msgspec.Struct, frozen=True):
    """One GPU as `nvidia-smi` names it; memory in MiB."""

    name: str
    memory_mib: int
    driver: str
    used_mib: int = 0


class Context(msgspec.Struct, frozen=True):
    """A process that holds a GPU. ticks: its start in clock ticks since boot, 0 where /proc does
    not show it. mark: the drop of the run that started it. command: its first three words."""

    pid: int
    mib: int
    user: str
    ticks: int
    mark: str
    command: str


class Nic(msgspec.Struct, frozen=True):
    """One port of an RDMA device as sysfs shows it: PCI vendor, `4: ACTIVE`."""

    name: str
    vendor: str
    state: str


class Machine(msgspec.Struct, frozen=True):
    """Facts of one host, kept in a drop as host/<host>.json. Absent is empty, never invented.

    memory_mib: MiB. gpu_processes: PIDs. nics: EFA devices. fi_info: `fi_info --version`. efa,
    gdrdrv: versions of the loaded kernel modules. captured: what each command of
    resources/doctor.toml said, by its name there, so that every check can be made again.
    """

    host: str
    kernel: str
    cpus: int
    memory_mib: int
    gpus: tuple[Gpu, ...]
    gpu_processes: tuple[int, ...]
    nics: tuple[str, ...]
    gdrdrv: str
    fi_info: str
    efa: str = ""
    efa_installer: str = ""
    contexts: tuple[Context, ...] = ()
    captured: dict[str, Text] = {}


# What the choice of a profile and a plan need; the doctor asks for more.
BRIEF: Final = ("host", "kernel", "cpus", "memory", "gpus", "nics")


def read(folder: Path | None = None) -> Machine:
    """Ask this host what choosing and planning need; what cannot be asked stays empty."""
    known = capture.probes()
    return of(capture.capture("", {name: known[name] for name in BRIEF}, folder=folder))


def of(found: Capture) -> Machine:
    """The facts in a host's answers."""
    nobody: tuple[Context, ...] = ()
    unread: dict[str, int] = {}
    contexts = _or(found, "contexts", parse_contexts, nobody)
    return Machine(
        host=found.host or _or(found, "host", str, "") or "here",
        kernel=_or(found, "kernel", str, ""),
        cpus=_or(found, "cpus", int, 1),
        memory_mib=_or(found, "memory", parse_memory, unread).get("MemTotal", 0) >> 10,
        gpus=_or(found, "gpus", parse_gpus, ()),
        gpu_processes=tuple(context.pid for context in contexts),
        nics=tuple(dict.fromkeys(nic.name for nic in efa(_or(found, "nics", parse_nics, ())))),
        gdrdrv=_or(found, "gdrdrv", _module, ""),
        fi_info=_or(found, "libfabric", str, ""),
        efa=_or(found, "efa", _module, ""),
        efa_installer=_or(found, "installer", parse_installer, ""),
        contexts=contexts,
        captured=found.texts,
    )


def _or(found: Capture, name: str, parse: Callable[[str], T], otherwise: T) -> T:
    """What an answer says, or `otherwise` where there is none or it has another form."""
    text = found.texts.get(name)
    with contextlib.suppress(ValueError):
        return parse(text.out) if text and text.rc == 0 else otherwise
    return otherwise


def _module(text: str) -> str:
    return "" if text.strip() == "none" else text.strip()


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """GPUs from `nvidia-smi --query-gpu=name,memory.total,driver_version,memory.used`, in MiB;
    the last column may be missing. 'No devices were found' is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    if lines == ["No devices were found"]:
        return ()
    rows = [re.fullmatch(r"(.+?), (\d+), ([\d.]+)(?:, (\d+))?", line.strip()) for line in lines]
    return tuple(Gpu(m[1], int(m[2]), m[3], int(m[4] or 0)) for m in _all(rows, lines))


def parse_contexts(text: str) -> tuple[Context, ...]:
    """Processes that hold a GPU, from the probe `contexts`: six columns between tabs."""
    lines = [line for line in text.splitlines() if line.strip()]
    form = r"(\d+)\t(\d*)[^\t]*\t([^\t]*)\t(\d*)\t([^\t]*)\t([^\t]*)"
    return tuple(
        Context(int(m[1]), int(m[2] or 0), m[3], int(m[4] or 0), m[5], m[6].strip())
        for m in _all([re.fullmatch(form, line) for line in lines], lines)
    )


def counters(hosts: Sequence[Host]) -> dict[str, Counters]:
    """The byte counters of every host's RDMA devices, by host; none of a host that cannot say."""
    asked = {"counters": capture.probes()["counters"]}
    found = {host.name: capture.capture(host.name, asked, ssh=host.ssh) for host in hosts}
    return {name: _or(each, "counters", parse_counters, {}) for name, each in found.items()}


def parse_counters(text: str) -> Counters:
    """Device -> counter -> bytes, over its ports, from the probe `counters`."""
    lines = [line for line in text.splitlines() if line.strip()]
    total: Counters = {}
    for match in _all([re.fullmatch(r"(\S+) (\w+_bytes) (\d+)", line) for line in lines], lines):
        device = total.setdefault(match[1], {})
        device[match[2]] = device.get(match[2], 0) + int(match[3])
    return total


def parse_nics(text: str) -> tuple[Nic, ...]:
    """Ports of RDMA devices, from `NAME VENDOR STATE` lines read off sysfs."""
    lines = [line for line in text.splitlines() if line.strip()]
    rows = [re.fullmatch(r"(\S+) (0x[0-9a-f]{4}|-)(?: (\d: .*))?\s*", line) for line in lines]
    return tuple(Nic(m[1], m[2], m[3] or "unknown") for m in _all(rows, lines))


def efa(nics: Sequence[Nic]) -> tuple[Nic, ...]:
    """Those of Amazon."""
    return tuple(nic for nic in nics if nic.vendor == EFA_VENDOR)


def parse_memory(text: str) -> dict[str, int]:
    """`/proc/meminfo` by name: kB, or pages for the HugePages_ counts."""
    rows = re.findall(r"^(\w+): +(\d+)(?: kB)?$", text, re.M)
    if not rows:
        raise ValueError(text)
    return {name: int(value) for name, value in rows}


def parse_installer(text: str) -> str:
    """The version in `# EFA installer version: 1.50.0`."""
    match = re.search(r"EFA installer version: *(\d+(?:\.\d+)+)", text)
    if match is None:
        raise ValueError(text)
    return match[1]


def parse_fi_info(text: str) -> dict[tuple[str, str], set[str]]:
    """(provider, fabric) -> its domains, from `fi_info -p PROVIDER`; empty where it offers none
    (`fi_getinfo: -61 (No data available)`)."""
    found: dict[tuple[str, str], set[str]] = {}
    if re.match(r"fi_getinfo: -\d+", text):
        return found
    form = r"^provider: (\S+)\n +fabric: (\S+)\n +domain: (\S+)"
    for provider, fabric, domain in re.findall(form, text, re.M):
        found.setdefault((provider, fabric), set()).add(domain)
    if not found:
        raise ValueError(text)
    return found


def parse_fabric(text: str) -> list[tuple[str, str]]:
    """(state, status) of each GPU's NVLink fabric, from the Fabric section of `nvidia-smi -q`."""
    found = re.findall(r"State +: (.+)\n +Status +: (.+)", text)
    if not found:
        raise ValueError(text)
    return [(state.strip(), status.strip()) for state, status in found]


def parse_df(text: str) -> tuple[int, int]:
    """Size and room in MiB, from `df -Pk`."""
    match = re.search(r"^\S.* (\d+) +\d+ +(-?\d+) +\d+% /", text, re.M)
    if match is None:
        raise ValueError(text)
    return int(match[1]) >> 10, int(match[2]) >> 10


def parse_listening(text: str) -> set[int]:
    """TCP ports that something listens on, from /proc/net/tcp and tcp6."""
    if "local_address" not in text:
        raise ValueError(text)
    form = rf"^ *\d+: [0-9A-F]+:([0-9A-F]{{4}}) [0-9A-F]+:[0-9A-F]{{4}} {LISTENING} "
    return {int(port, 16) for port in re.findall(form, text, re.M)}


def parse_env(text: str) -> dict[str, str]:
    """Variables by name, from `env`; a value of several lines keeps its first."""
    return dict(re.findall(r"^([A-Z_][A-Z0-9_]*)=(.*)$", text, re.M))


def version(text: str) -> tuple[int, ...]:
    """A version to compare by: `3.3.0g` is (3, 3, 0), `6.8.0-1021-aws` (6, 8, 0)."""
    match = re.match(r"\D{0,4}(\d+(?:\.\d+)*)", text.strip())
    if match is None:
        raise ValueError(text)
    return tuple(int(part) for part in match[1].split("."))


def _all(matches: Sequence[re.Match[str] | None], lines: Sequence[str]) -> list[re.Match[str]]:
    """Every match; one line of another form means that the text is not what it should be."""
    for match, line in zip(matches, lines, strict=True):
        if match is None:
            raise ValueError(line)
    return [match for match in matches if match is not None]


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
