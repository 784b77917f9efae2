"""An engine of fake checkpoints in the test's own thread: every step under control, the pool checked after each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from engine.config import EngineConfig
from engine.core import USUAL_TERMS, Engine, ModelSpec
from engine.request import Terms
from engine.sequence import GenerationEvent, SamplingParams
from kernels.spec import BLOCK_TOKENS
from tests.engine.fake_runner import FakeRunner, PoisonedPool


@dataclass
class Answer:
    """What a request's events add up to."""

    prompt_ids: list[int]
    params: SamplingParams
    runner: FakeRunner
    id: str = ""
    events: list[GenerationEvent] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def last(self) -> GenerationEvent:
        return self.events[-1]

    @property
    def reason(self) -> str | None:
        return self.events[-1].finish_reason if self.events else None

    def expected(self) -> list[int]:
        return right_answer(self.runner, tuple(self.prompt_ids), self.params)


@cache
def right_answer(runner: FakeRunner, prompt_ids: tuple[int, ...], params: SamplingParams) -> list[int]:
    return runner.unpaged(list(prompt_ids), params, seed=params.seed)


class Rig:
    """`checkpoints` by source; each is loaded by the first model that asks for it."""

    def __init__(self, checkpoints: dict[str, FakeRunner], pages: int = 400, seed: int = 0, **config) -> None:
        self.checkpoints, self.now = checkpoints, 0.0
        self.config = EngineConfig(**{"check_integrity": True, "dtype": "float32", **config})
        self.engine = Engine(
            self.config,
            None,
            lambda source, precision, adapter, progress: checkpoints[f"{source} with {adapter}" if adapter else source],
            PoisonedPool(pages, seed=seed),
            lambda: self.now,
        )
        self.memory, self.scheduler = self.engine.memory, self.engine.scheduler
        self._guard_shared_blocks()

    def put(self, name: str, source: str | None = None, system_prompt: str = "", wait: bool = True, **spec) -> None:
        self.engine.put_model(ModelSpec(name, source or name, system_prompt, **spec))
        for thread in threading.enumerate():
            if thread.name.startswith("load "):
                thread.join()
        if wait:
            self.until(lambda: self.status(name) != "loading")

    def status(self, name: str) -> str:
        return next(status.status for status in self.engine.models() if status.name == name)

    def ask(
        self,
        model: str,
        prompt_ids: list[int],
        max_tokens: int = 8,
        temperature: float = 0,
        terms: Terms = USUAL_TERMS,
        **params,
    ) -> Answer:
        params = SamplingParams(max_tokens, temperature, **{"seed": 0, **params})
        answer = Answer(prompt_ids, params, self.engine.runner_of(model)[0])
        answer.id = self.engine.submit(model, prompt_ids, params, answer.events.append, terms)
        return answer

    def until(self, holds: Callable[[], bool], steps: int = 20_000) -> None:
        deadline = time.monotonic() + 30
        while not holds():
            if not self.engine.step():
                assert time.monotonic() < deadline, "the engine is idle, and what was waited for did not come"
                time.sleep(0.001)
            steps -= 1
            assert steps, "the engine is busy, and what was waited for did not come"

    def drain(self, steps: int = 20_000) -> None:
        while self.engine.step():
            steps -= 1
            assert steps, "the engine does not come to rest"
        assert self.memory.used_pages() == self.memory.pinned_pages, "idle, but pages are in use"

    def generate(self, model: str, prompt_ids: list[int], **params) -> Answer:
        answer = self.ask(model, prompt_ids, **params)
        self.drain()
        return answer

    def _guard_shared_blocks(self) -> None:
        """Fails where a step is about to write into a block that someone else can see."""
        compute = self.engine._compute

        def guarded(step) -> None:
            for sequence, count in zip(step.sequences, step.counts, strict=True):
                written = range(sequence.computed // BLOCK_TOKENS, -(-(sequence.computed + count) // BLOCK_TOKENS))
                for column in sequence.table.blocks:
                    for index in written:
                        assert column[index].references == 1 and column[index].hash is None, "a shared block is written"
            compute(step)

        self.engine._compute = guarded
