"""How far experts and tokens are from each other."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.core.experts.expert_table import ExpertTable, expert_shares, spread_evenly, visit_shares


def test_experts_are_on_the_device_on_the_machine_or_elsewhere():
    parts = spread_evenly(2, 8, [0, 1, 2, 3], 4).parts
    shares = expert_shares(parts, np.array([0, 0, 1, 1]), 4)
    assert shares.shape == (4, 3, 2)
    assert (shares == np.array([0.25, 0.25, 0.5])[:, None]).all()


def test_an_expert_counts_at_its_nearest_copy():
    table = ExpertTable(0, np.array([[[0, 1]], [[1, 2]], [[3, 0]]], np.int32), 4, np.ones(3, np.bool_))
    shares = expert_shares(table.parts, np.array([0, 0, 1]), 3)
    assert shares[:, :, 0].tolist() == [[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.5, 0, 0.5]]


def test_an_engine_without_experts_of_its_own_has_none_on_its_device():
    parts = spread_evenly(1, 4, [2, 3], 4).parts
    assert expert_shares(parts, np.zeros(4, np.int64), 2)[:, :, 0].tolist() == [[0, 1, 0]] * 2


def test_visits_are_counted_by_where_their_copies_are():
    parts = spread_evenly(1, 4, [0, 1, 2, 3], 4).parts
    visits = np.array([[[2.0, 1, 0, 1]], [[0, 0, 0, 0]], [[1, 1, 2, 4]], [[0, 0, 0, 1]]])
    shares = visit_shares(visits, parts, np.array([0, 0, 1, 1]))
    assert shares[0].tolist() == [0.5, 0.25, 0.25]
    assert np.isnan(shares[1]).all()
    assert shares[2].tolist() == [0.25, 0.5, 0.25]
    assert shares[3].tolist() == [1, 0, 0]


@pytest.mark.parametrize("seed", range(10))
def test_law_shares_sum_to_1(seed):
    rng = np.random.default_rng(seed)
    parts = rng.random((4, 2, 8)) * (rng.random((4, 2, 8)) < 0.5)
    parts[0] += 0.01
    parts /= parts.sum(axis=0)
    machines = rng.integers(0, 3, 4)
    assert expert_shares(parts, machines, 3).sum(axis=1) == pytest.approx(1)
    assert visit_shares(rng.random((3, 2, 8)), parts, machines).sum(axis=1) == pytest.approx(1)
