"""The engines that one decision could have chosen, the best of them: what explains it, and how well it chose."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.routing.policy_contract import Choice, RouteView

MAX_CANDIDATES = 32  # of one decision that are kept: of thousands of engines nobody reads more


class Candidates(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What is kept of one decision, in as few bytes and microseconds as can be: most are never looked at.

    Attributes:
        chosen: the row that was.
        num: rows that could be chosen.
        rows: int64[k], the best MAX_CANDIDATES of them by score, and the chosen one; the first, where there is none.
        scores: [k]; None: the policy scores none.
        hit_tokens: int64[k].
    """

    chosen: int
    num: int
    rows: NDArray[np.int64]
    scores: NDArray[np.float64] | NDArray[np.int64] | None
    hit_tokens: NDArray[np.int64]

    def ranked(self) -> list[int]:
        """Places in the columns, the best score first, of equal ones the lower row."""
        if self.scores is None:
            return list(range(len(self.rows)))
        return [int(at) for at in np.lexsort((self.rows, self.scores))]

    def score(self, at: int) -> float | None:
        """The score at a place; None: it has none, or one that is no finite number."""
        return None if self.scores is None else finite(float(self.scores[at]))

    @property
    def regret(self) -> float | None:
        """The chosen row's score less the best other's. Negative: it was the best, by so much. Positive: a filter, a
        bound or a draw passed over a better one. None: there was no other, or one of the two has no finite score.
        """
        if self.scores is None:
            return None
        others = self.scores[self.rows != self.chosen]
        if not len(others):
            return None
        return finite(float(self.scores[self.rows == self.chosen][0]) - float(np.fmin.reduce(others)))


def candidates_of(view: RouteView, choice: Choice) -> Candidates:
    """The candidates of a decision; copies, for the columns of a view go on changing."""
    rows, scores = np.flatnonzero(view.engines.routable), choice.scores
    num = len(rows)
    if num > MAX_CANDIDATES:
        rows = rows[:MAX_CANDIDATES] if scores is None else rows[_best(scores[rows])]
        if not (rows == choice.engine).any():
            rows = np.append(rows, choice.engine)
    return Candidates(choice.engine, num, rows, None if scores is None else scores[rows], view.hit_tokens[rows])


def finite(number: float) -> float | None:
    """None for what JSON has no word for."""
    return number if math.isfinite(number) else None


def _best(scores: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.intp]:
    """Places of the MAX_CANDIDATES lowest, of equal ones the first: the same on every machine."""
    scores = np.where(np.isnan(scores), np.inf, scores)
    # As many groups, each with one that is not above the greatest of their minima: a tenth of what a partition costs.
    groups = scores[: len(scores) // MAX_CANDIDATES * MAX_CANDIDATES].reshape(MAX_CANDIDATES, -1)
    places = np.flatnonzero(scores <= groups.min(axis=1).max())
    return places[np.argsort(scores[places], kind="stable")[:MAX_CANDIDATES]]
