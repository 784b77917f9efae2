"""The pool while a battle waits for its vote: drawn so that it cannot tell which models answer.

Real pages would tell. A block of one checkpoint takes more pages than one of another, its tokenizer cuts the same text
into more tokens, a question asked before is found in the cache of the same model only: whoever watches the pool alone
could name the pair by counting. So from the first word of such a battle until its vote visitors see the pool as it was
before, and in it the text that has been shown, at the mean size of all models. What a veil draws is a function of that
old picture and of text that its readers have read: of two pairs that say the same it draws the same, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.memory.page_frames import CACHED, FREE, PINNED, PINNED_IN_USE, SHARED, STATES, USED, counted

BYTES_PER_TOKEN = 4  # of UTF-8, in every language near enough
BLOCK_TOKENS = 16
TYPICAL_TOKENS = (161, 338)  # prompt and answer, as the engine reckons before it has served any


@dataclass(frozen=True)
class ShownText:
    """One answer under way: bytes of all that was said before it, and of it what its reader has been shown."""

    asked: int
    answered: int

    @property
    def prompt_tokens(self) -> int:
        return -(-self.asked // BYTES_PER_TOKEN)

    @property
    def answer_tokens(self) -> int:
        return -(-self.answered // BYTES_PER_TOKEN)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @property
    def slots(self) -> int:
        return -(-self.tokens // BLOCK_TOKENS) * BLOCK_TOKENS


Shown = Mapping[str, Sequence[ShownText]]  # by battle, of those that stream


def next_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


class Veil:
    """`states` and `figures`: the pool before the first of these battles began, or `bare`."""

    def __init__(self, states: np.ndarray, figures: Mapping[str, Any]):
        self._base = settled(states)
        self._figures = figures
        self._stride = figures.get("stride", 1)
        kept = np.flatnonzero(self._base == CACHED)
        self._order = np.concatenate([np.flatnonzero(self._base == FREE), kept])  # pages in the order of their use
        self._next = 0
        self._pages: dict[str, np.ndarray] = {}  # by battle, drawn pages; the ended ones too, until others need them
        self._requests: dict[str, int] = {}  # by battle that streams, the most answers it had under way
        self._begun = 0  # requests of all battles since

    def fits(self, states: np.ndarray, figures: Mapping[str, Any]) -> bool:
        """Whether this is still the pool it hangs over, and no other engine's."""
        return states.shape == self._base.shape and figures["total"] == self._figures["total"]

    def draw(self, shown: Shown) -> tuple[np.ndarray, dict[str, Any]]:
        """Uint8 [drawn page], and figures marked `estimated`."""
        for battle, texts in shown.items():
            self._count(battle, len(texts))
            self._grow(battle, sum(text.slots for text in texts), shown)
        self._requests = {battle: self._requests[battle] for battle in shown}
        states = self._base.copy()
        for battle, pages in self._pages.items():
            states[pages] = USED if battle in shown else CACHED
        return states, self._estimated(states, [text for texts in shown.values() for text in texts])

    def _count(self, battle: str, answers: int) -> None:
        self._begun += max(0, answers - self._requests.get(battle, 0))
        self._requests[battle] = max(answers, self._requests.get(battle, 0))

    def _grow(self, battle: str, slots: int, shown: Shown) -> None:
        """Gives the battle the pages for so many slots, the next in order that no battle under way has."""
        own = self._pages.get(battle, np.empty(0, np.int64))
        missing = round(slots * self._figures["means"]["pages_per_slot"] / self._stride) - len(own)
        if missing <= 0:
            return
        in_use = np.zeros(len(self._base), bool)
        for each in {battle, *shown} & self._pages.keys():
            in_use[self._pages[each]] = True
        ring = np.roll(self._order, -self._next)
        free = np.flatnonzero(~in_use[ring])[:missing]
        if not len(free):
            return
        taken = ring[free]
        self._next = (self._next + int(free[-1]) + 1) % len(self._order)
        for other in self._pages.keys() - shown.keys() - {battle}:
            self._pages[other] = np.setdiff1d(self._pages[other], taken)
        self._pages = {each: pages for each, pages in self._pages.items() if len(pages)}
        self._pages[battle] = np.concatenate([own, taken])

    def _estimated(self, states: np.ndarray, texts: Sequence[ShownText]) -> dict[str, Any]:
        base, mean = self._figures, self._figures["means"]
        shared = int(mean["system_tokens"]) // BLOCK_TOKENS * BLOCK_TOKENS
        pages = self._counted(states)
        return {
            **base,
            "estimated": True,
            "pages": pages,
            "running": len(texts),
            "waiting": 0,
            "tokens": sum(text.tokens + shared for text in texts),
            "cached_tokens_served": base["cached_tokens_served"] + self._begun * shared,
            "ways": self._ways(texts, shared, pages),
        }

    def _counted(self, states: np.ndarray) -> dict[str, int]:
        """In real pages; what the stride left over is free."""
        pages = {state: count * self._stride for state, count in counted(states).items()}
        pages["pinned"] = self._figures["pages"]["pinned"] + self._figures["pages"]["pinned_in_use"]
        pages["free"] += self._figures["total"] - sum(pages.values())
        return pages

    def _ways(self, texts: Sequence[ShownText], shared: int, pages: Mapping[str, int]) -> dict[str, Any]:
        """As the engine reckons them, with the mean of all models in place of each request's own."""
        mean, total = self._figures["means"], self._figures["total"]
        size = mean["pages_per_slot"]
        reading = pages["used"] + min(pages["pinned"], round(len(texts) * shared * size))  # no more than all are read
        empty = sum(text.slots - text.tokens for text in texts) * size
        longest = round(mean["context_length"])
        ways = {"paged": way(reading, empty, pages["free"] + pages["cached"], mean["slots"]["paged"] * size)}
        rules = {
            "max": lambda prompt, answer: longest,
            "pow2": lambda prompt, answer: prompt + next_power_of_two(answer),
        }
        for name, rule in rules.items():
            slots = sum(min(rule(shared + text.prompt_tokens, max(text.answer_tokens, 1)), longest) for text in texts)
            filled = sum(shared + text.tokens for text in texts)
            ways[name] = way(slots * size, (slots - filled) * size, total - slots * size, mean["slots"][name] * size)
        return ways


def way(pages: float, empty: float, left: float, pages_a_request: float) -> dict[str, Any]:
    return {
        "pages": round(pages),
        "waste_percent": round(100 * max(empty, 0) / pages, 2) if pages else 0.0,
        "more_battles": max(0, int(left / (2 * pages_a_request))) if pages_a_request else 0,
    }


def settled(states: np.ndarray) -> np.ndarray:
    """The same pool with nobody in it: a veil never shows who reads a system prompt, nor what ran when it fell."""
    rest = np.arange(len(STATES), dtype=np.uint8)
    rest[[USED, SHARED, PINNED_IN_USE]] = CACHED, CACHED, PINNED
    return rest[states]


def bare(states: np.ndarray, figures: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
    """The same pool with nothing in it but its system prompts, and no word of what it has served: all that a veil may
    begin with where nobody saw the pool before."""
    kept = settled(states)
    kept[kept == CACHED] = FREE
    mean = figures["means"]
    prompt, answer = mean["system_tokens"] + TYPICAL_TOKENS[0], TYPICAL_TOKENS[1]
    slots = {
        "paged": -(-sum(TYPICAL_TOKENS) // BLOCK_TOKENS) * BLOCK_TOKENS,
        "max": mean["context_length"],
        "pow2": prompt + next_power_of_two(answer),
    }
    untold = {**mean, "prompt_tokens": prompt, "answer_tokens": answer, "slots": slots}
    return kept, {**figures, "cached_tokens_served": 0, "means": untold}
