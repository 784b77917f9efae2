"""One of the answers that a request asked for: each token it gets becomes an event. Knows no pages and no batch."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from engine.logprobs import Score, ScoreStream, scores_of
from engine.sampling import SamplingRow
from engine.sequence import GenerationEvent, SamplingParams, Sequence
from engine.text_stream import TextStream

if TYPE_CHECKING:
    from engine.constraint import Constraint
    from engine.request import Request


class Choice:
    """`row` is what the sampler reads, `sequence` what the scheduler moves; both see the tokens that `accept` adds.

    The first choice of a request computes the prompt. The others, its `forks`, begin where it ends, and have no
    sequence before. A `plain` choice needs nothing of its logits but a token.
    """

    def __init__(
        self, request: Request, index: int, prompt_ids: Tokens[int], params: SamplingParams, seed: int
    ) -> None:
        runner = request.model.checkpoint.runner
        self.request, self.index = request, index
        self.sequence: Sequence | None = None
        self.forks: tuple[Choice, ...] = ()
        self.finished = False
        self.constraint: Constraint | None = None
        self.ends = set(params.stop_token_ids) | (set() if params.ignore_eos else runner.eos_token_ids)
        banned = self.ends if params.min_tokens else ()
        self.row = SamplingRow(params, prompt_ids, [], seed, tuple(each for each in banned if each < runner.vocab_size))
        self.hidden = set() if params.include_stop_str_in_output else self.ends  # tokens without a text
        self._stream = TextStream(
            runner.tokenizer,
            prompt_ids,
            params.stop,
            min_tokens=params.min_tokens,
            special=not params.skip_special_tokens,
            shows_stop=params.include_stop_str_in_output,
        )
        self._scores = ScoreStream() if params.logprobs is not None else None
        self._shown = 0  # characters

    @property
    def params(self) -> SamplingParams:
        return self.row.params

    @property
    def plain(self) -> bool:
        return not self.forks and self._scores is None and self.constraint is None

    def accept(self, token: int, score: Score | None = None) -> GenerationEvent:
        """Takes the token that was drawn. A token or string that ends the answer is counted but has no text, unless
        that is asked for."""
        output, params = self.row.output_ids, self.params
        output.append(token)
        self.sequence.append(token)
        if len(output) == params.min_tokens:
            self.row.banned = ()
        ended, offset = token in self.ends, self._stream.decoded
        text = "" if token in self.hidden else self._stream.push(token)
        if self.constraint is not None and not ended:
            ended = self.constraint.accept(token)
        full = len(output) == params.max_tokens
        if ended or full:
            text += self._stream.flush()
        stopped = ended or self._stream.stopped is not None
        reason = "stop" if stopped else "length" if full else None
        if score is None:
            return self._event(text, (token,), reason)
        if token not in self.hidden:
            self._scores.push(score, offset)
        self._shown += len(text)
        scores = self._scores.release(self._shown)
        if reason and self._stream.stopped is None:
            scores += self._scores.flush()
        return self._event(text, (token,), reason, scores=scores)

    def rows_ahead(self, guesses: list[int]) -> list[SamplingRow]:
        """What the sampler is to read after none, one ... all of these tokens, if they are what it draws."""
        texts = [[*self.row.output_ids, *guesses[:right]] for right in range(len(guesses) + 1)]
        banned = [self.row.banned if len(text) < self.params.min_tokens else () for text in texts]
        return [replace(self.row, output_ids=text, banned=ends) for text, ends in zip(texts, banned, strict=True)]

    def end(self, reason: str, error: str | None = None) -> GenerationEvent:
        """The last event where no token ended it. Text held back is let go."""
        return self._event("", (), reason, error)

    def found(self, tokens: list[int], reason: str) -> GenerationEvent:
        """The whole answer, where it was searched and not drawn."""
        self.row.output_ids.extend(tokens)
        text = "".join(self._stream.push(token) for token in tokens if token not in self.hidden) + self._stream.flush()
        return self._event(text, tuple(tokens), reason)

    def score_prompt(self, first: int, logits: Tensor) -> None:
        """Notes the scores of the prompt tokens after `first`. logits fp32 [row, vocab], of the tokens from it on."""
        prompt = self.row.prompt_ids
        tokens = prompt[first + 1 : first + 1 + len(logits)]
        if tokens:
            scores = scores_of(logits[: len(tokens)], tokens, self.params.logprobs)
            self.request.prompt_scores[first + 1 : first + 1 + len(tokens)] = scores
        self.sequence.scored = first + len(logits) < len(prompt)

    def _event(self, text: str, tokens: tuple[int, ...], reason: str | None, error: str | None = None, scores=()):
        self.finished = reason is not None
        request, count = self.request, len(self.row.output_ids)
        prompt_scores = request.prompt_scores
        return GenerationEvent(
            text,
            tokens,
            reason,
            error,
            len(self.row.prompt_ids),
            count,
            request.cached_tokens,
            self.index,
            scores,
            tuple(prompt_scores) if prompt_scores and count <= 1 else None,
        )
