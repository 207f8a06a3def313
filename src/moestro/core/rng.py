"""Random draws as a function of a key, independent of history; and quantiles of Student's t.

The same key gives the same draw in any batch, in any order, after any restart.
"""

from __future__ import annotations

from functools import lru_cache
from math import cos, pi, sin, sqrt, tan

import numpy as np
from numpy.typing import NDArray

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's finaliser elementwise: neighbouring inputs give unrelated outputs (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * MIX_1
        x = (x ^ (x >> np.uint64(27))) * MIX_2
    return x ^ (x >> np.uint64(31))


def stream_state(seed: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the part of `uniform` that depends on the seed alone; `model.sampler.uniform_there` has the rest."""
    with np.errstate(over="ignore"):
        return mix64(seed + GAMMA)


def uniform(seed: NDArray[np.uint64], counter: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Draw a number from [0, 1) for each pair (seed, counter).

    Args:
        seed, counter: uint64, shapes that broadcast. For sampling noise the counter is the position of the new token.
    """
    with np.errstate(over="ignore"):
        state = mix64(stream_state(seed) + counter * GAMMA)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


_MASK = (1 << 64) - 1
_GAMMA_INT = 0x9E3779B97F4A7C15


class Draws:
    """Draws for a single decision, in plain integers because there are only one or two.

    Args:
        seed: seed of the run.
        key: key of the decision. The same (seed, key) gives the same draws.
    """

    __slots__ = ("_key", "_num_drawn", "_seed")

    def __init__(self, seed: int, key: int) -> None:
        self._seed, self._key = seed, key
        self._num_drawn = 0  # most decisions draw nothing, so that the state is computed with a draw

    def below(self, n: int) -> int:
        """Draw the next integer from 0 .. n - 1."""
        self._num_drawn += 1
        state = (_state_of(self._seed) + (self._key + self._num_drawn) * _GAMMA_INT) & _MASK
        return _mix(state) * n >> 64


@lru_cache(maxsize=16)  # a process has few seeds
def _state_of(seed: int) -> int:
    return _mix(seed + _GAMMA_INT)


def _mix(x: int) -> int:
    """`mix64` of one plain integer."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


_BISECTIONS = 80  # halve an angle below pi / 2 until doubles have no value between


def student_t_quantile(probability: float, degrees: int) -> float:
    """The quantile of t at `probability` (above 0.5) for a whole number of degrees of freedom."""
    low, high = 0.0, pi / 2
    for _ in range(_BISECTIONS):
        angle = (low + high) / 2
        if (1 + _central_probability(angle, degrees)) / 2 < probability:
            low = angle
        else:
            high = angle
    return sqrt(degrees) * tan((low + high) / 2)


def _central_probability(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(degrees) * tan(angle)), by the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    odd = degrees % 2
    term, total = sin(angle) * (cos(angle) if odd else 1.0), 0.0
    for step in range(1, degrees // 2 + 1):
        total += term
        term *= (2 * step - 1 + odd) / (2 * step + odd) * cos(angle) ** 2
    return (angle + total) * 2 / pi if odd else total
