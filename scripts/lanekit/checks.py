"""The doctor's checks: each a pure function of one name with its entry in resources/doctor.toml.

A check returns what it saw, raises Failed with what is wrong, or Unknown with why nobody can say;
text of another form than its command's is Unknown too. Which checks apply and what an outcome
means for a run is data; lanekit.doctor puts both together.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec

from lanekit import capture, machine, toml
from lanekit.capture import Capture, Text
from lanekit.plan import Plan, options
from lanekit.spec import Profile

Policy = Literal["stops", "warns"]
# What each of the three reads to leave multicast alone; all of them, or one library tries it.
MULTICAST_OFF: Final = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
}  # fmt: skip
BOARD: Final = 8  # GPUs of one NVSwitch board (HGX H100, H200, B200)
HUGE_KB: Final = 2048 * 110  # of huge pages a core: bottlerocket-core-kit#141


class Failed(Exception):
    """The check was made, and the host does not pass."""


class Unknown(Exception):
    """The check could not be made."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A check as resources/doctor.toml declares it; the file says what each field means."""

    title: str
    reads: tuple[str, ...]
    when: tuple[str, ...]
    failed: Policy
    unknown: Policy
    remedy: str
    limit: int = 0
    floor: str = ""
    source: str = ""
    note: str = ""


class Floor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a contract needs; resources/doctor.toml says what each field means."""

    nccl: str = ""
    nvshmem: str = ""
    efa: str = ""
    libfabric: str = ""
    gdrcopy: str = ""
    params: bool = False
    env: dict[str, tuple[str, ...]] = {}


class Uniform(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """own: variables that rightly differ between ranks. tokens: what sets the token budget."""

    own: tuple[str, ...]
    tokens: tuple[str, ...]


class Rules(msgspec.Struct, frozen=True):
    """resources/doctor.toml."""

    probe: dict[str, capture.Probe]
    check: dict[str, Rule]
    floors: dict[str, Floor]
    uniform: Uniform


class Case(msgspec.Struct, frozen=True):
    """What is judged: hosts against a profile, and the plan of a lane and arm where one is given.

    ports: TCP ports that a run will use. reached: host -> `peer:port` -> what a connection attempt
    said. pinned: versions of images/pins.toml (efa, nccl, nvshmem), which every image holds.
    """

    profile: Profile
    hosts: tuple[Capture, ...]
    rules: Rules
    plan: Plan | None = None
    ports: tuple[int, ...] = ()
    reached: dict[str, dict[str, Text]] = {}
    pinned: dict[str, str] = {}


_SHELL: Final = re.compile(r"^(?:ba|da)?sh: (?:line )?\d+: ")  # before what it could not find
Check = Callable[[Rule, Case, Capture], str]
TABLE: Final[dict[str, Check]] = {}  # by the name of their rule


def _check(function: Check) -> Check:
    TABLE[function.__name__] = function
    return function


def rules() -> Rules:
    """The declared probes, checks and floors."""
    return toml.load(capture.RESOURCE, Rules)


def read(host: Capture, name: str, *, failing: bool = False) -> str:
    """A probe's text. failing: also where its command ended with an error. Raises Unknown: there is
    none, the tool is not there, it took too long or it failed."""
    text = host.texts.get(name)
    if text is None:
        raise Unknown(host.error or "not asked")
    if text.rc == capture.KILLED:
        raise Unknown("the command did not answer in time")
    if text.rc == capture.ABSENT or (text.rc and not failing):
        said = text.out.strip().splitlines()
        raise Unknown(_SHELL.sub("", said[-1])[:160] if said else f"exit status {text.rc}")
    return text.out


@_check
def gpus(rule: Rule, case: Case, host: Capture) -> str:
    """Count and kind."""
    found = machine.parse_gpus(read(host, "gpus"))
    saw = ", ".join(
        f"{sum(g.name == name for g in found)}x {name}" for name in sorted({g.name for g in found})
    )
    fits = sum(case.profile.gpu in gpu.name for gpu in found)
    if fits < case.profile.gpus:
        raise Failed(
            f"profile {case.profile.name} needs {case.profile.gpus} GPUs ({case.profile.gpu}) a "
            f"host; {fits} here{f' ({saw})' if saw else ''}"
        )
    return saw


@_check
def contexts(rule: Rule, case: Case, host: Capture) -> str:
    """Processes that hold a GPU, by PID, and memory nobody seems to hold."""
    held = machine.parse_contexts(read(host, "contexts"))
    if held:
        raise Failed("; ".join(map(_named, held)))
    used = [gpu.used_mib for gpu in machine.parse_gpus(read(host, "gpus"))]
    if any(mib > rule.limit for mib in used):
        raise Failed(f"{'/'.join(map(str, used))} MiB in use, and no process here holds them")
    return "none"


def _named(context: machine.Context) -> str:
    who = f"{context.command or 'not visible here'} of {context.user or 'nobody known'}"
    run = f", of the run {context.mark}" if context.mark else ""
    return f"pid {context.pid}: {who}, {context.mib} MiB{run}"


@_check
def driver(rule: Rule, case: Case, host: Capture) -> str:
    """The driver's version."""
    found = sorted({gpu.driver for gpu in machine.parse_gpus(read(host, "gpus"))})
    if not found:
        raise Unknown("no GPU, so no driver version")
    return _floor("driver", found[0], rule.floor)


@_check
def multicast(rule: Rule, case: Case, host: Capture) -> str:
    """NVLS off where the board is shared with another machine or its fabric is not up."""
    known = machine.parse_env(read(host, "env", failing=True)) | _plan_env(case)
    if all(known.get(name) == value for name, value in MULTICAST_OFF.items()):
        return "off in NCCL, PyTorch and NVSHMEM"
    count = len(machine.parse_gpus(read(host, "gpus")))
    if read(host, "virtual") == "hypervisor" and count < BOARD:
        raise Failed(f"a virtual machine with {count} GPUs of a board of {BOARD}, and it is on")
    states = sorted(set(machine.parse_fabric(read(host, "fabric"))))
    if all(state == "Completed" and status == "Success" for state, status in states):
        return "the NVLink fabric is up"
    if all(state == "N/A" for state, _ in states):
        return "no NVSwitch fabric"
    raise Failed(f"the NVLink fabric says {', '.join(f'{a}/{b}' for a, b in states)}, and it is on")


@_check
def nics(rule: Rule, case: Case, host: Capture) -> str:
    """Count and port states."""
    found = machine.efa(machine.parse_nics(read(host, "nics")))
    count = len({nic.name for nic in found})
    down = [f"{nic.name} is {nic.state}" for nic in found if not nic.state.endswith("ACTIVE")]
    if count != case.profile.nics or down:
        raise Failed("; ".join([f"{count} EFA NICs, the profile has {case.profile.nics}", *down]))
    return f"{count} EFA NICs, every port ACTIVE"


@_check
def fi_info(rule: Rule, case: Case, host: Capture) -> str:
    """Domains of the profile's provider and fabric."""
    fabric = case.profile.fabric
    found = machine.parse_fi_info(read(host, "fi_info", failing=True))
    count = len(found.get((fabric.provider, fabric.fabric), ()))
    if count != case.profile.nics:
        others = ", ".join(f"{len(domains)} {f}" for (_, f), domains in sorted(found.items()))
        raise Failed(f"{count} domains of {fabric.provider}/{fabric.fabric}; offers {others or 0}")
    said = f"{count} domains of {fabric.provider}/{fabric.fabric}"
    if least := floor(case).libfabric:
        found_version = re.search(r"^libfabric: (\S+)", read(host, "libfabric"), re.M)
        said += f", {_floor('libfabric', found_version[1] if found_version else '', least)}"
    return said


@_check
def efa(rule: Rule, case: Case, host: Capture) -> str:
    """The live kernel module."""
    return _floor("efa.ko", _loaded("efa", read(host, "efa")), floor(case).efa)


@_check
def installer(rule: Rule, case: Case, host: Capture) -> str:
    """The host's installer against the pin."""
    return _floor("installer", machine.parse_installer(read(host, "installer")), case.pinned["efa"])


@_check
def gdrcopy(rule: Rule, case: Case, host: Capture) -> str:
    """Both halves of GDRCopy; the library may be in the image alone, which pins it."""
    if case.plan and not floor(case).gdrcopy:
        return f"contract {case.plan.contract} needs none"
    module = _loaded("gdrdrv", read(host, "gdrdrv"))
    said = _floor("gdrdrv", module, rule.floor)
    libraries = re.findall(r"libgdrapi\.so\.(\d+\.\d+)", read(host, "libgdrapi"))
    if not libraries:
        return f"{said}; no libgdrapi outside the images"
    library = max(libraries, key=machine.version)
    skew = "" if machine.version(library) == machine.version(module)[:2] else " (they differ)"
    return f"{said}, {_floor('libgdrapi', library, rule.floor)}{skew}"


@_check
def params(rule: Rule, case: Case, host: Capture) -> str:
    """`RegistryDwords: "PeerMappingOverride=1;"`."""
    text = read(host, "params")
    if "RegistryDwords:" not in text:
        raise ValueError(text)
    if re.search(r'RegistryDwords: ".*PeerMappingOverride=(0x)?1\b', text):
        return "PeerMappingOverride=1"
    if floor(case).params:
        raise Failed("RegistryDwords does not set PeerMappingOverride=1")
    return "PeerMappingOverride is not set; only GIN from the GPU needs it"


@_check
def kernel(rule: Rule, case: Case, host: Capture) -> str:
    """Its version."""
    return _floor("kernel", read(host, "kernel"), rule.floor)


@_check
def hugepages(rule: Rule, case: Case, host: Capture) -> str:
    """Free huge pages against what the installer would reserve."""
    known = machine.parse_memory(read(host, "memory"))
    free, size = known["HugePages_Free"], known["Hugepagesize"]
    wanted = int(read(host, "cpus")) * HUGE_KB // size
    if free < wanted:
        raise Failed(f"{free} free of {size} kB, EFA's installer reserves {wanted}")
    return f"{free} free of {size} kB"


@_check
def memlock(rule: Rule, case: Case, host: Capture) -> str:
    """`ulimit -l`, in KiB or `unlimited`."""
    limit = read(host, "memlock").strip()
    if limit != "unlimited":
        raise Failed(f"limited to {int(limit)} KiB")
    return limit


@_check
def shm(rule: Rule, case: Case, host: Capture) -> str:
    """Its size."""
    size, _ = machine.parse_df(read(host, "shm"))
    return _enough(size, rule.limit, "MiB")


@_check
def disk(rule: Rule, case: Case, host: Capture) -> str:
    """Room where the drop goes."""
    _, room = machine.parse_df(read(host, "disk"))
    return _enough(room, rule.limit, "MiB free")


@_check
def ports(rule: Rule, case: Case, host: Capture) -> str:
    """Ports of the run that something listens on already."""
    taken = sorted(machine.parse_listening(read(host, "ports")) & set(case.ports))
    if taken:
        raise Failed(f"{', '.join(map(str, taken))} taken")
    return f"{', '.join(map(str, case.ports))} free"


@_check
def hosts(rule: Rule, case: Case, host: Capture) -> str:
    """As many hosts as the profile has, and each one answered."""
    silent = [f"{each.host}: {each.error}" for each in case.hosts if each.error]
    if silent:
        raise Unknown("; ".join(silent))
    if len(case.hosts) != case.profile.hosts:
        raise Unknown(f"{len(case.hosts)} of the profile's {case.profile.hosts} hosts asked")
    return ", ".join(each.host for each in case.hosts)


@_check
def reach(rule: Rule, case: Case, host: Capture) -> str:
    """TCP both ways: connected or refused is an answer, silence is a filter."""
    said = {
        f"{source} to {peer}": _reached(text)
        for source, tried in case.reached.items()
        for peer, text in tried.items()
    }
    if not said:
        raise Unknown("no port to try")
    shut = [f"{way}: {why}" for way, why in said.items() if why not in ("connects", "refuses")]
    if any(why.startswith("?") for why in said.values()):
        raise Unknown("; ".join(shut))
    if shut:
        raise Failed("; ".join(shut))
    return f"{len(said)} of {len(said)} ways answer"


def _reached(text: Text) -> str:
    for word, means in (
        ("refused", "refuses"), ("timed out", "no answer"), ("No route", "no route"),
        ("not known", "no such name"), ("unreachable", "unreachable"),
    ):  # fmt: skip
        if word in text.out:
            return means
    if text.rc in (0, capture.KILLED):
        return "connects" if text.rc == 0 else "no answer (filtered?)"
    return f"? {text.out.strip().splitlines()[-1][:120] if text.out.strip() else text.rc}"


@_check
def clock(rule: Rule, case: Case, host: Capture) -> str:
    """The spread that is certain, by the bounds of each host's offset."""
    bounds = [each.clock for each in case.hosts if not each.error]
    certain = max(low for low, _ in bounds) - min(high for _, high in bounds)
    if certain > rule.limit:
        raise Failed(f"at least {certain:.1f} s apart")
    possible = max(high for _, high in bounds) - min(low for low, _ in bounds)
    return f"at most {possible:.1f} s apart"


@_check
def alike(rule: Rule, case: Case, host: Capture) -> str:
    """Versions that hosts of one fleet share."""
    told = {}
    for each in case.hosts:
        found = machine.of(each)
        drivers = ", ".join(sorted({gpu.driver for gpu in found.gpus}))
        told[each.host] = {
            "driver": drivers, "kernel": found.kernel, "efa": found.efa, "gdrdrv": found.gdrdrv,
            "installer": found.efa_installer,
        }  # fmt: skip
    return _same(told, ())


@_check
def env(rule: Rule, case: Case, host: Capture) -> str:
    """The hosts' own variables, those left out that a rank rightly has of its own."""
    told = {each.host: machine.parse_env(read(each, "env", failing=True)) for each in case.hosts}
    return _same(told, case.rules.uniform.own)


@_check
def images(rule: Rule, case: Case, host: Capture) -> str:
    """The images of the plan, by id, on every host."""
    wanted = set(case.plan.containers.images.values()) if case.plan and case.plan.containers else ()
    held = {each.host: _images(read(each, "images")) for each in case.hosts}
    bad = [
        f"{image[:19]}: {', '.join(f'{ids[image][:19]} on {h}' for h, ids in held.items())}"
        for image in sorted(wanted)
        if (found := {ids[image] for ids in held.values()}) == {"none"} or len(found) > 1
    ]
    if bad:
        raise Failed("; ".join(bad))
    return f"{len(wanted)} on each of {len(case.hosts)} hosts"


def _images(text: str) -> dict[str, str]:
    """Image id by id and by name, from `docker image ls`; `none` for what is not there."""
    found = defaultdict(lambda: "none")
    for image, name in re.findall(r"^(sha256:[0-9a-f]{64}) (\S+)$", text, re.M):
        found[image] = found[name] = image
    return found


@_check
def tokens(rule: Rule, case: Case, host: Capture) -> str:
    """Variables and token budgets of the plan's services, rank by rank."""
    plan, uniform = _plan(case), case.rules.uniform
    groups: dict[str, dict[str, tuple[dict[str, str], tuple[str, ...]]]] = {}
    for service in plan.services:  # one service on several hosts is one program's ranks
        own = groups.setdefault(service.name, {})
        own[f"{service.name} on {service.host}"] = service.env, service.command
    for name, cell in plan.cells.items():
        own = groups.setdefault(name, {f"{name} on {plan.hosts[0].name}": (cell.env, cell.command)})
        own |= {f"{name} on {s.host}": (s.env, s.command) for s in cell.workers}
    told = [
        {where: env | {k: v for k, v in options(words).items() if k in uniform.tokens}
         for where, (env, words) in group.items()}
        for group in groups.values() if len(group) > 1
    ]  # fmt: skip
    said = [_same(group, uniform.own) for group in told]
    return "; ".join(dict.fromkeys(said)) or "one program starts every rank"


@_check
def floors(rule: Rule, case: Case, host: Capture) -> str:
    """Pinned or installed versions against what the contract's buffer and GIN type need."""
    plan, needs = _plan(case), floor(case)
    said = []
    for name, least in (("nccl", needs.nccl), ("nvshmem", needs.nvshmem)):
        held = [v for package, v in plan.pins.items() if package.startswith(f"nvidia-{name}-")]
        if not held and plan.environments["server"].name.startswith("image "):
            held = [case.pinned[name]] if name in case.pinned else []
        if least and not held:
            raise Unknown(f"the plan pins no {name}")
        said += [_floor(name, version, least) for version in held if least]
    for name, values in needs.env.items():
        if (value := _plan_env(case).get(name, "")) not in values:
            raise Failed(f"{name}={value or '(unset)'}; {plan.contract} needs {values[-1]}")
    return ", ".join(said) or f"contract {plan.contract} needs none"


def floor(case: Case) -> Floor:
    """What the contract of the plan needs; nothing without a plan."""
    name = case.plan.contract if case.plan else ""
    fits = [found for part, found in case.rules.floors.items() if part in name]
    merged: dict[str, object] = {}
    for found in fits:
        merged |= {k: v for k in found.__struct_fields__ if (v := getattr(found, k))}
    return msgspec.convert(merged, Floor)


def _plan(case: Case) -> Plan:
    if case.plan is None:
        raise Unknown("no lane and arm given")
    return case.plan


def _plan_env(case: Case) -> dict[str, str]:
    """The variables that the plan sets on its ranks."""
    found: dict[str, str] = {}
    if case.plan:
        for env_of in (*(s.env for s in case.plan.services),
                       *(c.env for c in case.plan.cells.values())):  # fmt: skip
            found |= env_of
    return found


def _floor(what: str, found: str, least: str) -> str:
    have = machine.version(found)
    if least and have < machine.version(least):
        raise Failed(f"{what} {found.strip()}, needs {least} or later")
    return f"{what} {found.strip()}"


def _loaded(module: str, text: str) -> str:
    if text.strip() == "none":
        raise Failed(f"{module} is not loaded")
    return text.strip()


def _enough(found: int, least: int, unit: str) -> str:
    if found < least:
        raise Failed(f"{found} {unit}, needs {least}")
    return f"{found} {unit}"


def _same(told: Mapping[str, Mapping[str, str]], own: tuple[str, ...]) -> str:
    names = sorted({name for has in told.values() for name in has} - set(own))
    differ = [name for name in names if len({has.get(name) for has in told.values()}) > 1]
    if differ:
        each = {n: ", ".join(f"{has.get(n, '(unset)')} on {where}" for where, has in told.items())
                for n in differ}  # fmt: skip
        raise Failed("; ".join(f"{name}: {said}" for name, said in each.items()))
    return f"{len(names)} names alike"
