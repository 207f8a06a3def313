"""Factors on the times of stages: devices that are slower than others, and times that vary from stage to stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_DRAWS_AT_ONCE = 1024


class StageJitter:
    """Draws factors with mean 1 from a log-normal distribution, which is skewed to the right as kernel times are.

    Args:
        variation: standard deviation of a factor.
        seed: seeds of the draws.
    """

    def __init__(self, variation: float, *seed: int) -> None:
        self._sigma = math.sqrt(math.log1p(variation**2))
        self._rng = np.random.default_rng(seed)

    def __call__(self, shape: tuple[int, ...]) -> Floats:
        """Draw factors, float64[shape]."""
        return self._rng.lognormal(-(self._sigma**2) / 2, self._sigma, shape)

    def one_by_one(self) -> Iterator[float]:
        """Draw factors without end."""
        while True:
            yield from self((_DRAWS_AT_ONCE,)).tolist()


def item_factors(slowdown: float, jitter: StageJitter | None) -> Callable[[], float] | None:
    """Return a source of factors on the items of one worker. None means that all factors are 1.

    Args:
        slowdown: mean factor of the worker.
        jitter: draws that the worker shares with no other. None means no variation.
    """
    if jitter is not None:
        draws = jitter.one_by_one()
        return lambda: slowdown * next(draws)
    return None if slowdown == 1.0 else lambda: slowdown
