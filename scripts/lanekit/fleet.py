"""Whether every host of a fleet can run the plan, asked before anything starts."""

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lanekit import images, registry, ssh
from lanekit.errors import ConfigError, ImageFailed
from lanekit.plan import KEPT, Host, Plan
from lanekit.progress import Say

if TYPE_CHECKING:
    from python_on_whales import Container, DockerClient

# Run in the engine's image: sha256 of a folder's files by content, read in parallel, since a model
# of 30 GB is read from the disk only once (the page cache keeps it for the engine).
# What is no folder is a hub id: fetched into the folder that the host keeps, or found there.
_HASH: Final = """
import hashlib, pathlib, sys
from concurrent.futures import ThreadPoolExecutor
root = pathlib.Path(sys.argv[1])
if not root.is_absolute():
    from huggingface_hub import snapshot_download
    root = pathlib.Path(snapshot_download(sys.argv[1]))
names = sorted(p for p in root.rglob("*") if p.is_file())
def digest(path):
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
with ThreadPoolExecutor() as pool:
    found = [f"{h} {p.relative_to(root)}" for p, h in zip(names, pool.map(digest, names))]
print(hashlib.sha256("\\n".join(found).encode()).hexdigest(), len(found))
"""


# Passed into a container by name, so that no value is written down: the rest of what a process
# inherits (PATH, LD_LIBRARY_PATH, HOME) means the host's files.
PASSED: Final = ("HF_TOKEN", "HTTPS_PROXY", "NO_PROXY")


def require(plan: Plan, lines: Sequence[ssh.Line], say: Say) -> None:
    """Refuse to start where a host has not the images and the model of the plan.

    Raises:
        ImageFailed: an image is missing on a host, is another one, or cannot be pulled there.
        ConfigError: the model is missing on a host, or another one.
        HostLost: a host cannot be reached any more.
    """
    ssh.everywhere(lines, lambda line: _require_images(plan, line, say))
    ssh.everywhere(lines, lambda line: _keep(plan, line))
    if len(lines) > 1 and plan.driver != "batch" and not plan.model.source.startswith("built:"):
        _require_model(plan, lines, say)


def _keep(plan: Plan, line: ssh.Line) -> None:
    """Make the folder that a host keeps, where it is not there yet, the containers' user's."""
    from python_on_whales import DockerException  # noqa: PLC0415

    held = plan.held
    try:
        if not line.host.cache:
            line.docker.volume.create(held.kept)
        bare = line.docker.container.create(
            held.images["server"], ["true"], pull="never", mounts=[_kept(plan, line.host)]
        )
        try:
            hand_over(line.docker, Path(held.home), bare, held.user)
        finally:
            line.docker.container.remove(bare)
    except (DockerException, ValueError) as error:
        line.require()
        raise ConfigError(
            f"host {line.host.name} can keep nothing: {images.last_words(error)}",
            remedy="Look at the Docker engine there; `cache` of the inventory is a folder there.",
        ) from error


def _kept(plan: Plan, host: Host) -> list[str]:
    """The folder that a host keeps, as `docker --mount` has it."""
    kind, source = ("bind", host.cache) if host.cache else ("volume", plan.held.kept)
    return [f"type={kind}", f"source={source}", f"target={KEPT}"]


def hand_over(docker: "DockerClient", folder: Path, container: "Container", user: str) -> None:
    """Make a folder in a volume that the container's user owns: `docker cp -a` refuses a user that
    the image does not name (docker 26.1.5, 2026-11-30), an archive of its own does not."""
    uid, _, gid = user.partition(":")
    entry = tarfile.TarInfo(folder.name)
    entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o755, int(uid), int(gid)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(entry)
    piped(docker, archive.getvalue(), "cp", "-", f"{container.id}:{folder.parent}")


def piped(docker: "DockerClient", archive: bytes, *words: str) -> None:
    """Run a docker command that reads an archive: its client library knows no way to."""
    command = [*docker.client_config.docker_cmd, *words]
    done = subprocess.run(command, input=archive, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.decode(errors="replace"))


def _require_images(plan: Plan, line: ssh.Line, say: Say) -> None:
    """The leader needs every image, a worker the engine's; each by the digest of the plan."""
    for name, digest in plan.held.images.items():
        if name != "server" and line.host.node_rank:
            continue
        if not images.present(line.docker, digest) and not registry.fetch(line.docker, digest, say):
            tag = plan.environments[name].name.removeprefix("image ")
            other = images.present(line.docker, images.local(tag, plan.stack))
            raise ImageFailed(
                f"host {line.host.name} has {'another' if other else 'no'} image {tag}: the plan's "
                f"is {digest}" + (f", there is {other}" if other else ""),
                remedy=f"`make pull-{tag}` there, or: docker save {images.local(tag, plan.stack)} |"
                f" docker -H ssh://{line.host.ssh} load",
            )


def _require_model(plan: Plan, lines: Sequence[ssh.Line], say: Say) -> None:
    """The same files on every host, compared by what is in them."""
    found: dict[str, str] = {}
    say(f"comparing {plan.model.path} on {len(lines)} hosts")

    def read(line: ssh.Line) -> None:
        found[line.host.name] = _fingerprint(plan, line)

    ssh.everywhere(lines, read)
    leader = lines[0].host.name
    for name, digest in found.items():
        if digest != found[leader]:
            raise ConfigError(
                f"{plan.model.path} on {name} is not the model on {leader}: {digest} there, "
                f"{found[leader]} on {leader}",
                remedy="Copy it again, or mount one folder on every host.",
            )


def _fingerprint(plan: Plan, line: ssh.Line) -> str:
    from python_on_whales import DockerException  # noqa: PLC0415

    path, held = plan.model.path, plan.held
    command = [plan.environments["server"].python, "-c", _HASH, path]
    network, *mount = (
        ("none", "type=bind", f"source={path}", f"target={path}", "readonly")
        if Path(path).is_absolute()
        else ("host", *_kept(plan, line.host))
    )
    try:
        # Secrets by their names, in a file: a value would stand on a command line.
        with tempfile.NamedTemporaryFile("w") as names:
            print(*PASSED, sep="\n", file=names, flush=True)
            told = str(line.docker.run(
                held.images["server"], command, remove=True, pull="never", networks=[network],
                user=held.user, envs=held.keeps, env_files=[names.name], mounts=[mount],
            ))  # fmt: skip
    except DockerException as error:
        line.require()
        raise ConfigError(
            f"host {line.host.name} cannot read {path}: {images.last_words(error)}",
            remedy="MODEL= names a folder that every host has at the same path, or a hub id that "
            "every host can fetch.",
        ) from error
    digest, _, files = told.strip().rpartition("\n")[2].partition(" ")
    if files == "0":
        raise ConfigError(
            f"{path} on host {line.host.name} is empty", remedy="Copy the model there."
        )
    return digest
