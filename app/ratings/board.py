"""The board: ratings, intervals, rank spreads and notes of one set of votes. One value, which every surface renders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from app.ratings import bradley_terry, elo
from app.ratings.games import Cells, Games
from app.ratings.intervals import ROUNDS, SEED, Rated, rank_spread


@dataclass(frozen=True)
class Method:
    """`rate(games, cells, ci, rounds, rng)`; `intervals` are the kinds of `ci` it has, the usual one first."""

    label: str
    intervals: tuple[str, ...]
    rate: Callable[[Games, Cells, str, int, np.random.Generator], Rated]


FEW_VOTES = 20  # below it the intervals, right for many votes, are a guess

METHODS = {
    "bt": Method("Bradley–Terry", ("sandwich", "bootstrap"), bradley_terry.rate),
    "elo": Method("Elo", ("bootstrap",), elo.rate),
}


@dataclass(frozen=True)
class Row:
    model: str
    rating: float
    lower: float
    upper: float
    rank_best: int
    rank_worst: int
    votes: int
    wins: int
    elo: float


@dataclass(frozen=True)
class Board:
    """`rows` by rating. `prior_weight` is 0 and `islands` is empty where the votes alone order all models; `rounds` is
    0 unless the intervals are a bootstrap's. `input_sha256` and `version` let anyone compute the same board again."""

    rows: tuple[Row, ...]
    votes: int
    method: str
    ci: str
    input_sha256: str = ""
    version: str = ""
    prior_weight: float = 0.0
    islands: tuple[tuple[str, ...], ...] = ()
    rounds: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know before believing the numbers, a sentence each."""
        notes = []
        if self.prior_weight:
            notes.append(
                "Some model has so far only won or only lost against the rest, so that the votes alone put no bound on "
                f"its rating; a weak prior (L2 weight {self.prior_weight:g}) keeps it finite."
            )
        if self.islands:
            listed = "; ".join(", ".join(island) for island in self.islands)
            notes.append(f"No votes join these groups, and ratings cannot be compared across them: {listed}.")
        if few := sum(row.votes < FEW_VOTES for row in self.rows):
            notes.append(
                f"{few} of {len(self.rows)} models have fewer than {FEW_VOTES} votes: their intervals are rough, "
                "and too narrow where all of the few were ties."
            )
        if self.rounds:
            notes.append(f"Intervals are of a bootstrap with {self.rounds:,} rounds and seed {SEED}.")
        return tuple(notes)

    def as_dict(self) -> dict:
        """The JSON that commands and the web API print."""
        fields = ("model", "rating", "lower", "upper", "rank_best", "rank_worst", "votes", "elo")
        return {
            "rows": [{field: getattr(row, field) for field in fields} for row in self.rows],
            "votes": self.votes,
            "method": self.method,
            "ci": self.ci,
            "input_sha256": self.input_sha256,
            "version": self.version,
        }


def rate(
    games: Games,
    method: str = "bt",
    ci: str | None = None,
    *,
    rounds: int = ROUNDS,
    live_elo: Mapping[str, float] | None = None,
    input_sha256: str = "",
    version: str = "",
) -> Board:
    """The board of some games; `live_elo` is the Elo of each model where it was kept game by game.

    Raises ValueError for a method, or a kind of interval, that there is not.
    """
    ci = choose_interval(method, ci)
    if not len(games):
        return Board((), 0, method, ci, input_sha256, version)
    cells = Cells.of(games)
    islands = cells.islands()
    rated = METHODS[method].rate(games, cells, ci, rounds, np.random.default_rng(SEED))
    best, worst = rank_spread(rated.lower, rated.upper, islands)
    played, won = games.counts()
    elos = elo.elo(games) if live_elo is None else np.array([live_elo[model] for model in games.models])
    columns = (rated.ratings, rated.lower, rated.upper, best, worst, played, won, elos)
    rows = [Row(*values) for values in zip(games.models, *(column.tolist() for column in columns), strict=True)]
    return Board(
        rows=tuple(sorted(rows, key=lambda row: (-row.rating, row.model))),
        votes=len(games),
        method=method,
        ci=ci,
        input_sha256=input_sha256,
        version=version,
        prior_weight=rated.prior_weight,
        islands=_named(islands, games.models),
        rounds=rated.rounds,
    )


def choose_interval(method: str, ci: str | None) -> str:
    """`ci` itself, or the method's usual one for None. Raises ValueError."""
    if method not in METHODS:
        raise ValueError(f"no rating method {method!r}; there are {', '.join(METHODS)}")
    intervals = METHODS[method].intervals
    if ci not in (None, *intervals):
        raise ValueError(f"{METHODS[method].label} has no {ci} interval; it has {', '.join(intervals)}")
    return ci or intervals[0]


def _named(islands: np.ndarray, models: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The models of each island, the largest first; nothing where all lie on one."""
    groups = [tuple(models[i] for i in np.flatnonzero(islands == island)) for island in np.unique(islands)]
    return tuple(sorted(groups, key=lambda group: (-len(group), group))) if len(groups) > 1 else ()
