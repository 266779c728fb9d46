"""One SSH connection a host, and all that goes over it: commands, its Docker engine as a socket
here, the server's port.

`docker -H ssh://` opens a connection for every command (1.2 s each on a busy machine) and has no
keep-alive: after a partition it hangs for a quarter of an hour (2026-11-30). Here one connection is
watched by SSH itself; when it ends, everything that goes over it fails at once.
"""

import contextlib
import io
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lanekit import hosts, images, process
from lanekit.errors import ConfigError, HostLost
from lanekit.manifest import Process
from lanekit.plan import Host

if TYPE_CHECKING:
    from python_on_whales import DockerClient

CONNECT_S: Final = 15
ALIVE_S: Final = 5  # a silent host is lost after three of these
COMMAND_S: Final = 60.0
# Where the engine of the host listens, as its own Docker command is set up there.
_ENDPOINT: Final = "docker context inspect --format '{{.Endpoints.docker.Host}}'"


class Line:
    """What reaches a host: nothing for this machine, else one SSH connection that stays open."""

    def __init__(self, host: Host, place: Path, env: Mapping[str, str]) -> None:
        """place: a folder with a short path, for sockets. env: of the `ssh` that is started."""
        self.host = host
        self.process: Process | None = None
        self._env = dict(env)
        self._control = place / f"{host.node_rank}.ssh"
        self._socket = place / f"{host.node_rank}.docker"
        self._said = place / f"{host.node_rank}.said"
        self._child: subprocess.Popen[bytes] | None = None
        self.docker: DockerClient

    def open(self, port: int) -> None:
        """Connect, and bring the engine and the server's port of a remote host here; 0 for none.

        Raises:
            HostLost: it does not answer, or asks for a password.
            ConfigError: no Docker engine answers there.
        """
        if not self.host.ssh:
            self.docker = images.docker()
            return
        self._connect()
        at = self.run(_ENDPOINT).strip()
        if not at.startswith("unix://"):
            raise HostLost(
                f"{self.host.name}: its Docker engine is at '{at}', not at a socket",
                remedy="Set DOCKER_HOST=unix://... there, or `docker context use default`.",
            )
        self._forward(f"{self._socket}:{at.removeprefix('unix://')}")
        if port:
            self._forward(f"127.0.0.1:{port}:127.0.0.1:{port}")
        self.docker = images.docker(self.host.ssh, self._socket)

    def run(self, command: str) -> str:
        """What a shell command prints on the host. Raises HostLost: it cannot be run there."""
        words = [*self._ssh(), command] if self.host.ssh else ["sh", "-c", command]
        try:
            done = subprocess.run(
                words, env=self._env, capture_output=True, text=True, errors="replace",
                timeout=COMMAND_S, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise self._lost(str(error)) from error
        if done.returncode:
            raise self._lost(f"`{command}`: {_last(done.stderr) or done.returncode}")
        return done.stdout

    @property
    def alive(self) -> bool:
        """Whether the host is still reached."""
        return self._child is None or self._child.poll() is None

    def require(self) -> None:
        """Notice a host that is gone. Raises HostLost: its connection ended."""
        if not self.alive:
            raise self._lost(self._words() or "the connection ended")

    def close(self) -> None:
        """Hang up; a socket that is left behind is nobody's."""
        if self.process is not None and self._child is not None:
            process.end([self.process], grace_s=2)
            self._child.wait()

    def _connect(self) -> None:
        options = {
            "ControlPersist": "no", "ConnectTimeout": CONNECT_S, "ServerAliveInterval": ALIVE_S,
            "ServerAliveCountMax": 3, "StreamLocalBindUnlink": "yes",
        }  # fmt: skip
        words = self._ssh("-M", "-N", *(f"-o{name}={value}" for name, value in options.items()))
        with self._said.open("wb") as said:
            what = f"ssh to {self.host.name}"
            self._child, self.process = process.spawn(what, words, self._env, said)
        deadline = time.monotonic() + CONNECT_S + 5
        while not self._control.exists():
            if not self.alive or time.monotonic() > deadline:
                raise self._lost(self._words() or "no answer")
            time.sleep(0.02)

    def _ssh(self, *flags: str) -> list[str]:
        where, _, port = self.host.ssh.partition(":")
        given = ["-p", port] if port else []
        return ["ssh", "-S", str(self._control), "-oBatchMode=yes", *given, *flags, "--", where]

    def _forward(self, what: str) -> None:
        words = self._ssh("-O", "forward", "-L", what)
        done = subprocess.run(words, env=self._env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise self._lost(f"cannot forward {what}: {_last(done.stderr)}")

    def _words(self) -> str:
        with contextlib.suppress(OSError):
            return _last(self._said.read_text(errors="replace"))
        return ""

    def _lost(self, why: str) -> HostLost:
        return HostLost(
            f"host {hosts.with_ranks(self.host)} cannot be reached: {why}",
            remedy=f"`ssh {self.host.ssh} true` must work without a question; is it up?"
            if self.host.ssh
            else "That is this machine.",
        )


def keys(place: Path) -> bytes:
    """A new key pair as a tar archive, under the names that Kubernetes' MPI operator gives its own:
    `id_rsa` is both what a client shows and how a daemon is known, to all that hold it. Nothing of
    it stays in `place`. Raises ConfigError: it cannot be made."""
    path = place / "id_rsa"
    ask = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lane", "-f", str(path)]
    try:
        subprocess.run(ask, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        private, public = path.read_bytes(), path.with_suffix(".pub").read_bytes()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"ssh-keygen makes no key: {error}", remedy="Install openssh-client."
        ) from error
    finally:
        path.unlink(missing_ok=True)
        path.with_suffix(".pub").unlink(missing_ok=True)
    # The last one tells who waits that all are there.
    files = {"id_rsa": private, "authorized_keys": public, "known_hosts": b"* " + public}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o600
            tar.addfile(entry, io.BytesIO(text))
    return archive.getvalue()


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def everywhere(lines: Sequence[Line], does: Callable[[Line], None]) -> None:
    """Do something on every host at once; the first error, in the order of the hosts, is raised."""
    with ThreadPoolExecutor(min(len(lines), 32)) as pool:
        for each in [pool.submit(does, line) for line in lines]:
            each.result()
