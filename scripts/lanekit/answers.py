"""The coherence gate's questions, and the answers that a drop keeps.

`lanes/contracts/coherence.toml` holds what is asked and how far answers may be apart;
`coherence/answers.jsonl` in a drop is one header and one line an answer.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lanekit import paths, reading, toml
from lanekit.errors import Unreadable

NAME: Final = "coherence/answers.jsonl"
REFERENCE: Final = "coherence/reference.jsonl"
SILENT: Final = "no tokens with logprobs"  # the error of an answer to which nothing is wrong else
ID: Final = "token_id:"  # how vLLM spells a token that was asked for as its number


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text, said so many times in a row."""

    id: str
    text: str
    times: int = 1


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked. batches: so many of the first prompts at once. tokens, logprobs: wanted of
    each answer. deadline_s: for all of it."""

    batches: tuple[int, ...]
    tokens: int
    logprobs: int
    seed: int
    deadline_s: float
    prompt: tuple[Prompt, ...]

    def places(self) -> list[tuple[int, Prompt]]:
        """Every question as (batch, prompt), in the order they are asked."""
        return [(batch, each) for batch in self.batches for each in self.prompt[:batch]]


class Tolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far two answers may be apart; the file says why. logprob, far: nats. outliers: share of
    compared positions. decisive: positions."""

    logprob: float
    outliers: float
    far: float
    decisive: int


class Questions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gate's file."""

    version: int
    ask: Ask
    tolerance: Tolerance


class Header(msgspec.Struct, frozen=True, tag_field="kind", tag="answers"):
    """Whose answers these are. questions: the digest of what was asked. model: its source."""

    questions: str
    lane: str
    arm: str
    profile: str
    model: str
    dummy_weights: bool
    drop: str
    v: int = 1


class Answer(msgspec.Struct, frozen=True, tag_field="kind", tag="answer"):
    """One answer. logprobs, top: nats, by position; None is a number that was none. prompt_tokens:
    as the engine counted them. error: why there is no answer."""

    prompt: str
    batch: int
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    top: tuple[dict[str, float | None], ...] = ()
    prompt_tokens: int | None = None
    text: str = ""
    error: str = ""

    @property
    def place(self) -> tuple[str, int]:
        """Prompt and batch, by which answers are compared."""
        return self.prompt, self.batch


class Answers(msgspec.Struct, frozen=True):
    """What a drop keeps of its gate."""

    header: Header
    answers: tuple[Answer, ...]


def questions(folder: Path = paths.CONTRACTS) -> Questions:
    """The gate's file. Raises ConfigError: it is missing or does not fit its schema."""
    return toml.load(folder / "coherence.toml", Questions)


def digest(ask: Ask) -> str:
    """sha256, in hex, of what is asked: answers to other questions are not compared."""
    return hashlib.sha256(msgspec.json.encode(ask)).hexdigest()


def encode(header: Header, found: Sequence[Answer]) -> bytes:
    """The lines of a file of answers."""
    return msgspec.json.Encoder().encode_lines([header, *found])


def read(path: Path) -> Answers:
    """A file of answers. Raises Unreadable: no regular file, too large, or not what `encode`
    writes."""
    text = reading.small(path)
    try:
        decode = msgspec.json.Decoder(Header | Answer).decode
        first, *rest = (decode(line) for line in text.splitlines() if line.strip())
    except (ValueError, RecursionError) as error:  # msgspec's and Unicode's are ValueErrors
        raise Unreadable(f"{path}: {error}", remedy="Restore the file.") from error
    if not isinstance(first, Header) or any(isinstance(each, Header) for each in rest):
        raise Unreadable(f"{path}: not one header and its answers", remedy="Restore the file.")
    return Answers(first, tuple(each for each in rest if isinstance(each, Answer)))


def parse(prompt: str, batch: int, reply: Any) -> Answer:
    """An answer from the reply of /v1/completions, whatever it is."""
    try:
        choice = reply["choices"][0]
        said = choice["logprobs"]
        return Answer(
            prompt=prompt,
            batch=batch,
            tokens=tuple(_name(each) for each in said["tokens"]),
            logprobs=tuple(_finite(each) for each in said["token_logprobs"]),
            top=tuple(
                {_name(token): _finite(value) for token, value in (each or {}).items()}
                for each in said["top_logprobs"]
            ),
            prompt_tokens=int(reply["usage"]["prompt_tokens"]),
            text=str(choice.get("text", ""))[:1000],
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        return Answer(prompt, batch, error=f"{SILENT}: {type(error).__name__}")


def _name(token: object) -> str:
    return str(token).removeprefix(ID)


def _finite(value: Any) -> float | None:
    number = float(value) if isinstance(value, int | float) else math.nan
    return round(number, 4) if math.isfinite(number) else None
