"""A sheet: the board of chosen votes, with what a page draws beside it. Pure: votes in, one value out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

import numpy as np

from app.leaderboard.votes import Selection, Votes, chosen, prepared
from app.ratings import Board, Games, bradley_terry, rate
from app.ratings.games import Cells
from app.ratings.intervals import Effect
from app.ratings.style import controlled

VERSION = version("paged-arena")
TIMES = 12  # points of the rating over time
FEW_FOR_BIAS = 50  # votes, below which nothing is said on the bias of position and length


@dataclass(frozen=True)
class Meeting:
    """How one model fared against another: `score` is wins plus half of the rest."""

    votes: int
    score: float


@dataclass(frozen=True)
class Sheet:
    """`meetings` [row][column] in the order of the board's rows, None where two never met. `history` is (moment,
    rating by model so far), the earliest first. `biases` of the left side and of length, with models held constant."""

    selection: Selection
    board: Board
    meetings: tuple[tuple[Meeting | None, ...], ...]
    history: tuple[tuple[datetime, dict[str, float]], ...]
    biases: tuple[Effect, ...]
    all_votes: int
    file: tuple[str, ...] = ()  # how the command line names the file of the votes; those of the arena have none


def make_sheet(votes: Votes, selection: Selection, *, whole: Board | None = None, input_sha256: str = "") -> Sheet:
    """`whole` is the board where it is known already. Raises BadInput where the votes do not tell what is asked for."""
    some = chosen(votes, selection)
    board = whole or rate(
        prepared(some, selection), selection.method, selection.ci, input_sha256=input_sha256, version=VERSION
    )
    order = {model: i for i, model in enumerate(some.games.models)}
    return Sheet(
        selection,
        board,
        _meetings(some.games, [order[row.model] for row in board.rows if row.model in order]),
        _history(some),
        _biases(some),
        len(votes),
    )


def _meetings(games: Games, order: list[int]) -> tuple[tuple[Meeting | None, ...], ...]:
    table = games.results()
    return tuple(
        tuple(Meeting(int(table[i, j, 0]), float(table[i, j, 1])) if table[i, j, 0] else None for j in order)
        for i in order
    )


def _history(votes: Votes) -> tuple[tuple[datetime, dict[str, float]], ...]:
    """Bradley–Terry of the votes up to each of TIMES moments, evenly apart; nothing where times are not known."""
    known = votes.seconds[np.isfinite(votes.seconds)]
    if len(known) < 2 or known.min() == known.max():
        return ()
    points = []
    for moment in np.linspace(known.min(), known.max(), TIMES + 1)[1:]:
        games = votes.games.only(votes.seconds <= moment).knowing(visitor=None)
        ratings = bradley_terry.fit(Cells.of(games)).ratings
        points.append((datetime.fromtimestamp(moment, UTC), dict(zip(games.models, ratings.tolist(), strict=True))))
    return tuple(points)


def _biases(votes: Votes) -> tuple[Effect, ...]:
    if len(votes) < FEW_FOR_BIAS:
        return ()
    games = votes.games.knowing(visitor=None, covariates={"position": np.ones(len(votes))})
    if votes.known_texts.any():
        only_length = np.where(np.arange(votes.differences.shape[1]) == 0, votes.differences, 0.0)
        games = controlled(games, only_length)
    return bradley_terry.rate(games, Cells.of(games), "sandwich", 0, np.random.default_rng(0)).effects
