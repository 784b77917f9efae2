"""What the engine serves: models, and the checkpoints that they share. Plain data; `core` moves it.

A model is a name over a checkpoint, with a system prompt and defaults. Several models of one source, precision and
adapter share one loaded checkpoint, and with it the blocks of whatever prefixes they have in common. With an adapter a
source is another checkpoint than without: its weights are the same in memory, and none of its blocks is.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.architectures import Runner
from engine.kv.manager import BlockTable, CheckpointKV
from engine.sequence import Sequence


@dataclass(frozen=True)
class ModelSpec:
    """What was asked for. `sampling` holds defaults for what a request does not say."""

    name: str
    source: str
    system_prompt: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None  # a name in CHAT_FORMATS; None: the checkpoint's own
    context_length: int | None = None  # tokens; None: the checkpoint's own
    precision: str | None = None  # of the weights, one of config's PRECISIONS; None: the engine's dtype
    adapter: str | None = None  # source of a LoRA adapter over the checkpoint
    kv_share: float = 0.0  # of the pool, that it may count on; what it does not use is lent

    @property
    def weights(self) -> str:
        """The name of what is loaded: models with the same share it."""
        adapter = f" with {self.adapter}" if self.adapter else ""
        return f"{self.source}{adapter} as {self.precision}" if self.precision else f"{self.source}{adapter}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class ModelStatus:
    name: str
    status: str  # "loading", "ready", "failed" or "sleeping"
    reason: str | None  # why it failed
    done: int  # of `total`, in `unit`: how far the loading is
    total: int
    unit: str  # "bytes", "tensors" or ""
    source: str
    precision: str | None
    adapter: str | None
    context_length: int | None  # prompt and answer together, once known
    checkpoint_context_length: int | None  # the most that the checkpoint was made for, once known
    system_prompt_tokens: int | None  # that every chat begins with, once known
    architecture: str | None
    chat_format: str | None
    spec_digest: str


@dataclass(eq=False)
class Checkpoint:
    """One source in one precision, with an adapter or without, loaded or on its way."""

    name: str  # ModelSpec.weights
    users: list[Model] = field(default_factory=list)
    progress: tuple[int, int, str] = (0, 0, "")
    runner: Runner | None = None
    space: CheckpointKV | None = None  # set with `runner`


@dataclass(eq=False)
class Model:
    """An entry of the engine. Becomes ready when its checkpoint is loaded and its system prompt is pinned."""

    spec: ModelSpec
    checkpoint: Checkpoint
    status: str = "loading"
    reason: str | None = None
    context_length: int | None = None  # tokens that a chat with it can reach now: the pool may set fewer than `limit`
    prefix_ids: list[int] = field(default_factory=list)  # what every chat with it begins with
    prefilling: Sequence | None = None  # the prefix on its way into the pool
    pin: BlockTable | None = None  # the prefix in the pool
    chat_format: str | None = None

    @property
    def limit(self) -> int:
        """Tokens that it allows, whatever the pool holds. Once its checkpoint is loaded."""
        return self.spec.context_length or self.checkpoint.runner.context_length

    def shares_pin(self, prompt_ids: list[int], *, salt: str, scored: bool) -> bool:
        """Whether a prompt finds the pinned prefix whole: it begins with it, and takes from the cache of everybody."""
        if self.pin is None or salt or scored:
            return False
        shared = self.prefix_ids[: self.pin.published * self.pin.block_tokens]
        return len(prompt_ids) > len(shared) and prompt_ids[: len(shared)] == shared

    def asleep(self) -> Model:
        """What stays of it while it sleeps: nothing of the checkpoint, which others may go on to use."""
        known = {"context_length": self.context_length, "chat_format": self.chat_format}
        asleep = Model(self.spec, Checkpoint(self.spec.weights), status="sleeping", **known)
        asleep.checkpoint.users.append(asleep)
        return asleep

    def describe(self) -> ModelStatus:
        runner = self.checkpoint.runner
        done, total, unit = self.checkpoint.progress
        return ModelStatus(
            name=self.spec.name,
            status=self.status,
            reason=self.reason,
            done=done,
            total=total,
            unit=unit,
            source=self.spec.source,
            precision=self.spec.precision,
            adapter=self.spec.adapter,
            context_length=self.context_length,
            checkpoint_context_length=runner.context_length if runner else None,
            system_prompt_tokens=len(self.prefix_ids) if runner else None,
            architecture=runner.architecture if runner else None,
            chat_format=self.chat_format,
            spec_digest=self.spec.digest,
        )
