"""Every family of decoders computes what transformers computes, on every backend, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from engine.architectures import ARCHITECTURES
from engine.architectures.architecture import Config
from engine.architectures.fields import HARMLESS, MATHS
from engine.config import EngineConfig
from engine.core import Engine, ModelSpec
from engine.errors import CheckpointError
from engine.kv.geometry import default_page_bytes
from engine.sequence import SamplingParams
from tests.engine.fake_runner import PoisonedPool
from tests.engine.families import (
    CASES,
    FAMILIES,
    GLOBAL,
    LOCAL,
    LONGROPE,
    load,
    logits_of,
    right_answer,
    tiny_checkpoint,
)
from tests.kernels.decoders import Pages

TOKENS = torch.randint(7, 360, (75,), generator=torch.Generator().manual_seed(5)).tolist()
NEW_TOKENS = 10
FIRST_CASES = [f"{family} 1" for family in FAMILIES]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """`checkpoint(case)`: a folder, transformers' logits of TOKENS in it and the tokens it then generates."""
    made = {}

    def get(case: str) -> tuple[Path, torch.Tensor, list[int]]:
        if case not in made:
            folder = tmp_path_factory.mktemp("family")
            model = tiny_checkpoint(folder, case)
            made[case] = folder, *right_answer(model, TOKENS, NEW_TOKENS)
        return made[case]

    return get


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(backend, case, opened, checkpoint):
    folder, expected, answer = checkpoint(case)
    runner = load(folder, opened(backend))
    pages = Pages(runner.traits, torch.float32, total=300)
    logits = logits_of(runner, pages, TOKENS, [40, 1, 34])
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < NEW_TOKENS:
        batch = pages.step([(0, tokens[-1:], len(TOKENS) + len(tokens) - 1)])
        tokens.append(int(runner.forward(pages.pool, batch)[0].argmax()))
    assert tokens == answer


@pytest.mark.parametrize("case", FIRST_CASES)
def test_logits_in_tritons_interpreter_are_those_of_transformers(case, opened, checkpoint):
    """A chunk and a decode alone, for the interpreter is slow; the kernels have tests of their own."""
    folder, expected, _ = checkpoint(case)
    runner = load(folder, opened("triton"))
    logits = logits_of(runner, Pages(runner.traits, torch.float32), TOKENS, [4, 1])
    assert (logits - expected[:5]).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("case", FIRST_CASES)
def test_chunks_and_neighbours_change_no_bit(case, opened, checkpoint):
    runner = load(checkpoint(case)[0], opened("cpu"))
    whole, decoded = (
        logits_of(runner, Pages(runner.traits, torch.float32, total=300), TOKENS, chunks)
        for chunks in ([75], [1] * 20 + [30] + [1] * 25)
    )
    assert torch.equal(whole, decoded)
    pages = Pages(runner.traits, torch.float32, total=300)
    batch = pages.step([(1, TOKENS[9:40], 0), (0, TOKENS, 0), (2, [5], 0)])
    assert torch.equal(runner.forward(pages.pool, batch)[31:106], whole)


@pytest.mark.parametrize("case", FIRST_CASES)
def test_the_engine_answers_the_same_from_its_cache_and_beside_others(case, opened, checkpoint):
    """Also where every layer has a window, and no block lives as long as its sequence."""
    folder, _, expected = checkpoint(case)
    runner = load(folder, opened("cpu"))
    config = EngineConfig(dtype="float32", check_integrity=True, max_batch_tokens=40)
    engine = Engine(config, runner.backend, lambda *_: runner, PoisonedPool(400, default_page_bytes(4), seed=3))
    engine.put_model(ModelSpec("m", "held"))
    while engine.models()[0].status == "loading":
        engine.step()
    for _ in range(2):
        answers = [[], []]
        for answer, prompt in zip(answers, (TOKENS, TOKENS[:40]), strict=True):
            params = SamplingParams(NEW_TOKENS, 0.0, ignore_eos=True)
            engine.submit("m", prompt, params, lambda event, answer=answer: answer.extend(event.token_ids))
        while engine.step():
            pass
        assert answers[0] == expected
    assert engine.kv()["cached_tokens_served"] >= 64


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_transformers_config_is_read_or_known_to_be_harmless(family, checkpoint):
    """A field that a version of transformers adds shows up here, and is then read, refused or declared harmless."""
    kind = FAMILIES[family][0]
    written = json.loads((checkpoint(f"{family} 1")[0] / "config.json").read_text())
    architecture = ARCHITECTURES[written["architectures"][0]]
    config = Config({**CONFIG_MAPPING[kind]().to_dict(), **written}, architecture.defaults)
    architecture.traits(config, torch.float32)
    assert config.unread().keys() - MATHS.keys() - HARMLESS == set()


def test_every_architecture_is_a_family(checkpoint):
    configs = [json.loads((checkpoint(case)[0] / "config.json").read_text()) for case in FIRST_CASES]
    tried = {config["architectures"][0] for config in configs}
    assert tried | {"Gemma3TextModel"} == set(ARCHITECTURES)


REFUSED = {
    "bias of all projections": ("qwen3 1", {"attention_bias": True}, "attention_bias is True.*for qwen3"),
    "clipped values": ("llama 1", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    "a multiplier of another family": ("qwen2 1", {"residual_multiplier": 0.2}, "residual_multiplier is 0.2"),
    "a cap of another family": ("mistral 1", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    "experts": ("mistral 1", {"num_local_experts": 8}, "num_local_experts is 8"),
    "both directions": ("gemma2 1", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    "a window on llama": ("llama 1", {"sliding_window": 128}, "sliding_window is 128"),
    "some windows on mistral": (
        "mistral 1",
        {"layer_types": [LOCAL, GLOBAL, LOCAL]},
        "layer_types is .* for all layers",
    ),
    "windows that are off": (
        "qwen2 1",
        {"use_sliding_window": False, "layer_types": [LOCAL] * 3},
        "use_sliding_window is off",
    ),
    "a window of no size": ("gemma2 1", {"sliding_window": None}, "sliding_window is None"),
    "layers unnamed": ("gemma2 1", {"layer_types": [LOCAL]}, r"layer_types is \['sliding_attention'\]; it must name 3"),
    "NoPE of too few layers": ("smollm3 1", {"no_rope_layers": [1]}, r"no_rope_layers is \[1\]"),
    "rope for images": ("qwen2 1", {"rope_parameters": {"mrope_section": [8, 4, 4]}}, r"mrope_section is \[8, 4, 4\]"),
    "factors of another length": (
        "phi3 1",
        {"rope_parameters": {**LONGROPE, "short_factor": [1.0] * 5}},
        r"short_factor is \[1.0, 1.0, 1.0, 1.0, 1.0\]; it must be a list of 12 numbers",
    ),
    "an unknown rope": ("llama 1", {"rope_parameters": {"rope_type": "axial"}}, "rope type 'axial' is not supported"),
    "heads that cannot share": ("llama 1", {"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    "an odd head": ("mistral 1", {"head_dim": 15}, "15 of a head's 15 dimensions"),
    "a third of a fused weight": ("phi3 1", {"num_key_value_heads": 1}, r"qkv_proj.weight has shape \(256, 128\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(what, opened, checkpoint, tmp_path):
    case, changes, reason = REFUSED[what]
    with pytest.raises(CheckpointError, match=reason):
        load(with_config(checkpoint(case)[0], tmp_path, changes), opened("reference"))


def with_config(folder: Path, target: Path, changes: dict) -> Path:
    """`target`, made the same checkpoint but for these fields of config.json."""
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    (target / "config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


@pytest.mark.parametrize("case", ["qwen2 1", "qwen2 4", "qwen3 1", "gemma2 1", "gemma3 1", "smollm3 1"])
def test_a_config_that_lists_no_layers_has_the_windows_that_transformers_lists(case, opened, checkpoint, tmp_path):
    """As older versions wrote them."""
    folder, backend = checkpoint(case)[0], opened("reference")
    unlisted = with_config(folder, tmp_path, {"layer_types": None})
    assert load(unlisted, backend).traits == load(folder, backend).traits


def test_long_rope_serves_the_context_it_was_trained_with(opened, checkpoint):
    lengths = [load(checkpoint(case)[0], opened("reference")).context_length for case in ("phi3 2", "phi3 3")]
    assert lengths == [256, LONGROPE["original_max_position_embeddings"]]
