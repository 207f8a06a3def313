"""Maxima over devices, made smooth so that a search finds a direction while several devices share a maximum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def smooth_maxima(totals: Floats, sharpness: float) -> Floats:
    """Return the sum over terms of a norm over devices.

    Args:
        totals: float64[rows, terms, devices], not negative.
        sharpness: exponent of the norm, a power of two; infinity gives the maximum.

    Returns:
        float64[rows].
    """
    largest = totals.max(axis=2)
    if np.isinf(sharpness):
        return np.asarray(largest.sum(axis=1))
    ratio = totals / np.maximum(largest, np.finfo(float).tiny)[:, :, None]
    return np.asarray((largest * _power(ratio, sharpness).sum(axis=2) ** (1.0 / sharpness)).sum(axis=1))


def slope_of_maxima(totals: Floats, sharpness: float) -> Floats:
    """Return the slope of `smooth_maxima` at one point, float64[terms, devices].

    Args:
        totals: float64[terms, devices].
    """
    if np.isinf(sharpness):
        is_largest: NDArray[np.bool_] = np.arange(totals.shape[1]) == totals.argmax(axis=1)[:, None]
        return is_largest.astype(np.float64)
    ratio = totals / np.maximum(totals.max(axis=1, keepdims=True), np.finfo(float).tiny)
    powers = _power(ratio, sharpness)
    norm = np.maximum(powers.sum(axis=1, keepdims=True), 1.0)
    slope: Floats = powers / np.maximum(ratio, np.finfo(float).tiny) / norm ** (1.0 - 1.0 / sharpness)
    return slope


def _power(numbers: Floats, exponent: float) -> Floats:
    """Raise to a power of two by squaring, which is many times faster than the general power."""
    for _ in range(int(exponent).bit_length() - 1):
        numbers = numbers * numbers
    return numbers
