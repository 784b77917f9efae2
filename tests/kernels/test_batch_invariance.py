"""A row's logits are the same to the bit, whatever its neighbours, its chunk, the batch size and the threads."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.cpu import CpuBackend
from tests.kernels.conftest import packed
from tests.kernels.decoders import Pages, gemma_traits, llama_traits, random_weights, rope

PRECISIONS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, "int8"),
    "compact": (torch.bfloat16, "compact"),
}
CASES = {
    f"{name} {precision}": (traits, *PRECISIONS[precision])
    for name, traits in (
        ("llama", llama_traits()),
        ("gemma3", gemma_traits(layer_windows=(100, None))),
        ("soft caps", gemma_traits(layer_windows=(100, 100), attention_softcap=5.0, layer_ropes=(rope(48),) * 2)),
    )
    for precision in PRECISIONS
}
LENGTH = 560  # over three tiles of attention


def logits_of(backend, decoder, prompt, chunks, neighbours=0, seed=0):
    """The prompt goes through in `chunks`, beside neighbours that decode and now and then bring a chunk too."""
    draw, traits = random.Random(seed), decoder.traits
    pages, logits, done, lengths = Pages(traits, decoder.dtype, seed=seed, total=3000), [], 0, [0] * neighbours
    for count in chunks:
        parts = [(0, prompt[done : done + count], done)]
        for other in range(neighbours):
            rows = draw.randrange(2, 40) if draw.random() < 0.1 else 1
            parts.append((1 + other, [draw.randrange(traits.vocab_size) for _ in range(rows)], lengths[other]))
            lengths[other] += rows
        draw.shuffle(parts)
        batch = pages.step(parts)
        mine = [sequence for sequence, _, _ in parts].index(0)
        first = int(batch.query_starts[mine])
        logits.append(backend.forward(decoder, pages.pool, batch)[first : first + count].clone())
        done += count
    return torch.cat(logits)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def expected(request, cpu):
    """A decoder, a prompt, and its logits when prefilled alone and at once."""
    traits, dtype, precision = request.param
    decoder = packed(cpu, traits, random_weights(traits), dtype, precision)
    prompt = [random.Random(1).randrange(traits.vocab_size) for _ in range(LENGTH)]
    return decoder, prompt, logits_of(cpu, decoder, prompt, [LENGTH])


def test_decoding_gives_the_bits_of_prefill(cpu, expected):
    decoder, prompt, logits = expected
    chunks = [1] * 20 + [230] + [1] * 20 + [232] + [1] * 20 + [38]  # one by one from 0 and over the edges of tiles
    assert torch.equal(logits_of(cpu, decoder, prompt, chunks), logits)


@given(data=st.data())
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chunks_give_the_same_bits(cpu, expected, data):
    decoder, prompt, logits = expected
    cuts = data.draw(st.lists(st.integers(1, LENGTH - 1), max_size=12, unique=True).map(sorted))
    chunks = [end - first for first, end in zip([0, *cuts], [*cuts, LENGTH], strict=True)]
    assert torch.equal(logits_of(cpu, decoder, prompt, chunks), logits)


@pytest.mark.parametrize("neighbours", [1, 2, 3, 5, 7, 12, 13, 14, 15, 27, 31, 63])
def test_neighbours_change_no_bit(cpu, expected, neighbours):
    decoder, prompt, logits = expected
    chunks = [250, 1, 1, 14, 1, 5, 1, 1]
    found = logits_of(cpu, decoder, prompt, chunks, neighbours, seed=neighbours)
    assert torch.equal(found, logits[: sum(chunks)])


def test_a_chunk_whose_logits_nobody_wants_leaves_the_same_pages(cpu, expected):
    decoder, prompt, logits = expected
    pages = Pages(decoder.traits, decoder.dtype)
    assert len(cpu.forward(decoder, pages.pool, pages.step([(0, prompt[:300], 0)], wanted=[]))) == 0
    last = cpu.forward(decoder, pages.pool, pages.step([(0, prompt[300:301], 300)]))
    assert torch.equal(last[0], logits[300])


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_changes_no_bit(cpu, expected, threads):
    decoder, prompt, logits = expected
    assert torch.equal(logits_of(CpuBackend(threads), decoder, prompt, [400] + [1] * 20 + [140]), logits)


@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS.values(), ids=PRECISIONS)
def test_each_batch_size_up_to_64_decodes_the_same_bits(cpu, dtype, precision):
    """The same row, alone and among 2 to 64, in every place of every register tile."""
    traits = llama_traits()
    decoder, pages = packed(cpu, traits, random_weights(traits), dtype, precision), Pages(traits, dtype)
    alone = {}
    for sequence in range(64):
        batch = pages.step([(sequence, [sequence * 3 % traits.vocab_size], 0)])
        alone[sequence] = cpu.forward(decoder, pages.pool, batch)[0].clone()
    for size in range(2, 65):
        order = random.Random(size).sample(range(64), size)
        batch = pages.step([(sequence, [sequence * 3 % traits.vocab_size], 0) for sequence in order])
        logits = cpu.forward(decoder, pages.pool, batch)
        assert all(torch.equal(logits[row], alone[sequence]) for row, sequence in enumerate(order)), size


def test_more_heads_of_rows_than_a_team_has_chunks_attend_alike(cpu):
    """1,100 decodes of 64 heads are 70,400 pieces of attention; a phase has 65,535 chunks at most."""
    heads = dict(num_heads=64, num_kv_heads=64, head_dim=16, layer_windows=(None,), layer_ropes=(rope(16),))
    traits = llama_traits(hidden_size=16, intermediate_size=16, **heads)
    decoder = cpu.pack(traits, random_weights(traits), torch.bfloat16)
    pages = Pages(traits, torch.bfloat16, units_per_page=128, total=1100)
    batch = pages.step([(sequence, [sequence % traits.vocab_size], 0) for sequence in range(1100)])
    together = cpu.forward(decoder, pages.pool, batch).clone()
    for sequence in (0, 1, 550, 551, 1099):
        alone = pages.step([(sequence, [sequence % traits.vocab_size], 0)])
        assert torch.equal(cpu.forward(decoder, pages.pool, alone)[0], together[sequence]), sequence
