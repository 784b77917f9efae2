"""Sampling against its plain definition, and the promises about neighbours, seeds and broken rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampling import SamplingRow, sample, uniform
from engine.sequence import SamplingParams


def row(seed=0, prompt=(), output=(), banned=(), **settings) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=8, **settings), prompt, output, seed, banned)


def plain_choice(logits: torch.Tensor, row: SamplingRow) -> int:
    """The definition: sort everything, filter, renormalise, invert the cumulative distribution at the row's number."""
    params = row.params
    values = logits.tolist()
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    scaled = (logits[order].double() - logits.max().double()) / params.temperature
    weights = scaled.exp()
    kept = int((weights >= params.min_p).sum())
    if params.top_k > 0:
        kept = min(kept, params.top_k)
    chances = weights[:kept] / weights[:kept].sum()
    if params.top_p < 1:
        kept = int((chances.cumsum(0) < params.top_p).sum()) + 1
        chances = chances[:kept] / chances[:kept].sum()
    place = int((chances.cumsum(0) <= uniform(row.seed, len(row.output_ids))).sum())
    return order[place]


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.5, "top_k": 300},
    {"temperature": 1.0, "top_k": 400, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 2.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 2.0, "min_p": 1e-4, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1e-4},
]


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0], ids=["flat", "even", "peaked"])
@pytest.mark.parametrize("vocab", [5, 384, 1000, 4096])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_what_the_definition_draws(settings, vocab, spread):
    logits = spread * torch.randn(16, vocab, generator=torch.Generator().manual_seed(vocab))
    rows = [row(seed=seed, output=range(seed % 3), **settings) for seed in range(len(logits))]
    assert sample(logits, rows) == [plain_choice(*each) for each in zip(logits, rows, strict=True)]


def test_draws_follow_the_distribution():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -3.0, 0.5, 0.25, 0.125])
    rows = [row(seed=seed, temperature=0.7) for seed in range(20_000)]
    drawn = torch.bincount(torch.tensor(sample(logits.expand(len(rows), -1), rows)), minlength=8)
    expected = torch.softmax(logits / 0.7, -1) * len(rows)
    assert ((drawn - expected) ** 2 / expected).sum() < 24.3  # chi-square of 7 degrees: 1 in 1,000


def test_greedy_takes_the_first_of_the_best():
    logits = torch.zeros(1, 384)
    logits[0, [70, 200, 300]] = 5.0
    assert sample(logits, [row(temperature=0.0)]) == [70]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(temperature):
    logits = torch.randn(4, 384, generator=torch.Generator().manual_seed(1))
    alone = sample(logits, [row(temperature=temperature)] * 4)
    logits[1, 77] = torch.nan
    logits[2] = -torch.inf
    assert sample(logits, [row(temperature=temperature)] * 4) == [alone[0], None, None, alone[3]]


def test_a_row_draws_the_same_among_any_neighbours():
    logits = 2 * torch.randn(64, 384, generator=torch.Generator().manual_seed(2))
    rows = [row(seed=i, **SETTINGS[i % len(SETTINGS)]) for i in range(64)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(64)]
    assert together[20:50] == sample(logits[20:50], rows[20:50])


def test_seed_and_position_both_change_the_draw():
    assert len({uniform(seed, position) for seed in (-1, 0, 1, 2**63) for position in range(50)}) == 200


def test_logits_are_left_as_they_are():
    logits = torch.randn(2, 384)
    before = logits.clone()
    sample(logits, [row(temperature=1.0, output=(3,), repetition_penalty=1.5, banned=(4,)), row(temperature=0.0)])
    assert torch.equal(logits, before)


def test_a_banned_token_never_comes():
    logits = torch.zeros(1, 64)
    logits[0, 9] = 50.0
    assert all(sample(logits, [row(seed=s, temperature=1.0, banned=(9,))]) != [9] for s in range(50))
    assert sample(logits, [row(temperature=0.0, banned=[9])]) == [0]


def test_repetition_penalty_counts_prompt_and_output():
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.2]])
    assert sample(logits, [row(temperature=0.0, prompt=(0,), repetition_penalty=1.5)]) == [1]
    assert sample(logits, [row(temperature=0.0, output=np.array([0, 0]), repetition_penalty=1.5)]) == [1]
    below = torch.tensor([[-1.0, -1.2]])
    assert sample(below, [row(temperature=0.0, prompt=(0,), repetition_penalty=1.5)]) == [1]


def test_presence_and_frequency_count_the_output_alone():
    logits = torch.tensor([[2.0, 1.5, 0.0]])
    assert sample(logits, [row(temperature=0.0, prompt=(0, 0), presence_penalty=1.0)]) == [0]
    assert sample(logits, [row(temperature=0.0, output=(0,), presence_penalty=1.0)]) == [1]
    assert sample(logits, [row(temperature=0.0, output=(0,), frequency_penalty=0.3)]) == [0]
    assert sample(logits, [row(temperature=0.0, output=(0, 0), frequency_penalty=0.3)]) == [1]


def test_rows_of_a_strided_buffer_are_read_right():
    wide = torch.randn(3, 1000)
    assert sample(wide[:, :384], [row(temperature=0.0)] * 3) == wide[:, :384].argmax(-1).tolist()
