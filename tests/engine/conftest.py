from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import kernels
from kernels.spec import Backend
from tests.engine.server_fixture import EngineProcess, TinyModel

ASSISTANT = "You answer briefly, you never lie, and you sign with the name of the quick brown fox. " * 2


@pytest.fixture(scope="session")
def engine() -> Iterator[EngineProcess]:
    """A running engine with models over two checkpoints: `llama`, `briefed` (same checkpoint, a system prompt),
    `gemma`, and `speaker`, which says a text of split characters and ends."""
    models = (
        TinyModel("llama"),
        TinyModel("briefed", system_prompt=ASSISTANT, sampling={"temperature": 0, "max_tokens": 12}),
        TinyModel("gemma", family="gemma3"),
        TinyModel("speaker", family="speaker"),
    )
    with EngineProcess(models) as process:
        yield process


@pytest.fixture(scope="session")
def opened() -> Callable[[str], Backend]:
    """Each backend once, on two threads; `opened(name)` skips where it cannot run."""
    made: dict[str, Backend] = {}

    def get(name: str) -> Backend:
        if name not in made:
            try:
                made[name] = kernels.load(name, 2)
            except kernels.BackendUnavailable as reason:
                pytest.skip(str(reason))
        return made[name]

    return get
