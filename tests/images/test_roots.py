"""Other roots in real builds: the recipes' tools with a given file, wheel, index and CA bundle."""

import contextlib
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.images import recipe

from lanekit import images
from lanekit.errors import ConfigError

BASE = "lanes/stand-in-base:local"
# As every recipe begins; cached after the first build.
BEGIN = f"FROM {BASE}\nRUN python3 -m venv /opt/lane\nENV PATH=/opt/lane/bin:$PATH\n"
MOUNTS = (
    "RUN --mount=from=tools,target=/tools --mount=from=given,target=/src"
    " --mount=type=secret,id=ca --mount=type=secret,id=pip"
)
URL = "https://nowhere.invalid/file.tar.gz"


def _missing() -> bool:
    try:
        return not images.present(images.docker(), BASE)
    except ConfigError:
        return True


pytestmark = pytest.mark.skipif(_missing(), reason=f"needs {BASE} (images/stand-in-base.sh)")


GRAPH = """
variable "STACK" {}
variable "REGISTRY" {}
target "slow" {
  context = "%s"
  output = ["type=cacheonly"]
}
"""


def _sleeping(nonce: str) -> list[Path]:
    """The processes of this machine, a build's containers among them, that sleep so long."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().split(b"\0")[:2] == [b"sleep", nonce.encode()]:
                found.append(path)
    return found


def _until(true: Callable[[], object], said: Callable[[], str], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)


@pytest.mark.skipif(not Path("/run/docker.pid").is_file(), reason="sees no build's processes")
def test_a_build_that_is_ended_midway_leaves_no_container_running(tmp_path: Path) -> None:
    """A step's container is BuildKit's own, on no list of Docker's: its process tells."""
    nonce = str(time.time_ns())
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/Dockerfile").write_text(f"FROM slim_base\nRUN exec sleep {nonce}\n")
    (tmp_path / "graph.hcl").write_text(GRAPH % (tmp_path / "slow"))
    code = (
        "import sys, pathlib; from lanekit import cli, images\n"
        "images.IMAGES = pathlib.Path(sys.argv[1]); images.GRAPH = images.IMAGES / 'graph.hcl'\n"
        "sys.exit(cli.main(['image', 'build', 'slow', '--exact']))"
    )
    log = tmp_path / "log"
    with log.open("w") as stream:
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env=os.environ | {"BASE_IMAGE": BASE}, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        _until(lambda: _sleeping(nonce), log.read_text)
        child.terminate()
        assert child.wait(timeout=60) == 2
        _until(lambda: not _sleeping(nonce), log.read_text)
    finally:
        child.kill()
    assert "building slow stopped by SIGTERM" in log.read_text()


def built(given: Path, step: str, *options: str) -> subprocess.CompletedProcess[str]:
    """One build step with the tools, and `given` where SRC_NAME= would be; nothing is kept."""
    given.mkdir(exist_ok=True)
    places = {"tools": images.IMAGES / "tools", "given": given}
    return recipe.build(
        f"{BEGIN}{MOUNTS} : {time.time_ns()} && {step}\n",  # a cached step says nothing
        "--output=type=cacheonly", *(f"--build-context={k}={v}" for k, v in places.items()),
        *options,
    )  # fmt: skip


@pytest.fixture
def given(tmp_path: Path) -> Path:
    folder = tmp_path / "given"
    folder.mkdir()
    return folder


@pytest.fixture
def archive(given: Path) -> str:
    """A given file; its checksum."""
    (given / "mine.tar.gz").write_bytes(b"an archive")
    return hashlib.sha256(b"an archive").hexdigest()


def test_a_given_archive_is_taken_and_no_url_is_asked(given: Path, archive: str) -> None:
    ran = built(given, f"/tools/rooted /tools/fetch {URL} {archive} /tmp/f /src")
    assert ran.returncode == 0, ran.stderr


def test_an_archive_with_another_checksum_is_refused(given: Path, archive: str) -> None:
    ran = built(given, f"/tools/rooted /tools/fetch {URL} {'0' * 64} /tmp/f /src")
    assert ran.returncode != 0
    assert f"sha256 of file.tar.gz is {archive}, pinned is {'0' * 64}" in ran.stderr


def test_a_checksum_that_is_not_recorded_is_printed_and_kept(given: Path, archive: str) -> None:
    kept = "cat /usr/share/lanes/unrecorded/file.tar.gz | sed s/^/kept:/"
    ran = built(given, f"/tools/rooted /tools/fetch {URL} '' /tmp/f /src && {kept}")
    assert f"UNRECORDED: sha256 of file.tar.gz is {archive}" in ran.stderr
    assert f"kept:{archive}" in ran.stderr


def wheel(folder: Path, name: str = "probe", *wants: str) -> str:
    """A wheel of nothing; its checksum."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    about = f"{name.replace('-', '_')}-1.0.dist-info"
    lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {each}" for each in wants), ""]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{about}/METADATA", "\n".join(["Metadata-Version: 2.1", *lines]))
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path) -> str:
    """The option that names an index of its own, the folder `given`."""
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nno-index = true\nfind-links = /src\n")
    return f"--secret=id=pip,src={config}"


@pytest.mark.parametrize("right", [True, False])
def test_the_given_pip_configuration_names_the_index_and_the_hash_still_counts(
    given: Path, index: str, right: bool
) -> None:
    checksum = wheel(given) if right else (wheel(given), "0" * 64)[1]
    ran = built(given, f"/tools/rooted /tools/install probe==1.0 {checksum}", index)
    assert (ran.returncode == 0) is right, ran.stderr
    assert (
        "Successfully installed probe-1.0" if right else "DO NOT MATCH THE HASHES"
    ) in ran.stderr


def test_a_given_wheel_is_installed_and_noted(given: Path) -> None:
    checksum = wheel(given)
    noted = "sed s/^/noted:/ /usr/share/lanes/given/wheels"
    ran = built(given, f"/tools/wheel /src && {noted}")
    assert f"noted:{checksum}" in ran.stderr


KEPT = "sed s/^/kept:/ /usr/share/lanes/unrecorded/an-engine"
SOLVED = "/tools/rooted /tools/solved"


@pytest.mark.parametrize("pinned", [True, False])
def test_what_no_lock_holds_is_taken_with_its_needs_and_each_checksum_is_recorded(
    given: Path, index: str, pinned: bool
) -> None:
    engine = wheel(given, "an-engine", "a-need", "nvidia-nccl-cu13")
    need, _ = wheel(given, "a-need"), wheel(given, "nvidia-nccl-cu13")
    here = "python -m pip list --format=freeze | sed s/^/here:/"
    step = f"{SOLVED} /none an-engine 1.0 '{engine if pinned else ''}' && {KEPT} && {here}"
    said = built(given, step, index).stderr
    assert f"kept:{need}  a_need-1.0-py3-none-any.whl" in said
    assert f"UNRECORDED: sha256 {need}" in said
    assert (f"kept:{engine}" in said) is not pinned
    assert "here:an-engine==1.0" in said
    assert "here:nvidia-nccl" not in said  # the transport's own stays


def test_a_wheel_of_another_checksum_than_the_pinned_is_not_installed(
    given: Path, index: str
) -> None:
    actual = wheel(given, "an-engine")
    ran = built(given, f"{SOLVED} /none an-engine 1.0 {'0' * 64}", index)
    assert ran.returncode != 0
    assert f"an_engine-1.0-py3-none-any.whl is {actual}, pinned is {'0' * 64}" in ran.stderr


def test_a_given_wheel_of_what_no_lock_holds_brings_its_needs(given: Path, index: str) -> None:
    wheel(given, "a-need")
    (given / "own").mkdir()
    engine = wheel(given / "own", "an-engine", "a-need")
    said = built(given, f"{SOLVED} /src/own an-engine 9.9 '' && {KEPT}", index).stderr
    assert f"kept:{engine}" in said
    assert "Successfully installed a-need-1.0 an-engine-1.0" in said


def test_a_wheel_that_no_index_gave_names_what_to_do(given: Path, index: str) -> None:
    ran = built(given, f"{SOLVED} /none an-engine 1.0 ''", index)
    assert ran.returncode != 0
    assert "SRC_TRTLLM_WHEEL=FOLDER" in ran.stderr


def test_no_wheel_where_one_must_be_given_names_the_option(given: Path) -> None:
    ran = built(given, "/tools/wheel /src")
    assert ran.returncode != 0
    assert "SRC_DEEPEP_WHEEL=" in ran.stderr


def test_the_ca_bundle_is_trusted_in_the_step_and_stays_in_no_layer(
    given: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("mine")
    step = (
        "/tools/rooted sh -c 'for each in $PIP_CERT $SSL_CERT_FILE $CURL_CA_BUNDLE"
        " $REQUESTS_CA_BUNDLE; do sed s/^/trusts:/ $each; echo; done'"
    )
    secret = f"--secret=id=ca,src={bundle}"
    assert built(given, step, secret).stderr.count("trusts:mine") == 4
    later = 'true\nRUN test ! -s /run/secrets/ca -a -z "$PIP_CERT"'
    ran = built(given, later, secret)
    assert ran.returncode == 0, ran.stderr
