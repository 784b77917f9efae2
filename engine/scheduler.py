"""Which sequences compute how many tokens in the next step. Knows tables only through the manager, and no weights.

First come, first served. `running` and `waiting` together are always in order of arrival: an admission moves the first
that waits to the end of those that run, a preemption moves the last that runs to the front of those that wait. So the
oldest is never preempted, always progresses, and every other becomes the oldest in time.

Checkpoints take turns: a step is one forward of the checkpoint that has waited longest for one, with all its running
sequences, whichever models they belong to.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from engine.kv.manager import CheckpointKV, KVManager
from engine.sequence import Sequence, State

SCORED_COST = 8  # of the budget, for a prompt token whose logits are wanted: a row as long as the vocabulary each

@dataclass
class Step:
    """One forward: each sequence computes its next so many tokens. `unservable` can never be served and are out."""

    space: CheckpointKV | None
    sequences: list[Sequence]
    counts: list[int]
    unservable: list[Sequence]


class Scheduler:
    """`prefill_tokens_beside_decodes` bounds how long those that already stream wait for the prompts of others."""

    def __init__(
        self, kv: KVManager, *, max_sequences: int, max_batch_tokens: int, prefill_tokens_beside_decodes: int
    ) -> None:
        self.kv = kv
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._max_sequences = min(max_sequences, max_batch_tokens)
        self._max_batch_tokens = max_batch_tokens
        self._prefill_tokens_beside_decodes = prefill_tokens_beside_decodes
        self._steps = 0
        self._last_turn: WeakKeyDictionary[CheckpointKV, int] = WeakKeyDictionary()
        self._unservable: list[Sequence] = []

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def fork(self, sequence: Sequence, child: Sequence) -> None:
        """Lets `child` go on from where `sequence` is, next after it. Where there is no room, newer ones are preempted
        first; where that is not enough, it waits in front and will compute everything itself."""
        while sequence.state is State.RUNNING:
            if self.kv.fork(sequence, child):
                self.running.insert(self.running.index(sequence) + 1, child)
                child.state = State.RUNNING
                if len(self.running) > self._max_sequences:
                    self._preempt(self.running[-1])
                return
            if self.running[-1] is sequence:
                break
            self._preempt(self.running[-1])
        self.waiting.appendleft(child)

    def remove(self, sequence: Sequence, *, in_doubt: bool = False) -> None:
        """Ends a sequence in whatever state it is, and frees what it holds."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self.kv.release(sequence, in_doubt=in_doubt)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED

    def schedule(self) -> Step:
        """Admits what fits, then picks the checkpoint and its tokens, with their blocks taken."""
        self._admit()
        space = self._next_turn()
        sequences, counts = self._share_out(space) if space else ([], [])
        unservable, self._unservable = self._unservable, []
        return Step(space, sequences, counts, unservable)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            if self.kv.admit(sequence, alone=not self.running):
                self.waiting.popleft()
                self.running.append(sequence)
                sequence.state = State.RUNNING
            elif self.running:
                return
            else:  # not even alone
                self.remove(sequence)
                self._unservable.append(sequence)

    def _next_turn(self) -> CheckpointKV | None:
        spaces = {sequence.space for sequence in self.running}
        if not spaces:
            return None
        space = min(spaces, key=lambda each: self._last_turn.get(each, 0))
        self._steps += 1
        self._last_turn[space] = self._steps
        return space

    def _share_out(self, space: CheckpointKV) -> tuple[list[Sequence], list[int]]:
        """One token to each that decodes, what is left of the budget to those that prefill, the oldest first."""
        decoding = sum(sequence.uncomputed == 1 for sequence in self.running)
        own = [sequence for sequence in self.running if sequence.space is space]
        budget = self._max_batch_tokens - sum(sequence.uncomputed == 1 for sequence in own)
        if decoding:
            budget = min(budget, self._prefill_tokens_beside_decodes)
        sequences, counts = [], []
        for sequence in own:
            if sequence.state is not State.RUNNING:
                break  # preempted by an older one just now, and so were all after it
            prefills = sequence.uncomputed > 1
            if prefills and budget and not sequence.scored:
                self.kv.rematch(sequence)
            cost = SCORED_COST if prefills and sequence.scored else 1
            count = min(sequence.uncomputed, -(-budget // cost)) if prefills else 1
            if count == 0 or not self._make_room(sequence, count):
                continue
            if prefills:
                budget = max(0, budget - cost * count)
            sequences.append(sequence)
            counts.append(count)
        return sequences, counts

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Preempts from the newest on until the blocks are there; False where `sequence` itself had to go."""
        while not self.kv.grow(sequence, count):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.pop()
        self.kv.release(sequence)
        sequence.state = State.WAITING
        self.waiting.appendleft(sequence)
        self.preemptions += 1
