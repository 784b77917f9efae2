"""The leaderboard: the board of `app.leaderboard`, drawn. Computes no number of its own.

The table is HTML of the server's, put into a column of Gradio's; static/js/leaderboard.js asks for it anew while the
page is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import gradio as gr

from app.errors import ArenaError
from app.leaderboard import board
from app.ratings.board import FEW_VOTES, Board
from app.views.templates import templates
from db.errors import DatabaseUnavailable

TICK_STEPS = (1, 2, 5)
MOST_TICKS = 6


def build(words: Mapping[str, str], _services) -> gr.Blocks:
    with (
        gr.Blocks(title=words["leaderboard_title"], fill_width=True, analytics_enabled=False) as blocks,
        gr.Column(elem_id="leaderboard"),
    ):
        gr.Column(elem_id="leaderboard-table")
    return blocks


async def slots(_request, services, words: Mapping[str, str]) -> dict[str, str]:
    try:
        current = await asyncio.to_thread(board, services.database)
    except (ArenaError, DatabaseUnavailable):
        current = None
    return {"leaderboard-table": render(current, words)}


def render(current: Board | None, words: Mapping[str, str]) -> str:
    """None: the board cannot be read just now."""
    axis = Axis.of([bound for row in current.rows for bound in (row.lower, row.upper)]) if current else None
    return templates.get_template("leaderboard.jinja").render(
        board=current, axis=axis, notes=notes(current, words) if current else (), words=words
    )


def notes(current: Board, words: Mapping[str, str]) -> list[str]:
    """What a reader must know before believing the numbers: `Board.notes` in the reader's language."""
    found = []
    if current.prior_weight:
        found.append(words["note_prior"].format(prior=f"{current.prior_weight:g}"))
    if current.islands:
        found.append(words["note_islands"].format(islands="; ".join(", ".join(group) for group in current.islands)))
    if few := sum(row.votes < FEW_VOTES for row in current.rows):
        found.append(words["note_few"].format(few=few, models=len(current.rows), votes=FEW_VOTES))
    return found


@dataclass(frozen=True)
class Axis:
    """The scale that all intervals are drawn on, in rating points; places on it are percent from its left end."""

    low: float
    high: float
    ticks: Sequence[int]

    @classmethod
    def of(cls, bounds: Sequence[float]) -> Axis | None:
        if not bounds:
            return None
        low, high = min(bounds), max(bounds)
        margin = max((high - low) * 0.06, 5.0)
        low, high = low - margin, high + margin
        step = tick_step(high - low)
        first = int(-(-low // step) * step)
        return cls(low, high, range(first, int(high) + 1, step))

    def place(self, rating: float) -> str:
        return f"{100 * (rating - self.low) / (self.high - self.low):.2f}%"


def tick_step(span: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50 ... that makes at most MOST_TICKS ticks over `span` points."""
    power = 1
    while True:
        for step in TICK_STEPS:
            if span / (step * power) < MOST_TICKS:
                return step * power
        power *= 10
