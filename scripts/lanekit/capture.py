"""Ask a host: small commands, each run once under a time limit, their text kept as it came.

Here and over SSH it is the same script of POSIX sh on the standard input of `sh -s`, so nothing
needs to be installed there and nothing stands on a command line. Who reads the text decides what
it means (lanekit.machine, lanekit.checks).
"""

import secrets
import shlex
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from lanekit import toml

RESOURCE: Final = Path(__file__).parent / "resources" / "doctor.toml"
PATIENCE_S: Final = 180.0
CONNECT_S: Final = 10  # for a connection and its handshake
KEPT: Final = 256 * 1024  # characters of one answer; `docker image ls` can be long
ABSENT: Final = 127  # what sh answers for a command that is not there
KILLED: Final = 137  # what `timeout -s KILL` answers


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question: a command of POSIX sh and the seconds it may take."""

    run: str
    seconds: int = 10


class Text(msgspec.Struct, frozen=True):
    """What a command said (both streams) and its exit status."""

    rc: int
    out: str


class Capture(msgspec.Struct, frozen=True):
    """One host's answers by probe. error: why there are none.

    clock: the least and the most seconds by which its clock may be ahead of the asker's.
    """

    host: str
    texts: dict[str, Text] = {}
    error: str = ""
    clock: tuple[float, float] = (0.0, 0.0)


class _File(msgspec.Struct, frozen=True):
    probe: dict[str, Probe]


def probes() -> dict[str, Probe]:
    """Every probe of resources/doctor.toml, by name."""
    return toml.load(RESOURCE, _File).probe


def capture(
    host: str, asked: Mapping[str, Probe], *, ssh: str = "", folder: Path | None = None
) -> Capture:
    """Ask one host. ssh: [user@]address[:port] of its SSH daemon, empty for this machine.

    folder: where the commands run, here only; the home directory over SSH. Never raises: a host
    that does not answer says so in `error`.
    """
    mark = secrets.token_hex(8)
    begin = time.time()
    try:
        done = subprocess.run(
            _command(ssh), input=script(asked, mark), capture_output=True, text=True,
            errors="replace", timeout=PATIENCE_S, check=False, cwd=None if ssh else folder,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Capture(host, error=str(error) if ssh else f"sh: {error}")
    texts, clock = split(done.stdout, mark)
    if len(clock) < 2:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return Capture(host, texts, error=said[-1][:300])
    # The first reading was taken after `begin`, the last one before now: that bounds the offset.
    return Capture(host, texts, clock=(clock[1] - time.time(), clock[0] - begin))


def _command(ssh: str) -> list[str]:
    if not ssh:
        return ["sh", "-s"]
    where, _, port = ssh.partition(":")
    options = ["-oBatchMode=yes", f"-oConnectTimeout={CONNECT_S}", *(["-p", port] if port else [])]
    return ["ssh", *options, "--", where, "sh -s"]


def script(asked: Mapping[str, Probe], mark: str) -> str:
    """The questions as one script; `mark` begins its own lines, so that no answer can forge one."""
    lines = [
        "LC_ALL=C; export LC_ALL",
        f"say() {{ printf '\\n%s %s\\n' {mark} \"$*\"; }}",
        "say clock $(date +%s.%N)",
    ]
    for name, probe in asked.items():
        limited = f"timeout -s KILL {probe.seconds} sh -c {shlex.quote(probe.run)}"
        lines += [f"say begin {name}", f"{limited} </dev/null 2>&1", "say end $?"]
    return "\n".join([*lines, "say clock $(date +%s.%N)", ""])


def split(said: str, mark: str) -> tuple[dict[str, Text], list[float]]:
    """The answers by probe and the clock readings (s since the epoch) of a script's output.

    What was cut off in the middle of an answer is left out.
    """
    texts: dict[str, Text] = {}
    clock: list[float] = []
    name = ""
    for piece in said.split(f"\n{mark} ")[1:]:
        word, _, rest = piece.partition(" ")
        value, _, body = rest.partition("\n")
        if word == "begin":
            name, answer = value, body
        elif word == "end" and name and value.isdigit():
            texts[name] = Text(int(value), answer[:KEPT].strip("\n"))
        elif word == "clock" and value.replace(".", "", 1).isdigit():
            clock.append(float(value))
    return texts, clock
