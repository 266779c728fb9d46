"""Read the small files of a drop, which may be anybody's: regular, bounded, and what they say."""

import stat
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from lanekit.errors import Unreadable

T = TypeVar("T")

# The largest seen is a micro sweep's 0.2 MiB. JSON of nothing but `[]` takes 20 times its size in
# memory, so this is 90 MiB at the worst.
LIMIT: Final = 4 << 20


def regular(path: Path) -> None:
    """Refuse what is no plain file: a pipe would never end, a link counts one file twice.

    Raises:
        Unreadable: it is a pipe, a device, a link or a folder, or it does not exist.
    """
    try:
        plain = stat.S_ISREG(path.lstat().st_mode)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}", remedy="Restore the file.") from error
    if not plain:
        raise Unreadable(f"{path}: not a regular file", remedy="Replace it by the file itself.")


def small(path: Path, most: int = LIMIT) -> bytes:
    """The bytes of a file that is never large.

    Raises:
        Unreadable: it is no regular file, cannot be read, or is larger than `most`.
    """
    regular(path)
    try:
        with path.open("rb") as stream:
            found = stream.read(most + 1)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}", remedy="Restore the file.") from error
    if len(found) > most:
        raise Unreadable(f"{path}: larger than {most} bytes", remedy="No run writes such a file.")
    return found


def decoded(text: bytes, kind: type[T], where: str) -> T:
    """JSON text as `kind`; `where` names its source in errors.

    Raises:
        Unreadable: it is not JSON, is nested too deeply, or does not hold what `kind` holds.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError as error:
        raise Unreadable(f"{where}: nested too deeply", remedy="Restore the file.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(f"{where}: {error}", remedy="Restore the file.") from error
