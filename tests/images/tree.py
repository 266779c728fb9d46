"""A transport image's tree in small: real ELF files made by the C compiler, with only the names and
texts planted that the drift guard reads."""

import subprocess
from pathlib import Path

EFA, OFI = "opt/amazon/efa/lib", "opt/amazon/ofi-nccl/lib"
SITE = "opt/lane/site"
EXPECT = {
    "nccl": "2.30.4",
    "nvshmem": "3.6.5",
    "buffer": "ElasticBuffer",
    "reads": "EP_NUM_COMMS",
    "plugin": f"/{OFI}",
    "fabric": f"/{EFA}",
}


def library(path: Path, source: str, *links: str) -> None:
    """Compile C into a shared library that may lack symbols, with more words for the linker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(path), *links]
    subprocess.run(command, input=source, text=True, check=True)


def nccl(version: str, gin: int = 13) -> str:
    return (
        f'const char a[] = "NCCL version {version}+cuda13.2";'
        f'const char b[] = "ncclNetPlugin_v12"; const char c[] = "ncclGinPlugin_v{gin}";'
        'const char d[] = "NCCL_DEBUG"; void ncclGetVersion(void) {} void ncclGinNew(void) {}'
    )


def linked(*version: int) -> str:
    """A DeepEP extension: what it asks NCCL and NVSHMEM for, and what device code is in it."""
    numbers = ", ".join(map(str, version))
    return (
        f"static const struct {{ int v[{len(version)}]; }}"
        f" nvshmemi_device_lib_version = {{{{ {numbers} }}}};"
        "void ncclGetVersion(void); void nvshmem_my_pe(void);"
        "const void *f(void) { ncclGetVersion(); nvshmem_my_pe();"
        " return &nvshmemi_device_lib_version; }"
    )


def plant(root: Path) -> None:
    """What a transport-v2 has, complete and without a fault."""
    site = root / SITE
    library(site / "nvidia/nccl/lib/libnccl.so.2", nccl("2.30.4"))
    (site / "nvidia/nccl/lib/libnccl.so").symlink_to("libnccl.so.2")
    shmem = site / "nvidia/nvshmem"
    library(
        shmem / "lib/libnvshmem_host.so.3",
        'const char a[] = "NVSHMEM v3.6.5"; const char b[] = "REMOTE_TRANSPORT";'
        "void nvshmem_my_pe(void) {}",
    )
    (shmem / "lib/libnvshmem_device.a").write_bytes(b"!<arch>\n")
    (shmem / "include/non_abi").mkdir(parents=True)
    (shmem / "include/non_abi/nvshmem_version.h").write_text(
        "#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n#define NVSHMEM_VENDOR_MINOR_VERSION 6\n"
        "#define NVSHMEM_VENDOR_PATCH_VERSION 5\n"
    )
    library(site / "deep_ep/_C.cpython-312-x86_64-linux-gnu.so", linked(3, 6, 5))
    (site / "deep_ep/elastic.py").write_text('os.getenv("EP_NUM_COMMS")\n')
    (site / "deep_ep/find_pkgs.py").write_text(
        "def find_pkg_root(name):\n    return os.getenv(f'EP_{upper}_ROOT_DIR')\n"
        "find_pkg_root('nccl', lib_name='libnccl.so')\n"
    )
    library(
        root / OFI / "libnccl-net-ofi.so", "int ncclNetPlugin_v12; int ncclGinPlugin_v13; int x;"
    )
    library(root / EFA / "libfabric.so.1", 'const char a[] = "use_device_rdma";')
