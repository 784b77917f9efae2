"""The leaderboard: a sheet of `app.leaderboard.boards`, drawn. Computes no number of its own.

All of it is HTML and SVG of the server's, put into a column of Gradio's; static/js/leaderboard.js asks for it anew
while the page is open. What is shown is said by the address, so that every view has a link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from urllib.parse import urlencode

import gradio as gr

from app.errors import ArenaError, BadInput
from app.leaderboard.boards import sheet
from app.leaderboard.exports import EXPORTS, command
from app.leaderboard.sheet import Sheet
from app.leaderboard.votes import ALL, Selection
from app.ratings import METHODS
from app.ratings.board import FEW_VOTES, Board
from app.ratings.categories import CATEGORIES
from app.views.templates import templates
from app.views.words import counted, said_in
from db import queries
from db.connect import Database
from db.errors import DatabaseUnavailable

TICK_STEPS = (1, 2, 5)
MOST_TICKS = 6
MAPPED = 15  # models on a heat map
DRAWN = 8  # models in the plot over time
UNTOLD = 10_000  # points of an interval so wide that it says nothing: effects that always come together
PLOT_WIDTH, PLOT_HEIGHT = 720, 240


def build(words: Mapping[str, str], _services) -> gr.Blocks:
    with (
        gr.Blocks(title=words["leaderboard_title"], fill_width=True, analytics_enabled=False) as blocks,
        gr.Column(elem_id="leaderboard"),
    ):
        gr.Column(elem_id="leaderboard-table")
    return blocks


async def slots(request, services, words: Mapping[str, str]) -> dict[str, str]:
    try:
        selection = Selection.of_query(request.query_params)
        async with services.boards:
            current = await asyncio.to_thread(sheet, services.database, selection)
            about = await asyncio.to_thread(about_models, services.database)
    except BadInput as error:
        return {"leaderboard-table": render(None, words, refused=said_in(words, error))}
    except (ArenaError, DatabaseUnavailable):
        return {"leaderboard-table": render(None, words)}
    return {"leaderboard-table": render(current, words, about)}


@dataclass(frozen=True)
class About:
    """What a model's maker says of it; a model of old votes may have none."""

    told: tuple[str, ...] = ()  # organisation, parameters, licence; those that are known
    retired: bool = False


def about_models(database: Database) -> dict[str, About]:
    with database.session(read_only=True) as session:
        models = queries.models(session, retired=True)
    return {
        model.name: About(
            tuple(filter(None, (model.organisation, model.parameters, model.licence))), model.retired_at is not None
        )
        for model in models
    }


def render(
    current: Sheet | None,
    words: Mapping[str, str],
    about: Mapping[str, About] | None = None,
    *,
    refused: str | None = None,
) -> str:
    """None: the board cannot be read just now, or is one that there is not (`refused` says why)."""
    rows = current.board.rows if current else ()
    return templates.get_template("leaderboard.jinja").render(
        sheet=current,
        board=current.board if current else None,
        selection=current.selection if current else Selection(),
        is_of_all=bool(current and current.selection == Selection()),
        axis=Axis.of([bound for row in rows for bound in (row.sure_lower, row.sure_upper)]),
        about={row.model: (about or {}).get(row.model, About()) for row in rows},
        notes=notes(current.board, words) if current else (),
        first_place=list(first_place(current.board, words)) if current else (),
        effects=list({effect.name: effect for effect in (*current.biases, *current.board.effects)}.values())
        if current
        else [],
        untold=UNTOLD,
        plot=Plot.of(current) if current else None,
        command=command(current) if current else "",
        categories=[(ALL, None), *((name, words[f"rule_of_{name}"]) for name in CATEGORIES)],
        methods={name: Offered.of(name, current.selection, words) for name in METHODS} if current else {},
        kept=kept_in_form(current.selection) if current else {},
        exports=tuple(EXPORTS),
        refused=refused,
        link=link,
        words=words,
        counted=partial(counted, words),
        few_votes=FEW_VOTES,
        mapped=MAPPED,
    )


@dataclass(frozen=True)
class Offered:
    """A method in the form of filters; `not_here` says why it does not go with what else is chosen."""

    label: str
    not_here: str | None

    @classmethod
    def of(cls, name: str, selection: Selection, words: Mapping[str, str]) -> Offered:
        try:
            replace(selection, method=name)
        except BadInput as error:
            return cls(METHODS[name].label, said_in(words, error))
        return cls(METHODS[name].label, None)


def link(selection: Selection, **changes) -> str:
    """The address of a view; style control goes where the method has none."""
    if not METHODS[changes.get("method", selection.method)].takes_covariates:
        changes |= {"style": False, "position": False, "propensity": False}
    return "?" + urlencode(selection.as_query(**changes))


def kept_in_form(selection: Selection) -> dict[str, str]:
    """What the form of filters does not ask for itself and must not lose."""
    asked = {"since", "until", "min_votes", "method"}
    return {each.name: told for each in fields(Selection) if each.name not in asked
            if (told := selection.as_query().get(each.name))}  # fmt: skip


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


def first_place(current: Board, words: Mapping[str, str]) -> Iterator[str]:
    """How sure it is, a sentence each."""
    if current.is_early and len(current.rows) > 1:
        first, second = current.rows[:2]
        yield words["sure_early"].format(
            few=FEW_VOTES,
            first=first.model,
            first_votes=f"{first.votes:,}",
            second=second.model,
            second_votes=f"{second.votes:,}",
        )
        return
    if found := current.separation:
        key = "sure_apart" if found.votes == 0 else "sure_level" if found.votes is None else "sure_needed"
        yield counted(
            words,
            key,
            found.votes or 0,
            first=found.first,
            second=found.second,
            gap=f"{found.gap:,.0f}",
            votes=f"{found.votes or 0:,}",
            direct=f"{found.direct or 0:,}",
        )
    if found := current.fragility:
        yield counted(
            words,
            "sure_fragile",
            found.votes,
            votes=f"{found.votes:,}",
            share=f"{found.share:.1%}",
            successor=found.successor,
        )


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


@dataclass(frozen=True)
class Plot:
    """Ratings over time: `lines` of (model, points of an SVG polyline), `ticks` of (rating, y), `days` of (text, x)."""

    lines: Sequence[tuple[str, str]]
    ticks: Sequence[tuple[int, float]]
    days: Sequence[tuple[str, float]]

    @classmethod
    def of(cls, current: Sheet) -> Plot | None:
        if not current.history:
            return None
        models = [row.model for row in current.board.rows[:DRAWN]]
        told = [ratings[model] for _, ratings in current.history for model in models if model in ratings]
        axis = Axis.of(told)
        if axis is None:
            return None
        places = [PLOT_WIDTH * i / max(len(current.history) - 1, 1) for i in range(len(current.history))]

        def y(rating: float) -> float:
            return round(PLOT_HEIGHT * (axis.high - rating) / (axis.high - axis.low), 1)

        lines = [
            (
                model,
                " ".join(
                    f"{x:.1f},{y(ratings[model])}"
                    for x, (_, ratings) in zip(places, current.history, strict=True)
                    if model in ratings
                ),
            )
            for model in models
        ]
        first, last = current.history[0][0], current.history[-1][0]
        days = [(f"{first:%Y-%m-%d}", 0.0), (f"{last:%Y-%m-%d}", float(PLOT_WIDTH))]
        return cls(lines, [(tick, y(tick)) for tick in axis.ticks], days)


def tick_step(span: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50 ... that makes at most MOST_TICKS ticks over `span` points."""
    power = 1
    while True:
        for step in TICK_STEPS:
            if span / (step * power) < MOST_TICKS:
                return step * power
        power *= 10
