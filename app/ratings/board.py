"""The board: ratings, intervals, rank spreads and notes of one set of votes. One value, which every surface renders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np

from app.ratings import bradley_terry, davidson, elo
from app.ratings.decisions import Fragility, Separation, fragility, separation
from app.ratings.games import Cells, Games
from app.ratings.intervals import ROUNDS, SEED, Effect, Rated, always_valid, rank_spread, simultaneous


@dataclass(frozen=True)
class Method:
    """`rate(games, cells, ci, rounds, rng)`; `intervals` are the kinds of `ci` it has, the usual one first."""

    label: str
    intervals: tuple[str, ...]
    rate: Callable[[Games, Cells, str, int, np.random.Generator], Rated]
    takes_covariates: bool = True


FEW_VOTES = 20  # below it the intervals, right for many votes, are a guess
FEW_OPPONENTS = 3  # or all others, where there are fewer: below it a rating stands on too few acquaintances

METHODS = {
    "bt": Method("Bradley–Terry", ("sandwich", "bootstrap"), bradley_terry.rate),
    "davidson": Method("Davidson", ("sandwich", "bootstrap"), davidson.rate),
    "elo": Method("Elo", ("bootstrap",), elo.rate, takes_covariates=False),
}


@dataclass(frozen=True)
class Row:
    """A model. `lower` to `upper` and the ranks are the plain ones; `sure_*` hold for all models at once; `always_*`
    at every moment. `votes` = `wins` + losses + `ties` + `both_bad`."""

    model: str
    rating: float
    lower: float
    upper: float
    rank_best: int
    rank_worst: int
    votes: int
    wins: int
    elo: float
    ties: int = 0
    both_bad: int = 0
    opponents: int = 0
    provisional: bool = False
    sure_lower: float = 0.0
    sure_upper: float = 0.0
    sure_rank_best: int = 1
    sure_rank_worst: int = 1
    always_lower: float = 0.0
    always_upper: float = 0.0


@dataclass(frozen=True)
class Board:
    """`rows` by rating. `prior_weight` is 0 and `islands` is empty where the votes alone order all models; `rounds` is
    0 unless the intervals are a bootstrap's. `effects` are those of the covariates that were held constant.
    `input_sha256` and `version` let anyone compute the same board again."""

    rows: tuple[Row, ...]
    votes: int
    method: str
    ci: str
    input_sha256: str = ""
    version: str = ""
    prior_weight: float = 0.0
    islands: tuple[tuple[str, ...], ...] = ()
    rounds: int = 0
    ties: int = 0
    both_bad: int = 0
    clustered: bool = False
    effects: tuple[Effect, ...] = ()
    tie_odds: float | None = None
    separation: Separation | None = None
    fragility: Fragility | None = None

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
                f"Models with fewer than {FEW_VOTES} votes: {few} of {len(self.rows)}. Their intervals are rough."
            )
        if self.rounds:
            notes.append(f"Intervals are of a bootstrap with {self.rounds:,} rounds and seed {SEED}.")
        return tuple(notes)

    @property
    def is_early(self) -> bool:
        """Whether nothing can be said of the first place yet: one of the two that lead has too few votes."""
        return any(row.votes < FEW_VOTES for row in self.rows[:2])

    def as_dict(self) -> dict:
        """The JSON that commands and the web API print."""
        first = ("model", "rating", "lower", "upper", "rank_best", "rank_worst", "votes", "elo")
        rest = [field.name for field in fields(Row) if field.name not in first]
        document = asdict(self)
        document["rows"] = [{name: row[name] for name in (*first, *rest)} for row in document["rows"]]
        lead = ("rows", "votes", "method", "ci", "input_sha256", "version")
        return {name: document[name] for name in (*lead, *(name for name in document if name not in lead))} | {
            "notes": list(self.notes)
        }

    @classmethod
    def from_dict(cls, document: Mapping) -> Board:
        """The board that `as_dict` told of."""
        kinds = {"separation": Separation, "fragility": Fragility}
        values = {name: document[name] for name in (field.name for field in fields(cls))}
        values |= {name: kind(**values[name]) for name, kind in kinds.items() if values[name]}
        values["rows"] = tuple(Row(**row) for row in values["rows"])
        values["effects"] = tuple(Effect(**effect) for effect in values["effects"])
        values["islands"] = tuple(map(tuple, values["islands"]))
        return cls(**values)


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
    if games.covariates and not METHODS[method].takes_covariates:
        raise ValueError(f"{METHODS[method].label} cannot hold {', '.join(games.covariates)} constant")
    if not len(games):
        return Board((), 0, method, ci, input_sha256, version)
    cells = Cells.of(games)
    islands = cells.islands()
    rated = METHODS[method].rate(games, cells, ci, rounds, np.random.default_rng(SEED))
    return Board(
        rows=_rows(games, rated, islands, elo.elo(games) if live_elo is None else live_elo),
        votes=len(games),
        method=method,
        ci=ci,
        input_sha256=input_sha256,
        version=version,
        prior_weight=rated.prior_weight,
        islands=_named(islands, games.models),
        rounds=rated.rounds,
        ties=int((games.score == 0.5).sum() - _both_bad(games).sum()),
        both_bad=int(_both_bad(games).sum()),
        clustered=games.visitor is not None and ci == "sandwich",
        effects=rated.effects,
        tie_odds=rated.tie_odds,
        separation=separation(rated, games.models, len(games), islands),
        fragility=_fragility(games, cells),
    )


def _fragility(games: Games, cells: Cells) -> Fragility | None:
    plain = cells if games.weight is None else Cells.of(games.knowing(weight=None))
    return fragility(plain, bradley_terry.fit(plain), games.models)


def _rows(games: Games, rated: Rated, islands: np.ndarray, elos: Mapping[str, float] | np.ndarray) -> tuple[Row, ...]:
    played, won = games.counts()
    opponents = games.opponents()
    both_bad = games.tally(_both_bad(games))
    needed = min(FEW_OPPONENTS, len(games.models) - 1)
    sure = simultaneous(rated)
    columns = {
        "rating": rated.ratings,
        "lower": rated.lower,
        "upper": rated.upper,
        **dict(zip(("rank_best", "rank_worst"), rank_spread(rated.lower, rated.upper, islands), strict=True)),
        "votes": played,
        "wins": won,
        "elo": elos if isinstance(elos, np.ndarray) else np.array([elos[model] for model in games.models]),
        "ties": games.tally(games.score == 0.5) - both_bad,
        "both_bad": both_bad,
        "opponents": opponents,
        "provisional": (played < FEW_VOTES) | (opponents < needed),
        **dict(zip(("sure_lower", "sure_upper"), sure, strict=True)),
        **dict(zip(("sure_rank_best", "sure_rank_worst"), rank_spread(*sure, islands), strict=True)),
        **dict(zip(("always_lower", "always_upper"), always_valid(rated, played), strict=True)),
    }
    lists = [column.tolist() for column in columns.values()]
    rows = [
        Row(model, **dict(zip(columns, values, strict=True)))
        for model, *values in zip(games.models, *lists, strict=True)
    ]
    return tuple(sorted(rows, key=lambda row: (-row.rating, row.model)))


def _both_bad(games: Games) -> np.ndarray:
    return np.zeros(len(games), bool) if games.both_bad is None else games.both_bad


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
