"""Which votes a board is about: the votes as columns, and what a reader may choose of them.

`Votes` come from the database or from a file, each conversation read once for its style and categories. A `Selection`
is what a permalink, the command line and the API can say; `chosen` applies one to votes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime

import numpy as np

from app.errors import BadInput
from app.ratings import METHODS, Games, choose_interval
from app.ratings.categories import CATEGORIES, categories_of
from app.ratings.style import FEATURES, controlled, difference, style_of
from db.vote_kinds import VOTE_KINDS

RULES = {  # why there is no such board, by rule; app.views.words has the same in other languages
    "no_method": "no rating method {value}; there are {names}",
    "no_interval": "{method} has no {value} interval; it has {names}",
    "no_category": "no category {value}; there are {names}",
    "no_covariates": "{method} cannot hold style or position constant",
    "no_weights": "{method} cannot weigh votes",
    "no_clusters": "only sandwich intervals know of visitors",
    "no_days": "from {since} until {until} is no time at all",
    "least_votes": "the least number of votes is 0 or more",
    "no_day": "{value} is no day; write it as 2026-01-31",
    "no_number": "{value} is no number of votes",
    "no_switch": "{value} is neither 0 nor 1",
    "no_texts": "these votes come without conversations, and so without categories",
    "no_times": "these votes come without a time",
    "no_visitors": "these votes do not say who cast them",
    "no_style": "these votes come without answers, and so without style",
    "no_chances": "not every vote here has the chance that its pair had",
}
ALL = "all"
DAY_SECONDS = 86_400


@dataclass(frozen=True)
class Selection:
    """What a board is made of and how. The defaults are the board of all votes."""

    method: str = "bt"
    ci: str | None = None
    category: str = ALL
    style: bool = False  # style held constant
    position: bool = False  # the side that a model was on held constant
    cluster: bool = False  # votes of one visitor are not taken for independent
    propensity: bool = False  # each vote weighs one over the chance that its pair had
    since: date | None = None  # first day, UTC
    until: date | None = None  # last day, UTC
    min_votes: int = 0  # models with fewer are left out, and their votes with them

    def __post_init__(self):
        """Raises BadInput for what there is not."""
        if self.method not in METHODS:
            raise no_board("no_method", value=repr(self.method), names=", ".join(METHODS))
        method = METHODS[self.method]
        if self.ci not in (None, *method.intervals):
            raise no_board("no_interval", method=method.label, value=self.ci, names=", ".join(method.intervals))
        if self.category not in (ALL, *CATEGORIES):
            raise no_board("no_category", value=repr(self.category), names=", ".join((ALL, *CATEGORIES)))
        if (self.style or self.position) and not method.takes_covariates:
            raise no_board("no_covariates", method=method.label)
        if self.propensity and not method.takes_covariates:
            raise no_board("no_weights", method=method.label)
        if self.cluster and choose_interval(self.method, self.ci) != "sandwich":
            raise no_board("no_clusters")
        if self.since and self.until and self.since > self.until:
            raise no_board("no_days", since=str(self.since), until=str(self.until))
        if self.min_votes < 0:
            raise no_board("least_votes")

    @classmethod
    def of_query(cls, query: Mapping[str, str]) -> Selection:
        """From the query of an address; what belongs to others in it is left alone. Raises BadInput."""
        readers = {"method": str, "ci": str, "category": str, "since": _day, "until": _day, "min_votes": _whole}
        values = {
            each.name: readers.get(each.name, _switch)(query[each.name])
            for each in fields(cls)
            if query.get(each.name, "") != ""
        }
        return cls(**values)

    def is_of_all(self) -> bool:
        """Whether it takes all votes as they are, so that method and interval say the rest."""
        return self == Selection(method=self.method, ci=self.ci)

    def as_query(self, **changes) -> dict[str, str]:
        """The shortest query that says the same, with some of it changed."""
        told = {each.name: changes.get(each.name, getattr(self, each.name)) for each in fields(self)}
        return {
            each.name: "1" if told[each.name] is True else str(told[each.name])
            for each in fields(self)
            if told[each.name] != each.default
        }

    def as_flags(self) -> list[str]:
        """The same for the command line."""
        flags = []
        for name, value in self.as_query().items():
            flags += (
                [f"--{name.replace('_', '-')}"]
                if value == "1" and name != "min_votes"
                else [
                    f"--{name.replace('_', '-')}",
                    value,
                ]
            )
        return flags


def no_board(rule: str, **values: str) -> BadInput:
    return BadInput(RULES[rule].format(**values), rule=rule, values=values)


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise no_board("no_day", value=repr(text)) from error


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise no_board("no_number", value=repr(text))
    return int(text)


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise no_board("no_switch", value=repr(text))
    return text == "1"


@dataclass(frozen=True)
class Voted:
    """A vote with what is known of it, None where it is not; of its texts only what they tell is kept."""

    model_a: str
    model_b: str
    kind: str
    visitor: str | None = None
    created_at: datetime | None = None
    pair_probability: float | None = None
    differences: tuple[float, ...] | None = None  # by style feature
    categories: frozenset[str] = frozenset()

    @classmethod
    def on(cls, turns: Sequence[tuple[str, str, str]], *columns) -> Voted:
        """`turns` of (prompt, answer of a, answer of b); `columns` as above."""
        if not turns:
            return cls(*columns)
        prompts, a, b = zip(*turns, strict=True)
        return cls(*columns, difference(style_of(a), style_of(b)), categories_of(prompts, (*a, *b)))


@dataclass(frozen=True)
class Votes:
    """Columns in the order of the votes; `seconds` since 1970 and `chance` are NaN where they are not known."""

    games: Games
    seconds: np.ndarray
    chance: np.ndarray
    differences: np.ndarray  # [game, style feature]
    categories: Mapping[str, np.ndarray]  # each [game] bool
    known_texts: np.ndarray  # [game] bool
    known_visitor: np.ndarray  # [game] bool

    @classmethod
    def of(cls, voted: Iterable[Voted]) -> Votes:
        voted = list(voted)
        names = sorted({vote.visitor for vote in voted if vote.visitor is not None})
        number = {name: i for i, name in enumerate(names)}
        visitor = [number.get(vote.visitor, len(names) + i) for i, vote in enumerate(voted)]
        games = Games.between(
            [vote.model_a for vote in voted],
            [vote.model_b for vote in voted],
            [VOTE_KINDS[vote.kind].score_a for vote in voted],
            both_bad=np.array([vote.kind == "both_bad" for vote in voted], bool),
            visitor=np.array(visitor, np.int64),
        )
        return cls(
            games,
            np.array([vote.created_at.timestamp() if vote.created_at else np.nan for vote in voted]),
            np.array([vote.pair_probability or np.nan for vote in voted], float),
            np.array([vote.differences or (0.0,) * len(FEATURES) for vote in voted]).reshape(len(voted), len(FEATURES)),
            {name: np.array([name in vote.categories for vote in voted], bool) for name in CATEGORIES},
            np.array([vote.differences is not None for vote in voted], bool),
            np.array([vote.visitor is not None for vote in voted], bool),
        )

    @classmethod
    def of_games(cls, games: Games) -> Votes:
        """Of games of which nothing else is known."""
        unknown, no = np.full(len(games), np.nan), np.zeros(len(games), bool)
        nothing = np.zeros((len(games), len(FEATURES)))
        return cls(games, unknown, unknown, nothing, dict.fromkeys(CATEGORIES, no), no, no)

    def __len__(self) -> int:
        return len(self.games)

    def only(self, mask: np.ndarray) -> Votes:
        return Votes(
            self.games.only(mask),
            self.seconds[mask],
            self.chance[mask],
            self.differences[mask],
            {name: held[mask] for name, held in self.categories.items()},
            self.known_texts[mask],
            self.known_visitor[mask],
        )


def chosen(votes: Votes, selection: Selection) -> Votes:
    """The votes that a selection is about. Raises BadInput where they do not tell what it asks for."""
    if not len(votes):
        return votes
    mask = np.ones(len(votes), bool)
    if selection.category != ALL:
        _require(votes.known_texts.any(), "no_texts")
        mask &= votes.categories[selection.category]
    if selection.since or selection.until:
        _require(np.isfinite(votes.seconds).any(), "no_times")
        mask &= votes.seconds >= (_midnight(selection.since) if selection.since else -np.inf)
        mask &= votes.seconds < (_midnight(selection.until) + DAY_SECONDS if selection.until else np.inf)
    some = votes.only(mask)
    while selection.min_votes and len(some):
        enough = some.games.tally() >= selection.min_votes
        if enough.all():
            break
        some = some.only(enough[some.games.left] & enough[some.games.right])
    return some


def prepared(votes: Votes, selection: Selection) -> Games:
    """The games of chosen votes, with the covariates, weights and clusters that a selection asks for."""
    games = votes.games if selection.cluster else votes.games.knowing(visitor=None)
    if not len(votes):
        return games
    if selection.cluster:
        _require(votes.known_visitor.any(), "no_visitors")
    if selection.position:
        games = games.knowing(covariates={"position": np.ones(len(games))})
    if selection.style:
        _require(votes.known_texts.any(), "no_style")
        games = controlled(games, votes.differences)
    if selection.propensity:
        _require(np.isfinite(votes.chance).all(), "no_chances")
        weight = 1 / votes.chance
        games = games.knowing(weight=weight / weight.mean())
    return games


def _midnight(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


def _require(told: bool, rule: str) -> None:
    if not told:
        raise no_board(rule)
