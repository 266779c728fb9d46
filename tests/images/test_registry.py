"""Push and pull against a real registry on this machine: by digest, and never anything else."""

import hashlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import requests
from tests.images import recipe

from lanekit import images, registry, sbom
from lanekit.errors import ImageFailed

PLACE = "127.0.0.1:5000"  # images/engine.sh registry
BLOBS = Path("/var/lib/lanes-engine/registry/docker/registry/v2/blobs/sha256")
NAME = "probe"
STACK = "2026-07"


def _answers() -> bool:
    try:
        return requests.get(f"http://{PLACE}/v2/", timeout=2).ok
    except requests.RequestException:
        return False


pytestmark = pytest.mark.skipif(not _answers(), reason="needs images/engine.sh registry")


def make(text: str) -> str:
    """A small image of the graph's shape, loaded as the local `probe`; its digest."""
    held = images.Contents("system", "3.12", {}, {}, {"aiperf": "0.10.0"}, {"libc6": "2"})
    body = msgspec.json.encode(held).decode()
    made = recipe.build(
        "FROM lanes/stand-in-base:local\n"
        f"RUN mkdir -p /usr/share/lanes && echo '{body}' >/usr/share/lanes/contents.json"
        f" && echo '{text}' >/etc/probe\n",
        "--load", "--provenance=mode=max", f"--tag={images.local(NAME, STACK)}",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return images.identify(NAME, STACK)


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(registry, "SBOMS", tmp_path / "sbom")
    yield tmp_path / "images.lock"
    entry = registry.read(tmp_path / "images.lock").get(STACK, {}).get(NAME)
    if entry is not None:
        names = (f"{entry.repository}:{entry.tag}", f"{entry.repository}@{entry.digest}")
        subprocess.run(["docker", "rmi", "-f", *names], capture_output=True, check=False)
    subprocess.run(
        ["docker", "rmi", "-f", images.local(NAME, STACK)], capture_output=True, check=False
    )


@pytest.fixture
def pushed(lock: Path) -> registry.Entry:
    make(str(lock))
    registry.push(NAME, STACK, PLACE, lock)
    return registry.read(lock)[STACK][NAME]


def forget(entry: registry.Entry) -> None:
    """Remove the image from this machine, so that a pull has to bring it."""
    names = (images.local(NAME, STACK), f"{entry.repository}:{entry.tag}")
    subprocess.run(["docker", "rmi", "-f", *names], check=True, capture_output=True)


def test_what_was_pushed_is_pulled_by_its_digest(lock: Path, pushed: registry.Entry) -> None:
    forget(pushed)
    said = registry.pull(NAME, STACK, lock=lock)
    assert said.endswith(f"@{pushed.digest}")
    assert images.identify(NAME, STACK) == pushed.digest
    assert pushed.tag.startswith("aiperf0.10.0-")


def test_the_bill_of_materials_lies_beside_the_digest(lock: Path, pushed: registry.Entry) -> None:
    bill = (lock.parent / "sbom" / f"{STACK}-{NAME}.cdx.json").read_bytes()
    assert sbom.sha256(bill) == pushed.sbom
    assert pushed.digest.encode() in bill


def test_provenance_survives_the_push(pushed: registry.Entry) -> None:
    asked = subprocess.run(
        ["docker", "buildx", "imagetools", "inspect", "--raw",
         f"{pushed.repository}@{pushed.digest}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "attestation-manifest" in asked.stdout


def test_pushing_again_changes_nothing(lock: Path, pushed: registry.Entry) -> None:
    registry.push(NAME, STACK, PLACE, lock)
    assert registry.read(lock)[STACK][NAME] == pushed


def test_a_tag_that_exists_with_other_contents_is_never_overwritten(
    lock: Path, pushed: registry.Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "tag", lambda *_: pushed.tag)
    other = make("other contents")
    assert other != pushed.digest
    with pytest.raises(ImageFailed, match="exists with"):
        registry.push(NAME, STACK, PLACE, lock)
    assert registry.remote(f"{pushed.repository}:{pushed.tag}") == pushed.digest


def rewritten(lock: Path, **changes: str) -> None:
    known = registry.read(lock)
    known[STACK][NAME] = msgspec.structs.replace(known[STACK][NAME], **changes)
    lock.write_bytes(msgspec.json.encode(known))


def test_a_digest_the_registry_does_not_have_is_refused(lock: Path, pushed: registry.Entry) -> None:
    rewritten(lock, digest="sha256:" + "0" * 64)
    forget(pushed)
    with pytest.raises(ImageFailed, match="docker pull"):
        registry.pull(NAME, STACK, lock=lock)


def test_a_lock_whose_tag_says_something_else_is_refused(
    lock: Path, pushed: registry.Entry
) -> None:
    rewritten(lock, tag="aiperf0.13.0-000000000000")
    with pytest.raises(ImageFailed, match="the lock says"):
        registry.pull(NAME, STACK, lock=lock)


def uploaded(text: str) -> tuple[str, Path]:
    """A manifest that this machine has never seen, put by HTTP: its digest and the stored file."""
    base = f"http://{PLACE}/v2/{NAME}"
    config = msgspec.json.encode({"architecture": "amd64", "os": "linux", "comment": text,
                                  "rootfs": {"type": "layers", "diff_ids": []}})  # fmt: skip
    blob = f"sha256:{hashlib.sha256(config).hexdigest()}"
    begun = requests.post(f"{base}/blobs/uploads/", timeout=5).headers["Location"]
    put = requests.put(begun, params={"digest": blob}, data=config, timeout=5)
    put.raise_for_status()
    kind = "application/vnd.oci.image.manifest.v1+json"
    config_kind = "application/vnd.oci.image.config.v1+json"
    manifest = msgspec.json.encode({
        "schemaVersion": 2, "mediaType": kind, "layers": [],
        "config": {"mediaType": config_kind, "digest": blob, "size": len(config)},
    })  # fmt: skip
    digest = hashlib.sha256(manifest).hexdigest()
    headers = {"Content-Type": kind}
    put = requests.put(f"{base}/manifests/{text}", data=manifest, headers=headers, timeout=5)
    put.raise_for_status()
    return f"sha256:{digest}", BLOBS / digest[:2] / digest / "data"


@pytest.mark.skipif(not BLOBS.is_dir(), reason="the registry's files are elsewhere")
@pytest.mark.parametrize("changed", [False, True])
def test_bytes_changed_in_the_registry_are_refused(
    lock: Path, pushed: registry.Entry, changed: bool
) -> None:
    """The control arrives and is refused later, holding nothing; the changed one never arrives."""
    digest, stored = uploaded(f"t{time.time_ns()}")
    if changed:
        stored.write_bytes(stored.read_bytes().replace(b'"schemaVersion":2', b'"schemaVersion":3'))
    rewritten(lock, digest=digest)
    with pytest.raises(ImageFailed) as error:
        registry.pull(NAME, STACK, lock=lock)
    assert ("docker pull" in error.value.message) is changed


def test_a_registry_that_does_not_answer_is_not_an_empty_one(lock: Path) -> None:
    """Refused when it is asked: nothing was tagged for it, and no push was tried."""
    make("unreachable")
    with pytest.raises(ImageFailed, match=r"127\.0\.0\.1:1/probe") as error:
        registry.push(NAME, STACK, "127.0.0.1:1", lock)
    assert error.value.remedy == "Is REGISTRY= right?"
    assert not [
        tag
        for image in images.docker().image.list()
        for tag in image.repo_tags or ()
        if tag.startswith("127.0.0.1:1/")
    ]
