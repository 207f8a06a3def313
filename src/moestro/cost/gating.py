"""Which experts a step touches: from popularity and placement to activated experts and copies on each rank.

In decode the time of the experts is that of reading their weights, so the number of *activated* experts sets it; in
prefill it is arithmetic, so the number of token copies on the busiest rank does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Gating:
    """How tokens fall on the experts of each rank; P patterns (1: all layers alike, else one a layer with experts).

    Attributes:
        hit: float64[P, R, E], the chance that one token has a copy computed by this rank's expert.
        held: float64[P, R, E], how much of the expert the rank holds: 0 or 1, or a share where it is not known which.
        copies: float64[P, R], copies of one token that the rank computes; over ranks they sum to top-k.

    R is the number of ranks, or 1 where they are alike.
    """

    hit: Floats
    held: Floats
    copies: Floats

    def activated(self, num_tokens: int) -> Floats:
        """float64[P, R], distinct experts that at least one of `num_tokens` independent tokens chose, expected."""
        result: Floats = (self.held * (1 - (1 - self.hit) ** num_tokens)).sum(axis=-1)
        return result


def zipf_popularity(num_experts: int, exponent: float) -> Floats:
    """float64[num_experts] that sum to 1: expert e is chosen in proportion to (e + 1) ** -exponent; 0: uniformly."""
    weight: Floats = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    popularity: Floats = weight / weight.sum()
    return popularity


def even_gating(popularity: Floats, top_k: int, num_ep_ranks: int = 1, imbalance: float = 1.0) -> Gating:
    """A placement that gives every rank an equal share of activated experts, not said which.

    Args:
        popularity: float64[E], sums to 1.
        imbalance: copies on the busiest rank over the mean, at least 1; only the busiest is priced.
    """
    hit = np.minimum(1.0, top_k * popularity)[None, None, :]
    held = np.full_like(hit, 1 / num_ep_ranks)
    return Gating(hit, held, np.array([[top_k / num_ep_ranks * imbalance]]))


def placed_gating(popularity: Floats, top_k: int, share: Floats) -> Gating:
    """A known placement.

    Args:
        popularity: float64[P, E], of each pattern, sums to 1.
        share: float64[P, R, E], the part of the expert's tokens that each rank computes: 1 where it holds the only
            copy, a fraction where several ranks hold one; over ranks they sum to 1.
    """
    chance = np.minimum(1.0, top_k * popularity)[:, None, :]
    copies = (top_k * popularity[:, None, :] * share).sum(axis=-1)
    return Gating(chance * share, (share > 0).astype(np.float64), copies)
