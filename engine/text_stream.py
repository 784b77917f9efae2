"""Tokens to text as they are generated: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"  # what the bytes of an unfinished character decode to
MOST_TOKENS_A_CHARACTER = 4
PRIMING_TOKENS = (
    64  # of the prompt's end: what a token's text can depend on, and more; all of it would be decoded again
)


class TextStream:
    """The text of one answer. A character split over tokens, or what may become a stop string, waits for the next.

    Special tokens have no text, unless `special`. In the first `min_tokens` tokens no stop string is looked for. After
    `stopped` is set (to the stop string found, which comes out only with `shows_stop`) nothing more comes out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        special: bool = False,
        shows_stop: bool = False,
    ) -> None:
        self.stopped: str | None = None
        self.decoded = 0  # characters, what is held back among them
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._tokens_before_stop = min_tokens
        self._skip_special, self._shows_stop = not special, shows_stop
        self._held = ""  # decoded; may be the start of a stop string
        self._undecoded: list[int] = []  # tokens since the last whole character
        whole, begun = split_at_whole_character(tokenizer, list(prompt_ids[-PRIMING_TOKENS:]))
        self._stream = DecodeStream(ids=whole, skip_special_tokens=self._skip_special)
        for token_id in begun:
            self._decode(token_id)
        self._in_prompts_character = bool(begun)

    def push(self, token_id: int) -> str:
        """The text that is certain after this token, possibly empty."""
        if self.stopped is not None:
            return ""
        text = self._decode(token_id)
        if text and self._in_prompts_character:  # which the answer may not have gone on with
            text, self._in_prompts_character = text.lstrip(REPLACEMENT), False
        self.decoded += len(text)
        if self._tokens_before_stop > 0:
            self._tokens_before_stop -= 1
            return text
        return self._release(text)

    def flush(self) -> str:
        """The rest at the end of the answer: what was held back, without an unfinished character."""
        if self.stopped is not None:
            return ""
        tail = self._tokenizer.decode(self._undecoded, skip_special_tokens=self._skip_special).rstrip(REPLACEMENT)
        self._undecoded = []
        self.decoded += len(tail)
        text = self._release(tail)
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _decode(self, token_id: int) -> str:
        self._undecoded.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # the library raises bare Exception
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(ids=[], skip_special_tokens=self._skip_special)
            text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            return ""
        self._undecoded = []
        return text

    def _release(self, text: str) -> str:
        """Adds to what is held and gives back all of it that is before any stop string, begun or whole."""
        if not self._stop:
            return text
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if found:
            at, self.stopped = min(found, key=lambda place: (place[0], -len(place[1])))
            text, self._held = self._held[: at + len(self.stopped) * self._shows_stop], ""
            return text
        keep = max((overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def split_at_whole_character(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[int], list[int]]:
    """The ids up to the end of a whole character, and those of one that is only begun (for a stream primed with half a
    character lets out the whole prompt)."""
    for begun in range(min(len(ids), MOST_TOKENS_A_CHARACTER) + 1):
        whole = len(ids) - begun
        if not tokenizer.decode(ids[max(0, whole - 16) : whole], skip_special_tokens=True).endswith(REPLACEMENT):
            return ids[:whole], ids[whole:]
    return [], []


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
