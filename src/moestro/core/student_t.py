"""Quantiles of Student's t, for confidence intervals."""

from __future__ import annotations

from math import cos, pi, sin, sqrt, tan

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
