"""What stands before a log line's own text: who relayed it, and the speaker's own stamp. Pure.

Launchers, containers and engines each put their own mark in front; a line may carry several. A line
says something where its own text begins, and nowhere else: what stands further in is quoted there,
in a request, a setting or a shell's echo.
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
    | \(\w+(?:\[rank=\d+\])?[ ]pid=(?P<pid>\d+)                    # vLLM processes, Ray actors
      (?:,[ ]ip=(?P<ip>[\d.]+))?\)
    | \(\w*(?:Worker|EngineCore|APIServer)\w*\)
    | \d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)                  # docker logs -t
      (?:[ ]std(?:out|err)[ ][FP](?=[ ]))?                         # and a kubelet's own file
    | (?<!.)(?P<compose>[\w.-]+-\d+)[ ]+\|(?=[ ])                  # docker compose
    | (?<!.)(?P<stern>[a-z0-9][a-z0-9.-]*-\d+)                     # stern: pod container
      [ ](?:vllm|sglang|trtllm|server|leader|worker|engine)(?=[ ])
    | (?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[ ]                     # vLLM 0.24.0 logger.py
      \d\d-\d\d[ ]\d\d:\d\d:\d\d[ ]\[[^][\s]{1,200}\]
    | \[\d{4}-\d\d-\d\d[ ]\d\d:\d\d:\d\d(?:\.\d+)?(?:[ ]\w+)*\]    # SGLang 0.5.23, NCCL
    | (?:\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\][ ])?\[TRT-LLM\]         # TensorRT-LLM 0.21.0
      (?:[ ]\[RANK[ ]\d+\])?[ ]\[\w\]
    | INFO:[ ]+[\da-f.:\[\]]+:\d{1,5}[ ]-(?=[ ]")                  # uvicorn's access log
    | \d{4}-\d\d-\d\d[ ]\d\d:\d\d:\d\d[ ]+(?:DEBUG|INFO|WARN|ERROR)    # vllm-router 0.1.17
      [ ][\w:]{1,80}:[ ]src/[\w./]{1,80}:\d+:(?=[ ])
    )[ \t\0]*
    """,
    re.VERBOSE,
)
_BLANK: Final = re.compile(rb"[ \t\0]*")
_ECHO: Final = re.compile(rb"\++(?:\s|[^\s\d+])")
_QUOTE: Final = re.compile(rb"(?<!\\)'")
# A line of NCCL's up to its text. Its output is cut where its buffer ends, and the next writer's
# line follows at once: `... commId 0x62f2c2056[lane-evidence] v=1 ...` (2026-11-30, two H200).
_NCCL: Final = re.compile(
    rb"[A-Za-z0-9][\w.-]{0,252}:\d{1,10}:\d{1,10} \[-?\d{1,10}\] NCCL (?:INFO|WARN) "
)
_SPEAKER: Final = re.compile(rb"\(\w+[^() ]* pid=\d+[^()]*\) $")
_QUOTED: Final = re.compile(rb"[\"'`{}]")  # NCCL quotes nobody's words


class Prefix(msgspec.Struct, frozen=True):
    """Whom a line is from, as far as its marks say. echo: a shell's xtrace, never evidence."""

    label: str = ""
    pid: str = ""
    rank: str = ""
    echo: bool = False


def parse(head: bytes) -> Prefix:
    """Read the marks at the start of a line (ANSI allowed, NULs and overwritten text skipped)."""
    text = ANSI.sub(b"", head).strip(b"\0\r").rpartition(b"\r")[2]
    return split(text)[0]


def split(text: bytes) -> tuple[Prefix, int]:
    """The marks at the start of a line without ANSI, and where its own text begins."""
    label = pid = rank = b""
    blank = _BLANK.match(text)
    at = blank.end() if blank else 0
    while (mark := _MARKS.match(text, at)) is not None:
        pod, mpi, torch, process, ip, compose, stern = mark.groups()
        label = pod or compose or stern or ip or label
        rank = mpi or torch or rank
        pid = process or pid
        at = mark.end()
    echo = text[at : at + 1] == b"+" and _ECHO.match(text, at) is not None
    return Prefix(label.decode(), pid.decode(), rank.decode(), echo), at


def torn(line: bytes, at: int) -> int:
    """Where the text of a line of NCCL's begins that starts at `at`; -1 where none does."""
    head = _NCCL.match(line, at)
    return head.end() if head else -1


def spaced(text: bytes) -> bool:
    """Whether a sentence stands before what follows: a cut line has no space at its end, but for
    one behind the process that speaks next."""
    return text.endswith(b" ") and _SPEAKER.search(text) is None


def quotes(text: bytes) -> bool:
    """Whether a piece of a line holds a quote or a brace, as nothing of NCCL's does."""
    return _QUOTED.search(text) is not None


def echoing(lines: bytes, inside: bool = False) -> bool:
    """Whether whole lines end inside a quoted word of a shell's xtrace, which goes on for as many
    lines as the word has. inside: they begin in one."""
    if inside or b"+ " in lines:
        for line in lines.split(b"\n"):
            odd = len(_QUOTE.findall(line)) % 2 == 1
            inside = inside != odd if inside else odd and parse(line[:256]).echo
    return inside
