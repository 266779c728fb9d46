"""Two Docker hosts on one machine: a network namespace each, with an address, an SSH daemon and a
Docker engine of its own, joined by a switch in a third one.

The engines see the images of this machine's engine through links, so that they take no disk: its
blobs and unpacked layers are never changed, and the two small databases beside them are copied.
Everything is started by PID and ended by PID; nothing is told apart by name.

    python -m tests.hosts.rig        brings it up, says how to reach it, ends it at the first key
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from lanekit import images

STORE: Final = Path("/var/lib/docker/containerd/daemon")
LAYERS: Final = "io.containerd.snapshotter.v1.overlayfs/snapshots"
BLOBS: Final = "io.containerd.content.v1.content/blobs/sha256"
DATABASES: Final = (
    "io.containerd.metadata.v1.bolt/meta.db",
    "io.containerd.snapshotter.v1.overlayfs/metadata.db",
)
# Two rigs at once must not end each other: what the kernel knows by name has this process in it.
OURS: Final = f"lanes{os.getpid()}"
NET: Final = f"10.231.{os.getpid() % 254 + 1}"  # a /24 of its own; this machine is .254
SWITCH: Final = f"{OURS}-s"
HERE: Final = f"{OURS}-h"  # this machine's end of its cable


def missing() -> str:
    """Why there can be no rig here, or nothing."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces and Docker engines"
    for tool in ("ip", "nsenter", "dockerd", "sshd", "ssh-keygen"):
        if shutil.which(tool) is None:
            return f"needs {tool} (Debian: iproute2, util-linux, docker.io, openssh-server)"
    if subprocess.run(["ip", "netns", "add", OURS], capture_output=True).returncode:  # noqa: PLW1510
        return "needs network namespaces, which this kernel or container refuses"
    subprocess.run(["ip", "netns", "delete", OURS], check=True)
    return ""


def held(name: str, stack: str = images.DEFAULT_STACK) -> bool:
    """Whether this machine's engine has an image, in the store that can be shared by links."""
    if not (STORE / LAYERS).is_dir():
        return False
    with contextlib.suppress(Exception):
        return bool(images.identify(name, stack))
    return False


def run(*words: str) -> str:
    """Run a command that must succeed; what it printed."""
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(words)}: {ran.stderr.strip()}")
    return ran.stdout


@dataclass
class Side:
    """One of the two hosts."""

    name: str
    address: str
    root: Path
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def space(self) -> str:
        """Its network namespace."""
        return f"{OURS}-{self.root.name}"

    @property
    def socket(self) -> Path:
        """Where its engine listens, on this machine."""
        return self.root / "docker.sock"

    def begin(self, *, links: bool = True) -> None:
        """Start its SSH daemon and its engine, and wait for both."""
        self.root.mkdir(exist_ok=True)
        if links and not (self.root / "data").exists():
            share(self.root / "data")
        self._sshd()
        log = (self.root / "dockerd.log").open("ab")
        # nsenter and not `ip netns exec`, which hides the cgroup mount (2026-11-30).
        self.children.append(subprocess.Popen(
            ["nsenter", f"--net=/var/run/netns/{self.space}", "dockerd",
             "--config-file", str(self._config()), "--data-root", str(self.root / "data"),
             "--exec-root", str(self.root / "exec"), "--pidfile", str(self.root / "pid"),
             "--host", f"unix://{self.socket}", "--iptables=false", "--bridge=none"],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
        ))  # fmt: skip
        self._await()

    def docker(self, *words: str) -> str:
        """A docker command for its engine, past SSH."""
        return run("docker", "--host", f"unix://{self.socket}", *words)

    def _config(self) -> Path:
        path = self.root / "daemon.json"
        path.write_text('{"features": {"containerd-snapshotter": true}, "log-level": "warn"}')
        return path

    def _sshd(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        known = " ".join(f'"{k}={v}"' for k, v in {
            "DOCKER_HOST": f"unix://{self.socket}", **self.environment}.items())  # fmt: skip
        (self.root / "sshd").write_text(
            f"ListenAddress {self.address}:22\nHostKey {self.root.parent}/hostkey\n"
            f"AuthorizedKeysFile {self.root.parent}/key.pub\nPidFile none\nUsePAM no\n"
            f"PermitRootLogin prohibit-password\nStrictModes no\nSetEnv {known}\n"
        )
        log = (self.root / "sshd.log").open("ab")
        self.children.append(subprocess.Popen(
            ["ip", "netns", "exec", self.space, "/usr/sbin/sshd", "-D", "-e", "-f",
             str(self.root / "sshd")],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
        ))  # fmt: skip

    def anew(self) -> None:
        """Start it again with nothing but the images of this machine."""
        self.end()
        shutil.rmtree(self.root / "data")
        self.begin()

    def restart_ssh(self) -> None:
        """Start its SSH daemon anew, with the variables that sessions get now."""
        daemon = self.children.pop(0)
        daemon.terminate()
        daemon.wait(timeout=20)
        self._sshd()
        self.children.insert(0, self.children.pop())

    def _await(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):
                self.docker("version")
                return
            time.sleep(0.2)
        said = (self.root / "dockerd.log").read_text().splitlines()[-5:]
        raise RuntimeError(f"the engine of {self.name} did not start: {said}")

    def pids(self) -> list[int]:
        """Every process in its network namespace."""
        return [int(word) for word in run("ip", "netns", "pids", self.space).split()]

    def kill(self) -> None:
        """End the host as a power cut would: every process in it, at once."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                _thaw(pid)
        for child in self.children:
            child.wait()
        self.children.clear()

    def link(self, state: str) -> None:
        """Take its cable out (`down`) or put it back (`up`)."""
        run("ip", "-netns", SWITCH, "link", "set", f"{self.root.name}-br", state)

    def end(self) -> None:
        """Stop it, gently, and everything that is left of it."""
        for child in reversed(self.children):
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=20)
        with contextlib.suppress(RuntimeError):
            self.kill()
        for mount in sorted((m for m in _mounts() if m.startswith(f"{self.root}/")), reverse=True):
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True)


@dataclass
class Rig:
    """Both sides, and how this machine reaches them."""

    root: Path
    sides: tuple[Side, Side]

    @property
    def hosts(self) -> str:
        """HOSTS= of the rig."""
        return str(self.root / "fleet.toml")

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which `ssh` finds key and host keys of the rig."""
        return {**os.environ, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}"}

    def strays(self) -> list[str]:
        """Containers and volumes that are left on either side; what a host keeps is meant to be."""
        left = []
        for side in self.sides:
            left += [f"{side.name} container {x}" for x in side.docker("ps", "-aq").split()]
            volumes = side.docker("volume", "ls", "-q").split()
            left += [f"{side.name} volume {x}" for x in volumes if not x.startswith("lanes-kept-")]
        return left


def share(target: Path) -> None:
    """Make an engine's store that holds the images of this machine's engine, by links."""
    daemon = target / "containerd" / "daemon"
    for folder in (LAYERS, BLOBS):
        (daemon / folder).mkdir(parents=True, exist_ok=True)
        for entry in (STORE / folder).iterdir():
            link = daemon / folder / entry.name
            if not link.is_symlink():
                link.symlink_to(entry)
    for name in DATABASES:
        (daemon / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(STORE / name, daemon / name)


def _thaw(pid: int) -> None:
    """A process of a paused container does not even die before it goes on (cgroup v1)."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        if ":freezer:/docker/" in line:
            Path(f"/sys/fs/cgroup/freezer{line.rpartition(':')[2]}/freezer.state").write_text(
                "THAWED"
            )


def _mounts() -> list[str]:
    return [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Be ended by SIGTERM and SIGHUP as by Ctrl-C, through every `finally`: daemons in sessions of
    their own outlive a process that just dies. While it ends, a second one is ignored."""

    def end(*_: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def up(*, links: bool = True) -> Iterator[Rig]:
    """Both hosts, running; gone afterwards, with every process, mount, link and namespace."""
    with _ending(), _up(links=links) as rig:
        yield rig


@contextlib.contextmanager
def _up(*, links: bool) -> Iterator[Rig]:
    root = Path(tempfile.mkdtemp(prefix=f"{OURS}-"))
    sides = tuple(Side(f"lanes-{n}", f"{NET}.{i}", root / n) for i, n in ((1, "a"), (2, "b")))
    rig = Rig(root, (sides[0], sides[1]))
    try:
        _keys(root)
        _network(rig.sides)
        for side in rig.sides:
            side.begin(links=links)
        _reach(rig)
        yield rig
    finally:
        for side in rig.sides:
            side.end()
        # Our end by name: the kernel takes a deleted namespace apart when it comes to it, and not
        # while anything still holds it, and with it the other ends of its cables.
        subprocess.run(["ip", "link", "delete", HERE], check=False, capture_output=True)
        for name in (SWITCH, *(side.space for side in rig.sides)):  # with all that is plugged in
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        shutil.rmtree(root, ignore_errors=True)


def _keys(root: Path) -> None:
    for name in ("key", "hostkey"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / name))


def _network(sides: Sequence[Side]) -> None:
    """A bridge in a namespace of its own, where no rule of this machine's firewall (Docker's drops
    what it does not know) comes between the hosts, and a cable to each and to this machine."""
    run("ip", "netns", "add", SWITCH)
    bridge = ("ip", "-netns", SWITCH, "link")
    run(*bridge, "add", "br0", "type", "bridge")
    run(*bridge, "set", "br0", "up")
    run("ip", *_cable("h", HERE, str(os.getpid())))
    run(*bridge, "set", "h-br", "master", "br0", "up")
    run("ip", "address", "add", f"{NET}.254/24", "dev", HERE)
    run("ip", "link", "set", HERE, "up")
    for side in sides:
        run("ip", "netns", "add", side.space)
        run("ip", *_cable(side.root.name, "eth0", side.space))
        run(*bridge, "set", f"{side.root.name}-br", "master", "br0", "up")
        inside = ("ip", "-netns", side.space)
        run(*inside, "address", "add", f"{side.address}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "link", "set", "lo", "up")


def _cable(name: str, end: str, where: str) -> list[str]:
    """A cable from the switch to a namespace, which is named or that of a process."""
    return ["-netns", SWITCH, "link", "add", f"{name}-br", "type", "veth",
            "peer", "name", end, "netns", where]  # fmt: skip


def _reach(rig: Rig) -> None:
    """An `ssh` before the system's on PATH that knows the keys, and an inventory."""
    key = (rig.root / "hostkey.pub").read_text()
    known = "".join(f"{side.address} {key}" for side in rig.sides)
    (rig.root / "known").write_text(known)
    (rig.root / "bin").mkdir()
    wrapper = rig.root / "bin" / "ssh"
    wrapper.write_text(
        f"#!/bin/sh\nexec {shutil.which('ssh')} -F /dev/null -i {rig.root}/key "
        f'-o UserKnownHostsFile={rig.root}/known -o BatchMode=yes "$@"\n'
    )
    wrapper.chmod(0o755)
    (rig.root / "fleet.toml").write_text(
        "".join(
            f'[[host]]\nname = "{side.name}"\naddress = "{side.address}"\nuser = "root"\n'
            f'interface = "eth0"\n'
            for side in rig.sides
        )
    )


def strays() -> list[str]:
    """What a rig could have left on this machine: namespaces, links, processes, mounts."""
    ours = f"{OURS}-"  # whole: lanes12345 is not of lanes1234
    left = [line for line in run("ip", "netns", "list").splitlines() if line.startswith(ours)]
    left += [line for line in run("ip", "-o", "link").splitlines() if ours in line]
    left += [mount for mount in _mounts() if f"/{OURS}-" in mount]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(f"/{OURS}-" in word for word in process.cmdline()):
                left.append(f"{process.pid} {process.cmdline()}")
    return left


if __name__ == "__main__":
    if why := missing():
        sys.exit(why)
    with up() as found:
        print(f"PATH={found.root / 'bin'}:$PATH HOSTS={found.hosts}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.readline()
