"""One request while the engine works on it: each token it gets becomes an event. Knows no pages and no batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.sampling import SamplingRow
from engine.sequence import GenerationEvent, SamplingParams, Sequence
from engine.text_stream import TextStream

if TYPE_CHECKING:
    from engine.models import Model

Deliver = Callable[[GenerationEvent], None]


class Request:
    """`row` is what the sampler reads, `sequence` what the scheduler moves; both see the tokens that `accept` adds."""

    def __init__(
        self, id: str, model: Model, prompt_ids: list[int], params: SamplingParams, seed: int, deliver: Deliver
    ) -> None:
        runner = model.checkpoint.runner
        self.id = id
        self.model = model
        self.deliver = deliver
        self.sequence = Sequence(model.checkpoint.space, prompt_ids, params.max_tokens, owner=self)
        self._ends = set(params.stop_token_ids) | (set() if params.ignore_eos else runner.eos_token_ids)
        banned = self._ends if params.min_tokens else ()
        self.row = SamplingRow(params, prompt_ids, [], seed, tuple(each for each in banned if each < runner.vocab_size))
        self._stream = TextStream(runner.tokenizer, prompt_ids, params.stop, min_tokens=params.min_tokens)

    def accept(self, token: int) -> GenerationEvent:
        """Takes the token that was drawn. A token or string that ends the answer is counted but has no text."""
        output, params = self.row.output_ids, self.row.params
        output.append(token)
        self.sequence.append(token)
        if len(output) == params.min_tokens:
            self.row.banned = ()
        ended = token in self._ends
        text = "" if ended else self._stream.push(token)
        full = len(output) == params.max_tokens
        if ended or full:
            text += self._stream.flush()
        stopped = ended or self._stream.stopped is not None
        return self._event(text, (token,), "stop" if stopped else "length" if full else None)

    def end(self, reason: str, error: str | None = None) -> GenerationEvent:
        """The last event where no token ended it. Text held back is let go."""
        return self._event("", (), reason, error)

    def _event(self, text: str, tokens: tuple[int, ...], reason: str | None, error: str | None = None):
        sequence = self.sequence
        cached = sequence.cached_tokens or 0
        return GenerationEvent(text, tokens, reason, error, sequence.prompt_length, len(self.row.output_ids), cached)
