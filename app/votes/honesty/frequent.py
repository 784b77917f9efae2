"""Prompts asked so often that they would outvote all others: those above the 99.9th percentile are down-sampled.

As the Chatbot Arena's own pipeline does; the sample is drawn by a seeded hash of each vote, so that it stays the same
when votes are added, and anyone can draw it again.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence

PERCENTILE = 99.9


def too_frequent(prompts: Mapping[int, str], *, percentile: float = PERCENTILE, seed: int = 0) -> list[int]:
    """The votes (by id) that should not count: of each prompt those beyond the percentile's number of votes.

    `prompts`: by vote the first prompt of its battle. Spacing, case and compatible letters do not matter.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for vote, prompt in prompts.items():
        groups[" ".join(unicodedata.normalize("NFKC", prompt).casefold().split())].append(vote)
    limit = most_votes([len(votes) for votes in groups.values()], percentile)
    drawn = [sorted(votes, key=lambda vote: _draw(vote, seed))[limit:] for votes in groups.values()]
    return sorted(vote for votes in drawn for vote in votes)


def most_votes(counts: Sequence[int], percentile: float) -> int:
    """How many votes a prompt may have: the smallest count that so many percent of all prompts do not exceed."""
    if not counts:
        return 0
    return sorted(counts)[min(len(counts), math.ceil(len(counts) * percentile / 100)) - 1]


def _draw(vote: int, seed: int) -> bytes:
    return hashlib.sha256(f"{seed} {vote}".encode()).digest()
