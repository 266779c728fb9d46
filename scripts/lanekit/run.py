"""A run: environments, model, server, readiness, sweep, drop, verdict, row; and no trace after it.

A lane's run.py says what its lane does with the steps of `Run`; this module says how each is done.
"""

import contextlib
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
import requests

from lanekit import (
    alone,
    answers,
    ask,
    case,
    compose,
    doctor,
    envs,
    images,
    interrupt,
    kubernetes,
    machine,
    model,
    patches,
    paths,
    process,
    programs,
    render,
    report,
    slurm,
    spec,
    triage,
    verify,
)
from lanekit import drop as drops
from lanekit.errors import CellFailed, ConfigError, Interrupted, LaneError, ServerDied
from lanekit.manifest import Process
from lanekit.plan import CellPlan, Plan, inherited
from lanekit.progress import Progress

POLL_S: Final = 0.2
# vLLM on two cores says its first word after 30 to 45 s, when torch and itself are imported.
SILENT: Final = "it runs and says nothing yet: engines load their libraries first, about a minute"
_WHO: Final = {"aiperf": "AIPerf", "batch": "the program"}


class LaneScript(Protocol):
    """What lanes/NAME/run.py holds."""

    def measure(self, run: "Run") -> None:
        """Start what the lane needs and take every cell of the plan."""


class Run:
    """The steps a lane's run.py is made of. Every step leaves its trace in the drop."""

    def __init__(self, plan: Plan, drop: drops.Drop, progress: Progress) -> None:
        self.plan = plan
        self.drop = drop
        self.progress = progress
        self._launcher: process.Launcher = process.ProcessLauncher()
        self._scratch = ""
        self._served: process.Occurrences | None = None
        self._before = 0
        self._endless: list[tuple[triage.Signature, process.Occurrences]] = []

    def env(self, own: Mapping[str, str]) -> dict[str, str]:
        """The variables of something that is started: inherited, its own, and a scratch folder.

        The folder is the run's, because AIPerf leaves a file in it for every cell and vLLM a socket
        for every start (2026-11-30); its path is short, since a socket's may hold 107 bytes.
        """
        found = {**inherited(self.plan), **own, process.MARK: self.plan.drop}
        # Inductor alone keeps what it compiles in the scratch folder; others in the user's home.
        kept = {"TORCHINDUCTOR_CACHE_DIR": str(paths.CACHE / "inductor"), **found}
        return {**kept, "TMPDIR": self._scratch} if self._scratch else kept

    @contextlib.contextmanager
    def scratch(self) -> Iterator[None]:
        """A folder for what engine and AIPerf leave beside the drop, removed at the end."""
        with tempfile.TemporaryDirectory(
            prefix=drops.SCRATCH, ignore_cleanup_errors=True
        ) as folder:
            self._scratch = self.drop.manifest.scratch = folder
            yield

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """The launcher that the plan names, with every host reached and looked at."""
        if self.plan.launcher == "process":
            yield
            return
        begin = time.monotonic()
        with self._open() as launcher:
            self._launcher = launcher
            self.drop.timing("hosts", time.monotonic() - begin)
            yield

    def _open(self) -> contextlib.AbstractContextManager[process.Launcher]:
        env, say = self.env({}), self.progress.say
        if self.plan.launcher == "kubernetes":
            return kubernetes.launching(self.plan, self.drop, env, say)
        if self.plan.launcher == "slurm":
            return slurm.launching(self.plan, self.drop, env, say)
        return compose.launching(self.plan, self.drop, Path(self._scratch), env, say)

    def warm(self) -> None:
        """Fill the caches of every host with compiled kernels, before ranks that wait for each
        other with a time limit meet. Pods do so themselves before they start (lanekit.manifests).
        Raises CellFailed: it failed on a host, or one of them was not done in time."""
        if self.plan.warm and self.plan.launcher != "kubernetes":
            self.drop.state("warming")
            self._take(spec.WARM, self.plan.warm)

    @property
    def ready_s(self) -> float:
        """How long a start may take: pods are warmed in it."""
        warm = self.plan.warm if self.plan.launcher == "kubernetes" else None
        return self.plan.ready_s + (warm.deadline_s if warm else 0)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Start every service of serve.yaml; ready means that a real completion came back."""
        self.drop.state("starting")
        if not self.plan.hosts[0].ssh:
            _require_free(self.plan.port)
        begin = time.monotonic()
        try:
            for service in self.plan.services:
                log = self.drop.log(service.host, service.name)
                env = self.env(service.env)
                with interrupt.held():
                    started = self._launcher.start(service, env, log)
                    self.drop.started(started)
                self.progress.say(f"started {_what(started)}; log: {log}")
            self._await_completion(begin)
            self._prefill()
            self._served = process.Occurrences(self._launcher.logs()[0], b"POST /v1/completions")
            self.drop.timing("startup", time.monotonic() - begin)
            self.drop.state("ready")
            yield
        finally:
            self.progress.say(f"stopping what was started, {process.GRACE_S:.0f} s at most")
            begin = time.monotonic()
            with interrupt.held():
                self._launcher.stop()
            self.drop.manifest.timings["stop"] = round(time.monotonic() - begin, 3)

    def _gate(self) -> None:
        """Ask the coherence gate's questions, keep the answers, and say at once what is wrong.

        A failed gate does not end the run: its verdict is "refuted", and the drop says why.
        """
        plan = self.plan
        if plan.gate is None:
            return
        self.drop.state("asking")
        begin = time.monotonic()
        wanted = answers.questions().ask
        self.progress.say(f"coherence gate: {len(wanted.places())} questions, greedy")
        found = ask.ask(plan.url, plan.model.served_name, wanted, self._alive)
        header = answers.Header(
            questions=plan.gate.questions,
            lane=plan.lane,
            arm=plan.arm,
            profile=plan.profile,
            model=plan.model.source,
            dummy_weights=plan.model.dummy_weights,
            drop=self.drop.path.name,
        )
        (self.drop.path / answers.NAME).parent.mkdir()
        self.drop.write(answers.NAME, answers.encode(header, found))
        if plan.gate.drop:
            theirs = (Path(plan.gate.drop) / answers.NAME).read_bytes()
            self.drop.write(answers.REFERENCE, theirs)
        self.drop.timing("coherence", time.monotonic() - begin)
        written = list((self.drop.path / answers.NAME).parent.iterdir())
        for check in case.gate(self.drop.path, written, self.drop.manifest):
            self.progress.say(f"{check.id}: {check.outcome}: {check.actual}")

    def _alive(self) -> None:
        self._launcher.check()
        self.drop.require_room()

    def sweep(self) -> None:
        """Ask the coherence gate, then take every cell of the plan, in order, between two readings
        of the NICs' counters."""
        self._gate()
        self.drop.state("sweeping")
        before = machine.counters(self.plan.hosts)
        for name, cell in self.plan.cells.items():
            self._take(name, cell)
        after = machine.counters(self.plan.hosts)
        for host in self.plan.hosts:
            readings = {"before": before[host.name], "after": after[host.name]}
            if any(readings.values()):
                self.drop.amend(f"host/{host.name}.json", hw_counters=readings)

    def _await_completion(self, begin: float) -> None:
        """Ask for one token until one comes: /health alone lies (awsome-distributed-ai#1256). Every
        engine behind a router is asked before the router: it would hide one that is late."""
        body = {
            "model": self.plan.model.served_name,
            "prompt": "ready",
            "max_tokens": 1,
            "ignore_eos": True,
        }
        with requests.Session() as session:
            session.trust_env = False  # a proxy must not stand between us and loopback
            urls = [f"{url}/v1/completions" for url in (*self.plan.backends, self.plan.url)]
            while urls:
                if _completed(session, urls[0], body):
                    del urls[0]
                    continue
                self._launcher.check()
                self.drop.require_room()
                waited = time.monotonic() - begin
                if waited > self.ready_s:
                    raise ServerDied(
                        f"no completion came back within {self.ready_s:.0f} s",
                        remedy=f"Read {self._launcher.logs()[0]}; raise ready_s in lane.toml.",
                    )
                words = _last(self._launcher.logs()) or SILENT
                self.progress.now(f"starting, {waited:.0f} s: {words}")
                time.sleep(POLL_S)
        self.progress.say(f"ready: a completion came back after {time.monotonic() - begin:.1f} s")

    def _prefill(self) -> None:
        """Send one prompt of each length that the engine compiles kernels for. Raises ServerDied: a
        prompt was not answered; what compiles would do so inside a cell."""
        with requests.Session() as session:
            session.trust_env = False
            for tokens in self.plan.prefill:
                self._launcher.check()
                self.progress.now(f"starting: a prompt of {tokens} tokens")
                body = {
                    "model": self.plan.model.served_name,
                    "prompt": [1] * tokens,  # token ids: exactly as many as wanted
                    "max_tokens": 1,
                    "ignore_eos": True,
                }
                if not _completed(session, f"{self.plan.url}/v1/completions", body):
                    raise ServerDied(
                        f"a prompt of {tokens} tokens was not answered",
                        remedy=f"Read {self._launcher.logs()[0]}; prefill in lane.toml must fit "
                        "the engine's --max-model-len.",
                    )

    def _take(self, name: str, cell: CellPlan) -> None:
        first = self.drop.path / cell.log
        logs = [first, *(first.with_name(f"{w.host}-{name}.log") for w in cell.workers)]
        first.parent.mkdir(parents=True, exist_ok=True)
        (self.drop.path / cell.artifacts).mkdir(parents=True, exist_ok=True)
        env = self.env(cell.env)
        self.drop.manifest.stage = f"sweeping {name}" if name != spec.WARM else "warming"
        begin = time.monotonic()
        self._before = self._served.count() if self._served else 0
        self._endless = [
            (known, process.Occurrences(first, known.literals[0].encode()))
            for known in (triage.signatures() if cell.requests else ())
            if known.endless
        ]
        load = f"{cell.requests} requests at concurrency {cell.concurrency}"
        self.progress.say(f"{name}: {load if cell.requests else shlex.join(cell.command[1:])}")
        task = None
        try:
            with interrupt.held():
                task = self._launcher.task(name, cell, env, logs)
                for started in task.processes:
                    self.drop.started(started)
            while (code := task.poll()) is None:
                self._watch(name, cell, task, begin)
                time.sleep(POLL_S)
            self._launcher.check()  # AIPerf exits 0 when its server died (0.10.0, 2026-11-30)
            outcome, log = task.outcome(code), task.log
        finally:
            if task is not None:
                with interrupt.held():
                    task.end(grace_s=3)
        self.drop.timing(f"cell {name}" if cell.artifacts else name, time.monotonic() - begin)
        if code != 0:
            raise CellFailed(
                f"{name}: {self._who(name)} ended with {outcome}; it said last:\n"
                + "\n".join(f"    {line}" for line in process.tail(log, 8)),
                remedy=f"Read {log} and what is in {self.drop.path / cell.artifacts}.",
            )

    def _who(self, name: str) -> str:
        return "the warm-up" if name == spec.WARM else _WHO[self.plan.driver]

    def _watch(self, name: str, cell: CellPlan, task: process.Task, begin: float) -> None:
        self._launcher.check()
        self.drop.require_room()
        for known, words in self._endless:
            if words.count():
                raise CellFailed(
                    f"{name}: AIPerf said '{known.literals[0]}': {known.means}", remedy=known.fix
                )
        spent = time.monotonic() - begin
        if spent > cell.deadline_s:
            where = "".join(f", still running on host {host}" for host in task.late())
            raise CellFailed(
                f"{name}: {self._who(name)} was not done within its {cell.deadline_s:.0f} s{where}",
                remedy="Read its log; raise deadline_s of the cell, or warm_s, if it is only slow.",
            )
        served = self._served.count() - self._before if self._served else 0
        counted = f", {served} of {cell.requests} requests"
        now = counted if cell.requests else f": {_last([task.log])}".removesuffix(": ")
        self.progress.now(f"{name}: {spent:.0f} s{now}")


def _last(logs: Sequence[Path]) -> str:
    """What each program said last, one beside the other: of several hosts with the host in front,
    of several services on one host with the service."""
    if len(logs) < 2:
        return "".join(map(process.said, logs))
    hosts, services = zip(*(log.stem.rpartition("-")[::2] for log in logs), strict=True)
    names = hosts if len({*hosts}) > 1 else services
    found = zip(names, map(process.said, logs), strict=True)
    return " | ".join(f"{name}: {words}"[: 110 // len(logs)] for name, words in found)


def _what(started: Process) -> str:
    if started.container:
        return f"{started.what} on {started.host} (container {started.container[:12]})"
    return f"{started.what} (pid {started.pid})"


def main(plan: Plan, progress: Progress) -> int:
    """Run a plan, judge its drop, print its rows; returns the verdict's exit code. Raises
    LaneError: whatever stopped the run; the drop says how far it came."""
    begin = time.monotonic()
    progress.say(f"{plan.lane}/{plan.arm} on {plan.profile} ({plan.profile_why})")
    drop = execute(plan, progress)
    verdict = verify.verify(drop.path)
    drop.write(drops.VERDICT, render.as_json(verdict))
    print(render.text(verdict, colour=render.wants_colour(sys.stdout)))
    for row in report.rows(drop.path, verdict):
        print(report.line(row))
    if not plan.comparable:
        print(f"profile {plan.profile}: not comparable with published rows, no EFA in the path")
    print(report.write())
    print(report.breakdown(drop.manifest, time.monotonic() - begin))
    return verdict.exit_code


def execute(plan: Plan, progress: Progress) -> drops.Drop:
    """Run a plan from start to a sealed drop. Raises LaneError: whatever stopped the run; the drop
    says how far it came."""
    wall = time.monotonic()
    with alone.holding(plan.drop, progress.say), interrupt.raising():
        # A scheduler's nodes are nobody's to ask before it has chosen them.
        ours = plan.launcher in ("process", "compose")
        facts = doctor.require(plan, progress.say) if ours else {}
        _require_programs(plan, made=False)
        _require_series(plan, progress.say, made=False)
        _require_modules(plan)
        drop = drops.Drop.create(plan)
        progress.say(f"drop: {drop.path}")
        run = Run(plan, drop, progress)
        try:
            for name, found in facts.items():
                drop.write(f"host/{name}.json", msgspec.json.format(msgspec.json.encode(found)))
            _prepare(run)
            with run.scratch(), run.launching():
                run.warm()
                _script(plan.lane).measure(run)
            drop.state("collecting")
            drop.manifest.timings["wall"] = round(time.monotonic() - wall, 3)
            drop.seal()
        except BaseException as error:
            _record(drop, error)
            raise
    return drop


def _prepare(run: Run) -> None:
    """Environments and model."""
    plan, drop, say = run.plan, run.drop, run.progress.say
    drop.state("installing")
    begin = time.monotonic()
    for environment in plan.environments.values():
        if environment.locks:
            _ensure(environment.name, plan.torch_index, say)
    _require_programs(plan, made=True)
    if plan.model.source.startswith("built:"):
        model.ensure(Path(plan.model.path))
    _require_series(plan, say, made=True)
    drop.timing("install", time.monotonic() - begin)


def _require_programs(plan: Plan, *, made: bool) -> None:
    """A given interpreter, AIPerf beside one, and what a lane takes from PATH: found out before
    anything is made. made: what stands in the environments that the run itself makes instead."""
    if plan.containers is not None:
        return
    each = plan.environments.values()
    ours = {Path(environment.python).parent for environment in each if environment.locks}
    starts = [s.command[0] for s in plan.services] + [c.command[0] for c in plan.cells.values()]
    for path in [*(environment.python for environment in each), *starts]:
        if (Path(path).parent in ours) is made and shutil.which(path) is None:
            where = "at" if "/" in path else "on PATH named"
            raise ConfigError(
                f"no program {where} {path}",
                remedy="The lane's README says what it needs and where it is had; SERVER_PYTHON= "
                "and AIPERF_PYTHON= name interpreters that hold the engine and AIPerf.",
            )


_LACKS: Final = "import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)"


def _require_modules(plan: Plan) -> None:
    """What a given interpreter starts as a module is in it: else the start alone would say so, with
    a drop made and nothing in it."""
    given = {each.python for each in plan.environments.values() if not each.locks}
    started = [(each.command, each.env) for each in plan.services]
    for command, own in started + [(each.command, each.env) for each in plan.cells.values()]:
        python, *words = command
        if plan.launcher == "process" and python in given and words[:1] == ["-m"]:
            name = words[1].partition(".")[0]
            env = {**inherited(plan), **own}
            if subprocess.run((python, "-c", _LACKS, name), env=env, check=False).returncode == 1:
                raise ConfigError(
                    f"{python} holds no module {name}, which the lane starts with it",
                    remedy="SERVER_PYTHON= names an interpreter that holds the engine; without it "
                    "the run makes one from its lock.",
                )


def _ensure(name: str, torch_index: str, say: Callable[[str], None]) -> None:
    built = envs.ensure(
        envs.spec(name), paths.CACHE / "envs", torch_index=torch_index or None, say=say
    )
    envs.watch(built)
    say(f"environment {name}: {built.note or 'ready'}")


def _require_series(plan: Plan, say: Callable[[str], None], *, made: bool) -> None:
    """The engine holds every series of the plan, as far as anybody here can ask it. made: in an
    environment that the run itself makes."""
    if bool(plan.environments["server"].locks) is not made:
        return
    for series in plan.patches:
        if plan.launcher in ("process", "compose") or plan.containers is None:
            _require_patched(series, plan)
        else:  # a scheduler's nodes hold the images, and nobody here can ask them
            say(f"series {series}: our images are built with it; not looked for on the nodes")


def _require_patched(series: str, plan: Plan) -> None:
    """The engine must hold what the gates of a series look for: an arm is nothing without it."""
    gates = patches.load(patches.PATCHES / series).gate
    files = [gate.path for gate in gates]
    if plan.containers is not None:
        held = images.installed(plan.containers.images["server"], files, plan.hosts[0].ssh)
    else:
        ask = (plan.environments["server"].python, *images.purelib(files))
        held = msgspec.json.decode(subprocess.check_output(ask), type=dict[str, str])
    for gate in gates:
        if gate.text not in held[gate.path]:
            raise ConfigError(
                f"the engine does not hold series {series}: '{gate.text}' is not in {gate.path}",
                remedy="patches/README.md says how to apply it; our images are built with it.",
            )


def _record(drop: drops.Drop, error: BaseException) -> None:
    """Say in the drop why the run ended; a full disk leaves the reserved block for this."""
    interrupted = isinstance(error, Interrupted | KeyboardInterrupt)
    with contextlib.suppress(LaneError, OSError):
        drop.give_reserve_back()
        drop.state("interrupted" if interrupted else "failed", f"{type(error).__name__}: {error}")


def _script(lane: str) -> LaneScript:
    path = paths.LANES / lane / "run.py"
    if not path.is_file():
        raise ConfigError(f"{path} is missing", remedy="A lane has lane.toml, serve.yaml, run.py.")
    script: LaneScript = programs.load(f"run_{lane.replace('-', '_')}", path)
    return script


def _require_free(port: int) -> None:
    """Refuse a taken port before anything starts: what answers there would not be our server."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} is taken ({error.strerror})",
                remedy="Choose another with PORT=, or leave PORT out to take a free one.",
            ) from error


def _completed(session: requests.Session, url: str, body: dict[str, object]) -> bool:
    try:
        answer = session.post(url, json=body, timeout=120)
        usage = answer.json().get("usage") if answer.ok else None
    except (requests.RequestException, ValueError):
        return False
    return bool(usage and usage.get("completion_tokens"))
