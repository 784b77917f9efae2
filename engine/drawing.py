"""From the logits of a step to a token for each choice that wants one. Knows no pages and no clients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.batch import wants_token
from engine.beam import Beam
from engine.choice import Choice
from engine.logprobs import Score, scores_of
from engine.sampling import DrawKernel, sample
from engine.scheduler import Step
from kernels import drawing

LOOKED_AHEAD = -1  # in place of a token


@dataclass(slots=True)
class Draw:
    """What one choice gets: a token, None where its logits are not numbers, and what the model thought of it. A beam
    gets none: it has looked ahead."""

    choice: Choice | Beam
    token: int | None
    score: Score | None = None


def draw(step: Step, logits: Tensor, kernel: DrawKernel = drawing.draw) -> list[Draw]:
    """logits fp32 [row, vocab], the rows that `build_batch` asked for. Choices that begin with this step draw too."""
    spans = zip(step.sequences, step.counts, strict=True)
    choices = [sequence.owner for sequence, count in spans if wants_token(sequence, count)]
    if any(sequence.scored for sequence in step.sequences):
        logits = score_prompts(step, logits)
    if not all(choice.plain for choice in choices):
        return draw_with_care(choices, logits, kernel)
    tokens = sample(logits, [choice.row for choice in choices], kernel)
    return [Draw(choice, token) for choice, token in zip(choices, tokens, strict=True)]


def draw_with_care(choices: list[Choice | Beam], logits: Tensor, kernel: DrawKernel) -> list[Draw]:
    """As `draw`, where some fork, are constrained, are asked what the model thought, or are beams."""
    searching = [row for row, choice in enumerate(choices) if isinstance(choice, Beam)]
    looked = [Draw(choices[row], LOOKED_AHEAD if choices[row].look_ahead(logits[row]) else None) for row in searching]
    others = [row for row in range(len(choices)) if row not in searching]
    rows = [row for row in others for _ in (choices[row], *choices[row].forks)]
    choices = [each for row in others for each in (choices[row], *choices[row].forks)]
    logits = logits[rows]
    tokens = sample(constrained(logits, choices), [choice.row for choice in choices], kernel)
    draws = [Draw(choice, token) for choice, token in zip(choices, tokens, strict=True)]
    score_draws(draws, logits)
    return draws + looked


def score_draws(draws: list[Draw], logits: Tensor) -> None:
    """Adds what the model thought of the tokens, where it was asked. logits fp32 [draw, vocab]."""
    counts = {i: each.choice.params.logprobs for i, each in enumerate(draws) if each.token is not None}
    asked = [i for i, count in counts.items() if count is not None]
    if asked:
        scores = scores_of(logits[asked], [draws[i].token for i in asked], max(counts[i] for i in asked))
        for i, score in zip(asked, scores, strict=True):
            draws[i].score = Score(score.token, score.logprob, score.best[: counts[i]])


def constrained(logits: Tensor, choices: list[Choice]) -> Tensor:
    """The logits under each choice's constraint: a copy if there are any."""
    bound = [row for row, choice in enumerate(choices) if choice.constraint is not None]
    if bound:
        logits = logits.clone()
    for row in bound:
        choices[row].constraint.apply(logits[row], choices[row].row)
    return logits


def score_prompts(step: Step, logits: Tensor) -> Tensor:
    """Notes what the model thought of the prompt tokens of this step; returns the rows that want a token."""
    wanted, end = [], 0
    for sequence, count in zip(step.sequences, step.counts, strict=True):
        wants, rows = wants_token(sequence, count), count if sequence.scored else wants_token(sequence, count)
        end += rows
        if sequence.scored:
            sequence.owner.score_prompt(sequence.computed, logits[end - rows : end])
        if wants:
            wanted.append(end - 1)
    return logits[wanted]
