"""Lanes, arms, cells and profiles, as their files declare them. Strict: no unknown key passes."""

import datetime
import math
import re
from collections.abc import Iterable, Iterator
from typing import Final, Literal

import msgspec

from lanekit import paths, toml
from lanekit.errors import ConfigError, require_known


class Fabric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What carries traffic between ranks of a fleet.

    kind: `efa` between hosts, `nvlink` inside one host, `none` where one rank stands alone or ranks
    talk over plain sockets.
    provider, fabric: what libfabric must report (`efa`, `efa-direct`); empty without a NIC.
    """

    kind: Literal["efa", "nvlink", "none"]
    provider: str = ""
    fabric: str = ""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet: hosts, GPUs and NICs a host, fabric, ranks.

    gpus, nics: count on each host. ranks: over all hosts, one a GPU (one on a host without any).
    gpu: substring of the name that `nvidia-smi` prints. comparable: false marks rows that are
    never set beside published ones. why: where the numbers of this file come from.
    """

    name: str
    title: str
    hosts: int
    gpus: int
    nics: int
    ranks: int
    fabric: Fabric
    why: str
    gpu: str = ""
    instance: str = ""
    comparable: bool = True


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A load point: AIPerf's, or the arguments of a batch program.

    isl, osl: tokens in and out of every request, where they are not the workload's. deadline_s:
    AIPerf can wait for ever, so a cell ends by this many seconds.
    """

    concurrency: int = 0
    requests: int = 0
    isl: int = 0
    osl: int = 0
    args: tuple[str, ...] = ()
    deadline_s: float = 1800.0


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sweep does: `aiperf` loads a server, `batch` runs serve.yaml's program once a cell.

    sweep: the cells of a run, where neither the arm nor CELLS= says; every one when empty. isl,
    osl: synthetic tokens in and out of every AIPerf request.
    """

    cells: dict[str, Cell]
    sweep: tuple[str, ...] = ()
    driver: Literal["aiperf", "batch"] = "aiperf"
    isl: int = 0
    osl: int = 0
    seed: int = 0


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is served. source: a hub id, or `built:NAME` for a model the lane makes itself. shape:
    its MoE `layers`, `hidden` size and `topk`, from which follows what must cross a fabric."""

    source: str
    served_name: str
    dummy_weights: bool = False
    shape: dict[str, int] = {}


class KnownFailing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An arm that is known not to run. since: when it was last seen to fail. issue: upstream's
    address of it; empty where none is filed. profiles: where it fails; everywhere when empty."""

    since: datetime.date
    what: str
    issue: str = ""
    profiles: tuple[str, ...] = ()


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named variant of a lane.

    contracts: profile name -> contract name; its keys are the profiles the arm fits.
    args: appended to the engine's command. env: variable -> value, over those of the contract's
    transport (lanes/variables.toml) and the profile. cells: its sweep, where it is not the lane's.
    image, stack: what holds its engine, where it is not the profile's or the lane's. warmup: AIPerf
    requests before each cell that no figure counts. prefill: prompt lengths in tokens, each sent
    once before the first cell, for an engine that compiles a kernel for each. patches: our series
    (folders of patches/) that the engine must hold, besides those of lanes/variables.toml that its
    variables need. reference: the arm whose answers these must
    equal; empty for an arm that is one itself. services:
    those of serve.yaml that it starts; all when none is named. ipv4: a program of it takes hosts by
    literal IPv4 address alone. needs: what it runs with that no index which its recipe asks brings.
    """

    title: str
    contracts: dict[str, str]
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cells: tuple[str, ...] = ()
    image: str = ""
    stack: str = ""
    warmup: int = 0
    prefill: tuple[int, ...] = ()
    patches: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    known_failing: KnownFailing | None = None
    reference: str = ""
    ipv4: bool = False
    needs: str = ""


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What differs on a profile: the default arm, the model, extra arguments and variables.

    like: another profile's setting that this one begins with: its arguments come first, its other
    values count where this one says nothing. environment: the lock in locks/ that holds the engine;
    empty where an image holds it. image: the image of the graph that holds the engine; the lane's
    when empty. tools: programs beside the engine, name -> lock and image of that name; `router` is
    `${LANE_BIN_ROUTER}` and `${LANE_IMAGE_ROUTER}` in serve.yaml. backends: names of ports that
    engines listen on, on every host, where something stands between them and AIPerf. warm_s:
    seconds that the service `warm` of serve.yaml may take; 0 where nothing is warmed. It runs to
    its end on every host at once, before any rank starts, and fills caches of compiled kernels.
    """

    arm: str = ""
    like: str = ""
    model: Model | None = None
    environment: str = ""
    image: str = ""
    tools: dict[str, str] = {}
    backends: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    warm_s: float = 0.0


class Role(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a role changes where a fleet has more than one host; with one host there are no roles.

    args: what `${ROLE_ARGS}` stands for in serve.yaml, each filled in like a word there. command:
    the whole command instead of serve.yaml's. env: variables added. services: those of serve.yaml
    that such a host runs; all when none is named.
    """

    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: dict[str, str] = {}
    services: tuple[str, ...] = ()


class Lane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine under one workload. `profiles` holds what differs there; `arm` is the default.

    image: the image of the graph that holds the engine. ports: names of the free ports of the
    leader that the engine needs beside the server's; `rpc` is `${LANE_PORT_RPC}` in serve.yaml.
    reads: variable that serve.yaml, a profile, a role or an arm sets -> the component that reads it
    (images/guard/readers.toml). dropped: variable of the published recipe -> why it is not set.
    files: of the lane's folder, filled in like serve.yaml and laid into the drop's `files/`, which
    is `${LANE_FILES}`.
    """

    name: str
    title: str
    engine: str
    stack: str
    model: Model
    workload: Workload
    arms: dict[str, Arm]
    profiles: dict[str, Setting]
    image: str = ""
    ready_s: float = 1200.0
    ports: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    roles: dict[Literal["leader", "worker"], Role] = {}
    reads: dict[str, str] = {}
    dropped: dict[str, str] = {}


def profile(name: str) -> Profile:
    """The fleet `lanes/profiles/NAME.toml`. Raises ConfigError: no such profile (the known ones are
    listed) or a bad file."""
    known = profile_names()
    require_known(name, known, "profile", option="PROFILE")
    found = toml.load(paths.PROFILES / f"{name}.toml", Profile)
    if found.ranks != found.hosts * max(found.gpus, 1):
        raise ConfigError(
            f"profile {name}: ranks = {found.ranks}, but {found.hosts} hosts x {found.gpus} GPUs",
            remedy="One rank a GPU: make ranks = hosts x gpus (hosts alone without GPUs).",
        )
    return found


def profile_names() -> list[str]:
    """The known profiles, sorted."""
    return sorted(path.stem for path in paths.PROFILES.glob("*.toml"))


def lane(name: str) -> Lane:
    """The lane `lanes/NAME/lane.toml`. Raises ConfigError: no such lane (the known ones are listed)
    or a bad file."""
    require_known(name, lane_names(), "lane", option="LANE")
    return checked(toml.load(paths.LANES / name / "lane.toml", Lane))


def lane_names() -> list[str]:
    """The known lanes, sorted."""
    return sorted(path.parent.name for path in paths.LANES.glob("*/lane.toml"))


def settled(found: Lane) -> Lane:
    """A lane whose settings are whole: what `like` names is filled in. Raises ConfigError: a
    setting is like one that is not there or is itself like another."""
    plain = {name: each for name, each in found.profiles.items() if not each.like}
    for name, own in found.profiles.items():
        if own.like:
            require_known(own.like, plain, "setting", option=f"lane {found.name}, {name}, like")
    whole = {name: _over(plain.get(own.like), own) for name, own in found.profiles.items()}
    return msgspec.structs.replace(found, profiles=whole)


def _over(base: Setting | None, own: Setting) -> Setting:
    if base is None:
        return own
    either = {name: getattr(own, name) or getattr(base, name) for name in own.__struct_fields__}
    both = {"env": base.env | own.env, "tools": base.tools | own.tools}
    return Setting(**either | both | {"args": (*base.args, *own.args), "like": ""})


NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]*")
WARM: Final = "warm"  # of serve.yaml: what fills a host's caches before its ranks start


def checked(found: Lane) -> Lane:
    """A lane whose settings are whole, and whose names refer to what exists and can be folders of
    a drop."""
    found = settled(found)
    for name in (found.name, *found.arms, *found.workload.cells, *found.ports):
        if not NAME.fullmatch(name) or name == WARM:
            raise ConfigError(
                f"lane {found.name}: '{name}' cannot be a name",
                remedy=f"Use lower-case letters, digits, dots and dashes, and not '{WARM}'.",
            )
    for name, deadline in _deadlines(found):
        if not 0 < deadline < math.inf:
            raise ConfigError(
                f"lane {found.name}: {name} has no deadline: {deadline}",
                remedy="Give deadline_s or warm_s in seconds, above 0.",
            )
    for where, setting in found.profiles.items():
        require_known(where, profile_names(), "profile", option=f"lane {found.name}, profiles")
        require_known(setting.arm, found.arms, "arm", option=f"lane {found.name}, {where}")
        for port in setting.backends:
            require_known(port, found.ports, "port", option=f"lane {found.name}, backends")
    for arm in found.arms.values():
        _check_arm(found, arm)
    return found


def _deadlines(found: Lane) -> Iterator[tuple[str, float]]:
    """What is waited for, and how long."""
    for name, cell in found.workload.cells.items():
        yield f"cell {name}", cell.deadline_s
    for where, setting in found.profiles.items():
        if setting.warm_s:
            yield f"the warm-up on {where}", setting.warm_s


def _check_arm(found: Lane, arm: Arm) -> None:
    """Refuse an arm that names another arm, a cell or a profile that is not there."""
    where = f"lane {found.name}"
    if arm.reference:
        require_known(arm.reference, found.arms, "arm", option=f"{where}, reference")
        _require_fit(where, arm, found.arms[arm.reference])
    for cell in (*arm.cells, *found.workload.sweep):
        require_known(cell, found.workload.cells, "cell", option=f"{where}, cells")
    for profile in arm.contracts:
        require_known(profile, found.profiles, "profile", option=f"{where}, contracts")
    for profile in arm.known_failing.profiles if arm.known_failing else ():
        require_known(profile, arm.contracts, "profile", option=f"{where}, known_failing")


def _require_fit(where: str, arm: Arm, reference: Arm) -> None:
    """A reference answers to nobody, and runs wherever it is one."""
    lacking = sorted(set(arm.contracts) - set(reference.contracts))
    if lacking or reference.reference:
        what = f"does not run on {lacking[0]}" if lacking else "has a reference itself"
        raise ConfigError(
            f"{where}: reference {arm.reference} {what}",
            remedy="Name an arm that runs on every profile of this one and has no reference.",
        )


def arm(found: Lane, name: str, where: str) -> Arm:
    """The arm `name` of a lane on profile `where`. Raises ConfigError: no such arm, or it does not
    fit the profile."""
    require_known(name, found.arms, "arm", option="ARM")
    chosen = found.arms[name]
    if where not in chosen.contracts:
        fits = ", ".join(sorted(chosen.contracts))
        others = [n for n, a in found.arms.items() if where in a.contracts]
        raise ConfigError(
            f"arm {found.name}/{name} does not run on profile {where}; it runs on: {fits}",
            remedy=f"On {where} choose ARM={' or ARM='.join(others)}."
            if others
            else f"Choose PROFILE= one of: {fits}.",
        )
    return chosen


def image(found: Lane, arm: str, where: str) -> str:
    """The image of the graph that holds an arm's engine on a profile."""
    return found.arms[arm].image or found.profiles[where].image or found.image or found.name


def cells(found: Lane, arm: str, names: Iterable[str] = ()) -> dict[str, Cell]:
    """The chosen load points, in the order of the lane file: those named, else the arm's sweep,
    else the lane's, else all of them. Raises ConfigError: no cell of that name."""
    wanted = list(names)
    for name in wanted:
        require_known(name, found.workload.cells, "cell", option="CELLS")
    wanted = wanted or list(found.arms[arm].cells or found.workload.sweep)
    return {n: c for n, c in found.workload.cells.items() if not wanted or n in wanted}
