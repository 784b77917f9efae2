"""What several folders of tests share: the databases, and which file begins first where two workers share the suite."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, by whoever does

import pytest

pytest_plugins = ["tests.databases"]

LONG_FILES = ("test_correctness.py", "test_core_properties.py", "test_battle.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, lest one worker be left with them when the other has nothing more to do."""
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
