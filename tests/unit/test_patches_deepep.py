"""The files that our DeepEP series add: V2's deep_ep/utils/fabric.py over made-up /proc and /sys,
V1's csrc/kernels/transport.cuh over an NVSHMEM that reorders."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from lanekit import patches, programs

FILE = "deep_ep/utils/fabric.py"
RING = b"\x7fELF...Next sequence number is in use...\0"
PROXY, GDAKI, NONE = 2, 3, 0


def added(series: str, file: str, tree: Path) -> Path:
    """A file that a series adds, alone."""
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
    for patch in sorted((patches.PATCHES / series).glob("*.patch")):
        if f" b/{file}\n" in patch.read_text():
            only = ["git", "apply", f"--include={file}", str(patch)]
            subprocess.run(only, cwd=tree, check=True, capture_output=True)
    return tree / file


@pytest.fixture(scope="module", params=["deepep/b306af06", "deepep/dd758caf"])
def fabric(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module as the series leaves it: only its own file is taken from the patches."""
    path = added(request.param, FILE, tmp_path_factory.mktemp("tree"))
    module: ModuleType = programs.load("fabric", path)
    return module


class Host:
    """A process and a host, as far as the module looks at them."""

    def __init__(self, home: Path) -> None:
        self.proc, self.sys = home / "proc", home / "sys"
        (self.proc / "fd").mkdir(parents=True)
        self.maps: list[str] = ["7f00-7f01 r-xp 00000000 00:00 0"]
        self.write_maps()

    def write_maps(self) -> None:
        (self.proc / "maps").write_text("\n".join(self.maps) + "\n")

    def plugin(self, content: bytes, name: str = "libnccl-net-ofi.so") -> None:
        path = self.proc.parent / name
        path.write_bytes(content)
        self.maps.append(f"7f02-7f03 r-xp 00000000 08:01 77                         {path}")
        self.write_maps()

    def nic(self, number: int, driver: str, *, opened: bool = True, rate: str = "") -> None:
        device = self.sys / f"devices/pci/{number}"
        device.mkdir(parents=True)
        drivers = self.sys / "bus/drivers" / driver
        drivers.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(drivers)
        verbs = self.sys / f"class/infiniband_verbs/uverbs{number}"
        verbs.mkdir(parents=True)
        (verbs / "device").symlink_to(device)
        if opened:
            (self.proc / f"fd/{number + 3}").symlink_to(f"/dev/infiniband/uverbs{number}")
        if rate:
            port = self.sys / f"class/infiniband/rdma{number}/ports/1"
            port.mkdir(parents=True)
            (port.parents[1] / "device").symlink_to(device)
            (port / "rate").write_text(rate)

    def gpus(self, count: int) -> None:
        for number in range(count):
            (self.proc / f"driver/nvidia/gpus/{number}").mkdir(parents=True)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    for key in ("EP_EFA_MAX_QPS", "EP_EFA_RDMA_GBS"):
        monkeypatch.delenv(key, raising=False)
    return Host(tmp_path)


MaxQps = Callable[[int], int | None]


@pytest.fixture
def max_qps(fabric: ModuleType, host: Host) -> MaxQps:
    def ask(gin_type: int) -> int | None:
        found: int | None = fabric.get_max_qps(gin_type, str(host.proc), str(host.sys))
        return found

    return ask


def test_a_proxy_over_efa_with_the_ring_is_capped(host: Host, max_qps: MaxQps) -> None:
    host.nic(0, "efa")
    host.plugin(RING)
    assert max_qps(PROXY) == 2


def test_a_plugin_without_the_ring_is_not_capped(host: Host, max_qps: MaxQps) -> None:
    host.nic(0, "efa")
    host.plugin(b"\x7fELF... another plugin")
    assert max_qps(PROXY) is None


def test_the_environment_decides_about_the_cap_on_efa(
    host: Host, max_qps: MaxQps, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.nic(0, "efa")
    host.plugin(RING)
    monkeypatch.setenv("EP_EFA_MAX_QPS", "9")
    assert max_qps(PROXY) == 9
    monkeypatch.setenv("EP_EFA_MAX_QPS", "0")
    assert max_qps(PROXY) is None
    monkeypatch.setenv("EP_EFA_MAX_QPS", "-1")
    with pytest.raises(AssertionError, match="EP_EFA_MAX_QPS must not be negative: -1"):
        max_qps(PROXY)


@pytest.mark.parametrize("gin_type", [NONE, GDAKI, 5])
def test_only_a_proxy_is_capped(host: Host, max_qps: MaxQps, gin_type: int) -> None:
    host.nic(0, "efa")
    host.plugin(RING)
    assert max_qps(gin_type) is None


def test_neither_the_provider_variable_nor_an_unopened_device_decides(
    host: Host, max_qps: MaxQps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FI_PROVIDER", "efa")
    monkeypatch.setenv("EP_EFA_MAX_QPS", "2")
    host.plugin(RING)
    host.nic(0, "efa", opened=False)
    host.nic(1, "mlx5_core")
    assert max_qps(PROXY) is None


def test_other_mapped_files_and_closed_descriptors_are_passed_over(
    host: Host, max_qps: MaxQps
) -> None:
    host.nic(0, "efa")
    host.plugin(RING, "libnccl.so.2")
    host.maps.append("7f04-7f05 r-xp 00000000 08:01 78    /gone/libnccl-net-ofi.so (deleted)")
    host.write_maps()
    (host.proc / "fd/9").write_text("not a link")
    assert max_qps(PROXY) is None


def gbs(fabric: ModuleType, host: Host) -> float:
    found: float = fabric.get_efa_gbs(str(host.proc), str(host.sys))
    return found


def test_the_line_rate_is_shared_among_the_gpus_of_the_host(fabric: ModuleType, host: Host) -> None:
    for number in range(16):
        host.nic(number, "efa", rate="200 Gb/sec (4X HDR)\n")
    host.gpus(8)
    assert gbs(fabric, host) == 16 * 200 / 8 / 8


def test_the_environment_decides_about_the_rate_on_efa_only(
    fabric: ModuleType, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EP_EFA_RDMA_GBS", "25")
    host.nic(0, "mlx5_core", rate="400 Gb/sec (4X NDR)\n")
    assert gbs(fabric, host) == 0
    host.nic(1, "efa", rate="100 Gb/sec (4X EDR)\n")
    assert gbs(fabric, host) == 25


def test_a_host_without_a_gpu_directory_does_not_divide_by_zero(
    fabric: ModuleType, host: Host
) -> None:
    host.nic(0, "efa", rate="200 Gb/sec (4X HDR)\n")
    assert gbs(fabric, host) == 25


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_v1_over_nvshmem_is_never_told_of_data_that_is_not_there(tmp_path: Path) -> None:
    header = added("deepep/567632dd", "csrc/kernels/transport.cuh", tmp_path)
    for name in ("configs", "exception", "utils"):
        (header.parent / f"{name}.cuh").touch()
    standin = Path(__file__).parent / "standin/transport.cpp"
    build = ["g++", "-std=c++17", "-Wall", "-Werror", f"-I{header.parent}", str(standin)]
    subprocess.run([*build, "-o", str(tmp_path / "drive")], check=True)
    done = subprocess.run([tmp_path / "drive"], check=True, capture_output=True, text=True)
    found = dict(pair.split("=") for pair in done.stdout.split())
    assert int(found.pop("overtaken")) > 0, "the network of this test reorders nothing"
    assert found.pop("missing") == "0"
    assert found == {
        "count": "-8",  # 4 bytes, signed
        "p": "7",
        "home": "100000000",  # 8 bytes
        "qps": "1",  # as many as anyone asks for
        "quiets": "1",
        "mine": "1",
        "peer": "1",
        "far": "1",
    }
