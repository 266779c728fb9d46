"""Each fault the drift guard exists for, planted for real: a build on top of an image is refused.

The plant and the guard are one build step, as an engine's install and its guard are: a refused
build leaves neither layer nor image behind.
"""

import shutil
import subprocess
from collections.abc import Iterator

import pytest
from tests.images import recipe, tree
from tests.images.contained import Container

from lanekit import images

BASE = "lanes/stand-in-base:local"
SMALL = "lanes/planted:local"
DEEP_EP = "$(find /opt /usr -xdev -type d -name deep_ep)"

FAULTS = {
    "torch put its own NCCL back": (
        "sed -i 's/NCCL version [0-9]*\\.[0-9]*\\./NCCL version 2.18./' /opt/nccl/lib/libnccl.so.2",
        "nccl-version: ",
    ),
    "a second NCCL earlier on the path": (
        "cp /opt/nccl/lib/libnccl.so.2 /usr/local/lib/ && export LD_LIBRARY_PATH=/usr/local/lib",
        "mapped-nccl: loader maps /usr/local/lib/libnccl.so.2",
    ),
    "device code of another NVSHMEM": (
        "sed -i -E 's/(VENDOR_MINOR_VERSION +)[0-9]+/\\19/'"
        " /opt/nvshmem/include/non_abi/nvshmem_version.h",
        "nvshmem-device: ",
    ),
    "no plugin": ("rm /opt/amazon/ofi-nccl/lib/libnccl-net*", "one-plugin: net plugins: none"),
    "a variable nobody reads": (
        "export OFI_NCCL_GIN_MAX_REQUESTS=512",
        "env: OFI_NCCL_GIN_MAX_REQUESTS is exported",
    ),
    "a patch step that did nothing": (  # as many letters: DeepEP's ELF file stays one
        "/tools/expect reads=EP_NUM_COMMS"
        f" && (grep -rl EP_NUM_COMMS {DEEP_EP} | xargs -r sed -i s/EP_NUM_COMMS/EP_NUM_NOTHG/)",
        "series: no file of deep_ep reads EP_NUM_COMMS",
    ),
}


GUARD = "RUN --mount=from=guard,target=/guard --mount=from=tools,target=/tools"
MOUNTS = [f"--build-context={name}={images.IMAGES / name}" for name in ("guard", "tools")]


def refused(image: str, fault: str) -> None:
    """The build that plants a fault on an image ends with the guard's words."""
    plant, said = FAULTS[fault]
    ran = recipe.build(
        f"FROM {image}\nUSER 0\n{GUARD} {plant} && python /guard/guard.py check\n",
        "--output=type=cacheonly", *MOUNTS,
    )  # fmt: skip
    assert ran.returncode != 0, f"the guard let it pass: {ran.stderr}"
    assert f"guard: {said}" in ran.stderr


@pytest.mark.of("transport-v2")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_build_with_a_planted_fault_is_refused(
    container: Container, fault: str, request: pytest.FixtureRequest
) -> None:
    refused(images.local(container.name, request.config.getoption("--stack")), fault)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A transport of a few kilobytes on the stand-in base, which the guard passes: what it judges
    is real to the loader and to Python, so the faults are the ones of the images that no CI holds.
    """
    if shutil.which("gcc") is None or not images.present(images.docker(), BASE):
        pytest.skip(f"needs a C compiler and {BASE} (images/stand-in-base.sh)")
    root = tmp_path_factory.mktemp("tree")
    tree.plant(root)
    site = root / tree.SITE
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text(
        "import ctypes\nfrom torch import cuda\n"
        f"ctypes.CDLL('/{tree.SITE}/nvidia/nccl/lib/libnccl.so.2')\n"
    )
    (site / "torch/cuda.py").write_text("def is_available(): return False\n")
    (site / "deep_ep/__init__.py").write_text(
        "import ctypes\nimport torch\nif not torch.cuda.is_available():\n"
        "    raise ImportError('no GPU')\nctypes.CDLL('libnvshmem_host.so.3')\n"
    )
    tree.library(root / "usr/local/cuda/lib64/stubs/libcuda.so", "void cuInit(void) {}")
    promised = " ".join(f"{name}={value}" for name, value in tree.EXPECT.items())
    places = f"/{tree.EFA} /{tree.OFI} /opt/nccl/lib /opt/nvshmem/lib"
    made = recipe.build(
        f"FROM {BASE}\nCOPY . /\nENV PYTHONPATH=/{tree.SITE} EP_NCCL_ROOT_DIR=/opt/nccl\n"
        f"RUN ln -s /{tree.SITE}/nvidia/* /opt && ln -s python3 /usr/bin/python"
        f" && printf '%s\\n' {places} >/etc/ld.so.conf.d/lanes.conf && ldconfig\n"
        f"{GUARD} /tools/expect {promised} && python /guard/guard.py check\n",
        "--load", f"--tag={SMALL}", *MOUNTS, context=root,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    yield SMALL
    subprocess.run(["docker", "rmi", "-f", SMALL], capture_output=True, check=False)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_small_transport_with_a_planted_fault_is_refused(small: str, fault: str) -> None:
    refused(small, fault)
