"""The `compose` launcher: the plan in containers, one Compose file and one Docker engine a host.

Every service of serve.yaml and every cell is a service of its host's Compose file, which stays in
the drop. Containers run as non-root on a read-only root, without capabilities, with limits, on the
host's network under the host's name in the plan. Each bears the drop's path as a label and stands
in the manifest by its id, so that the next run removes exactly what a killed one left.

A host that is not this machine is reached through SSH alone: what its containers read is copied
into volumes of their own, and what a cell leaves there is copied back before they are removed.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from lanekit import capture, fleet, hosts, images, manifests, paths, process, ssh
from lanekit import drop as drops
from lanekit.errors import HostLost, LaneError, ServerDied
from lanekit.manifest import Manifest, Process
from lanekit.plan import (
    FILES,
    IMAGE_USER,
    KEPT,
    KEYS,
    CellPlan,
    Containers,
    Host,
    Plan,
    Service,
    folders,
    is_secret,
)
from lanekit.progress import Say
from lanekit.spec import WARM

if TYPE_CHECKING:
    from python_on_whales import Container, DockerClient

FOLDER: Final = "compose"
LABEL: Final = "lanes.drop"
GRACE_S: Final = 15
TOGETHER_S: Final = 1.0  # a rank that dies takes others along; wait so long to see who was first


def document(plan: Plan, host: Host) -> dict[str, Any]:
    """The Compose file of a host: its services, and under the Compose profile `cell` what runs to
    its end."""
    held = plan.held
    services = {
        service.name: _service(plan, host, held.images[service.environment], service)
        for service in plan.services
        if service.host == host.name
    }
    if _keyed(plan):
        services = {name: {**body, **_let_in(body)} for name, body in services.items()}
    for name, cell in _ending(plan):
        loader = held.images.get("aiperf", "") if name != WARM else ""
        led = Service(name, plan.hosts[0].name, cell.command, cell.env)
        for image, service in ((loader, led), *(("", worker) for worker in cell.workers)):
            if service.host == host.name:
                body = _service(plan, host, image or held.images["server"], service)
                body["volumes"] += [_artifacts(plan, host, cell)] if cell.artifacts else []
                services[_called(plan, name)] = {**body, "profiles": ["cell"]}
    volumes = {} if host.cache else {"kept": {"name": held.kept, "external": True}}
    return {"name": held.project, "services": services, "volumes": volumes}


def _ending(plan: Plan) -> Iterator[tuple[str, CellPlan]]:
    """What runs to its end: the warm-up, and every cell."""
    if plan.warm:
        yield WARM, plan.warm
    yield from plan.cells.items()


def _called(plan: Plan, name: str) -> str:
    return name if name == WARM else f"{plan.driver}-{name}"


def _service(plan: Plan, host: Host, image: str, service: Service) -> dict[str, Any]:
    engine = image == plan.held.images["server"]
    held = _engine(plan) if engine else plan.held
    home = held.keeps if engine else {"HOME": "/tmp"}
    body: dict[str, Any] = {
        "image": image,
        "pull_policy": "never",
        # Compose reads $ as the start of a variable of its own.
        "command": [word.replace("$", "$$") for word in service.command],
        "environment": _environment({**home, **service.env}),
        "network_mode": "host",
        "hostname": host.name,
        "user": held.user,
        "read_only": True,
        # Not noexec: torch.compile builds and loads libraries there.
        "tmpfs": ["/tmp:exec,mode=1777"],
        "pids_limit": 8192,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "stop_grace_period": f"{GRACE_S}s",
        "restart": "no",
        "labels": {LABEL: plan.drop},
        "volumes": [*_inputs(plan, host), *([_kept(host)] if engine else [])],
    }
    if not host.ssh:
        body |= {"shm_size": held.memory // 4, "mem_limit": held.memory}
    else:
        # Its memory is not this machine's. A tmpfs of no size ends at half of its own host's,
        # where Docker's /dev/shm ends at 64 MiB (seen on 23 GiB: 12 GiB, 2026-12-01).
        body["tmpfs"] = [*body["tmpfs"], "/dev/shm:mode=1777"]
    if len(plan.hosts) > 1:
        numbers = [each for each in plan.hosts if hosts.is_number(each.address)]
        body["extra_hosts"] = [f"{each.name}={each.address}" for each in numbers]
    if held.gpus:
        body["deploy"] = {"resources": {"reservations": {"devices": [_ALL_GPUS]}}}
    if held.nics:
        # RDMA pins what it registers; the NICs are character devices of the host.
        body |= {"devices": ["/dev/infiniband:/dev/infiniband"], "ulimits": {"memlock": -1}}
    return body


def _keyed(plan: Plan) -> bool:
    """Whether mpirun on the leader starts the ranks of other hosts, through SSH."""
    return len(plan.hosts) > 1 and manifests.kind_of(plan) == "MPIJob"


def _engine(plan: Plan) -> Containers:
    """What the engine's containers get: SSH lets in nobody without a name, so what mpirun enters
    runs as the user that the image knows."""
    return msgspec.structs.replace(plan.held, user=IMAGE_USER) if _keyed(plan) else plan.held


def _let_in(body: Mapping[str, Any]) -> dict[str, Any]:
    """What changes of a service that waits for the run's key pair, which it gets into its memory
    when it runs."""
    uid, _, gid = IMAGE_USER.partition(":")
    wait = f'until [ -e {KEYS}/known_hosts ]; do sleep 0.1; done; exec "$$@"'
    return {
        "command": ["sh", "-c", wait, "lane", *body["command"]],
        "tmpfs": [*body["tmpfs"], f"{KEYS}:mode=700,uid={uid},gid={gid}"],
    }


_ALL_GPUS: Final = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def _environment(env: Mapping[str, str]) -> list[str]:
    """Variables with their values; what is secret by its name alone, filled in by Compose from its
    own environment when it starts the container."""
    open_ = {k: v for k, v in env.items() if not is_secret(k)}
    return [*dict.fromkeys((*fleet.PASSED, *(k for k in env if is_secret(k)))),
            *(f"{k}={v.replace('$', '$$')}" for k, v in open_.items())]  # fmt: skip


def _kept(host: Host) -> dict[str, Any]:
    """What the engine's containers find again in the next run: a volume of the host's engine, or
    the folder that the inventory names."""
    source = {"type": "bind", "source": host.cache} if host.cache else {"source": "kept"}
    return {"type": "volume", "target": KEPT, **source}


def _inputs(plan: Plan, host: Host) -> Iterator[dict[str, Any]]:
    """What containers read, at the path it has here: of a remote host only what is there."""
    copied = _copied(plan)
    own = [path for path in folders(plan, host) if path not in copied]  # that it must have itself
    for path in [*copied, *own]:
        if host.ssh and path in copied:
            yield {"type": "volume", "target": path}
        else:
            yield {"type": "bind", "source": path, "target": path, "read_only": True}


def _copied(plan: Plan) -> list[str]:
    """What this machine has and a remote host gets a copy of: small, and made here."""
    built = plan.model.source.startswith("built:")
    laid = [str(Path(plan.drop) / FILES)] if plan.files else []
    return [str(paths.LANES / plan.lane), *([plan.model.path] if built else []), *laid]


def _artifacts(plan: Plan, host: Host, cell: CellPlan) -> dict[str, Any]:
    folder = Path(plan.drop) / cell.artifacts
    if host is plan.hosts[0] and not host.ssh:
        return {"type": "bind", "source": str(folder), "target": str(folder)}
    return {
        "type": "volume",
        "target": str(folder.parent),
    }  # the folder itself comes by fleet.hand_over


@contextlib.contextmanager
def launching(
    plan: Plan, drop: drops.Drop, place: Path, env: Mapping[str, str], say: Say
) -> Iterator["ComposeLauncher"]:
    """Reach every host and make sure that it can run the plan; hang up at the end.

    place: a folder with a short path, for sockets. env: of what is started on this machine.

    Raises:
        HostLost: a host cannot be reached.
        ConfigError: a host has no engine, or another model.
        ImageFailed: a host does not have the image of the plan.
    """
    (drop.path / FOLDER).mkdir()
    lines = {host.name: ssh.Line(host, place, env) for host in plan.hosts}
    try:
        ssh.everywhere(list(lines.values()), lambda line: line.open(_port(plan, line.host)))
        for line in lines.values():
            if line.process is not None:
                drop.started(line.process)
        engine = msgspec.structs.replace(plan, containers=_engine(plan))
        fleet.require(engine, list(lines.values()), say)
        keys = ssh.keys(place) if _keyed(plan) else b""
        yield ComposeLauncher(plan, lines, env, drop, keys=keys)
    finally:
        for line in lines.values():
            line.close()


def _port(plan: Plan, host: Host) -> int:
    """The port of a remote leader that the readiness question needs."""
    return plan.port if host is plan.hosts[0] and plan.services else 0


class ComposeLauncher:
    """Services and cells as containers of one Compose project on every host."""

    def __init__(
        self,
        plan: Plan,
        lines: Mapping[str, ssh.Line],
        env: Mapping[str, str],
        drop: drops.Drop,
        *,
        keys: bytes = b"",
    ) -> None:
        """keys: the run's key pair as an archive, for services that mpirun enters."""
        self._plan = plan
        self._keys = keys
        self._lines = lines
        self._env = env
        self._drop = drop
        self._started: list[ContainerTask] = []
        for host in plan.hosts:
            self._file(host).write_text(yaml.safe_dump(document(plan, host), sort_keys=False))

    def start(self, service: Service, env: Mapping[str, str], log: Path) -> Process:
        """Start one service of the Compose file; its output goes to `log`. Raises ServerDied:
        Compose refuses to start it."""
        task = self._up(service.host, service.name, env, log)
        self._started.append(task)
        return task.process

    def task(
        self, name: str, cell: CellPlan, env: Mapping[str, str], logs: Sequence[Path]
    ) -> "Gang":
        """Start the containers of a cell, the leader's last."""
        self._own(cell)
        where = [self._plan.hosts[0].name, *(worker.host for worker in cell.workers)]
        service, started = _called(self._plan, name), list[ContainerTask]()
        try:
            for host, log in reversed(list(zip(where, logs, strict=True))):
                started.insert(0, self._up(host, service, env, log, cell))
        except BaseException:
            self._left(_end(started, 0))
            raise
        return Gang(started, self._left)

    def check(self) -> None:
        """Raise HostLost when a host is gone, ServerDied when a container has ended: with the one
        that ended first, and the last words of its log."""
        for line in self._lines.values():
            line.require()
        if any(task.poll() is not None for task in self._started):
            time.sleep(TOGETHER_S if len(self._started) > 1 else 0)
            first, *others = _ended(self._started)
            raise ServerDied(
                f"{first.said()}; its log ends:\n"
                + "\n".join(f"    {line}" for line in process.tail(first.log, 12))
                + "".join(f"\n  then {task.said()}" for task in others),
                remedy=f"Read {first.log}; `make triage RESULTS={self._plan.drop}` may name "
                "the cause.",
            )

    def logs(self) -> list[Path]:
        """The log of every service, the leader's first."""
        return [task.log for task in self._started]

    def stop(self) -> None:
        """Stop and remove every container of the services, on all hosts at once."""
        self._left(_end(self._started, GRACE_S))
        self._started.clear()

    def _left(self, what: list[str]) -> None:
        self._drop.manifest.left += what

    def _own(self, cell: CellPlan) -> None:
        """Containers that run as somebody else must be able to write a cell's folder."""
        if os.geteuid() == 0 and cell.artifacts:
            user, _, group = self._plan.held.user.partition(":")
            os.chown(Path(self._plan.drop) / cell.artifacts, int(user), int(group))

    def _file(self, host: Host) -> Path:
        return Path(self._plan.drop) / FOLDER / f"{host.name}.yaml"

    def _up(
        self,
        host: str,
        service: str,
        env: Mapping[str, str],
        log: Path,
        cell: CellPlan | None = None,
    ) -> "ContainerTask":
        from python_on_whales import DockerException  # noqa: PLC0415

        line = self._lines[host]
        try:
            container = _create(line.docker, self._file(line.host), service, {**self._env, **env})
            try:
                back = self._fill(line, container, cell)
                container.start()
                if self._keys and cell is None:
                    fleet.piped(line.docker, self._keys, "exec", "--interactive", container.id,
                           "tar", "--extract", "--directory", KEYS)  # fmt: skip
            except BaseException:
                line.docker.container.remove(container, force=True, volumes=True)
                raise
        except (DockerException, ValueError) as error:
            line.require()
            raise ServerDied(
                f"{line.host.name}: Compose cannot start {service}: {images.last_words(error)}",
                remedy=f"Try it there: docker compose -f {self._file(line.host)} up {service}",
            ) from error
        return ContainerTask(line, container, service, log, self._env, back=back)

    def _fill(self, line: ssh.Line, container: "Container", cell: CellPlan | None) -> Path | None:
        """Give a container that cannot see this machine what it reads, and a folder to write to;
        returns the folder, where this machine wants its contents back."""
        host, docker = line.host, line.docker
        for path in _copied(self._plan) if host.ssh else ():
            docker.copy(f"{path}/.", (container, path))
        if cell is None or not cell.artifacts or not (host.ssh or host.node_rank):
            return None
        folder = Path(self._plan.drop) / cell.artifacts
        fleet.hand_over(docker, folder, container, self._plan.held.user)
        return None if host.node_rank else folder


def _create(
    docker: "DockerClient", file: Path, service: str, env: Mapping[str, str]
) -> "Container":
    """Create the container of a service; secrets come from `env`, which Compose reads."""
    compose = [*docker.client_config.docker_cmd, "compose", "--file", str(file)]
    words = [*compose, "create", "--quiet-pull", service]
    made = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if made.returncode:
        raise ValueError(made.stderr)
    told = subprocess.run(
        [*compose, "ps", "--all", "--quiet", service],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return docker.container.inspect(told.stdout.strip())


class ContainerTask:
    """A container that was started, and the process that copies its output to a log."""

    def __init__(
        self,
        line: ssh.Line,
        container: "Container",
        what: str,
        log: Path,
        env: Mapping[str, str],
        *,
        back: Path | None = None,
    ) -> None:
        """back: a cell's folder, whose contents are copied out of the container at the end."""
        self._line = line
        self._container = container
        self._back = back
        self._code: int | None = None
        self.ended = 0.0
        self.log = log
        self.host = line.host.name
        self.process = Process(
            pid=0, started=time.time(), what=what, container=container.id, host=self.host
        )
        with log.open("ab") as stream:
            self._copying, _ = process.spawn(
                f"docker logs of {what}",
                [*line.docker.client_config.docker_cmd, "logs", "--follow", container.id],
                env,
                stream,
            )

    def poll(self) -> int | None:
        """The exit status, or None while it runs. Raises HostLost: its host is gone."""
        if self._code is None and self._copying.poll() is not None:
            state = self._state()
            if not state.running:
                self._code, self.ended = state.exit_code or 0, time.monotonic()
        return self._code

    def _state(self) -> Any:
        from python_on_whales import DockerException  # noqa: PLC0415

        try:
            return self._container.state
        except DockerException as error:
            self._line.require()
            raise HostLost(
                f"host {self.host}: its engine does not answer: {images.last_words(error)}",
                remedy="Look at the Docker engine there.",
            ) from error

    @property
    def killed(self) -> bool:
        """Whether a signal ended it: what only lost its peer exits by itself."""
        return self._code is not None and self._code > 128

    def outcome(self, code: int) -> str:
        """An exit status in words; the kernel's out-of-memory killer looks like any SIGKILL."""
        with contextlib.suppress(LaneError):
            if self._state().oom_killed:
                return f"exit status {code}: it passed its memory limit"
        return process.exited(code)

    def said(self) -> str:
        """Which container ended, and how."""
        outcome = self.outcome(self._code or 0)
        return f"container {self.process.what} on {self.host} ended with {outcome}"

    def end(self, grace_s: float) -> None:
        """Stop the container, take what it left, and remove it with its volumes. Raises HostLost:
        its host is gone; container and volumes are still there."""
        from python_on_whales import DockerException  # noqa: PLC0415

        self._line.require()
        try:
            remove(self._line.docker, [self._container.id], grace_s, self._taken)
        except DockerException as error:
            self._line.require()
            raise HostLost(
                f"host {self.host}: {images.last_words(error)}",
                remedy="Look at the Docker engine there; the next run tries again.",
            ) from error

    def _taken(self) -> None:
        """The rest of its log, and what it left in the cell's folder."""
        try:
            self._copying.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._copying.kill()
            self._copying.wait()
        if self._back:
            self._line.docker.copy((self._container, f"{self._back}/."), self._back)


class Gang:
    """The containers of one program on all hosts: done when all are, failed when one has."""

    def __init__(self, tasks: Sequence[ContainerTask], left: Callable[[list[str]], None]) -> None:
        self._tasks = tasks
        self._left = left

    @property
    def processes(self) -> list[Process]:
        """How a later run finds them."""
        return [task.process for task in self._tasks]

    @property
    def log(self) -> Path:
        """The log of the one that ended first, the leader's while none has failed."""
        failed = [task for task in _ended(self._tasks) if task.poll()]
        return (failed or self._tasks)[0].log

    def poll(self) -> int | None:
        """0 when every one is done, the status of the first that failed, else None."""
        codes = [task.poll() for task in self._tasks]
        if any(codes):
            time.sleep(TOGETHER_S if len(codes) > 1 else 0)
            return next(code for task in _ended(self._tasks) if (code := task.poll()))
        return None if None in codes else 0

    def outcome(self, code: int) -> str:
        """How it ended; on more than one host also where first."""
        failed = [task for task in _ended(self._tasks) if task.poll()]
        if len(self._tasks) == 1 or not failed:
            return self._tasks[0].outcome(code)
        return f"a failure, first on {failed[0].host}: " + "; ".join(t.said() for t in failed)

    def late(self) -> list[str]:
        """The hosts whose container still runs."""
        return [task.host for task in self._tasks if task.poll() is None]

    def end(self, grace_s: float) -> None:
        """Stop all of them at once and take what they left; a lost host keeps its own."""
        self._left(_end(self._tasks, grace_s))


def _ended(tasks: Iterable[ContainerTask]) -> list[ContainerTask]:
    """Those that have ended, the first one first: by this machine's clock, since the hosts' may
    differ; among those that ended within one look, the killed before those that lost them."""
    found = []
    for task in tasks:
        with contextlib.suppress(HostLost):
            found += [task] if task.poll() is not None else []
    first = min((task.ended for task in found), default=0.0)
    return sorted(found, key=lambda t: (not (t.killed and t.ended < first + TOGETHER_S), t.ended))


def _end(tasks: Sequence[ContainerTask], grace_s: float) -> list[str]:
    """End tasks on all hosts at once; returns what could not be ended, and why."""

    def end(task: ContainerTask) -> str:
        try:
            task.end(grace_s)
        except LaneError as error:
            return f"container {task.process.container[:12]} on {task.host}: {error}"
        return ""

    if not tasks:
        return []
    with ThreadPoolExecutor(min(len(tasks), 32)) as pool:
        return [said for said in pool.map(end, tasks) if said]


def remove(
    docker: "DockerClient",
    ids: Iterable[str],
    grace_s: float,
    before: Callable[[], None] = lambda: None,
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


def end_the_dead(drop: Path, dead: Manifest, say: Say) -> tuple[list[str], list[str]]:
    """Remove the containers of a dead run: those it recorded and those that bear its label, since
    a kill between a container's start and its record leaves the label alone.

    Returns the ids that were removed, and the hosts that could not be reached, with the reason.
    """
    where = hosts.of(dead.plan)
    left = any(each.container for each in dead.processes) or (drop / FOLDER).is_dir()
    if not left or not where:
        return [], []
    say(f"looking for what a dead run left on {hosts.said(where)} ({drop})")

    def end(host: Host) -> tuple[list[str], str]:
        # Asked first: without a limit of its own `docker -H ssh://` waited 62 s for a host that
        # was gone, and for ever for one that took the connection (2026-12-01).
        if host.ssh and (why := capture.capture(host.name, {}, ssh=host.ssh).error):
            return [], f"{host.name}: {why}"
        ids = [each.container for each in dead.processes if each.host in ("", host.name)]
        try:
            docker = images.docker(host.ssh)
        except LaneError as error:
            return [], f"{host.name}: {error}"
        found = docker.container.list(all=True, filters=[("label", f"{LABEL}={drop}")])
        return remove(docker, dict.fromkeys([*filter(None, ids), *(x.id for x in found)]), 3), ""

    with ThreadPoolExecutor(min(len(where), 32)) as pool:
        ended = list(pool.map(end, where))
    return [each for gone, _ in ended for each in gone], [why for _, why in ended if why]
