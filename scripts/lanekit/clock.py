"""When a log was written: the first and last time that its lines state. Pure.

Engines print local time without a zone, vLLM even without a year, so a log's time is taken as
AIPerf's local time, and as UTC: a container's clock usually is.
"""

import datetime
import re
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

Moment = datetime.datetime

SLACK: Final = datetime.timedelta(seconds=60)  # vLLM prints statistics every 10 s, SGLang oftener
DAY: Final = datetime.timedelta(days=1)
_FORMS: Final = (
    re.compile(rb"(?P<y>20\d\d)-(?P<m>\d\d)-(?P<d>\d\d)[T ](?P<t>\d\d:\d\d:\d\d)"),
    re.compile(rb"\[(?P<m>\d\d)/(?P<d>\d\d)/(?P<y>20\d\d)-(?P<t>\d\d:\d\d:\d\d)\]"),  # TensorRT-LLM
    re.compile(rb" (?:DEBUG|INFO|WARNING|ERROR) (?P<m>\d\d)-(?P<d>\d\d) (?P<t>\d\d:\d\d:\d\d) \["),
)


class Window(msgspec.Struct, frozen=True):
    """The first and last moment of something, by its own clock; last: None where not stated."""

    first: Moment
    last: Moment | None


def window(head: bytes, tail: bytes, near: Moment) -> Window | None:
    """The window of a log from its first and last bytes, in whatever forms its lines state times; a
    year that is not stated is the one that comes nearest to `near`. None when none states one."""
    firsts = [x for form in _FORMS if (x := next(_moments(form, head, near), None)) is not None]
    lasts = (moment for form in _FORMS for moment in _moments(form, tail, near))
    return Window(min(firsts), max(lasts, default=None)) if firsts else None


def stated(data: bytes) -> bytes:
    """The times that bytes state, each once and in their order: all that `window` looks at."""
    found = (match.group() for form in _FORMS for match in form.finditer(data))
    return b"\n".join(dict.fromkeys(found))


def _moments(form: re.Pattern[bytes], data: bytes, near: Moment) -> Iterator[Moment]:
    for match in form.finditer(data):
        parts = {k: v.decode() for k, v in match.groupdict().items()}
        years = [int(parts["y"])] if "y" in parts else range(near.year - 1, near.year + 2)
        found = [m for y in years if (m := _moment(y, parts)) is not None]
        if found:
            yield min(found, key=lambda moment: abs(moment - near))


def _moment(year: int, parts: dict[str, str]) -> Moment | None:
    try:
        return Moment.fromisoformat(f"{year}-{parts['m']}-{parts['d']}T{parts['t']}")
    except ValueError:
        return None


def outside(
    load: Window, logs: Sequence[Window], zone: datetime.timedelta, run: Window | None
) -> Iterator[str]:
    """Why a load point cannot have been served by whoever wrote the logs; nothing where it can.

    load, run: UTC. zone: the offset of local time; the logs' clock is tried as UTC and as local.
    A log whose end states no time (request lines carry none) is not held to its end. A stranger's
    (run: None) may be an excerpt and is held to a day; one of ours lies within its run.
    """
    first = min(x.first for x in logs)
    lasts = [x.last if run else x.first + DAY for x in logs if x.last is not None]
    last = max(lasts) if len(lasts) == len(logs) else None
    for shift in (datetime.timedelta(0), zone):
        begin, end = first - shift, last - shift if last is not None else None
        serves = begin <= load.first + SLACK and (end is None or (load.last or end) <= end + SLACK)
        within = run is None or (
            run.first - SLACK <= begin and (run.last is None or (end or begin) <= run.last + SLACK)
        )
        if serves and within:
            return
    yield f"ran {shown(load)} UTC, the log spans {shown(Window(first, last))}"


def shown(found: Window) -> str:
    """A window for people."""
    end = f"{found.last:%m-%d %H:%M:%S}" if found.last else "an unknown time"
    return f"{found.first:%m-%d %H:%M:%S} to {end}"
