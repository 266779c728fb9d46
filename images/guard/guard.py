#!/usr/bin/env python3
"""The drift guard: what an image really contains, judged at the end of its build and in its tests.

    guard.py check                  judge this image; exit 1 with every finding when it drifted
    guard.py contents               write what is inside, for tags, tables and the SBOM
    guard.py env NAME[=READER]...   a lane's variables: is each read by something shipped here?

Standard library only: it runs in every image, before and after any install. It reads files and
/proc/self/maps and trusts no package's word about itself: torch reported 2.28.9 and pip 2.30.4
where a third NCCL was mapped (verl-project/verl#6621).
"""

import contextlib
import ctypes
import importlib
import json
import mmap
import os
import re
import struct
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

SHARE = Path(os.environ.get("LANES_SHARE", "/usr/share/lanes"))
LIBRARIES = {
    # File names, never substrings: /dev/shm/nccl-* and libnccl-net-ofi.so contain "nccl" too
    # (deepseek-ai/DeepEP#640).
    "nccl": re.compile(r"libnccl\.so(\.\d+)*"),
    "nvshmem": re.compile(r"libnvshmem_host\.so(\.\d+)*"),
}
DEVICE = re.compile(r"libnvshmem_device\.a")
TORCHS = re.compile(r"libtorch_nvshmem\.so")
PLUGIN = re.compile(r"libnccl-net(-\w+)?\.so")
STAMPS = {
    "nccl": re.compile(rb"NCCL version (\d+\.\d+\.\d+)"),
    "nvshmem": re.compile(rb"NVSHMEM v(\d+\.\d+\.\d+)"),
}
ENTRY = re.compile(rb"nccl(?:Net|Gin)Plugin_v\d+")
READERS = Path(__file__).with_name("readers.toml")
STUB = Path("/usr/local/cuda/lib64/stubs/libcuda.so")  # the toolkit's, for links without a driver
SKIPPED = {"proc", "sys", "dev", "run", "tmp", "tools", "locks", "src"}
# What both series for V1 over EFA change, ours and AWS's.
IBGDA = b"os.environ['NVSHMEM_IB_ENABLE_IBGDA'] = '1'"
# What base images say about themselves, and a build step's own arguments: read by nobody.
ABOUT_ITSELF = re.compile(r"\w+_(VERSION|SHA256|PROJECT|LOCK|URL|COMMIT|DIGEST|READS)")


@dataclass(frozen=True)
class Finding:
    """One thing that drifted. rule: a stable name; remedy: what to do about it."""

    rule: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Image:
    """Where to look. root: `/`, or a planted tree in tests. expect: the transport's promises."""

    root: Path = Path("/")
    expect: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


# --- reading ---------------------------------------------------------------------------------


def files(image: Image) -> list[Path]:
    """Every regular file and link of the image, without the kernel's and the build's mounts."""
    found: list[Path] = []
    for folder, folders, names in os.walk(image.root):
        if Path(folder) == image.root:
            folders[:] = [name for name in folders if name not in SKIPPED]
        found += [Path(folder) / name for name in names]
    return found


def copies(paths: list[Path], name: re.Pattern[str]) -> list[Path]:
    """The distinct files of that name; links to one file are one copy."""
    real = {path.resolve() for path in paths if name.fullmatch(path.name)}
    return sorted(path for path in real if path.is_file())


def stamp(path: Path, pattern: re.Pattern[bytes]) -> str:
    """The version a binary carries in its own text; empty when it carries none."""
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
        found = pattern.search(text)
        return found[1].decode() if found else ""


def strings(path: Path, pattern: re.Pattern[bytes]) -> set[bytes]:
    """Every distinct match in a file."""
    if not path.stat().st_size:
        return set()
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return set(pattern.findall(text))


def holds(path: Path, word: bytes) -> bool:
    """Whether a file holds a word whole: NCCL_DEB is not in NCCL_DEBUG.

    A plain search: a pattern with boundaries took a minute over one libnccl (2026-11-30).
    """
    if not path.stat().st_size:
        return False
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
        at = text.find(word)
        while at >= 0:
            around = text[max(at - 1, 0) : at] + text[at + len(word) : at + len(word) + 1]
            if not re.search(rb"\w", around):
                return True
            at = text.find(word, at + 1)
    return False


@dataclass(frozen=True)
class Symbol:
    """One name in an ELF file. content: its bytes in it; None where it is not defined there."""

    name: str
    content: bytes | None


def symbols(path: Path, table: int = 11) -> Iterator[Symbol]:
    """The names in a 64-bit little-endian ELF file: those it offers to the loader or asks it for
    (SHT_DYNSYM, 11), or all of them (SHT_SYMTAB, 2), which a stripped file lacks.

    Raises:
        ValueError: not such a file, or a broken one.
    """
    data = _elf(path)
    with _unpacking(path):
        yield from _symbols(data, table)


def _elf(path: Path) -> bytes:
    """The bytes of such a file."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is not a 64-bit ELF file")
    return data


@contextlib.contextmanager
def _unpacking(path: Path) -> Iterator[None]:
    """What cannot be unpacked of a file in the block is told as broken."""
    try:
        yield
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError(f"{path} is a broken ELF file: {error}") from error


def _sections(data: bytes) -> list[tuple[int, ...]]:
    (offset,), (size, count) = (
        struct.unpack_from("<Q", data, 40),
        struct.unpack_from("<HH", data, 58),
    )
    return [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]


def _symbols(data: bytes, table: int) -> Iterator[Symbol]:
    sections = _sections(data)
    for _, kind, _, _, start, length, link, *_ in sections:
        if kind != table:
            continue
        text = data[sections[link][4] : sections[link][4] + sections[link][5]]
        for place in range(start, start + length, 24):
            name, _, _, number, value, many = struct.unpack_from("<IBBHQQ", data, place)
            content = None if number == 0 else b""
            if 0 < number < len(sections) and sections[number][1] != 8:  # SHT_NOBITS
                at = sections[number][4] + value - sections[number][3]
                content = data[at : at + many]
            yield Symbol(text[name : text.index(b"\0", name)].decode(errors="replace"), content)


def needed(path: Path) -> set[str]:
    """The libraries that a file has the loader bring: its DT_NEEDED entries.

    Raises:
        ValueError: not a 64-bit little-endian ELF file, or a broken one.
    """
    found, data = set[str](), _elf(path)
    with _unpacking(path):
        sections = _sections(data)
        for _, kind, _, _, start, length, link, *_ in sections:
            for place in range(start, start + length, 16) if kind == 6 else ():  # SHT_DYNAMIC
                tag, at = struct.unpack_from("<qQ", data, place)
                if tag == 1:  # DT_NEEDED: a place in the linked table of names
                    at += sections[link][4]
                    found.add(data[at : data.index(b"\0", at)].decode(errors="replace"))
    return found


def defined(path: Path) -> set[str]:
    """The names that a library offers."""
    return {each.name for each in symbols(path) if each.content is not None}


# --- judging ---------------------------------------------------------------------------------


def check_libraries(image: Image, paths: list[Path]) -> Iterator[Finding]:
    """Exactly one NCCL and one NVSHMEM, each at the pinned version by its own text."""
    for name, pattern in LIBRARIES.items():
        wanted = image.expect.get(name)
        if wanted is None:
            continue
        found = copies(paths, pattern)
        if len(found) != 1:
            places = ", ".join(map(str, found)) or "none"
            yield Finding(
                f"one-{name}", f"{len(found)} copies of {name}: {places}", "Keep the pinned one."
            )
        for path in found:
            actual = stamp(path, STAMPS[name])
            if actual != wanted:
                yield Finding(
                    f"{name}-version",
                    f"{path} is {actual or 'unmarked'}, pinned is {wanted}",
                    "Install the pin after the engine: torch brings its own (DeepEP#710).",
                )


def check_device(image: Image, paths: list[Path]) -> Iterator[Finding]:
    """Device and host NVSHMEM are one version: 3.4.5 inside 3.6.5 hangs (NeMo Automodel#2614)."""
    wanted = image.expect.get("nvshmem")
    if wanted is None:
        return
    for archive in copies(paths, DEVICE):
        header = archive.parent.parent / "include" / "non_abi" / "nvshmem_version.h"
        version = _header_version(header)
        if version != wanted:
            yield Finding(
                "nvshmem-device",
                f"{archive} is {version or 'of unknown version'}, the host library is {wanted}",
                "Take both from one wheel.",
            )
    for path in extensions(image, paths):
        found = linked(path)
        # V1 is made of that device code; V2 needs none of it.
        if not found and image.expect["buffer"] == "Buffer":
            yield Finding(
                "nvshmem-device",
                f"{path.name} does not say which device code it holds: it is stripped",
                "Build DeepEP without strip, so that its NVSHMEM can be read.",
            )
        for version in sorted(found - {wanted}):
            yield Finding(
                "nvshmem-device",
                f"{path.name} holds device code of {version}, the host library is {wanted}",
                "Build DeepEP against the pinned NVSHMEM.",
            )


def check_torchs(image: Image, paths: list[Path]) -> Iterator[Finding]:
    """torch's own NVSHMEM device code is not set to work on a host library of another version.

    Every process with torch maps it (libtorch_cuda asks for libtorch_nvshmem, 3.4.5 in 2.11.0): it
    is no second NVSHMEM, as it calls the one host library, and idle until torch's symmetric memory,
    which uses CUDA, is told otherwise. So DeepEP V1 ran beside it with 3.6.5 (2x H200, 2026-11-30).
    """
    wanted = image.expect.get("nvshmem")
    if wanted is None or image.env.get("TORCH_SYMMMEM") != "NVSHMEM":
        return
    for path in copies(paths, TORCHS):
        for version in sorted(linked(path) - {wanted}):
            yield Finding(
                "nvshmem-device",
                f"TORCH_SYMMMEM=NVSHMEM, and {path.name} holds device code of {version}, the host"
                f" library is {wanted}",
                "Unset it: with CUDA, its default, torch's symmetric memory needs no NVSHMEM.",
            )


def device_code(image: Image, paths: list[Path]) -> dict[str, str]:
    """The NVSHMEM whose device code is linked into DeepEP and into torch: file -> version."""
    found = {}
    for path in [*extensions(image, paths), *copies(paths, TORCHS)]:
        with contextlib.suppress(ValueError):  # which a check tells
            found[path.name.partition(".")[0]] = ", ".join(sorted(linked(path)))
    return {name: version for name, version in found.items() if version}


def linked(path: Path) -> set[str]:
    """The NVSHMEM versions whose device code is linked into an extension: its headers leave this
    constant in every object that uses them (seen with 3.6.5 and 3.7.0, 2026-11-30)."""
    found = [s.content for s in symbols(path, 2) if s.name.endswith("nvshmemi_device_lib_version")]
    with _unpacking(path):
        return {".".join(map(str, struct.unpack("<3i", each))) for each in found if each}


def _header_version(header: Path) -> str:
    if not header.is_file():
        return ""
    names = ("MAJOR", "MINOR", "PATCH")
    text = header.read_text()
    found = [re.search(rf"NVSHMEM_VENDOR_{name}_VERSION\s+(\d+)", text) for name in names]
    return ".".join(match[1] if match else "?" for match in found)


def check_symbols(image: Image, paths: list[Path]) -> Iterator[Finding]:
    """What DeepEP's extension lacks of NCCL and NVSHMEM is offered by the one library, and what it
    lacks of the driver is asked of it."""
    offered: set[str] = set()
    for pattern in LIBRARIES.values():
        for library in copies(paths, pattern):
            offered |= defined(library)
    for path in extensions(image, paths):
        asked = {each.name for each in symbols(path) if each.content is None}
        lacks = {name for name in asked if re.match(r"nccl[A-Z]|nvshmem", name)} - offered
        if lacks:
            yield Finding(
                "symbols",
                f"{path.name} needs what nobody offers: {', '.join(sorted(lacks)[:4])}",
                "The NCCL or NVSHMEM here is not the one DeepEP was built against.",
            )
        # No build has a driver, and the guard's own import binds lazily, so a link without -lcuda
        # shows on the first GPU only: "undefined symbol: cuMemAddressFree" (2x H200, 2026-11-30).
        driver = sorted(name for name in asked if re.match(r"cu[A-Z]", name))
        if driver and "libcuda.so.1" not in needed(path):
            yield Finding(
                "symbols",
                f"{path.name} calls the driver ({driver[0]}) and does not ask for libcuda.so.1",
                "It was linked without -lcuda, or with an empty stub, which a linker drops: import"
                " deep_ep would fail on every GPU machine. Link it with the toolkit's own.",
            )


def extensions(image: Image, paths: list[Path]) -> list[Path]:
    """DeepEP's compiled extensions, V1's and V2's names."""
    if "buffer" not in image.expect:
        return []
    return [path for path in paths if re.fullmatch(r"(deep_ep_cpp|_C)\..*so", path.name)
            and (path.name.startswith("deep_ep") or path.parent.name == "deep_ep")]  # fmt: skip


def check_series(image: Image, paths: list[Path]) -> Iterator[Finding]:
    """DeepEP reads what our patch series makes it read: a patch step that did nothing shows here.

    The published recipe's step printed a warning, changed nothing and ended with 0.
    """
    mine = [p for p in paths if "deep_ep" in p.parts and p.suffix != ".pyc" and p.is_file()]
    for name in filter(None, image.expect.get("reads", "").split("+")):
        if not any(holds(path, name.encode()) for path in mine):
            yield Finding(
                "series", f"no file of deep_ep reads {name}", "The wheel was built unpatched."
            )
    if image.expect.get("buffer") != "Buffer":
        return
    code = [path.read_bytes() for path in mine if path.suffix == ".py"]
    if any(IBGDA in each for each in code):
        yield Finding(
            "series",
            "deep_ep sets NVSHMEM_IB_ENABLE_IBGDA=1 whatever it runs on: it is stock V1",
            "Give a wheel of series deepep/567632dd: stock V1 cannot use libfabric.",
        )
    built = any(holds(path, b"nvshmem_api") for path in extensions(image, paths))
    if any(b"nvshmem_api" in each for each in code) and not built:
        yield Finding(
            "series",
            "deep_ep was built without EP_NVSHMEM_API=1: its kernels still post through IBGDA",
            "Set it while the wheel is built.",
        )


def check_plugin(image: Image, paths: list[Path]) -> Iterator[Finding]:
    """The net plugin where promised, nowhere else, with an entry point this NCCL asks for."""
    wanted = image.expect.get("plugin")
    if wanted is None:
        return
    found = copies(paths, PLUGIN)
    # The plugin's own install leaves it under its old and its new name, side by side.
    folder = image.root / wanted.lstrip("/")
    if not found or any(path.parent != folder for path in found):
        places = ", ".join(map(str, found)) or "none"
        yield Finding("one-plugin", f"net plugins: {places}; wanted in {wanted}", "Else TCP.")
    asks: set[bytes] = set()
    for library in copies(paths, LIBRARIES["nccl"]):
        asks |= strings(library, ENTRY)
    for path in found if asks else ():  # the base of the transports has no NCCL yet
        has = {name for name in defined(path) if ENTRY.fullmatch(name.encode())}
        for kind in ("ncclNetPlugin", "ncclGinPlugin"):
            fits = {n for n in has if n.startswith(kind)} & {n.decode() for n in asks}
            if not fits:
                yield Finding(
                    "plugin-entry",
                    f"{path.name} offers no {kind} that this NCCL asks for",
                    "A plugin for another NCCL is skipped without an error.",
                )


def check_fabric(image: Image, paths: list[Path]) -> Iterator[Finding]:
    """The loader takes libfabric from the EFA prefix, not a distribution's."""
    wanted = image.expect.get("fabric")
    if wanted is None:
        return
    found = copies(paths, re.compile(r"libfabric\.so(\.\d+)*"))
    outside = [
        path for path in found if not str(path).startswith(str(image.root / wanted.lstrip("/")))
    ]
    if len(found) != 1 or outside:
        places = ", ".join(map(str, found)) or "none"
        yield Finding(
            "fabric", f"libfabric: {places}; wanted one under {wanted}", "Remove the others."
        )
    if image.root == Path("/") and found:
        try:
            ctypes.CDLL("libfabric.so.1")
            mapped = [path for path in maps() if path.name.startswith("libfabric.so")]
        except OSError as error:
            yield Finding("fabric", f"the loader: {error}", f"Name {wanted} in /etc/ld.so.conf.d.")
            return
        if any(not str(path).startswith(wanted) for path in mapped):
            yield Finding("fabric", f"the loader took {mapped[0]}", f"Put {wanted} first.")


def check_base(image: Image, paths: list[Path]) -> Iterator[Finding]:
    """What NGC bases leave behind (Megatron-Bridge#5033): another plugin's name, dangling paths."""
    if image.env.get("NCCL_NET_PLUGIN", "").lower() == "spcx":
        yield Finding("base", "NCCL_NET_PLUGIN=spcx names a plugin of another fabric", "Unset it.")
    for path in paths:
        if path.suffix == ".conf" and path.parent.name == "ld.so.conf.d":
            for line in path.read_text().split():
                theirs = re.search(r"ofi|hpcx|nccl|sharp", line)
                if theirs and not (image.root / line.lstrip("/")).is_dir():
                    yield Finding("base", f"{path} names {line}, which is not there", "Remove it.")


@dataclass(frozen=True)
class Reader:
    """A component that reads variables: readers.toml says where its files are."""

    prefix: tuple[str, ...]
    files: str = ""
    package: str = ""
    spelling: str = ""
    composed: tuple[str, ...] = ()

    def ships(self, path: Path) -> bool:
        """Whether a file is one of the component's."""
        if self.files and re.fullmatch(self.files, path.name):
            return True
        return bool(self.package) and self.package in path.parts and path.suffix != ".pyc"

    def spellings(self, name: str) -> list[list[bytes]]:
        """How its files may hold a variable: whole, as its library registers it, or in parts that
        must all be there, where its source composes names at run time."""
        found = [[name.encode()]]
        if self.spelling and name.startswith(self.prefix):
            rest = re.sub(self.spelling, "", name)
            found += [[rest.encode()], [rest.lower().encode()]]
        if self.composed:
            template, asks = self.composed
            part = re.fullmatch(re.sub(r"\{\w+\}", r"(\\w+)", template), name)
            if part:
                found.append([template.encode(), asks.format(part[1].lower()).encode()])
        return found

    def reads(self, name: str, paths: list[Path]) -> bool:
        """Whether what is shipped of it reads a variable."""
        mine = [path for path in paths if self.ships(path) and path.is_file()]
        return any(
            all(any(holds(path, part) for path in mine) for part in parts)
            for parts in self.spellings(name)
        )


def readers() -> dict[str, Reader]:
    """Every component of readers.toml."""
    fields = {"prefix", "files", "package", "spelling", "composed"}
    found = tomllib.loads(READERS.read_text())["reader"]
    return {
        name: Reader(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in body.items() if k in fields}
        )
        for name, body in found.items()
    }


def check_env(image: Image, paths: list[Path]) -> Iterator[Finding]:
    """Every exported variable that a component's prefix claims is read by one that is shipped.

    OFI_NCCL_GIN_MAX_REQUESTS was exported by published recipes for months and read by nothing.
    """
    known = readers()
    for name in sorted(image.env):
        mine = [reader for reader in known.values() if name.startswith(reader.prefix)]
        if mine and not ABOUT_ITSELF.fullmatch(name):
            yield from _unread(name, mine, paths)


def check_lane(wanted: dict[str, str], paths: list[Path]) -> Iterator[Finding]:
    """A lane's variables, each read by the component that the lane names; by any where it is mute.

    wanted: variable -> component, or empty.
    """
    known = readers()
    for name, reader in sorted(wanted.items()):
        if reader and reader not in known:
            yield Finding("env", f"{name}: no component {reader}", f"Known: {', '.join(known)}.")
        else:
            yield from _unread(name, [known[reader]] if reader else list(known.values()), paths)


def _unread(name: str, mine: list[Reader], paths: list[Path]) -> Iterator[Finding]:
    if not any(reader.reads(name, paths) for reader in mine):
        yield Finding("env", f"{name} is exported and nothing shipped here reads it", "Remove it.")


def check_maps(image: Image, paths: list[Path]) -> Iterator[Finding]:
    """What really loads is the one copy: in a process that imports torch and deep_ep, and by name.

    torch finds its NCCL by its own run path; vLLM and others ask the loader for libnccl.so.2.
    """
    if image.root != Path("/") or "buffer" not in image.expect:
        return
    wanted = {name: copies(paths, LIBRARIES[name]) for name in LIBRARIES if name in image.expect}
    for way in ("import", "loader"):
        mapped = _mapped(way, image)
        if isinstance(mapped, str):
            yield Finding("import", f"{way}: {mapped}", "The image cannot run a lane.")
            continue
        for name, right in wanted.items():
            found = sorted({p.resolve() for p in mapped if LIBRARIES[name].fullmatch(p.name)})
            if found != right:
                places = ", ".join(map(str, found)) or "none"
                only = ", ".join(map(str, right)) or "a pinned one"
                yield Finding(f"mapped-{name}", f"{way} maps {places}", f"Only {only} may load.")


def _mapped(way: str, image: Image) -> list[Path] | str:
    """The files a fresh process maps, or its last words."""
    with tempfile.TemporaryDirectory() as scratch:
        env = dict(image.env)
        driver = "stub" if _with_stub(scratch, env) else "driver"
        ran = subprocess.run(
            [sys.executable, __file__, "maps", way, driver],
            capture_output=True, text=True, env=env, check=False,
        )  # fmt: skip
    if ran.returncode:
        return (ran.stderr.strip().splitlines() or ["no word"])[-1]
    return [Path(line) for line in ran.stdout.splitlines()]


def _load(way: str, driver: str) -> None:
    """Bring the libraries into this process, lazily: no driver is needed to look."""
    sys.setdlopenflags(os.RTLD_LAZY)
    if way == "import":
        torch = importlib.import_module("torch")
        if driver == "stub":
            # sgl-deep-ep 0.1.2.post1 refuses its import where no GPU answers (prerequisites.py,
            # 2026-11-30). A build has none: say yes here only, to see what the import maps.
            torch.cuda.is_available = lambda: True
        importlib.import_module("deep_ep")
        return
    for name in ("libnccl.so.2", "libnvshmem_host.so.3"):
        try:
            ctypes.CDLL(name, mode=os.RTLD_LAZY)
        except OSError as error:
            # V1 images may have no NCCL of their own; what is missing is found as not mapped.
            print(error, file=sys.stderr)


def _with_stub(scratch: str, env: dict[str, str]) -> bool:
    """Put the toolkit's stand-in libcuda on the path where no driver is mounted, as in a build."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if STUB.exists():
            (Path(scratch) / "libcuda.so.1").symlink_to(STUB)
            env["LD_LIBRARY_PATH"] = f"{env.get('LD_LIBRARY_PATH', '')}:{scratch}".lstrip(":")
            return True
    return False


def maps() -> list[Path]:
    """The files mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(
        {Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/") and "/" in line}
    )


CHECKS = (
    check_libraries, check_device, check_torchs, check_symbols, check_series, check_plugin,
    check_fabric, check_base, check_env, check_maps,
)  # fmt: skip


def findings(image: Image) -> list[Finding]:
    """Everything that drifted."""
    paths, found = files(image), list[Finding]()
    for check in CHECKS:
        try:
            found += check(image, paths)
        except ValueError as error:
            found.append(Finding("unreadable", str(error), "Install its package again."))
    return found


# --- saying ----------------------------------------------------------------------------------


def contents(image: Image) -> dict[str, object]:
    """What is inside, read from the image and not from its recipe."""
    paths = files(image)
    libraries = {
        name: stamp(found[0], STAMPS[name])
        for name, pattern in LIBRARIES.items()
        if (found := copies(paths, pattern))
    }
    lines = Path("/etc/os-release").read_text().splitlines()
    release = dict(line.split("=", 1) for line in lines if "=" in line)
    listed = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\n"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "system": release.get("PRETTY_NAME", "").strip('"'),
        "python": ".".join(map(str, sys.version_info[:3])),
        "libraries": libraries,
        "device": device_code(image, paths),
        "expect": image.expect,
        "packages": {
            re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version
            for d in metadata.distributions()
        },
        "debian": dict(line.split("\t") for line in listed.stdout.splitlines()),
    }


def expected() -> dict[str, str]:
    """The transport's promises (images/tools/expect); none in an image without a transport."""
    path = SHARE / "expect.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def main(argv: list[str]) -> int:
    """Run one subcommand; returns its exit code."""
    command, words = [*argv, "check"][0], argv[1:]
    if command == "maps":
        _load(*words)
        print(*maps(), sep="\n")
        return 0
    image = Image(Path(os.environ.get("LANES_ROOT", "/")), expected(), dict(os.environ))
    if command == "contents":
        SHARE.mkdir(parents=True, exist_ok=True)
        held = json.dumps(contents(image), indent=1, sort_keys=True)
        (SHARE / "contents.json").write_text(held + "\n")
        return 0
    if command == "env":
        wanted = {name: reader for name, _, reader in (word.partition("=") for word in words)}
        found = list(check_lane(wanted, files(image)))
    else:
        found = findings(image)
    for finding in found:
        print(f"guard: {finding.rule}: {finding.what}\n  {finding.remedy}", file=sys.stderr)
    if not found:
        print(f"guard: nothing drifted ({', '.join(f'{k} {v}' for k, v in image.expect.items())})")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
