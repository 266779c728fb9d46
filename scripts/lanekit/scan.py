"""Read logs and collect evidence. A scanner never judges: it says what stands where.

Built for gigabytes: blocks of bytes in constant memory, literals looked for first, a regular
expression only where a literal stood. Hyperscan finds the literals where it is installed
(3.4 GB/s a core, measured 2026-11-30), `bytes.find` elsewhere; both see the same lines.
Line numbers are counted afterwards, and only as far as the last evidence needs them.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, BinaryIO, Final, Protocol

import msgspec

from lanekit import prefix

BLOCK: Final = 4 << 20
LINE: Final = 64 << 10  # a longer line is read in pieces
BEFORE: Final = 2 << 10  # bytes of a line looked at before a literal, and after it
AFTER: Final = 16 << 10  # SGLang 0.5.11 prints its options in 11.5 KiB
HEAD: Final = 256
ECHO: Final = 16 << 10  # bytes before a line looked through for an echo that goes on into it
GROUPS: Final = 20_000  # distinct evidence of one probe in one file; more is said, not kept


class Probe(msgspec.Struct, frozen=True):
    """What to look for. said: it counts only where a line says it, not where one quotes it: right
    after the marks in front. echoed: it counts even in a shell's echo, since what may not be there
    is not hidden by a `+`. once: the first line is enough (a phase, a sensor)."""

    id: str
    literal: bytes
    pattern: re.Pattern[bytes]
    said: bool = False
    echoed: bool = False
    once: bool = False


class Mark(msgspec.Struct, frozen=True, order=True):
    """A position in a file: bytes from its start, and newlines to add to those before it."""

    offset: int
    newlines: int


class Evidence(msgspec.Struct):
    """All lines of one file that gave the same captures to one probe."""

    probe: str
    values: tuple[tuple[str, str], ...]
    source: prefix.Prefix
    count: int
    first: Mark
    last: Mark


class Found(msgspec.Struct):
    """What one file gave. overflow: probes with more distinct evidence than is kept. head, tail:
    its first and last bytes, where a reader looks for times."""

    evidence: dict[tuple[Any, ...], Evidence] = {}
    overflow: set[str] = set()
    size: int = 0
    head: bytes = b""
    tail: bytes = b""


class Finder(Protocol):
    """Finds literals in a block."""

    def __call__(self, block: memoryview, start: int, end: int) -> Sequence[tuple[int, int]]:
        """(position, literal number) of every literal that starts in block[start:end], sorted."""


def probe(
    name: str, literal: str, pattern: str = "", *, said: bool = False, echoed: bool = False,
    once: bool = False,
) -> Probe:  # fmt: skip
    """A probe from text; without a pattern the literal alone counts."""
    regex = re.compile((pattern or re.escape(literal)).encode())
    return Probe(name, literal.encode(), regex, said, echoed, once)


class PythonFinder:
    """`bytes.find`, literal by literal."""

    def __init__(self, literals: Sequence[bytes]) -> None:
        self.literals = literals

    def __call__(self, block: memoryview, start: int, end: int) -> Sequence[tuple[int, int]]:
        """Every hit, sorted; see Finder."""
        whole: Any = block.obj  # the bytearray under the view, which can search without a copy
        hits: list[tuple[int, int]] = []
        for number, literal in enumerate(self.literals):
            stop = min(end + len(literal) - 1, len(block))
            at = whole.find(literal, start, stop)
            while at >= 0:
                hits.append((at, number))
                at = whole.find(literal, at + 1, stop)
        return sorted(hits)


class HyperscanFinder:
    """All literals in one pass."""

    def __init__(self, literals: Sequence[bytes]) -> None:
        import hyperscan  # noqa: PLC0415 - optional

        self.literals = literals
        self.longest = max(map(len, literals), default=0)
        self.database: Any = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
        self.database.compile(
            expressions=list(literals), ids=list(range(len(literals))), literal=True,
            elements=len(literals), flags=[0] * len(literals),
        )  # fmt: skip
        self.database.scratch = hyperscan.Scratch(self.database)

    def __call__(self, block: memoryview, start: int, end: int) -> Sequence[tuple[int, int]]:
        """Every hit, sorted; see Finder."""
        hits: list[tuple[int, int]] = []

        def on_match(number: int, _from: int, to: int, _flags: int, _context: object) -> None:
            at = start + to - len(self.literals[number])
            if at < end:
                hits.append((at, number))

        stop = min(end + self.longest, len(block))
        if self.literals and stop > start:
            self.database.scan(block[start:stop], match_event_handler=on_match)
        return sorted(hits)


@functools.cache
def fast() -> bool:
    """Whether Hyperscan is installed and loads. Ask before starting threads: an import that fails
    in two threads at once shows one of them half a module (seen 2026-11-30)."""
    try:
        import hyperscan  # noqa: F401, PLC0415
    except ImportError:
        return False
    return True


def finder(literals: Sequence[bytes]) -> Finder:
    """The fastest finder that is installed."""
    return HyperscanFinder(literals) if literals and fast() else PythonFinder(literals)


class _Scan:
    """The state of one file's scan between blocks."""

    def __init__(self, probes: Sequence[Probe], make: Any) -> None:
        self.make = make
        self.found = Found(evidence={}, overflow=set())
        self.watch(probes)
        self.over: set[str] = set()  # probes that asked for one line and had it
        self.head: bytes = b""  # start of the line in progress, when it began in an earlier block
        self.fresh = True  # the next byte starts a line

    def watch(self, probes: Sequence[Probe]) -> None:
        self.probes = list(probes)
        self.literals = list(dict.fromkeys(p.literal for p in self.probes))
        self.by_literal = [[p for p in self.probes if p.literal == x] for x in self.literals]
        self.finder: Finder = self.make(self.literals)

    def take(self, view: memoryview, start: int, end: int, offset: int) -> None:
        """Collect from the lines of view[start:end]; `offset` is the file offset of view[0]."""
        whole: Any = view.obj
        newlines = -1
        if whole.find(b"\x1b", start, end) >= 0:  # ANSI: match on a copy without it
            clean = bytearray(prefix.ANSI.sub(b"", view[start : min(end + AFTER, len(view))]))
            cut = len(prefix.ANSI.sub(b"", view[start:end]))
            offset, newlines = offset + start, 0
            self._lines(memoryview(clean), 0, cut, offset, newlines)
        else:
            self._lines(view, start, end, offset, newlines)

    def _lines(self, view: memoryview, start: int, end: int, offset: int, newlines: int) -> None:
        whole: Any = view.obj
        echo = _Echo(view)
        cursor, line = start, start if self.fresh else -1
        for at, number in self.finder(view, start, end):
            newline = whole.rfind(b"\n", cursor, at)
            line = newline + 1 if newline >= 0 else line
            if newlines >= 0:
                newlines += whole.count(b"\n", cursor, at)
            cursor = at
            mark = Mark(offset, newlines) if newlines >= 0 else Mark(offset + at, 0)
            low = max(line, at - BEFORE, 0)
            high = whole.find(b"\n", at, min(at + AFTER, len(view)))
            window = bytes(view[low : high if high >= 0 else min(at + AFTER, len(view))])
            head = bytes(view[line : line + HEAD]).partition(b"\n")[0] if line >= 0 else self.head
            for probe_ in self.by_literal[number]:
                if probe_.id in self.over:
                    continue
                find = _said if probe_.said and low == line else _anywhere
                found = find(probe_, window, at - low, head)
                if found and not (probe_.said and echo.goes_on(line)):
                    self._keep(probe_, *found, mark)
        newline = whole.rfind(b"\n", cursor, end)
        line = newline + 1 if newline >= 0 else line
        self.fresh = line == end
        if line >= 0:
            self.head = bytes(view[line : min(line + HEAD, end)])
        if any(p.id in self.over for p in self.probes):
            self.watch([p for p in self.probes if p.id not in self.over])

    def _keep(
        self, probe_: Probe, match: re.Match[bytes], source: prefix.Prefix, mark: Mark
    ) -> None:
        if probe_.once:
            self.over.add(probe_.id)
        values = tuple(
            (name, value.decode("utf-8", "backslashreplace"))
            for name, value in match.groupdict().items()
            if value is not None
        )
        key = (probe_.id, values, source)
        known = self.found.evidence.get(key)
        if known is not None:
            known.count += 1
            known.first, known.last = min(known.first, mark), max(known.last, mark)
        elif probe_.once or len(self.found.evidence) < GROUPS:
            self.found.evidence[key] = Evidence(probe_.id, values, source, 1, mark, mark)
        else:
            self.found.overflow.add(probe_.id)


Hit = tuple[re.Match[bytes], prefix.Prefix]


def _near(probe_: Probe, window: bytes, at: int) -> tuple[int, int]:
    """What belongs to the literal at `at`: as far as its neighbours, so that whatever stands in a
    line, each byte is looked at for one literal (40 s for 100 KiB of one, 2026-11-30)."""
    literal = probe_.literal
    before, after = window.rfind(literal, 0, at), window.find(literal, at + len(literal))
    low = max(at - BEFORE, before + len(literal) if before >= 0 else 0)
    return low, after if after >= 0 else len(window)


def _anywhere(probe_: Probe, window: bytes, at: int, head: bytes) -> Hit | None:
    """A match around the literal at `at`, wherever it stands in its line."""
    if probe_.said:  # its line began too far before
        return None
    match = probe_.pattern.search(window, *_near(probe_, window, at))
    if match is None or not match.start() <= at < match.end():
        return None
    source = prefix.parse(head)
    return None if source.echo and not probe_.echoed else (match, source)


def _said(probe_: Probe, window: bytes, at: int, _head: bytes) -> Hit | None:
    """A match with the literal at `at` where the line's own text begins, or right after a line of
    NCCL's that was cut. What the line overwrote does not count as before."""
    line = window.rfind(b"\r", 0, at) + 1
    if prefix.quotes(window[:line]):  # a request that holds a return, not a progress bar
        return None
    source, begin = prefix.split(window[line:at])
    low, high = _near(probe_, window, at)
    match = probe_.pattern.match(window, line + begin, high)
    if match is None and (torn := prefix.torn(window, line + begin)) >= 0:
        match = probe_.pattern.search(window, max(torn, low), high)
        before = window[torn : match.start()] if match else b""
        if match and (prefix.quotes(before) or (match[0][:1] == b"[" and prefix.spaced(before))):
            return None
    return (match, source) if match and match.start() <= at < match.end() else None


class _Echo:
    """Whether a shell's echo goes on into a line of a block; each byte is looked at once."""

    def __init__(self, view: memoryview) -> None:
        self.view, self.at, self.inside = view, 0, False

    def goes_on(self, line: int) -> bool:
        """Of the line that begins at `line`; lines are asked for in order."""
        if line - self.at > ECHO:
            self.at, self.inside = line - ECHO, False
        if line > self.at:
            self.inside = prefix.echoing(bytes(self.view[self.at : line - 1]), self.inside)
            self.at = line
        return self.inside


def scan(
    stream: BinaryIO, probes: Sequence[Probe], *, block: int = BLOCK, make: Any = finder
) -> Found:
    """Collect the evidence of one log, in memory that does not grow with it."""
    state = _Scan(probes, make)
    buffer = bytearray(2 * LINE + AFTER + block)
    view = memoryview(buffer)
    read: Any = stream.readinto  # type: ignore[attr-defined]
    offset = done = filled = 0  # file offset of buffer[0]; bytes collected from; bytes filled
    while got := read(view[filled : filled + block]):
        filled += got
        if offset == 0 and len(state.found.head) < LINE:
            state.found.head = bytes(view[: min(filled, LINE)])
        limit = buffer.rfind(b"\n", done, filled) + 1
        if limit <= done or filled - limit > LINE:
            if filled - done <= LINE:
                continue
            limit = max(limit, done, filled - AFTER)
        state.take(view[:filled], done, limit, offset)
        keep = max(0, limit - LINE)
        view[: filled - keep] = view[keep:filled]
        offset, done, filled = offset + keep, limit - keep, filled - keep
    state.take(view[:filled], done, filled, offset)
    state.found.size = offset + filled
    state.found.tail = bytes(view[max(0, filled - LINE) : filled])
    return state.found


def line_numbers(stream: BinaryIO, marks: Sequence[Mark], *, block: int = BLOCK) -> dict[Mark, int]:
    """The line number, from 1, of each mark; reads no further than the last one."""
    numbers: dict[Mark, int] = {}
    position = lines = 0  # bytes counted and the newlines in them
    data, inside = b"", 0  # the block read last, and how much of it is counted
    for mark in sorted(set(marks)):
        while position < mark.offset:
            if inside == len(data):
                data, inside = stream.read(block), 0
                if not data:
                    break
            step = min(mark.offset - position, len(data) - inside)
            lines += data.count(b"\n", inside, inside + step)
            position, inside = position + step, inside + step
        numbers[mark] = lines + mark.newlines + 1
    return numbers
