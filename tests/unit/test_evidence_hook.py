"""The evidence hook in a real interpreter of its own, against a stand-in for deep_ep.

The stand-in has the class signatures of DeepEP b306af06 and maps two tiny shared libraries that
answer the version calls of NCCL and NVSHMEM. It is no DeepEP and moves no data: what is tested here
is the hook, not the transport.
"""

import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path
from typing import Final

import pytest

EVIDENCE: Final = Path(__file__).parents[2] / "scripts" / "evidence"

STAND_IN: Final = """
import ctypes, os
for library in filter(None, os.environ.get("STAND_IN_LIBRARIES", "").split(":")):
    ctypes.CDLL(library)
if os.environ.get("STAND_IN_BROKEN"):
    raise ImportError("stand-in: no GPU here")
from .buffers import Buffer, ElasticBuffer
from .utils import comm
__version__ = "2.0.0"
"""
STAND_IN_BUFFERS: Final = """
class Handle:
    def get(self):
        return 0x1000

class ElasticBuffer:
    def __init__(self, group, num_bytes=None, num_max_tokens_per_rank=0, hidden=0, num_topk=0,
                 use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True,
                 allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=3,
                 num_allocated_qps=0, num_cpu_timeout_secs=300, num_gpu_timeout_secs=100,
                 explicitly_destroy=False):
        if hidden < 0:
            raise ValueError("stand-in: hidden below zero")
        self.nccl_comm_handle, self.allow_hybrid_mode = Handle(), allow_hybrid_mode
        self.num_allocated_qps = num_allocated_qps or (129 if allow_hybrid_mode else 17)
        self.timeouts = num_cpu_timeout_secs, num_gpu_timeout_secs

    def dispatch(self):
        return "dispatched"

class Buffer:
    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False,
                 num_qps_per_rank=24, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False,
                 explicitly_destroy=False, enable_shrink=False, comm=None):
        pass
"""
# What a group of ranks takes of torch; torch.distributed copies the names of the module below it.
STAND_IN_TORCH: Final = {
    "torch/__init__.py": """
import ctypes, os
for library in filter(None, os.environ.get("TORCH_LIBRARIES", "").split(":")):
    ctypes.CDLL(library)
from . import cuda
""",
    "torch/cuda.py": """
import os
def is_initialized(): return "DEVICE" in os.environ
def current_device(): return int(os.environ["DEVICE"])
""",
    "torch/distributed/__init__.py": """
from .distributed_c10d import *
def is_available(): return True
""",
    "torch/distributed/distributed_c10d.py": """
joined = []
def init_process_group(backend, rank=0, world_size=1):
    if rank >= world_size:
        raise ValueError("stand-in: no such rank")
    joined[:] = [rank, world_size]
def is_initialized(): return bool(joined)
def get_rank(): return joined[0]
def get_world_size(): return joined[1]
""",
    "tensorrt_llm/__init__.py": "",
    "tensorrt_llm/deep_ep/__init__.py": """
class Buffer:
    def __init__(self, group, num_qps_per_rank=24): pass
""",
}
JOIN: Final = "import torch, torch.distributed as dist\n"
MANY_COMMS: Final = "def get_nccl_comm_handles(group):\n    return [object()] * 8\n"
# ncclCommProperties as in NCCL 2.30.4: proxy for the whole communicator, gdaki for its rails.
NCCL_C: Final = """
#include <stdbool.h>
#include <stddef.h>
struct properties { size_t size; unsigned magic, version; int ints[4]; bool api, multimem;
                    int gin, lsa_teams; bool host_rma; int railed; };
int ncclGetVersion(int *version) { *version = VERSION; return 0; }
int ncclCommQueryProperties(void *comm, struct properties *p) {
    if (comm != (void *)0x1000 || p->size != sizeof *p || p->magic != 0xcafebeefu) return 4;
    p->gin = 2; p->railed = 3; return 0; }
"""
NVSHMEM_C: Final = """
void nvshmemx_vendor_get_version_info(int *a, int *b, int *c) { *a = 3; *b = 6; *c = 5; }
"""
# Printed before the construction, so that only the hook's lines have the prefix.
GROUP: Final = """
import deep_ep
class Group:
    def rank(self): return 1
    def size(self): return 2
"""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with what the hook's own pyproject.toml puts into its wheel."""
    root = tmp_path_factory.mktemp("venv")
    venv.create(root, with_pip=False, symlinks=True)
    site = next((root / "lib").glob("python3*/site-packages"))
    target = tomllib.loads((EVIDENCE / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    for name in target["targets"]["wheel"]["only-include"]:
        shutil.copy(EVIDENCE / name, site / name)
    package = site / "deep_ep"
    (package / "utils").mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "buffers.py").write_text(STAND_IN_BUFFERS)
    (package / "utils" / "comm.py").write_text("")
    for name, text in STAND_IN_TORCH.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    return root / "bin" / "python"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shared libraries that answer as NCCL 2.30.4, NCCL 2.28.9 and NVSHMEM 3.6.5 would."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler to build the stand-in libraries")
    root, made = tmp_path_factory.mktemp("lib"), {}
    for name, file, source, flag in (
        ("nccl", "libnccl.so.2", NCCL_C, "-DVERSION=23004"),
        ("old_nccl", "libnccl.so.2", NCCL_C, "-DVERSION=22809"),
        ("nvshmem", "libnvshmem_host.so.3", NVSHMEM_C, "-DVERSION=0"),
    ):
        made[name] = root / name / file
        made[name].parent.mkdir()
        subprocess.run(
            [compiler, "-shared", "-fPIC", flag, "-x", "c", "-", "-o", made[name]],
            input=source, text=True, check=True,
        )  # fmt: skip
    return made


def run(python: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {"PATH": os.environ["PATH"], "LANE_EVIDENCE": "1", **env}
    return subprocess.run(
        [python, "-c", code], env=clean, text=True, capture_output=True, check=False
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    """The hook's lines as mappings; any other output on standard error fails the test."""
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stderr.splitlines() if line]
    assert all(row[0] == "[lane-evidence]" for row in rows), done.stderr
    return [dict(item.split("=", 1) for item in row[1:] if item != "armed") for row in rows]


def test_elastic_line_names_what_is_mapped(interpreter: Path, libraries: dict[str, Path]) -> None:
    done = run(
        interpreter,
        GROUP + "deep_ep.ElasticBuffer(Group(), hidden=64)",
        STAND_IN_LIBRARIES=f"{libraries['nccl']}:{libraries['nvshmem']}",
        LOCAL_RANK="5",
    )
    (row,) = lines(done)
    assert row.pop("host") == os.uname().nodename
    assert int(row.pop("pid")) > 0
    assert abs(float(row.pop("t")) - time.time()) < 600
    assert row == {
        "v": "1", "rank": "1", "local_rank": "5", "world": "2", "class": "deep_ep.ElasticBuffer",
        "deep_ep": "2.0.0", "nccl": "2.30.4", "nvshmem": "3.6.5", "gin": "gdaki", "qps": "129",
        "comms": "1", "timeout_s": "600",
    }  # fmt: skip
    assert done.stderr.strip("\n").count("\n") == 0


def test_direct_mode_reports_the_gin_type_of_the_whole_communicator(
    interpreter: Path, libraries: dict[str, Path]
) -> None:
    code = GROUP + "deep_ep.ElasticBuffer(Group(), allow_hybrid_mode=False)"
    (row,) = lines(run(interpreter, code, STAND_IN_LIBRARIES=str(libraries["nccl"])))
    assert (row["gin"], row["qps"]) == ("proxy", "17")


def test_legacy_line_has_no_v2_values(interpreter: Path) -> None:
    (row,) = lines(run(interpreter, GROUP + "deep_ep.Buffer(Group(), num_qps_per_rank=12)"))
    assert row["class"] == "deep_ep.Buffer"
    assert (row["gin"], row["qps"], row["comms"], row["timeout_s"]) == (
        "none",
        "12",
        "none",
        "none",
    )


def test_unreadable_values_are_unknown(interpreter: Path) -> None:
    (row,) = lines(run(interpreter, GROUP + "deep_ep.ElasticBuffer(Group())"))
    assert [row[key] for key in ("nccl", "nvshmem", "gin", "local_rank")] == ["unknown"] * 4


def test_two_mapped_nccl_show_as_two(interpreter: Path, libraries: dict[str, Path]) -> None:
    both = f"{libraries['nccl']}:{libraries['old_nccl']}"
    code = GROUP + "deep_ep.ElasticBuffer(Group())"
    (row,) = lines(run(interpreter, code, STAND_IN_LIBRARIES=both))
    assert sorted(row["nccl"].split(",")) == ["2.28.9", "2.30.4"]
    assert row["gin"] == "unknown"


def test_gin_off(interpreter: Path, libraries: dict[str, Path]) -> None:
    code = GROUP + "deep_ep.ElasticBuffer(Group())"
    env = {"STAND_IN_LIBRARIES": str(libraries["nccl"])}
    assert lines(run(interpreter, code, EP_DISABLE_GIN="1", **env))[0]["gin"] == "off"
    assert lines(run(interpreter, code, EP_DISABLE_GIN="0", **env))[0]["gin"] == "gdaki"


def test_multi_comm_series_is_counted(interpreter: Path) -> None:
    code = GROUP + f"exec({MANY_COMMS!r}, vars(deep_ep.comm))\ndeep_ep.ElasticBuffer(Group())"
    assert lines(run(interpreter, code))[0]["comms"] == "8"


def test_global_rank_and_device_index_come_from_torch(interpreter: Path) -> None:
    fake = """
import sys, types
torch = types.ModuleType("torch"); dist = types.ModuleType("torch.distributed")
torch.cuda = types.SimpleNamespace(current_device=lambda: 1, is_initialized=lambda: True)
dist.is_available = dist.is_initialized = lambda: True
dist.get_rank, dist.get_world_size = lambda: 11, lambda: 16
sys.modules.update({"torch": torch, "torch.distributed": dist})
"""
    code = fake + GROUP + "deep_ep.ElasticBuffer(Group())"
    (row,) = lines(run(interpreter, code, CUDA_VISIBLE_DEVICES="2,3"))
    assert (row["rank"], row["world"], row["local_rank"]) == ("11", "16", "3")


def test_a_rank_says_once_that_it_is_watched(interpreter: Path, libraries: dict[str, Path]) -> None:
    code = JOIN + "for _ in 1, 2: dist.init_process_group('nccl', rank=11, world_size=16)"
    both = f"{libraries['nccl']}:{libraries['nvshmem']}"
    done = run(interpreter, code, TORCH_LIBRARIES=both, DEVICE="1", CUDA_VISIBLE_DEVICES="2,3")
    (row,) = lines(done)
    assert done.stderr.startswith("\n[lane-evidence] v=1 armed host=")
    assert row.pop("host") == os.uname().nodename
    assert int(row.pop("pid")) > 0
    assert abs(float(row.pop("t")) - time.time()) < 600
    assert row == {
        "v": "1", "rank": "11", "local_rank": "3", "world": "16", "nccl": "2.30.4",
        "nvshmem": "3.6.5", "hook": version(),
    }  # fmt: skip


def version() -> str:
    return str(tomllib.loads((EVIDENCE / "pyproject.toml").read_text())["project"]["version"])


def test_a_rank_that_maps_nothing_says_none(interpreter: Path) -> None:
    (row,) = lines(run(interpreter, JOIN + "dist.init_process_group('gloo')"))
    assert [row[key] for key in ("nccl", "nvshmem", "local_rank")] == ["none", "none", "0"]


@pytest.mark.parametrize(
    ("env", "local"),
    [({}, "unknown"), ({"CUDA_VISIBLE_DEVICES": "5"}, "5"), ({"CUDA_VISIBLE_DEVICES": "5,6"},
     "unknown"), ({"LOCAL_RANK": "2", "DEVICE": "0"}, "2")],
)  # fmt: skip
def test_a_rank_without_a_device_is_not_given_one(
    interpreter: Path, env: dict[str, str], local: str
) -> None:
    """Asking torch for the current device would initialise CUDA in a process that never did."""
    code = JOIN + "dist.init_process_group('gloo', world_size=4)"
    assert lines(run(interpreter, code, **env))[0]["local_rank"] == local


def test_a_fork_is_a_rank_of_its_own(interpreter: Path) -> None:
    code = (
        JOIN + "import os\nfork = os.fork()\n"
        "dist.init_process_group('gloo', rank=int(not fork), world_size=2)\n"
        "fork and os.waitpid(fork, 0)"
    )
    rows = lines(run(interpreter, code))
    assert sorted(row["rank"] for row in rows) == ["0", "1"]
    assert len({row["pid"] for row in rows}) == 2


def test_a_group_that_cannot_be_joined_prints_nothing(interpreter: Path) -> None:
    done = run(interpreter, JOIN + "dist.init_process_group('gloo', rank=1)")
    assert done.stderr.splitlines()[-1] == "ValueError: stand-in: no such rank"
    assert "[lane-evidence]" not in done.stderr


@pytest.mark.parametrize("code", ["import torch, torch.distributed", "import json", GROUP,
                                  "import tensorrt_llm"])  # fmt: skip
def test_a_process_that_joins_no_ranks_says_nothing(interpreter: Path, code: str) -> None:
    assert lines(run(interpreter, code)) == []


def test_a_rank_of_an_mpi_engine_says_it_on_import(interpreter: Path) -> None:
    env = {
        f"OMPI_COMM_WORLD_{k}": v for k, v in (("RANK", "9"), ("SIZE", "16"), ("LOCAL_RANK", "1"))
    }
    code = "import tensorrt_llm\n" + JOIN + "dist.init_process_group('nccl', 9, 16)"
    (row,) = lines(run(interpreter, code, **env))
    assert (row["rank"], row["local_rank"], row["world"]) == ("9", "1", "16")


def test_a_copy_inside_an_engine_is_seen(interpreter: Path) -> None:
    code = GROUP + "import tensorrt_llm.deep_ep as own\nown.Buffer(Group())"
    (row,) = lines(run(interpreter, code))
    assert (row["class"], row["qps"]) == ("tensorrt_llm.deep_ep.Buffer", "24")


def test_a_line_cut_before_it_stays_a_line_of_its_own(interpreter: Path) -> None:
    code = GROUP + "import os; os.write(2, b'NCCL INFO commId 0x62f'); deep_ep.Buffer(Group())"
    cut, own = run(interpreter, code).stderr.splitlines()
    assert (cut, own[:20]) == ("NCCL INFO commId 0x62f", "[lane-evidence] v=1 ")


def test_a_failed_construction_prints_nothing(interpreter: Path) -> None:
    done = run(interpreter, GROUP + "deep_ep.ElasticBuffer(Group(), hidden=-1)")
    assert done.returncode == 1
    assert "stand-in: hidden below zero" in done.stderr
    assert "[lane-evidence]" not in done.stderr


def test_two_constructions_print_two_lines_and_a_dispatch_none(interpreter: Path) -> None:
    code = GROUP + "for _ in 1, 2: deep_ep.ElasticBuffer(Group()).dispatch()"
    assert len(lines(run(interpreter, code))) == 2


def test_off_means_not_even_imported(interpreter: Path) -> None:
    code = (
        GROUP + "import sys; deep_ep.ElasticBuffer(Group()); print('lane_evidence' in sys.modules)"
    )
    done = run(interpreter, code, LANE_EVIDENCE="0")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_on_costs_no_further_import_without_deep_ep(interpreter: Path) -> None:
    code = "import sys; print(*sorted(sys.modules))"
    on, off = (run(interpreter, code, LANE_EVIDENCE=flag) for flag in "10")
    assert set(on.stdout.split()) - set(off.stdout.split()) == {"lane_evidence", "__future__"}


def test_installed_twice_prints_once(interpreter: Path) -> None:
    twice = "import lane_evidence; lane_evidence.install()\n" + GROUP + "lane_evidence.install()\n"
    assert len(lines(run(interpreter, twice + "deep_ep.ElasticBuffer(Group())"))) == 1


def test_a_broken_deep_ep_keeps_its_own_error(interpreter: Path) -> None:
    done = run(interpreter, "import deep_ep", STAND_IN_BROKEN="1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ImportError: stand-in: no GPU here"


def test_without_deep_ep_the_import_error_is_python_s(interpreter: Path) -> None:
    done = run(interpreter, "import sys; sys.path = [p for p in sys.path if 'site' not in p]\n"
                            "import deep_ep")  # fmt: skip
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'deep_ep'"


def test_legacy_refused_on_a_v2_lane(interpreter: Path) -> None:
    done = run(interpreter, GROUP + "deep_ep.Buffer(Group())", LANE_REFUSE_LEGACY="1")
    assert done.returncode == 1
    assert "legacy deep_ep.Buffer refused" in done.stderr
    assert "[lane-evidence]" not in done.stderr
    assert lines(run(interpreter, GROUP + "deep_ep.ElasticBuffer(Group())", LANE_REFUSE_LEGACY="1"))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("Group()", (600, 600)),
        ("Group(), num_gpu_timeout_secs=10", (600, 600)),
        ("Group(), num_cpu_timeout_secs=900", (900, 600)),
        ("Group(), None, 0, 0, 0, False, False, True, True, True, 3, 0, 700, 800", (700, 800)),
    ],
)
def test_timeouts_are_raised_never_lowered(
    interpreter: Path, call: str, expected: tuple[int, int]
) -> None:
    done = run(interpreter, GROUP + f"print(deep_ep.ElasticBuffer({call}).timeouts)")
    assert done.stdout == f"{expected}\n"
    assert lines(done)[0]["timeout_s"] == str(min(expected))


@pytest.mark.parametrize(("setting", "expected"), [("1200", "1200"), ("soon", "600")])
def test_least_timeout_setting(interpreter: Path, setting: str, expected: str) -> None:
    done = run(interpreter, GROUP + "deep_ep.ElasticBuffer(Group())", LANE_TIMEOUT_S=setting)
    assert lines(done)[0]["timeout_s"] == expected


def test_wrong_arguments_keep_a_type_error(interpreter: Path) -> None:
    done = run(interpreter, GROUP + "deep_ep.ElasticBuffer(Group(), no_such=1)")
    assert done.stderr.splitlines()[-1].startswith("TypeError: ")


def test_lines_of_ranks_on_one_pipe_do_not_tear(interpreter: Path) -> None:
    code = GROUP + "for _ in range(200): deep_ep.ElasticBuffer(Group())"
    env = {"PATH": os.environ["PATH"], "LANE_EVIDENCE": "1"}
    read, write = os.pipe()
    ranks = [subprocess.Popen([interpreter, "-c", code], env=env, stderr=write) for _ in range(4)]
    os.close(write)
    with os.fdopen(read) as stream:
        got = [line for line in stream.read().splitlines() if line]
    assert [rank.wait() for rank in ranks] == [0] * 4
    assert len(got) == 800
    assert all(line.startswith("[lane-evidence] v=1 ") for line in got)
    assert all(" timeout_s=600 t=" in line for line in got)


def test_runs_under_this_python() -> None:
    """The images carry Python 3.10 to 3.12: nothing newer than 3.10 may be used."""
    source = (EVIDENCE / "lane_evidence.py").read_text()
    compile(source, "lane_evidence.py", "exec", dont_inherit=True)
    assert sys.version_info >= (3, 10)
