"""Whether every host of a fleet can run the plan, asked before anything starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lanekit import images, registry, ssh
from lanekit.errors import ConfigError, ImageFailed
from lanekit.plan import Plan
from lanekit.progress import Say

# Run in the engine's image: sha256 of a folder's files by content, read in parallel, since a model
# of 30 GB is read from the disk only once (the page cache keeps it for the engine).
_HASH: Final = """
import hashlib, pathlib, sys
from concurrent.futures import ThreadPoolExecutor
root = pathlib.Path(sys.argv[1])
names = sorted(p for p in root.rglob("*") if p.is_file())
def digest(path):
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
with ThreadPoolExecutor() as pool:
    found = [f"{h} {p.relative_to(root)}" for p, h in zip(names, pool.map(digest, names))]
print(hashlib.sha256("\\n".join(found).encode()).hexdigest(), len(found))
"""


def require(plan: Plan, lines: Sequence[ssh.Line], say: Say) -> None:
    """Refuse to start where a host has not the images and the model of the plan.

    Raises:
        ImageFailed: an image is missing on a host, is another one, or cannot be pulled there.
        ConfigError: the model is missing on a host, or another one.
        HostLost: a host cannot be reached any more.
    """
    ssh.everywhere(lines, lambda line: _require_images(plan, line, say))
    if len(lines) > 1 and _given(plan):
        _require_model(plan, lines, say)


def _given(plan: Plan) -> bool:
    """Whether the model is a folder that each host has to bring."""
    return Path(plan.model.path).is_absolute() and not plan.model.source.startswith("built:")


def _require_images(plan: Plan, line: ssh.Line, say: Say) -> None:
    """The leader needs every image, a worker the engine's; each by the digest of the plan."""
    held = plan.containers.images if plan.containers else {}
    for name, digest in held.items():
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

    if plan.containers is None:
        raise AssertionError("only containers are asked for a model")
    path, held = plan.model.path, plan.containers
    command = [plan.environments["server"].python, "-c", _HASH, path]
    try:
        told = str(line.docker.run(
            held.images["server"], command, remove=True, pull="never", networks=["none"],
            user=held.user,
            mounts=[["type=bind", f"source={path}", f"target={path}", "readonly"]],
        ))  # fmt: skip
    except DockerException as error:
        line.require()
        raise ConfigError(
            f"host {line.host.name} cannot read {path}: {images.last_words(error)}",
            remedy="MODEL= names a folder that every host has at the same path.",
        ) from error
    digest, _, files = told.strip().partition(" ")
    if files == "0":
        raise ConfigError(
            f"{path} on host {line.host.name} is empty", remedy="Copy the model there."
        )
    return digest
