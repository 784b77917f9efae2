"""What one client asked: one prompt, and one or more answers to it. Knows no pages and no batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.beam import BeamParams, BeamSearch
from engine.choice import Choice
from engine.constraint import Constraint
from engine.logprobs import Score
from engine.sequence import GenerationEvent, SamplingParams, Sequence

if TYPE_CHECKING:
    from engine.grammar import Grammar
    from engine.models import Model

Deliver = Callable[[GenerationEvent], None]


@dataclass(frozen=True)
class Terms:
    """On which terms a request is served, beside how its tokens are drawn."""

    user: str = ""  # requests of one user of a model share what the model is served
    priority: int = 0  # the smaller, the sooner
    deadline_seconds: float | None = None  # from its arrival on; then it ends, whatever state it is in
    grammar: Grammar | None = None  # what each answer is held to
    beam: BeamParams | None = None  # then nothing is drawn: the choices are the best that a beam search finds
    cache_salt: str = ""  # only requests with the same one find each other's blocks


class Request:
    """`choices` are those that have not ended. They draw with the seed, the seed + 1 ...; the first computes the prompt
    for all."""

    def __init__(
        self,
        id: str,
        model: Model,
        prompt_ids: list[int],
        params: SamplingParams,
        seed: int,
        deliver: Deliver,
        terms: Terms,
    ) -> None:
        self.id = id
        self.model = model
        self.params = params
        self.terms = terms
        self.deliver = deliver
        self.deadline: float | None = None  # on the engine's clock
        self.prompt_scores: list[Score | None] = [None] * len(prompt_ids) if params.prompt_logprobs else []
        self.choices = [Choice(self, index, prompt_ids, params, seed + index) for index in range(params.n)]
        if params.logit_bias or terms.grammar:
            for choice in self.choices:
                choice.constraint = Constraint(params, terms.grammar)
        first, *forks = self.choices
        self.sequence = Sequence(model.checkpoint.space, prompt_ids, params.max_tokens, owner=first)
        self.sequence.scored = params.prompt_logprobs
        self.sequence.priority, self.sequence.client = terms.priority, (model.spec.name, terms.user)
        self.sequence.salt = terms.cache_salt
        self.search: BeamSearch | None = None
        if terms.beam:
            self._search(terms.beam)
        else:
            first.sequence, first.forks = self.sequence, tuple(forks)

    def _search(self, params: BeamParams) -> None:
        self.search = BeamSearch(
            self, params, self.choices[0].ends, min_tokens=self.params.min_tokens, max_tokens=self.params.max_tokens
        )
        (root,) = self.search.beams
        root.sequence, self.sequence.owner, self.sequence.joint = self.sequence, root, self.search

    @property
    def cached_tokens(self) -> int:
        return self.sequence.cached_tokens or 0

    @property
    def sequences(self) -> list[Sequence]:
        """Of the choices that have begun and not ended."""
        owners = self.search.beams if self.search else self.choices
        return [owner.sequence for owner in owners if owner.sequence]
