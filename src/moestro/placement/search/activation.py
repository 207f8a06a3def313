"""How often copies of experts get no token, and so read no weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def idle_parts(idle: NDArray[np.float64], share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the fractions of steps in which copies get no token: `idle ** share`.

    Most copies are their expert's only one, or never idle. Their powers are known, and NumPy's powers of 0 are slow.

    Args:
        idle: Fractions of steps without a token of the expert.
        share: Parts of its tokens that the copies get, of the same shape; above 0 where the result is used.
    """
    parts = idle.copy()
    np.power(idle, share, out=parts, where=(idle > 0) & (share < 1))
    return parts
