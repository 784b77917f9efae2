"""What goes out over HTTP: an answer in OpenAI's words, whole or in events. Knows no engine and no socket."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from engine.logprobs import PlacedScore, Score
from engine.schema import StreamOptions
from engine.sequence import GenerationEvent
from engine.vocabulary import Vocabulary

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True)
class Echo:
    """The prompt as the beginning of an answer: its tokens, where each begins in its text, the text."""

    tokens: Sequence[int]
    offsets: Sequence[int]
    text: str


NO_ECHO = Echo((), (), "")


def echo_of(tokens: Sequence[int], vocabulary: Vocabulary, text: str | None) -> Echo:
    """`text` where the prompt came as one: it lacks the first token, or the first space, that the tokenizer adds."""
    spelled = [vocabulary.bytes_of(token) or vocabulary.name_of(token).encode() for token in tokens]
    if text is not None and not text.encode().startswith(spelled[0]):
        spelled[0] = b"" if vocabulary.bytes_of(tokens[0]) is None else spelled[0].removeprefix(b" ")
    decoder, offsets, length = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for piece in spelled:
        offsets.append(length)
        length += len(decoder.decode(piece))
    return Echo(tokens, offsets, b"".join(spelled).decode(errors="replace") if text is None else text)


def chat_logprobs(scores: Iterable[PlacedScore], vocabulary: Vocabulary, echo: Echo, prompt_scores: Any) -> Any:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        content = vocabulary.bytes_of(token)
        as_bytes = None if content is None else list(content)
        return {"token": vocabulary.name_of(token), "logprob": max(logprob, LEAST_LOGPROB), "bytes": as_bytes}

    content = [
        {
            **entry(placed.score.token, placed.score.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in placed.score.best],
        }
        for placed in scores
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    scores: Iterable[PlacedScore],
    vocabulary: Vocabulary,
    echo: Echo,
    prompt_scores: Sequence[Score | None],
) -> dict[str, Any]:
    """With those of the prompt in front, where they are given. Nothing comes before the first token of a prompt."""

    def name(token: int) -> str:
        known = vocabulary.bytes_of(token) is None or vocabulary.is_text(token)
        return vocabulary.name_of(token) if known else "bytes:" + vocabulary.name_of(token)

    prompt = zip(echo.tokens, prompt_scores, echo.offsets, strict=True) if prompt_scores else ()
    answer = ((each.score.token, each.score, each.offset + len(echo.text)) for each in scores)
    tokens, logprobs, likeliest, offsets = [], [], [], []
    for token, score, offset in (*prompt, *answer):
        tokens.append(name(token))
        offsets.append(offset)
        pairs = [*score.best, (score.token, score.logprob)] if score else []
        likeliest.append({name(each): max(logprob, LEAST_LOGPROB) for each, logprob in pairs} if score else None)
        logprobs.append(max(score.logprob, LEAST_LOGPROB) if score else None)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likeliest, "text_offset": offsets}


@dataclass(frozen=True)
class Dialect:
    """What chat completions and completions call the same things. Bytes: a choice from its index up to its text, and
    from it on."""

    id_prefix: str
    whole: str
    event: str
    choice: Callable[[str], dict[str, Any]]
    logprobs: Callable[..., Any]
    first: bytes
    next: bytes
    close: bytes
    last: bytes


CHAT = Dialect(
    id_prefix="chatcmpl",
    whole="chat.completion",
    event="chat.completion.chunk",
    choice=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    logprobs=chat_logprobs,
    first=b'"delta":{"role":"assistant","content":',
    next=b'"delta":{"content":',
    close=b"}",
    last=b'"delta":{}',
)
TEXT = Dialect(
    id_prefix="cmpl",
    whole="text_completion",
    event="text_completion",
    choice=lambda text: {"text": text},
    logprobs=text_logprobs,
    first=b'"text":',
    next=b'"text":',
    close=b"",
    last=b'"text":""',
)


class Usage:
    """Tokens of a request so far: the prompt's once, those of all its choices."""

    def __init__(self) -> None:
        self._answers: dict[int, int] = {}
        self._prompt = self._cached = 0

    def count(self, event: GenerationEvent) -> None:
        self._answers[event.index] = event.completion_tokens
        self._prompt, self._cached = event.prompt_tokens, event.cached_tokens

    def as_dict(self) -> dict[str, Any]:
        completion = sum(self._answers.values())
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": completion,
            "total_tokens": self._prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


class Answer:
    """All choices of one answer. What never changes in its events is encoded once.

    `vocabulary`: where log-probabilities are asked for. `echo`: what each choice begins with.
    """

    def __init__(
        self,
        dialect: Dialect,
        model: str,
        request_id: str,
        *,
        usage: StreamOptions | None = None,
        vocabulary: Vocabulary | None = None,
        echo: Echo = NO_ECHO,
    ) -> None:
        self.id = f"{dialect.id_prefix}-{request_id}"
        self.used = Usage()
        self._dialect, self._vocabulary, self._echo = dialect, vocabulary, echo
        self._usage = usage or StreamOptions()
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        head = orjson.dumps({"object": dialect.event, **self._head})
        self._before = b"data: " + head[:-1] + b',"choices":['
        self._after = (b'],"usage":null}' if self._usage.include_usage else b"]}") + b"\n\n"
        self._begun: set[int] = set()  # choices of which an event was made

    def whole(self, events: Iterable[GenerationEvent]) -> bytes:
        """From all events of all choices, as they came."""
        by_choice: dict[int, list[GenerationEvent]] = {}
        for event in events:
            self.used.count(event)
            by_choice.setdefault(event.index, []).append(event)
        choices = [self._choice(index, by_choice[index]) for index in sorted(by_choice)]
        head = {"object": self._dialect.whole, **self._head}
        return orjson.dumps({**head, "choices": choices, "usage": self.used.as_dict()})

    def events(self, event: GenerationEvent) -> bytes:
        """What one event of the engine's is in events of OpenAI's, possibly nothing. A choice without any text still
        tells its role."""
        self.used.count(event)
        index = b'{"index":%d,' % event.index
        events, first = b"", event.index not in self._begun
        text = self._echo.text + event.text if first else event.text
        if text or (first and event.finish_reason) or event.scores or event.prompt_scores:
            opening = self._dialect.first if first else self._dialect.next
            self._begun.add(event.index)
            choice = index + opening + orjson.dumps(text) + self._dialect.close
            choice += b',"logprobs":' + self._logprobs_of([event]) + b',"finish_reason":null}'
            events = self._before + choice + self._end_of_event()
        if event.finish_reason:
            reason = orjson.dumps(event.finish_reason)
            choice = index + self._dialect.last + b',"logprobs":null,"finish_reason":' + reason + b"}"
            events += self._before + choice + self._end_of_event()
        return events

    def end(self) -> bytes:
        if not self._usage.include_usage:
            return DONE
        return self._before + b'],"usage":' + orjson.dumps(self.used.as_dict()) + b"}\n\n" + DONE

    def _choice(self, index: int, events: list[GenerationEvent]) -> dict[str, Any]:
        text = self._echo.text + "".join(event.text for event in events)
        choice = {"index": index, **self._dialect.choice(text), "finish_reason": events[-1].finish_reason}
        return {**choice, "logprobs": orjson.Fragment(self._logprobs_of(events))}

    def _logprobs_of(self, events: list[GenerationEvent]) -> bytes:
        if self._vocabulary is None:
            return b"null"
        scores = [score for event in events for score in event.scores]
        prompt_scores = events[0].prompt_scores or ()
        return orjson.dumps(self._dialect.logprobs(scores, self._vocabulary, self._echo, prompt_scores))

    def _end_of_event(self) -> bytes:
        if not self._usage.continuous_usage_stats:
            return self._after
        return b'],"usage":' + orjson.dumps(self.used.as_dict()) + b"}\n\n"
