"""Candidates of a routing decision: the best routable engines, kept to explain the decision and rate it."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.routing.policy_contract import Choice, Needs, RouteView

NO_NEEDS = Needs()
MAX_CANDIDATES = 32  # kept per decision; longer lists of a large fleet are of no use to a reader


class Candidates(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The candidates of one decision, kept small and cheap because most are never read.

    Attributes:
        chosen: row of the chosen engine.
        num: number of routable rows.
        rows: int64[k], the MAX_CANDIDATES best rows by score plus the chosen one; the first rows without scores.
        scores: [k], scores of `rows`. None means the policy computes no scores.
        hit_tokens: int64[k], cached prompt tokens of `rows`.
        not_compared: figures that the policy reads and that did not count, each with the first rows that lack it.
        traits: float64[3, k], of each of `rows` the cached tokens in host memory alone, `speed` and `decode_speed`.
            None means that no cache has such tokens, and that the speeds are 1 or the policy reads none.
    """

    chosen: int
    num: int
    rows: NDArray[np.int64]
    scores: NDArray[np.float64] | NDArray[np.int64] | None
    hit_tokens: NDArray[np.int64]
    not_compared: dict[str, list[int]] = {}
    traits: NDArray[np.float64] | None = None

    def host_tokens_at(self, at: int) -> int:
        """Return the cached tokens that the engine at index `at` holds in host memory alone."""
        return 0 if self.traits is None else int(self.traits[0, at])

    def speed_at(self, at: int) -> float:
        """Return the speed of prompts at index `at`."""
        return 1.0 if self.traits is None else float(self.traits[1, at])

    def decode_speed_at(self, at: int) -> float:
        """Return the speed of answers at index `at`."""
        return 1.0 if self.traits is None else float(self.traits[2, at])

    def ranked(self) -> list[int]:
        """Return indices into the columns by ascending score; the lower row wins ties."""
        if self.scores is None:
            return list(range(len(self.rows)))
        return [int(at) for at in np.lexsort((self.rows, self.scores))]

    def score(self, at: int) -> float | None:
        """Return the score at index `at`, or None without a finite score."""
        return None if self.scores is None else finite(float(self.scores[at]))

    @property
    def regret(self) -> float | None:
        """The chosen row's score minus the best other score.

        A negative value is the margin by which the chosen row was best. A positive value means that a filter, a bound
        or a draw passed over a better row. None means no other row, or a score that is not finite.
        """
        if self.scores is None:
            return None
        others = self.scores[self.rows != self.chosen]
        if not len(others):
            return None
        return finite(float(self.scores[self.rows == self.chosen][0]) - float(np.fmin.reduce(others)))


def candidates_of(view: RouteView, choice: Choice, needs: Needs = NO_NEEDS) -> Candidates:
    """Return a decision's candidates. Columns are copied, because those of a view change later.

    Args:
        needs: what the policy reads.
    """
    rows, scores = view.engines.routable.nonzero()[0], choice.scores
    num = len(rows)
    if num > MAX_CANDIDATES:
        rows = rows[:MAX_CANDIDATES] if scores is None else rows[_best(scores[rows])]
        if not (rows == choice.engine).any():
            rows = np.append(rows, choice.engine)
    lacking = {
        name: np.flatnonzero(rows_without)[:MAX_CANDIDATES].tolist()
        for name, rows_without in view.not_compared.items()
        if name in needs.figures
    }
    scores_of_rows = None if scores is None else scores[rows]
    has_speeds = needs.speeds and view.engines.has_speeds
    traits = _traits_of(view, rows) if has_speeds or view.host_tokens is not None else None
    return Candidates(choice.engine, num, rows, scores_of_rows, view.hit_tokens[rows], lacking, traits)


def _traits_of(view: RouteView, rows: NDArray[np.intp]) -> NDArray[np.float64]:
    traits = np.empty((3, len(rows)))
    traits[0] = 0 if view.host_tokens is None else view.host_tokens[rows]
    traits[1], traits[2] = view.engines.speed[rows], view.engines.decode_speed[rows]
    return traits


def finite(number: float) -> float | None:
    """Return `number`, or None for infinity and NaN, which JSON cannot represent."""
    return number if math.isfinite(number) else None


def _best(scores: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.intp]:
    """Indices of the MAX_CANDIDATES lowest scores. The lower index wins ties, so that all machines agree."""
    scores = np.where(np.isnan(scores), np.inf, scores)
    # The largest of MAX_CANDIDATES group minima bounds the wanted scores, at a tenth of a partition's cost.
    groups = scores[: len(scores) // MAX_CANDIDATES * MAX_CANDIDATES].reshape(MAX_CANDIDATES, -1)
    places = np.flatnonzero(scores <= groups.min(axis=1).max())
    return places[np.argsort(scores[places], kind="stable")[:MAX_CANDIDATES]]
