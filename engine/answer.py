"""What goes out over HTTP: an answer in OpenAI's words, whole or in events. Knows no engine and no socket."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from engine.logprobs import PlacedScore, Score
from engine.schema import StreamOptions
from engine.sequence import GenerationEvent
from engine.vocabulary import Spelling, Vocabulary

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


def chat_logprobs(scores: Iterable[PlacedScore], spelling: Spelling, *_prompt: Any) -> dict[str, Any]:
    """Of the answer alone: no chat begins with its prompt."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        content = spelling.bytes_of(token)
        as_bytes = None if content is None else list(content)
        return {"token": spelling.name_of(token), "logprob": max(logprob, LEAST_LOGPROB), "bytes": as_bytes}

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
    spelling: Spelling,
    echo: Echo,
    prompt_scores: Sequence[Score | None],
) -> dict[str, Any]:
    """With those of the prompt in front, where they are given. Nothing comes before the first token of a prompt."""

    def name(token: int) -> str:
        known = spelling.bytes_of(token) is None or spelling.is_text(token)
        return spelling.name_of(token) if known else "bytes:" + spelling.name_of(token)

    prompt = zip(echo.tokens, prompt_scores, echo.offsets, strict=True) if prompt_scores else ()
    answer = ((each.score.token, each.score, each.offset + len(echo.text)) for each in scores)
    tokens, logprobs, likeliest, offsets = [], [], [], []
    for token, score, offset in (*prompt, *answer):
        tokens.append(name(token))
        offsets.append(offset)
        pairs = [(score.token, score.logprob), *score.best] if score else []
        likeliest.append({name(each): max(logprob, LEAST_LOGPROB) for each, logprob in pairs} if score else None)
        logprobs.append(max(score.logprob, LEAST_LOGPROB) if score else None)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likeliest, "text_offset": offsets}


@dataclass(frozen=True)
class Dialect:
    """What chat completions and completions call the same things. Bytes, of a choice in an event: who speaks, where
    that is said; what comes before the text and after it; the end."""

    id_prefix: str
    whole: str
    event: str
    choice: Callable[[str], dict[str, Any]]
    logprobs: Callable[..., Any]
    role: bytes
    text: bytes
    close: bytes
    last: bytes


CHAT = Dialect(
    id_prefix="chatcmpl",
    whole="chat.completion",
    event="chat.completion.chunk",
    choice=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    logprobs=chat_logprobs,
    role=b'"delta":{"role":"assistant","content":null}',
    text=b'"delta":{"content":',
    close=b"}",
    last=b'"delta":{}',
)
TEXT = Dialect(
    id_prefix="cmpl",
    whole="text_completion",
    event="text_completion",
    choice=lambda text: {"text": text},
    logprobs=text_logprobs,
    role=b"",
    text=b'"text":',
    close=b"",
    last=b'"text":""',
)


class Usage:
    """Tokens of a request so far: each prompt's once, those of all choices. `choices`: answers to each prompt."""

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._answers: dict[int, int] = {}
        self._prompts: dict[int, tuple[int, int]] = {}  # tokens, and how many of them were cached

    def count(self, event: GenerationEvent) -> None:
        self._answers[event.index] = event.completion_tokens
        self._prompts[event.index // self._choices] = event.prompt_tokens, event.cached_tokens

    def as_dict(self) -> dict[str, Any]:
        completion = sum(self._answers.values())
        prompt, cached = (sum(counts) for counts in zip(*self._prompts.values(), strict=True))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class Answer:
    """All choices of one answer: `choices` to each prompt. What never changes in its events is encoded once.

    `spelling`: where log-probabilities are asked for. `echoes`: what the choices of each prompt begin with.
    """

    def __init__(
        self,
        dialect: Dialect,
        model: str,
        request_id: str,
        *,
        usage: StreamOptions | None = None,
        spelling: Spelling | None = None,
        echoes: Sequence[Echo] = (),
        choices: int = 1,
    ) -> None:
        self.id = f"{dialect.id_prefix}-{request_id}"
        self.used = Usage(choices)
        self._dialect, self._spelling, self._echoes, self._choices = dialect, spelling, echoes, choices
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
        """What one event of the engine's is in events of OpenAI's, possibly nothing. The role comes before any token,
        in an event of its own, as from all who speak this API."""
        index = b'{"index":%d,' % event.index
        events, first = b"", event.index not in self._begun
        text = self._echo(event.index).text + event.text if first else event.text
        said = text or event.scores or event.prompt_scores
        if first and (said or event.finish_reason):
            self._begun.add(event.index)
            if self._dialect.role:
                self.used.count(replace(event, completion_tokens=0))
                choice = index + self._dialect.role + b',"logprobs":null,"finish_reason":null}'
                events = self._before + choice + self._end_of_event()
        self.used.count(event)
        if said:
            choice = index + self._dialect.text + orjson.dumps(text) + self._dialect.close
            choice += b',"logprobs":' + self._logprobs_of([event]) + b',"finish_reason":null}'
            events += self._before + choice + self._end_of_event()
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
        text = self._echo(index).text + "".join(event.text for event in events)
        choice = {"index": index, **self._dialect.choice(text), "finish_reason": events[-1].finish_reason}
        return {**choice, "logprobs": orjson.Fragment(self._logprobs_of(events))}

    def _echo(self, index: int) -> Echo:
        return self._echoes[index // self._choices] if self._echoes else NO_ECHO

    def _logprobs_of(self, events: list[GenerationEvent]) -> bytes:
        if self._spelling is None:
            return b"null"
        scores = [score for event in events for score in event.scores]
        prompt_scores = events[0].prompt_scores or ()
        echo = self._echo(events[0].index)
        return orjson.dumps(self._dialect.logprobs(scores, self._spelling, echo, prompt_scores))

    def _end_of_event(self) -> bytes:
        if not (self._usage.include_usage and self._usage.continuous_usage_stats):
            return self._after
        return b'],"usage":' + orjson.dumps(self.used.as_dict()) + b"}\n\n"
