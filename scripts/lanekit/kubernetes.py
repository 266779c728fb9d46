"""The `kubernetes` launcher: a plan's objects (lanekit.manifests) applied and watched with kubectl.

It needs kubectl with a context that may make ConfigMaps, Jobs, Services and LeaderWorkerSets or
MPIJobs, and the operators of the latter two. Nothing is started twice: when a pod ends, so does the
run.
"""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from lanekit import drop as drops
from lanekit import manifests, process
from lanekit.errors import HostLost, LaneError, ServerDied
from lanekit.manifest import Process
from lanekit.plan import CellPlan, Plan, Service
from lanekit.progress import Say
from lanekit.spec import WARM

FOLDER: Final = "kubernetes"
POLL_S: Final = 2.0
LAST_S: Final = 2.0  # for the last words of logs that are still on their way
DEAF_S: Final = 60.0  # the API may restart; longer and nobody knows what the ranks do
API_S: Final = 20


class Pod(msgspec.Struct, frozen=True):
    """What of a pod's state matters. number: of its host. trouble: why it cannot go on. begun:
    containers that have a log: kubectl follows no other, and forwards no port before."""

    name: str
    number: int
    phase: str
    trouble: str = ""
    begun: frozenset[str] = frozenset()


def pods(listed: Mapping[str, Any]) -> list[Pod]:
    """The pods of a run from `kubectl get pods --output=json`, by number."""
    return sorted(map(_read, listed.get("items", ())), key=lambda pod: pod.number)


_NUMBERS: Final = (
    "leaderworkerset.sigs.k8s.io/worker-index",
    "training.kubeflow.org/replica-index",  # 0 is the launcher where it works too
    manifests.INDEX,
)


def _read(item: Mapping[str, Any]) -> Pod:
    metadata, status = item.get("metadata", {}), item.get("status", {})
    known = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    number = next((int(known[key]) for key in _NUMBERS if known.get(key, "").isdigit()), 0)
    named, phase = metadata.get("name", "?"), status.get("phase", "?")
    begun = {each["name"] for each in _containers(status)
             if {"running", "terminated"} & each.get("state", {}).keys()}  # fmt: skip
    return Pod(named, number, phase, _trouble(status), frozenset(begun))


def _containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def _trouble(status: Mapping[str, Any]) -> str:
    """Why a pod cannot go on: an image that cannot be had, a container that ended, a lost node."""
    for each in _containers(status):
        waiting = each.get("state", {}).get("waiting", {})
        reason = waiting.get("reason", "")
        if re.search(r"Image|Config|CreateContainer|RunContainer", reason):
            return f"{each['name']}: {reason}: {waiting.get('message', '')}"
        ended = each.get("state", {}).get("terminated") or (
            each.get("lastState", {}).get("terminated") if each.get("restartCount") else None
        )
        if ended and (ended.get("exitCode") or each.get("restartCount")):
            why = process.exited(ended.get("exitCode", 0))
            return f"{each['name']} ended with {why} ({ended.get('reason', '')})"
    if status.get("phase") == "Failed":
        return f"{status.get('reason', 'Failed')}: {status.get('message', '')}"
    return ""


class Kubectl:
    """kubectl for one namespace, with patience for an API that restarts."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = {**os.environ, **env}  # the context is found as the user's own commands find it
        self.base = ["kubectl", f"--request-timeout={API_S}s"]

    def run(self, *words: str) -> str:
        """What a command says. Raises ConfigError or HostLost as process.asked does."""
        return process.asked([*self.base, *words], self.env, 6 * API_S, _deaf)


def _deaf(why: str) -> HostLost:
    return HostLost(
        f"the Kubernetes API: {why}",
        remedy="`kubectl version` must work; check the context, the rights, and that the "
        "LeaderWorkerSet or MPIJob operator is installed.",
    )


@contextlib.contextmanager
def launching(
    plan: Plan, drop: drops.Drop, env: Mapping[str, str], say: Say
) -> Iterator["KubernetesLauncher"]:
    """The objects of a plan, applied; removed at the end, also from a cluster that was slow.

    Raises:
        ConfigError: no kubectl.
        HostLost: the API refuses or does not answer.
    """
    folder = drop.path / FOLDER
    folder.mkdir()
    control = Kubectl(env)
    launcher = KubernetesLauncher(plan, drop, control)
    try:
        say(f"applying {manifests.of(plan)}")
        launcher.apply("plan", manifests.standing(plan))
        yield launcher
    finally:
        launcher.remove()


class KubernetesLauncher:
    """The services and cells of a plan in a cluster."""

    def __init__(self, plan: Plan, drop: drops.Drop, kubectl: Kubectl) -> None:
        self._plan, self._drop, self.kubectl = plan, drop, kubectl
        self._logs: list[Path] = []
        self._children: list[tuple[subprocess.Popen[bytes], Process]] = []
        self._wanted: list[tuple[int, str, Path]] = []  # logs nobody follows yet: host, container
        self._forward: subprocess.Popen[bytes] | None = None
        self._heard = self._asked = time.monotonic()

    def apply(self, what: str, objects: Sequence[manifests.Object]) -> None:
        """Write objects into the drop, then hand them to the cluster."""
        path = self._drop.path / FOLDER / f"{what}.yaml"
        path.write_text(yaml.safe_dump_all(objects, sort_keys=False))
        self.kubectl.run("apply", "--server-side", "-f", str(path))

    def start(self, service: Service, env: Mapping[str, str], log: Path) -> Process:
        """Follow a service that the applied objects start; its output goes to `log`."""
        host = next(h for h in self._plan.hosts if h.name == service.host)
        warm = self._drop.path / WARM / f"{host.name}-{WARM}.log"
        if self._plan.warm and (host.node_rank, WARM, warm) not in self._wanted:
            warm.parent.mkdir(exist_ok=True)
            self._wanted.append((host.node_rank, WARM, warm))
        self._logs.append(log)
        self._wanted.append((host.node_rank, service.name, log))
        return Process(0, time.time(), f"pod's {service.name}", host=host.name)

    def task(
        self, name: str, cell: CellPlan, env: Mapping[str, str], logs: Sequence[Path]
    ) -> "PodTask":
        """Start AIPerf beside the server, or a batch cell as a Job with a pod on every host."""
        if self._plan.driver == "batch":
            self.apply(f"cell-{name}", [manifests.job(self._plan, name)])
            self._wanted += [(number, name, log) for number, log in enumerate(logs)]
            return PodTask(self, self._plan, name, child=None, log=logs[0])
        leader = self.leader() or "?"
        words = ["exec", leader, "-c", "aiperf", "--", *cell.command]
        return PodTask(self, self._plan, name, child=self._spawn(f"{name} in {leader}", words,
                                                                 logs[0]), log=logs[0])  # fmt: skip

    def check(self) -> None:
        """Raise ServerDied when a pod cannot go on, HostLost when nobody can say for a minute."""
        if time.monotonic() - self._asked < POLL_S:
            return
        self._asked = time.monotonic()
        there = self.pods()
        self._follow(there)
        bad = [pod for pod in there if pod.trouble]
        if bad:
            hosts = {h.node_rank: h.name for h in self._plan.hosts}
            said = [f"{hosts.get(p.number, '?')} (pod {p.name}): {p.trouble}" for p in bad]
            raise ServerDied(
                "\n  then ".join(said),
                remedy=f"kubectl describe pod {bad[0].name}; logs: {self._drop.path}/logs.",
            )

    def logs(self) -> list[Path]:
        """The log of every service, the leader's first."""
        return self._logs

    def _follow(self, there: Sequence[Pod]) -> None:
        """Follow every log that has begun, and forward the server's port: again where the first
        question, which came before the server listened, ended it (kubectl 1.25 and later)."""
        named = {pod.number: pod for pod in there}
        for wanted in list(self._wanted):
            number, container, log = wanted
            pod = named.get(number)
            if pod and container in pod.begun:
                self._wanted.remove(wanted)
                words = ["logs", "--follow", pod.name, "-c", container]
                self._drop.started(self._spawn(f"logs of {pod.name}", words, log)[1])
        leader = named.get(0)
        serves = {service.name for service in self._plan.services}
        if (
            leader
            and serves & leader.begun
            and (self._forward is None or self._forward.poll() is not None)
        ):
            ports = f"{self._plan.port}:{self._plan.port}"
            place = self._drop.path / FOLDER / "port-forward.txt"
            words = ["port-forward", leader.name, ports]
            self._forward, started = self._spawn("kubectl port-forward", words, place)
            self._drop.started(started)

    def stop(self) -> None:
        """Take the logs' last words, then stop following; the objects are removed when the launcher
        is left."""
        if self._wanted or self._children:
            with contextlib.suppress(LaneError):
                self._follow(self.pods())
            time.sleep(LAST_S)
        self._wanted.clear()
        self._forward = None
        process.end([started for _, started in self._children], 2)
        for child, _ in self._children:
            child.wait()
        self._children.clear()

    def pods(self) -> list[Pod]:
        """The run's pods; an API that does not answer is asked again for a minute."""
        try:
            told = self.kubectl.run("get", "pods", self._ours, "-ojson")
        except HostLost:
            if time.monotonic() - self._heard > DEAF_S:
                raise
            return []
        self._heard = time.monotonic()
        return pods(msgspec.json.decode(told))

    def leader(self) -> str:
        """The name of the leader's pod; empty while there is none."""
        return next((pod.name for pod in self.pods() if pod.number == 0), "")

    def remove(self) -> None:
        """Remove every object; what cannot be removed stands in the drop, for the next run."""
        self.stop()
        try:
            delete(self.kubectl, self._drop.path)
        except LaneError as error:
            self._drop.manifest.left.append(f"objects {manifests.of(self._plan)}: {error}")

    @property
    def _ours(self) -> str:
        return f"-l{manifests.LABEL}={manifests.of(self._plan)}"

    def _spawn(
        self, what: str, words: Sequence[str], log: Path
    ) -> tuple[subprocess.Popen[bytes], Process]:
        with log.open("ab") as stream:
            pair = process.spawn(what, ["kubectl", *words], self.kubectl.env, stream)
        self._children.append(pair)
        return pair


class PodTask:
    """A cell in the cluster: AIPerf in the leader's pod, or a Job with a pod on every host."""

    def __init__(
        self,
        launcher: KubernetesLauncher,
        plan: Plan,
        name: str,
        *,
        child: tuple[subprocess.Popen[bytes], Process] | None,
        log: Path,
    ) -> None:
        """child: of AIPerf alone; the logs of a Job are followed by the launcher."""
        self._launcher, self._plan, self._name = launcher, plan, name
        self._child = child[0] if child else None
        self.processes, self.log = [child[1]] if child else [], log
        self._asked = 0.0

    @property
    def _cell(self) -> CellPlan:
        return self._plan.cells[self._name]

    def poll(self) -> int | None:
        """The exit status: AIPerf's, or what a batch program wrote down; None while it runs."""
        if self._child:
            code = self._child.poll()
            if code is not None:
                self._fetch(self._launcher.leader() or "?", "aiperf")
            return code
        if time.monotonic() - self._asked < POLL_S:
            return None
        self._asked = time.monotonic()
        leader = self._launcher.leader()
        if not leader:
            return None
        mark = manifests.mark(self._plan, self._cell)
        inside = ("exec", leader, "-c", self._name, "--")
        try:
            code = int(self._launcher.kubectl.run(*inside, "cat", mark))
        except (HostLost, ValueError):
            self._launcher.check()
            return None
        self._fetch(leader, self._name)
        self._launcher.kubectl.run(*inside, "rm", mark)
        return code

    def outcome(self, code: int) -> str:
        """An exit status in words."""
        return process.exited(code)

    def late(self) -> list[str]:
        """None by name: the cluster's own tools know its pods."""
        return []

    def end(self, grace_s: float) -> None:
        """End what follows it here, and its Job."""
        process.end(self.processes, grace_s)
        if self._plan.driver == "batch":
            with contextlib.suppress(LaneError):  # removed again when the launcher is left
                job = manifests.of(self._plan)
                self._launcher.kubectl.run("delete", "job", job, "--ignore-not-found")

    def _fetch(self, pod: str, container: str) -> None:
        folder = Path(self._plan.drop) / self._cell.artifacts
        self._launcher.kubectl.run("cp", f"{pod}:{folder}", str(folder), "-c", container)
        (folder / ".code").unlink(missing_ok=True)


def delete(kubectl: Kubectl, drop: Path) -> list[str]:
    """Remove the objects that a drop says it applied, and wait until they are gone; their files.
    Raises HostLost: the API refuses or does not answer."""
    files = sorted(map(str, (drop / FOLDER).glob("*.yaml")))
    for file in files:
        kubectl.run("delete", "-f", file, "--ignore-not-found", "--wait", f"--timeout={API_S * 3}s")
    return files


def end_the_dead(drop: Path) -> list[str]:
    """Remove the objects of a dead run; returns why some may still be there."""
    if not (drop / FOLDER).is_dir():
        return []
    try:
        delete(Kubectl(os.environ), drop)
    except LaneError as error:
        return [f"objects of the cluster: {error}"]
    return []
