"""The hosts of a fleet: named by HOSTS= or an inventory file; roles, ranks and addresses from them.

`HOSTS=a,b` names them, each `[user@]address[:ssh port]`; `HOSTS=fleet.toml` is an inventory:

    [[host]]
    address = "10.0.0.1"     # what the other ranks reach it by
    name = "a"               # in logs, ranks and containers; from the address when not given
    user = "ubuntu"          # of its SSH daemon; ~/.ssh/config decides when not given
    port = 22                # of its SSH daemon
    interface = "eth0"       # what NCCL and gloo talk over; they choose when not given
    role = "leader"          # the first host leads when no one is named
    models = "/models"       # a folder of the host, mounted read-only into every container
    cache = "/var/lanes"     # a folder of the host that keeps what engines compile

The first rank is on the leader, which serves and is swept; workers lend their ranks.
"""

import contextlib
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import psutil

from lanekit import spec, toml
from lanekit.errors import ConfigError
from lanekit.plan import Host

UNNAMED: Final = "none named yet: HOSTS= says which"
# A label of the DNS: NCCL prints a host up to its first dot, so that two addresses would be one.
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_ADDRESS: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?")
_USER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
_WORD: Final = re.compile(r"(?:(?P<user>[^@]*)@)?(?P<address>[^@:]+)(?::(?P<port>\d{1,5}))?")


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One host as a person names it; empty means: found out or chosen."""

    address: str
    name: str = ""
    user: str = ""
    port: int = 0
    interface: str = ""
    role: Literal["", "leader", "worker"] = ""
    models: str = ""
    cache: str = ""


class Inventory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An inventory file."""

    host: tuple[Entry, ...]


def read(text: str) -> tuple[Entry, ...]:
    """The hosts that HOSTS= names, the leader first; none when it is empty. Raises ConfigError: no
    such file, a bad entry, two hosts of one name, or more than one leader."""
    if text.endswith(".toml") or "/" in text:
        entries = toml.load(Path(text), Inventory).host
    else:
        entries = tuple(_entry(word) for word in text.replace(",", " ").split())
    named = tuple(_named(entry) for entry in entries)
    for twice in ("name", "address"):
        values = [getattr(entry, twice) for entry in named]
        if len(set(values)) < len(values):
            raise ConfigError(
                f"HOSTS: two hosts of one {twice}: {', '.join(values)}",
                remedy="Each rank is known by its host's name: give each its own.",
            )
    return _led(named)


def _entry(word: str) -> Entry:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ConfigError(
            f"HOSTS: '{word}' is no host", remedy="Write HOSTS=[user@]address[:port],... or a file."
        )
    return Entry(match["address"], user=match["user"] or "", port=int(match["port"] or 0))


def _named(entry: Entry) -> Entry:
    """An entry with its name, refused where a name, address or user could be anything else."""
    name = entry.name or _name(entry.address)
    asked = (
        ("name", name, _NAME),
        ("address", entry.address, _ADDRESS),
        ("user", entry.user, _USER),
    )
    for what, value, form in asked:
        if value and not form.fullmatch(value):
            raise ConfigError(f"HOSTS: '{value}' cannot be a {what}", remedy="Check the spelling.")
    if not 0 <= entry.port <= 65535:
        raise ConfigError(f"HOSTS: {name}: {entry.port} is no port", remedy="Give 1 to 65535.")
    for what, folder in (("models", entry.models), ("cache", entry.cache)):
        if folder and not Path(folder).is_absolute():
            raise ConfigError(
                f"HOSTS: {name}: {what} = '{folder}' is no absolute path",
                remedy="Name the folder as the host has it, from the root.",
            )
    return msgspec.structs.replace(entry, name=name)


def is_number(address: str) -> bool:
    """Whether an address is an IP address, which nobody has to look up."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def is_ipv4(address: str) -> bool:
    """Whether an address is a literal one of IPv4."""
    return is_number(address) and ":" not in address


def _name(address: str) -> str:
    """A name for an address: its first label, or `ip-10-0-0-1` as AWS names its hosts."""
    if is_number(address):
        return "ip-" + re.sub(r"[.:]+", "-", address).strip("-")
    return address.partition(".")[0]


def _led(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    leaders = [entry for entry in entries if entry.role == "leader"]
    if len(leaders) > 1 or (entries and all(entry.role == "worker" for entry in entries)):
        raise ConfigError(
            f"HOSTS: {len(leaders)} leaders among {len(entries)} hosts",
            remedy='Give one host role = "leader", or none: the first one leads then.',
        )
    first = leaders[0] if leaders else next((e for e in entries if e.role != "worker"), None)
    return tuple(sorted(entries, key=lambda entry: entry is not first))


def fleet(given: str, profile: spec.Profile, here: str) -> tuple[tuple[Host, ...], str]:
    """The hosts of a run in order of their ranks, and where they come from, as one sentence.

    here: this machine's name. Without HOSTS= a fleet of one host is this machine; a larger one gets
    names that stand for hosts, which is enough for a plan and for a scheduler. Raises ConfigError:
    HOSTS= is bad, or names another number of hosts than the profile has.
    """
    entries, why = read(given), f"named by HOSTS={given}"
    if not entries and profile.hosts == 1:
        short = _NAME.match(here.partition(".")[0])
        entries, why = (Entry("127.0.0.1", name=short[0] if short else "here"),), "this machine"
    elif not entries:
        entries = tuple(Entry(f"host-{n + 1}", name=f"host-{n + 1}") for n in range(profile.hosts))
        why = UNNAMED
    if len(entries) != profile.hosts:
        raise ConfigError(
            f"profile {profile.name} has {profile.hosts} hosts; HOSTS= names {len(entries)}",
            remedy="Name as many, or choose another profile with PROFILE=.",
        )
    each, mine = profile.ranks // profile.hosts, _own_addresses(here)
    return tuple(_host(entry, n, each, mine) for n, entry in enumerate(entries)), why


def _host(entry: Entry, index: int, ranks: int, mine: frozenset[str]) -> Host:
    user = f"{entry.user}@" if entry.user else ""
    port = f":{entry.port}" if entry.port else ""
    local = not mine.isdisjoint((entry.address, entry.name)) and not entry.port
    return Host(
        name=entry.name,
        address=entry.address,
        role="worker" if index else "leader",
        node_rank=index,
        start_rank=index * ranks,
        ranks=ranks,
        ssh="" if local else f"{user}{entry.address}{port}",
        interface=entry.interface,
        models=entry.models,
        cache=entry.cache,
    )


def _own_addresses(here: str) -> frozenset[str]:
    """What this machine is called: no SSH is needed to reach it."""
    found = {here, here.partition(".")[0], "localhost", socket.gethostname()}
    for addresses in psutil.net_if_addrs().values():
        found |= {each.address.partition("%")[0] for each in addresses}
    return frozenset(found)


def with_ranks(host: Host) -> str:
    """A host by name and ranks: `a (ranks 8-15)`."""
    last = host.start_rank + host.ranks - 1
    several = f"ranks {host.start_rank}-{last}"
    return f"{host.name} ({several if host.ranks > 1 else f'rank {last}'})"


def said(fleet: Sequence[Host]) -> str:
    """Hosts by name, for a message."""
    return ", ".join(host.name for host in fleet)


def of(plan: Mapping[str, Any]) -> list[Host]:
    """The hosts of a drop's plan, which may be anybody's; none where it holds other words."""
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(plan.get("hosts", ()), list[Host])
    return []


def names(hosts: Sequence[object]) -> list[str]:
    """The host names of a drop's plan; plans before 2026-12 held the names alone."""
    return [str(each["name"] if isinstance(each, dict) else each) for each in hosts]
