"""The reference against transformers' eager models, in fp32, on chunked, ragged and shuffled input."""

import random

import pytest
import torch

from kernels import load
from kernels.reference import ReferenceBackend
from tests.kernels.decoders import Pages, from_transformers, tiny_gemma, tiny_llama

MODELS = {
    "llama": tiny_llama,
    "llama with biases": lambda: tiny_llama(attention_bias=True, num_key_value_heads=6),
    "gemma3": tiny_gemma,
    "gemma3, window of one block": lambda: tiny_gemma(sliding_window=16, num_key_value_heads=2),
}
SPLITS = (((0, 20), (20, 41), (41, 42), (42, 70)), ((0, 1), (1, 2), (2, 33)), ((0, 16), (16, 32), (32, 48)), ((0, 55),))


def logits_of_split_prompts(backend, traits, weights, dtype, splits=SPLITS, **pages):
    """Every prompt goes through in its own chunks, neighbours joining and leaving. -> logits and prompts a sequence."""
    random_ids = random.Random(1)
    prompts = [[random_ids.randrange(traits.vocab_size) for _ in range(chunks[-1][1])] for chunks in splits]
    decoder, store = backend.pack(traits, weights, dtype), Pages(traits, dtype, **pages)
    logits = [[] for _ in splits]
    for number in range(max(map(len, splits))):
        parts = [(s, chunks[number]) for s, chunks in enumerate(splits) if number < len(chunks)]
        batch = store.step([(s, prompts[s][first:end], first) for s, (first, end) in parts])
        result = backend.forward(decoder, store.pool, batch).clone()
        for (s, _), rows in zip(parts, result.split(batch.query_starts.diff().tolist()), strict=True):
            logits[s].append(rows)
    return [torch.cat(rows) for rows in logits], prompts


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_fp32_logits_are_those_of_transformers(build):
    model = build()
    ours, prompts = logits_of_split_prompts(ReferenceBackend(), *from_transformers(model), torch.float32)
    for logits, prompt in zip(ours, prompts, strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0]
        assert (logits - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_bf16_stays_near_fp32():
    traits, weights = from_transformers(tiny_llama())
    exact, _ = logits_of_split_prompts(ReferenceBackend(), traits, weights, torch.float32)
    rounded, _ = logits_of_split_prompts(ReferenceBackend(), traits, weights, torch.bfloat16)
    error = max(float((a - b).abs().max()) for a, b in zip(exact, rounded, strict=True))
    assert 0 < error <= 0.05 * max(float(logits.abs().max()) for logits in exact)


def test_logits_come_for_the_wanted_rows_in_their_order():
    traits, weights = from_transformers(tiny_llama())
    backend = ReferenceBackend()
    decoder = backend.pack(traits, weights, torch.float32)
    every, some = (Pages(traits, torch.float32), Pages(traits, torch.float32))
    parts = [(0, [5, 6, 7], 0), (1, [8, 9], 0)]
    all_rows = backend.forward(decoder, every.pool, every.step(parts))
    wanted = backend.forward(decoder, some.pool, some.step(parts, wanted=[4, 2]))
    torch.testing.assert_close(wanted, all_rows[[4, 2]])


def test_unknown_backend_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="no kernel backend named 'cuda9'; there are: auto, reference"):
        load("cuda9")
