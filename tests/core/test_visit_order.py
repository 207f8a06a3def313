"""Orders of visits to the copies of an expert: each copy has its share of any number of visits, within one."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.model.experts.spread_device import PERIOD, visit_orders


def parts_of_order(order: np.ndarray, period: np.ndarray, num_copies: int) -> np.ndarray:
    """float64[experts, copies], shares that the orders have over their periods."""
    is_visit = np.arange(PERIOD) < period[:, None]
    return np.stack([((order == copy) & is_visit).sum(axis=1) / period for copy in range(num_copies)], axis=1)


@pytest.mark.parametrize("num_copies", range(2, 9))
def test_law_every_copy_has_its_share_of_any_number_of_visits_within_one(num_copies):
    parts = np.random.default_rng(num_copies).dirichlet(np.full(num_copies, 0.4), size=60)
    for first in (0, num_copies - 1):
        order, period = visit_orders(parts, first)
        found = parts_of_order(order, period, num_copies)
        assert np.abs(found - parts).max() < 1 / PERIOD
        visits = np.arange(1, 2 * PERIOD + 1)
        twice = np.take_along_axis(order, (visits[None] - 1) % period[:, None], axis=1)
        for copy in range(num_copies):
            due = found[:, copy, None] * visits
            assert np.abs((twice == copy).cumsum(axis=1) - due).max() < 1


def test_equal_parts_are_kept_exactly_and_sources_begin_with_different_copies():
    parts = np.array([[1 / 3] * 3 + [0.0], [0.25] * 4])
    orders = [visit_orders(parts, first)[0][:, :4].tolist() for first in range(3)]
    assert visit_orders(parts, 0)[1].tolist() == [3, 4]
    assert [four for _, four in orders] == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1]]
    assert [three[:3] for three, _ in orders] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_a_copy_without_a_share_is_not_visited():
    order, _ = visit_orders(np.array([[0.3, 0.0, 0.7]]), 1)
    assert set(order[0].tolist()) == {0, 2}


@pytest.mark.parametrize("num_sources", [32, 33, 64])
def test_sources_with_one_visit_each_divide_them_evenly_beside_experts_with_more_copies(num_sources):
    counts = np.arange(2, 9)
    parts = np.where(np.arange(8) < counts[:, None], 1 / counts[:, None], 0.0)
    firsts = np.stack([visit_orders(parts, source)[0][:, 0] for source in range(num_sources)])
    for row, num_copies in enumerate(counts.tolist()):
        visits = np.bincount(firsts[:, row], minlength=num_copies)
        assert visits.max() <= -(-num_sources // num_copies)
        assert visits.min() >= num_sources // num_copies
