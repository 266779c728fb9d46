"""The environment as a contract: lanes/variables.toml, and what each lane states of its own.

A variable is set because a component reads it. Who that is stands beside it, by the names of
images/guard/readers.toml, which the drift guard uses inside an image; tests find what nobody reads.
Published recipes exported two variables for months that no release of their plugin knows.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from lanekit import contract as contracts
from lanekit import paths, spec, toml
from lanekit.errors import ConfigError


class Transport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a transport sets, by the name of its contract.

    like: another transport whose variables come first. on: profile -> variables only there.
    """

    like: str = ""
    env: dict[str, str] = {}
    on: dict[str, dict[str, str]] = {}


class Variables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """lanes/variables.toml. reads: variable -> component. series: variable -> our patch series that
    makes its component read it. dropped: variable -> why not set."""

    transport: dict[str, Transport]
    reads: dict[str, str]
    series: dict[str, str]
    dropped: dict[str, str]


def load() -> Variables:
    """Read lanes/variables.toml. Raises ConfigError: not the schema, or a transport that is like
    one that is not there."""
    found = toml.load(paths.VARIABLES, Variables)
    for name, each in found.transport.items():
        if each.like and each.like not in found.transport:
            raise ConfigError(
                f"{paths.VARIABLES}: transport {name} is like '{each.like}', which is not there",
                remedy=f"Known: {', '.join(found.transport)}.",
            )
    return found


def of(contract: str, profile: str) -> dict[str, str]:
    """What the transport of a contract sets on a profile: the contract's own, or that of the one it
    extends; nothing where neither sets anything."""
    known = load()
    return _of(known, _named(known, contract), profile)


def _named(known: Variables, contract: str) -> str:
    return contract if contract in known.transport else contracts.load(contract).extends


def _of(known: Variables, name: str, profile: str) -> dict[str, str]:
    found = known.transport.get(name, Transport())
    base = _of(known, found.like, profile) if found.like else {}
    return {**base, **found.env, **found.on.get(profile, {})}


def series(lane: spec.Lane, arm: str, profile: str, given: Iterable[str] = ()) -> tuple[str, ...]:
    """Our patch series without which an arm is not itself on a profile: those that it names, and
    those without which nobody reads a variable that it sets. given: variables of ENV=."""
    known, chosen = load(), lane.arms[arm]
    transport = _of(known, _named(known, chosen.contracts[profile]), profile)
    roles = itertools.chain.from_iterable(role.env for role in lane.roles.values())
    names = {*transport, *lane.profiles[profile].env, *chosen.env, *roles, *given}
    asked = (known.series[name] for name in sorted(names & set(known.series)))
    return tuple(dict.fromkeys((*chosen.patches, *asked)))


def remade(lane: spec.Lane, arm: str, given: Mapping[str, object]) -> Iterator[str]:
    """What ENV= makes another arm of, a sentence each: a variable by which arms differ, with
    another value than the arm's, also one that means `without` where the arm is without it."""
    own = lane.arms[arm].env
    for name in sorted({name for each in lane.arms.values() for name in each.env} & set(given)):
        if given[name] != own.get(name):
            like = [n for n, each in lane.arms.items() if each.env.get(name) == given[name]]
            hint = f" (as arm {' and '.join(like)} is)" if like else ""
            said = str(given[name])[:80]
            yield f"ENV= made {name} {said}{hint}, the arm is {own.get(name, 'without it')}"
