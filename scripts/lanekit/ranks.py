"""Who printed a line: distinct (host, local rank), joined across kinds of lines by (host, pid).

A count of lines proves nothing: the same rank may print a line sixteen times. NCCL's own bracket
is the CUDA device of the printing thread, which is 0 in every proxy thread and in every process
that sees one GPU only, so a line that states the local rank is believed over it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from lanekit import scan
from lanekit.spec import Profile

HOOK: Final = "[lane-evidence] "
# NCCL prints what it does here: a line of its that is absent did not happen.
TALKING: Final = scan.probe(
    "talking:nccl",
    " NCCL INFO ",
    r"[A-Za-z0-9][\w.-]{0,252}:\d{1,10}:\d{1,10} \[-?\d{1,10}\] NCCL INFO ",
    said=True,
    once=True,
)

# Lines that state a local rank: our hook's, and NCCL's for a communicator over the whole fleet.
ARMED: Final = "join:hook"
JOINS: Final = (
    scan.probe(
        ARMED,
        HOOK,
        r"\[lane-evidence\] v=1 (?:armed )?host=(?P<host>\S+) pid=(?P<pid>\d+) "
        r"rank=(?P<rank>\d+) local_rank=(?P<local>\d+) world=(?P<world>\d+) "
        r"(?:.*? t=(?P<t>\d{9,11}\.\d{3})\b)?",
        said=True,
    ),
    scan.probe(
        "join:nccl",
        " localRanks ",
        r"(?P<host>[A-Za-z0-9][\w.-]{0,252}):(?P<pid>\d{1,10}):\d{1,10} \[\d+\] "
        r"NCCL INFO comm 0x[0-9a-f]+ "
        r"rank (?P<rank>\d+) nRanks (?P<world>\d+) nNodes \d+ localRanks \d+ "
        r"localRank (?P<local>\d+)",
        said=True,
    ),
)

TORN: Final = 64  # names a host; one of a glued digit or two for each of its ranks, no more


class Key(msgspec.Struct, frozen=True, order=True):
    """A rank: its host (short name) and its number on it."""

    host: str
    local: int


class Identities(msgspec.Struct, frozen=True):
    """What is known about processes: (host, pid) and global rank to the rank's key."""

    by_pid: Mapping[tuple[str, str], Key]
    by_rank: Mapping[str, Key]
    hosts: frozenset[str]


def short(host: str) -> str:
    """A host as NCCL prints it: up to the first dot, except in an address."""
    return host if host.replace(".", "").isdigit() else host.partition(".")[0]


def join(found: Iterable[scan.Evidence], ranks: int) -> Identities:
    """Learn identities from the join lines of a drop; contradictory ones are dropped."""
    by_pid: dict[tuple[str, str], set[Key]] = defaultdict(set)
    by_rank: dict[str, set[Key]] = defaultdict(set)
    for evidence in found:
        values = dict(evidence.values)
        if values.get("world") != str(ranks):
            continue
        host = short(values["host"])
        key = Key(host, int(values["local"]))
        by_pid[host, values["pid"]].add(key)
        by_rank[values["rank"]].add(key)
    return Identities(
        by_pid={k: next(iter(v)) for k, v in by_pid.items() if len(v) == 1},
        by_rank={k: next(iter(v)) for k, v in by_rank.items() if len(v) == 1},
        hosts=frozenset(host for host, _ in by_pid),
    )


def key(evidence: scan.Evidence, known: Identities, file_host: str) -> Key | None:
    """The rank that printed a line, or None when the line does not say."""
    values, source = dict(evidence.values), evidence.source
    pid = process(evidence)
    host = short(values.get("host") or source.label or file_host)
    joined = known.by_pid.get((host, pid)) or _only_process(known, pid, values)
    if joined is not None:
        return joined
    if "local" in values:
        return Key(host, int(values["local"]))  # an empty host: whichever it is
    return known.by_rank.get(values.get("rank") or source.rank)


def process(evidence: scan.Evidence) -> str:
    """The pid of the process that printed a line, empty when the line does not say."""
    return dict(evidence.values).get("pid") or evidence.source.pid


def _only_process(known: Identities, pid: str, values: Mapping[str, str]) -> Key | None:
    """A line without a host: the process, if one host alone has that pid."""
    if "host" in values or not pid:
        return None
    found = [rank for (_, number), rank in known.by_pid.items() if number == pid]
    return found[0] if len(found) == 1 else None


def untorn(keys: set[Key], hosts: int) -> set[Key]:
    """Keys whose host name was glued to the end of another line, under the real host's name.

    Two processes writing at once leave `...->1->0ip-10-0-0-1:7012:7012 [0] NCCL INFO`: where there
    are more hosts than expected, a host that ends with another's name is that host.
    """
    names = {key.host for key in keys} - {""}
    if not hosts < len(names) <= TORN * hosts:  # each is compared with each
        return keys
    real = {name: min((n for n in names if name.endswith(n)), key=len) for name in names}
    return {Key(real.get(key.host, ""), key.local) for key in keys}


def compare(seen: Iterable[Key], profile: Profile) -> tuple[list[str], list[str]]:
    """Missing and unexpected ranks, by name, of what a profile must have."""
    by_host: dict[str, set[int]] = defaultdict(set)
    for rank in seen:
        by_host[rank.host].add(rank.local)
    if profile.hosts > 1:  # with one host alone, a line that names none is its
        by_host.pop("", None)
    local = set(range(profile.ranks // profile.hosts))
    missing = [_named(h, local - found) for h, found in sorted(by_host.items()) if local - found]
    extra = [_named(h, found - local) for h, found in sorted(by_host.items()) if found - local]
    unseen = profile.hosts - len(by_host)
    if unseen > 0:
        missing.append(_named(f"{unseen} more host{'s' if unseen > 1 else ''}", local))
    elif unseen < 0:
        extra.append(f"{len(by_host)} hosts where {profile.hosts} were expected")
    return missing, extra


def _named(host: str, local: Iterable[int]) -> str:
    return f"{host} {', '.join(f'[{number}]' for number in sorted(local))}".lstrip()
