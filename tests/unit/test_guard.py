"""The drift guard finds each planted fault, and nothing in a clean tree.

The libraries are real ELF files made by the C compiler; only their names and texts are planted.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tests.images.tree import EXPECT, OFI, SITE, library, linked, nccl, plant

from lanekit import images, programs

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")


def _guard() -> ModuleType:
    module: ModuleType = programs.load("guard", images.IMAGES / "guard" / "guard.py")
    return module


guard = _guard()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("image")
    plant(root)
    return root


ENV = {"NCCL_DEBUG": "INFO", "FI_EFA_USE_DEVICE_RDMA": "1", "EP_NUM_COMMS": "8", "PATH": "/bin"}


def judged(root: Path, expect: dict[str, str] = EXPECT, env: dict[str, str] = ENV) -> set[str]:
    return {f.rule for f in guard.findings(guard.Image(root=root, expect=expect, env=env))}


def test_a_clean_image_has_no_finding(clean: Path) -> None:
    assert judged(clean) == set()


def test_torchs_own_device_code_is_told_and_refused_only_where_it_is_set_to_work(
    tmp_path: Path,
) -> None:
    """Every process with torch maps it, idle: nobody can have another torch 2.11."""
    plant(tmp_path)
    source = linked(3, 4, 5) + 'const char name[] = "TORCH_SYMMMEM";'
    library(tmp_path / SITE / "torch/lib/libtorch_nvshmem.so", source)
    image = guard.Image(root=tmp_path, expect=EXPECT, env=ENV)
    assert guard.device_code(image, guard.files(image)) == {
        "_C": "3.6.5",
        "libtorch_nvshmem": "3.4.5",
    }
    assert judged(tmp_path) == set()
    assert judged(tmp_path, env=ENV | {"TORCH_SYMMMEM": "CUDA"}) == set()
    assert judged(tmp_path, env=ENV | {"TORCH_SYMMMEM": "NVSHMEM"}) == {"nvshmem-device"}
    same = EXPECT | {"nvshmem": "3.4.5"}
    one = guard.Image(tmp_path, same, {"TORCH_SYMMMEM": "NVSHMEM"})
    assert not list(guard.check_torchs(one, guard.files(image)))


def torchs_nccl(root: Path) -> None:
    library(root / SITE / "nvidia/nccl/lib/libnccl.so.2", nccl("2.28.9"))


def second_nccl(root: Path) -> None:
    library(root / "usr/lib/libnccl.so.2.30", nccl("2.30.4"))


def no_nccl(root: Path) -> None:
    shutil.rmtree(root / SITE / "nvidia/nccl")


def second_nvshmem(root: Path) -> None:
    library(root / "usr/lib/libnvshmem_host.so.3", 'const char a[] = "NVSHMEM v3.6.5";')


def device_of_another_version(root: Path) -> None:
    header = root / SITE / "nvidia/nvshmem/include/non_abi/nvshmem_version.h"
    header.write_text(header.read_text().replace("MINOR_VERSION 6", "MINOR_VERSION 4"))


def deepep_linked_with_another_version(root: Path) -> None:
    library(root / SITE / "deep_ep/_C.cpython-312-x86_64-linux-gnu.so", linked(3, 4, 5))


def cut_short(root: Path) -> None:
    (extension,) = (root / SITE / "deep_ep").glob("_C.*")
    extension.write_bytes(extension.read_bytes()[:-70])


def symbol_nobody_offers(root: Path) -> None:
    library(
        root / SITE / "deep_ep/_C.cpython-312-x86_64-linux-gnu.so",
        "void ncclGetLsaDevicePointer(void); void f(void) { ncclGetLsaDevicePointer(); }",
    )


def driver_not_asked_for(root: Path) -> None:
    library(
        root / SITE / "deep_ep/_C.cpython-312-x86_64-linux-gnu.so",
        # The name stands in the file, and the loader is asked for nothing.
        'const char a[] = "libcuda.so.1";'
        "void cuMemAddressFree(void); void f(void) { cuMemAddressFree(); }",
    )


def constant_of_another_shape(root: Path) -> None:
    library(root / SITE / "deep_ep/_C.cpython-312-x86_64-linux-gnu.so", linked(3, 6, 5, 0))


def missing_plugin(root: Path) -> None:
    (root / OFI / "libnccl-net-ofi.so").unlink()


def second_plugin(root: Path) -> None:
    shutil.copy(root / OFI / "libnccl-net-ofi.so", root / "usr-libnccl-net.so")
    (root / "usr/local").mkdir(parents=True, exist_ok=True)
    (root / "usr-libnccl-net.so").rename(root / "usr/local/libnccl-net.so")


def plugin_for_another_nccl(root: Path) -> None:
    library(root / OFI / "libnccl-net-ofi.so", "int ncclNetPlugin_v12; int ncclGinPlugin_v10;")


def distributions_libfabric(root: Path) -> None:
    library(root / "usr/lib/x86_64-linux-gnu/libfabric.so.1", "int x;")


def unpatched_deepep(root: Path) -> None:
    (root / SITE / "deep_ep/elastic.py").write_text("")


def dangling_loader_path(root: Path) -> None:
    (root / "etc/ld.so.conf.d").mkdir(parents=True)
    (root / "etc/ld.so.conf.d/aws.conf").write_text("/opt/amazon/aws-ofi-nccl/lib\n")


@pytest.mark.parametrize(
    ("fault", "rules"),
    [
        (torchs_nccl, {"nccl-version"}),
        (second_nccl, {"one-nccl"}),
        (no_nccl, {"one-nccl"}),
        (second_nvshmem, {"one-nvshmem"}),
        (device_of_another_version, {"nvshmem-device"}),
        (deepep_linked_with_another_version, {"nvshmem-device"}),
        (cut_short, {"unreadable"}),
        (constant_of_another_shape, {"unreadable"}),
        (symbol_nobody_offers, {"symbols"}),
        (driver_not_asked_for, {"symbols"}),
        (missing_plugin, {"one-plugin"}),
        (second_plugin, {"one-plugin"}),
        (plugin_for_another_nccl, {"plugin-entry"}),
        (distributions_libfabric, {"fabric"}),
        (unpatched_deepep, {"series", "env"}),
        (dangling_loader_path, {"base"}),
    ],
)
def test_each_planted_fault_is_found(
    clean: Path, tmp_path: Path, fault: Callable[[Path], None], rules: set[str]
) -> None:
    root = tmp_path / "image"
    shutil.copytree(clean, root, symlinks=True)
    fault(root)
    assert rules <= judged(root)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("OFI_NCCL_GIN_MAX_REQUESTS", True),  # exported for months, read by nothing
        ("OFI_NCCL_GIN_GDAKI", True),
        ("NCCL_DEBUG", False),
        ("NCCL_DEB", True),  # a part of a name is not the name
        ("FI_EFA_USE_DEVICE_RDMA", False),  # libfabric spells it use_device_rdma
        ("FI_PROVIDER_PATH_X", True),
        ("NVSHMEM_REMOTE_TRANSPORT", False),  # NVSHMEM spells it REMOTE_TRANSPORT
        ("NVSHMEM_TRANSPORT", True),
        ("NCCL_REMOTE_TRANSPORT", True),  # another library's word is not a reader
        ("NCCL_VERSION", False),  # a base image's word about itself
        ("EP_NCCL_ROOT_DIR", False),  # sgl-deep-ep composes it: EP_{upper}_ROOT_DIR
        ("EP_GDRCOPY_ROOT_DIR", True),  # composed likewise, and asked for by nobody
        ("EP_NCCL_ROOT", True),
    ],
)
def test_a_variable_nobody_reads_is_found(clean: Path, name: str, found: bool) -> None:
    assert ("env" in judged(clean, env={name: "1"})) is found


def test_another_fabrics_plugin_name_is_found(clean: Path) -> None:
    assert "base" in judged(clean, env={"NCCL_NET_PLUGIN": "spcx"})


def test_an_image_without_a_transport_is_not_asked_for_one(tmp_path: Path) -> None:
    assert judged(tmp_path, expect={}, env={}) == set()


def test_a_stripped_deepep_does_not_say_what_it_was_linked_with(
    clean: Path, tmp_path: Path
) -> None:
    (extension,) = (clean / SITE / "deep_ep").glob("_C.*")
    assert guard.linked(extension) == {"3.6.5"}
    shutil.copy(extension, tmp_path / "_C.so")
    subprocess.run(["strip", str(tmp_path / "_C.so")], check=True)
    assert guard.linked(tmp_path / "_C.so") == set()
    assert "f" in guard.defined(tmp_path / "_C.so")


@pytest.mark.parametrize(
    ("buffer", "strip", "rules"),
    [
        ("Buffer", False, set()),
        ("Buffer", True, {"nvshmem-device"}),
        ("ElasticBuffer", True, set()),  # V2 has no NVSHMEM device code to tell of
    ],
)
def test_a_stripped_v1_extension_is_no_proof_of_one_nvshmem(
    clean: Path, tmp_path: Path, buffer: str, strip: bool, rules: set[str]
) -> None:
    root = tmp_path / "image"
    shutil.copytree(clean, root, symlinks=True)
    (extension,) = (root / SITE / "deep_ep").glob("_C.*")
    if strip:
        subprocess.run(["strip", str(extension)], check=True)
    assert judged(root, {**EXPECT, "buffer": buffer}) == rules


@pytest.mark.parametrize(
    ("code", "extension", "said"),
    [
        ("os.environ['NVSHMEM_IB_ENABLE_IBGDA'] = '1'\n", "", "it is stock V1"),
        ("api = getattr(deep_ep_cpp, 'nvshmem_api', False)\n", "", "without EP_NVSHMEM_API=1"),
        ("api = getattr(deep_ep_cpp, 'nvshmem_api', False)\n", "nvshmem_api", ""),
        ("NVSHMEM_IB_ENABLE_IBGDA is not set\n", "", ""),  # AWS's series takes the line out
    ],
)
def test_a_v1_that_needs_ibgda_is_refused_for_a_fabric_without_it(
    clean: Path, tmp_path: Path, code: str, extension: str, said: str
) -> None:
    root = tmp_path / "image"
    shutil.copytree(clean, root, symlinks=True)
    (root / SITE / "deep_ep/buffer.py").write_text(code)
    source = f'{linked(3, 6, 5)} const char name[] = "{extension}";'
    library(root / SITE / "deep_ep_cpp.cpython-312-x86_64-linux-gnu.so", source)
    image = guard.Image(root, {**EXPECT, "buffer": "Buffer"}, ENV)
    found = [finding.what for finding in guard.findings(image)]
    assert [said in what for what in found] == ([True] if said else [])


def test_an_extension_that_has_the_driver_loaded_may_call_it(clean: Path, tmp_path: Path) -> None:
    root = tmp_path / "image"
    shutil.copytree(clean, root, symlinks=True)
    stub = tmp_path / "libcuda.so.1"
    library(stub, "void cuMemAddressFree(void) {}", "-Wl,-soname,libcuda.so.1")
    (extension,) = (root / SITE / "deep_ep").glob("_C.*")
    source = "void cuMemAddressFree(void); void g(void) { cuMemAddressFree(); }"
    library(extension, linked(3, 6, 5) + source, "-Wl,--no-as-needed", str(stub))
    assert "libcuda.so.1" in guard.needed(extension)
    assert judged(root) == set()


def test_file_names_decide_and_not_substrings() -> None:
    names = ["libnccl.so.2", "libnccl-net-ofi.so", "nccl-abc", "libnccl.so.2.txt"]
    assert [n for n in names if guard.LIBRARIES["nccl"].fullmatch(n)] == ["libnccl.so.2"]


def test_the_maps_of_this_process_hold_the_c_library() -> None:
    assert any(path.name.startswith("libc.so") for path in guard.maps())


def test_a_library_that_is_not_elf_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("no")
    with pytest.raises(ValueError, match="not a 64-bit ELF"):
        guard.defined(tmp_path / "x.so")


def asked(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`guard.py env`, as it asks an image about a lane's variables."""
    script = images.IMAGES / "guard" / "guard.py"
    env = {"LANES_SHARE": str(root), "LANES_ROOT": str(root), "PATH": os.environ["PATH"]}
    return subprocess.run(
        [sys.executable, str(script), "env", *words],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_command_says_what_drifted_and_ends_with_1(tmp_path: Path) -> None:
    """As a child image's last step runs it: a promise the image does not keep fails the build."""
    ran = asked(tmp_path, "EP_NOBODY_ASKS")
    assert ran.returncode == 1
    assert "EP_NOBODY_ASKS is exported and nothing shipped here reads it" in ran.stderr


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("NCCL_DEBUG=nccl", ""),
        ("EP_NUM_COMMS=deepep-v2", ""),
        ("EP_NUM_COMMS=nccl", "EP_NUM_COMMS is exported and nothing"),  # not the one it names
        ("FI_EFA_USE_DEVICE_RDMA=libfabric", ""),
        ("NCCL_DEBUG=ncll", "NCCL_DEBUG: no component ncll"),
    ],
)
def test_a_lanes_variable_is_read_by_the_component_it_names(
    clean: Path, word: str, said: str
) -> None:
    ran = asked(clean, word)
    assert ran.returncode == (1 if said else 0)
    assert said in ran.stderr


@pytest.fixture
def driverless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site with a torch that sees no GPU, and the toolkit's stub: an image during its build."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        library(tmp_path / "stubs/libcuda.so", "void cuInit(void) {}")
        monkeypatch.setattr(guard, "STUB", tmp_path / "stubs/libcuda.so")
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/__init__.py").write_text("from torch import cuda\n")
        (tmp_path / "torch/cuda.py").write_text("def is_available(): return False\n")
        return tmp_path
    pytest.skip("a driver is here: the stub is never used")


REFUSES = (
    "import torch\nif not torch.cuda.is_available():\n    raise ImportError('no CUDA device')\n"
)


def imported(site: Path, deep_ep: str) -> list[Path] | str:
    (site / "deep_ep.py").write_text(deep_ep)
    found: list[Path] | str = guard._mapped("import", guard.Image(env={"PYTHONPATH": str(site)}))
    return found


def test_a_deepep_that_asks_for_a_gpu_is_looked_at_without_one(driverless: Path) -> None:
    """sgl-deep-ep 0.1.2.post1 refuses its import without a driver, as every image build is."""
    second = driverless / "libnccl.so.2"
    library(second, nccl("2.28.9"))
    mapped = imported(driverless, f"{REFUSES}import ctypes\nctypes.CDLL({str(second)!r})\n")
    assert second in mapped  # what it maps is seen: a second NCCL would be found


def test_a_deepep_that_cannot_be_imported_is_found_all_the_same(driverless: Path) -> None:
    assert imported(driverless, REFUSES + "import _C_is_missing\n") == (
        "ModuleNotFoundError: No module named '_C_is_missing'"
    )


def test_no_gpu_is_made_up_where_the_stub_is_not_in_use(
    driverless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "STUB", driverless / "none")
    assert imported(driverless, REFUSES) == "ImportError: no CUDA device"
