"""Variables that nobody reads: what the lanes set beside images/guard/readers.toml."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from lanekit import images, paths, spec, toml, variables

READERS: Final = paths.ROOT / "images" / "guard" / "readers.toml"


class Reader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A component: which files are its own, how its variables begin, which images bring it."""

    prefix: tuple[str, ...]
    image: tuple[str, ...]
    files: str = ""
    package: str = ""
    spelling: str = ""
    composed: tuple[str, ...] = ()


class Readers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """images/guard/readers.toml."""

    reader: dict[str, Reader]


def readers() -> dict[str, Reader]:
    """Every component of images/guard/readers.toml."""
    return toml.load(READERS, Readers).reader


def faults(lane: spec.Lane, image: str, env: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the variables of one arm, a sentence each.

    image: the image of the graph that the arm runs in. env: everything that its services are given.
    """
    shared, components = variables.load(), readers()
    stated = shared.reads | lane.reads
    brings = _brings(image)
    for name in sorted(env):
        reader = stated.get(name, "")
        known = components.get(reader)
        if name in shared.dropped | lane.dropped:
            yield f"{name} is set and stands under `dropped`"
        elif not reader:
            yield f"{name} is set and nobody is stated to read it"
        elif known is None:
            yield f"{name} is read by '{reader}', which is no component: {', '.join(components)}"
        elif brings and not brings & set(known.image):
            yield f"{name} is read by {reader}, which image {image} does not bring"


def _brings(image: str) -> set[str]:
    """An image with all that it stands on, its base included; nothing for none of the graph."""
    above = images.parents()
    names = [image, *images.ancestors(image)] if image in above else []
    return {images.folder(image).name, *names, *(above[name] for name in names)} if names else set()


def unused(lanes: Mapping[str, spec.Lane], seen: Mapping[str, set[str]]) -> Iterator[str]:
    """What is stated to be read and that nobody sets: a line that outlived its variable.

    seen: lane -> every variable that some plan of it sets.
    """
    shared = variables.load()
    everywhere = set(itertools.chain(*seen.values()))
    for name in sorted(set(shared.reads) - everywhere):
        yield f"{paths.VARIABLES.name}: {name} has a reader and is set by no lane"
    for lane, found in lanes.items():
        for name in sorted(set(found.reads) - seen[lane]):
            yield f"lane {lane}: {name} has a reader and is set by no arm"
