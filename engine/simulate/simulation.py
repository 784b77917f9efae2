"""The real scheduler over the real books of the pool; a forward takes no time and every token comes as the trace says.

A pool of n slots is n / block pages of one block each. Steps in which every sequence computes one token, nobody comes
or goes and the free blocks suffice are alike but for the length of the sequences: they are taken in one go
(`Simulation.skip`), and give the very figures that one by one they would (a test compares).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields

import numpy as np

from engine.errors import EngineError
from engine.kv.geometry import GroupGeometry, KVGeometry, blocks_of
from engine.kv.pool import PagePool
from engine.kv.reserved import ReservedKV, kv_manager
from engine.scheduler import Scheduler
from engine.sequence import Sequence, State
from engine.simulate.machines import Machine

MAX_SEQUENCES = 256  # the default of the vLLM of the paper's time


@dataclass(frozen=True)
class Ask:
    """One request: `samples` answers of `answer` tokens each to `prompt` tokens. With a `turnover` these are the beams
    of one search, and each step drops so large a share of them for second continuations of the others."""

    prompt: int
    answer: int
    samples: int = 1
    arrives: float = 0.0  # seconds
    turnover: float | None = None


class Scripted(Sequence):
    """A sequence whose answer is known before it is generated; `reserved`: slots that its policy sets aside."""

    def __init__(self, space, text: np.ndarray, ask: Ask, waits_for: int = 0, owner: object = None) -> None:
        """`text` int32 [prompt + answer]; `waits_for` more answers begin once its prompt is computed."""
        super().__init__(space, text[: len(text) - ask.answer], ask.answer, owner)
        self.tokens = text
        self.ask = ask
        self.waits_for = waits_for
        self.reserved = 0


class Search:
    """The beams of a request that go on, and those of them that have computed all they have."""

    def __init__(self) -> None:
        self.beams: list[Scripted] = []
        self.ready: set[Scripted] = set()


@dataclass
class Figures:
    """Sums over the steps that count. Slots: `tokens` hold one, `reserved` will, `internal` never; the rest of the
    pool is external. `lone_slots`: what would be allocated if nothing were shared."""

    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    reserved: int = 0
    internal: int = 0
    allocated: int = 0
    lone_slots: int = 0
    seconds: float = 0.0
    generated: int = 0
    preemptions: int = 0
    seconds_per_token: list[float] = field(default_factory=list)  # of each request: latency / answer

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def shares(self, slots: int) -> dict[str, float]:
        """Percent of the pool, as Fig. 2 divides it, and the mean number of sequences in a step."""
        every = 100 / (slots * self.steps)
        used = (self.tokens + self.reserved + self.internal) * every
        return {
            "token": round(self.tokens * every, 2),
            "reserved": round(self.reserved * every, 2),
            "internal": round(self.internal * every, 2),
            "external": round(100 - used, 2),
            "batch": round(self.sequences / self.steps, 2),
        }

    @property
    def waste_percent(self) -> float:
        """Of the allocated slots those without a token."""
        return 100 * (1 - self.tokens / self.allocated)

    @property
    def saved_percent(self) -> float:
        """Blocks that sharing saved, of those that would be allocated without."""
        return 100 * (1 - self.allocated / self.lone_slots)

    @property
    def tokens_per_second(self) -> float:
        return self.generated / self.seconds


class Simulation:
    """One model on one machine under one policy. `prefix_tokens` begin every prompt, and are computed once where blocks
    are shared; `share`: whether blocks of equal content are. `warm_up` requests are answered before anything counts."""

    def __init__(
        self,
        machine: Machine,
        policy: str,
        *,
        block_tokens: int = 16,
        prefix_tokens: int = 0,
        share: bool = False,
        warm_up: int = 0,
        seed: int = 0,
        max_sequences: int = MAX_SEQUENCES,
        batch_tokens: int | None = None,
        step_by_step: bool = False,
    ) -> None:
        self.machine = machine
        self.slots = machine.slots
        self.figures = Figures()
        self._preemptions_before = 0
        self.finished = 0
        self.clock = 0.0  # seconds
        self._warm_up = warm_up
        self._max_sequences = max_sequences
        self._step_by_step = step_by_step or share  # with sharing, a block that fills may let another in
        self._source = np.random.default_rng((seed, 2))
        self._blank = np.zeros(machine.context_length + 1, np.int32)
        shape = GroupGeometry(None, 1, 1, 1, 1, block_tokens)
        budget = batch_tokens or max(machine.context_length, 2560)  # whole prompts in one step, as in the paper
        self.kv = kv_manager(
            policy,
            PagePool(self.slots // block_tokens, 2 * shape.unit_bytes),
            chunk_tokens=budget,
            share_prefixes=share,
        )
        self.space = self.kv.add_checkpoint("simulated", KVGeometry((shape,)), machine.context_length)
        self.scheduler = Scheduler(
            self.kv,
            max_sequences=max_sequences,
            max_batch_tokens=budget,
            prefill_tokens_beside_decodes=budget,
        )
        self._prefix = self._source.integers(0, 2**31, prefix_tokens, dtype=np.int32)
        if self.kv.share_prefixes and prefix_tokens:
            self._pin_prefix(block_tokens)

    def run(self, asks: Iterable[Ask], *, always_full: bool = True) -> Figures:
        """Until all are answered; always full: until no more come, for then the queue would run dry."""
        coming = iter(asks)
        upcoming = next(coming, None)
        while upcoming or not self.scheduler.idle:
            if always_full:
                while upcoming and len(self.scheduler.waiting) < MAX_SEQUENCES:
                    self.add(upcoming)
                    upcoming = next(coming, None)
                if not upcoming:
                    break
            else:
                if self.scheduler.idle and upcoming:
                    self.clock = max(self.clock, upcoming.arrives)
                while upcoming and upcoming.arrives <= self.clock:
                    self.add(upcoming)
                    upcoming = next(coming, None)
            if not self.skip(None if always_full or not upcoming else upcoming.arrives):
                self.step()
        return self.figures

    def add(self, ask: Ask) -> None:
        if ask.turnover is None:
            self.scheduler.add(self._sequence(ask, ask.samples - 1))
        else:
            self.scheduler.add(self._beam(self._sequence(ask, 0), Search()))

    def step(self) -> None:
        """As `Engine.step`."""
        step = self.scheduler.schedule()
        if step.unservable:
            raise EngineError(f"{step.unservable[0].limit:,} tokens do not fit into {self.slots:,} slots")
        for sequence, count in zip(step.sequences, step.counts, strict=True):
            self.kv.commit(sequence, count)
        grown = [sequence for sequence in step.sequences if sequence.computed == sequence.length]
        self._count_step(sum(step.counts), len(grown))
        for sequence in grown:
            if search := sequence.joint:
                search.ready.add(sequence)
                if len(search.ready) == len(search.beams):
                    self._advance(search)
            else:
                self._append(sequence)

    def skip(self, until: float | None = None) -> bool:
        """Takes as many steps as do nothing but give every running sequence a token; False where the next does more.
        `until`: when the next request arrives."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        if self._step_by_step or not running or any(s.length - s.computed != 1 for s in running):
            return False
        if waiting and len(running) < self._max_sequences and self.kv.admits(waiting.first(running)):
            return False
        steps = min(s.limit - s.length for s in running)
        slack = [s.table.capacity - s.computed for s in running]
        fit = bisect_right(range(1, steps + 1), self.kv.blocks.available_pages, key=lambda n: self._missing(slack, n))
        if until is not None and not waiting:
            fit = bisect_right(
                range(fit), until, key=lambda n: self.clock + self._seconds(n)
            )  # the last begins by then
        if not fit:
            return False
        self._count_alike(fit)
        for sequence in list(running):
            self.kv.grow(sequence, fit)
            self.kv.commit(sequence, fit)
            sequence.length += fit - 1
            self._append(sequence)
        return True

    # Private

    def _sequence(self, ask: Ask, waits_for: int, prompt: np.ndarray | None = None) -> Scripted:
        """Its answer is like no other. `prompt`: that of another, to answer once more."""
        own = len(self._prefix) + ask.prompt + ask.answer
        text = self._blank[:own]  # nobody looks
        if self.kv.share_prefixes:
            text = self._source.integers(0, 2**31, own, dtype=np.int32)
            begin = self._prefix if prompt is None else prompt
            text[: len(begin)] = begin
        sequence = Scripted(self.space, text, ask, waits_for)
        if isinstance(self.kv, ReservedKV):
            sequence.reserved = self.kv.reserved_tokens(sequence)
        return sequence

    def _pin_prefix(self, block_tokens: int) -> None:
        whole = self._prefix[: len(self._prefix) // block_tokens * block_tokens]
        sequence = Sequence(self.space, whole, 0)
        self.kv.admit(sequence, alone=True)
        self.kv.grow(sequence, len(whole))
        self.kv.commit(sequence, len(whole))
        self.kv.pin(sequence)

    def _append(self, sequence: Scripted) -> None:
        """One token more; the other answers to a prompt begin with its first."""
        while sequence.waits_for:
            sequence.waits_for -= 1
            child = self._sequence(sequence.ask, 0, sequence.tokens[: sequence.length])
            self.scheduler.fork(sequence, child)
            if child.state is State.RUNNING:
                child.length += 1
        sequence.length += 1
        if sequence.length == sequence.limit:
            self._finish(sequence)

    def _beam(self, sequence: Scripted, search: Search) -> Scripted:
        sequence.joint = search
        search.beams.append(sequence)
        return sequence

    def _advance(self, search: Search) -> None:
        """As `Engine`: those without an heir end, then others are forked, then all have a token more."""
        beams, ask = search.beams, search.beams[0].ask
        forks = ask.samples - len(beams)
        if not forks:
            forks = min(self._source.binomial(len(beams), ask.turnover), len(beams) - 1)
            for _ in range(forks):
                self.scheduler.remove(beams.pop(self._source.integers(len(beams))))
        for parent in [beams[number] for number in self._source.integers(len(beams), size=forks)]:
            child = self._beam(self._sequence(ask, 0, parent.tokens[: parent.length]), search)
            child.length = parent.length
            self.scheduler.fork(parent, child)
        search.ready.clear()
        for beam in list(beams):
            beam.length += 1
            if beam.length == beam.limit:
                self._finish(beam)
            else:
                self.scheduler.go_on(beam)

    def _finish(self, sequence: Scripted) -> None:
        self.scheduler.remove(sequence)
        self.finished += 1
        if self.finished > self._warm_up:
            self.figures.seconds_per_token.append((self.clock - sequence.ask.arrives) / sequence.ask.answer)
        else:
            self._preemptions_before = self.scheduler.preemptions
        self.figures.preemptions = self.scheduler.preemptions - self._preemptions_before

    def _missing(self, slack: list[int], steps: int) -> int:
        """Blocks that sequences with so many free slots need for `steps` tokens more each."""
        size = self.space.block_tokens
        return sum(blocks_of(steps - free, size) for free in slack if steps > free)

    def _seconds(self, steps: int) -> float:
        running = self.scheduler.running
        context = steps * sum(s.computed for s in running) + len(running) * steps * (steps + 1) // 2
        return steps * self.machine.step_seconds(len(running), 0) + self.machine.context_seconds(context)

    def _count_step(self, computed: int, generated: int) -> None:
        """After a step, with all that it held still held."""
        tables = self.kv.tables
        tokens = sum(s.computed for s in tables)
        seconds = self.machine.step_seconds(computed, tokens)
        self.clock += seconds
        if self.finished < self._warm_up:
            return
        figures, size = self.figures, self.space.block_tokens
        figures.steps += 1
        figures.seconds += seconds
        figures.sequences += len(tables)
        figures.generated += generated
        capacity = sum(table.capacity for table in tables.values())
        figures.lone_slots += capacity
        if isinstance(self.kv, ReservedKV):
            self._count_reserved(1, tokens)
        else:
            allocated = self.space.groups[0].live_blocks * size
            figures.allocated += allocated
            figures.internal += capacity - tokens
            figures.tokens += allocated - (capacity - tokens)

    def _count_alike(self, steps: int) -> None:
        """Before steps in which each sequence computes one token."""
        running = self.scheduler.running
        seconds = self._seconds(steps)
        self.clock += seconds
        if self.finished < self._warm_up:
            return
        figures, size = self.figures, self.space.block_tokens
        figures.steps += steps
        figures.seconds += seconds
        figures.sequences += steps * len(running)
        figures.generated += steps * len(running)
        tokens = steps * sum(s.computed for s in running) + len(running) * steps * (steps + 1) // 2
        if isinstance(self.kv, ReservedKV):
            figures.lone_slots += steps * sum(s.table.capacity for s in running)
            self._count_reserved(steps, tokens)
        else:
            spans = ((s.computed, s.computed + steps) for s in running)
            allocated = size * sum(blocks_up_to(end, size) - blocks_up_to(start, size) for start, end in spans)
            figures.tokens += tokens
            figures.internal += allocated - tokens
            figures.allocated += allocated
            figures.lone_slots += allocated

    def _count_reserved(self, steps: int, tokens: int) -> None:
        """`tokens` are summed over the steps; a reservation stays the same in all of them."""
        figures, tables = self.figures, self.kv.tables
        reserved, final = sum(s.reserved for s in tables), sum(s.limit for s in tables)
        figures.tokens += tokens
        figures.reserved += steps * final - tokens
        figures.internal += steps * (reserved - final)
        figures.allocated += steps * reserved


def blocks_up_to(tokens: int, size: int) -> int:
    """Blocks of 1 token, of 2, ... of `tokens`, summed."""
    full, rest = divmod(tokens, size)
    return size * full * (full + 1) // 2 + rest * (full + 1)


def asks_of(pairs: Iterable[tuple[int, int]], samples: int = 1, turnover: float | None = None) -> Iterator[Ask]:
    for prompt, answer in pairs:
        yield Ask(prompt, answer, samples, turnover=turnover)
