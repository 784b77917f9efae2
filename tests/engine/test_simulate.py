"""The paper's experiments on the real scheduler and pool, and that the shortcuts of the simulation change nothing."""

import argparse
import io
import json
import sys
from xml.etree import ElementTree

import pytest

from engine.__main__ import main, parser
from engine.kv.reserved import POLICIES
from engine.simulate import command, experiments
from engine.simulate.experiments import (
    BEAM_TURNOVER,
    FIG2,
    FIG13,
    FIG15,
    FIG15_BEAMS,
    FIG16,
    Run,
    simulate,
    simulate_all,
)
from engine.simulate.machines import MACHINES, Machine
from engine.simulate.simulation import Ask, Simulation, asks_of, blocks_up_to
from engine.simulate.traces import TRACES, arrivals, lengths

SMALL = Machine("small", 1e9, 2, 8, 256, "A100-40GB", 1, printed_slots=4096)
COMMON = {"machine": "opt-13b", "requests": 1000, "block_tokens": 16, "seed": 1}


def run_small(policy: str, *, rate: float | None = None, samples: int = 1, turnover: float | None = None, **options):
    simulation = Simulation(SMALL, policy, **options)
    pairs = list(lengths(TRACES["alpaca"], 450 if rate is None else 150, SMALL.context_length, 3))
    if rate is None:  # the queue is never empty
        simulation.run(asks_of(pairs, samples, turnover))
    else:
        times = arrivals(rate, len(pairs), 3).tolist()
        asks = [Ask(*pair, samples, when, turnover) for pair, when in zip(pairs, times, strict=True)]
        simulation.run(asks, always_full=False)
    simulation.kv.check_integrity()
    return simulation


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("rate", "block_tokens"), [(None, 16), (None, 1), (3000.0, 16), (30.0, 16)])
def test_steps_taken_in_one_go_give_the_figures_of_steps_taken_one_by_one(policy, rate, block_tokens):
    quick = run_small(policy, rate=rate, block_tokens=block_tokens)
    slow = run_small(policy, rate=rate, block_tokens=block_tokens, step_by_step=True)
    assert quick.scheduler.preemptions == slow.scheduler.preemptions
    for name in ("steps", "sequences", "tokens", "reserved", "internal", "allocated", "lone_slots", "generated"):
        assert getattr(quick.figures, name) == getattr(slow.figures, name), name
    assert quick.figures.seconds == pytest.approx(slow.figures.seconds)
    assert quick.figures.seconds_per_token == pytest.approx(slow.figures.seconds_per_token)


def test_every_answer_has_the_length_the_trace_says():
    simulation = run_small("paged", rate=3000.0)
    pairs = list(lengths(TRACES["alpaca"], 150, SMALL.context_length, 3))
    assert simulation.finished == 150
    assert simulation.figures.generated == sum(answer for _, answer in pairs)


def test_the_same_seed_gives_the_same_figures_and_another_does_not():
    runs = [simulate(Run(policy="oracle", requests=200, seed=seed)) for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_shares_of_a_pool_are_all_of_it(policy):
    figures = run_small(policy).figures
    shares = figures.shares(SMALL.slots)
    assert sum(shares[key] for key in ("token", "reserved", "internal", "external")) == pytest.approx(100, abs=0.02)
    assert min(shares.values()) >= 0


def test_one_sequence_alone_is_counted_by_hand():
    """Prompt 20, answer 3: computed are 20, 21 and 22 tokens, in 2 blocks of 16."""
    simulation = Simulation(SMALL, "paged")
    figures = simulation.run([Ask(20, 3)], always_full=False)
    assert (figures.steps, figures.sequences, figures.tokens) == (3, 3, 20 + 21 + 22)
    assert figures.allocated == 3 * 32
    reserved = Simulation(SMALL, "max").run([Ask(20, 3)], always_full=False)
    assert (reserved.reserved, reserved.internal) == (3 + 2 + 1, 3 * (256 - 23))


def test_blocks_up_to_is_the_sum_it_stands_for():
    for size in (1, 3, 16):
        assert [blocks_up_to(n, size) for n in range(50)] == [
            sum(-(-i // size) for i in range(n + 1)) for n in range(50)
        ]


def test_answers_to_one_prompt_share_its_full_blocks():
    """Two answers of 40 tokens to 32: two blocks are shared for as long as both run."""
    simulation = Simulation(SMALL, "paged", share=True)
    figures = simulation.run([Ask(32, 16, samples=2)], always_full=False)
    # 1 step alone with 2 blocks, then 15 steps with 3 blocks each, 2 of them shared
    assert (figures.lone_slots, figures.allocated) == (16 * (2 + 15 * 6), 16 * (2 + 15 * 4))


def test_a_shared_prefix_is_held_once():
    simulation = Simulation(SMALL, "paged", share=True, prefix_tokens=64)
    figures = simulation.run([Ask(10, 16), Ask(10, 16)], always_full=False)
    assert figures.lone_slots - figures.allocated == figures.steps * 64
    assert simulation.kv.pinned_pages == 4


def test_arrivals_are_poisson_at_the_rate_asked_for():
    times = arrivals(4.0, 20_000, 0)
    assert 20_000 / times[-1] == pytest.approx(4.0, rel=0.03)


@pytest.mark.parametrize("name", ["sharegpt", "alpaca"])
def test_lengths_have_the_means_that_the_paper_prints(name):
    pairs = list(lengths(TRACES[name], 100_000, 2048, 0))
    prompts, answers = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
    assert prompts == pytest.approx(TRACES[name].prompt_mean, rel=0.02)
    assert answers == pytest.approx(TRACES[name].answer_mean, rel=0.02)
    assert max(prompt + answer for prompt, answer in pairs) <= 2048


def test_slots_are_those_of_the_papers_table_and_for_other_machines_what_memory_leaves():
    gib = 2**30
    assert MACHINES["opt-13b"].slots == 12 * gib // MACHINES["opt-13b"].kv_bytes_per_token
    assert MACHINES["opt-175b"].slots == pytest.approx(264 * gib / MACHINES["opt-175b"].kv_bytes_per_token, rel=0.001)
    llama = MACHINES["llama-3-8b-h100"]
    assert llama.kv_bytes_per_token == 131_072
    assert llama.slots == pytest.approx((0.9 * 80 * gib - 16.06e9) / 131_072, rel=0.001)


@pytest.fixture(scope="module")
def fig2():
    return experiments.fig2(COMMON)


@pytest.mark.parametrize(("policy", "points"), [("max", 3), ("pow2", 5), ("oracle", 3), ("paged", 3)])
def test_token_shares_are_those_of_figure_2(fig2, policy, points):
    assert fig2.document[policy]["token"] == pytest.approx(FIG2[policy]["token"], abs=points)


@pytest.mark.parametrize(("trace", "requests"), [("sharegpt", 1000), ("alpaca", 3000)])
@pytest.mark.parametrize("policy", ["max", "pow2", "oracle"])
def test_batches_are_those_of_figure_13_where_memory_is_the_limit(trace, requests, policy):
    found = simulate(Run(trace=trace, policy=policy, requests=requests))
    assert found["batch"] == pytest.approx(FIG13[trace][policy], rel=0.1)


def test_figure_13_has_both_traces():
    document = experiments.fig13({**COMMON, "requests": 300}, "alpaca").document
    assert set(document) == set(POLICIES)
    assert document["max"]["paper"] == document["max"]["sharegpt"]["paper"] == {"batch": 7.0}


@pytest.mark.parametrize("samples", [2, 6])
def test_sharing_saves_what_figure_15_shows(samples):
    found = simulate(Run(trace="alpaca", samples=samples, requests=600 // samples, seed=1))
    assert found["saved_by_sharing"] == pytest.approx(FIG15["alpaca"][samples], abs=3)


@pytest.mark.parametrize(("trace", "width", "requests"), [("alpaca", 2, 300), ("alpaca", 6, 150), ("sharegpt", 2, 100)])
def test_beams_save_about_what_figure_15_shows(trace, width, requests):
    run = Run(trace=trace, samples=width, turnover=BEAM_TURNOVER, requests=requests, seed=1)
    assert simulate(run)["saved_by_sharing"] == pytest.approx(FIG15_BEAMS[trace][width], abs=6)


def test_beams_that_never_turn_over_share_no_more_than_other_answers():
    ask = {"trace": "alpaca", "samples": 4, "requests": 100}
    assert simulate(Run(**ask, turnover=0.0))["saved_by_sharing"] == pytest.approx(
        simulate(Run(**ask))["saved_by_sharing"], abs=1
    )


def test_load_of_beams_says_what_it_assumes_of_them():
    common = {"machine": "opt-13b", "requests": 100, "block_tokens": 16, "seed": 0}
    answers = {"trace": "sharegpt", "samples": 4}
    loads = (experiments.load(common, ["paged"], **answers, turnover=each) for each in (None, BEAM_TURNOVER))
    notes = [" ".join(each.assumed) for each in loads]
    assert ["16% of the beams" in each for each in notes] == [False, True]


def test_beams_are_counted_by_hand():
    """Prompt 32, 3 tokens: the prompt's two blocks, alone; then 2 beams that share them, with a block more each."""
    simulation = Simulation(SMALL, "paged", share=True)
    figures = simulation.run([Ask(32, 3, samples=2, turnover=1.0)], always_full=False)
    assert (figures.steps, figures.allocated, figures.lone_slots) == (3, 16 * (2 + 4 + 4), 16 * (2 + 6 + 6))
    assert simulation.finished == 2


def test_beams_go_on_together_where_memory_is_short():
    simulation = run_small("paged", rate=3000.0, samples=4, turnover=0.5, share=True)
    assert simulation.scheduler.preemptions > 0
    assert simulation.finished == 4 * 150 and simulation.scheduler.idle


def test_a_longer_shared_prefix_gains_more_as_in_figure_16():
    document = experiments.fig16(COMMON).document
    assert document["341"]["speedup"] == pytest.approx(FIG16[341], rel=0.15)
    assert 1.5 < document["80"]["speedup"] < document["341"]["speedup"]


def test_larger_blocks_waste_more():
    runs = [simulate(Run(policy="paged", requests=400, block_tokens=size)) for size in (1, 16, 128)]
    waste = [each["waste_of_allocated"] for each in runs]
    assert waste[0] == 0 and waste == sorted(waste)


def test_json_is_one_document_of_the_four_policies(capsys, tmp_path):
    plot = tmp_path / "fig2.svg"
    assert main(["simulate", "fig2", "--json", "--requests", "300", "--plot", str(plot)]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert set(document) == {"max", "pow2", "oracle", "paged"}
    for figures in document.values():
        assert {"token", "reserved", "internal", "external", "batch"} <= set(figures)
    assert "paper" in err and "assumed" in err
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_a_terminal_is_told_how_far_it_is(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    simulate_all([Run(trace="alpaca", samples=samples, requests=600 // samples, seed=1) for samples in (4, 6)])
    assert terminal.getvalue() == "\r\033[K1 of 2 simulations\r\033[K"


def test_any_machine_trace_rate_and_policy_can_be_asked_for(capsys):
    arguments = "simulate load --machine opt-66b --trace alpaca --rate 8 --requests 200 --policy max --policy paged"
    assert main([*arguments.split(), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"max", "paged"}
    assert document["paged"]["latency_seconds_per_token"] < document["max"]["latency_seconds_per_token"]


def test_names_on_the_command_line_are_those_of_the_tables():
    assert set(command.MACHINE_NAMES) == set(MACHINES)
    assert set(command.TRACE_NAMES) == set(TRACES)
    assert command.POLICY_NAMES == POLICIES


@pytest.mark.parametrize("arguments", ["simulate fig3", "simulate fig2 --requests 0", "simulate load --policy lru"])
def test_what_is_not_there_is_refused_by_name(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        parser().parse_args(arguments.split())
    assert refused.value.code == 2
    assert isinstance(parser(), argparse.ArgumentParser)
    assert arguments.split()[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    ["fig2 --rate 3", "fig13 --policy max", "fig16 --machine opt-66b", "blocks --block-tokens 8", "growth --steps 9"],
)
def test_an_option_that_says_nothing_to_an_experiment_is_refused(arguments, capsys):
    assert main(["simulate", *arguments.split()]) == 2
    assert arguments.split()[1] in capsys.readouterr().err


def test_every_experiment_says_what_it_reads():
    assert command.READ.keys() == command.EXPERIMENTS.keys()


@pytest.mark.parametrize(
    "arguments",
    [
        "fig2 --seed -1", "fig13 --requests -5", "fig15 --block-tokens -16", "load --rate -3", "load --rate nan",
        "load --rate 0", "load --prefix-tokens -1", "load --samples -2", "real --pool-mib -128", "real --steps -1",
        "real --warm-up -1", "real --seed -9", "growth --threads -1", "load --prefix-tokens 2048",
    ],
)  # fmt: skip
def test_a_number_that_makes_no_sense_is_refused_with_the_option_it_came_with(arguments, capsys):
    try:
        status = main(["simulate", *arguments.split()])
    except SystemExit as refused:
        status = refused.code
    assert status == 2
    assert arguments.split()[1] in capsys.readouterr().err
