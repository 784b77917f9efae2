"""The maximum of a likelihood of games: found by Newton's method, with its sandwich and its bootstrap.

Knows no particular model of games. One is a `Likelihood`: for a lead between two models it says how likely each score
is, and the first two derivatives of that. It may have one parameter of its own besides (Davidson's ties do).

Without a prior where one finite maximum exists (the graph of "beat or tied with" is strongly connected); otherwise
with PRIOR_WEIGHT / 2 * sum(b^2) taken from the log likelihood, so that who won everything stays finite. The
coefficients of covariates, and a likelihood's own parameter, always have the prior LOOSE, which moves nothing that the
votes say anything about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from app.ratings.games import Cells

CENTRE = 1000.0
SCALE = 400.0 / math.log(10.0)
PRIOR_WEIGHT = 0.01
LOOSE = 1e-6
MAX_STEPS = 200
CHORD_STEPS = 60  # of a round of a bootstrap, before it is given to Newton
CONVERGED = 1e-10  # in natural units: 2e-8 rating points
BATCH_NUMBERS = 8_000_000  # of 8 bytes, that a batch of rounds may hold at once


class Likelihood(Protocol):
    """`score` and `lead` [cell, ...]; `own` is the parameter of its own, and 0 for one that has none."""

    own_parameters: int  # 0 or 1

    def height(self, score: np.ndarray, lead: np.ndarray, own: float) -> np.ndarray:
        """Log likelihood of a game of each cell."""

    def slope(self, score: np.ndarray, lead: np.ndarray, own: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        """Its derivative by the lead, and by the own parameter."""

    def curvature(self, lead: np.ndarray, own: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Minus its expected second derivatives: by the lead twice, by both, by the own parameter twice."""


@dataclass(frozen=True)
class Fit:
    """`parameters`: strengths in natural units with mean 0, coefficients of covariates, the likelihood's own."""

    parameters: np.ndarray
    num_models: int
    prior_weight: float  # 0 where none was needed

    @property
    def strengths(self) -> np.ndarray:
        return self.parameters[: self.num_models]

    @property
    def ratings(self) -> np.ndarray:
        return CENTRE + SCALE * self.strengths


@dataclass(frozen=True)
class Covariance:
    """Of the ratings in points, of strengths less the mean of their island; of the other parameters as they are."""

    ratings: np.ndarray  # [model, model]
    others: np.ndarray  # [other, other]
    information: np.ndarray  # [parameter, parameter], of which it was made


def fit(likelihood: Likelihood, cells: Cells, start: np.ndarray | None = None) -> Fit:
    """Newton's method with halved steps where a whole one would not climb. Milliseconds for hundreds of models."""
    prior = prior_of(likelihood, cells)
    parameters = np.zeros(len(prior)) if start is None else start
    height = _height(likelihood, cells, parameters, prior)
    for _ in range(MAX_STEPS if cells.num_models else 0):
        lead, own = _lead(likelihood, cells, parameters)
        slope = _gather(cells, likelihood, [cells.count * part for part in likelihood.slope(cells.score, lead, own)])
        step = np.linalg.solve(information_of(likelihood, cells, lead, own, prior), slope - prior * parameters)
        for _ in range(60):
            taken = _height(likelihood, cells, parameters + step, prior)
            if taken >= height - 1e-12 * abs(height):
                break
            step = step / 2
        parameters, height = parameters + step, taken
        if np.abs(step).max() < CONVERGED:
            break
    return Fit(_centred(parameters, cells.num_models), cells.num_models, float(prior[0]) if len(prior) else 0.0)


def sandwich(likelihood: Likelihood, cells: Cells, fitted: Fit) -> Covariance:
    """H^-1 M H^-1: H the information, M the sum of squared slopes (Huber 1967; Chiang et al. 2024, section 5).

    Games are independent, or, where `cells` knows the visitors, the games of two visitors are (Liang and Zeger 1986):
    then a visitor's slopes are summed before they are squared. A prior counts as one more observation a model, whose
    slope varies by its weight: so what only the prior knows has the prior's own wide error, and a first vote proves
    nothing. Ties of a model that has only tied are given the spread that the likelihood expects of them.
    """
    n = cells.num_models
    prior = prior_of(likelihood, cells, fitted.prior_weight)
    lead, own = _lead(likelihood, cells, fitted.parameters)
    information = information_of(likelihood, cells, lead, own, prior)
    slopes = likelihood.slope(cells.score, lead, own)
    if cells.by_visitor is None:
        meat = _border(cells, likelihood, [cells.square * part for part in _products(slopes)])
    else:
        meat = _clustered(cells, likelihood, slopes)
    meat += _border(cells, likelihood, [cells.square * cells.open_ties() * p for p in likelihood.curvature(lead, own)])
    meat += np.diag(prior)
    bread = np.linalg.inv(information)
    same_island = (islands := cells.islands())[:, None] == islands
    bread[:n] -= (same_island / same_island.sum(axis=1)) @ bread[:n]
    whole = bread @ meat @ bread.T
    return Covariance(SCALE**2 * whole[:n, :n], whole[n:, n:], information)


def bootstrap(likelihood: Likelihood, cells: Cells, fitted: Fit, rounds: int, rng: np.random.Generator) -> np.ndarray:
    """[round, parameter] of resampled games, each fitted by the same rule, a prior where one is needed included.

    All rounds of a batch climb together by the inverse information of the whole, a chord instead of Newton's tangent,
    to the same maximum; what does not arrive, or needs a prior, is fitted by itself.
    """
    games = np.round(cells.count**2 / cells.square, 9)  # [cell], how many games of one weight it is worth
    weight, total = cells.count / games, round(games.sum())
    chord = chord_of(likelihood, cells, fitted)
    batch = max(1, BATCH_NUMBERS // len(cells.score))
    found = []
    for done in range(0, rounds, batch):
        counts = rng.multinomial(total, games / games.sum(), min(batch, rounds - done)) * weight
        found.append(refit(likelihood, cells, counts, fitted.parameters, chord))
    every = np.concatenate(found)
    every[:, : cells.num_models] -= every[:, : cells.num_models].mean(axis=1, keepdims=True)
    return every


def chord_of(likelihood: Likelihood, cells: Cells, fitted: Fit) -> np.ndarray:
    """[parameter, parameter] the inverse information at a fit: the way up for counts that are not far from its own."""
    lead, own = _lead(likelihood, cells, fitted.parameters)
    return np.linalg.inv(information_of(likelihood, cells, lead, own, prior_of(likelihood, cells, fitted.prior_weight)))


def refit(likelihood: Likelihood, cells: Cells, counts: np.ndarray, start: np.ndarray, chord: np.ndarray) -> np.ndarray:
    """[round, parameter] the fits of the same cells under other `counts` [round, cell], from near by."""
    parameters, arrived = _climb_together(likelihood, cells, counts, start, chord, prior_of(likelihood, cells, 0.0))
    for i, count in enumerate(counts):
        one = cells.counted(count)
        if not (arrived[i] and one.is_strongly_connected()):
            parameters[i] = fit(likelihood, one, start).parameters
    return parameters


def _climb_together(likelihood, cells, counts, start, chord, prior) -> tuple[np.ndarray, np.ndarray]:
    """[round, parameter], and [round] bool whether it has arrived.

    A slope is what the scores say less what the lead made one expect, so that cells which differ in score alone can
    climb as one: `counts` games of score 1, and what the scores say apart from that.
    """
    merged, into = cells.merged
    aside = [np.asarray(part) for part in likelihood.slope(cells.score, 0.0, 0.0)]
    of_one = likelihood.slope(np.float64(1.0), 0.0, 0.0)
    told = [into @ (counts * (part - one)).T for part, one in zip(aside, of_one, strict=True)]
    games = into @ counts.T  # [merged, round]
    parameters = np.repeat(start[None], len(counts), axis=0)
    design, width = merged.design, cells.num_parameters
    arrived = np.zeros(len(counts), bool)
    left = np.arange(len(counts))
    for _ in range(CHORD_STEPS):
        here = parameters[left]
        own = here[:, width] if likelihood.own_parameters else 0.0
        by_lead, by_own = likelihood.slope(np.float64(1.0), design @ here[:, :width].T, own)
        slope = (design.T @ (games[:, left] * by_lead + told[0][:, left])).T
        if likelihood.own_parameters:
            slope = np.column_stack([slope, (games[:, left] * by_own + told[1][:, left]).sum(axis=0)])
        step = (slope - prior * here) @ chord
        parameters[left] = here + step
        size = np.abs(step).max(axis=1)
        arrived[left] = size < 1e-8
        left = left[(size >= 1e-8) & (size < 10)]
        if not len(left):
            break
    return parameters, arrived


def prior_of(likelihood: Likelihood, cells: Cells, weight: float | None = None) -> np.ndarray:
    """[parameter] weights; that of the models by what the graph needs, unless it is given."""
    if weight is None:
        weight = 0.0 if cells.is_strongly_connected() else PRIOR_WEIGHT
    others = cells.num_parameters - cells.num_models + likelihood.own_parameters
    return np.concatenate([np.full(cells.num_models, weight), np.full(others, LOOSE)])


def _lead(likelihood: Likelihood, cells: Cells, parameters: np.ndarray) -> tuple[np.ndarray, float]:
    own = float(parameters[-1]) if likelihood.own_parameters else 0.0
    return cells.lead(parameters[: cells.num_parameters]), own


def _height(likelihood: Likelihood, cells: Cells, parameters: np.ndarray, prior: np.ndarray) -> float:
    lead, own = _lead(likelihood, cells, parameters)
    return float(cells.count @ likelihood.height(cells.score, lead, own) - prior @ parameters**2 / 2)


def information_of(likelihood: Likelihood, cells: Cells, lead: np.ndarray, own: float, prior: np.ndarray) -> np.ndarray:
    """What the games (and the prior) say about the parameters; without a prior the mean of the strengths, of which
    they say nothing, is held where it is."""
    n = cells.num_models
    whole = _border(cells, likelihood, [cells.count * part for part in likelihood.curvature(lead, own)])
    whole += np.diag(prior)
    if not prior[0]:
        whole[:n, :n] += 1 / n
    return whole


def _gather(cells: Cells, likelihood: Likelihood, parts: list[np.ndarray]) -> np.ndarray:
    """[parameter] from what each cell adds to the lead and to the own parameter."""
    by_lead = cells.scattered(parts[0])
    return np.append(by_lead, parts[1].sum()) if likelihood.own_parameters else by_lead


def _border(cells: Cells, likelihood: Likelihood, parts: list[np.ndarray]) -> np.ndarray:
    """[parameter, parameter] from what each cell adds to lead by lead, lead by own, own by own."""
    inner = cells.gram(parts[0])
    if not likelihood.own_parameters:
        return inner
    edge = cells.scattered(parts[1])[:, None]
    return np.block([[inner, edge], [edge.T, np.full((1, 1), parts[2].sum())]])


def _products(slopes: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    by_lead, by_own = slopes
    return [by_lead**2, by_lead * by_own, by_own**2]


def _clustered(cells: Cells, likelihood: Likelihood, slopes: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    by_lead, by_own = slopes
    sums = (cells.by_visitor @ cells.design.multiply(by_lead[:, None]).tocsr()).tocsr()  # [visitor, parameter]
    inner = (sums.T @ sums).toarray()
    if not likelihood.own_parameters:
        return inner
    own = cells.by_visitor @ by_own
    edge = (sums.T @ own)[:, None]
    return np.block([[inner, edge], [edge.T, np.full((1, 1), own @ own)]])


def _centred(parameters: np.ndarray, num_models: int) -> np.ndarray:
    if not num_models:
        return parameters
    return np.concatenate([parameters[:num_models] - parameters[:num_models].mean(), parameters[num_models:]])
