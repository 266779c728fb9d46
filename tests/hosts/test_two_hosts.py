"""The compose launcher on two hosts, for real: two Docker engines in two network namespaces with
their own addresses, reached over SSH, and faults in everything between them.

The program is the gloo arm of the micro lane, whose ranks meet over the network between the hosts.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from tests.hosts.rig import Rig, Side, held

from lanekit import alone, drop, model, paths, registry, triage, verify
from lanekit.errors import ImageFailed
from lanekit.manifest import Manifest

WAIT_S = 240.0  # two busy cores need a minute for what takes a few seconds alone
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


class Fleet:
    """Runs of the micro lane on the rig, into one results folder."""

    def __init__(self, rig: Rig, scratch: Path) -> None:
        self.rig = rig
        self.a, self.b = rig.sides
        self.results = scratch / "results"
        self.children: list[subprocess.Popen[str]] = []

    def start(self, *args: str, lane: str = "micro") -> subprocess.Popen[str]:
        """Start a run; of the lanes beside this file through driver.py."""
        own = [str(Path(__file__).parent / "driver.py")]
        command = [sys.executable, *(["-m", "lanekit"] if lane == "micro" else own), "run", lane]
        command += ["--profile=cpu-x2", f"--hosts={self.rig.hosts}", f"--results={self.results}"]
        child = subprocess.Popen(
            [*command, *(["--cells=decode"] if lane == "micro" else []), *args], text=True,
            env=self.rig.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.children.append(child)
        return child

    def end(self, child: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for a run: its exit code and what it said."""
        said, _ = child.communicate(timeout=WAIT_S)
        return child.returncode, said

    def newest(self) -> Path:
        """The newest drop."""
        return max(self.results.glob("2*"))

    def manifest(self) -> Manifest:
        """Its manifest."""
        return drop.read(self.newest())

    def until(self, so: Callable[[], bool], child: subprocess.Popen[str]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and child.poll() is None:
            with contextlib.suppress(Exception):
                if so():
                    return
            time.sleep(0.1)
        pytest.fail(f"it did not come so far: {self.end(child)}")

    def running(self) -> bool:
        """Whether the containers of both hosts are recorded."""
        return len([each for each in self.manifest().processes if each.container]) == 2

    def met(self) -> bool:
        """Whether the ranks of both hosts have joined one group."""
        logs = sorted(self.newest().glob("logs/*.log"))
        return len(logs) == 2 and all(b"[micro] v=1" in log.read_bytes() for log in logs)

    def rank(self, side: Side) -> int:
        """The PID of the rank that a host runs, not its launcher: of the micro lane or of vLLM,
        which gives it a title; 0 while there is none."""
        for pid in side.pids():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                micro = words[1:2] == [b"-u"] and any(w.endswith(b"ep_bench.py") for w in words)
                if micro or words[0].startswith(b"VLLM::EngineCore"):
                    return pid
        return 0

    def ssh_processes(self) -> list[str]:
        """What is left of the connections that runs of this folder opened."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"LANEKIT_RUN={self.results}".encode() in entry.read_bytes():
                    found.append(entry.parent.name)
        return found


@pytest.fixture
def fleet(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Runs on the rig; whatever happened to it, nothing of them is left."""
    monkeypatch.setenv("PATH", rig.environment["PATH"])
    made = Fleet(rig, tmp_path)
    yield made
    for child in made.children:
        if child.poll() is None:
            child.terminate()
            child.communicate(timeout=120)
    assert rig.strays() == []
    assert made.ssh_processes() == []


@pytest.mark.quick
def test_the_gloo_arm_over_two_hosts_is_proven(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proven; and a token that this machine has reaches the ranks past command lines and drop."""
    monkeypatch.setenv("HF_TOKEN", "hf_of_two_hosts")
    child, told, given = fleet.start(), set[str](), set[str]()
    while child.poll() is None:
        told |= holding("cmdline", b"hf_of_two_hosts")
        given |= holding("environ", b"HF_TOKEN=hf_of_two_hosts")
        time.sleep(0.2)
    code, said = fleet.end(child)
    assert code == 0, said
    assert told == set()
    assert any("ep_bench.py" in each for each in given), "the ranks do not get it"
    for file in (path for path in fleet.newest().rglob("*") if path.is_file()):
        assert b"hf_of_two_hosts" not in file.read_bytes(), file
    path, manifest = fleet.newest(), fleet.manifest()
    verdict = verify.verify(path)
    assert verdict.result == "proven"
    assert {c.actual for c in verdict.checks if c.id == "micro-gloo"} == {"2 of 2 ranks"}
    assert {"compose/lanes-a.yaml", "compose/lanes-b.yaml", "host/lanes-a.json",
            "host/lanes-b.json", "logs/lanes-a-decode.log", "logs/lanes-b-decode.log",
            "micro/decode/micro.jsonl"} <= set(manifest.files)  # fmt: skip
    assert manifest.left == []


def holding(what: str, words: bytes) -> set[str]:
    """Command lines of the processes whose command line or environment holds these words."""
    found = set[str]()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if words in (entry / what).read_bytes():
                found.add((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """What the lane `dp` serves, where the containers' user can read it."""
    path = dense(tmp_path / "tiny-qwen3-moe")
    path.chmod(0o755)
    return path


def dense(folder: Path) -> Path:
    """A small dense model: its shape and tokenizer, whose weights the engine makes up."""
    model.ensure(folder)
    config = json.loads((folder / "config.json").read_text())
    for key in [key for key in config if "expert" in key or key.startswith(("moe_", "mlp_only"))]:
        del config[key]
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


served = pytest.mark.skipif(
    not held("aiperf"), reason="needs image aiperf in this machine's Docker engine"
)


@served
def test_vllm_serves_from_both_hosts_and_is_swept_on_the_leader(
    fleet: Fleet, model_path: Path
) -> None:
    """Real vLLM with a data-parallel rank a host, real AIPerf in the leader's network."""
    for _ in range(2):  # AIPerf tears a prompt now and then, its own race that 0.12.0 has mended
        child = fleet.start(f"--model={model_path}", "--cells=load", lane="dp")
        said, _ = child.communicate(timeout=4 * WAIT_S)
        if "Failed to decode conversation data" not in said:
            break
    manifest = fleet.manifest()
    assert manifest.state == "complete", said
    assert "comparing" in said, "the model of both hosts was not compared"
    (cell,) = verify.verify(fleet.newest()).cells
    assert (cell.name, cell.requests, cell.errors) == ("load", 8, 0)
    for host, rank in (("lanes-a", "DP0"), ("lanes-b", "DP1")):
        (log,) = fleet.newest().glob(f"logs/{host}-*.log")
        assert f"EngineCore_{rank}".encode() in log.read_bytes()
    assert b'POST /v1/completions HTTP/1.1" 200' in log.parent.joinpath(
        "lanes-a-server.log").read_bytes()  # fmt: skip


@served
def test_a_rank_that_is_killed_while_it_starts_ends_the_start(
    fleet: Fleet, model_path: Path
) -> None:
    child = fleet.start(f"--model={model_path}", "--cells=load", lane="dp")
    fleet.until(lambda: fleet.rank(fleet.b) > 0, child)
    os.kill(fleet.rank(fleet.b), signal.SIGKILL)
    code, said = fleet.end(child)
    assert code == 2
    assert "worker on lanes-b ended with" in said
    manifest = fleet.manifest()
    assert (manifest.state, manifest.stage) == ("failed", "starting")
    first = triage.triage(fleet.newest()).first
    assert first is not None
    assert first.who[0] == "lanes-b"


@served
def test_a_host_that_is_cut_off_in_a_sweep_ends_it_and_is_named(
    fleet: Fleet, model_path: Path
) -> None:
    child = fleet.start(f"--model={model_path}", "--cells=long", lane="dp")
    fleet.until(lambda: fleet.manifest().stage == "sweeping long", child)
    asked = swept(fleet.newest())  # by the coherence gate
    fleet.until(lambda: swept(fleet.newest()) > asked + 4, child)
    fleet.b.link("down")
    try:
        code, said = fleet.end(child)
    finally:
        fleet.b.link("up")
    assert code == 2
    assert "host lanes-b (rank 1) cannot be reached" in said
    manifest = fleet.manifest()
    assert (manifest.state, manifest.stage) == ("failed", "sweeping long")
    assert all("lanes-b" in each for each in manifest.left)
    assert len(manifest.left) == 1, "the leader's containers are removed, AIPerf's too"
    first = triage.triage(fleet.newest()).first
    assert first is not None
    assert first.who[0] == "lanes-b"
    assert verify.verify(fleet.newest()).result == "no verdict"
    assert b"POST" in (fleet.newest() / "logs" / "lanes-a-server.log").read_bytes()
    heard: list[str] = []
    with alone.holding(str(fleet.results / "next"), heard.append):
        pass
    assert any("removed what a dead run left" in each for each in heard)


def swept(drop: Path) -> int:
    """How many completions the leader has answered."""
    return (drop / "logs" / "lanes-a-server.log").read_bytes().count(b"POST /v1/completions")


@pytest.mark.parametrize("killed", [False, True])
def test_mpirun_starts_ranks_on_both_hosts_by_a_key_of_this_run(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """A real Open MPI (Debian's 4.1.4) in our containers, with the trtllm lane's own roles."""
    if not (held("mpi-probe") and held("aiperf")):
        pytest.skip("needs the images mpi-probe (made where Debian's mirror answers) and aiperf")
    monkeypatch.setenv("LANES_FOLDER", str(like_trtllm(tmp_path / "lanes")))
    child = fleet.start(lane="mpi")
    fleet.until(lambda: fleet.manifest().state == "ready", child)
    log = fleet.newest() / "logs" / "lanes-a-server.log"
    for rank, host in enumerate(("lanes-a", "lanes-b")):
        said = f"rank {rank} on {host}: HOME=/kept/10001 LANE_SAID=two words"
        fleet.until(partial(says, log, said), child)
    keys = [key_of(side) for side in fleet.rig.sides]
    assert keys[0] == keys[1]
    assert not [place for place in written(fleet) if keys[0] in place]
    if killed:
        (pid,) = [
            p for p in fleet.b.pids() if b"rank.py" in cmdline(p) and b"orted" not in cmdline(p)
        ]
        os.kill(pid, signal.SIGKILL)
    else:
        (fleet.results / "seen").touch()
    _, said = fleet.end(child)
    assert fleet.manifest().state == ("failed" if killed else "complete"), said
    assert ("container server on lanes-a ended" in said) == killed


def like_trtllm(folder: Path) -> Path:
    """A folder of one lane, whose mpirun and roles are word for word those of the trtllm lane."""
    lane, real = Path(__file__).parent / "lanes" / "mpi", paths.LANES / "trtllm"
    made = Path(shutil.copytree(lane, folder / "mpi"))
    roles = re.search(
        r"^\[roles\.leader\].*?(?=^\[profiles)", (real / "lane.toml").read_text(), re.M | re.S
    )
    assert roles
    (made / "lane.toml").write_text(f"{(lane / 'lane.toml').read_text()}\n{roles[0]}")
    found = yaml.safe_load((real / "serve.yaml").read_text())
    words = found["services"]["server"]["command"].partition(" trtllm-llmapi-launch ")[0]
    mpirun = words.replace("/opt/amazon/openmpi/bin/mpirun", "/usr/bin/mpirun")
    program = "python ${LANE_HOME}/rank.py ${LANE_PORT}"
    found["services"]["server"]["command"] = f"{mpirun} {program}"
    (made / "serve.yaml").write_text(yaml.safe_dump(found))
    return folder


def says(log: Path, words: str) -> bool:
    """Whether a log holds some words."""
    return words in log.read_text()


def key_of(side: Side) -> bytes:
    """The middle of the private key in a host's container."""
    (container,) = side.docker("ps", "--quiet").split()
    text = side.docker("exec", container, "cat", "/lane/ssh/id_rsa").splitlines()
    assert "PRIVATE KEY" in text[0]
    return text[2].encode()


def cmdline(pid: int) -> bytes:
    """A process's words."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def written(fleet: Fleet) -> Iterator[bytes]:
    """All of a run that somebody else may read: drop, process list, containers' settings."""
    yield from (path.read_bytes() for path in fleet.newest().rglob("*") if path.is_file())
    yield from (cmdline(int(pid.name)) for pid in Path("/proc").glob("[0-9]*"))
    for side in fleet.rig.sides:
        yield side.docker("inspect", *side.docker("ps", "--quiet").split()).encode()


def test_a_rank_that_is_killed_ends_all_and_is_named_first(fleet: Fleet) -> None:
    child = fleet.start("--cells=sweep")
    fleet.until(fleet.met, child)
    victim = fleet.rank(fleet.b)
    assert victim, "no rank runs on lanes-b"
    os.kill(victim, signal.SIGKILL)
    code, said = fleet.end(child)
    assert code == 2
    assert "first on lanes-b" in said
    assert "rank      : 1" in said
    manifest = fleet.manifest()
    assert manifest.state == "failed"
    assert "SIGKILL" in (manifest.failure or "")
    first = triage.triage(fleet.newest()).first
    assert first is not None
    assert first.who[0] == "lanes-b"
    # The survivor's own words are in the drop too.
    assert b"lanes-a" in (fleet.newest() / "logs" / "lanes-a-sweep.log").read_bytes()


def test_a_host_that_is_slow_and_has_another_clock_is_waited_for_and_said(fleet: Fleet) -> None:
    if not FAKETIME.is_file():
        pytest.skip("needs libfaketime, which skews the clock that SSH shows")
    fleet.b.environment = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+120s"}
    fleet.b.restart_ssh()
    try:
        child = fleet.start()
        fleet.until(fleet.running, child)
        (identity,) = fleet.b.docker("ps", "-q").split()
        fleet.b.docker("pause", identity)
        time.sleep(8)
        fleet.b.docker("unpause", identity)
        code, said = fleet.end(child)
    finally:
        fleet.b.environment = {}
        fleet.b.restart_ssh()
    assert code == 0, said
    assert "warning: clock" in said
    assert "lanes-b" in said


def test_kernels_are_compiled_before_ranks_meet_and_kept_for_the_next_run(fleet: Fleet) -> None:
    """With torch's Inductor, which really compiles: a host that is late with it delays the ranks
    of both, which then compile nothing; nor does the next run, by its own warm-up."""
    for run in ("first", "second"):
        child = fleet.start(lane="jit")
        if run == "first":
            fleet.until(fleet.running, child)
            (identity,) = fleet.b.docker("ps", "-q").split()
            fleet.b.docker("pause", identity)
            fleet.until(lambda: b"built" in warmed(fleet.newest(), "lanes-a"), child)
            time.sleep(2)
            assert fleet.manifest().stage == "warming"
            assert not list(fleet.newest().glob("logs/*"))
            fleet.b.docker("unpause", identity)
        _, said = fleet.end(child)
        assert fleet.manifest().state == "complete", said
        for host in ("lanes-a", "lanes-b"):
            assert (b"built=0" in warmed(fleet.newest(), host)) == (run == "second")
            log = (fleet.newest() / "logs" / f"{host}-meet.log").read_bytes()
            assert b"built=0" in log
            assert b"[jit] met" in log


def warmed(drop: Path, host: str) -> bytes:
    """The log of a host's warm-up."""
    return (drop / "warm" / f"{host}-warm.log").read_bytes()


@pytest.mark.quick
def test_a_host_that_is_cut_off_ends_the_run_and_is_cleaned_when_it_is_back(fleet: Fleet) -> None:
    child = fleet.start()
    fleet.until(fleet.running, child)
    heard: list[str] = []
    fleet.b.link("down")
    try:
        code, said = fleet.end(child)
        with alone.holding(str(fleet.results / "next"), heard.append):
            pass
    finally:
        fleet.b.link("up")
    assert any("is still there" in each and "lanes-b" in each for each in heard)
    assert code == 2
    assert "host lanes-b (rank 1) cannot be reached" in said
    manifest = fleet.manifest()
    assert manifest.state == "failed"
    assert any("lanes-b" in each for each in manifest.left)
    assert not any("lanes-a" in each for each in manifest.left)
    found = triage.triage(fleet.newest()).first
    assert found is not None
    assert found.who[0] == "lanes-b"
    assert fleet.b.docker("ps", "-q").split(), "the test must have something to clean"
    with alone.holding(str(fleet.results / "next"), heard.append):
        pass
    assert any("removed what a dead run left" in each for each in heard)


def test_a_host_that_dies_ends_the_run_and_its_log_is_kept(fleet: Fleet) -> None:
    child = fleet.start()
    fleet.until(fleet.met, child)
    fleet.b.kill()
    code, said = fleet.end(child)
    try:
        assert code == 2
        assert "host lanes-b (rank 1) cannot be reached" in said
        assert b"[micro] v=1" in (fleet.newest() / "logs" / "lanes-b-decode.log").read_bytes()
        assert fleet.a.docker("ps", "-aq").split() == []
        heard: list[str] = []
        with alone.holding(str(fleet.results / "next"), heard.append):
            pass
        assert any("is still there" in each and "lanes-b" in each for each in heard)
    finally:
        fleet.b.begin()
    with alone.holding(str(fleet.results / "next"), heard.append):
        pass
    assert fleet.b.docker("ps", "-aq").split() == []


@pytest.mark.quick
def test_a_runner_that_is_killed_leaves_what_the_next_run_removes(fleet: Fleet) -> None:
    child = fleet.start()
    fleet.until(fleet.running, child)
    child.kill()
    child.communicate(timeout=60)
    assert fleet.rig.strays(), "the test must have something to clean"
    heard: list[str] = []
    with alone.holding(str(fleet.results / "next"), heard.append):
        pass
    assert any("removed what a dead run left" in each for each in heard)


def test_an_interrupted_run_removes_its_containers_on_both_hosts(fleet: Fleet) -> None:
    child = fleet.start()
    fleet.until(fleet.running, child)
    child.send_signal(signal.SIGINT)
    code, said = fleet.end(child)
    assert code == 2
    assert "stopped by SIGINT" in said
    assert fleet.manifest().state == "interrupted"


def test_a_taken_port_is_refused_before_anything_starts(fleet: Fleet) -> None:
    listen = (
        "import socket,time; s=socket.create_server(('',41999)); print(1,flush=1); time.sleep(600)"
    )
    command = ["ip", "netns", "exec", fleet.a.space, sys.executable, "-c", listen]
    taken = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert taken.stdout is not None
        taken.stdout.readline()
        code, said = fleet.end(fleet.start("--port=41999"))
    finally:
        taken.kill()
        taken.communicate()
    assert code == 2
    assert "41999" in said
    assert "lanes-a" in said
    assert not list(fleet.results.glob("2*/manifest.json"))


def forget(side: Side) -> None:
    """Remove what a host keeps: a file system laid over it would hide it from its engine."""
    for name in side.docker("volume", "ls", "--quiet").split():
        side.docker("volume", "rm", name)


def test_a_full_disk_on_a_host_is_named_with_the_host(fleet: Fleet) -> None:
    volumes = fleet.b.root / "data" / "volumes"
    forget(fleet.b)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(volumes)], check=True)
    try:
        code, said = fleet.end(fleet.start())
    finally:
        forget(fleet.b)
        subprocess.run(["umount", "-l", str(volumes)], check=True)
    assert code == 2
    assert "lanes-b" in said
    assert "no space left on device" in said.lower(), said[-1500:]
    first = triage.triage(fleet.newest()).first
    assert first is not None
    assert first.signature is not None
    assert first.signature.id == "disk-full"


def test_a_pull_that_is_refused_names_the_image(fleet: Fleet, tmp_path: Path) -> None:
    from python_on_whales import DockerClient  # noqa: PLC0415

    lock, digest = tmp_path / "images.lock", "sha256:" + "0" * 64
    lock.write_text(
        '{"2026-07": {"vllm": {"repository": "127.0.0.1:1/vllm", "tag": "x", '
        f'"digest": "{digest}", "sbom": ""}}}}}}'
    )
    client = DockerClient(host=f"unix://{fleet.b.socket}")
    with pytest.raises(ImageFailed, match=r"127\.0\.0\.1:1/vllm@sha256:0000"):
        registry.fetch(client, digest, print, lock)


@pytest.mark.parametrize("same", [True, False])
def test_a_model_of_the_hub_is_compared_in_what_the_hosts_keep(fleet: Fleet, *, same: bool) -> None:
    """The hub is not reached from here: the client finds what an earlier run fetched."""
    digest = fleet.a.docker("images", "--no-trunc", "-q", "lanes/vllm-cpu:2026-07").strip()
    name = f"lanes-kept-{digest.removeprefix('sha256:')[:12]}"
    for side in fleet.rig.sides:
        side.docker("volume", "create", name)
        at = Path(side.docker("volume", "inspect", "--format", "{{.Mountpoint}}", name).strip())
        hub = at / "10001/.cache/huggingface/hub/models--acme--tiny"
        for file, text in (("refs/main", "abc"), ("snapshots/abc/config.json", "{}")):
            (hub / file).parent.mkdir(parents=True, exist_ok=True)
            (hub / file).write_text(text)
        if side is fleet.b and not same:
            (hub / "snapshots/abc/config.json").write_text("{ }")
        subprocess.run(["chown", "-R", "10001", str(at / "10001")], check=True)
    child = fleet.start("--model=acme/tiny", "--cells=load", lane="dp")
    if same:
        fleet.until(lambda: fleet.manifest().state == "starting", child)
        child.terminate()
    code, said = fleet.end(child)
    assert code == 2
    assert "comparing acme/tiny on 2 hosts" in said
    assert ("acme/tiny on lanes-b is not the model on lanes-a" in said) != same


def test_an_image_that_is_missing_on_one_host_is_refused(fleet: Fleet) -> None:
    image = "lanes/vllm-cpu:2026-07"
    fleet.b.docker("rmi", image)
    try:
        code, said = fleet.end(fleet.start())
    finally:
        fleet.b.anew()
    assert code == 2
    assert "lanes-b" in said
    assert "image" in said
    assert image in fleet.b.docker("images", "--format", "{{.Repository}}:{{.Tag}}")
