"""Whole forwards of the Triton backend in the interpreter: fused sums, tiles of any length, and padded decodes."""

import pytest
import torch

from kernels.reference import ReferenceBackend
from kernels.triton import graphs
from kernels.triton.graphs import pad
from kernels.triton.plan import make_plan, most_spans
from tests.gpu import check
from tests.kernels.decoders import Pages, gemma_traits, llama_traits, random_adapter, random_weights
from tests.kernels.test_adapters import logits_of

TINY = dict(hidden_size=32, intermediate_size=40, vocab_size=50, head_dim=16)


TRAITS = {
    "llama": llama_traits(**TINY),
    "gemma3": gemma_traits(**TINY, layer_windows=(20, None), num_heads=2, num_kv_heads=1),
}


@pytest.fixture(params=TRAITS.values(), ids=TRAITS.keys())
def traits(request):
    return request.param


def prefilled(backend, traits):
    """A decoder, pages with the KV of three sequences in them, and a step that decodes each."""
    weights = random_weights(traits)
    pages, reference = Pages(traits, torch.float32), ReferenceBackend()
    past = pages.step([(s, [(s * 7 + i) % 50 for i in range(length)], 0) for s, length in enumerate((30, 1, 47))])
    reference.forward(reference.pack(traits, weights, torch.float32), pages.pool, past)
    return backend.pack(traits, weights, torch.float32), pages, pages.step([(0, [3], 30), (1, [4], 1), (2, [5], 47)])


def test_prefill_of_several_tiles_is_the_reference(interpreted, traits):
    weights, reference = random_weights(traits), ReferenceBackend()
    logits = []
    for backend in (interpreted, reference):
        pages = Pages(traits, torch.float32)
        batch = pages.step([(0, [i % 50 for i in range(36)], 0), (1, [7], 0)])
        logits.append(backend.forward(backend.pack(traits, weights, torch.float32), pages.pool, batch))
    assert (logits[0] - logits[1]).abs().max() <= 1e-5 * logits[1].abs().max()


def test_rows_of_several_adapters_are_the_reference(interpreted):
    traits = llama_traits(**TINY)
    parts = [random_adapter(traits, rank, seed) for seed, rank in enumerate((3, 8, 1))]
    ours, theirs = (logits_of(backend, traits, parts, torch.float32) for backend in (interpreted, ReferenceBackend()))
    for sequence, expected in theirs.items():
        assert (ours[sequence] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_padding_of_a_graph_changes_no_logit_and_no_page(interpreted, traits):
    """Nearly: PyTorch's matrix products on a processor sum in another order when there are more rows."""
    decoder, pages, batch = prefilled(interpreted, traits)
    padded = pad(batch)
    assert len(padded.tokens) == 4
    results = []
    for each in (batch, padded):
        pool = pages.pool.clone()
        logits = interpreted.run(decoder, pool, make_plan(traits, decoder.windows, each, interpreted.device))
        results.append((logits[:3], pool.view(torch.float32)))
    (plain, plain_pool), (with_padding, padded_pool) = results
    torch.testing.assert_close(with_padding, plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(padded_pool, plain_pool, rtol=0, atol=1e-5, equal_nan=True)


def test_a_graph_that_cannot_be_made_is_not_missed_and_not_tried_again(interpreted, traits, monkeypatch, caplog):
    """A processor has none, so what is tried here is what remains without."""
    decoder, pages, batch = prefilled(interpreted, traits)
    tried = []

    def capture(plan, run, memory):
        tried.append(plan.rows)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "capture", capture)
    expected = interpreted.forward(decoder, pages.pool.clone(), batch)
    for _ in range(2):
        logits = decoder.graphs.replay(decoder, pages.pool, batch, interpreted)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert tried == [4] and caplog.text.count("without a CUDA graph, and slower: CUDA out of memory") == 1


def test_attention_is_the_same_to_the_bit_alone_and_in_company(interpreted, traits):
    decoder, pages, together = prefilled(interpreted, traits)
    interpreted.forward(decoder, pages.pool, together)
    alone = pages.step([(2, [5], 47)])
    q = torch.randn(3, traits.num_heads, traits.head_dim, generator=torch.Generator().manual_seed(0))
    for layer in range(traits.num_layers):
        answers = [
            interpreted.ops(decoder, pages.pool, batch).attend(layer, queries)
            for batch, queries in ((together, q), (alone, q[2:]))
        ]
        assert torch.isfinite(answers[0]).all() and torch.equal(answers[0][2], answers[1][0])


@pytest.mark.parametrize(
    ("context", "spans"), [(1, (1, 1)), (256, (1, 1)), (257, (2, 2)), (700, (4, 3)), (5000, (32, 3))]
)
def test_a_context_is_cut_at_multiples_of_a_span(context, spans):
    assert most_spans((None, 512), context) == spans


def test_the_check_for_a_gpu_generates_the_reference_tokens(interpreted):
    """tests/gpu/check.py runs where there is a GPU; here, that what it compares is comparable."""
    traits, weights = TRAITS["llama"], random_weights(TRAITS["llama"])
    answers = [
        check.greedy(each, traits, each.pack(traits, weights, torch.float32), [[1, 2, 3], [4]], tokens=3)
        for each in (interpreted, ReferenceBackend())
    ]
    assert answers[0] == answers[1]
    assert [row.right for row in check.check_company(interpreted, traits, (1, 2), rounds=1)] == [True]
