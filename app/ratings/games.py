"""Games: who met whom and how it ended, as arrays; and their cells, all that Bradley–Terry needs to know of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components


@dataclass(frozen=True)
class Games:
    """In the order in which they were played. Models are numbered by their place in `models`, which is sorted."""

    models: tuple[str, ...]
    left: np.ndarray  # [game] int
    right: np.ndarray  # [game] int
    score: np.ndarray  # [game] float: what the left side got, 1 a win, 0 a loss, 0.5 neither

    @classmethod
    def of(cls, played: Iterable[tuple[str, str, float]]) -> Games:
        """From (left model, right model, score of the left)."""
        left, right, score = zip(*played, strict=True) if (played := list(played)) else ((), (), ())
        return cls.between(left, right, score)

    @classmethod
    def between(cls, left: Sequence[str], right: Sequence[str], score: Sequence[float]) -> Games:
        models = tuple(sorted({*left, *right}))
        number = {model: i for i, model in enumerate(models)}
        return cls(
            models,
            np.fromiter((number[model] for model in left), np.int64, len(left)),
            np.fromiter((number[model] for model in right), np.int64, len(right)),
            np.asarray(score, float),
        )

    def __len__(self) -> int:
        return len(self.score)

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """How many games each model played and how many of them it won. [model] int each."""
        played = np.bincount(self.left, minlength=len(self.models)) + np.bincount(
            self.right, minlength=len(self.models)
        )
        winners = np.concatenate([self.left[self.score == 1], self.right[self.score == 0]])
        return played, np.bincount(winners, minlength=len(self.models))


@dataclass(frozen=True)
class Cells:
    """The games counted by (lower-numbered model, higher-numbered model, score of the first)."""

    num_models: int
    first: np.ndarray  # [cell] int
    second: np.ndarray  # [cell] int
    score: np.ndarray  # [cell] float, of the first
    count: np.ndarray  # [cell] float

    @classmethod
    def of(cls, games: Games) -> Cells:
        n = len(games.models)
        swap = games.left > games.right
        first, second = np.where(swap, games.right, games.left), np.where(swap, games.left, games.right)
        scores, score_number = np.unique(np.where(swap, 1 - games.score, games.score), return_inverse=True)
        keys, count = np.unique((first * n + second) * max(len(scores), 1) + score_number, return_counts=True)
        pair, score_number = np.divmod(keys, max(len(scores), 1))
        return cls(n, pair // n if n else pair, pair % n if n else pair, scores[score_number], count.astype(float))

    def resampled(self, rng: np.random.Generator) -> Cells:
        """As many games drawn anew, with replacement."""
        total = int(self.count.sum())
        count = rng.multinomial(total, self.count / total).astype(float)
        return Cells(self.num_models, self.first, self.second, self.score, count)

    def islands(self) -> np.ndarray:
        """Which island each model lies on: models are on one island if a chain of games joins them. [model] int."""
        return self._components("weak", (self.count > 0, self.first, self.second))

    def is_strongly_connected(self) -> bool:
        """Whether each model beat or tied with another in a chain that leads to any third: then the likelihood has
        one finite maximum (Ford 1957)."""
        wins = (self.count > 0) & (self.score > 0)
        losses = (self.count > 0) & (self.score < 1)
        return bool(
            np.all(self._components("strong", (wins, self.first, self.second), (losses, self.second, self.first)) == 0)
        )

    def _components(self, connection: str, *edges: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
        start = np.concatenate([start[there] for there, start, _ in edges])
        end = np.concatenate([end[there] for there, _, end in edges])
        graph = coo_array((np.ones(len(start)), (start, end)), (self.num_models, self.num_models)).tocsr()
        return connected_components(graph, directed=True, connection=connection)[1]
