"""A folder becomes a Runner that computes what transformers computes, or is refused in words that say why."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import kernels
from engine.architectures import Runner, load_checkpoint
from engine.architectures.runner import DIGEST_FILE, checkpoint_digest
from engine.errors import CheckpointError
from engine.kv.geometry import GroupGeometry
from kernels.reference import ReferenceBackend
from kernels.spec import weight_shapes
from tests.engine.tiny import BOS, END_OF_TURN, EOS, IM_END, tiny_gemma3, tiny_llama
from tests.kernels.decoders import Pages

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
NESTED_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
}

VARIANTS = {
    "llama": (tiny_llama, {}),
    "llama untied": (tiny_llama, {"tie_word_embeddings": False}),
    "llama linear rope": (tiny_llama, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama 3 rope": (tiny_llama, {"rope_scaling": LLAMA3_ROPE, "rope_theta": 5e5}),
    "llama new rope": (tiny_llama, {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500.0}}),
    "llama without head_dim": (tiny_llama, {"head_dim": None, "hidden_size": 128}),
    "llama all heads": (tiny_llama, {"num_key_value_heads": 4}),
    "gemma3": (tiny_gemma3, {}),
    "gemma3 by pattern": (tiny_gemma3, {"layer_types": None, "sliding_window_pattern": 3}),
    "gemma3 all global": (tiny_gemma3, {"layer_types": ["full_attention"] * 4}),
    "gemma3 scaled rope": (tiny_gemma3, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3 new rope": (tiny_gemma3, {"rope_parameters": NESTED_ROPE}),
    "gemma3 scalar": (tiny_gemma3, {"query_pre_attn_scalar": 100, "num_attention_heads": 4}),
}


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    progress=lambda *counts: None,
    precision: str | None = None,
) -> Runner:
    reference = kernels.load("reference")
    return load_checkpoint(folder, dtype=dtype, precision=precision, backend=reference, progress=progress)


def logits_of(runner: Runner, tokens: list[int], chunk: int) -> torch.Tensor:
    """[token, vocab], the prompt computed in chunks over shuffled pages."""
    pages = Pages(runner.traits, runner.dtype, total=200)
    rows = []
    for first in range(0, len(tokens), chunk):
        batch = pages.step([(0, tokens[first : first + chunk], first)])
        rows.append(runner.forward(pages.pool, batch).clone())
    return torch.cat(rows)


def theirs(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


TOKENS = torch.randint(7, 360, (90,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_computes_what_transformers_computes(variant, tmp_path):
    make, overrides = VARIANTS[variant]
    folder = make(tmp_path, **overrides)
    runner = load(folder)
    expected = theirs(folder, TOKENS)
    for chunk in (90, 37):
        torch.testing.assert_close(logits_of(runner, TOKENS, chunk), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
def test_a_config_that_transformers_wrote_reads_the_same(make, tmp_path):
    folder = make(tmp_path)
    before = load(folder).traits
    AutoConfig.from_pretrained(folder).save_pretrained(folder)
    assert load(folder).traits == before


def test_a_bare_model_and_a_sharded_one_read_the_same(tmp_path):
    whole = tiny_gemma3(tmp_path / "whole")
    expected = logits_of(load(whole), TOKENS, 90)
    weights = load_file(whole / "model.safetensors")

    bare = shutil.copytree(whole, tmp_path / "bare")
    change_config(bare, architectures=["Gemma3TextModel"])
    save_file({name.removeprefix("model."): tensor for name, tensor in weights.items()}, bare / "model.safetensors")
    assert torch.equal(logits_of(load(bare), TOKENS, 90), expected)

    sharded = shutil.copytree(whole, tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    names = list(weights)
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: weights[name] for name in names if places[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert torch.equal(logits_of(load(sharded), TOKENS, 90), expected)


def test_a_broken_note_of_the_digests_is_written_anew(tmp_path):
    """As another thread that loads the same folder could have left it, had it written it bit by bit."""
    folder = tiny_llama(tmp_path)
    digest = checkpoint_digest(folder)
    written = (folder / DIGEST_FILE).read_text()
    for broken in ("", "[]", written[:30]):
        (folder / DIGEST_FILE).write_text(broken)
        assert checkpoint_digest(folder) == digest and (folder / DIGEST_FILE).read_text() == written
    assert not list(folder.glob(f"{DIGEST_FILE}.*"))


def test_bfloat16_weights_load_and_stay_near_fp32(tmp_path):
    folder = tiny_gemma3(tmp_path)
    exact, rounded = (logits_of(load(folder, dtype), TOKENS, 90) for dtype in (torch.float32, torch.bfloat16))
    assert (exact.argmax(-1) == rounded.argmax(-1)).float().mean() > 0.9
    assert load(folder, torch.bfloat16).weight_bytes * 2 == load(folder).weight_bytes


def test_int8_weights_take_a_byte_and_a_share_of_a_scale_and_have_a_digest_of_their_own(tmp_path):
    folder = tiny_gemma3(tmp_path)
    exact, eight = load(folder), load(folder, precision="int8")
    shapes = weight_shapes(exact.traits)
    matrices = sum(shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2 and name != "head")
    vectors = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    assert exact.weight_bytes == 4 * (matrices + vectors)
    assert eight.weight_bytes == matrices * 34 // 32 + 4 * vectors
    assert eight.digest != exact.digest
    agreed = logits_of(eight, TOKENS, 90).argmax(-1) == logits_of(exact, TOKENS, 90).argmax(-1)
    assert agreed.float().mean() > 0.8


def test_compact_weights_take_three_quarters_and_change_no_value(tmp_path):
    folder = tiny_gemma3(tmp_path)
    plain, compact = load(folder, torch.bfloat16), load(folder, torch.bfloat16, precision="compact")
    matrices = sum(
        math.prod(shape) for name, shape in weight_shapes(plain.traits).items() if len(shape) == 2 and name != "head"
    )
    assert plain.weight_bytes - compact.weight_bytes == matrices // 2
    assert torch.equal(logits_of(compact, TOKENS, 90), logits_of(plain, TOKENS, 90))
    with pytest.raises(CheckpointError, match="compact weights are bfloat16 ones, not"):
        load(folder, precision="compact")


def test_a_backend_without_int8_weights_refuses_them_by_name(tmp_path):
    class Other(ReferenceBackend):
        name = "other"

        def unsupported(self, traits, dtype, *, precision=None):
            return "it has no int8 weights" if precision == "int8" else None

    with pytest.raises(CheckpointError, match="the other kernels cannot run this checkpoint: it has no int8 weights"):
        load_checkpoint(
            tiny_llama(tmp_path),
            dtype=torch.float32,
            precision="int8",
            backend=Other(),
            progress=lambda *counts: None,
        )


def test_embedding_scale_is_rounded_to_the_dtype(tmp_path):
    folder = tiny_gemma3(tmp_path, hidden_size=80)
    assert load(folder).traits.embedding_scale == torch.tensor(80**0.5).item()
    assert load(folder, torch.bfloat16).traits.embedding_scale == torch.tensor(80**0.5).bfloat16().item()


def test_a_runner_says_what_the_engine_asks(tmp_path):
    seen = []
    runner = load(tiny_gemma3(tmp_path / "gemma"), progress=lambda *counts: seen.append(counts))
    assert runner.geometry.groups == (GroupGeometry(None, 1, 1, 32, 4), GroupGeometry(32, 3, 1, 32, 4))
    assert (runner.context_length, runner.vocab_size, runner.bos_token_id) == (2048, 384, BOS)
    assert runner.eos_token_ids == {EOS, END_OF_TURN}
    assert load(tiny_llama(tmp_path / "llama")).eos_token_ids == {IM_END}
    assert seen == [(done, 54, "tensors") for done in range(1, 55)]


def test_digest_follows_the_content(tmp_path):
    first, second = tiny_llama(tmp_path / "first"), tiny_llama(tmp_path / "second")
    digest = load(first).digest
    assert load(second).digest == digest == load(first).digest
    tiny_llama(second, seed=1)
    assert load(second).digest != digest
    change_config(first, rms_norm_eps=1e-6)
    assert load(first).digest != digest


def test_a_folder_that_cannot_be_written_is_read(tmp_path, monkeypatch):
    folder = tiny_llama(tmp_path)

    def refuse(*arguments, **options):
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert load(folder).digest


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"

BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    "unknown architecture": (
        lambda f: change_config(f, architectures=["MambaForCausalLM"]),
        "MambaForCausalLM is no causal LM .* of model_type llama is LlamaForCausalLM",
    ),
    "no architecture": (lambda f: change_config(f, architectures=None), "names no architecture"),
    "quantised": (lambda f: change_config(f, quantization_config={"bits": 4}), "quantised"),
    "unknown rope": (lambda f: change_config(f, rope_scaling={"rope_type": "axial", "factor": 2.0}), "'axial'"),
    "unknown activation": (lambda f: change_config(f, hidden_act="cosine"), "hidden_act is 'cosine'"),
    "attention bias": (lambda f: change_config(f, attention_bias=True), "attention_bias"),
    "no layers": (lambda f: change_config(f, num_hidden_layers=0), "num_hidden_layers is 0"),
    "shape of text": (lambda f: change_config(f, hidden_size="64"), "hidden_size is '64'"),
    "other shape": (lambda f: change_config(f, intermediate_size=120), r"mlp.gate_proj.weight has shape \(128, 64\)"),
    "missing weight": (lambda f: change_weights(f, lambda w: w.pop(Q_PROJ)), f"missing: {Q_PROJ}"),
    "unknown weight": (
        lambda f: change_weights(f, lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)})),
        "does not have: model.layers.0.self_attn.q_proj.bias",
    ),
    "integer weight": (lambda f: change_weights(f, lambda w: w.update({Q_PROJ: w[Q_PROJ].to(torch.int8)})), "I8"),
    "cut weights": (lambda f: cut(f / "model.safetensors"), "broken or cut short"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no .safetensors file"),
    "pickled weights": (only_pickles, "pytorch_model.bin is a pickle"),
    "broken index": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index.json is broken"),
    "absent shard": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        "lacks b.safetensors",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json"),
    "cut tokenizer": (lambda f: cut(f / "tokenizer.json"), "tokenizer.json cannot be read"),
    "broken template": (
        lambda f: (f / "chat_template.jinja").write_text("{% for %}"),
        "chat template is broken",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_with_the_reason(case, tmp_path):
    folder = tiny_llama(tmp_path)
    damage, reason = BROKEN[case]
    damage(folder)
    with pytest.raises(CheckpointError, match=reason):
        load(folder)


def test_a_window_on_another_kind_of_layer_is_refused(tmp_path):
    folder = tiny_gemma3(tmp_path, layer_types=["chunked_attention"] * 4)
    with pytest.raises(CheckpointError, match="layer_types"):
        load(folder)
