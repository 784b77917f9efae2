"""Drafts: how an answer may go on, guessed from the text so far, to be checked by the forward that computes it.

Prompt lookup (Saxena 2023): where the last few tokens stood before in the text, what followed them there is the guess.
A step computes the last token and the guesses behind it, and draws after each; the draws count as far as the guesses
before them were what was drawn. Each is keyed by seed and position as always, so an answer is what it would be without
guessing, greedy or not: only faster, where a forward of a few tokens costs little more than one of one. Knows no pages.
"""

from __future__ import annotations

import numpy as np

NGRAMS = (3, 2)  # how many tokens must have stood together before; the longer ones first
PAYS = 0.25  # share of the guesses that must be right
REST = 32  # tokens for which nobody guesses after it did not pay; twice as many each time
LONGEST_REST = 1024


class Drafter:
    """Of one sequence. `most`: tokens guessed at once; fewer where it is seldom right, and none for a while where it
    does not pay."""

    __slots__ = ("_length", "_rate", "_rest", "_resumes", "most")

    def __init__(self, most: int) -> None:
        self.most = self._length = most
        self._rate = 2 * PAYS
        self._rest = REST
        self._resumes = 0

    def guess(self, tokens: np.ndarray, most: int) -> np.ndarray:
        """At most `most` tokens that may follow `tokens`; none where nothing speaks for any. int32 [token]."""
        most = min(most, self._length)
        if most < 1 or len(tokens) < self._resumes:
            return tokens[:0]
        return next((found for size in NGRAMS if len(found := lookup(tokens, size, most))), tokens[:0])

    def learn(self, guessed: int, right: int, length: int) -> None:
        """Of so many guesses so many were right; `length`: of the text by now."""
        self._length = min(self.most, 2 * self._length) if right == guessed else right + 1
        self._rate += 0.25 * (right / guessed - self._rate)
        if self._rate < PAYS:
            self._rate, self._resumes = 2 * PAYS, length + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)


def lookup(tokens: np.ndarray, size: int, most: int) -> np.ndarray:
    """What followed the last `size` tokens where they stood before: the latest place that `most` tokens follow, or the
    first one."""
    if len(tokens) <= size:
        return tokens[:0]
    ends = np.flatnonzero(tokens[size - 1 : -1] == tokens[-1]) + size - 1
    for back in range(1, size):
        ends = ends[tokens[ends - back] == tokens[-1 - back]]
    if not len(ends):
        return tokens[:0]
    followed = ends[ends < len(tokens) - most]
    end = followed[-1] if len(followed) else ends[0]
    return tokens[end + 1 : end + 1 + most]
