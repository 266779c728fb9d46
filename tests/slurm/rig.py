"""A real Slurm on this machine: munged, slurmctld and a slurmd for each of two nodes, from Debian's
packages, started by PID on ports and folders of their own, without a service manager."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil


def missing() -> str:
    """Why there can be no Slurm here, or nothing."""
    if os.geteuid() != 0:
        return "needs root, for slurmd and munged"
    for tool in ("slurmctld", "slurmd", "munged", "sbatch"):
        if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            return f"needs {tool} (Debian: slurmctld, slurmd, slurm-client, munge)"
    return ""


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Slurm:
    """The daemons and their folder."""

    root: Path
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Slurm's commands find this controller."""
        return {**os.environ, "SLURM_CONF": str(self.root / "slurm.conf")}

    def say(self, *words: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    def begin(self, name: str, *words: str) -> None:
        """Start one daemon in the foreground."""
        log = (self.root / f"{name}.log").open("ab")
        self.children[name] = subprocess.Popen(
            words, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def end(self, name: str) -> None:
        """End one daemon and what it forked."""
        child = self.children.pop(name)
        family = psutil.Process(child.pid).children(recursive=True)
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=10)
        for each in (psutil.Process(child.pid) if child.poll() is None else None, *family):
            with contextlib.suppress(psutil.Error):
                if each is not None:
                    each.kill()
        child.wait(timeout=10)


NODES = ("node-1", "node-2")
CONF = """
ClusterName=lanes
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctl}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/ctl.pid
SlurmdPidFile={root}/d.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/backfill
ReturnToService=2
MpiDefault=none
KillWait=3
NodeName=node-1 NodeHostname={host} NodeAddr=127.0.0.1 Port={one} CPUs={cpus} State=UNKNOWN
NodeName=node-2 NodeHostname={host} NodeAddr=127.0.0.1 Port={two} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=node-[1-2] Default=YES MaxTime=120 State=UP
"""


@contextlib.contextmanager
def up() -> Iterator[Slurm]:
    """A controller with two idle nodes; gone afterwards with every process."""
    root = Path(tempfile.mkdtemp(prefix="lanes-slurm-"))
    slurm = Slurm(root)
    host = socket.gethostname().partition(".")[0]
    cpus = len(os.sched_getaffinity(0))
    try:
        for folder in ("state", "spool.node-1", "spool.node-2"):
            (root / folder).mkdir()
        (root / "munge.key").write_bytes(os.urandom(1024))
        (root / "munge.key").chmod(0o600)
        root.chmod(0o755)
        ports = {name: _port() for name in ("ctl", "one", "two")}
        conf = CONF.format(root=root, host=host, cpus=cpus, **ports)
        (root / "slurm.conf").write_text(conf)
        slurm.begin("munged", "/usr/sbin/munged", "--foreground", "--force",
                    f"--key-file={root}/munge.key", f"--socket={root}/munge.socket",
                    f"--pid-file={root}/munge.pid", f"--seed-file={root}/munge.seed",
                    f"--log-file={root}/munge.log")  # fmt: skip
        slurm.begin("slurmctld", "/usr/sbin/slurmctld", "-D")
        for node in NODES:
            slurm.begin(node, "/usr/sbin/slurmd", "-D", "-N", node)
        _await_idle(slurm)
        yield slurm
    finally:
        for name in (*NODES, "slurmctld", "munged"):
            if name in slurm.children:
                slurm.end(name)
        shutil.rmtree(root, ignore_errors=True)


def _await_idle(slurm: Slurm) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.CalledProcessError):
            if slurm.say("sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"]:
                return
        time.sleep(0.3)
    logs = "".join(path.read_text(errors="replace")[-800:] for path in slurm.root.glob("*.log"))
    raise RuntimeError(f"no node became idle: {logs}")
