"""A GGUF file becomes the folder it was made from, and a broken one is refused with the reason."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen2Tokenizer

from engine.checkpoints.gguf_convert import convert_gguf
from engine.checkpoints.gguf_file import GGUFFile
from engine.checkpoints.gguf_tokenizer import gguf_tokenizer
from engine.errors import CheckpointError
from tests.engine.checkpoints_gguf_writer import write_gguf
from tests.engine.families import save_tiny
from tests.engine.test_decoder import TOKENS, load, logits_of
from tests.engine.tiny import tiny_gemma3, tiny_llama

TEXT = "The quick brown fox: naïve, 你好 🦊!\n\n  12345 user's <|im_end|> café"
MAKERS = [tiny_llama, tiny_gemma3]
# tied and not; the pattern is llama.cpp's own: every sixth layer is global
SHAPES = {
    "llama": (tiny_llama, {}),
    "llama untied": (tiny_llama, {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "gemma3": (tiny_gemma3, {"num_hidden_layers": 7, "layer_types": None}),
}


def convert(path: Path) -> Path:
    folder = path.with_suffix("")
    folder.mkdir()
    convert_gguf(path, folder, lambda *counts: None)
    return folder


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plain_file_becomes_the_folder_it_was_made_from(shape, tmp_path):
    make, overrides = SHAPES[shape]
    original = make(tmp_path / "original", **overrides)
    folder = convert(write_gguf(original, tmp_path / "m.gguf"))
    expected, found = (load_file(each / "model.safetensors") for each in (original, folder))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=4e-6, rtol=0)  # a norm loses a bit by its + 1
    before, after = load(original), load(folder)
    assert after.traits == before.traits
    assert after.eos_token_ids == before.eos_token_ids and after.bos_token_id == before.bos_token_id
    assert after.chat.template == before.chat.template
    assert after.tokenizer.encode(TEXT).ids == before.tokenizer.encode(TEXT).ids
    torch.testing.assert_close(logits_of(after, TOKENS, 90), logits_of(before, TOKENS, 90), atol=1e-3, rtol=0)


# Family -> changes of its config, so that it is one that llama.cpp's metadata can say, and what else the file says.
FAMILIES = {
    "qwen2": ({"tie_word_embeddings": True}, {}),
    "qwen2, yarn": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 64,
        },
    ),
    "qwen3": ({"head_dim": 48}, {}),
    "gemma2": ({"head_dim": 48, "query_pre_attn_scalar": 48, "sliding_window": 20}, {}),
    "phi3": (
        {"partial_rotary_factor": 0.5, "sliding_window": 20, "original_max_position_embeddings": 256},
        {"phi3.rope.dimension_count": 8, "phi3.attention.sliding_window": 20},
    ),
    "smollm3": ({"num_hidden_layers": 4}, {}),
    "granite": (
        {
            "attention_multiplier": 0.25,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.25,
            "logits_scaling": 8.0,
        },
        {},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_reads_the_same_from_a_gguf_file(name, tmp_path):
    changes, said = FAMILIES[name]
    save_tiny(tmp_path / "original", name.split(",")[0], changes)
    folder = convert(write_gguf(tmp_path / "original", tmp_path / "m.gguf", **said))
    before, after = load(tmp_path / "original"), load(folder)
    assert after.traits == before.traits and after.context_length == before.context_length
    torch.testing.assert_close(logits_of(after, TOKENS, 90), logits_of(before, TOKENS, 90), atol=1e-4, rtol=0)


def test_llama_3_scaling_comes_as_a_tensor(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**scaling, "original_max_position_embeddings": 32, "rope_theta": 5e5}
    save_tiny(tmp_path / "original", "llama", {"rope_parameters": rope, "head_dim": 16})
    before = load(tmp_path / "original")
    plain = [5e5 ** (-2 * i / 16) for i in range(8)]
    factors = [slow / fast for slow, fast in zip(plain, before.traits.layer_ropes[0].inv_freq, strict=True)]
    path = write_gguf(tmp_path / "original", tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    after = load(convert(path))
    assert after.context_length == before.context_length
    torch.testing.assert_close(logits_of(after, TOKENS, 90), logits_of(before, TOKENS, 90), atol=1e-4, rtol=0)


def test_long_rope_comes_as_two_tensors_or_is_refused(tmp_path):
    short, long = [1.0 + 0.25 * i for i in range(8)], [4.0] * 8
    rope = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": 1.25}
    rope |= {"original_max_position_embeddings": 128, "rope_theta": 1e4}
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 128}
    save_tiny(tmp_path / "original", "phi3", changes)
    said = {
        "phi3.rope.scaling.type": "longrope",
        "phi3.rope.scaling.attn_factor": 1.25,
        "phi3.rope.scaling.original_context_length": 128,
    }
    factors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    before = load(tmp_path / "original")
    after = load(convert(write_gguf(tmp_path / "original", tmp_path / "m.gguf", tensors=factors, **said)))
    assert after.traits == before.traits and after.context_length == before.context_length == 128
    with pytest.raises(CheckpointError, match=r"lacks rope_factors_short\.weight"):
        convert(write_gguf(tmp_path / "original", tmp_path / "n.gguf", **said))


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_1", "Q5_0", "F16", "BF16"])
def test_other_types_come_near_and_keep_their_dtype(quantization, tmp_path):
    original = tiny_llama(tmp_path / "original")
    folder = convert(write_gguf(original, tmp_path / "m.gguf", GGMLQuantizationType[quantization]))
    found = load_file(folder / "model.safetensors")
    dtype = torch.float16 if quantization == "F16" else torch.bfloat16
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    for name, tensor in load_file(original / "model.safetensors").items():
        scale = tensor.abs().max()
        assert (found[name].float() - tensor).abs().max() <= 0.08 * scale


def test_a_tensor_of_a_type_that_nobody_reads_is_named(tmp_path):
    file = GGUFFile(write_gguf(tiny_llama(tmp_path / "original"), tmp_path / "m.gguf"))
    name = "output_norm.weight"
    file.tensors[name] = replace(file.tensors[name], type=GGMLQuantizationType.I32)
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor output_norm\.weight is of type I32"):
        list(file.values(name))


def test_a_large_tensor_is_dequantised_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.checkpoints.gguf_file.CHUNK_ELEMENTS", 5 * 64)
    original = tiny_gemma3(tmp_path / "original", num_hidden_layers=6, layer_types=None)
    folder = convert(write_gguf(original, tmp_path / "m.gguf"))
    expected = load_file(original / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load_file(folder / "model.safetensors")["model.embed_tokens.weight"], expected)


def test_progress_counts_tensors(tmp_path):
    path = write_gguf(tiny_llama(tmp_path / "original"), tmp_path / "m.gguf")
    seen = []
    (tmp_path / "out").mkdir()
    convert_gguf(path, tmp_path / "out", lambda *counts: seen.append(counts))
    assert seen == [(done, 29, "tensors") for done in range(30)]


PIECES = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "\u2581",
    "a",
    "b",
    "ab",
    "\u2581ab",
    "  ",
    "\n",
    "<turn>",
    "<0xC3>",
    "<0xA9>",
]


def sentencepiece(prefix: bool | None) -> Tokenizer:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 1, 1, 1, 1, 1, 4, 4, 3, 6, 6],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    metadata |= {} if prefix is None else {"tokenizer.ggml.add_space_prefix": prefix}
    return gguf_tokenizer(metadata)[0]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab", ["ab"]),
        ("a ab b", ["a", "\u2581ab", "\u2581", "b"]),
        ("ab  ab", ["ab", "\u2581", "\u2581ab"]),
        ("  a", ["\u2581\u2581", "a"]),
        ("é\n", ["<0xC3>", "<0xA9>", "\n"]),
        ("a<turn>b", ["a", "<turn>", "b"]),
    ],
)
def test_sentencepiece_merges_follow_from_the_vocabulary(text, pieces):
    tokenizer = sentencepiece(prefix=False)
    encoding = tokenizer.encode(text)
    assert encoding.tokens == ["<bos>", *pieces]
    assert tokenizer.decode(encoding.ids) == text.replace("<turn>", "")


def test_sentencepiece_puts_a_space_in_front_where_the_file_does_not_say_otherwise():
    tokenizer = sentencepiece(prefix=None)
    assert tokenizer.encode("ab").tokens == ["<bos>", "\u2581ab"]
    assert tokenizer.decode(tokenizer.encode("ab a").ids) == "ab a"


def test_smollm_cuts_digits_apart(tmp_path):
    original = tiny_llama(tmp_path / "original")
    metadata = GGUFFile(write_gguf(original, tmp_path / "m.gguf", **{"tokenizer.ggml.pre": "smollm"})).metadata
    merges = [*metadata["tokenizer.ggml.merges"], "1 2"]
    tokens = [*metadata["tokenizer.ggml.tokens"], "12"]
    metadata |= {"tokenizer.ggml.merges": merges, "tokenizer.ggml.tokens": tokens}
    assert gguf_tokenizer(metadata)[0].encode("12").tokens == ["1", "2"]
    assert gguf_tokenizer(metadata | {"tokenizer.ggml.pre": "gpt-2"})[0].encode("12").tokens == ["12"]


def test_qwen_cuts_text_as_transformers_does(tmp_path):
    metadata = GGUFFile(write_gguf(tiny_llama(tmp_path / "original"), tmp_path / "m.gguf")).metadata
    metadata |= {
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.token_type": [],
        "tokenizer.ggml.merges": [*metadata["tokenizer.ggml.merges"], "1 2"],
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "12"],
    }
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs, ours = Qwen2Tokenizer(vocab=vocab, merges=merges), gguf_tokenizer(metadata)[0]
    for text in (TEXT, "the dogs' SUN'S 12345\r\n\n  a\u0301 b"):
        assert ours.encode(text).ids == theirs.encode(text)


REFUSED = {
    "unknown architecture": ({"general.architecture": None}, "architecture None is not supported; supported: llama"),
    "missing size": ({"llama.embedding_length": None}, "does not say llama.embedding_length"),
    "no heads": ({"llama.attention.head_count": 0}, "broken"),
    "heads that do not divide": ({"llama.attention.head_count": 7}, "broken"),
    "text for a number": ({"llama.embedding_length": "wide"}, "broken"),
    "scaled rope": ({"llama.rope.scaling.type": "dynamic"}, "rope scaling 'dynamic'"),
    "unknown tokenizer": ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer 'gpt2'"),
    "unknown pre-tokenizer": ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken'"),
    "broken merges": ({"tokenizer.ggml.merges": ["q zzz"]}, "tokenizer is broken"),
    "token out of range": ({"tokenizer.ggml.eos_token_id": 100_000}, "tokenizer is broken"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_says_too_little_or_too_much_is_refused(case, tmp_path, monkeypatch):
    changes, reason = REFUSED[case]
    if "general.architecture" in changes:
        monkeypatch.setattr(GGUFWriter, "add_architecture", lambda self: None)
    path = write_gguf(tiny_llama(tmp_path / "original"), tmp_path / "m.gguf", **changes)
    with pytest.raises(CheckpointError, match=reason):
        convert(path)


def test_a_tensor_that_we_do_not_compute_with_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.engine.checkpoints_gguf_writer.gguf_name", lambda arch, name: "rope_freqs.weight" + name)
    path = write_gguf(tiny_llama(tmp_path / "original"), tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        convert(path)


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    return write_gguf(tiny_llama(folder / "original"), folder / "m.gguf").read_bytes()


@pytest.mark.parametrize("share", [0.0, 1e-5, 1e-4, 0.001, 0.01, 0.02, 0.5, 0.99, 0.999])
def test_a_file_cut_anywhere_is_refused(share, whole_file, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole_file[: int(len(whole_file) * share)])
    with pytest.raises(CheckpointError, match="cut"):
        convert(path)


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [(0, b"ggml", "not a GGUF file"), (4, struct.pack("<I", 1), "version 1"), (4, struct.pack(">I", 3), "version")],
)
def test_another_magic_or_version_is_refused(at, value, reason, whole_file, tmp_path):
    path = tmp_path / "other.gguf"
    path.write_bytes(whole_file[:at] + value + whole_file[at + len(value) :])
    with pytest.raises(CheckpointError, match=reason):
        convert(path)


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_header_is_refused_or_harmless(seed, whole_file, tmp_path):
    """Never anything but a CheckpointError, and never an allocation as large as a damaged length says."""
    rng = torch.Generator().manual_seed(seed)
    damaged = bytearray(whole_file)
    for place in torch.randint(8, 12_000, (20,), generator=rng).tolist():
        damaged[place] = int(torch.randint(256, (1,), generator=rng))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        convert(path)
    except CheckpointError as error:
        assert str(error)
