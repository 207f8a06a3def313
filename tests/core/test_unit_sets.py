"""Parts of units: everything that belongs to a unit goes with it."""

from __future__ import annotations

import numpy as np
import pytest
from support.random_units import random_units, unit_by_unit

from moestro.core.work import select_units, token_spans


@pytest.mark.parametrize("seed", range(20))
def test_parts_carry_everything_that_a_unit_has(seed):
    rng = np.random.default_rng(seed)
    units = random_units(rng, 8, width=3)
    index = rng.permutation(8)[: rng.integers(1, 9)]
    wanted = [unit_by_unit(units)[i] for i in index]
    assert unit_by_unit(select_units(units, index)) == wanted


def test_spans_lie_end_to_end():
    assert token_spans(np.array([5, 0]), np.array([2, 3])).tolist() == [5, 6, 0, 1, 2]
    assert token_spans(np.array([], int), np.array([], int)).tolist() == []
