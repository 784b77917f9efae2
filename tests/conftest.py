"""What several folders of tests share: the databases, the examples of properties, and which file begins first.

Hypothesis tries the same examples in every run, so that a change is judged by what it changes; others with
`HYPOTHESIS_PROFILE=random make test`, which is how to look for faults nobody has met.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, by whoever does
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker has one processor: threads of two would wait for one another

import pytest
from hypothesis import settings

pytest_plugins = ["tests.databases"]

LONG_FILES = (
    "engine/test_correctness.py",
    "kernels/test_step_runner.py",
    "engine/test_server.py",
    "triton/test_ops.py",
    "app/test_battle_flow.py",
    "app/test_failures.py",
    "engine/test_server_process.py",
    "triton/test_compile_ahead.py",
    "app/test_cli.py",
    "engine/test_borrowed.py",
    "bench/test_rounds.py",
    "engine/test_core_properties.py",
)

settings.register_profile("landing", derandomize=True, deadline=None)
settings.register_profile("random", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "landing"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, the longest before all, lest one worker be left with them when the other has no more."""
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get("/".join(item.path.parts[-2:]), len(places)))
