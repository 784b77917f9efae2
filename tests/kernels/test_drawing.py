"""Draws of every backend against their definition, and the promises about neighbours and broken rows."""

import pytest
import torch

from kernels import BackendUnavailable, drawing
from kernels.cpu import CpuBackend
from kernels.reference import ReferenceBackend
from kernels.spec import Draws

SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_p": 0.9},
    {"top_k": 1},
    {"top_k": 7},
    {"temperature": 1.5, "top_k": 300},
    {"top_k": 400, "top_p": 0.5},
    {"top_k": 5000},
    {"top_p": 1e-9},
    {"temperature": 2.0, "top_p": 0.999},
    {"min_p": 0.05},
    {"temperature": 2.0, "min_p": 1e-4, "top_p": 0.95},
    {"min_p": 0.01, "top_k": 3},
    {"min_p": 1.0},
    {"temperature": 1e-4},
    {"temperature": 0.0},
]


def draws_of(settings, chances=None) -> Draws:
    """One row for each of `settings`; by default with a chance of its own in [0, 1)."""
    chances = chances or [(i * 0.618 + 0.1) % 1 for i in range(len(settings))]
    columns = {
        name: [each.get(name, default) for each in settings]
        for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    return Draws(**columns, chance=chances)


def plain_draw(logits, temperature, top_k, top_p, min_p, chance) -> int:
    """The definition, word for word."""
    order = logits.sort(descending=True, stable=True).indices
    if temperature == 0:
        return order[0].item()
    weights = ((logits[order].double() - logits.max().double()) / temperature).exp()
    kept = int((weights >= min_p).sum())
    kept = min(kept, top_k) if top_k else kept
    if top_p < 1:
        kept = int((weights[:kept].cumsum(0) < top_p * weights[:kept].sum()).sum()) + 1
    place = int((weights[:kept].cumsum(0) <= chance * weights[:kept].sum()).sum())
    return order[min(place, kept - 1)].item()


@pytest.fixture(scope="module", params=["reference", "native", "avx512", "avx2", "scalar"])
def backend(request):
    if request.param == "reference":
        return ReferenceBackend()
    try:
        backend = CpuBackend(threads=2, isa=request.param)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    if request.param not in ("native", backend.isa):
        pytest.skip(f"this processor has no {request.param}")
    return backend


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0], ids=["flat", "even", "peaked"])
@pytest.mark.parametrize("vocab", [1, 5, 65, 384, 1000, 4099])
def test_draws_what_the_definition_draws(backend, vocab, spread):
    settings = SETTINGS * 2
    logits = spread * torch.randn(len(settings), vocab, generator=torch.Generator().manual_seed(vocab))
    draws = draws_of(settings)
    columns = (draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.chance)
    expected = [plain_draw(row, *each) for row, *each in zip(logits, *columns, strict=True)]
    assert backend.draw(logits, draws) == expected


@pytest.mark.parametrize(
    ("settings", "last"), [({}, 299), ({"top_p": 0.7}, 100), ({"top_k": 2}, 100), ({"min_p": 0.58}, 100)], ids=str
)
def test_both_ends_of_chance_fall_on_kept_tokens(backend, settings, last):
    logits = torch.full((2, 300), -torch.inf)
    logits[:, [7, 100, 299]] = torch.tensor([3.0, 2.5, 2.4])
    assert backend.draw(logits, draws_of([settings] * 2, [0.0, 1 - 2**-53])) == [7, last]


@pytest.mark.parametrize("top_k", [300, 301, 2**31 - 1])
def test_a_top_k_that_leaves_nothing_out_draws_what_none_draws(backend, top_k):
    logits = 2 * torch.randn(64, 300, generator=torch.Generator().manual_seed(4))
    settings = [{"temperature": 0.5 + i / 64, "top_p": 1 - i / 256} for i in range(64)]
    chances = [i / 64 for i in range(64)]
    all_of_them = [each | {"top_k": top_k} for each in settings]
    assert backend.draw(logits, draws_of(all_of_them, chances)) == backend.draw(logits, draws_of(settings, chances))


def test_equal_logits_are_taken_in_the_order_of_their_numbers(backend):
    logits = torch.zeros(4, 1000)
    chances = [0.0, 0.2505, 0.5005, 0.9995]
    assert backend.draw(logits, draws_of([{}] * 4, chances)) == [0, 250, 500, 999]
    assert backend.draw(logits, draws_of([{"top_k": 8}] * 4, chances)) == [0, 2, 4, 7]
    assert backend.draw(logits, draws_of([{"temperature": 0.0}] * 4, chances)) == [0] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_gives_no_token_and_changes_no_other(backend, temperature):
    logits = torch.randn(5, 500, generator=torch.Generator().manual_seed(3))
    draws = draws_of([{"temperature": temperature}] * 5)
    alone = backend.draw(logits, draws)
    logits[1, 499], logits[2], logits[3, 0] = torch.nan, -torch.inf, torch.inf
    assert backend.draw(logits, draws) == [alone[0], -1, -1, -1, alone[4]]


def test_a_row_draws_the_same_among_any_neighbours(backend):
    logits = 2 * torch.randn(64, 700, generator=torch.Generator().manual_seed(2))
    settings, chances = [SETTINGS[i % len(SETTINGS)] for i in range(64)], [i / 64 for i in range(64)]
    together = backend.draw(logits, draws_of(settings, chances))
    before = logits.clone()
    for i in range(64):
        assert backend.draw(logits[i : i + 1], draws_of(settings[i : i + 1], chances[i : i + 1])) == [together[i]]
    assert torch.equal(logits, before)


def test_rows_of_a_strided_buffer_are_read_right(backend):
    wide = torch.randn(6, 1000)
    settings = [{}, {"temperature": 0.0}, {"top_k": 5}] * 2
    ours = backend.draw(wide[:, :390], draws_of(settings))
    assert ours == backend.draw(wide[:, :390].contiguous(), draws_of(settings))


def test_no_rows_give_no_tokens(backend):
    assert backend.draw(torch.empty(0, 9), draws_of([])) == []


def test_more_rows_than_a_team_has_chunks_all_get_a_token(backend):
    logits = torch.zeros(70_000, 2)
    logits[::3, 1] = 1.0
    assert backend.draw(logits, draws_of([{"temperature": 0.0}] * 70_000)) == logits.argmax(-1).tolist()


def test_few_candidates_and_many_agree(monkeypatch):
    logits = torch.randn(32, 2048, generator=torch.Generator().manual_seed(3))
    draws = draws_of(SETTINGS * 2)
    many = drawing.draw(logits, draws)
    monkeypatch.setattr(drawing, "CANDIDATES", 2)
    assert drawing.draw(logits, draws) == many
