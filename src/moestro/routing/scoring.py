"""How most policies are built: filters leave some engines, a score orders them, a draw breaks ties."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.rng import Draws
from moestro.routing.policy_contract import Choice, Needs, RouteEvent, RouteView

Mask = NDArray[np.bool_]
Scores = NDArray[np.float64]
Counts = NDArray[np.int64]


OWN_COUNTS = Needs()


class Stateless:
    """A policy that has nothing to remember."""

    needs = OWN_COUNTS

    def observe(self, event: RouteEvent) -> None:
        """Nothing."""


class ScorePolicy(Stateless, ABC):
    """A policy that takes the routable engine with the lowest score.

    Attributes:
        words: name of the score, for the reason.
    """

    words: str

    @abstractmethod
    def score(self, view: RouteView) -> Scores:
        """float64[n], lower is better."""

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """The lowest score."""
        return choose(view, self.score(view), draws, self.words)


@dataclass(frozen=True, slots=True)
class Scored(Stateless):
    """A score function as a policy, for functions that have no class: expressions and users' files.

    Attributes:
        score: view -> float64[n].
        words: what the score is, for the reason.
        needs: what the score looks at.
    """

    score: Callable[[RouteView], Scores]
    words: str
    needs: Needs = OWN_COUNTS

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """The lowest score."""
        return choose(view, self.score(view), draws, self.words)


def choose(view: RouteView, scores: Scores | Counts, draws: Draws, words: str, among: Mask | None = None) -> Choice:
    """The routable engine with the lowest score.

    Args:
        scores: [n]; a row without a number (NaN) is chosen only if all are.
        words: what the score is.
        among: bool[n], rows that filters have left; if none of them is routable, all routable ones are, and the reason
            says so.
    """
    mask = view.engines.routable
    if among is not None:
        left = mask & among
        if np.count_nonzero(left):
            mask = left
        else:
            words += "; the filter leaves no engine, so all are candidates"
    engine = lowest(scores, mask, draws)
    score = float(scores[engine])
    return Choice(engine, score, f"{words} {score:.6g}", scores)


def lowest(scores: Scores | Counts, among: Mask, draws: Draws) -> int:
    """The row of `among`, which is not empty, with the lowest score; ties are drawn for, so that they spread."""
    # Counting is a fifth of what `all` and `any` cost on rows of this length.
    left = scores if np.count_nonzero(among) == len(among) else np.where(among, scores, np.inf)
    best = int(left.argmin())  # the first that is not a number, if any is
    if not math.isfinite(left[best]):
        return _lowest_finite(scores, np.flatnonzero(among), draws)
    is_tied = left == left[best]
    num_tied = int(np.count_nonzero(is_tied))
    return best if num_tied == 1 else int(np.flatnonzero(is_tied)[draws.below(num_tied)])


def _lowest_finite(scores: Scores | Counts, rows: NDArray[np.int64], draws: Draws) -> int:
    """The same where some scores are infinite or no numbers."""
    values = scores[rows]
    tied = rows[values == np.fmin.reduce(values)]
    tied = tied if len(tied) else rows  # none is a number
    return int(tied[draws.below(len(tied))])


def range_of(values: Scores | Counts, among: Mask) -> tuple[float, float]:
    """The least and the greatest value in `among`, which is not empty."""
    left = values[among]
    return float(left.min()), float(left.max())
