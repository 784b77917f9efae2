"""Games: who met whom and how it ended, as arrays; and their cells, all that a likelihood needs to know of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components


@dataclass(frozen=True)
class Games:
    """In the order in which they were played. Models are numbered by their place in `models`, which is sorted.

    What may be known besides, a value a game: `both_bad`, that a score of 0.5 meant "both are bad"; `visitor`, who
    voted; `weight`, how often the game counts (one over the chance that its pair had, for instance); `covariates`, by
    name, what else may have swayed the vote: how much more of it there was on the left than on the right.
    """

    models: tuple[str, ...]
    left: np.ndarray  # [game] int
    right: np.ndarray  # [game] int
    score: np.ndarray  # [game] float: what the left side got, 1 a win, 0 a loss, 0.5 neither
    both_bad: np.ndarray | None = None  # [game] bool
    visitor: np.ndarray | None = None  # [game] int
    weight: np.ndarray | None = None  # [game] float
    covariates: Mapping[str, np.ndarray] = field(default_factory=dict)  # each [game] float

    @classmethod
    def of(cls, played: Iterable[tuple[str, str, float]]) -> Games:
        """From (left model, right model, score of the left)."""
        left, right, score = zip(*played, strict=True) if (played := list(played)) else ((), (), ())
        return cls.between(left, right, score)

    @classmethod
    def between(cls, left: Sequence[str], right: Sequence[str], score: Sequence[float], **known) -> Games:
        models = tuple(sorted({*left, *right}))
        number = {model: i for i, model in enumerate(models)}
        return cls(
            models,
            np.fromiter((number[model] for model in left), np.int64, len(left)),
            np.fromiter((number[model] for model in right), np.int64, len(right)),
            np.asarray(score, float),
            **known,
        )

    def __len__(self) -> int:
        return len(self.score)

    def only(self, chosen: np.ndarray) -> Games:
        """The games of a mask [game] bool, or of indices, with the models that are in them."""

        def of(column: np.ndarray | None) -> np.ndarray | None:
            return None if column is None else column[chosen]

        left, right = self.left[chosen], self.right[chosen]
        there = np.unique(np.concatenate([left, right]))
        return Games(
            tuple(self.models[i] for i in there),
            np.searchsorted(there, left),
            np.searchsorted(there, right),
            self.score[chosen],
            of(self.both_bad),
            of(self.visitor),
            of(self.weight),
            {name: values[chosen] for name, values in self.covariates.items()},
        )

    def knowing(self, **known) -> Games:
        """The same games with columns added or replaced."""
        return replace(self, **known)

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """How many games each model played and how many of them it won. [model] int each."""
        winners = np.concatenate([self.left[self.score == 1], self.right[self.score == 0]])
        return self.tally(), np.bincount(winners, minlength=len(self.models))

    def tally(self, chosen: np.ndarray | slice = slice(None)) -> np.ndarray:
        """[model] int: how many of the chosen games each took part in."""
        n = len(self.models)
        return np.bincount(self.left[chosen], minlength=n) + np.bincount(self.right[chosen], minlength=n)

    def opponents(self) -> np.ndarray:
        """[model] int: how many others each has met."""
        n = len(self.models)
        met = np.bincount(self.left * n + self.right, minlength=n * n).reshape(n, n) > 0
        return (met | met.T).sum(axis=1)

    def results(self) -> np.ndarray:
        """[model, model, 2] how many games each played against each, and what it scored in them."""
        n = len(self.models)
        table = np.zeros((n, n, 2))
        np.add.at(table, (self.left, self.right), np.stack([np.ones(len(self)), self.score], axis=1))
        np.add.at(table, (self.right, self.left), np.stack([np.ones(len(self)), 1 - self.score], axis=1))
        return table


@dataclass(frozen=True)
class Cells:
    """Games that are alike, counted: the same lower-numbered model, higher-numbered model, score of the first, and
    covariates of the first against the second.

    A cell is a row of the design: its lead is b_first - b_second + covariates . coefficients. Parameters are numbered
    models first, then covariates.
    """

    num_models: int
    first: np.ndarray  # [cell] int
    second: np.ndarray  # [cell] int
    score: np.ndarray  # [cell] float, of the first
    count: np.ndarray  # [cell] float: the sum of its games' weights
    square: np.ndarray  # [cell] float: the sum of their squares
    covariates: np.ndarray  # [cell, covariate] float
    by_visitor: csr_array | None = None  # [visitor, cell] sum of weights, where visitors are known

    @classmethod
    def of(cls, games: Games) -> Cells:
        n = len(games.models)
        swap = games.left > games.right
        first, second = np.where(swap, games.right, games.left), np.where(swap, games.left, games.right)
        columns = [np.where(swap, 1 - games.score, games.score)]
        columns += [np.where(swap, -values, values) for values in games.covariates.values()]
        example, cell = _alike(first * n + second, columns)
        weight = np.ones(len(games)) if games.weight is None else games.weight
        by_visitor = None
        if games.visitor is not None:
            number = np.unique(games.visitor, return_inverse=True)[1]
            by_visitor = coo_array((weight, (number, cell))).tocsr()
        return cls(
            n,
            first[example],
            second[example],
            columns[0][example],
            np.bincount(cell, weight, len(example)),
            np.bincount(cell, weight**2, len(example)),
            np.stack([column[example] for column in columns[1:]], axis=1)
            if columns[1:]
            else np.zeros((len(example), 0)),
            by_visitor,
        )

    @property
    def num_parameters(self) -> int:
        return self.num_models + self.covariates.shape[1]

    def lead(self, parameters: np.ndarray) -> np.ndarray:
        """[cell]: by how much the first is ahead of the second, in natural units."""
        strengths, coefficients = np.split(parameters, [self.num_models])
        return strengths[self.first] - strengths[self.second] + self.covariates @ coefficients

    def scattered(self, values: np.ndarray) -> np.ndarray:
        """[parameter]: the sum over cells of value * row of the design."""
        n = self.num_models
        models = np.bincount(self.first, values, n) - np.bincount(self.second, values, n)
        return np.concatenate([models, values @ self.covariates])

    def gram(self, weights: np.ndarray) -> np.ndarray:
        """[parameter, parameter]: the sum over cells of weight * row^T row."""
        n = self.num_models
        pairs = np.bincount(self.first * n + self.second, weights, n * n).reshape(n, n)
        pairs = pairs + pairs.T
        whole = np.empty((self.num_parameters, self.num_parameters))
        whole[:n, :n] = np.diag(pairs.sum(axis=0)) - pairs
        for place, values in enumerate(self.covariates.T, n):
            whole[place] = whole[:, place] = self.scattered(weights * values)
        return whole

    @cached_property
    def design(self) -> csr_array:
        """[cell, parameter], sparse."""
        cells, n = len(self.score), self.num_models
        rows = np.arange(cells)
        place, which = np.nonzero(self.covariates)
        return coo_array(
            (
                np.concatenate([np.ones(cells), -np.ones(cells), self.covariates[place, which]]),
                (np.concatenate([rows, rows, place]), np.concatenate([self.first, self.second, n + which])),
            ),
            (cells, self.num_parameters),
        ).tocsr()

    @cached_property
    def merged(self) -> tuple[Cells, csr_array]:
        """The cells that differ in their score alone as one, of score 1; and [merged, cell] which went into which."""
        example, place = _alike(self.first * self.num_models + self.second, self.covariates.T)
        ones = np.ones(len(place))
        into = coo_array((ones, (place, np.arange(len(place)))), (len(example), len(place))).tocsr()
        count = into @ self.count
        return (
            Cells(
                self.num_models,
                self.first[example],
                self.second[example],
                np.ones(len(example)),
                count,
                count,
                self.covariates[example],
            ),
            into,
        )

    def counted(self, count: np.ndarray) -> Cells:
        """The same cells with other counts of games, each of weight 1."""
        return replace(self, count=count, square=count, by_visitor=None)

    def open_ties(self) -> np.ndarray:
        """[cell] bool: ties of a model that has done nothing but tie.

        Such ties show no spread, and so no error; yet they leave open how the model's decided games would have gone.
        """
        decided = (self.score != 0.5) & (self.count > 0)
        has_decided = np.bincount(self.first[decided], minlength=self.num_models) + np.bincount(
            self.second[decided], minlength=self.num_models
        )
        only_tied = has_decided == 0
        return ~decided & (only_tied[self.first] | only_tied[self.second])

    def with_ties_opened(self) -> Cells:
        """Each tie of `open_ties` as half a win and half a loss of their own: the likelihood of Bradley–Terry stays,
        and its games have the spread of a coin."""
        opened = self.open_ties()
        if not opened.any():
            return self
        kept, halves = np.flatnonzero(~opened), np.flatnonzero(opened)
        order = np.concatenate([kept, halves, halves])
        share = np.concatenate([np.ones(len(kept)), np.full(2 * len(halves), 0.5)])
        score = np.concatenate([self.score[kept], np.ones(len(halves)), np.zeros(len(halves))])
        return Cells(
            self.num_models,
            self.first[order],
            self.second[order],
            score,
            self.count[order] * share,
            self.square[order] * share,
            self.covariates[order],
        )

    def islands(self) -> np.ndarray:
        """Which island each model lies on: models are on one island if a chain of games joins them. [model] int."""
        there = self.count > 0
        edges = (np.ones(there.sum()), (self.first[there], self.second[there]))
        graph = coo_array(edges, (self.num_models, self.num_models)).tocsr()
        return connected_components(graph, directed=False)[1]

    def is_strongly_connected(self) -> bool:
        """Whether each model beat or tied with another in a chain that leads to any third: then the likelihood has
        one finite maximum (Ford 1957)."""
        there = self.count > 0
        wins, losses = there & (self.score > 0), there & (self.score < 1)
        beat = np.zeros((self.num_models, self.num_models), bool)
        beat[self.first[wins], self.second[wins]] = True
        beat[self.second[losses], self.first[losses]] = True
        return _reaches_all(beat) and _reaches_all(beat.T)


def _reaches_all(leads: np.ndarray) -> bool:
    """Whether from the first a chain of `leads` [from, to] goes to every other."""
    reached = np.arange(len(leads)) == 0
    new = reached
    while new.any():
        new = leads[new].any(axis=0) & ~reached
        reached = reached | new
    return bool(reached.all())


def _alike(key: np.ndarray, columns: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The place of one example of each distinct row of key and columns, and the number of each row among them."""
    for column in columns:  # each step numbers the distinct rows so far
        values, number = np.unique(column, return_inverse=True)
        key = _numbered(key)[1] * max(len(values), 1) + number
    return _numbered(key)


def _numbered(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The place of one example of each distinct key, by key, and the number of each key among the distinct ones."""
    if not len(keys) or keys.max() > 8 * len(keys) + 1_000_000:
        return np.unique(keys, return_index=True, return_inverse=True)[1:]
    place = np.full(keys.max() + 1, -1)
    place[keys] = np.arange(len(keys))
    there = np.flatnonzero(place >= 0)
    number = np.empty(len(place), np.int64)
    number[there] = np.arange(len(there))
    return place[there], number[keys]
