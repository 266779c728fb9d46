"""The plan of a run: frozen, printable, with nothing left implicit.

Everything that will be started stands in it: commands, variables, ports, pins, contract. `PLAN=1`
prints it and starts nothing; a drop keeps it. lanekit.planning computes it.
"""

import itertools
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

SCHEMA: Final = 1
FILES: Final = "files"  # of a drop: what the plan lays out for its programs
KEPT: Final = "/kept"  # in a container: what its host keeps
IMAGE_USER: Final = "10001:10001"  # the user that every image knows by name
KEYS: Final = "/lane/ssh"  # of containers: the key pair by which mpirun enters other hosts'
# A token is secret; a number of TOKENS, as in every cap of DeepEP V2, is a measure.
SECRET: Final = re.compile(r"TOKEN(?!S|IZER)|SECRET|PASSWORD|CREDENTIAL|KEY")
HIDDEN: Final = "(hidden)"

# The only variables a run takes from its surroundings: an ambient WORLD_SIZE once hung a
# single-node kernel test (awslabs/awsome-distributed-ai#1215), and HF_HUB_OFFLINE breaks AIPerf
# with a local tokenizer. Others come in through ENV=, and then stand in the plan.
INHERITED: Final = (
    "PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_TOKEN", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    # How a shared host forbids NVLink multicast (2026-11-30): dropping one could harm neighbours.
    "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS",
)  # fmt: skip


class Environment(msgspec.Struct, frozen=True):
    """A Python that something runs in. locks: file name -> sha256; none for one that is given."""

    name: str
    python: str
    locks: dict[str, str]


class Host(msgspec.Struct, frozen=True):
    """One host of the fleet. role: the leader serves and is swept, a worker lends its ranks.

    name: in logs, ranks and containers. address: what the other hosts reach it by. node_rank: its
    number; start_rank, ranks: its first global rank and how many it has. ssh: [user@]address[:port]
    of its SSH daemon, empty for this machine. interface: of the ranks' sockets, empty where they
    choose. models: a folder of the host that containers may read. cache: one that keeps what
    engines compile; empty where the launcher chooses.
    """

    name: str
    address: str
    role: Literal["leader", "worker"]
    node_rank: int
    start_rank: int
    ranks: int
    ssh: str = ""
    interface: str = ""
    models: str = ""
    cache: str = ""


class Service(msgspec.Struct, frozen=True):
    """One process of serve.yaml on one host. env: variables added to the inherited ones.
    environment: which of the plan's holds its program; the engine's unless it is a tool's."""

    name: str
    host: str
    command: tuple[str, ...]
    env: dict[str, str]
    environment: str = "server"


class CellPlan(msgspec.Struct, frozen=True):
    """One load point and the command that takes it on the leader.

    artifacts, log: its folder and what it prints, relative to the drop. env: variables added to
    the inherited ones. concurrency, requests, isl, osl: AIPerf's load; 0 for a batch program.
    workers: what the other hosts run of a batch program meanwhile.
    """

    command: tuple[str, ...]
    env: dict[str, str]
    artifacts: str
    log: str
    deadline_s: float
    concurrency: int = 0
    requests: int = 0
    isl: int = 0
    osl: int = 0
    workers: tuple[Service, ...] = ()


class ModelPlan(msgspec.Struct, frozen=True):
    """What is served: a directory or hub id, and how it came to be. shape: as spec.Model has it."""

    path: str
    served_name: str
    source: str
    dummy_weights: bool
    shape: dict[str, int] = {}


class Containers(msgspec.Struct, frozen=True):
    """What the compose launcher needs to know.

    project: the Compose project. images: environment -> image by digest. user: uid:gid, never
    root. memory: bytes a container on this machine may use; another's is not known. gpus, nics: of
    the host, passed in when not 0.
    """

    project: str
    images: dict[str, str]
    user: str
    memory: int
    gpus: int
    nics: int

    @property
    def home(self) -> str:
        """HOME of the engine's containers: a folder that its host keeps from run to run. DeepEP,
        DeepGEMM, Triton, FlashInfer and the CUDA driver keep there what they compile, by the hash
        of source and compiler, and so does the hub's client with models."""
        return f"{KEPT}/{self.user.partition(':')[0]}"

    @property
    def keeps(self) -> dict[str, str]:
        """Variables of the engine's containers; Inductor alone asks for its own folder, and dies
        where the image has no name for the user (torch 2.11.0)."""
        return {"HOME": self.home, "TORCHINDUCTOR_CACHE_DIR": f"{self.home}/inductor"}

    @property
    def kept(self) -> str:
        """The name of that folder on a host: one for each engine image."""
        digest = self.images["server"].rpartition("sha256:")[2]
        return f"lanes-kept-{re.sub(r'[^a-z0-9]', '-', digest.lower())[:12]}"


class GatePlan(msgspec.Struct, frozen=True):
    """The coherence gate. questions: digest of what is asked. reference: the arm whose answers
    these must equal, empty where there is none. drop, sha256: where those are and of that file;
    empty where none were found."""

    questions: str
    reference: str = ""
    drop: str = ""
    sha256: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen run. Names and units are as in lanekit.spec. patches: series -> its sha256. A field
    that comes later has a default: plans of older drops are read again.

    hosts: in the order of their ranks, the leader first. ports: of the leader, by name; `port` is
    the server's. extra_env: given by ENV=. lane_sha256: of all files that it follows from. files:
    name -> text, laid into the drop's `files/`. backends: addresses of the engines behind what
    AIPerf asks; empty where it asks the engine itself. warm: what every host runs before any rank
    starts.
    """

    schema: int = SCHEMA
    lane: str
    arm: str
    profile: str
    profile_why: str
    stack: str
    launcher: str
    engine: str
    driver: str
    hosts: tuple[Host, ...]
    hosts_why: str
    ranks: int
    comparable: bool
    contract: str
    contract_sha256: str
    model: ModelPlan
    url: str
    port: int
    ports: dict[str, int]
    ready_s: float
    environments: dict[str, Environment]
    services: tuple[Service, ...]
    cells: dict[str, CellPlan]
    pins: dict[str, str]
    patches: dict[str, str]
    inherited: tuple[str, ...]
    drop: str
    torch_index: str
    containers: Containers | None = None
    files: dict[str, str] = {}
    backends: tuple[str, ...] = ()
    prefill: tuple[int, ...] = ()
    gate: GatePlan | None = None
    extra_env: dict[str, str] = {}
    lane_sha256: str = ""
    warm: CellPlan | None = None

    @property
    def held(self) -> Containers:
        """Its containers; asked only of a plan that runs in some."""
        if self.containers is None:
            raise AssertionError("a plan for containers holds them")
        return self.containers


OPTION: Final = ("--", "-cc.")  # how the name of an option begins


def options(command: Iterable[str]) -> dict[str, str]:
    """`--name value`, `--name=value`, flags (True) and vLLM's `-cc.name=value` of a command, also
    inside a quoted word that is a command itself; a path with spaces is none."""
    words = [x for each in command for x in (shlex.split(each) if " -" in each else [each])]
    found = {}
    for word, after in itertools.zip_longest(words, words[1:], fillvalue="-"):
        name, equals, value = word.partition("=")
        if name.startswith(OPTION):
            found[name] = value if equals else "True" if after.startswith("-") else after
    return found


def folders(plan: Plan, host: Host) -> list[str]:
    """What a host must have itself: a folder of models, a model that is a path."""
    given = (host.models, plan.model.path if Path(plan.model.path).is_absolute() else "")
    return [path for path in given if path]


def public(value: Any) -> Any:
    """A plan, or a part of it, as plain data without what is secret: the values of variables that
    are named like secrets, and the user part of addresses."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        return {k: HIDDEN if is_secret(k) else public(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [public(each) for each in value]
    return re.sub(r"(://)[^/@\s]+@", rf"\1{HIDDEN}@", value) if isinstance(value, str) else value


def is_secret(name: str) -> bool:
    """Whether a variable is named like one that nobody should read."""
    return name.isupper() and SECRET.search(name) is not None


def render(plan: Plan) -> str:
    """The plan as JSON for people and programs alike."""
    return msgspec.json.format(msgspec.json.encode(public(plan)), indent=2).decode()


def inherited(plan: Plan) -> dict[str, str]:
    """The variables a run takes from its surroundings, by the names the plan lists."""
    return {name: os.environ[name] for name in plan.inherited if name in os.environ}
