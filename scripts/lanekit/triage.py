"""Name the first process that died and why: `lanekit triage DIR`.

Lines are found as the verifier finds them; then only the part of each log that holds them is read.
What is first is decided by time where logs state one, then by line; a symptom is never a cause.
"""

import argparse
import collections
import datetime
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec

from lanekit import clock, drop, logs, prefix, ranks, records, scan, toml
from lanekit.errors import Unreadable
from lanekit.manifest import Manifest

Kind = Literal["cause", "symptom"]
AFTER: Final = 400  # lines read past the last hit, for the end of its traceback
MOST: Final = 2000  # exceptions kept of one log
SHOWN: Final = 6
_TRACE: Final = scan.probe("traceback", "Traceback (most recent call last)")
_STOPPED: Final = scan.probe("stopped", "trigger received signal=", once=True)
_WHO: Final = re.compile(rb"\((?P<name>\w+) pid=\d+")
_NCCL: Final = re.compile(rb"(?P<host>[A-Za-z0-9][\w.-]*):(?P<pid>\d+):\d+ \[(?P<local>\d+)\]")
_SRUN: Final = re.compile(rb"srun: error: (?P<host>[\w.-]+): (?P<name>tasks? [\d,-]+)")
_LOGGED: Final = re.compile(
    rb"^(?:\s*\([^()]*pid=[^()]*\)|\[(?:rank|default)\d+\]:)*\s?"
    rb"(?:(?:ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]+\] ?)?"
)
# How the launchers' own messages name what ended first: a container, a pod, a task of srun, a host
# that was lost or late, a process of this machine.
_SEEN: Final = tuple(map(re.compile, (
    r"container (?P<what>[^\n;]+?) on (?P<host>\S+) ended with [^\n;]+",
    r"(?P<host>\S+) \(pod \S+\): (?P<what>[^\s:]+)[^\n]*",
    r"error: (?P<host>\S+): (?P<what>tasks? [^\s:]+): [^\n]+",
    r"(?P<what>Node failure) on (?P<host>\S+)",
    r"\bhost (?P<host>[^\s,:]+)[^\n]*",
    r"(?P<what>\S+) \(pid (?P<pid>\d+)\) ended with [^\n;]+",
)))  # fmt: skip
_FRAME: Final = re.compile(rb'\s+File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<what>\S+)')
_EXCEPTION: Final = re.compile(
    rb"(?:[A-Za-z_]\w*(?:\.\w+)+|[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt)\w*)(?:: .*)?$"
)


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A failure that was met before; see resources/signatures.toml. endless: a load generator says
    it and then waits for ever, so that the run ends the load point."""

    id: str
    kind: Kind
    literals: tuple[str, ...]
    means: str
    source: str
    pattern: str = ""
    frame: str = ""
    fix: str = ""
    next: str = ""
    endless: bool = False

    def fits(self, text: str, frame: str = "") -> bool:
        """Whether a line, with the last frame before it, is this failure."""
        held = not self.literals or any(x in text for x in self.literals)
        return held and bool(re.search(self.pattern, text)) and self.frame in frame


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    signature: tuple[Signature, ...]


class Event(msgspec.Struct, frozen=True):
    """A line that tells of a failure. who: (host, name, pid), as far as the line says. when: of
    the line or the nearest one before it. client: AIPerf's file, which never outruns a server's."""

    file: str
    line: int
    text: str
    who: tuple[str, str, str]
    frame: str
    when: datetime.datetime
    client: bool
    stopped: bool
    signature: Signature | None
    count: int = 1

    @property
    def order(self) -> tuple[bool, datetime.datetime, str, int]:
        """Sorts the first one first."""
        return (self.client, self.when, self.file, self.line)


class Found(msgspec.Struct, frozen=True):
    """What was found. began: the first exception of the process that died, when another one.
    ended: the manifest says that the run came to its end. gone: logs that it names and that are not
    there."""

    root: str
    state: str
    logs: int
    first: Event | None = None
    began: Event | None = None
    others: tuple[Event, ...] = ()
    ended: bool = False
    gone: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 a cause was named, or nothing failed; 2 none was found."""
        return 0 if self.first or (self.ended and not self.others and not self.gone) else 2


def signatures() -> tuple[Signature, ...]:
    """The table of known failures."""
    return toml.load(Path(__file__).parent / "resources" / "signatures.toml", _Table).signature


def run(args: argparse.Namespace) -> int:
    """`lanekit triage`: 0 a cause was named, or nothing failed; 2 none was found."""
    found = triage(args.drop)
    print(text(found))
    return found.exit_code


def triage(root: Path) -> Found:
    """The first failure in a drop or log. Raises Unreadable: nothing there, several drops, or a log
    cannot be read."""
    if not root.exists():
        raise Unreadable(f"{root}: no such file or directory", remedy="Check the path.")
    files = [root] if root.is_file() else list(logs.inside(root))
    wanted = [p for p in files
              if p == root or p.name == records.SUMMARY or logs.NAME.fullmatch(p.name)]  # fmt: skip
    manifest = drop.read(root) if root / drop.MANIFEST in files else None
    if manifest is None and (within := sorted(root.glob(f"*/{drop.MANIFEST}"))):
        raise Unreadable(
            f"{root}: no drop, but a folder of {len(within)}",
            remedy=f"Give one of them, as in RESULTS={within[-1].parent}.",
        )
    if not wanted and manifest is None:
        raise Unreadable(f"{root}: no log in it", remedy="Give a drop, or a log.")
    near = _started(manifest)
    table = signatures()
    events = [e for path in wanted for e in _events(root, path, table, near)]
    if manifest and manifest.failure and not any(_decides(e) for e in events):
        events += _of_manifest(manifest.failure, table, near)
    state = f"{manifest.state}: {manifest.failure or _silent(manifest)}" if manifest else ""
    ended = manifest is not None and manifest.state == "complete" and not manifest.failure
    gone = tuple(_gone(root, manifest)) if manifest else ()
    found = Found(str(root), state, len(wanted), ended=ended, gone=gone)
    return _decided(found, sorted(events, key=lambda e: e.order))


def _gone(root: Path, manifest: Manifest) -> Iterator[str]:
    """The logs of a sealed drop that are not there, packed or not."""
    for name in sorted(manifest.files):
        bare = name.removesuffix(Path(name).suffix) if name.endswith(logs.PACKED) else name
        held = any((root / f"{bare}{packed}").is_file() for packed in ("", *logs.PACKED))
        if name.startswith("logs/") and not held:
            yield name


def _silent(manifest: Manifest) -> str:
    """What a manifest without a failure says: a run that is killed with its machine or by `kill -9`
    leaves the state that it was in."""
    if manifest.state in drop.ENDS:
        return "no failure recorded"
    return "it goes on, or was killed there with no time to say so"


def _decides(event: Event) -> bool:
    """A known cause always; an exception nobody knows, unless the server was being stopped."""
    return event.signature.kind == "cause" if event.signature else not event.stopped


def _decided(found: Found, events: Sequence[Event]) -> Found:
    first = next((e for e in events if _decides(e)), None)
    if first is None:
        rest = tuple(e for e in events if not e.stopped)
        return msgspec.structs.replace(found, others=rest)
    same = [e for e in events if (e.file, e.who) == (first.file, first.who) and e.line]
    known = next((e for e in same if e.signature and _decides(e)), first)  # later in its chain
    return msgspec.structs.replace(
        found, first=known, began=first if first is not known else None,
        others=tuple(e for e in events if e not in same),
    )  # fmt: skip


def _started(manifest: Manifest | None) -> datetime.datetime:
    try:
        when = datetime.datetime.fromisoformat(manifest.started if manifest else "")
    except ValueError:
        return datetime.datetime.now()
    return when.replace(tzinfo=None)


def _of_manifest(failure: str, table: Sequence[Signature], near: datetime.datetime) -> list[Event]:
    """What the run itself saw: a known cause, or who ended first."""
    known = next((s for s in table if s.kind == "cause" and s.fits(failure)), None)
    seen = next((found for each in _SEEN if (found := each.search(failure))), None)
    named = seen.groupdict() if seen else {}
    who = (named.get("host", ""), named.get("what", "the run"), named.get("pid", ""))
    text = seen[0] if seen and not known else failure
    event = Event(drop.MANIFEST, 0, text, who, "", near, True, False, known)
    return [event] if known or seen else []


def _events(
    root: Path, path: Path, table: Sequence[Signature], near: datetime.datetime
) -> Iterator[Event]:
    probes = [scan.probe(f"{s.id}:{n}", x) for s in table for n, x in enumerate(s.literals)]
    with logs.opened(path) as stream:
        found = scan.scan(stream, [*probes, _TRACE, _STOPPED, *ranks.JOINS])
    marks = [x.first for x in found.evidence.values()]
    with logs.opened(path) as stream:
        numbers = scan.line_numbers(stream, marks)
    joins = [dict(x.values) for x in found.evidence.values() if x.probe.startswith("join:")]
    hosts = {x["pid"]: ranks.short(x["host"]) for x in joins}
    hits: dict[int, int] = {}
    stop = 0
    for x in found.evidence.values():
        if x.probe == _STOPPED.id:
            stop = numbers[x.first]
        elif not x.probe.startswith("join:"):
            hits[numbers[x.first]] = x.count
    name = path.name if path == root else path.relative_to(root).as_posix()
    client = path.name == records.SUMMARY or "aiperf" in name.lower()
    stem = logs.NAME.fullmatch(path.name)
    usual = stem["stem"].rpartition(".")[0].rpartition("-")[::2] if stem else ("", "")
    for line, text, who, frame, when in _lines(path, hits, near):
        known = next((s for s in table if s.fits(text, frame)), None)
        if known or (frame and _EXCEPTION.match(text.encode())):
            host = who[0] or hosts.get(who[2], "") or (usual[0] if path != root else "")
            named = (host, who[1] or (usual[1] if path != root else ""), who[2])
            stopped = 0 < stop < line
            yield Event(name, line, text, named, frame, when, client, stopped, known,
                        hits.get(line, 1))  # fmt: skip


Line = tuple[int, str, tuple[str, str, str], str, datetime.datetime]


def _lines(path: Path, hits: dict[int, int], near: datetime.datetime) -> Iterator[Line]:
    """The lines hit and the ends of tracebacks: number, text, who, last frame, time."""
    last = max(hits, default=0) + AFTER if hits else 0
    recent: collections.deque[bytes] = collections.deque(maxlen=100)
    open_: dict[tuple[str, str, str], str] = {}  # whose traceback is running: its last frame
    number, given = 1, 0
    with logs.opened(path) as raw:
        stream = io.BufferedReader(cast(Any, raw), scan.BLOCK)
        while number <= last and given < MOST and (line := stream.readline(scan.LINE)):
            recent.append(line)
            if number in hits or open_ or _TRACE.literal in line:
                line = prefix.ANSI.sub(b"", line).rstrip()
                who, body = _who(line), _LOGGED.sub(b"", line)
                frame = _FRAME.match(body)
                ended = who in open_ and _EXCEPTION.match(body) is not None
                if _TRACE.literal in body:
                    open_[who] = ""
                elif frame and who in open_:
                    where = "/".join(frame["file"].decode(errors="replace").split("/")[-3:])
                    open_[who] = f"{where}:{frame['line'].decode()} in {frame['what'].decode()}"
                elif number in hits or ended:
                    text = body.decode(errors="replace")
                    when = _when(recent, near)
                    yield number, text, who, open_.pop(who, "") if ended else "", when
                    given += 1
            number += line.endswith(b"\n") or len(line) < scan.LINE


def _who(line: bytes) -> tuple[str, str, str]:
    """(host, name, pid) as far as the line says."""
    mark = prefix.parse(line[: scan.HEAD])
    names = _WHO.findall(line[: scan.HEAD])
    nccl = _NCCL.match(line)
    if nccl:
        return nccl["host"].decode(), f"[{nccl['local'].decode()}]", nccl["pid"].decode()
    if srun := _SRUN.match(line):
        return srun["host"].decode(), srun["name"].decode(), ""
    rank = f"rank {mark.rank}" if mark.rank else ""
    return mark.label, names[-1].decode() if names else rank, mark.pid


def _when(recent: Sequence[bytes], near: datetime.datetime) -> datetime.datetime:
    for line in reversed(recent):
        found = clock.window(line[:512], b"", near)
        if found is not None:
            return found.first
    return datetime.datetime.max


def text(found: Found) -> str:
    """One screen."""
    return "\n".join(_shown(found))


def _shown(found: Found) -> Iterator[str]:
    yield found.root
    if found.state:
        yield f"manifest: {found.state}"
    first = found.first
    if first is None:
        fine = found.exit_code == 0
        read = f"{found.logs} log{'' if found.logs == 1 else 's'}"
        yield f"\n{'nothing failed' if fine else 'no failure found'} in {read}"
        yield from _folded(found.others)
        yield from _missing(found)
        if found.others:
            yield "Symptoms alone: the log of whoever died first is not here. Fetch every rank's."
        return
    yield f"\nfirst death  {_name(first)}  [{first.file}:{first.line}]"
    yield f"  cause      {_short(first.text)}"
    if first.frame:
        yield f"  last frame {first.frame}"
    if found.began:
        yield f"  began as   {_short(found.began.text)}  [:{found.began.line}]"
        yield f"             {found.began.frame}"
    known = first.signature
    yield f"  known as   {known.id}: {known.means}" if known else "  known as   nothing seen before"
    if known:
        yield f"  fix        {known.fix}"
    yield from _folded(found.others)
    yield from _missing(found)
    again = "Run the lane again with ENV='CUDA_LAUNCH_BLOCKING=1 NCCL_DEBUG=INFO'."
    yield f"\nnext: {(known.next or 'Fix that, then run the lane again.') if known else again}"


def _missing(found: Found) -> Iterator[str]:
    if found.gone:
        names = ", ".join(found.gone)
        yield f"not here, though the manifest names it: {names}. Fetch the drop again."


def _folded(events: Sequence[Event]) -> Iterator[str]:
    groups: dict[str, list[Event]] = collections.defaultdict(list)
    for event in events:
        label = f"{event.signature.id}: {event.signature.means}" if event.signature else ""
        groups[label or _short(event.text)].append(event)
    if groups:
        yield "\nsymptoms, and what else died"
    for label, group in list(groups.items())[:SHOWN]:
        names = list(dict.fromkeys(_name(e) for e in group))
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        yield f"  x{sum(e.count for e in group)} {label}  ({', '.join(names[:2])}{more})"
    if len(groups) > SHOWN:
        yield f"  and {len(groups) - SHOWN} other kinds"


def _name(event: Event) -> str:
    host, name, pid = event.who
    return " ".join(x for x in (host, name or "a process", f"pid {pid}" if pid else "") if x)


def _short(line: str) -> str:
    clean = "".join(c if c.isprintable() else " " for c in line)
    return clean if len(clean) <= 160 else f"{clean[:157]}..."
