"""Moestro's placement policy against the best of all placements, on cases small enough to try them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.contract import Devices, PlaceLimits, PlacePrices, PlaceView
from moestro.placement.policies.moestro import MoestroPlacement
from moestro.placement.score import move_s, moves_between, score

NEAR_OPTIMAL = 1.02
EVEN = MoestroPlacement(weighted=0, risk=0.0)


def tables(num_devices: int, num_slots: int, num_experts: int) -> Iterator[ExpertTable]:
    """Every placement of one layer that covers all experts."""
    held = [c for size in range(num_slots + 1) for c in combinations(range(num_experts), size)]
    for choice in product(held, repeat=num_devices):
        if len(set().union(*choice)) == num_experts:
            rows = [[*each, *[EMPTY] * (num_slots - len(each))] for each in choice]
            yield ExpertTable(0, np.array(rows, np.int32)[:, None], num_experts, np.ones(num_devices, np.bool_))


def view_of(seed: int, num_devices: int, num_slots: int, num_experts: int) -> PlaceView:
    """View of one layer whose load and prices are random, and whose present table is one of all."""
    rng = np.random.default_rng(seed)
    devices = Devices(
        node_of=np.arange(num_devices, dtype=np.int32) % 2,
        num_slots=np.full(num_devices, num_slots, np.int32),
        is_alive=np.ones(num_devices, np.bool_),
        speed=rng.choice([1.0, 1.0, 0.7], num_devices),
        source_on=np.arange(num_devices, dtype=np.int32),
    )
    tokens = rng.lognormal(4.0, 0.8, (num_devices, 1, num_experts))
    load = ExpertLoad(tokens, np.zeros((1, num_experts)), rng.uniform(0.3, 1.0, (1, num_experts)), 100.0)
    prices = PlacePrices(
        token_s=1e-6,
        expert_s=float(rng.choice([0.0, 2e-5])),
        row_s=(0.0, 1e-7, float(rng.choice([1e-7, 1e-6, 3e-6]))),
        expert_bytes=1000,
        move_bytes_per_s=(1e12, 1e7, 1e6),
    )
    every = list(tables(num_devices, num_slots, num_experts))
    limits = PlaceLimits(horizon_steps=float(rng.choice([100.0, 1e6])))
    return PlaceView(load, every[int(rng.integers(len(every)))], devices, prices, limits)


def cost_s(view: PlaceView, table: ExpertTable) -> float:
    """Seconds per step with the share of the move."""
    step_s = score(view.load, table, view.devices, view.prices).step_s
    moving = move_s(moves_between(view.table, table, view.devices), view.devices, view.prices)
    return step_s + (1 + EVEN.hysteresis) * moving / view.limits.horizon_steps


def best_cost_s(view: PlaceView) -> float:
    """The least cost of all placements."""
    num_devices, _, num_slots = view.table.logical_of.shape
    return min(cost_s(view, table) for table in tables(num_devices, num_slots, view.table.num_experts))


@pytest.mark.parametrize("seed", range(60))
def test_without_room_for_copies_the_cost_is_near_the_least(seed):
    num_devices, num_slots = [(2, 2), (2, 3), (3, 2)][seed % 3]
    view = view_of(seed, num_devices, num_slots, num_devices * num_slots)
    assert cost_s(view, EVEN(view)) <= NEAR_OPTIMAL * best_cost_s(view)


@pytest.mark.parametrize("seed", range(40))
def test_with_room_for_copies_the_cost_is_near_the_least(seed):
    num_devices, num_slots, num_experts = [(2, 3, 4), (2, 3, 5), (3, 2, 4), (2, 2, 3)][seed % 4]
    view = view_of(100 + seed, num_devices, num_slots, num_experts)
    assert cost_s(view, EVEN(view)) <= NEAR_OPTIMAL * best_cost_s(view)


@pytest.mark.parametrize("seed", range(10))
def test_shares_of_copies_cost_no_more_than_equal_parts(seed):
    view = replace(view_of(200 + seed, 2, 3, 4), limits=PlaceLimits(horizon_steps=1e6))
    weighted = MoestroPlacement()
    assert cost_s(view, weighted(view)) <= NEAR_OPTIMAL * cost_s(view, EVEN(view))
