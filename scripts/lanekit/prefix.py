"""What stands before a log line: who relayed it. Pure functions over the first bytes of a line.

Launchers, containers and engines each put their own mark in front; a line may carry several.
"""

import re
from typing import Final

import msgspec

ANSI: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\-_])")

_MARKS: Final = re.compile(
    rb"""
    (?:
      \[pod/(?P<pod>[\w.-]+)/[\w.-]+\]                             # kubectl logs --prefix
    | \[\d+,(?P<mpi>\d+)\]<std(?:out|err)>:?                       # mpirun --tag-output
    | \[(?:rank|default)(?P<torch>\d+)\]:                          # torchrun
    | \(\w+(?:[ ]pid=(?P<pid>\d+))(?:,[ ]ip=(?P<ip>[\d.]+))?\)     # vLLM processes, Ray actors
    | \(\w*(?:Worker|EngineCore|APIServer)\w*\)
    | \d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)                  # docker logs -t
    | (?P<compose>[\w.-]+)[ ]*\|                                   # docker compose
    | (?P<srun>\d+):(?=\s)                                         # srun --label
    | (?P<stern>[a-z0-9][a-z0-9.-]*-\d+)[ ][a-z][a-z0-9-]*(?=[ ])  # stern: pod container
    )\ ?
    """,
    re.VERBOSE,
)
_ECHO: Final = re.compile(rb"\++(?:\s|[^\s\d+])")


class Prefix(msgspec.Struct, frozen=True):
    """Whom a line is from, as far as its marks say. echo: a shell's xtrace, never evidence."""

    label: str = ""
    pid: str = ""
    rank: str = ""
    echo: bool = False


def parse(head: bytes) -> Prefix:
    """Read the marks at the start of a line (ANSI allowed, NULs and overwritten text skipped)."""
    text = ANSI.sub(b"", head).strip(b"\0").rpartition(b"\r")[2].lstrip(b"\0 \t")
    label = pid = rank = b""
    while (mark := _MARKS.match(text)) is not None:
        label = mark["pod"] or mark["compose"] or mark["stern"] or mark["ip"] or label
        rank = mark["mpi"] or mark["torch"] or mark["srun"] or rank
        pid = mark["pid"] or pid
        text = text[mark.end() :].lstrip(b" \t\0")
    echo = _ECHO.match(text) is not None
    return Prefix(label.decode(), pid.decode(), rank.decode(), echo)
