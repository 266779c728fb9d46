"""The stand-in models of the lanes, and the checks on a model somebody brings.

`ensure` makes a Qwen3-MoE and its byte-level BPE tokenizer in the Hugging Face layout from nothing
but this file and resources/qwen3-moe.json: integer arithmetic and SHAKE-256, no library, no
download, so every byte is the same on every machine and every Python. Tests hold the digests.

`tiny-qwen3-moe` has random weights and is served on a CPU. `qwen3-30b-a3b-fp8-shape` is the
published model's shape without weights, for an engine that makes them up (`--load-format dummy`).
`qwen3-moe-4layer-random` has four layers of that shape and real random weights in block FP8, so
that what it answers depends on every exchange; in its `-skewed` sister no token ever chooses an
expert of the upper half, which leaves one of two ranks without any. The `-bf16` one, 5 GB, is to be
trained.

AIPerf counts output by tokenizing the text, so a model that babbles raw bytes seems to answer fewer
tokens than it was asked for. Hence a vocabulary of made-up words, nearly every one a token that
tokenizes back to itself, and in the tiny model no other token can be sampled: channel 0 of its
residual stream is a constant, which `lm_head` uses as the bias that Qwen3 does not have. Nothing
else sees or changes channel 0: its constant would drown the rest, and every answer would become
one token for ever (seen 2026-11-30).
"""

import hashlib
import itertools
import json
import math
import operator
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from lanekit.errors import ModelError

CONSONANTS: Final = "tnshrdlcmwfgypbvkjzq"
VOWELS: Final = "eaoiu"
END_OF_TEXT: Final = "<|endoftext|>"
SPACE: Final = "\u0120"  # how a byte-level BPE spells the space before a word
TEMPLATES: Final = Path(__file__).parent / "resources" / "qwen3-moe.json"
RECIPE: Final = "recipe.json"  # written last: which version of this file made the directory

# bfloat16 bit patterns, little endian.
ONE: Final = b"\x80\x3f"  # 1.0
ZERO: Final = b"\x00\x00"  # 0.0
FOUR: Final = b"\x80\x40"  # 4.0, the constant channel: about 10 after the final norm
SILENCE: Final = b"\x80\xc0"  # -4.0 against the constant channel: a logit of about -40
NEVER: Final = b"\x00\xc0"  # -2.0 against it in a router: about 20 below the others

# Magnitudes of random bfloat16 values, as their high byte (the last exponent bit is random too).
USUAL: Final = 0x3C  # [2^-7, 2^-5), near the usual 0.02
FOURFOLD: Final = 0x3D
SIXTEENFOLD: Final = 0x3E

BLOCK: Final = 128  # rows and columns that share an FP8 scale
FP8_RMS: Final = 1.159  # of what _random_fp8 makes


@dataclass(frozen=True)
class Tensor:
    """One tensor of a weight file. dtype: as safetensors spells it. size: bytes. make: its bytes,
    made when they are written, so that a big model never stands in memory."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    size: int
    make: Callable[[], bytes]


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3-MoE, in the words of its config.json.

    weights: whether any are written. embed, router, head, rest: magnitudes of bfloat16 weights, a
    high byte.
    skewed: no token chooses an expert of the upper half.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    moe_intermediate: int
    vocab: int
    positions: int
    rope_theta: float
    fp8: bool
    weights: bool
    embed: int = USUAL
    router: int = USUAL
    head: int = USUAL
    rest: int = USUAL
    skewed: bool = False


# Four layers of the published shape, block FP8 as it has, a vocabulary that is quick to write;
# 2.5 GB. Block FP8 is a rough sea: a last bit of bfloat16 grows at every quantization, and with
# sublayers as large as the residual stream it changed every fourth token (a torch rehearsal on a
# CPU, 2026-11-30). With sublayers of about a tenth and a fifth of it, a sum over two ranks moves a
# logprob by 0.5 at most, while experts that are swapped or missing move half of all positions by
# more than 0.9. The router is wide, so that the eighth of the chosen experts weighs about 2 %: a
# last bit may swap it with the ninth, and that is no wrong answer.
_RANDOM: Final = Shape(
    layers=4, hidden=2048, intermediate=6144, heads=32, kv_heads=4, head_dim=128, experts=128,
    top_k=8, moe_intermediate=768, vocab=4096, positions=8192, rope_theta=1e6, fp8=True,
    weights=True, embed=SIXTEENFOLD, router=FOURFOLD, head=FOURFOLD,
)  # fmt: skip

SHAPES: Final = {
    # Small enough to start at once, MoE enough to route. Multiples of 32 keep vLLM's grouped GEMM.
    "tiny-qwen3-moe": Shape(
        layers=2, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32, experts=16,
        top_k=4, moe_intermediate=64, vocab=1536, positions=4096, rope_theta=1e4, fp8=False,
        weights=True, embed=SIXTEENFOLD, router=SIXTEENFOLD, head=SIXTEENFOLD, rest=FOURFOLD,
    ),
    # Qwen/Qwen3-30B-A3B-FP8, the model of the published serving rows.
    "qwen3-30b-a3b-fp8-shape": Shape(
        layers=48, hidden=2048, intermediate=6144, heads=32, kv_heads=4, head_dim=128, experts=128,
        top_k=8, moe_intermediate=768, vocab=151936, positions=40960, rope_theta=1e6, fp8=True,
        weights=False,
    ),
    "qwen3-moe-4layer-random": _RANDOM,
    "qwen3-moe-4layer-random-skewed": replace(_RANDOM, skewed=True),
    "qwen3-moe-4layer-random-bf16": replace(_RANDOM, fp8=False),
}  # fmt: skip


def _byte_alphabet() -> list[str]:
    """One printable character for each of the 256 byte values (the GPT-2 convention)."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(value) if value in kept else chr(next(moved)) for value in range(256)]


def _merges(count: int) -> list[tuple[str, str]]:
    """`count` merges in rank order: syllables, then words of one, two and three syllables."""
    syllables = [first + second for first in CONSONANTS for second in VOWELS]
    words = itertools.product(syllables, repeat=3)
    chain = itertools.chain(
        ((syllable[0], syllable[1]) for syllable in syllables),
        ((SPACE, syllable) for syllable in syllables),
        ((SPACE + one, two) for one, two in itertools.product(syllables, repeat=2)),
        ((SPACE + one + two, three) for one, two, three in words),
    )
    return list(itertools.islice(chain, count))


def _template(name: str) -> dict[str, Any]:
    """A file of resources/qwen3-moe.json, null where its values are a shape's."""
    found: dict[str, Any] = json.loads(TEMPLATES.read_bytes())[name]
    return found


def _tokenizer(shape: Shape) -> dict[str, Any]:
    alphabet = _byte_alphabet()
    merges = _merges(shape.vocab - len(alphabet) - 1)
    tokens = alphabet + [left + right for left, right in merges]
    made = _template("tokenizer")
    made["added_tokens"][0] |= {"id": len(tokens), "content": END_OF_TEXT}
    vocab = {token: index for index, token in enumerate(tokens)}
    made["model"] |= {"vocab": vocab, "merges": merges}
    return made


def _config(shape: Shape) -> dict[str, Any]:
    made = _template("config") | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.moe_intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "rope_theta": shape.rope_theta,
        "bos_token_id": shape.vocab - 1,
        "eos_token_id": shape.vocab - 1,
    }
    parts = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    kept = [f"model.layers.{layer}.{part}" for layer in range(shape.layers) for part in parts]
    quantization = _template("quantization_config") | {"modules_to_not_convert": ["lm_head", *kept]}
    return made | ({"quantization_config": quantization} if shape.fp8 else {})


def _random(name: str, count: int, high: int = USUAL) -> bytes:
    """`count` bfloat16 values of either sign in two binades, by name."""
    low = hashlib.shake_256(f"{name}/low".encode()).digest(count)
    sign = hashlib.shake_256(f"{name}/sign".encode()).digest(count)
    out = bytearray(2 * count)
    out[0::2] = low
    out[1::2] = sign.translate(bytes(high if value < 128 else high | 0x80 for value in range(256)))
    return bytes(out)


def _random_bf16(name: str, rows: int, columns: int, high: int, blind: str) -> bytes:
    """A random matrix. blind: "in" for one that must not see channel 0 and "out" for one that must
    not change it."""
    seen = _random(name, rows * columns, high)
    if blind == "in":
        return _with_channel_0(seen, columns, [ZERO] * rows)
    return ZERO * columns + seen[2 * columns :]


def _random_fp8(name: str, rows: int, columns: int, blind: str) -> bytes:
    """E4M3 values of either sign in [0.5, 2), by name; blind as in `_random_bf16`."""
    values = hashlib.shake_256(name.encode()).digest(rows * columns)
    out = bytearray(
        values.translate(bytes(each & 0x80 | 0x30 + (each & 15) for each in range(256)))
    )
    if blind == "in":
        out[0::columns] = bytes(rows)
    else:
        out[:columns] = bytes(columns)
    return bytes(out)


def _scales(name: str, count: int, rms: float) -> bytes:
    """`count` float32 scales of FP8 blocks around `rms`; they differ, so swapped blocks show."""
    drawn = hashlib.shake_256(name.encode()).digest(count)
    return struct.pack(f"<{count}f", *(rms / FP8_RMS * (0.625 + each % 4 / 4) for each in drawn))


def _with_channel_0(matrix: bytes, columns: int, values: list[bytes]) -> bytes:
    out = bytearray(matrix)
    for row, value in enumerate(values):
        out[2 * columns * row : 2 * columns * row + 2] = value
    return bytes(out)


def _bf16(name: str, dims: tuple[int, ...], make: Callable[[], bytes]) -> Tensor:
    return Tensor(name, "BF16", dims, 2 * math.prod(dims), make)


def _matrix(shape: Shape, name: str, rows: int, columns: int, rms: float) -> Iterator[Tensor]:
    """A projection: bfloat16, or FP8 with a scale a block. rms: of the FP8 one's values."""
    full = f"{name}.weight"
    blind = "out" if name.endswith(("o_proj", "down_proj")) else "in"
    if not shape.fp8:
        make = partial(_random_bf16, full, rows, columns, shape.rest, blind)
        yield _bf16(full, (rows, columns), make)
        return
    make = partial(_random_fp8, full, rows, columns, blind)
    yield Tensor(full, "F8_E4M3", (rows, columns), rows * columns, make)
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    count, scale = blocks[0] * blocks[1], f"{full}_scale_inv"
    yield Tensor(scale, "F32", blocks, 4 * count, partial(_scales, scale, count, rms))


def _router(shape: Shape, name: str) -> bytes:
    """It does not see channel 0, unless to keep tokens away from the upper half of the experts."""
    seen = _random(name, shape.experts * shape.hidden, shape.router)
    away = shape.experts // 2 if shape.skewed else 0
    values = [ZERO] * (shape.experts - away) + [NEVER] * away
    return _with_channel_0(seen, shape.hidden, values)


def _layer(shape: Shape, prefix: str) -> Iterator[Tensor]:
    hidden, width = shape.hidden, shape.moe_intermediate
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    one = hidden**-0.5  # keeps a vector as long as it was
    matrices = {f"self_attn.{part}_proj": (key, hidden, one) for part in "kv"}
    matrices |= {
        "self_attn.q_proj": (query, hidden, one),
        "self_attn.o_proj": (hidden, query, 0.1 * query**-0.5),
    }
    for expert in range(shape.experts):
        matrices[f"mlp.experts.{expert}.gate_proj"] = (width, hidden, one)
        matrices[f"mlp.experts.{expert}.up_proj"] = (width, hidden, one)
        matrices[f"mlp.experts.{expert}.down_proj"] = (hidden, width, 0.2 * width**-0.5)
    for name, (rows, columns, rms) in matrices.items():
        yield from _matrix(shape, f"{prefix}.{name}", rows, columns, rms)
    router = f"{prefix}.mlp.gate.weight"
    yield _bf16(router, (shape.experts, hidden), partial(_router, shape, router))
    for name, size in (
        ("input_layernorm", hidden),
        ("post_attention_layernorm", hidden),
        ("self_attn.q_norm", shape.head_dim),
        ("self_attn.k_norm", shape.head_dim),
    ):
        yield _bf16(f"{prefix}.{name}.weight", (size,), partial(operator.mul, ONE, size))


def _tensors(shape: Shape, spoken: range) -> Iterator[Tensor]:
    rows, hidden = shape.vocab, shape.hidden
    bias = [ZERO if row in spoken else SILENCE for row in range(rows)]

    def edge(name: str, high: int, values: list[bytes]) -> bytes:
        return _with_channel_0(_random(name, rows * hidden, high), hidden, values)

    embed = partial(edge, "embed", shape.embed, [FOUR] * rows)
    yield _bf16("model.embed_tokens.weight", (rows, hidden), embed)
    yield _bf16("lm_head.weight", (rows, hidden), partial(edge, "lm_head", shape.head, bias))
    yield _bf16("model.norm.weight", (hidden,), partial(operator.mul, ONE, hidden))
    for layer in range(shape.layers):
        yield from _layer(shape, f"model.layers.{layer}")


def _safetensors(tensors: list[Tensor]) -> Iterator[bytes]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for each in tensors:
        span = [offset, offset + each.size]
        header[each.name] = {"dtype": each.dtype, "shape": each.dims, "data_offsets": span}
        offset += each.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    yield from (each.make() for each in tensors)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def shape_of(name: str) -> Shape:
    """The shape of the stand-in `name`. Raises ModelError: no stand-in has this name."""
    shape = SHAPES.get(name)
    if shape is None:
        raise ModelError(
            f"MODEL: no stand-in model named '{name}'",
            remedy=f"Known: built:{', built:'.join(sorted(SHAPES))}.",
        )
    return shape


def files(shape: Shape) -> dict[str, bytes]:
    """Every file but the weights, the same bytes every time."""
    end = shape.vocab - 1
    tokenizer_config = _template("tokenizer_config") | {
        "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "model_max_length": shape.positions,
    }  # fmt: skip
    return {
        "config.json": _json(_config(shape)),
        "generation_config.json": _json({"bos_token_id": end, "eos_token_id": end}),
        "tokenizer.json": _json(_tokenizer(shape)),
        "tokenizer_config.json": _json(tokenizer_config),
    }


def weights(shape: Shape) -> Iterator[bytes]:
    """The weight file in pieces, the same bytes every time; only words can be sampled."""
    vocab = _tokenizer(shape)["model"]["vocab"]
    spoken = range(vocab[SPACE + CONSONANTS[0] + VOWELS[0]], shape.vocab - 1)
    return _safetensors(list(_tensors(shape, spoken)))


def ensure(path: Path) -> None:
    """Make the stand-in that `path` is named after, whole or not at all; kept while it is current.
    Raises ModelError: no stand-in has this name, or it cannot be written."""
    made_from = Path(__file__).read_bytes() + TEMPLATES.read_bytes()
    recipe = _json({"recipe": hashlib.sha256(made_from).hexdigest()})
    try:
        if (path / RECIPE).is_file() and (path / RECIPE).read_bytes() == recipe:
            return
        shape = shape_of(path.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
            new = Path(scratch) / "new"
            new.mkdir()
            for file, data in (files(shape) | {RECIPE: recipe}).items():
                (new / file).write_bytes(data)
            if shape.weights:
                with (new / "model.safetensors").open("wb") as stream:
                    stream.writelines(weights(shape))
            if path.exists():
                os.replace(path, Path(scratch) / "old")
            os.replace(new, path)
    except OSError as error:
        free = shutil.disk_usage(path.anchor).free // 2**20
        raise ModelError(
            f"cannot write the model {path}: {error.strerror or error}",
            remedy=f"Make the folder writable, with some space free ({free} MiB on {path.anchor}).",
        ) from error


TOKENIZERS: Final = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt")
POINTER: Final = b"version https://git-lfs"


def check(path: Path, *, weights: bool = True) -> None:
    """Refuse a directory that no engine could serve, naming everything that is missing.

    weights: whether weight files are needed (an engine with dummy weights needs none). Raises
    ModelError: not a directory, no config.json, no tokenizer, no weights, a shard that its index
    names and that is not there, or a Git LFS pointer in place of a file.
    """
    if not path.is_dir():
        raise ModelError(f"MODEL: {path} is not a directory", remedy="Name an existing directory.")
    lacking = [*_config_faults(path), *_tokenizer_faults(path)]
    if weights:
        lacking += _weight_faults(path)
    if lacking:
        raise ModelError(
            f"MODEL: {path} cannot be served: {'; '.join(lacking)}",
            remedy="Give a complete directory in the Hugging Face layout: config.json, a tokenizer "
            f"({' or '.join(' + '.join(names) for names in TOKENIZERS)}) and the weights.",
        )


def _config_faults(path: Path) -> list[str]:
    try:
        config = json.loads((path / "config.json").read_bytes())
    except FileNotFoundError:
        return ["no config.json"]
    except (OSError, ValueError) as error:
        return [f"config.json is unreadable ({error})"]
    named = isinstance(config, dict) and config.get("architectures")
    return [] if named else ["config.json names no architectures"]


def _tokenizer_faults(path: Path) -> list[str]:
    if any(all((path / name).is_file() for name in names) for names in TOKENIZERS):
        return []
    return ["no tokenizer"]


def _weight_faults(path: Path) -> list[str]:
    found = sorted(each for pattern in WEIGHTS for each in path.glob(pattern))
    pointers = [each.name for each in found if _starts_with(each, POINTER)]
    faults = [f"{name} is a Git LFS pointer (run `git lfs pull`)" for name in pointers[:3]]
    for index in sorted(path.glob("*.index.json")):
        faults += _index_faults(index)
    return faults if found or faults else ["no weights"]


def _index_faults(index: Path) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{index.name} is unreadable"]
    missing = [shard for shard in shards if not (index.parent / str(shard)).is_file()]
    if not missing:
        return []
    return [f"{len(missing)} of {len(shards)} weight files are missing, first {missing[0]}"]


def _starts_with(path: Path, prefix: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(prefix)) == prefix
    except OSError:
        return False
