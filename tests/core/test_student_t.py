"""Quantiles of Student's t against published tables."""

from __future__ import annotations

import pytest

from moestro.core.rng import student_t_quantile

# NIST/SEMATECH e-Handbook, table 1.3.6.7.2, to three decimals.
TABLE = {
    1: (3.078, 12.706, 63.657),
    2: (1.886, 4.303, 9.925),
    3: (1.638, 3.182, 5.841),
    4: (1.533, 2.776, 4.604),
    9: (1.383, 2.262, 3.250),
    10: (1.372, 2.228, 3.169),
    30: (1.310, 2.042, 2.750),
    99: (1.290, 1.984, 2.626),
}


@pytest.mark.parametrize("degrees", TABLE)
def test_the_quantiles_are_those_of_the_table(degrees):
    found = [student_t_quantile(probability, degrees) for probability in (0.9, 0.975, 0.995)]
    assert found == pytest.approx(TABLE[degrees], abs=5e-4)


def test_many_degrees_of_freedom_come_near_the_normal_distribution():
    assert student_t_quantile(0.975, 10_000) == pytest.approx(1.959964, abs=3e-4)
