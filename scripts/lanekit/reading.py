"""Read the small files of a drop, which may be anybody's: regular, bounded, and what they say."""

import stat
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from lanekit.errors import Unreadable, saying

T = TypeVar("T")


class Versioned(Protocol):
    """What says of which format it is."""

    @property
    def v(self) -> int:
        """The format's number."""


V = TypeVar("V", bound=Versioned)

# The largest seen is a micro sweep's 0.2 MiB. JSON of nothing but `[]` takes 20 times its size in
# memory, so this is 90 MiB at the worst.
LIMIT: Final = 4 << 20


def regular(path: Path) -> None:
    """Refuse what is no plain file: a pipe would never end, a link counts one file twice. Raises
    Unreadable: it is a pipe, a device, a link or a folder, or it does not exist."""
    with saying(path, "Restore the file.", Unreadable):
        plain = stat.S_ISREG(path.lstat().st_mode)
    if not plain:
        raise Unreadable(f"{path}: not a regular file", remedy="Replace it by the file itself.")


def small(path: Path, most: int = LIMIT) -> bytes:
    """The bytes of a file that is never large. Raises Unreadable: it is no regular file, cannot be
    read, or is larger than `most`."""
    regular(path)
    with saying(path, "Restore the file.", Unreadable), path.open("rb") as stream:
        found = stream.read(most + 1)
    if len(found) > most:
        raise Unreadable(f"{path}: larger than {most} bytes", remedy="No run writes such a file.")
    return found


def decoded(text: bytes, kind: type[T], where: str) -> T:
    """JSON text as `kind`; `where` names its source in errors. Raises Unreadable: it is not JSON,
    is nested too deeply, or does not hold what `kind` holds."""
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError as error:
        raise Unreadable(f"{where}: nested too deeply", remedy="Restore the file.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(f"{where}: {error}", remedy="Restore the file.") from error


def lines(path: Path, kind: type[V], form: int) -> list[V]:
    """The records of a small file, one a line. Raises Unreadable: a line is no record of that
    format, or the file cannot be read."""
    found = []
    for number, line in enumerate(small(path).splitlines(), 1):
        record = decoded(line, kind, where := f"{path}:{number}")
        if record.v != form:
            raise Unreadable(
                f"{where}: format {record.v}, this harness reads {form}",
                remedy="Use the harness the drop was made with; its git commit is in the manifest.",
            )
        found.append(record)
    return found


def dig(thing: Any, *path: str | int) -> Any:
    """What stands at a path of objects and lists; None where nothing does."""
    for step in path:
        if isinstance(step, str) and isinstance(thing, dict):
            thing = thing.get(step)
        elif isinstance(step, int) and isinstance(thing, list) and len(thing) > step:
            thing = thing[step]
        else:
            return None
    return thing


def text(value: object) -> str | None:
    """A string; None for anything else."""
    return value if isinstance(value, str) else None


def table(value: object) -> dict[str, Any]:
    """An object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def array(value: object) -> list[Any]:
    """A list; an empty one for anything else."""
    return value if isinstance(value, list) else []
