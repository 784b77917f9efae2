"""Shares: the part of the pool that each model may count on. Knows pages by number, and who runs.

A model is registered with a `kv_share`. What it does not use is lent to whoever asks, and taken back when its owner
needs it: cached blocks go first, as for everybody, then the newest sequences of the model that is furthest over its own
share, to be computed again later. Who is within its share makes way for no other model for want of pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.kv.manager import KVManager
from engine.sequence import Sequence


class Shares:
    """Empty, and of no cost, where no model has one."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._of: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def set(self, model: str, share: float) -> None:
        """`share` of all that system prompts leave; 0: it counts on nothing."""
        self._of.pop(model, None)
        if share:
            self._of[model] = share

    def pages(self, model: str) -> int:
        return int(self._of.get(model, 0) * (self._kv.pool.total - self._kv.pinned_pages))

    def over(self, running: Iterable[Sequence]) -> Counter[str]:
        """By model, how many pages its running sequences hold over its share; below it, a negative number."""
        over = Counter({model: -self.pages(model) for model in self._of})
        for sequence in running:
            over[sequence.client[0]] += sequence.table.own_pages
        return over

    def protects(self, model: str, over: Counter[str]) -> bool:
        return model in self._of and over[model] <= 0

    def owed(self, waiting: Iterable[Sequence], running: list[Sequence]) -> list[Sequence]:
        """Those that would be within their models' shares if they ran."""
        if not self._of:
            return []
        over = self.over(running)
        with_shares = [each for each in waiting if each.client[0] in self._of]
        return [each for each in with_shares if over[each.client[0]] + self._kv.needs(each) <= 0]

    def debtors(self, sequence: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Who gives back what it borrowed, so that one that is owed it can begin: always the newest of the model that
        is furthest over its share. None where all that was borrowed would not be enough."""
        over, debtors, lacking = self.over(running), [], self._kv.shortage(sequence)
        while lacking > self._kv.released_by(debtors):
            others = [each for each in running if each not in debtors]
            if (debtor := self._debtor(sequence, others, over)) is None:
                return []
            debtors.append(debtor)
            over[debtor.client[0]] -= debtor.table.own_pages
        return debtors

    def _debtor(self, sequence: Sequence, running: list[Sequence], over: Counter[str]) -> Sequence | None:
        may = [each for each in running if over[each.client[0]] > 0 and each.priority >= sequence.priority]
        may = [each for each in may if each.client[0] != sequence.client[0]]
        most = max((over[each.client[0]] for each in may), default=0)
        return next((each for each in reversed(may) if over[each.client[0]] == most), None)

    def unprotected(self, sequence: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Those of its own model, and of those that are over their shares."""
        over = self.over(running)
        own = sequence.client[0]
        return [each for each in running if each.client[0] == own or not self.protects(each.client[0], over)]

    def makes_room(self, sequence: Sequence, running: list[Sequence]) -> Sequence:
        """Who is preempted for one that runs and grows: the newest that may be."""
        if not self._of:
            return running[-1]
        over = self.over(running)
        if self.protects(sequence.client[0], over) and (debtor := self._debtor(sequence, running, over)):
            return debtor
        return self.unprotected(sequence, running)[-1]
