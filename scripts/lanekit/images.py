"""The image graph: docker-bake.hcl, filled in from pins.toml and overridden roots, built by bake.

The HCL file says what hangs on what; this module gives every ARG its pin, every base its digest,
every source its place. PLAN=1 prints exactly what bake would be given.
"""

import contextlib
import difflib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from lanekit import drop, interrupt, paths, pins
from lanekit.errors import ConfigError, ImageFailed, Interrupted, require_known

if TYPE_CHECKING:
    from python_on_whales import DockerClient

IMAGES: Final = paths.ROOT / "images"
GRAPH: Final = IMAGES / "docker-bake.hcl"
STAGE: Final = paths.CACHE / "images"
LOCAL: Final = "lanes"  # the namespace of what is built here and not yet pushed
DEFAULT_STACK: Final = "2026-07"
_OCI: Final = "org.opencontainers.image"
SOURCE: Final = f"{_OCI}.source"
# A remote that others can reach: https with or without a user, ssh, or user@host:path.
_REMOTE: Final = (
    r"(?:https://(?:[^/]*@)?|ssh://(?:[^/]*@)?|[\w.-]+@)([\w.-]+)(?::\d+(?=/))?[:/](.+)"
)

Definition = dict[str, Any]
T = TypeVar("T")


class Roots(msgspec.Struct, frozen=True):
    """What a person put in place of a public root.

    sources: pin name -> folder, file or URL. checksums: pin name -> sha256 of a file that is not
    the pinned one; the image bears the names of both in the label lanes.given.
    """

    base_image: str = ""
    sources: dict[str, str] = {}
    checksums: dict[str, str] = {}
    ca: str = ""
    pip: str = ""


def roots(environ: Mapping[str, str]) -> Roots:
    """The overridden roots: BASE_IMAGE=, SRC_NAME=, SHA256_NAME=, CA_BUNDLE=, PIP_CONFIG=. Raises
    ConfigError: one names a file or folder that is not there, or what no recipe takes so."""
    sources = _taken(_named(environ, "SRC_"))
    found = Roots(
        base_image=environ.get("BASE_IMAGE", ""),
        sources=sources,
        checksums=_named(environ, "SHA256_"),
        ca=environ.get("CA_BUNDLE", ""),
        pip=environ.get("PIP_CONFIG", ""),
    )
    named = {f"SRC_{k.upper()}": v for k, v in sources.items() if not _is_url(v)}
    for option, value in {**named, "CA_BUNDLE": found.ca, "PIP_CONFIG": found.pip}.items():
        if value and not Path(value).exists():
            raise ConfigError(f"{option}: {value} is not there", remedy="Give a path that exists.")
    return found


def _taken(sources: Mapping[str, str]) -> dict[str, str]:
    """The sources that recipes take. One that was meant for them and would be ignored is refused,
    else the public root is silently taken in its place; another program's variable is passed over.
    """
    takes = sorted({source for name in targets() for source in _sources(_recipe(name))})
    all_of_them = ", ".join(f"SRC_{each.upper()}" for each in takes)
    pinned = pins.load().pin if sources else {}
    taken = {}
    for source, place in sources.items():
        option = f"SRC_{source.upper()}"
        if source in takes:
            if source.endswith("_wheel") and _is_url(place):
                raise ConfigError(
                    f"{option}: {place} is a URL, and no checksum of it is pinned",
                    remedy="Fetch the wheel, check it, and give its folder.",
                )
            taken[source] = place
        elif source in pinned or difflib.get_close_matches(source, takes):
            raise ConfigError(
                f"{option}: no image takes such a source",
                remedy=f"Unset it, or name one of {all_of_them}.",
            )
        else:
            told = f"{option} is passed over: no image takes such a source, but {all_of_them}"
            print(told, file=sys.stderr)
    return taken


def _named(environ: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {
        k.removeprefix(prefix).lower(): v for k, v in environ.items() if k.startswith(prefix) and v
    }


def _is_url(text: str) -> bool:
    return re.match(r"https?://|git@|ssh://", text) is not None


def docker(ssh: str = "", socket: Path | None = None) -> "DockerClient":
    """A Docker client for this machine, or for the host that `ssh` ([user@]address[:port]) reaches.

    socket: where that host's engine was brought to already. Raises ConfigError: no client or no
    engine.
    """
    from python_on_whales import DockerClient, DockerException  # noqa: PLC0415 (0.4 s)
    from python_on_whales.client_config import ClientNotFoundError  # noqa: PLC0415

    there = f"unix://{socket}" if socket else f"ssh://{ssh}"
    client = DockerClient(host=there if ssh else None)
    try:
        client.version()
    except (DockerException, ClientNotFoundError) as error:
        where = f" on {ssh}" if ssh else ""
        raise ConfigError(
            f"no Docker engine answers{where}: {last_words(error)}",
            remedy=f"Try it: docker -H ssh://{ssh} version"
            if ssh
            else "Start Docker; on a bare Debian machine: images/engine.sh.",
        ) from error
    return client


def last_words(error: Exception) -> str:
    """What Docker said last: its client's exceptions quote all of it, ending in a lone quote."""
    said = getattr(error, "stderr", None) or str(error)
    lines = [line.strip() for line in str(said).splitlines() if line.strip(" '")]
    return lines[-1] if lines else type(error).__name__


def targets() -> list[str]:
    """Every image of the graph, parents before children."""
    found = re.findall(r'^target "([a-z][\w-]*)"', GRAPH.read_text(), re.M)
    return [name for name in found if not name.startswith("_")]


def folder(target: str) -> Path:
    """The folder a target is built from; variants share one."""
    return IMAGES / target.removesuffix("-v1" if target != "transport-v1" else "\0")


def _recipe(target: str) -> str:
    return (folder(target) / "Dockerfile").read_text()


def definition(stack: str, given: Roots, found: pins.Pins | None = None) -> Definition:
    """What docker-bake.hcl is completed with: arguments, contexts and secrets of each target.
    Raises ConfigError: an unknown stack, or a source nobody provides."""
    found = found or pins.load()
    known = pins.arguments(found, stack)
    made = {name: _filled(name, stack, given, found, known) for name in targets()}
    return {"target": {"_common": {"labels": checkout()}, **made}}


def checkout() -> dict[str, str]:
    """The labels that say which checkout images are built from: they change no layer.

    `created` is the commit's time, so that one tree is one image whenever it is built; a changed
    tree has none. `source` bears no user and no password, and a clone of a folder has none.
    """
    known = drop.git()
    changed = known.get("dirty") == "yes"
    remote = re.fullmatch(_REMOTE, drop.asked_of_git("remote", "get-url", "origin") or "")
    told = {
        "source": f"https://{remote[1]}/{remote[2].removesuffix('.git')}" if remote else "",
        "revision": known.get("commit", "") + ("-dirty" if changed else ""),
        "created": "" if changed or not known else drop.asked_of_git("log", "-1", "--format=%cI"),
    }
    return {f"{_OCI}.{name}": value for name, value in told.items() if value}


def _filled(
    name: str, stack: str, given: Roots, found: pins.Pins, known: Mapping[str, str]
) -> Definition:
    text = _recipe(name)
    declared = [arg for line in text.splitlines() for arg, _ in pins.declared(line)]
    arguments = {arg: known[arg] for arg in declared if arg in known}
    sources = {source: _source(source, stack, given, found) for source in _sources(text)}
    for source, place in given.sources.items():
        if _is_url(place) and f"{source.upper()}_URL" in arguments:
            arguments[f"{source.upper()}_URL"] = place
    for source, checksum in given.checksums.items():
        if f"{source.upper()}_SHA256" in arguments:
            arguments[f"{source.upper()}_SHA256"] = checksum
    bases = _bases(text, stack, given, found)
    secrets = [("ca", given.ca), ("pip", given.pip)]
    inside = {source for each in (name, *ancestors(name)) for source in _sources(_recipe(each))}
    theirs = [*(["base"] if given.base_image else []), *sorted(inside & {*given.sources})]
    return {
        "args": arguments,
        "contexts": {
            **bases,
            **_locks(STAGE / stack / name / "locks", declared, known),
            **{f"src-{source.replace('_', '-')}": place for source, place in sources.items()},
        },
        "labels": {
            "lanes.given": " ".join(theirs),
            f"{_OCI}.title": name,
            f"{_OCI}.version": stack,
            f"{_OCI}.description": _about(text),
            **_based(bases.values()),
        },
        "secret": [f"id={key},src={Path(path).resolve()}" for key, path in secrets if path],
    }


def _about(text: str) -> str:
    """What a recipe says of itself in the comment that opens it."""
    lines = text.partition("\nFROM ")[0].splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines)


def _based(places: Iterable[str]) -> dict[str, str]:
    """The labels of the base an image starts from; a base given by its tag has no digest."""
    name, _, digest = "".join(places).removeprefix("docker-image://").partition("@")
    told = {"name": name, "digest": digest}
    return {f"{_OCI}.base.{key}": value for key, value in told.items() if value}


def stacks(name: str, found: pins.Pins) -> list[str]:
    """The stacks that have the locks of an image and of all it builds on."""
    text = "".join(_recipe(each) for each in (name, *ancestors(name))).splitlines()
    locks = {arg for line in text for arg, _ in pins.declared(line) if arg.endswith("_LOCK")}
    return [stack for stack in found.stacks if locks <= pins.arguments(found, stack).keys()]


def require_given(names: Iterable[str], stack: str, given: Roots, found: pins.Pins) -> None:
    """Refuse a build, before its first step, whose images need a wheel that nobody gave, or are not
    in this stack. Raises ConfigError: with how to come by every one that is missing."""
    names = list(names)
    for name in names:
        if stack not in (its := stacks(name, found)):
            raise ConfigError(
                f"stack {stack} has no image {name}", remedy=f"STACK={' or STACK='.join(its)}."
            )
    recipes = {_recipe(each) for name in names for each in (name, *ancestors(name))}
    needed = {source for text in recipes for source in _sources(text)} - {*given.sources}
    missing = [
        (f"SRC_{name.upper()}", wheel.how.strip())
        for name, wheel in found.given.items()
        if name in needed and stack in wheel.stacks
    ]
    if missing:
        raise ConfigError(
            f"stack {stack} needs what no index holds: {', '.join(o for o, _ in missing)}",
            remedy="\n".join(how for _, how in missing),
        )


def _bases(text: str, stack: str, given: Roots, found: pins.Pins) -> dict[str, str]:
    """The contexts of the pinned bases a Dockerfile starts from."""
    values = pins.of_stack(found, stack)
    used = set(re.findall(r"^FROM\s+(\w+)", text, re.M | re.I)) & set(found.pin)
    return {
        base: "docker-image://"
        + (given.base_image or pins.reference(found.pin[base], values[base]))
        for base in sorted(used)
    }


def _locks(place: Path, declared: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """A folder with just the locks a Dockerfile names, so that no other lock rebuilds it."""
    names = [known[arg] for arg in declared if arg.endswith("_LOCK") and arg in known]
    if not names:
        return {}
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in names:
        shutil.copy2(paths.LOCKS / name, place / name)
    return {"locks": str(place)}


def _sources(text: str) -> list[str]:
    """The sources a Dockerfile takes as `from=src-NAME`, by pin name."""
    return sorted({s.replace("-", "_") for s in re.findall(r"\bsrc-([a-z0-9-]+)", text)})


def _source(name: str, stack: str, given: Roots, found: pins.Pins) -> str:
    """Where a source comes from: what SRC_NAME= says, else the pin."""
    place = given.sources.get(name, "")
    pin, value = found.pin.get(name), pins.of_stack(found, stack).get(name)
    if place and Path(place).is_dir():
        return str(Path(place).resolve())
    if place and not _is_url(place):
        return str(_staged(name, Path(place)))
    if pin is not None and pin.kind == "git" and value is not None:
        return f"{place or pin.source}#{value.commit}"
    # An archive is fetched inside the build, by URL and checksum; an empty folder says so.
    return str(_staged(name, None))


def _staged(name: str, file: Path | None) -> Path:
    """A folder that holds one file, or none: a bake context is a folder."""
    place = STAGE / "sources" / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if file is not None:
        same_disk = file.stat().st_dev == place.stat().st_dev
        os.link(file, place / file.name) if same_disk else shutil.copy2(file, place)
    return place


def variables(stack: str, registry: str = LOCAL) -> dict[str, str]:
    """The variables of docker-bake.hcl."""
    # Newer bake asks on the terminal before it reads outside the checkout, where SRC_NAME= may be.
    return {"STACK": stack, "REGISTRY": registry, "BUILDX_BAKE_ENTITLEMENTS_FS": "0"}


def unrecorded(names: Iterable[str], stack: str, given: Roots) -> list[str]:
    """The pins in some images whose file no checksum was pinned or given for; a given wheel is the
    giver's, and noted as such in the image."""
    made = definition(stack, given)["target"]
    inside = {each for name in names for each in (name, *ancestors(name))}
    empty = {arg for each in inside for arg, value in made[each]["args"].items() if not value}
    found = {a.removesuffix("_SHA256").lower() for a in empty if a.endswith("_SHA256")}
    return sorted(name for name in found if f"{name}_wheel" not in given.sources)


def write(made: Definition, stack: str) -> Path:
    """Leave the definition where bake reads it."""
    STAGE.mkdir(parents=True, exist_ok=True)
    path = STAGE / f"{stack}.json"
    path.write_text(json.dumps(made, indent=1, sort_keys=True))
    return path


def asked(names: Iterable[str]) -> list[str]:
    """What bake is asked for: images, and by name what they build on, or that is exported too."""
    names = list(names)
    return names + sorted({f"_{each}" for name in names for each in ancestors(name)})


def plan(names: list[str], stack: str, given: Roots) -> Definition:
    """Bake's own view of what would be built, complete. Raises ConfigError: an unknown image."""
    require(names)
    with contextlib.chdir(paths.ROOT):  # the graph's contexts are relative
        made: Definition = docker().buildx.bake(  # type: ignore[assignment]
            asked(names),
            files=[GRAPH, write(definition(stack, given), stack)],
            variables=variables(stack),
            print=True,
        )
    return made


def build(names: list[str], stack: str, given: Roots) -> dict[str, str]:
    """Build images and load them; returns image -> digest. Progress goes to the terminal.

    Raises:
        ConfigError: an unknown image, or a wheel that no index holds and nobody gave.
        ImageFailed: a build failed; bake's own last words stand above.
        Interrupted: a signal came; the build is ended.
    """
    from python_on_whales import DockerException  # noqa: PLC0415

    require(names)
    require_given(names, stack, given, pins.load())
    client, metadata = docker(), STAGE / "metadata.json"
    files: list[str | Path] = [GRAPH, write(definition(stack, given), stack)]
    try:
        # The graph's contexts are relative. A signal ends the client, and with it the build.
        with contextlib.chdir(paths.ROOT), interrupt.raising():
            client.buildx.bake(
                asked(names), files=files, variables=variables(stack), metadata_file=metadata
            )
    except Interrupted as error:
        raise Interrupted(
            f"building {', '.join(names)} {error.message}",
            remedy="Finished steps are kept: the same command goes on from there.",
        ) from error
    except DockerException as error:
        raise ImageFailed(
            f"building {', '.join(names)} failed",
            remedy="Read the step above; behind a proxy give CA_BUNDLE=, without a public registry "
            "BASE_IMAGE=.",
        ) from error
    told = json.loads(metadata.read_text())
    return {
        name: told[name]["containerimage.digest"]
        for name in names
        if isinstance(told.get(name), dict) and "containerimage.digest" in told[name]
    }


def require(names: Iterable[str]) -> None:
    """Refuse what is no image of the graph.

    Raises:
        ConfigError: with the names that are.
    """
    for name in names:
        require_known(name, targets(), "image")


def local(name: str, stack: str) -> str:
    """The reference of an image built or pulled here."""
    return f"{LOCAL}/{name}:{stack}"


class Contents(msgspec.Struct, frozen=True):
    """/usr/share/lanes/contents.json: what the guard found in the image itself.

    device: file -> version of the NVSHMEM whose device code is linked into it.
    """

    system: str
    python: str
    libraries: dict[str, str]
    expect: dict[str, str]
    packages: dict[str, str]
    debian: dict[str, str]
    device: dict[str, str] = {}


def identify(name: str, stack: str, ssh: str = "") -> str:
    """The digest of an image that was built or pulled here, or on the host that `ssh` reaches: what
    a tag says may change. Raises ConfigError: it is not here."""
    if not (found := present(docker(ssh), local(name, stack))):
        raise ConfigError(
            f"image {local(name, stack)} is not {f'on {ssh}' if ssh else 'here'}",
            remedy=f"Build it with `make image-{name}` or pull it with `make pull-{name}`.",
        )
    return found


def present(client: "DockerClient", reference: str) -> str:
    """The digest of an image where the client's engine has it, else nothing."""
    from python_on_whales.exceptions import NoSuchImage  # noqa: PLC0415

    try:
        return str(client.image.inspect(reference).id)
    except NoSuchImage:
        return ""


def contents(reference: str, ssh: str = "") -> Contents:
    """What an image holds, as its own guard wrote it down. Raises ImageFailed: the image has no
    such record: the guard did not run at the end of its build."""
    return _inside(reference, ["cat", "/usr/share/lanes/contents.json"], Contents, ssh)


def _inside(reference: str, command: list[str], kind: type[T], ssh: str) -> T:
    """What a command prints in an image, as JSON of this kind."""
    from python_on_whales import DockerException  # noqa: PLC0415

    alone: dict[str, Any] = {"remove": True, "networks": ["none"], "pull": "never"}
    try:
        told = docker(ssh).run(reference, command, **alone)
        return msgspec.json.decode(str(told), type=kind)
    except (DockerException, msgspec.DecodeError) as error:
        raise ImageFailed(
            f"{reference} does not say what it holds", remedy="Build it with `make image-NAME`."
        ) from error


def purelib(names: Iterable[str]) -> list[str]:
    """The arguments with which a Python prints, as JSON, the text of files below site-packages."""
    program = (
        "import json, pathlib, sys, sysconfig; site = pathlib.Path(sysconfig.get_path('purelib'));"
        "text = lambda path: path.read_text(errors='replace') if path.is_file() else '';"
        "print(json.dumps({name: text(site / name) for name in sys.argv[1:]}))"
    )
    return ["-c", program, *names]


def installed(reference: str, names: Iterable[str], ssh: str = "") -> dict[str, str]:
    """The text of files below an image's site-packages, empty for one that is not there. Raises
    ImageFailed: the image has no Python that answers."""
    return _inside(reference, ["python", *purelib(names)], dict[str, str], ssh)


def parents() -> dict[str, str]:
    """image -> what it builds on: another image, or a pinned base."""
    text, found = GRAPH.read_text(), {}
    blocks = re.findall(r'^target "([\w-]+)" \{\n(.*?)^\}', text, re.M | re.S)
    inherited = {name: body for name, body in blocks}
    for name, body in blocks:
        if name.startswith("_"):
            continue
        like = re.search(r'inherits\s*=\s*\["([\w-]+)"\]', body)
        whole = body + (inherited.get(like[1], "") if like else "")
        match = re.search(r'parent = "target:_?([\w-]+)"', whole)
        match = match or re.search(r"^FROM\s+(\S+)", _recipe(name), re.M)
        found[name] = match[1] if match else "?"
    return found


def ancestors(name: str) -> list[str]:
    """The images a target builds on, nearest first."""
    above, found = parents(), list[str]()
    while (name := above.get(name, "")) in above:
        found.append(name)
    return found


def pinned(name: str, stack: str) -> dict[str, str]:
    """The packages that an image is built with: project -> version. A child's locks count over its
    ancestors', and what is installed by name over every lock (tools/install); what pip solves while
    it builds (tools/solved) may change all that locks brought. `contents` is what it really has.
    Raises ConfigError: an unknown stack, or a lock that cannot be read."""
    known = pins.arguments(pins.load(), stack)
    locked, named = dict[str, str](), dict[str, str]()
    for image in [*reversed(ancestors(name)), name]:
        recipe = _recipe(image)
        locked = {} if "/tools/solved" in recipe else locked
        lines = recipe.splitlines()
        for arg in [arg for line in lines for arg, _ in pins.declared(line) if arg in known]:
            pin, _, field = arg.rpartition("_")
            if field == "LOCK":
                locked |= pins.packages(paths.LOCKS / known[arg])
            elif field == "PROJECT" and f"{pin}_VERSION" in known:
                named[known[arg]] = known[f"{pin}_VERSION"]
    return locked | named


def tree() -> str:
    """The graph as indented text, bases first."""
    above = parents()
    lines: list[str] = []

    def add(name: str, depth: int) -> None:
        lines.append("    " * depth + name)
        for child, parent in above.items():
            if parent == name:
                add(child, depth + 1)

    for base in dict.fromkeys(parent for parent in above.values() if parent not in above):
        add(base, 0)
    return "\n".join(lines)
