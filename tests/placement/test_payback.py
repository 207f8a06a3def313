"""Whether a change of placement pays for itself."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.contract import Devices, PlaceLimits, PlacePrices, PlaceView, even_devices
from moestro.placement.payback import live_table, payback

PRICES = PlacePrices(
    token_s=1.0, expert_s=0.0, row_s=(0.0, 0.0, 0.0), expert_bytes=100, move_bytes_per_s=(1e9, 50.0, 10.0)
)


def table_of(slots: list[list[int]], num_experts: int, shares: list[list[float]] | None = None) -> ExpertTable:
    given = None if shares is None else np.array(shares)[:, None, :]
    return ExpertTable(0, np.array(slots, np.int32)[:, None, :], num_experts, np.ones(len(slots), np.bool_), given)


def view_of(table: ExpertTable, tokens: list[float], is_alive: list[bool] | None = None) -> PlaceView:
    even = even_devices(table.logical_of.shape[0], table.logical_of.shape[2])
    alive = even.is_alive if is_alive is None else np.array(is_alive)
    devices = Devices(even.node_of, even.num_slots, alive, even.speed, even.source_on)
    figures = np.zeros((devices.num_devices, 1, table.num_experts))
    figures[0, 0] = tokens
    load = ExpertLoad(figures, np.zeros((1, table.num_experts)), np.ones((1, table.num_experts)), 10.0)
    return PlaceView(load, table, devices, PRICES, PlaceLimits())


def test_a_move_pays_after_its_seconds_over_the_seconds_that_it_saves():
    old, new = table_of([[0, 1], [2, 3]], 4), table_of([[0, 3], [2, 1]], 4)
    found = payback(view_of(old, [4.0, 4.0, 1.0, 1.0]), new)
    assert found.before.step_s == 8.0
    assert found.after.step_s == 5.0
    assert len(found.moves) == 2
    assert found.move_s == 2.0
    assert found.steps == pytest.approx(2.0 / 3.0)
    assert found.saved_s == 3.0


@pytest.mark.parametrize("slots", [[[0, 1], [2, 3]], [[2, 1], [0, 3]]])
def test_a_change_that_saves_nothing_never_pays(slots):
    old = table_of([[0, 1], [2, 3]], 4)
    assert payback(view_of(old, [4.0, 1.0, 4.0, 1.0]), table_of(slots, 4)).steps is None


def test_a_change_is_due_at_once_where_an_expert_was_lost():
    old = table_of([[0, 1], [1, EMPTY]], 2)
    view = view_of(old, [1.0, 1.0], is_alive=[False, True])
    logical_of = np.array([[[EMPTY, EMPTY]], [[1, 0]]], np.int32)
    found = payback(view, ExpertTable(1, logical_of, 2, view.devices.is_alive))
    assert live_table(old, view.devices) is None
    assert found.steps == 0.0
    assert found.moves.expert.tolist() == [0]


def test_live_copies_take_over_the_shares_of_dead_ones():
    old = table_of([[0, 1], [0, 1], [0, 1]], 2, [[0.5, 0.2], [0.3, 0.8], [0.2, 0.0]])
    view = view_of(old, [1.0, 1.0], is_alive=[True, False, True])
    left = live_table(old, view.devices)
    assert left is not None
    np.testing.assert_allclose(left.parts[:, 0], [[0.5 / 0.7, 1.0], [0.0, 0.0], [0.2 / 0.7, 0.0]])


def test_a_placement_whose_devices_all_live_is_served_as_it_stands():
    old = table_of([[0, 1], [2, 3]], 4)
    assert live_table(old, view_of(old, [1.0] * 4).devices) is old


def test_what_dead_devices_computed_is_paid_by_live_ones_before_the_change_too():
    old = table_of([[0], [0]], 1)
    view = view_of(old, [4.0], is_alive=[True, False])
    found = payback(view, live_table(old, view.devices))
    assert found.before.step_s == found.after.step_s == 4.0
