"""A plan as objects of a Kubernetes cluster. Pure: lanekit.kubernetes applies them.

A serving lane is one LeaderWorkerSet, a lane that mpirun starts an MPIJob, a batch program an
indexed Job a cell. Every command stands in a ConfigMap, one script a host and service, just as the
plan computed it; a pod runs the script of its own number. Names of pods are known beforehand, so
addresses are too. Nothing secret is written: a token comes from the cluster's own Secret.
"""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lanekit import paths, process, spec
from lanekit.errors import ConfigError
from lanekit.plan import KEPT, KEYS, CellPlan, Host, Plan, Service, folders, is_secret
from lanekit.spec import WARM

LABEL: Final = "lanes.run"
INDEX: Final = "batch.kubernetes.io/job-completion-index"
SECRET: Final = "lanes"  # of the cluster, not ours: HF_TOKEN and what else a lane must not write
SHARE: Final = "/lane/run"
EFA: Final = "vpc.amazonaws.com/efa"
GPU: Final = "nvidia.com/gpu"
HUGE: Final = "5120Mi"  # EFA's bounce buffers: 2560 pages of 2 MiB, as AWS's own examples ask for

CONFIG_MAP: Final = 1 << 20  # bytes that a ConfigMap may hold, by Kubernetes' own documentation

Object = dict[str, Any]


def name(drop: str, lane: str) -> str:
    """The name of a run's objects, from its drop: short, since pods add to it."""
    stamp = re.sub(r"[^a-z0-9]", "", Path(drop).name.partition("-")[0].lower())
    return f"lane-{lane}-{stamp}"


def kind(driver: str, command: Sequence[str]) -> str:
    """What a run becomes: mpirun's lanes an MPIJob, batch programs a Job, servers a
    LeaderWorkerSet. command: the leader's first one."""
    if command and Path(command[0]).name == "mpirun":
        return "MPIJob"
    return "Job" if driver == "batch" else "LeaderWorkerSet"


def kind_of(plan: Plan) -> str:
    """What a plan becomes; its first service is the leader's."""
    return kind(plan.driver, next((service.command for service in plan.services), ()))


def addressed(fleet: Sequence[Host], named: str, what: str) -> tuple[Host, ...]:
    """Hosts under the names that the cluster will give their pods: what their ranks print, too."""
    addresses = {
        "LeaderWorkerSet": lambda n: f"{named}-0-{n}" if n else f"{named}-0",
        "Job": lambda n: f"{named}-{n}",
        "MPIJob": lambda n: f"{named}-worker-{n - 1}" if n else f"{named}-launcher",
    }
    pods = [addresses[what](host.node_rank) for host in fleet]
    return tuple(
        msgspec.structs.replace(host, name=pod, address=f"{pod}.{named}", ssh="")
        for host, pod in zip(fleet, pods, strict=True)
    )


def require(plan: Plan) -> None:
    """Refuse a plan that no cluster could run. Raises ConfigError: the model is one that only this
    machine has, or a ConfigMap cannot hold it."""
    if plan.model.source.startswith("built:"):
        raise ConfigError(
            f"model {plan.model.source} is made on this machine, where no pod sees it",
            remedy="MODEL= a hub id, or a folder that every node has.",
        )
    _scripts(plan)


def standing(plan: Plan) -> list[Object]:
    """The objects that stand while a run goes: scripts, files, and what starts the services."""
    made = {"Job": _network, "MPIJob": _mpi, "LeaderWorkerSet": _lws}[kind_of(plan)]
    texts = {key: path.read_text() for key, path in _lane_files(plan).items()}
    files = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(plan, "-files"),
             "data": texts}  # fmt: skip
    return [_scripts(plan), files, made(plan)]


def job(plan: Plan, cell: str) -> Object:
    """The indexed Job of a batch cell: a pod a host, none of which is started twice."""
    run, hosts = of(plan), len(plan.hosts)
    program = Service(cell, plan.hosts[0].name, plan.cells[cell].command, plan.cells[cell].env)
    pod = _pod(plan, [program], index="JOB_COMPLETION_INDEX")
    pod["spec"] |= {"restartPolicy": "Never", "subdomain": run}
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(plan),
        "spec": {
            "completionMode": "Indexed", "completions": hosts, "parallelism": hosts,
            "backoffLimit": 0, "template": pod,
        },
    }  # fmt: skip


def of(plan: Plan) -> str:
    """The name of a plan's objects."""
    return name(plan.drop, plan.lane)


def _metadata(plan: Plan, suffix: str = "") -> Object:
    digest = hashlib.sha256(plan.drop.encode()).hexdigest()[:12]
    return {"name": of(plan) + suffix, "labels": {LABEL: of(plan), "lanes.drop": digest}}


def _scripts(plan: Plan) -> Object:
    """SERVICE-N.sh: the command of a service, or of a cell, on host N, with its variables."""
    number = {host.name: host.node_rank for host in plan.hosts}
    keeps = plan.held.keeps
    cells = plan.cells if plan.driver == "batch" else {}
    data = {f"{s.name}-{number[s.host]}.sh": script(s.command, keeps | s.env)
            for s in plan.services}  # fmt: skip
    for name, held in {**cells, **({WARM: plan.warm} if plan.warm else {})}.items():
        wait = mark(plan, held) if name in cells else ""
        data[f"{name}-0.sh"] = script(held.command, keeps | held.env, wait)
        data |= {f"{name}-{number[w.host]}.sh": script(w.command, keeps | w.env)
                 for w in held.workers}  # fmt: skip
    size = sum(len(name) + len(text.encode()) for name, text in data.items())
    if size > CONFIG_MAP:
        raise ConfigError(
            f"the commands of {len(plan.hosts)} hosts take {size} bytes, a ConfigMap holds"
            f" {CONFIG_MAP}",
            remedy="Take fewer hosts, or LAUNCHER=slurm.",
        )
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(plan), "data": data}


def script(command: Sequence[str], env: Mapping[str, str], wait: str = "") -> str:
    """A command with its variables, as sh reads it; what is secret comes from the cluster.

    wait: a file that says how it ended, and that it waits until somebody took what it left: a pod
    that has ended gives nothing out.
    """
    lines = [f"export {k}={shlex.quote(v)}" for k, v in env.items() if not is_secret(k)]
    lines += [f"mkdir -p {shlex.quote(env['HOME'])}"] if "HOME" in env else []
    run, at = shlex.join(command), shlex.quote(wait)
    if not wait:
        return "\n".join(["#!/bin/sh", *lines, f"exec {run}", ""])
    made = f"mkdir -p {shlex.quote(str(Path(wait).parent))}"
    held_up = f"while [ -e {at} ]; do sleep 1; done"
    ends = [made, run, "code=$?", f"echo $code >{at}", held_up, "exit $code"]
    return "\n".join(["#!/bin/sh", *lines, *ends, ""])


def mark(plan: Plan, cell: CellPlan) -> str:
    """Where a batch cell's leader writes down how it ended."""
    return str(Path(plan.drop) / cell.artifacts / ".code")


def _lane_files(plan: Plan) -> dict[str, Path]:
    """The lane's own files by the key they have in a ConfigMap, which knows no folders."""
    home = paths.LANES / plan.lane
    files = [p for p in sorted(home.rglob("*")) if p.is_file() and "__pycache__" not in p.parts]
    return {str(p.relative_to(home)).replace("/", ".."): p for p in files}


def _network(plan: Plan) -> Object:
    """The headless service that gives a Job's pods their names before they are ready."""
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": _metadata(plan),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True,
                 "selector": {LABEL: of(plan)}},
    }  # fmt: skip


def _on(plan: Plan, host: Host) -> list[Service]:
    """What a host runs."""
    return [service for service in plan.services if service.host == host.name]


def _lws(plan: Plan) -> Object:
    leader, worker = _on(plan, plan.hosts[0]), _on(plan, plan.hosts[-1])
    template: Object = {
        "size": len(plan.hosts),
        # Never anew by itself: a rank that comes back would be measured as if nothing had been.
        "restartPolicy": "None",
        "leaderTemplate": _pod(plan, leader, index="LWS_WORKER_INDEX", load=True),
        "workerTemplate": _pod(plan, worker, index="LWS_WORKER_INDEX"),
    }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet",
        "metadata": _metadata(plan),
        "spec": {
            "replicas": 1, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate": template,
            "networkConfig": {"subdomainPolicy": "Shared"},
        },
    }  # fmt: skip


def _mpi(plan: Plan) -> Object:
    """mpirun's ranks are let into every worker by the key pair that the operator makes."""
    leader, worker = _on(plan, plan.hosts[0]), _on(plan, plan.hosts[-1])
    workers = _pod(plan, worker, index="")
    for container in workers["spec"]["containers"]:  # its program is the same on all of them
        container["command"][2] = f"exec /bin/sh {SHARE}/{container['name']}-1.sh"
    launcher = _pod(plan, leader, index="", load=True)
    replicas = {"Launcher": (1, launcher), "Worker": (len(plan.hosts) - 1, workers)}
    return {
        "apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": _metadata(plan),
        "spec": {
            "slotsPerWorker": plan.hosts[0].ranks, "runLauncherAsWorker": True,
            "mpiImplementation": "OpenMPI", "sshAuthMountPath": KEYS,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": {"cleanPodPolicy": "All", "backoffLimit": 0},
            "mpiReplicaSpecs": {
                role: {"replicas": count, "restartPolicy": "Never", "template": pod}
                for role, (count, pod) in replicas.items() if count
            },
        },
    }  # fmt: skip


def _pod(plan: Plan, services: Sequence[Service], *, index: str, load: bool = False) -> Object:
    """A pod of one host. index: the variable that holds its number, empty for the first. load: a
    container beside the server, in which AIPerf is run."""
    profile, images = spec.profile(plan.profile), plan.held.images
    containers = [_container(plan, profile, s, images[s.environment], index) for s in services]
    if load and "aiperf" in images:
        containers.append(_loader(plan, images["aiperf"]))
    uid, _, gid = plan.held.user.partition(":")
    body: Object = {
        "containers": containers,
        "volumes": _volumes(plan),
        "securityContext": {"runAsNonRoot": True, "runAsUser": int(uid), "runAsGroup": int(gid),
                            "fsGroup": int(gid)},
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(process.GRACE_S),
        "affinity": _affinity(plan),
    }  # fmt: skip
    if plan.warm:
        # Ranks wait for each other when they meet, and no rank starts before its host is warm.
        first = Service(WARM, "", (), plan.warm.env)
        warm = _container(plan, profile, first, images["server"], index)
        limit = f"{plan.warm.deadline_s:.0f}"
        body["initContainers"] = [{**warm, "command": ["timeout", limit, *warm["command"]]}]
    if profile.instance:
        body["nodeSelector"] = {"node.kubernetes.io/instance-type": profile.instance}
    if profile.gpus:
        body["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": {"labels": _metadata(plan)["labels"]}, "spec": body}


def _container(
    plan: Plan, profile: spec.Profile, service: Service, image: str, index: str
) -> Object:
    number = f"${{{index}:-0}}" if index else "0"
    asked: Object = (
        {"cpu": "8", "memory": "64Gi"} if profile.gpus else {"cpu": "1", "memory": "4Gi"}
    )
    limits: Object = {GPU: profile.gpus} if profile.gpus else {}
    if profile.nics:
        limits |= {EFA: profile.nics, "hugepages-2Mi": HUGE}
    return {
        "name": service.name,
        "image": image,
        "command": ["/bin/sh", "-c", f"exec /bin/sh {SHARE}/{service.name}-{number}.sh"],
        "env": _secrets(service.env),
        "resources": {"requests": {**asked, **limits}, "limits": limits},
        "securityContext": _LOCKED,
        "volumeMounts": [
            {"name": "run", "mountPath": SHARE, "readOnly": True},
            {"name": "files", "mountPath": str(paths.LANES / plan.lane), "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "kept", "mountPath": KEPT},
            {"name": "drop", "mountPath": plan.drop},
            *_model_mounts(plan),
        ],
    }  # fmt: skip


_LOCKED: Final[Object] = {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip


def _loader(plan: Plan, image: str) -> Object:
    """Where AIPerf is run, cell by cell, on the leader's loopback."""
    mounts: list[Object] = [{"name": "tmp", "mountPath": "/tmp"},
                            {"name": "drop", "mountPath": plan.drop},
                            *_model_mounts(plan)]  # fmt: skip
    given = {"HOME": "/tmp", **plan.extra_env}
    # Kubernetes fills in $(NAME) in a value, and reads $$ as one $.
    env: list[Object] = [{"name": k, "value": v.replace("$", "$$")}
                         for k, v in given.items() if not is_secret(k)]  # fmt: skip
    return {
        "name": "aiperf", "image": image, "command": ["sleep", "infinity"],
        "env": [*env, *_secrets(given)],
        "resources": {"requests": {"cpu": "2", "memory": "4Gi"}},
        "securityContext": _LOCKED, "volumeMounts": mounts,
    }  # fmt: skip


def _secrets(env: Mapping[str, str]) -> list[Object]:
    """Variables that the cluster fills in, where it has the Secret: each once, or it refuses."""
    return [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": key, "optional": True}}}
        for key in dict.fromkeys(("HF_TOKEN", *filter(is_secret, env)))
    ]


def _volumes(plan: Plan) -> list[Object]:
    items = [{"key": key, "path": key.replace("..", "/")} for key in _lane_files(plan)]
    memory: Object = {"emptyDir": {"medium": "Memory"}}
    cache = plan.hosts[0].cache
    return [
        {"name": "run", "configMap": {"name": of(plan)}},
        {"name": "files", "configMap": {"name": f"{of(plan)}-files", "items": items}},
        {"name": "shm", **memory},
        {"name": "tmp", "emptyDir": {}},
        {"name": "kept", **({"hostPath": {"path": cache, "type": "Directory"}} if cache
                            else {"emptyDir": {}})},
        {"name": "drop", "emptyDir": {}},
        *({"name": f"models{n}", "hostPath": {"path": path, "type": "Directory"}}
          for n, path in enumerate(folders(plan, plan.hosts[0]))),
    ]  # fmt: skip


def _model_mounts(plan: Plan) -> list[Object]:
    """Folders of the nodes, where a container reads them."""
    return [{"name": f"models{n}", "mountPath": path, "readOnly": True}
            for n, path in enumerate(folders(plan, plan.hosts[0]))]  # fmt: skip


def _affinity(plan: Plan) -> Object:
    """A node each, all in one zone: EFA does not leave it."""
    ours = {"labelSelector": {"matchLabels": {LABEL: of(plan)}}}
    zone = {**ours, "topologyKey": "topology.kubernetes.io/zone"}
    return {
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {**ours, "topologyKey": "kubernetes.io/hostname"}]},
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 100, "podAffinityTerm": zone}]},
    }  # fmt: skip
