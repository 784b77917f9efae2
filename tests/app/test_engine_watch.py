"""An engine that hangs is ended, one that is busy or slow to answer is not. Time is the test's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from app.engine_client import EngineSilent
from app.engine_watch import end_when_hung

SILENCE = None


@dataclass
class Machine:
    """An engine and its process: `answers`, one a second, say how long its step has run, or are SILENCE."""

    answers: list[float | None]
    now: float = 0.0
    pid: int = 1
    killed: list[tuple[int, float]] = field(default_factory=list)

    def url(self) -> str:
        return "http://127.0.0.1:1"

    def kill(self) -> None:
        self.killed.append((self.pid, self.now))
        self.pid += 1  # as the process is started again

    async def step_seconds(self, timeout_seconds: float) -> float:
        self.now += 1
        if not self.answers:
            await asyncio.Future()
        answer = self.answers.pop(0)
        if answer is SILENCE:
            raise EngineSilent("no answer")
        return answer


def killed_of(answers: list[float | None]) -> list[tuple[int, float]]:
    async def run() -> list[tuple[int, float]]:
        machine = Machine(list(answers))
        watch = end_when_hung(machine, machine, patience_seconds=10, clock=lambda: machine.now, look_seconds=0)
        task = asyncio.create_task(watch)
        while machine.answers:
            await asyncio.sleep(0)
        task.cancel()
        return machine.killed

    return asyncio.run(run())


@pytest.mark.parametrize(
    "answers",
    [[0.1] * 50, [4.0, 8.0, 0.0] * 9, [SILENCE] * 9 + [0.0] + [SILENCE] * 9 + [0.0]],
    ids=["well", "long steps", "slow to answer"],
)
def test_a_busy_engine_is_left_alone(answers):
    assert killed_of(answers) == []


def test_an_engine_that_hangs_in_a_step_is_ended_once():
    assert killed_of([float(number) for number in range(12)] + [0.0] * 30) == [(1, 12)]


def test_an_engine_that_has_gone_silent_is_ended():
    assert killed_of([0.0] + [SILENCE] * 12 + [0.0] * 5) == [(1, 12)]
