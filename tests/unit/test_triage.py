"""The first death is named: in logs of real failures, and in the smallest ones made here."""

import gzip
import re
from pathlib import Path
from typing import Final

import drops
import pytest

from lanekit import cli, toml, triage
from lanekit.errors import ConfigError, Unreadable

LOGS: Final = Path(__file__).parents[1] / "fixtures" / "logs"
TRACE: Final = (
    "Traceback (most recent call last):",
    '  File "/x/vllm/worker.py", line 12, in step',
    "    raise Oh()",
)
AT: Final = "(W pid=1) ERROR 11-30 {} [x.py:1] "
# what each signature was met as; a symptom is told by its line alone
MET: Final = {
    "worker-failed": "RuntimeError: Engine core initialization failed. See root cause above.",
    "engine-dead": "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    "gin-barrier-timeout": "DeepEP Gin barrier timeout, tag: 3, rank 1",
    "nvlink-barrier-timeout": "DeepEP NVLink barrier timeout, rank 1",
    "connection-lost": "h:1:1 [0] NCCL WARN socketProgress: Connection closed by remote peer x",
    "collective-timeout": "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL",
    "ended-from-outside": "SystemExit",
    "host-lost": "HostLost: host b (ranks 8-15) cannot be reached: Timeout, server not responding.",
    "library-replaced": "ImportError: /_C.so: undefined symbol: nvshmem_selected_device_transport",
    "driver-not-linked": "ImportError: /deep_ep_cpp.so: undefined symbol: cuMemAddressFree",
    "launch-failed": "RuntimeError: CUDA error: unspecified launch failure",
    "token-cap": "Assertion failed: elastic.hpp:9, num_tokens <= num_max_tokens_per_rank",
    "nccl-xml-cap": "h:1:1 [0] NCCL WARN Error : too many XML nodes (max 256)",
    "rendezvous": "torch.distributed.DistNetworkError: The client socket has timed out after 600s",
    "numa-binding": "AssertionError: Not enough allowed NUMA nodes to bind threads of 2 local",
    "host-out-of-memory": "kernel: Out of memory: Killed process 7 (python) total-vm:1kB",
    "gpu-out-of-memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    "illegal-access": "AcceleratorError: CUDA error: an illegal memory access was encountered",
    "engine-missing": "/usr/bin/python3: Error while finding module specification for "
    "'vllm.entrypoints.openai.api_server' (ModuleNotFoundError: No module named 'vllm')",
    "nccl-too-old": "DeepEP v2 requires NCCL >= 2.30 but found 2.28. deepep_v2 backend will not",
    "gin-unavailable": "RuntimeError: NCCL GIN is unavailable on this communicator",
    "no-symmetric-memory": "h:1:1 [0] NCCL WARN Communicator does not support symmetric memory!",
    "agrs-unsupported": "RuntimeError: destroy_agrs_session: CUDA driver error 801",
    "lscpu": "FileNotFoundError: [Errno 2] No such file or directory: 'lscpu'",
    "disk-full": "OSError: [Errno 28] No space left on device",
    "address-in-use": "OSError: [Errno 98] Address already in use",
    "legacy-refused": "RuntimeError: lane-evidence: legacy deep_ep.Buffer refused, this lane needs",
    "aiperf-prompt-torn": "aiperf.common.exceptions.MemoryMapSerializationError: Failed to decode "
    "conversation data: 1 validation error for Conversation",
    "keep-alive": "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected",
}  # fmt: skip


def said(path: Path) -> str:
    return triage.text(triage.triage(path))


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_graph_crash_names_the_first_worker() -> None:
    path = LOGS / "h200x2-vllm-deepep_v2-graph-crash.log.gz"
    found = triage.triage(path)
    assert found.first is not None
    assert found.first.signature is not None
    assert (found.exit_code, found.first.who) == (0, ("vm", "Worker_DP1_EP1", "6839"))
    assert (found.first.line, found.first.signature.id) == (694, "illegal-access")
    assert found.first.frame.endswith("in synchronize")
    assert found.began is not None
    assert (found.began.line, "cutlass_gemm_caller" in found.began.text) == (671, True)
    text = triage.text(found)
    assert "patches/vllm/0.24.0" in text
    assert re.search(r"x\d+ worker-failed: .*EngineCore_DP1 pid 6607, APIServer pid 6360", text)
    assert len(text.splitlines()) <= 24


def test_cpu_data_parallel_crash_names_the_method_that_is_missing() -> None:
    found = triage.triage(LOGS / "vllm-cpu-dp2-ep2-crash.log.gz")
    assert found.first is not None
    assert found.first.signature is not None
    assert (found.first.who[1:], found.first.line) == (("Worker_DP1_EP1", "31927"), 172)
    assert found.first.signature.id == "cpu-all-gatherv"
    assert found.first.frame.endswith("in all_gatherv")
    assert any(e.who[1] == "Worker_DP0_EP0" for e in found.others)


def test_cpu_tensor_parallel_crash_names_the_binding() -> None:
    found = triage.triage(LOGS / "vllm-cpu-tp2-numa-assert.log.gz")
    assert found.first is not None
    assert found.first.signature is not None
    assert (found.first.who[1:], found.first.line) == (("EngineCore", "978"), 59)
    assert found.first.signature.id == "numa-binding"


def test_sglang_that_turned_virtual_memory_off_is_told_what_to_set() -> None:
    found = triage.triage(LOGS / "h200x2-sglang-v2-no-cumem.log.gz")
    assert found.first is not None
    assert found.first.signature is not None
    assert (found.first.line, found.first.signature.id) == (1450, "no-symmetric-memory")
    assert found.first.frame == "deep_ep/buffers/elastic.py:208 in __init__"
    assert "Set NCCL_CUMEM_ENABLE=1: SGLang sets 0" in triage.text(found)


@pytest.mark.parametrize(
    ("line", "others"),
    [
        (
            MET["no-symmetric-memory"],
            ("windows are switched off, or", "NCCL_WIN_ENABLE=0", "no GIN", "p2p"),
        ),
        (MET["driver-not-linked"], ("or the driver is older", "install a newer driver")),
    ],
)
def test_a_message_of_several_causes_is_told_with_each(
    tmp_path: Path, line: str, others: tuple[str, ...]
) -> None:
    told = " ".join(said(write(tmp_path / "server.log", *TRACE[:2], line)).split())
    for each in others:
        assert each in told


@pytest.mark.parametrize("name", ["deepep_v2-eager", "allgather-graph"])
def test_sound_logs_have_no_failure(name: str) -> None:
    found = triage.triage(LOGS / f"h200x2-vllm-{name}.log.gz")
    assert (found.first, found.others, found.exit_code) == (None, (), 2)
    assert triage.text(found).endswith("no failure found in 1 log")


def test_every_signature_is_told_and_no_other(tmp_path: Path) -> None:
    known = {s.id: s for s in triage.signatures()}
    assert set(known) - set(MET) == {"cpu-all-gatherv"}
    for name, line in MET.items():
        found = triage.triage(write(tmp_path / "a.log", *TRACE, line))
        assert found.first is not None or known[name].kind == "symptom", name
        events = [found.first] if found.first else found.others
        assert [e.signature.id for e in events if e and e.signature] == [name]
        assert (found.exit_code, known[name].fix != "") == (
            (0, True) if known[name].kind == "cause" else (2, False)
        )


def test_a_symptom_is_never_the_cause_even_when_first(tmp_path: Path) -> None:
    """Fifteen ranks time out before the log of the sixteenth states why it died."""
    stamp = "(Worker_DP{0}_EP{0} pid={1}) ERROR 11-30 11:00:{2:02d} [x.py:1] "
    for rank in range(15):
        line = stamp.format(rank, 70 + rank, rank) + MET["gin-barrier-timeout"]
        write(tmp_path / f"h{rank // 8}-worker{rank}.log", line)
    death = stamp.format(15, 85, 59)
    write(tmp_path / "h1-worker15.log", *(death + x for x in (*TRACE, MET["launch-failed"])))
    text = said(tmp_path)
    assert "first death  h1 Worker_DP15_EP15 pid 85  [h1-worker15.log:4]" in text
    assert "last frame x/vllm/worker.py:12 in step" in text
    assert "x15 gin-barrier-timeout: " in text
    assert "and 13 more)" in text
    (tmp_path / "h1-worker15.log").unlink()
    assert triage.triage(tmp_path).exit_code == 2
    assert "the log of whoever died first is not here" in said(tmp_path)


def test_time_decides_between_files_and_the_client_comes_last(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "a.log", AT.format("11:00:09") + MET["disk-full"])
    write(tmp_path / "logs" / "b.log", AT.format("11:00:05") + MET["gpu-out-of-memory"])
    write(tmp_path / "aiperf" / "console.log", AT.format("10:00:00") + MET["keep-alive"])
    assert "[logs/b.log:1]" in said(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "logs" / f"{name}.log").unlink()
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE=300" in said(tmp_path)


def test_an_unknown_exception_is_still_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", "(Worker pid=4) hello", *TRACE, "ValueError: so new")
    text = said(path)
    assert "[a.log:5]" in text
    assert "cause      ValueError: so new" in text
    assert "nothing seen before" in text
    assert "ENV='CUDA_LAUNCH_BLOCKING=1" in text


def test_what_falls_over_while_being_stopped_did_not_fail(tmp_path: Path) -> None:
    stop = (
        "(EngineCore pid=7) INFO 11-30 11:12:00 [core.py:1] [shutdown] trigger received signal=15"
    )
    path = write(tmp_path / "a.log", stop, *TRACE, "ValueError: torn down")
    assert triage.triage(path).exit_code == 2


def test_manifest_says_how_far_it_came_and_why(tmp_path: Path) -> None:
    drop = drops.drop(tmp_path / "drop")
    assert "manifest: complete: no failure recorded" in said(drop)
    assert "nothing failed in " in said(drop)
    assert triage.triage(drop).exit_code == 0
    drops.edit_json(drop / "manifest.json", state="sweeping")
    assert "manifest: sweeping: it goes on, or was killed there" in said(drop)
    drops.edit_json(drop / "manifest.json", state="interrupted")
    assert triage.triage(drop).exit_code == 2
    failure = "LaneError: the disk of DIR is full: No space left on device"
    drops.edit_json(drop / "manifest.json", state="failed", failure=failure)
    text = said(drop)
    assert f"manifest: failed: {failure}" in text
    assert "known as   disk-full" in text


def test_a_log_that_is_gone_is_no_log_without_failure(tmp_path: Path) -> None:
    """Until 2026-11-30 a drop without its server's log was one in which nothing failed."""
    drop = drops.drop(tmp_path / "drop")
    log = drop / "logs" / "here-server.log"
    log.with_name("here-server.log.gz").write_bytes(gzip.compress(log.read_bytes()))
    log.unlink()
    assert triage.triage(drop).exit_code == 0  # packed since
    log.with_name("here-server.log.gz").unlink()
    text = said(drop)
    assert "no failure found" in text
    assert "manifest names it: logs/here-server.log. Fetch the drop again." in text
    assert triage.triage(drop).exit_code == 2


def test_a_folder_of_drops_is_not_read_as_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        drops.drop(tmp_path / name)
    with pytest.raises(Unreadable, match="no drop, but a folder of 2") as caught:
        triage.triage(tmp_path)
    assert f"RESULTS={tmp_path / 'b'}" in caught.value.remedy


@pytest.mark.parametrize(
    ("failure", "named"),
    [
        ("ServerDied: container worker on lanes-b ended with exit status 1; its log ends:\n    x",
         "lanes-b worker"),
        ("CellFailed: decode: the program ended with a failure, first on b: container"
         " batch-decode on b ended with signal SIGKILL; container batch-decode on a ended with x",
         "b batch-decode"),
        ("ServerDied: lane-x-0-1 (pod lane-x-0-1): server ended with signal SIGKILL (OOMKilled)\n"
         "  then lane-x-0 (pod lane-x-0): server ended with exit status 1 (Error)",
         "lane-x-0-1 server"),
        ("ServerDied: host-2 (pod x): server: ImagePullBackOff: denied", "host-2 server"),
        ("CellFailed: decode: the program ended with job 7: FAILED (exit status 9) on node-[1-2]\n"
         "    srun: error: node-2: task 1: Killed", "node-2 task 1"),
        ("CellFailed: decode: the program ended with job 1: NODE_FAIL (exit status 1) on node-1\n"
         "    srun: error: Node failure on node-1", "node-1 Node failure"),
        ("CellFailed: warm: the warm-up was not done within its 5 s, still running on host lanes-b",
         "lanes-b the run"),
        ("ServerDied: server (pid 41) ended with signal SIGKILL; its log ends:", "server pid 41"),
    ],
)  # fmt: skip
def test_where_no_log_tells_the_cause_the_run_says_who_ended_first(
    tmp_path: Path, failure: str, named: str
) -> None:
    drop = drops.drop(tmp_path / "drop")
    drops.edit_json(drop / "manifest.json", state="failed", failure=failure)
    assert f"first death  {named}  [manifest.json:0]" in said(drop)
    drops.edit_json(drop / "manifest.json", failure="ConfigError: no such thing")
    assert "no failure found" in said(drop)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, why in ((tmp_path / "no", "no such file"), (tmp_path, "no log in it")):
        with pytest.raises(Unreadable, match=why):
            triage.triage(path)
    log = write(tmp_path / "torn.log.gz", "not packed")
    with pytest.raises(Unreadable, match=r"torn\.log"):
        triage.triage(log)
    assert cli.main(["triage", str(LOGS / "vllm-cpu-tp2-numa-assert.log.gz")]) == 0
    assert "first death" in capsys.readouterr().out


def test_the_table_is_strict() -> None:
    bad = b"[[signature]]\nid='a'\nkind='cause'\nliterals=[]\nmeans='m'\nsource='s'\nfixx='x'\n"
    with pytest.raises(ConfigError, match="unknown key 'fixx'"):
        toml.decode(bad, triage._Table, where="x")
