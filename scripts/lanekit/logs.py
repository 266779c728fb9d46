"""Find the logs of a drop and read them, whole or compressed, rotated or split. No judging here."""

import concurrent.futures
import contextlib
import functools
import hashlib
import io
import multiprocessing
import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from lanekit import clock, ranks, scan
from lanekit.contract import Bound
from lanekit.errors import Unreadable
from lanekit.judge import Line, Logs
from lanekit.records import SUMMARY
from lanekit.verdict import Place

# A log may be rotated (serve.log.1), split (serve.log.aa) or packed.
NAME: Final = re.compile(
    r"(?P<stem>.+\.(?:log|txt|out|err))(?:[.-](?P<part>\d{1,6}))?(?P<packed>\.gz|\.zst)?"
)
PROCESSES_FROM: Final = 64 << 20  # bytes of logs that are worth starting processes for: 0.2 s each
# Unpacked bytes that a drop's packed logs share, whatever their ratio: equal request lines, 800,000
# of them, pack far better than the 40 to 1 of a real NCCL log. Beyond it BOMB_RATIO holds; 300 to 1
# of 20 MB took 46 s (2026-11-30).
BOMB_ALLOWANCE: Final = 64 << 20
BOMB_RATIO: Final = 100
PACKED: Final = (".gz", ".zst")
LOGS: Final = 1 << 10  # of a drop, rotated parts counted; 16 hosts of 8 ranks leave 130
_SPLIT: Final = re.compile(r"\.(?:log|txt|out|err)[.-]0\d")
FIRST_REQUEST: Final = scan.probe(
    "first-request", 'HTTP/1.1" 200', r'"POST /\S+ HTTP/1\.1" 200', said=True, once=True
)


class Log(msgspec.Struct, frozen=True):
    """A log file. name: relative to the drop. host: from the file's name, where it says one."""

    path: Path
    name: str
    host: str
    stream: str
    part: int

    @property
    def unpacked(self) -> str:
        """The name without what packing put behind."""
        return self.name.removesuffix(self.path.suffix if self.path.suffix in PACKED else "")


def inside(root: Path) -> Iterator[Path]:
    """Every regular file under root, sorted. Links are not followed and do not count: the file they
    lead to is there already, or it is no part of the drop. Raises Unreadable: a link leads out of
    root, a folder cannot be read, or a name is not UTF-8."""
    true_root = root.resolve()
    for at, folders, names in os.walk(root, onerror=_refuse):
        folders.sort()
        for name in sorted((*names, *folders)):
            path = Path(at, name)
            if path.is_symlink() and not _leads_into(path, true_root):
                raise Unreadable(
                    f"{path}: a link that leads out of the drop, or nowhere",
                    remedy="A drop holds its own files; replace the link by the file.",
                )
            if not name.isprintable():  # lone surrogates stand for bytes that are not UTF-8
                raise Unreadable(f"{str(path)!a}: not a name to print", remedy="Rename it.")
            with contextlib.suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode):
                    yield path


def _leads_into(link: Path, root: Path) -> bool:
    """Whether a link ends at something below root. Python 3.13 no longer raises for a loop unless
    it is asked to be strict."""
    try:
        return link.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):
        return False


def _refuse(error: OSError) -> None:
    raise Unreadable(f"{error.filename}: {error.strerror}", remedy="Check the folder.") from error


def find(root: Path, files: Sequence[Path], *, ours: bool) -> list[Log]:
    """The serve logs among the files of a drop: not AIPerf's own, and nothing in its folders.
    Raises Unreadable: there are more than LOGS."""
    aiperf = {path.parent for path in files if path.name == SUMMARY}
    found = []
    for path in files:
        match = NAME.fullmatch(path.name)
        if match is None or "aiperf" in path.name.lower() or aiperf & set(path.parents):
            continue
        name = path.relative_to(root)
        if ours and name.parts[0] != "logs":
            continue
        host = match["stem"].rpartition(".")[0].rpartition("-")[0] if ours else ""
        # Rotation counts upwards into the past; a split counts upwards into the future, from 0.
        part = -int(match["part"]) if match["part"] else 0
        found.append(Log(path, str(name), host, str(name.with_name(match["stem"])), part))
    if len(found) > LOGS:
        raise Unreadable(
            f"{root}: {len(found)} logs, more than {LOGS}",
            remedy="Judge the logs of one run, and each rank's or host's as one file.",
        )
    return _ordered(found)


def _ordered(found: Sequence[Log]) -> list[Log]:
    """Parts numbered with leading zeros come from `split`: they run forwards."""
    streams: dict[str, list[Log]] = defaultdict(list)
    for log in found:
        streams[log.stream].append(log)
    forwards = {
        stream
        for stream, parts in streams.items()
        if len(parts) > 1 and all(x.part == 0 or _SPLIT.search(x.name) for x in parts)
    }
    return [
        msgspec.structs.replace(log, part=-log.part) if log.stream in forwards else log
        for log in found
    ]


def read(
    logs: Sequence[Log], rules: Sequence[Bound], ranks_: int, *, make: Any = scan.finder
) -> Logs:
    """Scan every log for the rules' lines; files are read in parallel. Raises Unreadable: a log
    cannot be read or unpacked, or holds only NULs."""
    probes = [*map(probe, rules), ranks.TALKING, *ranks.JOINS, FIRST_REQUEST]
    if not logs:
        return Logs({}, ranks.join((), ranks_), {}, frozenset(), 0)
    finder = make if scan.fast() else scan.PythonFinder
    allowance = BOMB_ALLOWANCE // (sum(x.path.suffix in PACKED for x in logs) or 1)
    each = functools.partial(_scan, probes=probes, make=finder, allowance=allowance)
    with _workers(logs) as pool:
        results = list(pool.map(each, logs))
    return _together(logs, results, ranks_)


def _workers(logs: Sequence[Log]) -> concurrent.futures.Executor:
    """Threads, since Hyperscan lets others run meanwhile; `bytes.find` does not, so without it
    large logs are read by processes."""
    count = min(len(logs), os.cpu_count() or 1)
    if scan.fast() or count == 1 or sum(log.path.stat().st_size for log in logs) < PROCESSES_FROM:
        return concurrent.futures.ThreadPoolExecutor(count)
    fresh = multiprocessing.get_context("spawn")  # a fork would copy other threads' locks
    return concurrent.futures.ProcessPoolExecutor(count, mp_context=fresh)


def probe(bound: Bound) -> scan.Probe:
    """What to look for: what must be there is said by its line, what may not be is nowhere."""
    rule, forbidden = bound.rule, bound.rule.needs == "none"
    return scan.probe(bound.id, rule.literal, rule.pattern, said=not forbidden, echoed=forbidden)


def _together(
    logs: Sequence[Log], results: Sequence[tuple[scan.Found, list[Line]]], ranks_: int
) -> Logs:
    lines: dict[str, list[Line]] = defaultdict(list)
    first: dict[str, tuple[int, int]] = {}
    overflow: set[str] = set()
    for log, (found, placed) in zip(logs, results, strict=True):
        overflow |= found.overflow
        for line in placed:
            lines[line.evidence.probe].append(line)
            if line.evidence.probe == FIRST_REQUEST.id:
                at = (log.part, line.first.line)
                first[log.stream] = min(first.get(log.stream, at), at)
    armed = lines.get(ranks.ARMED, [])
    joins = [x.evidence for probe in ranks.JOINS for x in lines.pop(probe.id, [])]
    held = sum(found.size > 0 for found, _ in results)
    return Logs(
        lines=dict(lines),
        known=ranks.join(joins, ranks_),
        first_request=first,
        overflow=frozenset(overflow),
        files=held,
        armed=armed,
        watched=_watched(armed),
        times={x.first: float(t) for x in armed if (t := dict(x.evidence.values).get("t"))},
        ends=[(found.head, found.tail) for found, _ in results],
    )


def _watched(armed: Sequence[Line]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for values in (dict(x.evidence.values) for x in armed):
        found[values["pid"]].add(ranks.short(values["host"]))
    return dict(found)


def _scan(
    log: Log, probes: Sequence[scan.Probe], make: Any, allowance: int
) -> tuple[scan.Found, list[Line]]:
    with opened(log.path, allowance) as stream:
        found = scan.scan(stream, probes, make=make)
    marks = [m for x in found.evidence.values() for m in (x.first, x.last)]
    with opened(log.path, allowance) as stream:
        numbers = scan.line_numbers(stream, marks)
    if found.size and not found.evidence:
        _refuse_zeros(log.path, allowance)
    found.head, found.tail = clock.stated(found.head), clock.stated(found.tail)
    lines = [
        Line(x, Place(log.name, numbers[x.first]), Place(log.name, numbers[x.last]), log.host,
             log.stream, log.part)
        for x in found.evidence.values()
    ]  # fmt: skip
    return found, lines


def _refuse_zeros(path: Path, allowance: int) -> None:
    with opened(path, allowance) as stream:
        while block := stream.read(scan.BLOCK):
            if block.strip(b"\0"):
                return
    raise Unreadable(f"{path}: holds only NUL bytes", remedy="Fetch the log again.")


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turn whatever reading or unpacking a file may raise into Unreadable."""
    import zlib  # noqa: PLC0415

    packed: tuple[type[Exception], ...] = (EOFError, zlib.error)
    if path.suffix == ".zst":
        import zstandard  # noqa: PLC0415

        packed = (*packed, zstandard.ZstdError)
    try:
        yield
    except packed as error:
        raise Unreadable(f"{path}: not unpackable: {error}", remedy="Fetch it again.") from error
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}", remedy="Check the file.") from error


@contextlib.contextmanager
def opened(path: Path, allowance: int | None = None) -> Iterator[BinaryIO]:
    """A log's bytes, unpacked on the way. allowance: bytes that it may unpack to whatever its
    ratio, all of BOMB_ALLOWANCE where it is read alone. Raises Unreadable: it cannot be read or
    unpacked, here or within, or is a decompression bomb."""
    with _errors(path), path.open("rb", buffering=0) as raw:
        if path.suffix not in PACKED:
            yield raw
            return
        inner = (_gzip if path.suffix == ".gz" else _zstd)(raw)
        bounded = _Bounded(inner, path, BOMB_ALLOWANCE if allowance is None else allowance)
        yield io.BufferedReader(bounded, scan.BLOCK)


def digest(path: Path) -> str:
    """The sha256 of what is in a log, in hex, however it is packed."""
    with opened(path) as stream:
        whole: Any = stream  # BinaryIO is typed without readinto
        return hashlib.file_digest(whole, "sha256").hexdigest()


def _gzip(raw: BinaryIO) -> "_Packed":
    """Members of gzip, ten times as many a second as gzip.GzipFile takes (empty ones, 2026-11-30);
    zeros may pad them."""
    import zlib  # noqa: PLC0415

    torn = EOFError("it ends in the middle of a member")
    return _Packed(raw, lambda: zlib.decompressobj(31), torn, step=8192, padding=b"\0")


def _zstd(raw: BinaryIO) -> "_Packed":
    """Frames of Zstandard. Unlike the library's own reader this notices an end within one; small
    reads keep a bomb's output small (a 4-byte block may hold 128 KiB)."""
    import zstandard  # noqa: PLC0415

    torn = zstandard.ZstdError("it ends in the middle of a frame")
    make = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj
    return _Packed(raw, make, torn, step=1024)


class _Packed:
    """Packed pieces one after another. make: what unpacks one. torn: the error of an end within
    one. step: packed bytes read at a time."""

    def __init__(
        self, raw: BinaryIO, make: Callable[[], Any], torn: Exception, *, step: int,
        padding: bytes = b"",
    ) -> None:  # fmt: skip
        self.raw, self.make, self.torn = raw, make, torn
        self.step, self.padding = step, padding
        self.ready, self.packed = b"", b""
        self.inside: Any = None

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; empty at the end."""
        while not self.ready:
            self.packed = self.packed or self.raw.read(self.step)
            if not self.packed:
                if self.inside is not None:
                    raise self.torn
                return b""
            if self.inside is None:
                self.packed = self.packed.lstrip(self.padding)
                self.inside = self.make() if self.packed else None
                if self.inside is None:
                    continue
            self.ready, self.packed = self.inside.decompress(self.packed), b""
            if self.inside.eof:
                self.packed, self.inside = self.inside.unused_data, None
        given, self.ready = self.ready[:size], self.ready[size:]
        return given


class _Bounded(io.RawIOBase):
    """A stream that refuses to unpack into absurdly more than was packed."""

    def __init__(self, inner: Any, path: Path, allowance: int) -> None:
        self.inner, self.path, self.given = inner, path, 0
        self.most = allowance + path.stat().st_size * BOMB_RATIO

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from the unpacked stream."""
        data = self.inner.read(len(buffer))
        buffer[: len(data)] = data
        self.given += len(data)
        if self.given > self.most:
            raise Unreadable(
                f"{self.path}: unpacks to more than {self.most >> 20} MiB",
                remedy="No log packs that well: this is a decompression bomb.",
            )
        return len(data)
