"""The traffic model against a slow count, one token and one row at a time."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.contract import PLACE_POLICIES, Devices, PlacePrices, even_devices
from moestro.placement.score import move_s, moves_between, score

PRICES = PlacePrices(
    token_s=2.0, expert_s=5.0, row_s=(0.0, 1.0, 10.0), expert_bytes=100, move_bytes_per_s=(1e9, 50.0, 10.0)
)


def random_case(seed: int) -> tuple[ExpertLoad, ExpertTable, Devices]:
    rng = np.random.default_rng(seed)
    num_devices, num_layers, num_experts = 4, 2, int(rng.integers(2, 7))
    even = even_devices(num_devices, num_experts, 2)
    is_alive = rng.random(num_devices) < 0.8
    is_alive[0] = True
    has = rng.random((num_devices, num_layers, num_experts)) < 0.5
    has[0] |= ~has[is_alive].any(axis=0)
    logical_of = np.where(has, np.arange(num_experts), EMPTY).astype(np.int32)
    shares = np.where(has & is_alive[:, None, None], rng.random(has.shape) + 0.1, 0.0)
    shares /= shares.sum(axis=0)
    table = ExpertTable(0, logical_of, num_experts, is_alive, shares if seed % 2 else None)
    devices = Devices(even.node_of, even.num_slots, is_alive, rng.random(num_devices) + 0.5, even.source_on)
    tokens = rng.random((num_devices, num_layers, num_experts)) * 9
    load = ExpertLoad(tokens, np.zeros(tokens.shape[1:]), rng.random(tokens.shape[1:]), 10.0)
    return load, table, devices


def part_of(table: ExpertTable, device: int, layer: int, expert: int) -> float:
    """Count the copies one by one."""
    holders = [
        (worker, slot)
        for worker in range(4)
        for slot in range(table.logical_of.shape[2])
        if table.is_alive[worker] and table.logical_of[worker, layer, slot] == expert
    ]
    own = [slot for worker, slot in holders if worker == device]
    return sum(1 / len(holders) if table.shares is None else table.shares[device, layer, slot] for slot in own)


@pytest.mark.parametrize("seed", range(20))
def test_a_placement_costs_what_each_row_of_it_costs(seed):
    load, table, devices = random_case(seed)
    found = score(load, table, devices, PRICES)
    num_sources, num_layers, num_experts = load.tokens.shape
    rows, step_s = [0.0, 0.0, 0.0], 0.0
    for layer in range(num_layers):
        work, received = [0.0] * 4, [0.0] * 4
        for device in range(4):
            for expert in range(num_experts):
                part = part_of(table, device, layer, expert)
                idle = (1 - load.activated[layer, expert]) ** part
                work[device] += 5.0 * (1 - idle)
                for source in range(num_sources):
                    count = load.tokens[source, layer, expert] * part
                    way = 0 if source == device else 1 if source // 2 == device // 2 else 2
                    work[device] += 2.0 * count
                    rows[way] += 2 * count
                    received[device] += count * PRICES.row_s[way]
                    received[source] += count * PRICES.row_s[way]
        step_s += max(work[d] / devices.speed[d] for d in range(4) if devices.is_alive[d]) + max(received)
    assert found.step_s == pytest.approx(step_s)
    assert found.rows == pytest.approx(rows)
    assert found.tokens.sum() == pytest.approx(load.tokens.sum())


def test_both_definitions_of_balance():
    load = ExpertLoad(
        np.array([[[3.0, 1.0], [10.0, 10.0]], [[0.0, 0.0], [0.0, 0.0]]]), np.zeros((2, 2)), np.ones((2, 2)), 1.0
    )
    table = ExpertTable(0, np.array([[[0], [0]], [[1], [1]]], np.int32), 2, np.ones(2, np.bool_))
    found = score(load, table, even_devices(2, 1), PRICES)
    assert found.balance_of_sums == pytest.approx((2 + 10) / (3 + 10))
    assert found.mean_balance == pytest.approx((2 / 3 + 1) / 2)


def test_a_copy_comes_from_the_nearest_live_holder_that_sends_the_fewest():
    devices = even_devices(4, 2, 2)
    old = ExpertTable(0, np.array([[[0, 1]], [[1, 2]], [[2, 3]], [[0, 3]]], np.int32), 4, np.ones(4, np.bool_))
    new = ExpertTable(1, np.array([[[0, 2]], [[1, 3]], [[2, 1]], [[0, 3]]], np.int32), 4, np.ones(4, np.bool_))
    moves = moves_between(old, new, devices)
    found = sorted(zip(moves.expert.tolist(), moves.source.tolist(), moves.target.tolist(), strict=True))
    assert found == [(1, 0, 2), (2, 1, 0), (3, 2, 1)]
    # devices 1 and 2 receive from the other node, device 0 from its own
    assert move_s(moves, devices, PRICES) == pytest.approx(10.0)


def test_every_policy_is_offered_by_name():
    assert "static" in PLACE_POLICIES.names()
