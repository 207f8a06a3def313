"""Building blocks of most policies: filters select engines, a score orders them, and a draw breaks ties."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.columns import all_true
from moestro.core.rng import Draws
from moestro.routing.policy_contract import Choice, Needs, RouteEvent, RoutePolicy, RouteView

Mask = NDArray[np.bool_]
Scores = NDArray[np.float64]
Counts = NDArray[np.int64]


OWN_COUNTS = Needs()


class Stateless:
    """Base of policies without state."""

    needs = OWN_COUNTS

    def observe(self, event: RouteEvent) -> None:
        """Ignore the event: a stateless policy remembers nothing."""


def is_stateless(policy: RoutePolicy) -> bool:
    """Return whether a policy ignores every event, so that none needs to be made for it."""
    return getattr(policy.observe, "__func__", None) is Stateless.observe


class ScorePolicy(Stateless, ABC):
    """Base of policies that choose the routable engine with the lowest score.

    Attributes:
        words: name of the score, shown in the reason of a choice.
    """

    words: str

    @abstractmethod
    def score(self, view: RouteView) -> Scores:
        """Return float64[n], one score per engine; lower is better."""

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the routable engine with the lowest score."""
        return choose(view, self.score(view), draws, self.words)


@dataclass(frozen=True, slots=True)
class Scored(Stateless):
    """A policy made from a score function without a class: expressions and functions of users' files.

    Attributes:
        score: function from a view to float64[n].
        words: name of the score, shown in the reason of a choice.
        needs: inputs that the score reads.
    """

    score: Callable[[RouteView], Scores]
    words: str
    needs: Needs = OWN_COUNTS

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the routable engine with the lowest score."""
        return choose(view, self.score(view), draws, self.words)


def choose(view: RouteView, scores: Scores | Counts, draws: Draws, words: str, among: Mask | None = None) -> Choice:
    """Choose the routable engine with the lowest score.

    Args:
        scores: [n]; an engine with score NaN is chosen only if all scores are NaN.
        words: name of the score, shown in the reason.
        among: bool[n], rows that passed the filters. Without a routable row among them, the choice is among all
            routable rows, and the reason says so.
    """
    mask = view.engines.routable
    if among is not None:
        left = mask & among
        if np.count_nonzero(left):
            mask = left
        else:
            words += "; the filter leaves no engine, so all are candidates"
    engine = lowest(scores, mask, draws)
    score = float(scores.item(engine))
    return Choice(engine, score, f"{words} {score:.6g}", scores)


def lowest(scores: Scores | Counts, among: Mask, draws: Draws) -> int:
    """Return the row with the lowest score in the non-empty set `among`. A draw breaks ties, to spread requests."""
    left = scores if all_true(among) else np.where(among, scores, np.inf)
    best = int(left.argmin())  # argmin returns the first NaN, if any
    least = left.item(best)
    if not math.isfinite(least):
        return _lowest_finite(scores, np.flatnonzero(among), draws)
    (tied,) = (left == least).nonzero()
    return best if len(tied) == 1 else tied.item(draws.below(len(tied)))


def _lowest_finite(scores: Scores | Counts, rows: NDArray[np.int64], draws: Draws) -> int:
    """Handle scores that contain infinity or NaN, as `lowest` does otherwise."""
    values = scores[rows]
    tied = rows[values == np.fmin.reduce(values)]
    tied = tied if len(tied) else rows  # all scores are NaN
    return int(tied[draws.below(len(tied))])


def range_of(values: Scores | Counts, among: Mask) -> tuple[float, float]:
    """Return the lowest and the highest value in the non-empty set `among`."""
    left = values[among]
    return float(left.min()), float(left.max())
