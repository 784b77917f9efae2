"""Which requests have run out of time: past their deadline, or without progress. Knows no pages, ends nothing."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from engine.kv.manager import KVManager
from engine.request import Request
from engine.scheduler import Scheduler
from engine.sequence import State


class Deadlines:
    """Those of the requests that have one. Asking costs nothing where there is none."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []  # when, and the id of the request

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.deadline, request.id))

    def passed(self, now: float) -> list[str]:
        """Ids of those whose deadline has come since last asked; they may have ended already."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            late.append(heapq.heappop(self._heap)[1])
        return late


class Watchdog:
    """A request is stuck when for `patience` seconds none of its tokens was computed and it did not wait its turn: for
    a place beside those that run, or with a prompt for those of others."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._next_look = 0.0
        self._seen: dict[str, tuple[tuple, float]] = {}  # by request: how far it was, and since when

    def stuck(self, requests: Collection[Request], now: float) -> list[Request]:
        """Looks four times in `patience` seconds; in between, nobody is stuck."""
        if now < self._next_look:
            return []
        self._next_look = now + self._patience / 4
        seen, self._seen = self._seen, {}
        progress = {each.id: progress_of(each) for each in requests}
        running = [each for each in requests if is_running(each)]
        moved = [each for each in running if progress[each.id] != seen.get(each.id, (None, now))[0]]
        found = []
        for request in requests:
            before, since = seen.get(request.id, (None, now))
            waits_its_turn = moved if prefills(request) else running and request not in running
            same = progress[request.id] == before and not waits_its_turn
            self._seen[request.id] = (progress[request.id], since if same else now)
            if now - self._seen[request.id][1] >= self._patience:
                found.append(request)
        return found


def progress_of(request: Request) -> tuple:
    return tuple((each.computed, each.length) for each in request.sequences)


def is_running(request: Request) -> bool:
    return any(each.state is State.RUNNING for each in request.sequences)


def prefills(request: Request) -> bool:
    """Whether all of it that runs is in the middle of a prompt."""
    running = [each for each in request.sequences if each.state is State.RUNNING]
    return bool(running) and all(each.uncomputed > 1 for each in running)


def dump(scheduler: Scheduler, memory: KVManager) -> str:
    """The state of all sequences and of the pool, a line each, for the log."""

    def line(sequence) -> str:
        held = sequence.table.capacity if sequence.table else 0
        whose = getattr(getattr(sequence.owner, "request", None), "id", "a system prompt")
        return (
            f"  {sequence.state.name} {whose}: computed {sequence.computed:,} of {sequence.length:,} tokens, "
            f"limit {sequence.limit:,}, room for {held:,}, priority {sequence.priority}"
        )

    pages = (
        f"pages: {memory.pool.total:,} in all, {memory.pool.free:,} free, {memory.blocks.cached_pages:,} cached, "
        f"{memory.pinned_pages:,} pinned, {memory.promised_pages:,} promised; {scheduler.preemptions:,} preemptions"
    )
    return "\n".join([pages, *(line(each) for each in [*scheduler.running, *scheduler.waiting])])
