"""What the running requests take of the pool, and what contiguous reservation would take for the same ones.

The rules are those of `engine.kv.reserved`, with the answer so far in place of the whole one, which nobody knows yet.
Nothing here names a model, but exact figures tell checkpoints apart by their pages a block: whoever shows them to
people who must not know which models answer has to know that. Reads, never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.figures import Counts
from engine.kv.geometry import blocks_of
from engine.kv.manager import CheckpointKV, KVManager
from engine.kv.page_map import counted
from engine.kv.reserved import RULES
from engine.models import Model
from engine.scheduler import Scheduler
from engine.sequence import Sequence as Running
from kernels.spec import BLOCK_TOKENS

Rule = Callable[[int, int, int], int]  # prompt, answer and longest text -> slots
CONTIGUOUS = ("max", "pow2")  # of the older ways to reserve (engine/kv/reserved.py) those that need no oracle
SHAREGPT_TOKENS = (161, 338)  # mean prompt and answer of the paper's trace: a request's size until one was served


@dataclass(frozen=True)
class Held:
    """One running request: tokens with their KV, slots allocated for them, and what a slot weighs in pages."""

    prompt: int
    tokens: int
    slots: int
    context_length: int
    pages_per_slot: float

    def reserved(self, rule: Rule) -> int:
        """Slots that a contiguous way would set aside for it."""
        return rule(self.prompt, max(self.tokens - self.prompt, 1), self.context_length)


def occupancy(
    memory: KVManager,
    scheduler: Scheduler,
    models: Sequence[Model],
    counts: Counts,
    states: np.ndarray,
) -> dict[str, Any]:
    """`states` as of now. "ways": for `paged`, `max` and `pow2` the pages that the running requests take, the percent
    of allocated slots without a token, and how many battles (two requests of the mean length) would fit beside them.
    "means": over the ready models and the requests served so far."""
    models = [model for model in models if model.status == "ready"]
    held = [held_by(sequence, models) for sequence in scheduler.running if is_of_request(sequence)]
    pages, mean = counted(states), means(models, counts)
    more = {name: slots * mean["pages_per_slot"] for name, slots in mean["slots"].items()}
    reading = pages["used"] + pages["shared"] + pages["pinned_in_use"]
    empty = sum((each.slots - each.tokens) * each.pages_per_slot for each in held)
    paged = {
        "pages": reading,
        "waste_percent": percent(empty, reading),
        "more_battles": battles(memory.blocks.available_pages, more["paged"]),
    }
    return {
        "total": memory.pool.total,
        "page_bytes": memory.pool.page_bytes,
        "pages": pages,
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "tokens": sum(each.tokens for each in held),
        "cached_tokens_served": memory.cached_tokens_served,
        "ways": {
            "paged": paged,
            **{name: reserved(RULES[name], held, more[name], memory.pool.total) for name in CONTIGUOUS},
        },
        "means": mean,
    }


def is_of_request(sequence: Running) -> bool:
    """The others are system prompts on their way to be pinned: they generate nothing."""
    return sequence.limit > sequence.prompt_length


def held_by(sequence: Running, models: Sequence[Model]) -> Held:
    """Its context length is that of its checkpoint: the longest that a model over it allows."""
    lengths = [model.context_length for model in models if model.checkpoint.space is sequence.space]
    return Held(
        prompt=sequence.prompt_length,
        tokens=sequence.computed,
        slots=sequence.table.capacity,
        context_length=max(lengths, default=sequence.limit),
        pages_per_slot=pages_per_slot(sequence.space),
    )


def reserved(rule: Rule, held: Sequence[Held], more: float, total: int) -> dict[str, Any]:
    """What a contiguous way would take: more pages than there are, where it could not have run them all. `more`: pages
    for one request of the mean length."""
    pages = sum(each.reserved(rule) * each.pages_per_slot for each in held)
    filled = sum(each.tokens * each.pages_per_slot for each in held)
    return {
        "pages": round(pages),
        "waste_percent": percent(pages - filled, pages),
        "more_battles": battles(total - pages, more),
    }


def pages_per_slot(space: CheckpointKV) -> float:
    return space.pages_per_bundle / space.block_tokens


def means(models: Sequence[Model], counts: Counts) -> dict[str, Any]:
    """Each model counts once, however often it is asked. `slots`: what a mean request takes each way."""
    number = max(len(models), 1)
    served = max(counts.finished, 1)
    system = sum(len(model.prefix_ids) for model in models) / number
    if counts.finished:
        prompt, answer = counts.finished_prompt_tokens, counts.finished_answer_tokens
    else:
        prompt, answer = system + SHAREGPT_TOKENS[0], SHAREGPT_TOKENS[1]
    prompt, answer = prompt / served, answer / served
    longest = sum(model.context_length for model in models) / number
    own = prompt + answer - system // BLOCK_TOKENS * BLOCK_TOKENS  # what it does not share with the system prompt
    return {
        "pages_per_slot": sum(pages_per_slot(model.checkpoint.space) for model in models) / number,
        "context_length": longest,
        "system_tokens": system,
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "slots": {
            "paged": blocks_of(max(1, round(own))) * BLOCK_TOKENS,
            **{name: RULES[name](round(prompt), max(round(answer), 1), round(longest)) for name in CONTIGUOUS},
        },
    }


def battles(pages: float, pages_a_request: float) -> int:
    return max(0, int(pages / (2 * pages_a_request))) if pages_a_request else 0


def percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2) if whole else 0.0
