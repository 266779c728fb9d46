"""What a program says that it was given, beside what the plan gives it. Pure.

Programs print their options in their own words: vLLM as a dictionary of what is not its default,
SGLang as a call with all that there are, NCCL each variable that it reads. A log that says another
thing than the plan is of another run.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Final

Values = Mapping[str, str]

INNER: Final = {"compilation_config": "-cc."}  # vLLM's, whose options are given one by one
ANYTHING: Final = "*"  # a usual value: whatever is said where nothing was planned
CHANGED: Final = "?"  # a usual value: the program says what it made of it, whatever was planned
# A string that nobody closes goes on to the end, so that no text is gone through twice.
_TOKEN: Final = re.compile(
    r"""'(?:[^'\\]|\\.)*+(?:'|\\?\Z)|"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[][{}()<>,]""", re.DOTALL
)
_ENUM: Final = re.compile(r"<\w+\.(\w+):(.*)>")
_ODD: Final = re.compile(r"[\s'\"]")


@dataclasses.dataclass(frozen=True)
class Given:
    """Options, as plan.options has them, and all variables of one program."""

    options: Values
    variables: Values


def pairs(said: str) -> Iterator[tuple[str, str]]:
    """The names and values of the inside of a dictionary or a call, as Python prints them."""
    depth = begin = 0
    for token in _TOKEN.finditer(said):
        depth += (token[0] in "[{(<") - (token[0] in "]})>")
        if token[0] == "," and depth == 0:
            yield _pair(said[begin : token.start()])
            begin = token.end()
    yield _pair(said[begin:])


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition(":" if text.lstrip()[:1] in ("'", '"') else "=")
    return name.strip(" '\""), value.strip()


def options(said: str, planned: Values, usual: Values) -> Iterator[str]:
    """Where printed options are not the planned ones: other values, fewer, more.

    usual: what an option is where it is not printed, or where it is printed and was not given; `*`
    names all others. Of a dictionary within, only what is planned or usual is looked at.
    """
    told = dict(pairs(said))
    wanted = {  # `--max-num-seqs` as a program's own name for it
        name.removeprefix("--").replace("-", "_") if name.startswith("--") else name: value
        for name, value in planned.items()
    }
    for whole, prefix in INNER.items():
        inner = pairs(told.pop(whole, "")[1:-1])
        told |= {
            f"{prefix}{name}": value
            for name, value in inner
            if f"{prefix}{name}" in {*wanted, *usual}
        }
    for name in sorted({*told, *wanted}):
        want = wanted.get(name, usual.get(name, usual.get(ANYTHING)))
        got = told.get(name, usual.get(name))
        if want == ANYTHING or usual.get(name) == CHANGED:
            continue
        if want is None or got is None or not _same(got, want):
            yield f"{name} {_shown(got)}, planned {_shown(want)}"


def variable(name: str, said: str, planned: Values, usual: Values) -> str:
    """How a variable that a program says it was given is not the planned one; empty if it is."""
    want = planned.get(name, usual.get(name, usual.get(ANYTHING)))
    if want == ANYTHING or (want is not None and (_same(said, want) or _equal(said, want))):
        return ""
    return f"{name} {_shown(said)}, planned {_shown(want)}"


def _same(said: str, planned: str) -> bool:
    """Whether a printed value is the planned one: `['x']` is x, `<Mode.NONE: 0>` NONE and 0, and
    1800.0 is 1800."""
    bare, want = _ODD.sub("", said), _ODD.sub("", planned)
    enum = _ENUM.fullmatch(bare)
    known = {bare, bare.removesuffix(".0"), *(enum.groups() if enum else ())}
    return want in known or bare == f"[{want}]"


def _equal(said: str, planned: str) -> bool:
    """Whether both are one number: NCCL reads 0x10 and prints 16."""
    with contextlib.suppress(ValueError):
        return int(said, 0) == int(planned, 0)
    return False


def _shown(value: str | None) -> str:
    return "nothing" if value is None else value[:80]
