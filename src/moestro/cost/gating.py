"""The experts that a step touches: from popularity and placement to activated experts and token copies on each rank.

In decode, experts take as long as reading their weights does, so the number of *activated* experts decides. In prefill,
arithmetic dominates, so the number of token copies on the busiest rank decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Gating:
    """How tokens fall on the experts of each rank.

    P counts patterns: 1 if all layers are alike, else one for each layer with experts. R is the number of ranks, or 1
    where ranks are alike.

    Attributes:
        hit: float64[P, R, E], chance that one token has a copy computed by this rank's expert.
        held: float64[P, R, E], part of the expert that the rank holds: 0 or 1, or a share where the placement is open.
        copies: float64[P, R], copies of one token that the rank computes; the sum over ranks is top-k.
    """

    hit: Floats
    held: Floats
    copies: Floats

    def activated(self, num_tokens: int) -> Floats:
        """float64[P, R], expected number of distinct experts that `num_tokens` independent tokens choose."""
        result: Floats = (self.held * (1 - (1 - self.hit) ** num_tokens)).sum(axis=-1)
        return result


def even_gating(popularity: Floats, top_k: int, num_ep_ranks: int = 1, imbalance: float = 1.0) -> Gating:
    """Gating under an unspecified placement that gives every rank an equal share of activated experts.

    Args:
        popularity: float64[E], sums to 1.
        imbalance: copies on the busiest rank over the mean, at least 1. Only the busiest rank is priced.
    """
    hit = np.minimum(1.0, top_k * popularity)[None, None, :]
    held = np.full_like(hit, 1 / num_ep_ranks)
    return Gating(hit, held, np.array([[top_k / num_ep_ranks * imbalance]]))


def placed_gating(popularity: Floats, top_k: int, share: Floats) -> Gating:
    """Gating under a known placement.

    Args:
        popularity: float64[P, E]; each pattern sums to 1.
        share: float64[P, R, E], part of the expert's tokens that each rank computes: 1 on the rank with the only copy,
            a fraction where several ranks hold copies; the sum over ranks is 1.
    """
    chance = np.minimum(1.0, top_k * popularity)[:, None, :]
    copies = (top_k * popularity[:, None, :] * share).sum(axis=-1)
    return Gating(chance * share, (share > 0).astype(np.float64), copies)
