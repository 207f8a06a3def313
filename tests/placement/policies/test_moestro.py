"""Goals of Moestro's placement policy on seeded loads: balance, moves, ways of rows, and deaths."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support.expert_loads import (
    LONG,
    PRICES,
    drifted,
    even_load,
    first_table,
    first_view,
    sticky_load,
    zipf_shares,
)

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.contract import Devices, PlaceView, even_devices
from moestro.placement.policies.moestro import MoestroPlacement
from moestro.placement.score import PlaceScore, moves_between, score, share_moved

NUM_LAYERS = 58


def planned(view: PlaceView, policy: MoestroPlacement | None = None) -> tuple[PlaceScore, float]:
    """Price of the policy's table, and the share of slots that it moves."""
    new = (policy or MoestroPlacement())(view)
    moves = moves_between(view.table, new, view.devices)
    return score(view.load, new, view.devices, view.prices), share_moved(moves, view.table)


@cache
def fitted_view(num_devices: int, num_slots: int, num_experts: int, exponent: float) -> PlaceView:
    """A view whose table the policy made for its load."""
    view = first_view(even_load(zipf_shares(NUM_LAYERS, num_experts, exponent), num_devices), num_slots)
    return replace(view, table=MoestroPlacement()(view))


@pytest.mark.parametrize(
    ("num_devices", "num_slots", "num_experts", "exponent", "least"),
    [
        (32, 9, 256, 0.4, 0.998),
        (32, 9, 256, 0.6, 0.998),
        (32, 9, 256, 0.8, 0.998),
        (64, 5, 256, 0.4, 0.996),
        (64, 5, 256, 0.6, 0.996),
        (64, 5, 256, 0.8, 0.996),
        (8, 18, 128, 0.6, 0.9985),
        (144, 2, 256, 0.4, 0.885),
    ],
)
def test_with_spare_slots_devices_are_equally_loaded(num_devices, num_slots, num_experts, exponent, least):
    view = fitted_view(num_devices, num_slots, num_experts, exponent)
    assert score(view.load, view.table, view.devices, view.prices).mean_balance >= least


@pytest.mark.parametrize("exponent", [0.4, 0.6])
def test_without_spare_slots_devices_are_as_equal_as_the_hottest_expert_allows(exponent):
    shares = zipf_shares(48, 128, exponent)
    found, _ = planned(first_view(even_load(shares, 8), 16))
    balance = found.tokens.mean(axis=1) / found.tokens.max(axis=1)
    bound = np.array([least_of_hot_devices(each) for each in shares])
    assert (balance >= np.minimum(0.995, 0.99 * bound)).all()
    assert balance.mean() >= 0.9985 * bound.mean()


def least_of_hot_devices(shares: np.ndarray) -> float:
    """Largest balance of 8 devices with 16 experts: the k hottest lie on j devices, with the coldest at best."""
    cold = np.concatenate([[0.0], np.cumsum(np.sort(shares))])
    loads = [
        min((1 - cold[128 - k] + cold[16 * j - k]) / j for j in range(1, k + 1) if 16 * j >= k) for k in range(1, 9)
    ]
    return min(1.0, 1 / 8 / max(loads))


@pytest.mark.parametrize(("weighted", "most"), [(0, 196.67), (1, 181.3)])
def test_the_example_of_flashlb_is_solved(weighted, most):
    tokens = np.array([[600.0, 560, 120, 120, 20, 10, 10, 10]])
    found, _ = planned(first_view(even_load(tokens, 8, tokens=1.0), 2), MoestroPlacement(weighted=weighted))
    assert found.tokens.max() <= most


@pytest.mark.parametrize(
    ("num_devices", "num_slots", "target", "least", "most_moved"),
    [
        (64, 5, 0.95, 0.95, 0.02),
        (64, 5, 0.98, 0.98, 0.06),
        (64, 5, 0.998, 0.9975, 0.30),
        (32, 9, 0.95, 0.95, 0.01),
        (32, 9, 0.998, 0.998, 0.20),
    ],
)
def test_after_a_drift_few_copies_move(num_devices, num_slots, target, least, most_moved):
    fitted = fitted_view(num_devices, num_slots, 256, 0.6)
    view = replace(fitted, load=even_load(drifted(zipf_shares(NUM_LAYERS, 256, 0.6), 0.1), num_devices))
    found, moved = planned(view, MoestroPlacement(target=target))
    assert found.mean_balance >= least
    assert moved <= most_moved


def test_shares_alone_level_most_of_a_drift():
    fitted = fitted_view(32, 9, 256, 0.6)
    view = replace(fitted, load=even_load(drifted(zipf_shares(NUM_LAYERS, 256, 0.6), 0.1), 32))
    view = replace(view, limits=replace(LONG, max_receives=0))
    before = score(view.load, view.table, view.devices, view.prices).mean_balance
    found, moved = planned(view)
    assert moved == 0
    assert found.mean_balance >= before + 0.04


@pytest.mark.parametrize(
    ("num_devices", "num_slots", "num_nodes", "num_experts", "saved"),
    [(32, 9, 4, 256, 0.15), (64, 5, 8, 256, 0.06), (2, 64, 2, 128, 0.18)],
)
def test_rows_that_leave_their_node_become_fewer_for_a_percent_of_balance(
    num_devices, num_slots, num_nodes, num_experts, saved
):
    load = sticky_load(zipf_shares(24, num_experts, 0.6), num_devices, num_nodes)
    view = first_view(load, num_slots, num_nodes)
    blind = ExpertLoad(  # the same load from everywhere, so that the plan is for load only
        np.repeat(load.tokens.mean(axis=0, keepdims=True), num_devices, axis=0), load.variance, load.activated, 100.0
    )
    load_only = MoestroPlacement()(replace(view, load=blind))
    before = score(load, load_only, view.devices, PRICES)
    after, _ = planned(view)
    assert after.far_share <= (1 - saved) * before.far_share
    assert after.mean_balance >= before.mean_balance - 0.0125


def with_dead(view: PlaceView, device: int) -> PlaceView:
    """The view after a device died."""
    old = view.devices
    is_alive = np.arange(old.num_devices) != device
    return replace(view, devices=Devices(old.node_of, old.num_slots, is_alive, old.speed, old.source_on))


@pytest.mark.parametrize("device", range(0, 64, 9))
def test_after_a_death_few_copies_cover_all_experts_again(device):
    view = with_dead(fitted_view(64, 5, 256, 0.6), device)
    new = MoestroPlacement()(view)
    moves = moves_between(view.table, new, view.devices)
    assert share_moved(moves, view.table) <= 0.03
    assert score(view.load, new, view.devices, view.prices).mean_balance >= 0.95
    assert (new.logical_of[device] == EMPTY).all()


def test_activated_experts_count_where_their_weights_are_what_takes_time():
    shares = zipf_shares(4, 32, 0.8)
    view = first_view(even_load(shares, 8, tokens=512.0), 6)
    prices = replace(PRICES, token_s=1e-8, expert_s=1e-5, row_s=(0.0, 0.0, 0.0))
    by_reads = planned(replace(view, prices=prices))[0]
    by_tokens = planned(replace(view, prices=replace(prices, token_s=1e-5, expert_s=0.0)))[0]
    assert by_reads.activated.max(axis=1).sum() < by_tokens.activated.max(axis=1).sum()


def test_a_fast_device_gets_more_work():
    speed = np.array([2.0, 1.0, 1.0, 1.0])
    even = even_devices(4, 10)
    devices = Devices(even.node_of, even.num_slots, even.is_alive, speed, even.source_on)
    load = even_load(zipf_shares(6, 32, 0.5), 4)
    view = PlaceView(load, first_table(6, 32, 4, 10), devices, PRICES, LONG)
    found, _ = planned(view)
    work = found.tokens / speed
    assert (work.mean(axis=1) / work.max(axis=1)).min() >= 0.97


def test_a_table_of_another_time_is_replaced_by_fewer_bytes_under_a_limit():
    view = first_view(even_load(zipf_shares(12, 64, 0.8), 8), 10)
    steps = []
    for max_receives in (0, 2, 8, 32):
        limited = replace(view, limits=replace(LONG, max_receives=max_receives))
        new = MoestroPlacement()(limited)
        assert np.bincount(moves_between(view.table, new, view.devices).target, minlength=8).max() <= max_receives
        steps.append(score(view.load, new, view.devices, PRICES).step_s)
    assert steps == sorted(steps, reverse=True)


def test_a_table_is_not_changed_by_its_own_load():
    view = fitted_view(32, 9, 256, 0.6)
    found, moved = planned(view)
    assert moved <= 0.01
    assert found.step_s <= score(view.load, view.table, view.devices, view.prices).step_s
    assert isinstance(view.table, ExpertTable)
