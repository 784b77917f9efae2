"""Who is next: the line of sequences that wait, and what each client has been served. Knows no pages and no steps.

The smallest priority value first; then the model that was served least; then of its users the one that was served
least; then who came first. What was served is counted in virtual tokens, those generated twice, and who comes (back)
begins at the least that any active one has: the virtual token counter of Sheng et al., "Fairness in Serving Large
Language Models" (OSDI 2024), on two levels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from engine.sequence import Sequence

GENERATED_WEIGHT = 2  # of a generated token, beside one of a prompt


@dataclass(slots=True)
class Account:
    """Of a model, or of a user of a model, while any sequence of theirs waits or runs."""

    served: float
    sequences: int = 0


class Line:
    """`enter` and `leave` say which sequences there are at all, the others which of them wait."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, tuple[str, str]], deque[Sequence]] = {}  # by priority and client
        self._models: dict[str, Account] = {}
        self._users: dict[tuple[str, str], Account] = {}
        self._arrivals = count()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        waiting = [sequence for queue in self._queues.values() for sequence in queue]
        return iter(sorted(waiting, key=lambda each: (each.priority, each.arrival)))

    @property
    def several(self) -> bool:
        """Whether there is more than one client to be fair to."""
        return len(self._users) > 1

    # Who is there

    def knows(self, client: tuple[str, str]) -> bool:
        """Whether it is here already. Before one comes who is not, others must be charged for what they had alone."""
        return client in self._users

    def enter(self, sequence: Sequence, arrival: int | None = None) -> None:
        sequence.arrival = next(self._arrivals) if arrival is None else arrival
        model, _ = sequence.client
        if model not in self._models:
            self._models[model] = Account(least(self._models.values()))
        if sequence.client not in self._users:
            of_model = (account for (other, _), account in self._users.items() if other == model)
            self._users[sequence.client] = Account(least(of_model))
        self._models[model].sequences += 1
        self._users[sequence.client].sequences += 1

    def leave(self, sequence: Sequence) -> None:
        for accounts, key in ((self._models, sequence.client[0]), (self._users, sequence.client)):
            accounts[key].sequences -= 1
            if not accounts[key].sequences:
                del accounts[key]

    def charge(self, sequences: Iterable[Sequence]) -> None:
        """Counts what these were served since they were last charged."""
        for sequence in sequences:
            more = service(sequence) - sequence.charged
            if more > 0:
                sequence.charged += more
                self._models[sequence.client[0]].served += more
                self._users[sequence.client].served += more

    # Who waits

    def append(self, sequence: Sequence) -> None:
        self._queue_of(sequence).append(sequence)
        self._waiting += 1

    def appendleft(self, sequence: Sequence) -> None:
        """In front of all others of the same client."""
        self._queue_of(sequence).appendleft(sequence)
        self._waiting += 1

    def remove(self, sequence: Sequence) -> None:
        queue = self._queue_of(sequence)
        queue.remove(sequence)
        self._waiting -= 1
        if not queue:
            del self._queues[sequence.priority, sequence.client]

    def heads(self) -> list[Sequence]:
        """The first of each client and priority."""
        return [queue[0] for queue in self._queues.values()]

    def first(self, running: Iterable[Sequence]) -> Sequence:
        """Who is next; somebody must wait. Counts as they are charged.

        Of whom nothing runs at that priority goes before the others: so one that was preempted for somebody
        (`Scheduler._who_yields`) is never let in again before them.
        """
        if len(self._queues) == 1:
            return next(iter(self._queues.values()))[0]
        clients = {(each.priority, each.client) for each in running}
        models = {(priority, model) for priority, (model, _) in clients}

        def place(sequence: Sequence) -> tuple:
            priority, of_model, of_user = self.rank(sequence)
            model_runs, client_runs = (priority, sequence.client[0]) in models, (priority, sequence.client) in clients
            return priority, model_runs, of_model, client_runs, of_user, sequence.arrival

        return min((queue[0] for queue in self._queues.values()), key=place)

    def rank(self, sequence: Sequence) -> tuple[int, float, float]:
        """The smaller, the sooner."""
        model, user = self._models[sequence.client[0]], self._users[sequence.client]
        return sequence.priority, model.served, user.served

    def _queue_of(self, sequence: Sequence) -> deque[Sequence]:
        return self._queues.setdefault((sequence.priority, sequence.client), deque())


def service(sequence: Sequence) -> int:
    """Virtual tokens that a sequence was served: those of its prompt that were computed, and those generated."""
    computed = min(sequence.computed, sequence.prompt_length) - (sequence.cached_tokens or 0)
    return computed + GENERATED_WEIGHT * (sequence.length - sequence.prompt_length)


def least(accounts: Iterable[Account]) -> float:
    return min((account.served for account in accounts), default=0.0)
