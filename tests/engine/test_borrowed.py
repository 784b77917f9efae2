"""What the fused decoder does not compute runs through transformers' modules over our pages, or is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.architectures import Runner
from engine.architectures.borrowed import BorrowedDecoder, BorrowedRunner
from engine.architectures.probe import window_of
from engine.config import EngineConfig
from engine.core import Engine, ModelSpec
from engine.errors import CheckpointError
from engine.kv.geometry import default_page_bytes
from engine.sequence import SamplingParams
from tests.engine.fake_runner import PoisonedPool
from tests.engine.families import GLOBAL, LOCAL, load, logits_of, right_answer, save_tiny
from tests.engine.tiny import tiny_gemma3, tiny_llama
from tests.kernels.decoders import Pages

TOKENS = torch.randint(7, 360, (75,), generator=torch.Generator().manual_seed(5)).tolist()
NEW_TOKENS = 8
CHUNKS = [40, 1, 34]

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_shared_experts": 1,
}  # fmt: skip

# What a family has that no fused one has -> model_type and changes of families.SMALL.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "learned positions": ("gpt2", {}),
    "learned positions, scores scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "learned positions behind two": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "learned positions, one kv head": ("gpt_bigcode", {}),
    "parallel halves": ("gpt_neox", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}),
    "parallel halves, one norm": ("phi", {"num_key_value_heads": 4}),
    "norms of outputs": ("olmo2", {}),
    "norms of outputs, some windows": ("olmo3", {"layer_types": [LOCAL, GLOBAL, LOCAL], "sliding_window": 20}),
    "no norm has weights": ("olmo", {}),
    "one window on all layers": ("starcoder2", {"sliding_window": 20}),
    "some layers unrotated": ("cohere2", {"layer_types": [LOCAL, LOCAL, GLOBAL], "sliding_window": 24}),
    "pairs side by side": ("glm", {"head_dim": 16}),
    "squared relu": ("nemotron", {}),
    "experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "experts beside a shared one": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 32}),
    "experts, norms of q and k": ("qwen3_moe", {**MOE, "head_dim": 32}),
    "heads made of a latent": ("deepseek_v3", MLA),
    "heads of 20": ("gemma", {"head_dim": 20}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with another activation": ("llama", {"hidden_act": "relu"}),
    "llama with heads of 20": ("llama", {"head_dim": 20}),
}  # fmt: skip
SOME = ["learned positions", "norms of outputs, some windows", "experts"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """`checkpoint(family)`: a folder, transformers' logits of TOKENS in it and the tokens it then generates."""
    made = {}

    def get(family: str) -> tuple[Path, torch.Tensor, list[int]]:
        if family not in made:
            folder = tmp_path_factory.mktemp("borrowed")
            model = save_tiny(folder, *FAMILIES[family])
            made[family] = folder, *right_answer(model, TOKENS, NEW_TOKENS)
        return made[family]

    return get


def pages_for(runner: Runner) -> Pages:
    return Pages(runner.traits, runner.dtype, total=1000)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(family, opened, checkpoint):
    folder, expected, answer = checkpoint(family)
    runner = load(folder, opened("cpu"))
    assert isinstance(runner, BorrowedRunner)
    pages = pages_for(runner)
    logits = logits_of(runner, pages, TOKENS, CHUNKS)
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < NEW_TOKENS:
        batch = pages.step([(0, tokens[-1:], len(TOKENS) + len(tokens) - 1)])
        tokens.append(int(runner.forward(pages.pool, batch)[0].argmax()))
    assert tokens == answer


@pytest.mark.parametrize(
    ("family", "backend", "chunks"),
    [(SOME[0], "reference", CHUNKS), (SOME[1], "triton", [9, 1])],
    ids=["torch", "triton"],
)
def test_other_kernels_serve_it_as_well(family, backend, chunks, opened, checkpoint):
    folder, expected, _ = checkpoint(family)
    runner = load(folder, opened(backend))
    logits = logits_of(runner, pages_for(runner), TOKENS, chunks)
    assert (logits - expected[: sum(chunks)]).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("family", SOME)
def test_neighbours_change_a_row_by_no_more_than_rounding(family, opened, checkpoint):
    """Not to the bit, as the fused decoder has it: PyTorch's matrix products depend on how many rows there are."""
    runner = load(checkpoint(family)[0], opened("cpu"))
    alone = logits_of(runner, pages_for(runner), TOKENS, [75])
    pages = pages_for(runner)
    among = runner.forward(pages.pool, pages.step([(1, TOKENS[9:40], 0), (0, TOKENS, 0), (2, [5], 0)]))[31:106]
    assert (among - alone).abs().max() <= 1e-5 * alone.abs().max()


def test_only_the_rows_that_are_wanted_get_logits(opened, checkpoint):
    folder, expected, _ = checkpoint("learned positions")
    runner = load(folder, opened("cpu"))
    pages = pages_for(runner)
    few = runner.forward(pages.pool, pages.step([(0, TOKENS, 0)], wanted=[70, 3]))
    assert torch.allclose(few, expected[[70, 3]], rtol=0, atol=1e-4)
    assert runner.forward(pages.pool, pages.step([(1, TOKENS, 0)], wanted=[])).shape == (0, runner.vocab_size)


def test_all_threads_multiply_for_a_prompt_and_one_for_a_decode(opened, checkpoint):
    runner, seen = load(checkpoint("learned positions")[0], opened("cpu")), []
    torch.set_num_threads(1)  # as the C++ kernels leave it, and another test may have changed
    runner.decoder.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    logits_of(runner, pages_for(runner), TOKENS, [40, 1])
    assert (seen, torch.get_num_threads()) == ([2, 1], 1)


def engine_of(runners: dict[str, Runner], **config) -> Engine:
    config = EngineConfig(dtype="float32", check_integrity=True, **config)
    pool = PoisonedPool(1500, default_page_bytes(4), seed=3)
    engine = Engine(config, next(iter(runners.values())).backend, lambda source, *_: runners[source], pool)
    for name in runners:
        engine.put_model(ModelSpec(name, name))
    while any(each.status == "loading" for each in engine.models()):
        engine.step()
    return engine


def ask(engine: Engine, model: str, prompt: list[int]) -> list[int]:
    answer: list[int] = []
    params = SamplingParams(NEW_TOKENS, 0.0, ignore_eos=True)
    engine.submit(model, prompt, params, lambda event: answer.extend(event.token_ids))
    return answer


@pytest.mark.parametrize("family", SOME)
def test_the_engine_answers_the_same_in_chunks_from_its_cache_and_beside_others(family, opened, checkpoint):
    folder, _, expected = checkpoint(family)
    engine = engine_of({"m": load(folder, opened("cpu"))}, max_batch_tokens=40)
    for _ in range(2):
        answers = [ask(engine, "m", prompt) for prompt in (TOKENS, TOKENS[:40])]
        while engine.step():
            pass
        assert answers[0] == expected
    assert engine.kv()["cached_tokens_served"] >= 64


def test_two_borrowed_models_and_a_fused_one_share_a_pool(opened, checkpoint, tmp_path):
    runners = {family: load(checkpoint(family)[0], opened("cpu")) for family in SOME[:2]}
    runners["fused"] = load(tiny_llama(tmp_path), opened("cpu"))
    engine = engine_of(runners)
    alone = ask(engine, "fused", TOKENS)
    while engine.step():
        pass
    answers = {name: ask(engine, name, TOKENS) for name in runners}
    while engine.step():
        pass
    assert answers == {"fused": alone} | {family: checkpoint(family)[2] for family in SOME[:2]}
    pages = engine.kv()["pages"]
    assert pages["used"] + pages["cached"] + pages["free"] == pages["total"] == 1500


def test_a_layer_takes_the_memory_that_its_heads_do(opened, checkpoint):
    runner = load(checkpoint("norms of outputs, some windows")[0], opened("cpu"))
    assert [(group.window, group.num_layers) for group in runner.geometry.groups] == [(None, 1), (20, 2)]
    assert {(group.num_kv_heads, group.head_dim) for group in runner.geometry.groups} == {(2, 16)}
    latent = load(checkpoint("heads made of a latent")[0], opened("cpu")).geometry
    assert {(group.num_kv_heads, group.head_dim) for group in latent.groups} == {(4, 32)}
    assert runner.context_length == 256


def test_weights_are_counted_once_where_they_are_tied(opened, checkpoint):
    from safetensors.torch import load_file

    folder = checkpoint("learned positions")[0]
    stored = load_file(folder / "model.safetensors")
    assert load(folder, opened("cpu")).weight_bytes == sum(tensor.nbytes for tensor in stored.values())
    halves = load(folder, opened("cpu"), torch.bfloat16)
    assert halves.weight_bytes * 2 == sum(tensor.nbytes for tensor in stored.values())


def test_a_file_that_is_written_over_changes_nothing_that_is_loaded(opened, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("learned positions")[0], tmp_path / "copy")
    runner = load(folder, opened("cpu"))
    before = logits_of(runner, pages_for(runner), TOKENS, CHUNKS)
    stored = folder / "model.safetensors"
    with stored.open("r+b") as file:
        file.write(bytes(stored.stat().st_size))
    assert torch.equal(logits_of(runner, pages_for(runner), TOKENS, CHUNKS), before)


def test_the_weights_go_with_the_runner(opened, checkpoint):
    """At once: a cycle would keep them until somebody looks for garbage."""
    runner = load(checkpoint("learned positions")[0], opened("cpu"))
    logits_of(runner, pages_for(runner), TOKENS, CHUNKS)
    weights = weakref.ref(runner.decoder.model.get_input_embeddings().weight)
    del runner
    assert weights() is None


@pytest.mark.parametrize("family", [*SOME, "a fused one"])
def test_what_transformers_sets_while_it_makes_another_model_changes_no_logit(family, opened, checkpoint, tmp_path):
    """The default dtype is one for the whole process."""
    folder = tiny_gemma3(tmp_path) if family == "a fused one" else checkpoint(family)[0]

    def logits() -> torch.Tensor:
        runner = load(folder, opened("cpu"))
        return logits_of(runner, pages_for(runner), TOKENS, CHUNKS)

    expected = logits()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = logits()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_transformers_makes_one_model_at_a_time(opened, checkpoint, monkeypatch):
    """Of two at once, each puts back what the other has set."""
    make, meeting, met = PreTrainedModel.from_pretrained.__func__, threading.Barrier(2, timeout=0.2), []

    def made(cls, *args, **named):
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(meeting.wait())
        return make(cls, *args, **named)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(made))
    folders = [checkpoint(family)[0] for family in SOME[:2]]
    with ThreadPoolExecutor(2) as pool:
        loaded = list(pool.map(load, folders, [opened("cpu")] * 2))
    assert len(loaded) == 2 and not met


def test_a_model_in_bfloat16_prefers_the_same_tokens(opened, checkpoint):
    folder, expected, _ = checkpoint("norms of outputs")
    runner = load(folder, opened("cpu"), torch.bfloat16)
    logits = logits_of(runner, pages_for(runner), TOKENS, CHUNKS)
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.9


# ----------------------------------------------------------------------------------------------------------- refusals

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a state": ("mamba", {}, "keep a state that is no KV"),
    "attention beside a state": ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4}, "keep a state that is no KV"),
    "sinks": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, r"attention sinks \(s_aux\)"),
    "biases of positions": ("bloom", {"n_head": 4, "n_layer": 2}, "cannot be replaced"),
    "both directions": ("bert", {}, "looks both ways"),
    "positions that count from elsewhere": ("roberta", {"is_decoder": True}, "positions do not count from 0"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_over_pages_is_refused_with_the_reason(what, opened, tmp_path):
    kind, changes, reason = REFUSED[what]
    save_tiny(tmp_path, kind, changes)
    with pytest.raises(CheckpointError, match=reason):
        load(tmp_path, opened("cpu"))


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "code of its own": (
        {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}},
        r"no model_type 'mine'; its own code \(auto_map\) is never run",
    ),
    "no such type": ({"model_type": "mine"}, "has no model_type 'mine'"),
    "a head of another kind": ({"architectures": ["GPT2ForSequenceClassification"]}, "model_type gpt2 is GPT2LMHead"),
    "no causal LM": ({"model_type": "vit", "architectures": ["ViTModel"]}, "it has none of model_type vit"),
    "weights that are missing": ({"n_layer": 4}, "weights are missing: transformer.h.3.attn"),
    "weights too many": ({"n_layer": 2}, "does not have: transformer.h.2.attn"),
    "a field that transformers does not read": ({"clip_qkv": 8.0}, "clip_qkv is 8.0, which transformers does not read"),
    "no length": ({"n_positions": None}, "cannot run it"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_folder_that_is_not_what_it_says_is_refused(what, opened, checkpoint, tmp_path):
    changes, reason = CHANGED[what]
    for file in checkpoint("learned positions")[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=reason):
        load(tmp_path, opened("reference"))


def test_int8_weights_are_refused_for_what_is_not_fused(opened, checkpoint):
    with pytest.raises(CheckpointError, match="only the fused decoder has int8 weights; GPT2LMHeadModel is none of"):
        load(checkpoint("learned positions")[0], opened("cpu"), precision="int8")


def test_the_check_finds_a_page_that_is_not_read(opened, checkpoint, monkeypatch):
    forward = BorrowedDecoder.forward

    def forgetful(self, pool, batch):
        if batch.positions[0]:
            pool.zero_()
        return forward(self, pool, batch)

    monkeypatch.setattr(BorrowedDecoder, "forward", forgetful)
    with pytest.raises(CheckpointError, match="over pages it computes something else"):
        load(checkpoint("learned positions")[0], opened("cpu"))


def test_the_check_finds_positions_that_are_not_taken(opened, checkpoint, monkeypatch):
    forward = BorrowedDecoder.forward

    def misplaced(self, pool, batch):
        batch.positions.copy_(torch.arange(len(batch.positions)))
        return forward(self, pool, batch)

    monkeypatch.setattr(BorrowedDecoder, "forward", misplaced)
    with pytest.raises(CheckpointError, match="over pages it computes something else"):
        load(checkpoint("learned positions")[0], opened("reference"))


def test_a_window_is_read_off_the_mask():
    def causal(batch, head, query, key):
        return key <= query

    assert window_of(causal, 4096) is None
    assert window_of(lambda b, h, q, k: (k <= q) & (k > q - 20), 4096) == 20
    assert window_of(lambda b, h, q, k: (k <= q) & (k > q - 4096), 4096) is None
    assert window_of(lambda b, h, q, k: (k <= q) & (k > q - 1), 4096) == 1
    assert window_of(causal, 1) is None


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (lambda b, h, q, k: k >= 0, "see others than themselves"),
        (lambda b, h, q, k: (k <= q) & (k // 64 == q // 64), "see chunks"),
        (lambda b, h, q, k: (k <= q) & ((k > q - 20) | (k < 4)), "see others than themselves"),
        (lambda b, h, q, k: k < q, "see others than themselves"),
    ],
    ids=["all", "chunks", "the first and a window", "not itself"],
)
def test_what_is_neither_causal_nor_a_window_is_refused(mask, reason):
    with pytest.raises(CheckpointError, match=reason):
        window_of(mask, 4096)


def test_a_fused_checkpoint_loads_without_transformers(tmp_path):
    code = (
        "import sys, torch, kernels; from pathlib import Path; from engine.architectures import load_checkpoint;"
        f"load_checkpoint(Path({str(tiny_llama(tmp_path))!r}), dtype=torch.float32, backend=kernels.load('reference'),"
        "progress=lambda *counts: None);"
        "sys.exit(any(name in sys.modules for name in ('transformers', 'engine.architectures.borrowed')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
