"""The `slurm` launcher: the same plan as sbatch scripts, in images through pyxis and enroot, or in
place with SERVER_PYTHON=.

Every command stands in the drop as a script for its host and service, as the plan computed it; a
task runs the one of its node. The drop must be on a file system that all nodes share, as is usual;
each node writes its own log there. Slurm kills every rank of a job when one fails.
"""

import contextlib
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from lanekit import drop as drops
from lanekit import hosts, paths, process, spec
from lanekit.errors import ConfigError, HostLost, LaneError
from lanekit.manifest import Process
from lanekit.plan import KEPT, CellPlan, Host, Plan, Service, folders, is_secret
from lanekit.progress import Say

FOLDER: Final = "slurm"
JOBS: Final = "jobs.txt"  # of the drop: ids, written before anything else happens
POLL_S: Final = 1.0
DEAF_S: Final = 60.0  # a controller may restart
COMMAND_S: Final = 30
ENDED_S: Final = 45.0
ALIVE: Final = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT")
# sbatch 22.05.8 refuses a space or a quote, cuts at #, drops \ and fills in %j (2026-11-30); mounts
# for pyxis are written FROM:TO:ro,FROM:TO.
_BATCH: Final = re.compile(r"[\s\"'\\#%]")
_MOUNT: Final = re.compile(r"[,:\n]")
_NODE: Final = re.compile(r"\$\{LANE_NODE_\d+\}")


def addressed(fleet: Sequence[Host], why: str) -> tuple[Host, ...]:
    """Hosts that nobody named, under the variables that a job fills in when Slurm has chosen.

    why: as the plan's hosts_why.
    """
    unnamed = why == hosts.UNNAMED
    return tuple(
        msgspec.structs.replace(
            host, ssh="", address=f"${{LANE_NODE_{host.node_rank}}}" if unnamed else host.address
        )
        for host in fleet
    )


def quote(word: str) -> str:
    """A word for bash, in which only the names of nodes are still filled in."""
    if not _NODE.search(word):
        return shlex.quote(word)
    kept = _NODE.split(word), _NODE.findall(word)
    texts = [re.sub(r'(["\\`$])', r"\\\1", text) for text in kept[0]]
    return '"' + "".join(a + b for a, b in zip(texts, [*kept[1], ""], strict=True)) + '"'


def script(service: Service, log: Path, mark: str) -> str:
    """What one node runs of one service. Secrets come with the job's environment, unwritten."""
    held = {**service.env, process.MARK: mark}
    lines = [f"export {k}={quote(v)}" for k, v in held.items() if not is_secret(k)]
    words = " ".join(map(quote, service.command))
    return "\n".join(["#!/bin/bash", f"exec >>{shlex.quote(str(log))} 2>&1", *lines,
                      f"exec {words}", ""])  # fmt: skip


def batch(plan: Plan, what: str, services: Sequence[str], minutes: int) -> str:
    """The sbatch script of the services, or of a cell: a task on every node, all or none."""
    profile, folder = spec.profile(plan.profile), Path(plan.drop) / FOLDER
    asked = {
        "job-name": f"lane-{plan.lane}-{what}", "nodes": len(plan.hosts), "ntasks-per-node": 1,
        "time": minutes, "output": folder / f"{what}.txt",
        **({"gpus-per-node": profile.gpus} if profile.gpus else {}),
        **({} if plan.hosts_why == hosts.UNNAMED or len(plan.hosts) == 1
           else {"nodelist": ",".join(h.name for h in plan.hosts)}),
    }  # fmt: skip
    names = [f"export LANE_NODE_{n}=${{nodes[{n}]}}" for n in range(len(plan.hosts))]
    table = " ".join(f"[{host.name}]={host.node_rank}" for host in plan.hosts)
    return "\n".join([
        "#!/bin/bash",
        *(f"#SBATCH --{key}={value}" for key, value in asked.items()),
        "#SBATCH --exclusive",
        "#SBATCH --no-requeue",
        "set -u",
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        *names,
        # Slurm numbers nodes by name; the plan by HOSTS=, the leader first.
        f"export LANE_NUMBERS={shlex.quote(table)}",
        # srun would take sbatch's --export for its own, and leave the lines above out.
        f"exec srun --export=ALL --kill-on-bad-exit=1 {shlex.join(_container(plan))}"
        f" bash {shlex.quote(str(folder / 'node.sh'))} {shlex.join(services)}",
        "",
    ])  # fmt: skip


NODE: Final = """#!/bin/bash
# Runs this node's script of each service that is named, and ends with the first that ends.
declare -A numbers="($LANE_NUMBERS)"
number=${numbers[${SLURMD_NODENAME:-}]:-$SLURM_NODEID}
here=$(dirname "$0")
for service in "$@"; do
    [ -f "$here/$service-$number.sh" ] && bash "$here/$service-$number.sh" &
done
wait -n
"""


def _container(plan: Plan) -> list[str]:
    """What pyxis is asked for: the image by digest, the drop, the lane's files and the model."""
    if plan.containers is None:
        return []
    registry, _, image = plan.containers.images["server"].partition("/")
    mounts = [f"{plan.drop}:{plan.drop}", *(f"{path}:{path}:ro" for path in _read(plan)),
              f"{_kept(plan)}:{KEPT}"]  # fmt: skip
    return [f"--container-image={registry}#{image}", f"--container-mounts={','.join(mounts)}",
            "--no-container-mount-home", "--no-container-remap-root"]  # fmt: skip


def _read(plan: Plan) -> list[str]:
    """Folders that a container reads: the lane's, a folder of models, a model."""
    return [str(paths.LANES / plan.lane), *folders(plan, plan.hosts[0])]


def require(plan: Plan) -> None:
    """Refuse a plan that no job could run. Raises ConfigError: a serving lane, whose server only a
    job could reach, or a path that a line of sbatch or a mount of pyxis would read as something
    else."""
    if plan.driver != "batch":
        raise ConfigError(
            f"lane {plan.lane} serves; the slurm launcher runs batch lanes",
            remedy="Serve inside an allocation: salloc, then LAUNCHER=process or compose there.",
        )
    asked = [(_BATCH, plan.drop)]
    if plan.containers:
        asked += [(_MOUNT, path) for path in (plan.drop, str(_kept(plan)), *_read(plan))]
    for form, path in asked:
        if found := form.search(path):
            raise ConfigError(
                f"Slurm cannot be given the path {path!r}: it holds {found[0]!r}",
                remedy="Use a folder without it: RESULTS=DIR, MODEL=DIR, or another checkout.",
            )


def _kept(plan: Plan) -> Path:
    """What the engine compiles is kept in the checkout, which all nodes share as they do the drop;
    or in the folder that the inventory names."""
    return Path(plan.hosts[0].cache or paths.CACHE / plan.held.kept)


class State(msgspec.Struct, frozen=True):
    """A job as the controller shows it. code: as subprocess has it, negative for a signal."""

    word: str
    reason: str = ""
    code: int = 0
    nodes: str = ""

    @property
    def alive(self) -> bool:
        """Whether it still waits or runs."""
        return self.word in ALIVE


def state(shown: str) -> State:
    """The state in `scontrol show job ID --oneliner`. Raises ValueError: it is of another form."""
    held = dict(re.findall(r"(\w+)=(\S*)", shown))
    status, _, signal = held.get("ExitCode", "0:0").partition(":")
    if "JobState" not in held:
        raise ValueError(shown[:200])
    code = -int(signal) if int(signal or 0) else int(status)
    return State(held["JobState"], held.get("Reason", ""), code, held.get("NodeList", ""))


def command(env: Mapping[str, str], *words: str) -> str:
    """What a command of Slurm says. Raises ConfigError or HostLost as process.asked does."""
    return process.asked(words, env, COMMAND_S, _deaf)


def _deaf(why: str) -> HostLost:
    return HostLost(f"Slurm: {why}", remedy="`sinfo` must answer; then run the lane again.")


@contextlib.contextmanager
def launching(
    plan: Plan, drop: drops.Drop, env: Mapping[str, str], say: Say
) -> Iterator["SlurmLauncher"]:
    """The scripts of a plan, written; every job of it is cancelled at the end. Raises ConfigError:
    no Slurm here."""
    (drop.path / FOLDER).mkdir()
    command(env, "sinfo", "--version")
    if plan.containers and not plan.hosts[0].cache:
        (_kept(plan) / Path(plan.containers.home).name).mkdir(parents=True, exist_ok=True)
    launcher = SlurmLauncher(plan, drop, env, say)
    try:
        yield launcher
    finally:
        launcher.stop()


class SlurmLauncher:
    """The cells of a plan as jobs."""

    def __init__(self, plan: Plan, drop: drops.Drop, env: Mapping[str, str], say: Say) -> None:
        self._plan, self._drop, self._env, self._say = plan, drop, env, say
        self._folder = drop.path / FOLDER
        (self._folder / "node.sh").write_text(NODE)

    def start(self, service: Service, env: Mapping[str, str], log: Path) -> Process:
        """Nothing: a batch lane has no services (lanekit.slurm.launching refuses others)."""
        raise AssertionError("the slurm launcher runs batch lanes")

    def task(
        self, name: str, cell: CellPlan, env: Mapping[str, str], logs: Sequence[Path]
    ) -> "JobTask":
        """Submit the job of a cell. Raises ConfigError: sbatch rejects it, with its own words."""
        led = Service(name, self._plan.hosts[0].name, cell.command, cell.env)
        # Never all of cell.env: sbatch itself is found and runs by the PATH that a run inherits.
        secrets = {k: v for k, v in cell.env.items() if is_secret(k)}
        keeps = self._plan.containers.keeps if self._plan.containers else {}
        for number, (service, log) in enumerate(zip((led, *cell.workers), logs, strict=True)):
            named = msgspec.structs.replace(service, env=keeps | service.env)
            text = script(named, log, self._plan.drop)
            (self._folder / f"{name}-{number}.sh").write_text(text)
        path = self._folder / f"{name}.sbatch"
        path.write_text(batch(self._plan, name, [name], int(cell.deadline_s // 60) + 5))
        try:
            words = ("--parsable", self._exported(secrets), str(path))
            told = command({**env, **self._env, **secrets}, "sbatch", *words)
        except HostLost as error:
            raise ConfigError(
                f"sbatch rejected {path}: {error.message}",
                remedy="Change the profile, or ask for what a partition has: `sinfo`.",
            ) from error
        job = told.strip().partition(";")[0]
        with (self._folder / JOBS).open("a") as stream:
            stream.write(f"{job}\n")
        self._say(f"{name}: job {job}")
        return JobTask(self._plan, job, self._env, logs)

    def _exported(self, secrets: Mapping[str, str]) -> str:
        """Only what a run inherits reaches the ranks, and secrets, which no script holds; sbatch
        would take all of this environment."""
        names = {*self._env, *secrets, *(name for name in os.environ if name == "SLURM_CONF")}
        return f"--export={','.join(sorted(names))}"

    def check(self) -> None:
        """Nothing stands beside the jobs."""

    def logs(self) -> list[Path]:
        """None but those of the cells."""
        return []

    def stop(self) -> None:
        """Cancel whatever still runs, and wait; what cannot be cancelled stands in the drop."""
        self._drop.manifest.left += end_the_dead(self._drop.path, self._env)


class JobTask:
    """A job that runs to its end on every node."""

    def __init__(self, plan: Plan, job: str, env: Mapping[str, str], logs: Sequence[Path]) -> None:
        self._plan, self._job, self._env, self._logs = plan, job, env, logs
        self._state = State("PENDING")
        self._asked, self._heard = 0.0, time.monotonic()
        self.processes = [Process(0, time.time(), f"slurm job {job}")]

    @property
    def log(self) -> Path:
        """The log that was written to last: of the rank that spoke at the end."""
        there = [log for log in self._logs if log.is_file()]
        return max(there, key=lambda log: log.stat().st_mtime, default=self._logs[0])

    def poll(self) -> int | None:
        """The exit status, or None while the job waits or runs. Raises HostLost: the controller has
        not answered for a minute."""
        if time.monotonic() - self._asked < POLL_S:
            return None
        self._asked = time.monotonic()
        try:
            told = command(self._env, "scontrol", "show", "job", self._job, "--oneliner")
            self._state = state(told)
        except (HostLost, ValueError):
            if time.monotonic() - self._heard > DEAF_S:
                raise
            return None
        self._heard = time.monotonic()
        if self._state.alive:
            return None
        return self._state.code or (0 if self._state.word == "COMPLETED" else 1)

    def outcome(self, code: int) -> str:
        """How the job ended, and where: Slurm itself ended the ranks beside the failed one."""
        said = f"{self._state.word} ({process.outcome(code)}) on {self._state.nodes}"
        words = [
            line for log in self._told() for line in process.tail(log, 200) if "error: " in line
        ]
        return f"job {self._job}: {said}" + "".join(f"\n    {line}" for line in words[:3])

    def late(self) -> list[str]:
        """The nodes that the job holds."""
        return [self._state.nodes] if self._state.alive and self._state.nodes else []

    def _told(self) -> list[Path]:
        """What srun itself said: it names the task and node that failed first."""
        return sorted((Path(self._plan.drop) / FOLDER).glob("*.txt"))

    def end(self, grace_s: float) -> None:
        """Cancel the job and wait until it is gone."""
        cancel(self._job, self._env)


def cancel(job: str, env: Mapping[str, str]) -> None:
    """Cancel a job and wait until none of its processes is left. Raises HostLost: the controller
    refuses, or the job does not go."""
    command(env, "scancel", "--full", job)
    deadline = time.monotonic() + ENDED_S
    while time.monotonic() < deadline:
        told = command(env, "squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
        if not set(told.split()) & set(ALIVE):
            return
        time.sleep(POLL_S / 2)
    raise _deaf(f"job {job} does not end")


def end_the_dead(drop: Path, env: Mapping[str, str] = os.environ) -> list[str]:
    """Cancel the jobs that a drop says it submitted; returns what may still run, and why."""
    left = []
    with contextlib.suppress(OSError):
        for job in (drop / FOLDER / JOBS).read_text().split():
            try:
                if state(command(env, "scontrol", "show", "job", job, "--oneliner")).alive:
                    cancel(job, env)
            except (LaneError, ValueError) as error:
                if "Invalid job id" not in str(error):  # forgotten: long gone
                    left.append(f"slurm job {job}: {error}")
    return left
