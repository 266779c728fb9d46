"""The `compose` launcher: the same plan in containers on this host, through Docker Compose.

Every service of serve.yaml and every cell is a service of one Compose file, which stays in the
drop. Containers run as non-root on a read-only root, without capabilities, with limits, on the
host's loopback. Each bears the drop's path as a label and stands in the manifest by its id, so
that the next run removes exactly what a killed one left.
"""

import os
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from lanekit import images, paths, process
from lanekit.errors import ServerDied
from lanekit.manifest import Process
from lanekit.plan import Containers, Plan

if TYPE_CHECKING:
    from python_on_whales import Container, DockerClient

FILE: Final = "compose.yaml"
LABEL: Final = "lanes.drop"
GRACE_S: Final = 15
# Passed into a container by name, so that no value is written down: the rest of what a process
# inherits (PATH, LD_LIBRARY_PATH, HOME) means the host's files.
PASSED: Final = ("HF_TOKEN", "HTTPS_PROXY", "NO_PROXY")


def document(plan: Plan) -> dict[str, Any]:
    """The Compose file of a plan: its services, and its cells under the Compose profile `cell`."""
    held = _held(plan)
    services = {
        service.name: _service(plan, held.images["server"], service.command, service.env)
        for service in plan.services
    }
    loader = held.images.get("aiperf", held.images["server"])
    for name, cell in plan.cells.items():
        body = _service(plan, loader, cell.command, cell.env)
        folder = str(Path(plan.drop) / cell.artifacts)
        body["volumes"] += [{"type": "bind", "source": folder, "target": folder}]
        services[f"{plan.driver}-{name}"] = {**body, "profiles": ["cell"]}
    return {"name": held.project, "services": services}


def _held(plan: Plan) -> Containers:
    if plan.containers is None:
        raise AssertionError("a plan for the compose launcher holds its containers")
    return plan.containers


def _service(
    plan: Plan, image: str, command: Sequence[str], env: Mapping[str, str]
) -> dict[str, Any]:
    held = _held(plan)
    body: dict[str, Any] = {
        "image": image,
        "pull_policy": "never",
        # Compose reads $ as the start of a variable of its own.
        "command": [word.replace("$", "$$") for word in command],
        "environment": [*PASSED, *(f"{k}={v}" for k, v in _environment(env).items())],
        "network_mode": "host",
        "user": held.user,
        "read_only": True,
        # Not noexec: torch.compile builds and loads libraries there.
        "tmpfs": ["/tmp:exec,mode=1777"],
        "shm_size": held.memory // 4,
        "mem_limit": held.memory,
        "pids_limit": 8192,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "stop_grace_period": f"{GRACE_S}s",
        "restart": "no",
        "labels": {LABEL: plan.drop},
        "volumes": [
            {"type": "bind", "source": path, "target": path, "read_only": True}
            for path in _read(plan)
        ],
    }
    if held.gpus:
        body["deploy"] = {"resources": {"reservations": {"devices": [_ALL_GPUS]}}}
    if held.nics:
        # RDMA pins what it registers; the NICs are character devices of the host.
        body |= {"devices": ["/dev/infiniband:/dev/infiniband"], "ulimits": {"memlock": -1}}
    return body


_ALL_GPUS: Final = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    return {"HOME": "/tmp", **{k: v.replace("$", "$$") for k, v in env.items()}}


def _read(plan: Plan) -> list[str]:
    """What containers read of the host, at the same path: the lane's files and the model."""
    found = [str(paths.LANES / plan.lane)]
    return found + ([plan.model.path] if Path(plan.model.path).is_absolute() else [])


class ComposeLauncher:
    """Services and cells as containers of one Compose project."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._file = Path(plan.drop) / FILE
        self._file.write_text(yaml.safe_dump(document(plan), sort_keys=False))
        self._docker = _client(self._file)
        self._started: dict[str, ContainerTask] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
    ) -> Process:
        """Start one service of the Compose file; its output goes to `log`.

        Raises:
            ServerDied: Compose refuses to start it.
        """
        task = self._up(name, log)
        self._started[name] = task
        return task.process

    def task(
        self,
        what: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
    ) -> "ContainerTask":
        """Start the container of a cell."""
        driver, _, cell = what.partition(" ")
        if os.geteuid() == 0:
            user, _, group = _held(self._plan).user.partition(":")
            folder = Path(self._plan.drop) / self._plan.cells[cell].artifacts
            os.chown(folder, int(user), int(group))
        return self._up(f"{driver}-{cell}", log)

    def check(self) -> None:
        """Raise ServerDied, with the log's last words, when a container has ended."""
        for name, task in self._started.items():
            code = task.poll()
            if code is not None:
                raise ServerDied(
                    f"container {name} ended with {task.outcome(code)}; its log ends:\n"
                    + "\n".join(f"    {line}" for line in process.tail(task.log, 12)),
                    remedy=f"Read {task.log}; `make triage RESULTS={self._plan.drop}` may name "
                    "the cause.",
                )

    def logs(self) -> list[Path]:
        """The log of every service."""
        return [task.log for task in self._started.values()]

    def stop(self) -> None:
        """Stop and remove every container of the services."""
        for task in self._started.values():
            task.end(GRACE_S)
        self._started.clear()

    def _up(self, service: str, log: Path) -> "ContainerTask":
        from python_on_whales import DockerException  # noqa: PLC0415

        try:
            self._docker.compose.up([service], detach=True, quiet=True, dependencies=False)
            (container,) = self._docker.compose.ps([service], all=True)
        except (DockerException, ValueError) as error:
            raise ServerDied(
                f"Compose cannot start {service}: {str(error).strip().splitlines()[-1]}",
                remedy=f"Try it: docker compose -f {self._file} up {service}",
            ) from error
        return ContainerTask(self._docker, container, service, log)


class ContainerTask:
    """A container that was started, and the process that copies its output to a log."""

    def __init__(
        self, docker: "DockerClient", container: "Container", what: str, log: Path
    ) -> None:
        self._docker = docker
        self._container = container
        self.log = log
        self.process = Process(pid=0, started=time.time(), what=what, container=container.id)
        with log.open("ab") as stream:
            self._copying, _ = process.spawn(
                f"docker logs of {what}",
                [*docker.client_config.docker_cmd, "logs", "--follow", container.id],
                dict(os.environ),
                stream,
            )

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        state = self._container.state
        return None if state.running or state.status == "created" else state.exit_code

    def outcome(self, code: int) -> str:
        """An exit status in words; the kernel's out-of-memory killer looks like any SIGKILL."""
        if self._container.state.oom_killed:
            return f"exit status {code}: it passed its memory limit"
        return process.outcome(code if code < 128 else 128 - code)

    def end(self, grace_s: float) -> None:
        """Stop the container, wait for the rest of its log, and remove it with its volumes."""
        remove(self._docker, [self._container.id], grace_s, self._copied)

    def _copied(self) -> None:
        try:
            self._copying.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._copying.kill()
            self._copying.wait()


def remove(
    docker: "DockerClient", ids: Iterable[str], grace_s: float, before: Any = lambda: None
) -> list[str]:
    """Stop and remove containers by id; returns those that were there."""
    from python_on_whales.exceptions import NoSuchContainer  # noqa: PLC0415

    gone = []
    for identity in ids:
        try:
            docker.container.stop(identity, time=int(grace_s))
            before()
            docker.container.remove(identity, force=True, volumes=True)
        except NoSuchContainer:
            continue
        gone.append(identity)
    return gone


def end_the_dead(drop: Path, recorded: Iterable[Process]) -> list[str]:
    """Remove the containers of a killed run: those it recorded and those that bear its label.

    A kill between a container's start and its record leaves the label alone.
    """
    ids = [each.container for each in recorded if each.container]
    if not ids and not (drop / FILE).is_file():
        return []
    docker = images.docker()
    labelled = docker.container.list(all=True, filters=[("label", f"{LABEL}={drop}")])
    return remove(docker, dict.fromkeys([*ids, *(found.id for found in labelled)]), 3)


def _client(file: Path) -> "DockerClient":
    from python_on_whales import DockerClient  # noqa: PLC0415

    images.docker()  # says what is wrong where no engine answers
    return DockerClient(compose_files=[file])
