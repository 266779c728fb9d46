"""Contracts: what the logs of a lane must show, held as data. Nothing here is ever evaluated.

`lanes/contracts/rules.toml` holds every rule once; a contract names the ones it needs, and those of
`lanes/contracts/always.toml` need none.
`lanes/contracts/foreign.toml` says which contract judges a drop that carries no manifest,
`lanes/contracts/older.toml` which of our own drops are older than a check.
"""

import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from lanekit import paths, toml
from lanekit.errors import ConfigError, require_known, saying
from lanekit.plan import OPTION

RULES: Final = "rules"
FOREIGN: Final = "foreign"
COHERENCE: Final = "coherence"
OLDER: Final = "older"
ALWAYS: Final = "always"
NO_CONTRACTS: Final = (RULES, FOREIGN, COHERENCE, OLDER, ALWAYS)

# How often a rule's line must stand in the logs:
#   ranks     one for each (host, local rank) of the profile, no more and no fewer
#   one       one value of the group `comm` from every rank, among lines whose `nranks` is theirs
#   line      at least one
#   count     exactly as many lines as ranks: for lines that carry no rank
#   lines     at least as many lines as ranks: for lines that carry no rank
#   requests  at least as many lines as requests were planned
#   spread    like requests, over at least two values of the group `endpoint`, else processes
#   any       as often as it likes: only what it says is judged
#   none      never
Needs = Literal["ranks", "one", "line", "count", "lines", "requests", "spread", "any", "none"]
Phase = Literal["any", "before_first_request"]
Severity = Literal["required", "noted"]
AT_MOST: Final = "<="

_VARIABLES: Final = frozenset(
    ("ranks", "nics", "provider", "fabric", "engine_version", "served_name", "nccl", "nvshmem",
     "deep_ep")
)  # fmt: skip


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of log line and what it proves.

    literal: text that every matching line holds; the scanner looks for it first. pattern: a
    regular expression whose named groups are captured; `host`, `local`, `pid` and `rank` name the
    rank, the others are values. expect: group -> the only allowed value or values; `$name` is
    taken from the profile or the plan, `$--option|default` and `$VARIABLE|default` from what the
    plan starts, `<=` in front: a number of at most so much. planned: the line says what its program
    was given, which is what the plan gives it: the group `options` is the inside of a dictionary or
    a call; `name` and `value` are a variable. usual: what an option or variable then is that is not
    planned, or not said; `*` stands for every other, and for whatever is said; `?` for what the
    program makes of it by itself. unless: where the plan gives this option, the rule does not
    apply; `*` for any plan, so that it judges strangers' logs alone. sensor: what would have
    written the line had it happened: where it was there, no evidence refutes; where it was not, no
    evidence is "could not check".
    nccl: any INFO line of NCCL's. hook: the evidence hook in every rank's process, as its `armed`
    and construction lines say.
    source: where upstream prints it. versions: what the pattern was read from.
    """

    why: str
    literal: str
    pattern: str
    needs: Needs
    source: str
    versions: tuple[str, ...]
    remedy: str
    expect: dict[str, str | tuple[str, ...]] = {}
    phase: Phase = "any"
    sensor: Literal["", "nccl", "hook"] = ""
    planned: Literal["", "options", "variables"] = ""
    usual: dict[str, str] = {}
    unless: str = ""
    note: str = ""

    def wanted(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Every group of `expect` with the values that it allows."""
        for group, allowed in self.expect.items():
            yield group, (allowed,) if isinstance(allowed, str) else allowed


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be seen for a buffer on a fabric.

    fabric: the kind of profile it judges. extends: another contract, whose fabric, required rules
    and unproven it has as well: the same buffer under another engine. required, noted: rules by id;
    a noted rule is shown and never decides. served: rules required only of a server that was loaded
    with a known number of requests; batch: only of a program that was run once a cell. unproven:
    what these logs cannot show, printed with every verdict.
    """

    name: str
    version: int
    title: str
    proves: str
    unproven: tuple[str, ...] = ()
    fabric: Literal["efa", "nvlink", "none", ""] = ""
    extends: str = ""
    required: tuple[str, ...] = ()
    served: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()


class Bound(msgspec.Struct, frozen=True):
    """A rule as a contract uses it."""

    id: str
    severity: Severity
    rule: Rule


class Foreign(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of drop without manifest. words: all of them stand in its path. profile: the fleet
    when the path names none. contracts: profile -> contract."""

    lane: str
    arm: str
    words: tuple[str, ...]
    profile: str
    contracts: dict[str, str]


class Older(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A drop from before some checks could be made. manifest: the sha256 of its manifest, which
    names that of every file. lacks: the checks, by id."""

    drop: str
    manifest: str
    lacks: tuple[str, ...]
    why: str


class _OlderFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    older: tuple[Older, ...]


class _Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rule: dict[str, Rule]


class _ForeignFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    drop: tuple[Foreign, ...]


def always() -> tuple[Bound, ...]:
    """What is asked without a contract: server-errors, gpu-lost and server-rate, all required."""
    return tuple(Bound(name, "required", rule) for name, rule in rules(name=ALWAYS).items())


def rules(folder: Path = paths.CONTRACTS, name: str = RULES) -> dict[str, Rule]:
    """Every rule by id, in the order of the file. Raises ConfigError: the file is missing or a rule
    does not fit its schema."""
    path = folder / f"{name}.toml"
    with saying(path, "Restore it."):
        return _parsed(path.read_bytes(), str(path))


@functools.lru_cache(maxsize=8)  # parsing takes longer than judging a small log
def _parsed(text: bytes, where: str) -> dict[str, Rule]:
    found = toml.decode(text, _Rules, where=where).rule
    for name, rule in found.items():
        _check_rule(name, rule)
    return found


def _check_rule(name: str, rule: Rule) -> None:
    where = f"contract rule {name}"
    try:
        groups = re.compile(rule.pattern).groupindex
    except re.error as error:
        raise ConfigError(f"{where}: bad pattern: {error}", remedy="Fix the pattern.") from error
    if not rule.literal or rule.literal not in re.sub(r"\\(.)", r"\1", rule.pattern):
        raise ConfigError(
            f"{where}: its literal does not stand in its pattern",
            remedy="The literal is text that every match holds, written as the log has it.",
        )
    unknown = [group for group in rule.expect if group not in groups]
    if unknown:
        raise ConfigError(
            f"{where}: expects '{unknown[0]}', which its pattern does not capture",
            remedy=f"Captured: {', '.join(groups) or 'nothing'}.",
        )
    reads = {"": set(), "options": {"options"}, "variables": {"name", "value"}}[rule.planned]
    if lacks := sorted(reads - set(groups)):
        raise ConfigError(
            f"{where}: is held to the plan's {rule.planned}, and captures no '{lacks[0]}'",
            remedy=f"Captured: {', '.join(groups) or 'nothing'}.",
        )
    for value in (v.removeprefix(AT_MOST) for _, allowed in rule.wanted() for v in allowed):
        if value.startswith("$") and not _known(value[1:].partition("|")[0]):
            raise ConfigError(
                f"{where}: '{value}' is not known",
                remedy=f"Known: {', '.join('$' + v for v in sorted(_VARIABLES))}.",
            )


def _known(name: str) -> bool:
    """Whether an expectation can name it: a variable of ours, an option, an environment's."""
    return name in _VARIABLES or name.startswith(OPTION) or (name.isupper() and name.isidentifier())


def names(folder: Path = paths.CONTRACTS) -> list[str]:
    """The known contracts, sorted."""
    return sorted(p.stem for p in folder.glob("*.toml") if p.stem not in NO_CONTRACTS)


def load(name: str, folder: Path = paths.CONTRACTS) -> Contract:
    """The contract `lanes/contracts/NAME.toml`. Raises ConfigError: no such contract (the known
    ones are listed), a bad file, or an unknown rule."""
    require_known(name, names(folder), "contract")
    found = _extended(toml.load(folder / f"{name}.toml", Contract), folder)
    library = rules(folder)
    used = (*found.required, *found.served, *found.batch, *found.noted)
    missing = [rule for rule in used if rule not in library]
    if missing:
        raise ConfigError(
            f"contract {name}: no rule named '{missing[0]}'",
            remedy=f"Known rules: {', '.join(library)}.",
        )
    if found.name != name or not found.required or not found.fabric:
        raise ConfigError(
            f"contract {name}: it must be named as its file is, have a fabric, and require at "
            "least one rule",
            remedy="A contract that requires nothing would pass anything.",
        )
    return found


def builds(name: str) -> bool:
    """Whether a contract lets a DeepEP buffer be built."""
    return "no-buffer" not in load(name).required


def _extended(found: Contract, folder: Path) -> Contract:
    """A contract with what it has of the one it extends."""
    if not found.extends:
        return found
    path = folder / f"{found.extends}.toml"
    base = toml.load(path, Contract) if path.is_file() else None
    if base is None or base.extends or found.fabric:
        raise ConfigError(
            f"contract {found.name}: cannot extend '{found.extends}'",
            remedy="Extend one that exists and extends none, and leave the fabric to it.",
        )
    return msgspec.structs.replace(
        found,
        fabric=base.fabric,
        required=(*base.required, *found.required),
        unproven=(*base.unproven, *found.unproven),
    )


def judging(planned: str, today: str, folder: Path = paths.CONTRACTS) -> str:
    """The contract that judges a drop: the planned one, or the lane's of today where that extends
    it. A drop then meets more than it was made for, never less. Raises ConfigError: the lane's
    contract cannot be read."""
    path = folder / f"{today}.toml"
    extends = toml.load(path, Contract).extends if path.is_file() else ""
    return today if extends and extends == planned else planned


def bound(
    found: Contract, folder: Path = paths.CONTRACTS, *, served: bool = False, batch: bool = False
) -> tuple[Bound, ...]:
    """The rules of a contract, required ones first, in the contract's order. served: a server was
    loaded with a known number of requests. batch: a program was run once a cell."""
    library = rules(folder)
    needed = [*found.required, *(found.served * served), *(found.batch * batch)]
    shown = [name for name in found.noted if name not in needed]
    required = (Bound(id=name, severity="required", rule=library[name]) for name in needed)
    noted = (Bound(id=name, severity="noted", rule=library[name]) for name in shown)
    return (*required, *noted)


def digest(name: str, folder: Path = paths.CONTRACTS) -> str:
    """sha256, in hex, of a contract file, of the one it extends and of the rules they draw on.
    Raises ConfigError: a file cannot be read."""
    together = hashlib.sha256()
    with saying(folder / f"{name}.toml", "Restore it."):
        own = (folder / f"{name}.toml").read_bytes()
        base = toml.decode(own, Contract, where=name).extends
        for part in (name, *([base] if base else []), RULES):
            together.update((folder / f"{part}.toml").read_bytes())
    return together.hexdigest()


def older(folder: Path = paths.CONTRACTS) -> dict[str, Older]:
    """Our own drops that are older than a check, by the sha256 of their manifest."""
    found = toml.load(folder / f"{OLDER}.toml", _OlderFile).older
    return {each.manifest: each for each in found}


def foreign(folder: Path = paths.CONTRACTS) -> tuple[Foreign, ...]:
    """Which contract judges which drop without manifest; the first that fits wins."""
    return toml.load(folder / f"{FOREIGN}.toml", _ForeignFile).drop
