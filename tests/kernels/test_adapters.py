"""Rows of several adapters and of none in one step: merged weights' values, and the bits that each has alone."""

import gc
import random
import re
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.reference import ReferenceBackend
from kernels.spec import LowRank
from tests.kernels.conftest import packed
from tests.kernels.decoders import (
    Pages,
    gemma_traits,
    llama_traits,
    merged,
    random_adapter,
    random_weights,
    with_adapters,
)

TRAITS = {
    "llama, biases": llama_traits(qkv_bias=True),
    "gemma3, odd sizes": gemma_traits(hidden_size=45, intermediate_size=67, head_dim=80),
    "llama, 16, one kv head": llama_traits(head_dim=16, num_heads=5, hidden_size=33, intermediate_size=129),
}
every_traits = pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS.keys())
PRECISIONS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, "int8"),
    "compact": (torch.bfloat16, "compact"),
}
every_precision = pytest.mark.parametrize(("dtype", "precision"), PRECISIONS.values(), ids=PRECISIONS)
RANKS = (1, 3, 8, 64)
# (sequence, rows, first position) of two steps; and the adapter of each of the five sequences
PAST, STEP = ((0, 5, 0), (1, 33, 0), (2, 1, 0), (3, 20, 0)), ((1, 1, 33), (0, 20, 5), (4, 18, 0), (2, 1, 1), (3, 1, 20))
NUMBERS = {0: 0, 1: -1, 2: 1, 3: 1, 4: 2}


def tokens(traits, sequence, count, first):
    return [(sequence * 7 + i * i) % traits.vocab_size for i in range(first, first + count)]


def logits_of(backend, traits, parts, dtype, numbers=NUMBERS, weights=None, precision=None):
    """Of both steps, by sequence; `parts` of each adapter."""
    decoder = packed(backend, traits, weights or random_weights(traits), dtype, precision)
    adapters = [backend.pack_adapter(decoder, each) for each in parts]
    pages, logits = Pages(traits, dtype), {}
    for step in (PAST, STEP):
        batch = pages.step([(s, tokens(traits, s, count, first), first) for s, count, first in step])
        if adapters:
            batch = with_adapters(batch, adapters, [numbers[s] for s, _, _ in step])
        rows = backend.forward(decoder, pages.pool, batch).clone().split(batch.query_starts.diff().tolist())
        for (s, _, _), own in zip(step, rows, strict=True):
            logits.setdefault(s, []).append(own)
    return {s: torch.cat(rows) for s, rows in logits.items()}


@every_traits
def test_the_reference_gives_the_logits_of_merged_weights(traits):
    parts = [random_adapter(traits, rank, seed) for seed, rank in enumerate((8, 1, 3))]
    together = logits_of(ReferenceBackend(), traits, parts, torch.float32)
    for sequence, number in NUMBERS.items():
        weights = random_weights(traits)
        alone = merged(weights, parts[number]) if number >= 0 else weights
        expected = logits_of(ReferenceBackend(), traits, [], torch.float32, weights=alone)[sequence]
        assert (together[sequence] - expected).abs().max() <= 2e-5 * expected.abs().max()


@every_precision
@every_traits
@pytest.mark.parametrize("ranks", [RANKS[:3], (64, 8, 16)], ids=str)
def test_the_kernels_are_near_the_reference(cpu, traits, dtype, precision, ranks):
    parts = [random_adapter(traits, rank, seed) for seed, rank in enumerate(ranks)]
    ours, theirs = (
        logits_of(backend, traits, parts, dtype, precision=precision) for backend in (cpu, ReferenceBackend())
    )
    bound = 1e-5 if dtype == torch.float32 else 0.03
    for sequence, expected in theirs.items():
        assert (ours[sequence] - expected).abs().max() <= bound * expected.abs().max(), sequence


@pytest.mark.parametrize("targets", [("q", "v"), ("k",), ("o",), ("gate",), ("up", "down")], ids=" ".join)
def test_an_adapter_of_some_matrices_leaves_the_others(cpu, targets):
    traits = TRAITS["gemma3, odd sizes"]
    parts = [random_adapter(traits, 3, seed, targets) for seed in range(3)]
    ours, theirs = (logits_of(backend, traits, parts, torch.float32) for backend in (cpu, ReferenceBackend()))
    plain = logits_of(cpu, traits, [], torch.float32)
    for sequence, expected in theirs.items():
        assert (ours[sequence] - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert torch.equal(ours[sequence], plain[sequence]) == (NUMBERS[sequence] == -1)


@every_precision
def test_rows_have_the_bits_that_they_have_alone(cpu, dtype, precision):
    """Of an adapter among others, and of the base among adapters as in a step that knows of none."""
    traits = TRAITS["llama, biases"]
    parts = [random_adapter(traits, rank, seed) for seed, rank in enumerate((3, 64, 8))]
    together = logits_of(cpu, traits, parts, dtype, precision=precision)
    plain = logits_of(cpu, traits, [], dtype, precision=precision)
    assert torch.equal(together[1], plain[1])
    for sequence, number in NUMBERS.items():
        if number >= 0:
            same = dict.fromkeys(NUMBERS, 0)
            alone = logits_of(cpu, traits, [parts[number]], dtype, numbers=same, precision=precision)
            assert torch.equal(together[sequence], alone[sequence])


@given(data=st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_neighbours_of_any_adapter_change_no_bit(cpu, data):
    """Decodes and chunks of one to forty rows, each of some adapter or none, in any order."""
    traits, dtype = TRAITS["llama, 16, one kv head"], data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    decoder = cpu.pack(traits, random_weights(traits), dtype)
    ranks = data.draw(st.lists(st.sampled_from(RANKS), min_size=1, max_size=4))
    adapters = [cpu.pack_adapter(decoder, random_adapter(traits, rank, seed)) for seed, rank in enumerate(ranks)]
    drawn = st.tuples(st.one_of(st.just(1), st.integers(1, 40)), st.integers(-1, len(ranks) - 1))
    sequences = data.draw(st.lists(drawn, min_size=1, max_size=40))

    def forward(chosen):
        parts = [(s, tokens(traits, s, sequences[s][0], 0), 0) for s in chosen]
        pages = Pages(traits, dtype)
        batch = with_adapters(pages.step(parts), adapters, [sequences[s][1] for s in chosen])
        return cpu.forward(decoder, pages.pool, batch).clone().split(batch.query_starts.diff().tolist())

    together = forward(range(len(sequences)))
    for sequence in random.Random(0).sample(range(len(sequences)), min(3, len(sequences))):
        assert torch.equal(forward([sequence])[0], together[sequence])


def test_an_adapter_goes_with_its_last_holder_and_not_before_its_decoder(cpu):
    traits = TRAITS["llama, biases"]
    adapter = cpu.pack_adapter(cpu.pack(traits, random_weights(traits), torch.float32), random_adapter(traits, 3))
    pages = Pages(traits, torch.float32)
    batch = with_adapters(pages.step([(0, [1, 2], 0)]), [adapter], [0])
    assert torch.isfinite(cpu.forward(adapter.decoder, pages.pool, batch)).all()


def test_weights_that_an_adapter_was_added_to_are_gone_with_their_last_holder(cpu):
    """At once: an engine without work has no garbage collected."""
    traits = TRAITS["llama, biases"]
    decoder, pages = cpu.pack(traits, random_weights(traits), torch.float32), Pages(traits, torch.float32)
    adapter = cpu.pack_adapter(decoder, random_adapter(traits, 3))
    batch = with_adapters(pages.step([(0, [1, 2], 0)]), [adapter], [0])
    cpu.forward(decoder, pages.pool, batch)
    weights = weakref.ref(decoder)
    gc.disable()
    try:
        del decoder, adapter, batch
        assert weights() is None
    finally:
        gc.enable()


PART = random_adapter(llama_traits(), 3, targets=("q",))["layers.1.q"]
WRONG_PARTS = {
    "layer": ({"layers.2.q": PART}, "an adapter cannot add to layers.2.q"),
    "norm": ({"layers.1.mlp_norm": PART}, "an adapter cannot add to layers.1.mlp_norm"),
    "shape": (
        {"layers.1.k": PART},
        "layers.1.k has a (3, 96) and b (192, 3); the decoder needs (rank, 96), (64, rank)",
    ),
    "ranks": ({"layers.1.q": LowRank(PART.a[:2], PART.b, 1.0)}, "a (2, 96) and b (192, 3)"),
}


@pytest.mark.parametrize(("parts", "message"), WRONG_PARTS.values(), ids=WRONG_PARTS.keys())
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_parts_that_do_not_fit_are_refused(request, name, parts, message):
    backend = ReferenceBackend() if name == "reference" else request.getfixturevalue("cpu")
    decoder = backend.pack(llama_traits(), random_weights(llama_traits()), torch.float32)
    with pytest.raises(ValueError, match=re.escape(message)):
        backend.pack_adapter(decoder, parts)


@pytest.mark.parametrize(
    ("number", "own", "message"),
    [
        (1, True, "sequence 1 has adapter 1 of 1"),
        (-2, True, "adapter -2"),
        (0, False, "adapter 0 is of another decoder"),
    ],
)
def test_an_adapter_that_would_lead_astray_is_refused(cpu, number, own, message):
    traits = llama_traits()
    decoder, other = (cpu.pack(traits, random_weights(traits), torch.float32) for _ in range(2))
    adapter = cpu.pack_adapter(decoder if own else other, random_adapter(traits, 3))
    pages = Pages(traits, torch.float32)
    batch = with_adapters(pages.step([(0, [1], 0), (1, [2], 0)]), [adapter], [-1, number])
    with pytest.raises(ValueError, match=message):
        cpu.forward(decoder, pages.pool, batch)
