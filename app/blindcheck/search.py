"""Looks through all that was sent before a vote for what gives a model away. Pure."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TOKENIZER_MARKS = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<bos>",
        "<eos>",
        "<s>",
        "</s>",
    ),
    *("[INST]", "[/INST]", "<unk>", "<pad>", "\N{LOWER ONE EIGHTH BLOCK}", "\u0120", "\u010a", "\ufffd"),
)
TELLING_FIELDS = (  # of an engine's answer: how fast it was, how much it said, who it is
    *("usage", "finish_reason", "completion_tokens", "prompt_tokens", "cached_tokens", "first_token_ms", "duration_ms"),
    *("model", "model_a", "model_b", "source", "engine", "system_fingerprint", "logprobs"),
)


@dataclass(frozen=True)
class Leak:
    battle: int
    url: str
    what: str


def leaks(battle: int, bodies: Mapping[str, str], names: Iterable[str]) -> list[Leak]:
    """`bodies`: by address what came from there before the vote. `names`: names, sources, paths, addresses."""
    found = []
    for url, body in bodies.items():
        spellings = (body, body.replace("\\/", "/"), html.unescape(_texts(url, body)))
        found += [Leak(battle, url, f"name {name!r}") for name in names if any(_has(text, name) for text in spellings)]
        found += [
            Leak(battle, url, f"tokenizer mark {mark!r}") for mark in TOKENIZER_MARKS if mark in _texts(url, body)
        ]
        found += [
            Leak(battle, url, f"field {field!r}") for field in sorted(_fields(url, body)) if field in TELLING_FIELDS
        ]
    return found


def _has(text: str, name: str) -> bool:
    return name.casefold() in text.casefold()


def _documents(url: str, body: str) -> Iterable[object]:
    """The JSON that came from /api: whole, or one document an event."""
    if "/api/" not in url:
        return
    for text in re.findall(r"^data: (.*)$", body, re.MULTILINE) or [body]:
        try:
            yield json.loads(text)
        except ValueError:
            continue


def _texts(url: str, body: str) -> str:
    return json.dumps(list(_documents(url, body)), ensure_ascii=False)


def _fields(url: str, body: str) -> set[str]:
    """Names of fields that hold something, at any depth."""
    found: set[str] = set()
    waiting = list(_documents(url, body))
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            found |= {name for name, inner in value.items() if inner is not None}
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return found
