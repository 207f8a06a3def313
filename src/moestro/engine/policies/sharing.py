"""Share policies: the part of an engine that each client may claim while several have work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import ShareView
from moestro.engine.registry import SHARE_POLICIES


@SHARE_POLICIES.register(
    "equal",
    "Each client with work may claim an equal part; what it leaves is for the others.",
    source="Ghodsi et al., NSDI 2011, for the dominant share of places and KV blocks",
)
@dataclass(frozen=True, slots=True)
class EqualParts:
    """Divides the engine by weight, equally where clients have none.

    A part is a guarantee, not a limit: a client alone has all, and nothing is left idle while anyone wants it.

    Source: Ghodsi et al., "Dominant Resource Fairness", NSDI 2011. Parts are guarantees here, and the order policy
    decides beyond them.
    """

    def __call__(self, view: ShareView) -> NDArray[np.float64]:
        """Divide by weight."""
        parts: NDArray[np.float64] = view.weight / view.weight.sum()
        return parts


@SHARE_POLICIES.register(
    "none",
    "The order policy alone decides: one client may have all running sequences and all tokens of a step.",
    source="vLLM",
)
@dataclass(frozen=True, slots=True)
class NoParts:
    """Lets each client claim all, so that the order policy alone decides."""

    def __call__(self, view: ShareView) -> NDArray[np.float64]:
        """Return the whole engine for each client."""
        return np.ones(len(view.weight))
