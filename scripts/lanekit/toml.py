"""Strict TOML: a file decodes into its struct, or fails with the key and the valid names."""

import os
import re
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from lanekit import reading
from lanekit.errors import ConfigError, Unreadable

T = TypeVar("T", bound=msgspec.Struct)

# tomllib takes room by the square of a dotted key's length: 200 kB of `a.a.a` did not end below
# 20 GB, and the worst of this size and depth takes 111 MiB and 3 s (2026-11-30). Our largest file
# has 40 KiB, our deepest key 4 parts.
LIMIT: Final = 256 << 10
DEPTH: Final = 32
# As tomllib reads them: in an inline table a key may follow a string of several lines, which holds
# quotes and may end in two of its own. One without an end takes the rest: tomllib refuses it there.
_TEXT = re.compile(
    rb'''
    \#[^\n]*
    | """(?:[^"\\]|\\(?:.|\Z)|"{1,2}(?!"))*(?:"{3,5}|\Z)
    | \'{3}(?:[^']|'{1,2}(?!'))*(?:'{3,5}|\Z)
    | "(?:[^"\\\n]|\\[^\n])*"?
    | '[^'\n]*'?
    ''',
    re.VERBOSE | re.DOTALL,
)
_DEEP = re.compile(rb"(?:\.[ \t]*[\w-]+[ \t]*){%d}" % DEPTH)
_UNKNOWN = re.compile(r"unknown field `(?P<field>[^`]*)`(?: - at `(?P<at>[^`]*)`)?")


def load(path: Path, kind: type[T]) -> T:
    """Decode a TOML file into `kind`. Raises ConfigError: the file is missing, a device, too large,
    not TOML, or holds a key or value its schema refuses."""
    if path.exists() and not path.is_file():  # realpath loses /dev/fd/63, a shell's <(command)
        raise ConfigError(f"{path}: not a regular file", remedy="Save it as a TOML file first.")
    try:
        text = reading.small(Path(os.path.realpath(path)), LIMIT)
    except Unreadable as error:
        raise ConfigError(error.message, remedy="Check the name: a TOML file.") from error
    return decode(text, kind, where=str(path))


def decode(text: bytes, kind: type[T], *, where: str) -> T:
    """Decode TOML text into `kind`; `where` names the source in errors."""
    if len(text) > LIMIT or _DEEP.search(_TEXT.sub(b"q", text)):
        raise ConfigError(
            f"{where}: larger than {LIMIT >> 10} KiB, or a key of more than {DEPTH} parts",
            remedy="No such file needs so much: write what its README shows.",
        )
    try:
        return msgspec.toml.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise _explained(error, kind, where) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not TOML: {error}", remedy="Fix the syntax there.") from error


def _explained(error: msgspec.ValidationError, kind: type[Any], where: str) -> ConfigError:
    """Name the valid keys: msgspec says which key is unknown but not which ones exist."""
    match = _UNKNOWN.search(str(error))
    if match is None:
        return ConfigError(f"{where}: {error}", remedy="Fix the value there.")
    names = _fields_at(kind, match["at"] or "$")
    place = (match["at"] or "$").replace("$.", "").replace("$", "top level")
    return ConfigError(
        f"{where}: unknown key '{match['field']}' at {place}",
        remedy=f"Valid keys there: {', '.join(names)}." if names else "Remove the key.",
    )


def _fields_at(kind: Any, at: str) -> list[str]:
    """The field names of the struct that a msgspec path such as `$.arm[...].env` points to."""
    info: Any = msgspec.inspect.type_info(kind)
    for step in re.findall(r"\.([A-Za-z_]\w*)|(\[[^\]]*\])", at):
        info = _descend(info, *step)
        if info is None:
            return []
    info = _struct_of(info)
    return [field.encode_name for field in info.fields] if info is not None else []


def _descend(info: Any, name: str, bracket: str) -> Any:
    if bracket:
        return getattr(info, "value_type", None) or getattr(info, "item_type", None)
    struct = _struct_of(info)
    fields = {field.encode_name: field.type for field in struct.fields} if struct else {}
    return fields.get(name)


def _struct_of(info: Any) -> Any:
    if isinstance(info, msgspec.inspect.UnionType):
        found = (_struct_of(member) for member in info.types)
        return next((member for member in found if member is not None), None)
    return info if isinstance(info, msgspec.inspect.StructType) else None
