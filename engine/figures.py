"""What the engine says of itself: the pool's use for `/kv`, counts for `/metrics`. Reads, never changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engine.architectures import Runner
from engine.kv.manager import CheckpointKV, KVManager, pages_of
from engine.models import Checkpoint, Model
from engine.request import Request
from engine.scheduler import Scheduler
from engine.sequence import State


@dataclass
class Counts:
    """Since the start."""

    steps: int = 0
    step_seconds: float = 0.0
    computed_tokens: int = 0  # prompt and decode, what was served from the cache not among them
    generated_tokens: int = 0
    drafted_tokens: int = 0  # guessed, and checked
    accepted_tokens: int = 0  # of these, right
    finished: int = 0  # requests that ended with an answer
    finished_prompt_tokens: int = 0
    finished_answer_tokens: int = 0

    def answered(self, prompt_tokens: int, answer_tokens: int) -> None:
        self.finished += 1
        self.finished_prompt_tokens += prompt_tokens
        self.finished_answer_tokens += answer_tokens


def kv(
    memory: KVManager,
    scheduler: Scheduler,
    models: Mapping[str, Model],
    loaded: Mapping[CheckpointKV, Checkpoint],
    requests: Mapping[str, Request],
) -> dict[str, Any]:
    """`pages`: used + cached + free = total, pinned are among used. A block that two models use counts for both."""
    blocks = memory.blocks
    return {
        "pages": {
            "total": memory.pool.total,
            "free": memory.pool.free,
            "cached": blocks.cached_pages,
            "used": memory.used_pages(),
            "pinned": memory.pinned_pages,
        },
        "page_bytes": memory.pool.page_bytes,
        "weight_bytes": weight_bytes(checkpoint.runner for checkpoint in loaded.values()),
        "models": {
            name: {**model_kv(model, requests.values()), "pages_counted_on": scheduler.shares.pages(name)}
            for name, model in list(models.items())
        },
        "checkpoints": {checkpoint.name: checkpoint_kv(space) for space, checkpoint in loaded.items()},
        "shared_blocks": blocks.shared,
        "cached_tokens_served": memory.cached_tokens_served,
        "slot_utilisation": memory.slot_utilisation(),
        "window_blocks_freed": memory.window_blocks_freed,
        "evicted_blocks": blocks.evictions,
        "preemptions": scheduler.preemptions,
    }


def weight_bytes(runners: Iterable[Runner]) -> int:
    """Of what is in memory: weights that several share once, and each adapter over them."""
    runners = list(runners)
    shared = {id(runner.decoder): runner.weight_bytes for runner in runners}
    return sum(shared.values()) + sum(runner.adapter.weight_bytes for runner in runners if runner.adapter)


def model_kv(model: Model, requests: Iterable[Request]) -> dict[str, Any]:
    own = [sequence for request in requests if request.model is model for sequence in request.sequences]
    running = [sequence for sequence in own if sequence.state is State.RUNNING]
    return {
        "status": model.status,
        "checkpoint": model.checkpoint.name,
        "running": len(running),
        "waiting": len(own) - len(running),
        "tokens": sum(sequence.computed for sequence in running),
        "pages_used": pages_of([sequence.table for sequence in running] + ([model.pin] if model.pin else [])),
        "pages_pinned": pages_of([model.pin] if model.pin else []),
    }


def checkpoint_kv(space: CheckpointKV) -> dict[str, Any]:
    return {
        "pages_used": sum(group.live_blocks * group.pages_per_block for group in space.groups),
        "pages_cached": sum(group.cached_blocks * group.pages_per_block for group in space.groups),
        "pages_per_block": [group.pages_per_block for group in space.groups],
        "windows": [group.window for group in space.groups],
    }


def load(scheduler: Scheduler, memory: KVManager, counts: Counts) -> dict[str, Any]:
    return {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "preemptions": scheduler.preemptions,
        "cached_tokens_served": memory.cached_tokens_served,
        **asdict(counts),
    }
