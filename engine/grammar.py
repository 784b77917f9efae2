"""What an answer may consist of: JSON, JSON of a schema, a regular expression, one of some texts, a Lark grammar.

llguidance reads the grammar and says after each token which ones may follow, as a bit for each token of the vocabulary.
What it cannot hold an answer to is refused, with its reason, before anything is generated. Knows no requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from engine.errors import InvalidParameter


def lark_of_choices(texts: list[str]) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


def as_object(schema: dict[str, Any] | str) -> dict[str, Any]:
    """A JSON schema that came as an object or as its text. Raises ValueError."""
    schema = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    return schema


LEADS_NOWHERE = "NoExtensionBias"  # the one of llguidance's errors that is an end: nothing goes on from here

GRAMMARS: dict[str, Callable[[Any], str]] = {
    "json_object": lambda _: LLMatcher.grammar_from_json_schema({"type": "object"}),
    "json": lambda schema: LLMatcher.grammar_from_json_schema(as_object(schema)),
    "regex": LLMatcher.grammar_from_regex,
    "choice": lark_of_choices,
    "grammar": LLMatcher.grammar_from_lark,
}


class Grammars:
    """Grammars over the vocabulary of one checkpoint. Making one takes up to a second for a large vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> None:
        size = max(vocab_size, tokenizer.get_vocab_size())
        self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=sorted(ends) or None)
        self._words = -(-size // 32)

    def compile(self, param: str, kind: str, value: Any) -> Grammar:
        """`kind` is one of GRAMMARS. May take long; safe on any thread. Raises InvalidParameter, naming `param`."""
        try:
            matcher = LLMatcher(self._tokenizer, GRAMMARS[kind](value), log_level=0)
        except (ValueError, RecursionError) as error:  # the latter of JSON that is too deeply nested
            raise InvalidParameter(param, f"{param}: {error}") from error
        if matcher.is_error():
            raise InvalidParameter(param, f"{param}: {matcher.get_error().strip()}")
        grammar = Grammar(matcher, self._words)
        begins = grammar.copy().allowed()
        begins[self._tokenizer.eos_tokens] = False
        if not begins.any():
            raise InvalidParameter(param, f"{param}: nothing but the empty text is in this grammar")
        return grammar


class Grammar:
    """How far one answer is in its grammar."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._bits = np.empty(words, np.int32)

    def copy(self) -> Grammar:
        return Grammar(self._matcher.deep_copy(), len(self._bits))

    def allowed(self) -> np.ndarray:
        """bool [token]: which may come next; ends of an answer among them where it may end."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        return np.unpackbits(self._bits.view(np.uint8), bitorder="little").view(np.bool_)

    def accept(self, token: int) -> bool:
        """Goes on by a token; whether nothing but an end may follow. Raises ValueError where the grammar gives up."""
        if not self._matcher.is_stopped():  # by `allowed`, which found that nothing goes on from here, or gave up
            self._matcher.consume_token(token)
        if self._matcher.is_error() and LEADS_NOWHERE not in self._matcher.get_error():
            raise ValueError(f"the grammar gave up: {self._matcher.get_error().strip()}")
        return self._matcher.is_stopped()
