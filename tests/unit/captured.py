"""What the doctor's probes say on a sound p5en host, in the form of each command's real output.

Written here after outputs in public threads and after this project's own runs; cited at each.
"""

from lanekit.capture import Capture, Text

# nvidia-smi --query-gpu: an H200 of 2026-11-30, which held 0 MiB when idle; 4 MiB assumed here.
GPU = "NVIDIA H200, 143771, 580.159.04, 4"
# `Fabric` of `nvidia-smi -q`: NVIDIA/nccl#1672.
FABRIC = """    Fabric
        State                             : Completed
        Status                            : Success
"""
# Names and zero GUIDs of EFA: uccl-project/uccl#163; the state as sysfs has it.
NICS = [f"rdmap{bus}s0 0x1d0f 4: ACTIVE" for bus in range(79, 95)]
# fi_info -p efa, libfabric 2.1: efa-direct, efa and a datagram endpoint for each NIC.
_FI = """provider: efa
    fabric: {fabric}
    domain: rdmap{bus}s0-{kind}
    version: 201.0
    type: {type}
    protocol: FI_PROTO_EFA
"""
FI_INFO = "".join(
    _FI.format(bus=bus, fabric=fabric, kind=kind, type=end)
    for bus in range(79, 95)
    for fabric, kind, end in (
        ("efa-direct", "rdm", "FI_EP_RDM"),
        ("efa", "rdm", "FI_EP_RDM"),
        ("efa", "dgrm", "FI_EP_DGRAM"),
    )
)
# aws-parallelcluster-cookbook#1882; the version is the pinned one.
INSTALLER = "# EFA installer version: 1.50.0"
# NVIDIA/nvidia-container-toolkit#115 for the form, NVIDIA/nvshmem#23 for the value.
PARAMS = 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"'
MEMORY = """MemTotal:       2097152000 kB
HugePages_Total:   21128
HugePages_Free:    21128
Hugepagesize:       2048 kB"""
DF = "Filesystem     1024-blocks     Used Available Capacity Mounted on\n{} {} 1 {}       1% {}"
TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 15834 1
   1: 0100007F:1F40 0100007F:A2C4 01 00000000:00000000 00:00000000 00000000     0        0 20001 1
"""
OFF = "NCCL_NVLS_ENABLE=0\nNVSHMEM_DISABLE_NVLS=1\nTORCH_SYMM_MEM_DISABLE_MULTICAST=1"

P5EN = {
    "host": "ip-10-0-0-1",
    "kernel": "6.8.0-1021-aws",
    "cpus": "192",
    "memory": MEMORY,
    "virtual": "hypervisor",  # Nitro
    "gpus": "\n".join([GPU] * 8),
    "contexts": "",
    "fabric": FABRIC * 8,
    "nics": "\n".join(NICS),
    "fi_info": FI_INFO,
    "libfabric": "fi_info: 2.6.0amzn1.0\nlibfabric: 2.6.0amzn1.0\nlibfabric api: 2.6",
    "efa": "3.3.0g",
    "installer": INSTALLER,
    "gdrdrv": "2.5",
    "libgdrapi": "/usr/lib64/libgdrapi.so.2\n/usr/lib64/libgdrapi.so.2.5",
    "params": PARAMS,
    "memlock": "unlimited",
    "shm": DF.format("tmpfs", 1048576000, 1048575999, "/dev/shm"),
    "disk": DF.format("/dev/root", 2048000000, 1048576000, "/"),
    "ports": TCP,
    "env": "",
    "images": "",
}
# The machine of this project's GPU runs: a virtual machine with 2 GPUs of a board of 8.
# As a host of two H200 answered, word for word (2026-11-30); of `env` only the switches.
_FABRIC = """    Fabric
        State                                          : Completed
        Status                                         : Success"""
H200X2 = {
    "host": "vm",
    "kernel": "6.18.44-fc-v657-gpu",
    "cpus": "32",
    "memory": (
        "MemTotal:       263998500 kB\n"
        "HugePages_Total:       0\n"
        "HugePages_Free:        0\n"
        "Hugepagesize:       2048 kB"
    ),
    "virtual": "hypervisor",
    "gpus": "NVIDIA H200, 143771, 580.159.04, 0\nNVIDIA H200, 143771, 580.159.04, 0",
    "contexts": "",
    "nics": "",
    "gdrdrv": "none",
    "shm": (
        "Filesystem     1024-blocks  Used Available Capacity Mounted on\n"
        "tmpfs            268435456     0 268435456       0% /dev/shm"
    ),
    "disk": (
        "Filesystem     1024-blocks     Used Available Capacity Mounted on\n"
        "/dev/vda         264212084 18108884 132973552      12% /"
    ),
    "fabric": f"{_FABRIC}\n--\n{_FABRIC}",
    "env": OFF,
}


def host(texts: dict[str, str], name: str = "", **other: str | Text | None) -> Capture:
    """A host that says `texts`, but for `other`; None: it was not asked."""
    merged: dict[str, str | Text | None] = {**texts, **other}
    said = {k: v if isinstance(v, Text) else Text(0, v) for k, v in merged.items() if v is not None}
    return Capture(name or texts["host"], said)
