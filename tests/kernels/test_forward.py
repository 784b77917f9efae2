"""Whole forwards of the C++ backend: transformers' logits, hostile pages, and input that must be refused."""

import dataclasses
import random

import pytest
import torch

from kernels.reference import ReferenceBackend
from kernels.self_check import check
from tests.kernels.decoders import Pages, from_transformers, gemma_traits, llama_traits, random_weights
from tests.kernels.test_reference import MODELS, logits_of_split_prompts


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_fp32_logits_are_those_of_transformers(cpu, build):
    model = build()
    ours, prompts = logits_of_split_prompts(cpu, *from_transformers(model), torch.float32)
    for logits, prompt in zip(ours, prompts, strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0]
        assert (logits - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_bf16_logits_are_near_those_of_the_reference(cpu, build):
    traits, weights = from_transformers(build())
    ours, _ = logits_of_split_prompts(cpu, traits, weights, torch.bfloat16)
    theirs, _ = logits_of_split_prompts(ReferenceBackend(), traits, weights, torch.bfloat16)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 0.02 * b.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("traits", [llama_traits(), gemma_traits()], ids=["llama", "gemma3"])
def test_neither_the_page_ids_nor_the_page_size_change_a_bit(cpu, traits, dtype):
    weights = random_weights(traits)
    plain, _ = logits_of_split_prompts(cpu, traits, weights, dtype, shuffled=False)
    for pages in (dict(seed=5), dict(units_per_page=1), dict(units_per_page=7)):
        other, _ = logits_of_split_prompts(cpu, traits, weights, dtype, **pages)
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_and_head_may_be_two_tensors(cpu, dtype):
    traits = llama_traits()
    tied = random_weights(traits)
    apart = tied | {"head": tied["embedding"].clone()}
    ours, theirs = (logits_of_split_prompts(cpu, traits, weights, dtype)[0] for weights in (tied, apart))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_blocks_below_the_window_are_not_looked_at(cpu):
    traits = gemma_traits(layer_windows=(40, 40))
    decoder, pages = cpu.pack(traits, random_weights(traits), torch.float32), Pages(traits, torch.float32)
    ids = [random.Random(0).randrange(traits.vocab_size) for _ in range(400)]
    cpu.forward(decoder, pages.pool, pages.step([(0, ids[:399], 0)]))
    batch = pages.step([(0, ids[399:], 399)])  # drops what lies below position 360 and poisons it
    assert (batch.page_tables[0][0, : 360 // 16] == -1).all()
    assert torch.isfinite(cpu.forward(decoder, pages.pool, batch)).all()


def test_a_row_of_nan_spoils_no_other_sequence(cpu):
    traits = llama_traits()
    weights = random_weights(traits)
    weights["embedding"] = weights["head"].clone()
    weights["embedding"][7] = torch.nan
    decoder, pages = cpu.pack(traits, weights, torch.float32), Pages(traits, torch.float32)
    logits = cpu.forward(decoder, pages.pool, pages.step([(0, [1, 2, 3], 0), (1, [5, 7, 5], 0), (2, [4], 0)]))
    assert torch.isfinite(logits[[0, 1, 2, 6]]).all()
    assert torch.isnan(logits[[4, 5]]).all()


def test_a_batch_with_other_numbers_in_it_is_computed_anew(cpu):
    traits = llama_traits()
    decoder, pages = cpu.pack(traits, random_weights(traits), torch.float32), Pages(traits, torch.float32)
    batch, larger = pages.step([(0, [1, 2, 3], 0)]), pages.step([(1, [4, 5], 0), (2, [6, 7, 8, 9], 0)])

    def forward(batch):
        return cpu.forward(decoder, pages.pool, batch).clone()

    first, changed, many = forward(batch), forward(spoil(batch, "tokens", 0, 9)), forward(larger)
    assert torch.equal(forward(batch), first)
    batch.tokens[0] = 9
    assert torch.equal(forward(batch), changed)
    assert torch.equal(forward(larger), many)
    with pytest.raises(ValueError):
        forward(dataclasses.replace(spoil(larger, "tokens", 0, 9), page_tables=()))
    assert torch.equal(forward(larger), many)
    assert torch.equal(forward(batch), changed)


def test_no_rows_are_no_error(cpu):
    traits = llama_traits()
    decoder, pages = cpu.pack(traits, random_weights(traits), torch.float32), Pages(traits, torch.float32)
    batch = pages.step([(0, [1, 2], 0), (1, [], 5), (2, [3], 0)])
    assert cpu.forward(decoder, pages.pool, batch).shape == (3, traits.vocab_size)
    batch = pages.step([(0, [9], 2)], wanted=[])
    assert cpu.forward(decoder, pages.pool, batch).shape == (0, traits.vocab_size)


def spoil(batch, field, index, value):
    tensor = getattr(batch, field).clone()
    tensor[index] = value
    return dataclasses.replace(batch, **{field: tensor})


REFUSALS = {
    "token": (lambda b: spoil(b, "tokens", 1, 301), "row 1 has token 301, the vocabulary 301"),
    "negative token": (lambda b: spoil(b, "tokens", 0, -1), "row 0 has token -1"),
    "position": (lambda b: spoil(b, "positions", 2, 9), "row 2 has position 9, its sequence puts it at 2"),
    "logit row": (lambda b: spoil(b, "logit_rows", 0, 5), "logits are wanted of row 5 of 5"),
    "query starts": (lambda b: spoil(b, "query_starts", 2, 4), "query_starts must run from 0 to 5 rows"),
    "a sequence beyond the rows": (
        lambda b: spoil(spoil(b, "query_starts", 1, 100), "context_lens", 0, 100),
        "sequence 0 ends at row 100 of 5",
    ),
    "context": (lambda b: spoil(b, "context_lens", 0, 2), "sequence 0 has 3 rows in a context of 2"),
    "missing page": (
        lambda b: dataclasses.replace(b, page_tables=(torch.full_like(b.page_tables[0], -1),)),
        "block 0 of sequence 0 lies on page -1",
    ),
    "page beyond the pool": (
        lambda b: dataclasses.replace(b, page_tables=(torch.full_like(b.page_tables[0], 1000),)),
        "lies on page 1000 of 1000",
    ),
    "short table": (
        lambda b: dataclasses.replace(b, page_tables=(b.page_tables[0][:, :0].contiguous(),)),
        "sequence 0 has 3 tokens, its page table 0 blocks",
    ),
    "thin blocks": (
        lambda b: dataclasses.replace(b, page_tables=(b.page_tables[0][:, :, :1].contiguous(),)),
        "a block has 1 pages, 2 are needed",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_input_that_would_lead_astray_is_refused_with_its_numbers(cpu, change, message):
    traits = llama_traits()
    decoder, pages = cpu.pack(traits, random_weights(traits), torch.float32), Pages(traits, torch.float32)
    batch = pages.step([(0, [1, 2, 3], 0), (1, [4, 5], 0)])
    with pytest.raises(ValueError, match=message):
        cpu.forward(decoder, pages.pool, change(batch))


def test_the_compiled_backend_passes_its_self_check(cpu):
    check(cpu)


def test_what_is_not_supported_is_said(cpu):
    assert "head_dim 40" in cpu.unsupported(llama_traits(head_dim=40), torch.float32)
    assert "float16" in cpu.unsupported(llama_traits(), torch.float16)
    assert "relu" in cpu.unsupported(llama_traits(activation="relu"), torch.float32)
    assert cpu.unsupported(gemma_traits(), torch.bfloat16) is None


def test_a_weight_of_another_shape_is_refused(cpu):
    weights = random_weights(llama_traits())
    weights["layers.1.down"] = weights["layers.1.down"][:, :-1]
    with pytest.raises(ValueError, match=r"layers.1.down has shape \(96, 135\), the decoder needs \(96, 136\)"):
        cpu.pack(llama_traits(), weights, torch.float32)
