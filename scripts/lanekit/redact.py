"""Copy a drop without what names its machine: `lanekit redact DIR --out DIR`.

Addresses, host names, account numbers, secrets and directories are each replaced by a numbered
word, the same one everywhere in the drop, so that sixteen ranks on two hosts stay sixteen on two.
The table of words is never written. Nothing is published whose verdict would differ.
"""

import argparse
import contextlib
import gzip
import ipaddress
import itertools
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from lanekit import answers, contract, drop, hosts, interrupt, logs, prefix, scan, verify
from lanekit.errors import ConfigError, LaneError, Unreadable

# A word may stand behind an escaped newline of JSON, and a directory behind a compiler's -I.
_START: Final = rb"(?:(?<![\w.-])|(?<=\\[nrt])|(?<=-[IL]))"
_PART: Final = rb"[^\s\"'`<>|:;,()\[\]{}\\/=*?!&$#\x00-\x1f]+"
_ROOTS: Final = (
    b"home root Users tmp work workspace mnt media fsx efs lustre scratch data srv opt shared nfs "
    b"gpfs export ephemeral"
).split()
_PUBLIC: Final = frozenset(b"usr lib lib64 etc bin sbin dev proc sys run var v1 health".split())
# From one of these on, a path says what it is and no longer whose.
_ANCHORS: Final = frozenset(
    b"site-packages dist-packages bin lib lib64 logs warm aiperf micro megatron nemo-rl host "
    b"models .cache .venv".split()
)
# Each alternative starts with what it must begin with: looked at first, that makes it fast.
_SECRET: Final = (
    rb"(?=[hAgsn])\b(?:hf_\w{16,}|A[KS]IA[A-Z0-9]{16}\b|gh[pousr]_\w{20,}|github_pat_\w{20,}"
    rb"|sk-[\w-]{20,}|nvapi-[\w-]{20,}|glpat-[\w-]{16,})"
)
_URL_SECRET: Final = rb"(?P<scheme>://)[^\s/@\"':]{1,64}:[^\s/@\"']{1,128}(?=@)"
_NAMED_SECRET: Final = (
    rb"(?i:secret(?:_access)?(?:_key)?|password|api[_-]?key|_token)"
    rb"[\"']?\s{0,4}[=:]\s{0,4}[\"']?|[Bb]earer "
)
_IPV4: Final = rb"(?=\d)(?:(?<![\w.])|(?<=\\[nrt]))(?<!==)(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)"
_IPV6: Final = (
    rb"(?=[0-9a-fA-F:])(?:(?<![\w:.])|(?<=\\[nrt]))"
    rb"[0-9a-fA-F]*:[0-9a-fA-F:]*:[0-9a-fA-F]*(?![\w:.])"
)
_ACCOUNT: Final = rb"(?=\d)(?:(?<![\w.-])|(?<=\\[nrt]))\d{12}(?!\w|\.\d)"
_AWS_ID: Final = rb"\b(?:i|vpc|subnet|sg|ami|vol|eni)-[0-9a-f]{17}\b"
_IP_NAME: Final = rb"ip(?:-\d{1,3}){4}(?:(?:\.[a-z0-9-]+)*\.internal)?"
_NAMES: Final = (
    re.compile(rb"([A-Za-z0-9][\w.-]*):\d+:\d+ \[\d+\] "),
    re.compile(rb"\bhost(?:name)?=([A-Za-z0-9][\w.-]*)"),
    re.compile(rb"\"(?:host|hostname|node)\": ?\"([A-Za-z0-9][\w.-]*)\""),
    re.compile(rb"(" + _IP_NAME + rb")(?!\w)"),
)
_DATA: Final = (".json", ".jsonl", ".csv")


class Words:
    """What stands for what in one drop."""

    def __init__(self, hosts: Sequence[bytes], roots: Sequence[bytes]) -> None:
        names = b"|".join(re.escape(x) for x in sorted(hosts, key=len, reverse=True)) or rb"(?!)"
        first = b"i" + b"".join(sorted({re.escape(x[:1]) for x in hosts}))
        known = b"|".join(re.escape(x) for x in sorted({*_ROOTS, *roots}))
        path = rb"/(?:%b)(?![\w-])(?:/+%b)*" % (known, _PART)
        kinds = {
            "secret": _SECRET, "url": _URL_SECRET,
            "named": rb"(?P<name>%b)[^\s\"',}\]]{8,}" % _NAMED_SECRET,
            "path": rb"(?=/)" + _START + rb"(?<![ps]:/)(?!/opt/(?:amazon|nvidia)\b)" + path,
            "host": rb"(?=[%b])(?:%b(?:%b)|(?:%b)(?=:\d+:\d+ \[)|%b)(?!\w)"
            % (first, _START, names, names, _IP_NAME),
            "ipv4": _IPV4, "ipv6": _IPV6, "account": _ACCOUNT, "aws": _AWS_ID,
        }  # fmt: skip
        self._pattern = re.compile(b"|".join(b"(?P<%b>%b)" % (k.encode(), v)
                                             for k, v in kinds.items()))  # fmt: skip
        self._table: dict[tuple[str, bytes], int] = {}
        for host in sorted(hosts):  # in order, so that hosts still sort as they did
            self._number("host", host.partition(b".")[0])

    def replace(self, text: bytes, *, data: bool = False) -> bytes:
        """The text with every word replaced. data: bare numbers are figures, never accounts."""
        if b"\x1b" not in text:
            return self._pattern.sub(lambda match: self._word(match, data), text)
        ends = [0, *(at for m in prefix.ANSI.finditer(text) for at in m.span()), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(ends)]
        return b"".join(p if n % 2 else self._pattern.sub(lambda m: self._word(m, data), p)
                        for n, p in enumerate(pieces))  # fmt: skip

    def _number(self, kind: str, word: bytes) -> int:
        count = sum(k == kind for k, _ in self._table) + 1
        return self._table.setdefault((kind, word), count)

    def _word(self, match: re.Match[bytes], data: bool) -> bytes:
        kind, word = str(match.lastgroup), match[0]
        if kind == "path":
            return self._path(word)
        if kind in ("ipv4", "ipv6"):
            return self._address(kind, word)
        if kind == "account":
            bare = match.string[match.end() : match.end() + 1] in b",}] \r\n\t"
            return word if data and bare else b"%012d" % self._number(kind, word)
        if kind == "host":
            name, dot, _ = word.partition(b".")
            return b"host-%d%b" % (self._number(kind, name), b".example" if dot else b"")
        named = match["name"] or match["scheme"] or b""
        return named + b"%b-%d" % (b"aws-id" if kind == "aws" else b"redacted",
                                   self._number(kind, word))  # fmt: skip

    def _address(self, kind: str, word: bytes) -> bytes:
        try:
            address = ipaddress.ip_address(word.decode())
        except ValueError:
            return word
        if address.is_loopback or address.is_unspecified or not re.search(rb"\d", word):
            return word
        number = self._number(kind, address.packed)
        if kind == "ipv6":
            return b"2001:db8::%x" % number  # for documentation: RFC 3849
        return b"198.%d.%d.%d" % (18 + (number >> 16 & 1), number >> 8 & 255, number & 255)  # 2544

    def _path(self, word: bytes) -> bytes:
        parts = word.strip(b"/").split(b"/")
        own = 2 if parts[0] in (b"home", b"Users") else 1
        last = len(parts) - bool(len(parts) > own and re.search(rb"\w\.\w{1,8}$", parts[-1]))
        kept = next((n for n in range(own, len(parts)) if parts[n] in _ANCHORS), last)
        shown = [b"d%d" % self._number("path", part) for part in parts[:kept] if part]
        return b"/" + b"/".join([*shown, *(self.replace(part) for part in parts[kept:])])


def run(args: argparse.Namespace) -> int:
    """`lanekit redact`."""
    redact(args.drop, args.out)
    print(f"redacted: {args.out}")
    return 0


def beside(source: Path) -> Path:
    """Redact a drop that a run has just left, to redacted/NAME beside it; returns that."""
    out = source.parent / "redacted" / source.name
    out.parent.mkdir(exist_ok=True)
    redact(source, out)
    return out


def redact(source: Path, out: Path) -> None:
    """Write a redacted copy of the drop `source` to `out`, whole or not at all.

    Raises:
        ConfigError: source is no directory, or out exists or lies inside it.
        Unreadable: a file cannot be read, or is binary and so cannot be looked into.
        LaneError: the copy's verdict would differ.
    """
    if not source.is_dir():
        raise ConfigError(f"{source}: not a directory", remedy="Give the folder of a drop.")
    if out.exists() or out.resolve().is_relative_to(source.resolve()):
        raise ConfigError(
            f"{out}: exists, or lies in the drop itself",
            remedy="Name a new folder elsewhere: a drop is never edited in place.",
        )
    scratch = out.with_name(f".{out.name}.partial")
    with interrupt.raising(), _cleaned(scratch):
        _write(source, scratch)
        _same_verdict(source, scratch)
        scratch.rename(out)


@contextlib.contextmanager
def _cleaned(scratch: Path) -> Iterator[None]:
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        yield
    except OSError as error:
        raise LaneError(f"{error.filename or scratch}: {error.strerror or error}",
                        remedy="Choose a writable folder with enough room.") from error  # fmt: skip
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(source: Path, scratch: Path) -> None:
    files = [path for path in logs.inside(source) if path != source / drop.RESERVE]
    words = _words(source, files)
    digests: dict[str, tuple[str, str, str]] = {}  # name: before, its new name, after
    for path in files:
        name = path.relative_to(source).as_posix()
        new = words.replace(name.encode()).decode()
        target = scratch / new
        if target.exists():
            raise ConfigError(f"{path}: two files would be named {new}", remedy="Rename one.")
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(path, target, words)
        digests[name] = (drop.sha256(path), new, drop.sha256(target))
        if path.suffix in logs.PACKED:  # since the run, perhaps: its contents are what was sealed
            plain = (logs.digest(path), new.removesuffix(path.suffix), logs.digest(target))
            digests.setdefault(name.removesuffix(path.suffix), plain)
    if (scratch / drop.MANIFEST).is_file():
        drop.read(source)
        _seal(source / drop.MANIFEST, scratch / drop.MANIFEST, digests, words)


def _seal(
    before: Path, after: Path, digests: dict[str, tuple[str, str, str]], words: Words
) -> None:
    """A file that was not the one the run left keeps its old digest: it stays refuted. The plan's
    digest of the reference's answers is renewed likewise."""
    listed = msgspec.json.decode(before.read_bytes()).get("files", {})
    found: dict[str, Any] = msgspec.json.decode(after.read_bytes())
    found["files"] = {}
    for name, digest in listed.items():
        old, new, now = digests.get(name, ("", words.replace(name.encode()).decode(), ""))
        found["files"][new] = now if old == digest else digest
    gate, (old, _, now) = found["plan"].get("gate"), digests.get(answers.REFERENCE, ("", "", ""))
    if isinstance(gate, dict) and old and gate.get("sha256") == old:
        gate["sha256"] = now
    drop.atomic(after, msgspec.json.format(msgspec.json.encode(found | {"redacted": True})))


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """The stream in pieces that end with a line; a line that never ends is cut between words."""
    rest = b""
    while got := stream.read(scan.BLOCK):
        rest += got
        at = rest.rfind(b"\n") + 1 or max(rest.rfind(x) + 1 for x in (b" ", b",", b'"'))
        at = at or (len(rest) if len(rest) > 4 * scan.BLOCK else 0)
        if at:
            yield rest[:at]
        rest = rest[at:]
    yield rest


def _words(source: Path, files: Sequence[Path]) -> Words:
    """What names the machine, from its logs' rank identities, its host files and its plan."""
    stated = {p.stem.encode() for p in files if p.parent == source / "host"}
    printed: set[bytes] = set()
    roots: set[bytes] = set()
    for path in files:
        with logs.opened(path) as stream:
            for number, block in enumerate(_blocks(stream)):
                if number == 0 and b"\0" in block and not logs.NAME.fullmatch(path.name):
                    raise Unreadable(f"{path}: binary, so it cannot be looked into",
                                     remedy="Remove it from a copy of the drop.")  # fmt: skip
                clean = prefix.ANSI.sub(b"", block)
                printed.update(_NAMES[0].findall(clean))
                stated.update(x for pattern in _NAMES[1:] for x in pattern.findall(clean))
                if path.name == drop.MANIFEST:
                    roots.update(re.findall(rb"[\"=:]/([\w.-]+)(?=/)", block))
    if (source / drop.MANIFEST) in files:
        stated.update(x.encode() for x in hosts.names(drop.read(source).plan.get("hosts", ())))
    # Two processes writing at once glue a host's name to the end of another line.
    torn = {p for p in printed - stated for x in stated | printed if p != x and p.endswith(x)}
    names = {x for x in stated | (printed - torn) if not x.replace(b".", b"").isdigit()}
    names |= {x.partition(b".")[0] for x in names}
    return Words(sorted(names - {b"localhost", b"None", b""}), sorted(roots - _PUBLIC))


def _copy(path: Path, target: Path, words: Words) -> None:
    """Rewrite a file, packed as it was."""
    data = any(x in _DATA for x in path.suffixes)
    with logs.opened(path) as stream, target.open("xb") as raw, _packed(raw, path.suffix) as sink:
        for block in _blocks(stream):
            sink.write(words.replace(block, data=data))


def _packed(raw: BinaryIO, suffix: str) -> Any:
    if suffix == ".gz":
        return gzip.GzipFile("", "wb", fileobj=raw, mtime=0)
    if suffix == ".zst":
        import zstandard  # noqa: PLC0415

        return zstandard.ZstdCompressor().stream_writer(raw, closefd=False)
    return contextlib.nullcontext(raw)


def _same_verdict(source: Path, copy: Path) -> None:
    before, told = _outcome(source, {})
    after, _ = _outcome(copy, told)
    if before != after:
        pairs = zip(before, after, strict=False)
        changed = next((f"{a} became {b}" for a, b in pairs if a != b), "other checks")
        manifest = source / drop.MANIFEST
        older = manifest.is_file() and drop.sha256(manifest) in contract.older()
        raise LaneError(
            f"{source}: its verdict would change, so nothing was written: {changed}",
            remedy="lanes/contracts/older.toml excuses this drop by the bytes of its manifest; a "
            "copy has others. Run the row again and redact that."
            if older
            else "A word of the evidence looks like a name of the machine; please report it.",
        )


def _outcome(root: Path, told: dict[str, str]) -> tuple[tuple[object, ...], dict[str, str]]:
    """Everything a verdict decides and shows, without the words that were replaced."""
    try:
        found = verify.verify(root, **told)
    except LaneError as error:
        return (type(error).__name__,), {}
    checks = ((c.id, c.severity, c.outcome, bool(c.waived), len(c.missing)) for c in found.checks)
    figures = (msgspec.structs.replace(c, folder="") for c in found.cells)
    subject = {"lane": found.lane, "arm": found.arm, "profile": found.profile}
    shown = (found.result, found.contract, *checks, *figures, *found.micro, *found.steps)
    return shown, {k: v for k, v in subject.items() if v}
