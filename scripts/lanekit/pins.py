"""images/pins.toml, strictly read: what a Dockerfile's arguments are and which pins lag.

A pin reaches a Dockerfile as NAME_FIELD: `nccl.version` is NCCL_VERSION. Nothing else in images/
may spell a version; `lint` proves it.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from lanekit import paths, render, toml
from lanekit.errors import ConfigError, require_known, saying

PINS: Final = paths.ROOT / "images" / "pins.toml"
_WANTS: Final = {
    "image": ("digest",),
    "archive": ("sha256", "unrecorded"),
    "git": ("commit",),
    "pypi": ("lock", "sha256", "unrecorded"),
}


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a pin is in one stack.

    lock: hashed requirements under locks/ that hold the version. reads: variables, joined by `+`,
    that a build with our patch series reads and one without does not.
    """

    version: str = ""
    digest: str = ""
    sha256: str = ""
    commit: str = ""
    lock: str = ""
    reads: str = ""
    cite: str = ""
    unrecorded: str = ""


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that is brought in from outside. source: repository, URL, or project name."""

    kind: Literal["image", "archive", "git", "pypi"]
    source: str
    what: str
    newest: str
    newest_on: str
    both: Value | None = None
    stack: dict[str, Value] = {}


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wheel that no index holds. stacks: where an image needs it. how: how to come by one."""

    stacks: tuple[str, ...]
    how: str


class Pins(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    stacks: tuple[str, ...]
    pin: dict[str, Pin]
    locks: dict[str, dict[str, str]] = {}
    given: dict[str, Given] = {}


def load(path: Path = PINS, locks: Path = paths.LOCKS) -> Pins:
    """Read and check the pins. Raises ConfigError: not TOML, an unknown key, or a pin that does not
    hold what its kind needs."""
    found = toml.load(path, Pins)
    for name, pin in found.pin.items():
        for stack, value in _values(pin):
            known = stack in (*found.stacks, "both")
            fault = _fault(pin, value, locks) if known else "no such stack"
            if fault or (pin.both and pin.stack):
                raise ConfigError(
                    f"{path}: pin {name}, stack {stack}: {fault or 'both and stack'}",
                    remedy=f"Stacks: {', '.join(found.stacks)}. Give the full value, no guess.",
                )
    return found


def _values(pin: Pin) -> Iterator[tuple[str, Value]]:
    if pin.both is not None:
        yield "both", pin.both
    yield from pin.stack.items()


def _fault(pin: Pin, value: Value, locks: Path) -> str:
    """The first rule a value breaks, in words; empty when it breaks none."""
    wants = _WANTS[pin.kind]
    rules = {
        f"kind {pin.kind} needs exactly one of {', '.join(wants)}": (
            sum(bool(getattr(value, field)) for field in wants) == 1
        ),
        f"sha256 '{value.sha256}' is not 64 hex digits": _is(value.sha256, "[0-9a-f]{64}"),
        f"commit '{value.commit}' is not 40 hex digits": _is(value.commit, "[0-9a-f]{40}"),
        f"digest '{value.digest}' is not sha256:<64 hex digits>": (
            _is(value.digest, "sha256:[0-9a-f]{64}")
        ),
        "the version stands in the lock; do not repeat it": not (value.lock and value.version),
        "version is missing": bool(value.lock or value.version) or pin.kind == "git",
        "say in `cite` where the checksum was read": (
            pin.kind not in ("image", "archive") or bool(value.cite or value.unrecorded)
        ),
        f"locks/{value.lock} is missing": not value.lock or (locks / value.lock).is_file(),
    }
    return next((fault for fault, kept in rules.items() if not kept), "")


def _is(text: str, pattern: str) -> bool:
    return not text or re.fullmatch(pattern, text) is not None


def of_stack(pins: Pins, stack: str) -> dict[str, Value]:
    """Every pin's value in one stack, versions of locked packages filled in from their locks.
    Raises ConfigError: no such stack, or a lock that does not hold the package."""
    require_known(stack, pins.stacks, "stack", option="STACK")
    chosen = {name: pin.both or pin.stack.get(stack) for name, pin in pins.pin.items()}
    return {
        name: _resolved(pins.pin[name], value)
        for name, value in chosen.items()
        if value is not None
    }


def _resolved(pin: Pin, value: Value) -> Value:
    if not value.lock:
        return value
    return msgspec.structs.replace(value, version=locked(paths.LOCKS / value.lock, pin.source))


def locked(lock: Path, project: str) -> str:
    """The version of a project in a hashed requirements file. Raises ConfigError: the lock cannot
    be read or does not hold the project."""
    if (version := packages(lock).get(project)) is None:
        raise ConfigError(f"{lock} does not hold {project}", remedy="See locks/README.md.")
    return version


def requirements(lock: str) -> list[str]:
    """The requirements of a hashed lock's text, each with its hash lines."""
    return re.findall(r"^(?![\s#]).+(?:\n[ \t]+[^#\s].*)*", lock, re.M)


def packages(lock: Path) -> dict[str, str]:
    """Every package of a hashed requirements file, with its version. Raises ConfigError: the lock
    cannot be read."""
    with saying(lock, "Restore the lock."):
        text = lock.read_text()
    return dict(re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.M))


def arguments(pins: Pins, stack: str) -> dict[str, str]:
    """Every build argument the pins define in a stack: NCCL_VERSION, EFA_URL, ...

    A file without a recorded checksum has an empty NAME_SHA256: tools/fetch, or tools/solved for
    a wheel, then prints its own.
    """
    locks = pins.locks.get("both", {}) | pins.locks.get(stack, {})
    made = {f"{name.upper()}_LOCK": lock for name, lock in locks.items()}
    for name, value in of_stack(pins, stack).items():
        pin, upper = pins.pin[name], name.upper()
        for field in ("version", "digest", "sha256", "commit", "lock", "reads"):
            if text := getattr(value, field):
                made[f"{upper}_{field.upper()}"] = text
        if pin.kind == "archive":
            made[f"{upper}_URL"] = pin.source.format(version=value.version)
        if value.unrecorded:
            made[f"{upper}_SHA256"] = ""
        if pin.kind == "pypi":
            made[f"{upper}_PROJECT"] = pin.source
    return made


def reference(pin: Pin, value: Value) -> str:
    """An image by digest, the tag kept for people: `repo:tag@sha256:...`."""
    return f"{pin.source}:{value.version}@{value.digest}"


def lag(pin: Pin, value: Value) -> str:
    """`` when the pin is what upstream had on `newest_on`, else what it lacks."""
    has = value.version or value.commit
    if has.startswith(pin.newest):
        return ""
    return f"lags: {pin.newest} on {pin.newest_on}"


def table(pins: Pins) -> str:
    """Every pin in every stack, for people."""
    rows = [("pin", *pins.stacks, "")]
    for name, pin in pins.pin.items():
        values = [of_stack(pins, stack).get(name) for stack in pins.stacks]
        last = next((value for value in reversed(values) if value), None)
        note = lag(pin, last) if last else ""
        if any(value and value.unrecorded for value in values):
            note = f"{note}; checksum not recorded".removeprefix("; ")
        rows.append((name, *(_short(value) for value in values), note))
    return "\n".join(render.aligned(rows))


def _short(value: Value | None) -> str:
    if value is None:
        return "-"
    return value.version or value.commit[:12]


class Finding(msgspec.Struct, frozen=True):
    """A place in images/ that breaks a rule of the pins."""

    path: str
    line: int
    what: str


_FROM: Final = re.compile(r"^\s*FROM\s+(\S+)", re.I)
# What a version looks like: 1.2.3, a commit, a digest, or whatever stands behind `==`. In a recipe,
# which has neither prose nor waiting times, two parts or the beginning of a commit are enough.
_VERSION: Final = re.compile(r"\b(\d+\.\d+\.\d+\S*|[0-9a-f]{40}|[0-9a-f]{64})\b|(?<=[\w\]]==)\d\S*")
_SHORT: Final = re.compile(r"(?<![\w.])v?\d+\.\d+|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b")
_LOOPBACK: Final = re.compile(r"\b(127\.0\.0\.1|0\.0\.0\.0)\b")


def lint(root: Path, known: Mapping[str, str]) -> list[Finding]:
    """What breaks the rules under images/: defaults, unused or unknown ARGs, versions elsewhere.

    known: the arguments of all stacks together.
    """
    found: list[Finding] = []
    for path in sorted(root.rglob("Dockerfile")):
        found += _lint_arguments(path, known)
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix in ("", ".hcl", ".sh", ".mk"):
            found += _lint_versions(path)
    return found


def _lint_arguments(path: Path, known: Mapping[str, str]) -> Iterator[Finding]:
    """Judge every ARG where it is declared: within its own stage, as Docker scopes it."""
    lines = path.read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if _FROM.match(line)] + [len(lines)]
    for number, line in enumerate(lines, 1):
        where = (str(path), number)
        if (image := _FROM.match(line)) and (":" in image[1] or "@" in image[1]):
            yield Finding(*where, f"FROM {image[1]}: name a bake context instead")
        end = next((s for s in starts if s >= number), len(lines))
        used = "\n".join(_code(lines[number:end]))
        for name, default in declared(line):
            if default is not None:
                yield Finding(*where, f"ARG {name} has a default; its value stands in pins.toml")
            if name not in known:
                yield Finding(*where, f"ARG {name} is no pin's field")
            if not re.search(rf"\$\{{?{name}\b", used):
                yield Finding(*where, f"ARG {name} is declared and never used in its stage")


def declared(line: str) -> list[tuple[str, str | None]]:
    """The arguments a Dockerfile line declares, several at a time, each with its default."""
    words = line.split("#", maxsplit=1)[0].split()
    if not words or words[0].upper() != "ARG":
        return []
    pairs = [word.partition("=") for word in words[1:]]
    return [(name, value if equals else None) for name, equals, value in pairs]


def _lint_versions(path: Path) -> Iterator[Finding]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for code in _code([line]):
            text = _LOOPBACK.sub("", code)
            short = _SHORT.search(text) if path.name == "Dockerfile" else None
            if version := _VERSION.search(text) or short:
                yield Finding(str(path), number, f"'{version[0]}' belongs into pins.toml")


def _code(lines: list[str]) -> list[str]:
    """The lines without comments, which may name versions: they say why, with evidence."""
    return [line.split(" # ")[0] for line in lines if not line.lstrip().startswith("#")]
