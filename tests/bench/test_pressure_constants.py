"""`bench/simulator/pressure_constants.py`: its error falls with more visits, and it sweeps the values in use."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from moestro.core.experts import expert_load

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from simulator import pressure_constants as bench


@pytest.fixture(scope="module")
def found() -> list[bench.Domain]:
    domains = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        weights = rng.permutation(np.arange(1, 33) ** -0.8)
        race = rng.exponential(size=(2_000, 2, 32)) / weights
        rows = race.argsort(axis=2)[:, :, :4].astype(np.uint8)
        domains.append(bench.domain_of(rows))
    return domains


def test_more_visits_make_a_better_estimate(found):
    few, many = (
        np.mean([bench.run(found, rate, bench.HALF_LIFE_S, seed, "long")[0] for seed in range(3)]) for rate in (1, 500)
    )
    assert many < 0.9 * few


def test_the_values_in_use_are_swept_and_the_prior_is_put_back(found):
    before = expert_load.PRIOR_VISITS
    assert before in bench.PRIORS
    assert bench.HALF_LIFE_S in bench.HALF_LIVES_S
    with bench.prior(5.0):
        assert expert_load.PRIOR_VISITS == 5.0
    assert before == expert_load.PRIOR_VISITS


def test_visits_are_counted_by_layer_and_expert():
    domain = bench.domain_of(np.array([[[0, 3], [3, 1]], [[0, 2], [1, 2]]], np.uint8))
    assert (2 * domain.visits[0]).tolist()[:4] == [2, 0, 1, 1]
    assert (2 * domain.visits[1]).tolist()[:4] == [0, 2, 1, 1]
