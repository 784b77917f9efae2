"""From the logits of a step to a token for each choice that wants one. Knows no pages and no clients."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, takewhile

from torch import Tensor

from engine.batch import wants_token
from engine.beam import Beam
from engine.choice import Choice
from engine.logprobs import Score, scores_of
from engine.sampling import DrawKernel, sample
from engine.scheduler import Step
from engine.sequence import Sequence
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
    """logits fp32 [row, vocab], the rows that `build_batch` asked for. Choices that begin with this step draw too. Of
    one whose tokens were guessed come all draws that count, in order."""
    wanted, scored, plain = [], False, True
    for sequence, count in zip(step.sequences, step.counts, strict=True):
        scored = scored or sequence.scored
        if wants_token(sequence, count):
            wanted.append(sequence)
            plain = plain and sequence.owner.plain and not sequence.drafted
    if scored:
        logits = score_prompts(step, logits)
    if not plain:
        return draw_with_care(wanted, logits, kernel)
    tokens = sample(logits, [sequence.owner.row for sequence in wanted], kernel)
    return [Draw(sequence.owner, token) for sequence, token in zip(wanted, tokens, strict=True)]


def draw_with_care(sequences: list[Sequence], logits: Tensor, kernel: DrawKernel) -> list[Draw]:
    """As `draw`, where some fork, are constrained, are asked what the model thought, were guessed, or are beams."""
    looked, rows, choices, settings, at = [], [], [], [], 0
    for sequence in sequences:
        owner = sequence.owner
        if isinstance(owner, Beam):
            looked.append(Draw(owner, LOOKED_AHEAD if owner.look_ahead(logits[at]) else None))
        elif sequence.drafted:
            settings += owner.rows_ahead(sequence.guesses)
            rows += range(at, at + 1 + sequence.drafted)
            choices += [owner] * (1 + sequence.drafted)
        else:
            own = (owner, *owner.forks)
            settings += [choice.row for choice in own]
            rows += [at] * len(own)
            choices += own
        at += 1 + sequence.drafted
    logits = logits[rows]
    tokens = sample(constrained(logits, choices), settings, kernel)
    draws = [Draw(choice, token) for choice, token in zip(choices, tokens, strict=True)]
    score_draws(draws, logits)
    return without_wrong_guesses(draws) + looked


def without_wrong_guesses(draws: list[Draw]) -> list[Draw]:
    """Those before which all guesses are what was drawn. Leaves `drafted` of each sequence at how many were right."""
    kept: list[Draw] = []
    for choice, own in groupby(draws, key=lambda each: each.choice):
        drawn, sequence = list(own), choice.sequence
        if sequence is not None and sequence.drafted:
            pairs = zip(drawn, sequence.guesses, strict=False)
            sequence.drafted = sum(1 for _ in takewhile(lambda pair: pair[0].token == pair[1], pairs))
            drawn = drawn[: 1 + sequence.drafted]
        kept += drawn
    return kept


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
        wants = wants_token(sequence, count)
        rows = count if sequence.scored else wants
        end += rows
        if sequence.scored:
            sequence.owner.score_prompt(sequence.computed, logits[end - rows : end])
        if wants:
            wanted.append(end - 1)
    return logits[wanted]
