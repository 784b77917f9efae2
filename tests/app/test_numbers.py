from __future__ import annotations

import pytest

from app.numbers import axis_numbers, many


def test_one_is_singular():
    assert [many(n, "vote") for n in (0, 1, 2000)] == ["0 votes", "1 vote", "2,000 votes"]
    assert many(2, "battle is", "battles are") == "2 battles are"


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [
        (0, 1000, [0, 200, 400, 600, 800, 1000]),
        (987.2, 1034.9, [990, 1000, 1010, 1020, 1030]),
        (-3, 1.1, [-3, -2, -1, 0, 1]),
        (0.61, 0.64, [0.61, 0.615, 0.62, 0.625, 0.63, 0.635, 0.64]),
    ],
)
def test_axis_has_round_numbers_within_its_ends(low, high, numbers):
    assert axis_numbers(low, high) == numbers
