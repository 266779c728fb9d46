"""The scanner sees the same lines as a plain reading of the file, whatever the file holds."""

import io
import itertools
import re
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanekit import contract, prefix, scan

PROBES = (
    scan.probe("provider", "provider is ", r"provider is (?P<name>\w+)"),
    scan.probe("pid", "] NCCL", r"(?P<host>[a-z]+):(?P<pid>\d+) \[\d\] NCCL"),
    scan.probe("plain", "plain"),
    scan.probe("first", "plain", once=True),
    scan.probe("said", "provider is ", r"(?:[a-z]+:)?provider is (?P<name>\w+)", said=True),
    scan.probe("nowhere", "plain", echoed=True),
)
Make = Callable[[Sequence[bytes]], scan.Finder]
ENGINES: list[Make] = [scan.PythonFinder]
try:
    import hyperscan  # noqa: F401

    ENGINES.append(scan.HyperscanFinder)
except ImportError:
    pass
engines = pytest.mark.parametrize("make", ENGINES)

Seen = dict[tuple[str, tuple[tuple[str, str], ...]], tuple[int, int, int]]


def scanned(data: bytes, make: Make, *, block: int = scan.BLOCK) -> Seen:
    """(probe, captures) -> count, first line, last line, by the scanner."""
    found = scan.scan(io.BytesIO(data), PROBES, block=block, make=make)
    marks = [m for x in found.evidence.values() for m in (x.first, x.last)]
    numbers = scan.line_numbers(io.BytesIO(data), marks, block=block)
    assert found.size == len(data)
    seen: Seen = {}
    for x in found.evidence.values():
        count, first, last = seen.get((x.probe, x.values), (0, 1 << 60, 0))
        seen[x.probe, x.values] = (
            count + x.count, min(first, numbers[x.first]), max(last, numbers[x.last])
        )  # fmt: skip
    return seen


def around_literals(probe: scan.Probe, line: bytes) -> Iterator[re.Match[bytes]]:
    """The first match between each literal's neighbours."""
    parts = line.split(probe.literal)
    for before, after in itertools.pairwise(parts):
        if match := probe.pattern.search(before + probe.literal + after):
            yield match


CUT = re.compile(rb"[a-z]+:\d+:\d+ \[\d\] NCCL INFO ")


def said(probe: scan.Probe, line: bytes) -> Iterator[re.Match[bytes]]:
    """The match where the line's own text begins, or behind a line of NCCL's that was cut."""
    places = [m.start() for m in re.finditer(re.escape(probe.literal), line)]
    for at, following in itertools.pairwise([*places, len(line)]):
        over = line.rfind(b"\r", 0, at) + 1
        if re.search(rb"[\"'`{}]", line[:over]):
            continue
        own = over + prefix.split(line[over:at])[1]
        match = probe.pattern.match(line, own, following)
        if match is None and (head := CUT.match(line, own)):
            after = max([head.end(), *(p + len(probe.literal) for p in places if p < at)])
            match = probe.pattern.search(line, after, following)
            if match and re.search(rb"[\"'`{}]", line[head.end() : match.start()]):
                match = None
        if match and match.start() <= at < match.end():
            yield match


def plainly(data: bytes) -> Seen:
    """The same by reading line after line."""
    seen: Seen = {}
    before = b""
    for number, raw in enumerate(data.split(b"\n"), 1):
        line = prefix.ANSI.sub(b"", raw)
        echo, goes_on = prefix.parse(line[:256]).echo, prefix.echoing(before[:-1])
        before += line + b"\n"
        for probe in PROBES:
            if goes_on if probe.said else echo and not probe.echoed:
                continue
            for match in (said if probe.said else around_literals)(probe, line):
                values = tuple(
                    (k, v.decode("utf-8", "backslashreplace")) for k, v in match.groupdict().items()
                )
                if probe.once and any(key[0] == probe.id for key in seen):
                    continue
                count, first, _ = seen.get((probe.id, values), (0, number, 0))
                seen[probe.id, values] = (count + 1, first, number)
    return seen


words = st.sampled_from(
    [
        *(b"provider is efa", b"provider is ", b"plain", b"host:12 [3] NCCL", b"plai", b"n"),
        *(b"vm:1:1 [0] NCCL INFO ab", b"'", b"\r", b"INFO 11-30 11:00:00 [a.py:1] "),
        *(b"\n", b"\r\n", b" ", b"+ ", b"\x1b[33m", b"\x1b[0m", b"\x1b]0;title\x07", b"\x1b"),
        *(b"\0\0", b"\xff\xfe", "Ω".encode(), b"x" * 90),
        *(b"(Worker pid=12) ", b"[1,3]<stdout>:", b"server-1  | "),
    ]
)


@settings(max_examples=400, deadline=None)
@given(parts=st.lists(words, max_size=60), block=st.sampled_from([1, 7, 64, 4096]))
def test_both_engines_see_what_a_plain_reading_sees(parts: list[bytes], block: int) -> None:
    data = b"".join(parts)
    for make in ENGINES:
        assert scanned(data, make, block=block) == plainly(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes_are_read(data: bytes) -> None:
    results = [scanned(data, make, block=64) for make in ENGINES]
    assert all(found == results[0] for found in results)


@engines
def test_a_line_across_blocks_is_one_line(make: Make) -> None:
    data = b"first\n" + b"host:77 [3] NCCL INFO provider is efa\n" * 3
    for block in range(1, 60):
        assert scanned(data, make, block=block)["provider", (("name", "efa"),)] == (3, 2, 4)


@engines
def test_a_line_of_megabytes_is_read_in_pieces(make: Make) -> None:
    line = b"x" * 3_000_000 + b" host:7 [1] NCCL " + b"y" * 3_000_000 + b" provider is efa"
    data = b"one\n" + line + b"\nplain\n"
    seen = scanned(data, make, block=1 << 16)
    assert seen["pid", (("host", "host"), ("pid", "7"))] == (1, 2, 2)
    assert seen["provider", (("name", "efa"),)] == (1, 2, 2)
    assert seen["plain", ()] == (1, 3, 3)


@engines
def test_an_echo_of_megabytes_is_still_an_echo(make: Make) -> None:
    data = b"+ echo " + b"x" * 3_000_000 + b" provider is efa\nprovider is tcp\n"
    assert list(scanned(data, make, block=1 << 16)) == [
        ("provider", (("name", "tcp"),)),
        ("said", (("name", "tcp"),)),
    ]


@engines
def test_colour_inside_a_literal_is_stripped_and_lines_stay_the_raw_ones(make: Make) -> None:
    data = b"a\nb\nprov\x1b[31mider\x1b[0m is efa\nplain\n"
    seen = scanned(data, make)
    assert seen["provider", (("name", "efa"),)] == (1, 3, 3)
    assert seen["plain", ()] == (1, 4, 4)


@engines
def test_memory_does_not_grow_with_the_file(make: Make) -> None:
    class Endless(io.RawIOBase):
        left = 64 << 20

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            size = min(len(buffer), self.left)
            buffer[:size] = b"z" * size
            self.left -= size
            return size

    tracemalloc.start()
    found = scan.scan(Endless(), PROBES, block=1 << 18, make=make)  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.size == 64 << 20
    assert peak < 4 << 20


@engines
@pytest.mark.parametrize(
    "text",
    ["[lane-evidence] v=1 ", "non-default args: {", "a" * 500 + "Selected provider is ",
     "Initializing a V1 LLM engine (v1) with config: tensor_parallel_size=1, device_config=c, "],
)  # fmt: skip
def test_a_line_of_nothing_but_literals_is_looked_at_once(
    make: Make, text: str, monkeypatch: Any
) -> None:
    """Each literal is matched only as far as its neighbours, so the work is the line's length."""
    looked: list[int] = []

    class Counting:
        def __init__(self, pattern: re.Pattern[bytes]) -> None:
            self.pattern = pattern

        def search(self, line: bytes, start: int, end: int) -> re.Match[bytes] | None:
            looked.append(end - start)
            return self.pattern.search(line, start, end)

        def match(self, line: bytes, start: int, end: int) -> re.Match[bytes] | None:
            looked.append(end - start)
            return self.pattern.match(line, start, end)

    probes = [
        scan.Probe(f"{name} {said}", rule.literal.encode(), Counting(compiled), said=said)  # type: ignore[arg-type]
        for name, rule in contract.rules().items()
        for compiled in [re.compile(rule.pattern.encode())]
        for said in (True, False)
    ]
    data = text.encode() * (50_000 // len(text))
    scan.scan(io.BytesIO(data), probes, make=make)
    kinds = sum(rule.literal in text for rule in contract.rules().values())
    near = 2 * kinds * scan.BEFORE * (scan.BEFORE + scan.AFTER) // len(text)  # of a line's start
    assert 0 < sum(looked) <= 3 * kinds * len(data) + scan.AFTER + near


@engines
def test_evidence_without_end_is_counted_and_said(make: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr(scan, "GROUPS", 10)
    data = b"".join(b"provider is a%d\n" % n for n in range(50))
    found = scan.scan(io.BytesIO(data), PROBES, make=make)
    assert len(found.evidence) == 10
    assert found.overflow == {"provider", "said"}


def test_a_probe_without_pattern_takes_its_literal_as_text() -> None:
    assert scan.probe("x", "a.b[").pattern.pattern == re.escape("a.b[").encode()


@pytest.mark.parametrize(
    ("head", "label", "pid", "rank", "echo"),
    [
        (b"vm:1:1 [0] NCCL INFO x", "", "", "", False),
        (b"(Worker_DP0_EP0 pid=4002) INFO x", "", "4002", "", False),
        (b"(EngineCore_DP1 pid=3774) (EngineCore_DP0 pid=3773) INFO", "", "3773", "", False),
        (b"(RayWorkerWrapper pid=7, ip=10.0.0.9) x", "10.0.0.9", "7", "", False),
        (b"[1,13]<stdout>:x", "", "", "13", False),
        (b"[1,13]<stderr>: + cat", "", "", "13", True),
        (b"[rank5]: x", "", "", "5", False),
        (b"[default3]:x", "", "", "3", False),
        (b" 4: x", "", "", "", False),
        (b"say hi | x", "", "", "", False),
        (b"prompt-text | x", "", "", "", False),
        (b"(Worker pid=7) server-1  | x", "", "7", "", False),
        (b"say-1 hello x", "", "", "", False),
        (b"server-1  | x", "server-1", "", "", False),
        (b"server-1  | + x", "server-1", "", "", True),
        (b"[pod/lane-0/vllm] x", "lane-0", "", "", False),
        (b"lane-1 vllm x", "lane-1", "", "", False),
        (b"2026-11-30T11:00:00.123456789Z + x", "", "", "", True),
        (b"+ grep -iE 'x'", "", "", "", True),
        (b"+++ find /tmp", "", "", "", True),
        (b"+zsh:12> x", "", "", "", True),
        (b"\x1b[33m+ x", "", "", "", True),
        (b"\0\0\0+ x", "", "", "", True),
        (b"Loading 100%\r+ x", "", "", "", True),
        (b"+1.5 tokens", "", "", "", False),
        (b"a + b", "", "", "", False),
    ],
)
def test_prefixes(head: bytes, label: str, pid: str, rank: str, echo: bool) -> None:
    assert prefix.parse(head) == prefix.Prefix(label, pid, rank, echo)
