"""Requests as lengths: how many tokens come in and how many go out. Knows no words.

The paper prints the means of its traces (Fig. 11) and not their spread. Lengths here are log-normal with the printed
means. What is assumed of the spread (variance / mean**2):

    ShareGPT answers  0.77: read back from Fig. 2. Tokens and reservation of Orca (Max) are 33.7% of 15,728 slots in 7
                      reservations: those that run will be 758 tokens long, E[prompt] + E[answer**2] / E[answer]
    all else          1.0 (as spread as an exponential), but the prompts of Alpaca 0.5: short instructions

Prompt and answer are independent. What would be longer than the context is cut to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Seed = int | tuple[int, ...]

MOST_PROMPT = 0.5  # share of the context that a prompt takes at most when the whole would not fit


@dataclass(frozen=True)
class Trace:
    prompt_mean: float
    answer_mean: float
    prompt_spread: float = 1.0  # variance / mean**2
    answer_spread: float = 1.0


TRACES = {
    "sharegpt": Trace(161.31, 337.99, answer_spread=0.77),
    "alpaca": Trace(19.31, 58.45, prompt_spread=0.5),
    "translation": Trace(35.0, 40.0, prompt_spread=0.3, answer_spread=0.3),  # a sentence; the paper prints no lengths
}


def lengths(trace: Trace, count: int, context_length: int, seed: Seed) -> Iterator[tuple[int, int]]:
    """`count` pairs (prompt, answer), each at least 1 token, together at most `context_length`."""
    source = np.random.default_rng(seed)
    prompts = log_normal(source, trace.prompt_mean, trace.prompt_spread, count)
    answers = log_normal(source, trace.answer_mean, trace.answer_spread, count)
    too_long = prompts + answers > context_length
    prompts[too_long] = np.minimum(prompts[too_long], int(MOST_PROMPT * context_length))
    answers = np.minimum(answers, context_length - prompts)
    return zip(prompts.tolist(), answers.tolist(), strict=True)


def log_normal(source: np.random.Generator, mean: float, spread: float, count: int) -> np.ndarray:
    variance = np.log(1 + spread)  # of the logarithm
    drawn = source.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), count)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def arrivals(rate: float, count: int, seed: Seed) -> np.ndarray:
    """Seconds at which `count` requests of a Poisson process arrive."""
    return np.cumsum(np.random.default_rng((*np.atleast_1d(seed), 1)).exponential(1 / rate, count))
