"""Which sequences compute how many tokens in the next step. Knows tables only through the manager, and no weights.

Of one client and priority: first come, first served. `running` and `waiting` together are then in order of arrival: an
admission moves the first that waits to the end of those that run, a preemption moves the last that runs to the front of
those that wait. So the oldest is never preempted, always progresses, and every other becomes the oldest in time. Among
clients `line` decides who is next; one of whom nothing runs takes a place of the one of whom most runs.

The beams of a search go on only together. One that has computed its last token keeps its pages until somebody needs
them, one of its own search first; then it rests, in no line, until the others have theirs. So any search progresses
while one of its beams fits, beside whatever other searches there are.

Checkpoints take turns: a step is one forward of the checkpoint that has waited longest for one, with all its running
sequences, whichever models they belong to. Those over the same weights, with adapters or without, have one turn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

from engine.kv.manager import CheckpointKV, KVManager, Turn
from engine.line import Line
from engine.sequence import Sequence, State
from engine.shares import Shares

SCORED_COST = 8  # of the budget, for a prompt token whose logits are wanted: a row as long as the vocabulary each


@dataclass
class Step:
    """One forward: each sequence computes its next so many tokens, those of one checkpoint side by side. `unservable`
    can never be served and are out."""

    space: CheckpointKV | None  # of one of them; others have its geometry
    sequences: list[Sequence]
    counts: list[int]
    unservable: list[Sequence]


class Scheduler:
    """`prefill_tokens_beside_decodes` bounds how long those that already stream wait for the prompts of others. At most
    `speculative_tokens` are guessed of each in a step, where at most `speculative_sequences` are in it."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_sequences: int,
        max_batch_tokens: int,
        prefill_tokens_beside_decodes: int,
        speculative_tokens: int = 0,
        speculative_sequences: int = 1,
    ) -> None:
        self.kv = kv
        self.waiting = Line()
        self.shares = Shares(kv)
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.max_sequences = min(max_sequences, max_batch_tokens)  # each takes at least one token of a step
        self._max_batch_tokens = max_batch_tokens
        self._prefill_tokens_beside_decodes = prefill_tokens_beside_decodes
        self._speculative_tokens, self._speculative_sequences = speculative_tokens, speculative_sequences
        self._steps = 0
        self._unservable: list[Sequence] = []

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        if not self.waiting.knows(sequence.client):
            self.waiting.charge(self.running)
        self.waiting.enter(sequence)
        self.waiting.append(sequence)

    def fork(self, sequence: Sequence, child: Sequence) -> None:
        """Lets `child` go on from where `sequence` is, next after it. Where there is no room, newer ones are preempted
        first; where that is not enough, it waits in front and will compute everything itself."""
        self.waiting.charge([sequence])
        child.charged = sequence.charged
        self.waiting.enter(child, sequence.arrival)
        while sequence.state is State.RUNNING:
            if self.kv.fork(sequence, child):
                self.running.insert(self.running.index(sequence) + 1, child)
                child.state = State.RUNNING
                if len(self.running) > self.max_sequences:
                    self._preempt(self.running[-1])
                return
            victim = self.shares.makes_room(sequence, self.running)
            if victim is sequence:
                break
            self._preempt(victim)
        self.waiting.appendleft(child)

    def go_on(self, sequence: Sequence) -> None:
        """Lets one that rested, and has a token more to compute now, wait in front for its turn."""
        if sequence.state is State.RESTING:
            sequence.state = State.WAITING
            self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence, *, in_doubt: bool = False) -> None:
        """Ends a sequence in whatever state it is, and frees what it holds."""
        if sequence.state is State.RUNNING:
            self.waiting.charge([sequence])
            self.running.remove(sequence)
            self.kv.release(sequence, in_doubt=in_doubt)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.FINISHED:
            return
        self.waiting.leave(sequence)
        sequence.state = State.FINISHED

    def schedule(self) -> Step:
        """Admits what fits, then picks the checkpoint and its tokens, with their blocks taken."""
        self._admit()
        turn = self._next_turn()
        sequences, counts = side_by_side(*self._share_out(turn)) if turn else ([], [])
        unservable, self._unservable = self._unservable, []
        return Step(sequences[0].space if sequences else None, sequences, counts, unservable)

    def _admit(self) -> None:
        if self.waiting and self.waiting.several:
            self.waiting.charge(self.running)
        if self.shares:
            self._admit_owed()
        while self.waiting:
            busy = [each for each in self.running if not each.waits_for_others]
            sequence = self.waiting.first(busy)
            if len(self.running) < self.max_sequences and self.kv.admit(sequence, alone=not busy):
                self._run(sequence)
            elif victim := self._who_yields(sequence):
                self._preempt(victim)
            elif self.running:
                return
            else:  # not even alone
                self.remove(sequence)
                self._unservable.append(sequence)

    def _admit_owed(self) -> None:
        """Lets those begin whose models count on the pages that they need, and takes these back from who borrowed."""
        seen: set[Sequence] = set()
        while len(self.running) < self.max_sequences:
            owed = [each for each in self.shares.owed(self.waiting.heads(), self.running) if each not in seen]
            if not owed:
                return
            sequence = min(owed, key=self.waiting.rank)
            seen.add(sequence)
            for debtor in self.shares.debtors(sequence, self.running):
                self._preempt(debtor)
                seen.add(debtor)
            if self.kv.admit(sequence, alone=False):
                self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        """Puts one that waited behind all of its priority."""
        self.waiting.remove(sequence)
        place = bisect_right(self.running, sequence.priority, key=lambda each: each.priority)
        self.running.insert(place, sequence)
        sequence.state = State.RUNNING

    def _who_yields(self, sequence: Sequence) -> Sequence | None:
        """Who is preempted for one that waits: the last of less priority; a beam of its search that waits for it, or of
        any where all that run wait for others; else, where nothing runs of its model, or of its user, a beam that waits
        for others, or the newest of the model, or user, of which most runs. Nobody for whom that would be the only one,
        and for want of pages nobody of another model that is within its share."""
        if self.running and self.running[-1].priority > sequence.priority:
            return self.running[-1]
        idle = [each for each in self.running if each.waits_for_others]
        if siblings := [each for each in idle if each.joint is sequence.joint]:
            return siblings[-1]
        if len(idle) == len(self.running):
            return idle[-1] if idle else None
        if not self.waiting.several:
            return None
        lacks_pages = len(self.running) < self.max_sequences
        running = self.shares.unprotected(sequence, self.running) if lacks_pages and self.shares else self.running
        equals = [each for each in running if each.priority == sequence.priority and not each.waits_for_others]
        if any(each.client[0] == sequence.client[0] for each in equals):  # then the places of the model are shared
            equals = [each for each in equals if each.client[0] == sequence.client[0]]
            names = [each.client[1] for each in equals]
            own = sequence.client[1]
        else:
            names, own = [each.client[0] for each in equals], sequence.client[0]
        if own in names:
            return None
        if idle := [each for each in idle if each.priority == sequence.priority]:
            return idle[-1]
        crowd, most = Counter(names).most_common(1)[0] if names else ("", 0)
        if most < 2:
            return None
        return next(each for each, name in zip(reversed(equals), reversed(names), strict=True) if name == crowd)

    def _next_turn(self) -> Turn | None:
        turn = min({sequence.space.turn for sequence in self.running}, key=lambda each: each.last, default=None)
        if turn:
            self._steps += 1
            turn.last = self._steps
        return turn

    def _share_out(self, turn: Turn) -> tuple[list[Sequence], list[int]]:
        """One token to each that decodes, what is left of the budget to those that prefill, the oldest first."""
        own = [sequence for sequence in self.running if sequence.space.turn is turn]
        budget = self._max_batch_tokens - sum(each.length - each.computed == 1 for each in own)
        if any(each.length - each.computed == 1 for each in self.running):
            budget = min(budget, self._prefill_tokens_beside_decodes)
        if self.waiting.several and budget:
            own = self._least_served_first(own)
        guesses = self._guesses(own) if self._speculative_tokens else 0
        sequences, counts, preemptions = [], [], self.preemptions
        for sequence in own:
            left = sequence.length - sequence.computed
            if sequence.state is not State.RUNNING or left == 0:
                continue  # preempted just now, or it waits for others of its request
            if left > 1 and budget and not sequence.scored:
                self.kv.rematch(sequence)
            if self._draft(sequence, guesses):
                sequences.append(sequence)
                counts.append(1 + sequence.drafted)
                continue
            cost = SCORED_COST if left > 1 and sequence.scored else 1
            count = min(sequence.uncomputed, -(-budget // cost)) if left > 1 else 1
            if count == 0 or not self._make_room(sequence, count):
                continue
            if left > 1:
                budget = max(0, budget - cost * count)
            sequences.append(sequence)
            counts.append(count)
        if preemptions != self.preemptions:
            kept = [(each, n) for each, n in zip(sequences, counts, strict=True) if each.state is State.RUNNING]
            sequences, counts = [each for each, _ in kept], [n for _, n in kept]
        return sequences, counts

    def _guesses(self, own: list[Sequence]) -> int:
        """How many tokens may be guessed of each: none beside a prompt, or in a step that is large without."""
        if len(own) > self._speculative_sequences or any(each.uncomputed > 1 or each.scored for each in own):
            return 0
        return min(self._speculative_tokens, self._max_batch_tokens // len(own) - 1)

    def _draft(self, sequence: Sequence, most: int) -> bool:
        """Whether there are guesses behind the last token, and room for them. Nobody is preempted for a guess, and
        nothing is guessed behind a prompt, where other answers to it may begin."""
        sequence.drafted = 0
        most = most if sequence.length > sequence.prompt_length else 0
        if most and sequence.drafter and sequence.draft(most) and not self.kv.grow(sequence, 1 + sequence.drafted):
            sequence.drafted = 0
        return sequence.drafted > 0

    def _least_served_first(self, sequences: list[Sequence]) -> list[Sequence]:
        """The order in which prompts take their share, so that one client's do not make all others wait."""
        self.waiting.charge(self.running)
        return sorted(sequences, key=self.waiting.rank)

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Preempts until the blocks are there; False where `sequence` itself had to go."""
        while not self.kv.grow(sequence, count):
            victim = self.shares.makes_room(sequence, self.running)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.waiting.charge([sequence])
        self.running.remove(sequence)
        sequence.state = State.RESTING if sequence.waits_for_others else State.WAITING
        self.kv.release(sequence)
        if sequence.state is State.WAITING:
            self.waiting.appendleft(sequence)
        self.preemptions += 1


def side_by_side(sequences: list[Sequence], counts: list[int]) -> tuple[list[Sequence], list[int]]:
    """Those of one checkpoint, and so of one adapter, together, in the order in which the first of each came."""
    spaces = {space: place for place, space in enumerate(dict.fromkeys(each.space for each in sequences))}
    if len(spaces) < 2:
        return sequences, counts
    order = sorted(range(len(sequences)), key=lambda i: spaces[sequences[i].space])
    return [sequences[i] for i in order], [counts[i] for i in order]
