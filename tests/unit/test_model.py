"""The stand-in models, byte for byte, and the checks on a model somebody brings."""

import dataclasses
import hashlib
import itertools
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lanekit import model
from lanekit.errors import ModelError

TINY = "tiny-qwen3-moe"
PUBLISHED = "qwen3-30b-a3b-fp8-shape"

# Made on x86_64 with Python 3.11; plain integer arithmetic, so any other digest is a change.
# fmt: off
DIGESTS = {
    TINY: {
        "config.json": "cd7638ecd9d3b792ce7b8a1b287c4e88e1227d045028488423e06565456e35c5",
        "generation_config.json":
            "5dc885659caf732c9623397d4546981569dfa5993054557d74ea2f8823a6fe4e",
        "tokenizer.json": "b8743a16465bf020a619e3df324cd9990ec212195497c8bfd50aaf448f629e7f",
        "tokenizer_config.json": "e3e9af1b9727322455c9bc080403593071a13f269477016db6c825030fda5397",
        "model.safetensors": "fabd436b181965a9f3241dd1b046774bd690b9745721020d143ba528cb7e9812",
    },
    PUBLISHED: {
        "config.json": "c51da677252d985361366b5fd5b6d3ce3e2e983360dd5204581125940c4ff7b6",
        "generation_config.json":
            "8557bd16aa82c67b6069bec751de7900b55ca0bb68e265df067a25cabe8aa7dc",
        "tokenizer.json": "583a74c383aa155e3174adffd6fdc9174a10577a51573cb89a661926ded533cb",
        "tokenizer_config.json": "2b68552323f74e38374c07bcacb5d7f48147e1e6dafa56baabdf481372cb6999",
    },
}
# fmt: on


def made(name: str) -> dict[str, bytes]:
    """Every file of a stand-in that is small enough for memory."""
    shape = model.shape_of(name)
    rest = {"model.safetensors": b"".join(model.weights(shape))} if shape.weights else {}
    return model.files(shape) | rest


@pytest.fixture(name="tiny", scope="module")
def _tiny() -> dict[str, bytes]:
    return made(TINY)


@pytest.mark.parametrize("name", DIGESTS)
def test_every_byte_is_the_same_every_time(name: str) -> None:
    found = {file: hashlib.sha256(data).hexdigest() for file, data in made(name).items()}
    assert found == DIGESTS[name]


def _tensors(data: bytes) -> dict[str, Any]:
    (size,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    return header


def test_the_weights_are_those_that_the_config_describes(tiny: dict[str, bytes]) -> None:
    config = json.loads(tiny["config.json"])
    tensors = _tensors(tiny["model.safetensors"])
    assert tensors["model.embed_tokens.weight"]["shape"] == [1536, 128]
    assert tensors["model.layers.1.mlp.gate.weight"]["shape"] == [16, 128]
    assert tensors["model.layers.0.mlp.experts.15.down_proj.weight"]["shape"] == [128, 64]
    per_layer = 4 + 16 * 3 + 1 + 4  # attention, experts, router, norms
    assert len(tensors) == 3 + config["num_hidden_layers"] * per_layer
    spans = sorted(each["data_offsets"] for each in tensors.values())
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    (size,) = struct.unpack("<Q", tiny["model.safetensors"][:8])
    assert spans[-1][1] == len(tiny["model.safetensors"]) - 8 - size


def _column_0(data: bytes, name: str) -> list[bytes]:
    (size,) = struct.unpack("<Q", data[:8])
    tensor = _tensors(data)[name]
    rows, columns = tensor["shape"]
    begin = 8 + size + tensor["data_offsets"][0]
    places = (begin + 2 * columns * row for row in range(rows))
    return [data[place : place + 2] for place in places]


def test_only_whole_words_can_be_sampled(tiny: dict[str, bytes]) -> None:
    vocab: dict[str, int] = json.loads(tiny["tokenizer.json"])["model"]["vocab"]
    bias = _column_0(tiny["model.safetensors"], "lm_head.weight")
    spoken = {token for token, row in vocab.items() if bias[row] == model.ZERO}
    assert spoken == {token for token in vocab if token[0] == model.SPACE and len(token) > 1}
    assert len(spoken) > 1000
    end = json.loads(tiny["config.json"])["eos_token_id"]
    assert bias[end] == model.SILENCE


def test_the_router_does_not_see_the_constant_channel(tiny: dict[str, bytes]) -> None:
    data = tiny["model.safetensors"]
    assert set(_column_0(data, "model.layers.0.mlp.gate.weight")) == {model.ZERO}
    assert set(_column_0(data, "model.embed_tokens.weight")) == {model.FOUR}


@pytest.mark.parametrize("name", DIGESTS)
def test_the_vocabulary_fills_the_embedding(name: str) -> None:
    files = model.files(model.shape_of(name))
    tokenizer = json.loads(files["tokenizer.json"])
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    assert len(vocab) + 1 == json.loads(files["config.json"])["vocab_size"]
    assert all(left in vocab and right in vocab and left + right in vocab for left, right in merges)
    assert sorted(vocab.values()) == list(range(len(vocab)))
    assert tokenizer["added_tokens"][0]["id"] == len(vocab)


def test_the_published_shape_has_no_weights(tmp_path: Path) -> None:
    path = tmp_path / PUBLISHED
    model.ensure(path)
    model.check(path, weights=False)
    with pytest.raises(ModelError, match="no weights"):
        model.check(path)


def test_a_made_model_is_whole_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "models" / TINY
    model.ensure(path)
    model.check(path)
    made = (path / "model.safetensors").stat().st_ino
    model.ensure(path)
    assert (path / "model.safetensors").stat().st_ino == made
    assert [each.name for each in path.parent.iterdir()] == [TINY]


@pytest.mark.parametrize("recipe", ['{"recipe": "older"}', "", None])
def test_a_model_of_another_version_or_half_made_is_made_anew(
    tmp_path: Path, recipe: str | None
) -> None:
    path = tmp_path / TINY
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"half")
    if recipe is not None:
        (path / model.RECIPE).write_text(recipe)
    model.ensure(path)
    data = (path / "model.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == DIGESTS[TINY]["model.safetensors"]


def test_an_unknown_stand_in_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no stand-in model named 'huge'") as raised:
        model.ensure(tmp_path / "huge")
    assert TINY in raised.value.remedy


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot write the model") as raised:
        model.ensure(tmp_path / "file" / TINY)
    assert "writable" in raised.value.remedy


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; from lanekit import model; model.files(model.shape_of('tiny-qwen3-moe'));"
        "print([m for m in sys.modules if m.split('.')[0] in ('numpy', 'torch', 'transformers')])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# --- a model somebody brings


def _foreign(path: Path) -> Path:
    """A minimal directory in two shards, as hub snapshots have them."""
    path.mkdir()
    (path / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    (path / "tokenizer.json").write_text("{}")
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for shard in shards:
        (path / shard).write_bytes(b"\0" * 16)
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_a_complete_directory_passes(tmp_path: Path) -> None:
    model.check(_foreign(tmp_path / "m"))


def _truncate_config(path: Path) -> None:
    (path / "config.json").write_text('{"architectures": [')


def _empty_config(path: Path) -> None:
    (path / "config.json").write_text("[]")


def _lose_weights(path: Path) -> None:
    for each in path.glob("model*"):
        each.unlink()


def _pointer(path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (path / "model-00001-of-00002.safetensors").write_text(text)


def _break_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": 3}')


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: (path / "config.json").unlink(), "no config.json"),
        (_truncate_config, "config.json is unreadable"),
        (_empty_config, "config.json names no architectures"),
        (lambda path: (path / "tokenizer.json").unlink(), "no tokenizer"),
        (_lose_weights, "no weights"),
        (
            lambda path: (path / "model-00002-of-00002.safetensors").unlink(),
            "1 of 2 weight files are missing, first model-00002-of-00002.safetensors",
        ),
        (_pointer, "model-00001-of-00002.safetensors is a Git LFS pointer"),
        (_break_index, "model.safetensors.index.json is unreadable"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, damage: Callable[[Path], object], named: str
) -> None:
    path = _foreign(tmp_path / "m")
    damage(path)
    with pytest.raises(ModelError, match="cannot be served") as raised:
        model.check(path)
    assert named in raised.value.message
    assert "Hugging Face layout" in raised.value.remedy


def test_everything_missing_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json; no tokenizer; no weights"):
        model.check(tmp_path)


@pytest.mark.parametrize("files", [("tokenizer.model",), ("vocab.json", "merges.txt")])
def test_other_tokenizer_layouts_pass(tmp_path: Path, files: tuple[str, ...]) -> None:
    path = _foreign(tmp_path / "m")
    (path / "tokenizer.json").unlink()
    for file in files:
        (path / file).touch()
    model.check(path)


def test_half_a_tokenizer_does_not_pass(tmp_path: Path) -> None:
    path = _foreign(tmp_path / "m")
    (path / "tokenizer.json").rename(path / "vocab.json")
    with pytest.raises(ModelError, match="no tokenizer"):
        model.check(path)


def test_a_missing_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        model.check(tmp_path / "none")


RANDOM = "qwen3-moe-4layer-random"


def small(name: str) -> model.Shape:
    """The recipe of a big stand-in on a small one."""
    return dataclasses.replace(
        model.shape_of(name), layers=1, hidden=256, heads=2, kv_heads=1, experts=4, top_k=2,
        moe_intermediate=128, vocab=600,
    )  # fmt: skip


def test_a_model_in_block_fp8_has_a_scale_for_every_block() -> None:
    data = b"".join(model.weights(small(RANDOM)))
    tensors = _tensors(data)
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    assert (tensors[name]["dtype"], tensors[name]["shape"]) == ("F8_E4M3", [256, 128])
    scale = tensors[f"{name}_scale_inv"]
    assert (scale["dtype"], scale["shape"]) == ("F32", [2, 1])
    assert tensors["model.layers.0.mlp.gate.weight"]["dtype"] == "BF16"
    quantized = {n for n, each in tensors.items() if each["dtype"] == "F8_E4M3"}
    assert {f"{n}_scale_inv" for n in quantized} == {n for n in tensors if "scale" in n}
    (size,) = struct.unpack("<Q", data[:8])
    assert max(each["data_offsets"][1] for each in tensors.values()) == len(data) - 8 - size


def test_a_model_to_be_trained_is_all_bfloat16() -> None:
    name = f"{RANDOM}-bf16"
    tensors = _tensors(b"".join(model.weights(small(name))))
    assert {each["dtype"] for each in tensors.values()} == {"BF16"}
    assert not [each for each in tensors if "scale" in each]
    assert b"quantization_config" not in model.files(small(name))["config.json"]


def _values(data: bytes, name: str) -> bytes:
    (size,) = struct.unpack("<Q", data[:8])
    begin, end = _tensors(data)[name]["data_offsets"]
    return data[8 + size + begin : 8 + size + end]


def test_fp8_matrices_neither_see_nor_change_the_constant_channel_and_hold_no_nan() -> None:
    data = b"".join(model.weights(small(RANDOM)))
    up = _values(data, "model.layers.0.mlp.experts.0.up_proj.weight")  # 128 rows of 256
    down = _values(data, "model.layers.0.mlp.experts.0.down_proj.weight")  # 256 rows of 128
    assert set(up[0::256]) == {0}
    assert set(down[:128]) == {0}
    rest = {value & 0x7F for value in up[1:256] + down[128:]}
    assert rest == set(range(0x30, 0x40)), "magnitudes in [0.5, 2): neither zero nor NaN (0x7F)"


def test_in_the_skewed_model_no_token_can_choose_the_upper_half() -> None:
    gate = "model.layers.0.mlp.gate.weight"
    even, skewed = (b"".join(model.weights(small(name))) for name in (RANDOM, f"{RANDOM}-skewed"))
    assert _column_0(even, gate) == [model.ZERO] * 4
    assert _column_0(skewed, gate) == [model.ZERO] * 2 + [model.NEVER] * 2
    other = [n for n in _tensors(even) if n != gate and _values(even, n) != _values(skewed, n)]
    assert other == []
