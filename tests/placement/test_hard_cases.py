"""Policies on loads and devices that break simple code: no load, one hot expert, deaths, uneven nodes, no budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.expert_loads import LONG, PRICES, even_load, first_table, first_view, zipf_shares

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.contract import PLACE_POLICIES, Devices, PlaceLimits, PlaceView, even_devices, origins_of
from moestro.placement.policies.moestro import MoestroPlacement
from moestro.placement.score import moves_between, score, share_moved
from moestro.placement.search.filling import recover, relieve, restore
from moestro.placement.search.problem import allowance_of, present_packing, problem_of
from moestro.placement.search.replicas import share_out

POLICIES = ["moestro", "moestro:weighted=0", "gimbal_v2", "eplb:hierarchy=never", "static"]


def check(view: PlaceView, name: str) -> None:
    """A policy covers all experts within the slots of live devices, and is not slower than the present table."""
    table = PLACE_POLICIES.make(name)(view)
    live = view.devices.is_alive
    is_slot = np.arange(table.logical_of.shape[2]) < view.devices.num_slots[:, None]
    assert not np.moveaxis(table.logical_of != EMPTY, 1, 0)[:, ~is_slot].any()
    if name == "static":
        return
    assert (table.num_copies[live].sum(axis=0) >= 1).all()
    assert (table.logical_of[~live] == EMPTY).all()
    if live.all() and not name.startswith("eplb"):
        before, after = (score(view.load, each, view.devices, view.prices).step_s for each in (view.table, table))
        assert after <= before * (1 + 1e-9)


def shares_of(kind: str, num_layers: int, num_experts: int) -> np.ndarray:
    shares = zipf_shares(num_layers, num_experts, 0.6)
    if kind == "idle layer":
        shares[1] = 0.0
    elif kind == "one expert has 90 %":
        shares *= 0.1
        shares[:, 3] = 0.9
    elif kind == "layers of unequal skew":
        shares = np.stack([zipf_shares(1, num_experts, s)[0] for s in np.linspace(0, 2, num_layers)])
    elif kind == "one expert alone":
        shares[:] = 0.0
        shares[:, 0] = 1.0
    return shares


KINDS = ["idle layer", "one expert has 90 %", "layers of unequal skew", "one expert alone"]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_slots", [4, 5, 16])
def test_loads_of_any_form_are_placed(kind, num_slots, name):
    check(first_view(even_load(shares_of(kind, 3, 16), 4), num_slots), name)


@pytest.mark.parametrize("name", POLICIES)
def test_no_load_at_all_changes_nothing(name):
    check(first_view(even_load(np.zeros((2, 16)), 4), 5), name)


@pytest.mark.parametrize("name", POLICIES[:3])
@pytest.mark.parametrize("per_node", [2, 4, 8])
def test_nodes_of_two_to_eight_devices(per_node, name):
    check(first_view(even_load(zipf_shares(2, 32, 0.8), 8), 5, 8 // per_node), name)


@pytest.mark.parametrize("name", POLICIES[:4])
@pytest.mark.parametrize("num_dead", [1, 2, 3])
def test_deaths_leave_every_expert_a_copy(num_dead, name):
    view = first_view(even_load(zipf_shares(3, 32, 0.8), 8), 8)
    dead = replace(view.devices, is_alive=np.arange(8) >= num_dead)
    check(replace(view, devices=dead), name)


@pytest.mark.parametrize("limits", [PlaceLimits(max_bytes=0), PlaceLimits(max_receives=0), PlaceLimits(max_layers=0)])
@pytest.mark.parametrize("num_devices", [4, 64])
def test_a_budget_of_nothing_moves_nothing(limits, num_devices):
    view = first_view(even_load(zipf_shares(3, 4 * num_devices, 0.8), num_devices), 5, limits=limits)
    table = MoestroPlacement()(view)
    assert len(moves_between(view.table, table, view.devices)) == 0
    if limits.max_layers == 0:
        assert table is view.table


@pytest.mark.parametrize("exponent", [0.4, 0.8])
@pytest.mark.parametrize("start", ["eplb:hierarchy=never", "moestro"])
@pytest.mark.parametrize("device", [0, 31])
def test_after_a_death_under_any_skew_three_percent_of_the_copies_are_enough(device, start, exponent):
    view = first_view(even_load(zipf_shares(20, 256, exponent), 64), 5, 8)
    view = replace(view, table=PLACE_POLICIES.make(start)(view))
    view = replace(view, devices=replace(view.devices, is_alive=np.arange(64) != device))
    table = MoestroPlacement()(view)
    assert share_moved(moves_between(view.table, table, view.devices), view.table) <= 0.03
    assert score(view.load, table, view.devices, view.prices).mean_balance >= 0.95


@pytest.mark.parametrize("seed", range(20))
def test_relief_lowers_the_largest_load_within_its_allowance(seed):
    rng = np.random.default_rng(seed)
    even = even_devices(6, 5, 2)
    devices = Devices(even.node_of, even.num_slots, even.is_alive, rng.choice([1.0, 1.5], 6), even.source_on)
    load = even_load(zipf_shares(4, 20, rng.uniform(0.2, 1.2), seed), 6)
    view = PlaceView(load, first_table(4, 20, 6, 5), devices, PRICES, LONG)
    problem = problem_of(view, origins_of(load, devices), 0.0)
    packing = present_packing(view, problem)
    before = problem.load(packing.work).max(axis=1)
    allowance = allowance_of(PlaceLimits(max_bytes=7 * PRICES.expert_bytes, max_receives=3), PRICES.expert_bytes, 6)
    relieve(problem, packing, problem.even_load(packing.work), 6, allowance)
    assert (problem.load(packing.work).max(axis=1) <= before * (1 + 1e-9)).all()
    received = problem.moved[np.arange(4)[:, None, None], packing.expert, np.arange(6)[:, None]].sum(axis=(0, 2))
    assert received.sum() <= 7
    assert received.max() <= 3
    recover(problem, packing, problem.even_load(packing.work), allowance_of(PlaceLimits(), 1, 6))
    assert np.allclose(packing.work, problem.work(packing.expert, packing.share))
    totals = np.zeros((4, 21))
    np.add.at(totals, (np.arange(4)[:, None, None], packing.expert), packing.share)
    assert np.allclose(totals[:, :20], 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_shares_never_raise_the_largest_load_and_level_what_one_chain_joins(seed):
    rng = np.random.default_rng(seed)
    load = even_load(zipf_shares(3, 12, rng.uniform(0.1, 0.6), seed), 4)
    view = first_view(load, 6)  # 24 slots, so each expert has two copies
    problem = problem_of(view, origins_of(load, view.devices), 0.0)
    packing = present_packing(view, problem)
    before = problem.load(packing.work).max(axis=1)
    share_out(problem, packing, problem.even_load(packing.work), 8)
    after = problem.load(packing.work).max(axis=1)
    assert (after <= before).all()


def test_one_step_levels_devices_that_a_chain_of_copies_joins():
    # Seven experts, each of which two neighbours of eight devices share, the first one heavier than the others.
    tokens = np.array([[[1.3, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]])
    load = ExpertLoad(tokens, np.zeros((1, 7)), np.ones((1, 7)), 100.0)
    slots = np.array([[[0, EMPTY]], *([[nth - 1, nth]] for nth in range(1, 7)), [[6, EMPTY]]], np.int32)
    table = ExpertTable(0, slots, 7, np.ones(8, np.bool_))
    devices = replace(even_devices(8, 2), source_on=np.zeros(1, np.int32))
    view = PlaceView(load, table, devices, PRICES, LONG)
    problem = problem_of(view, origins_of(load, devices), 0.0)
    packing = present_packing(view, problem)
    share_out(problem, packing, problem.even_load(packing.work), 1)
    loads = problem.load(packing.work)
    assert loads.max() <= 1.005 * loads.mean()


def test_poisson_noise_is_no_risk_and_bursts_are():
    tokens = np.full((1, 1, 4), 100.0)
    calm = ExpertLoad(tokens, np.full((1, 4), 100.0), np.ones((1, 4)), 100.0)
    bursty = replace(calm, variance=np.array([[100.0, 100.0, 100.0, 100.0 + 50.0**2]]))
    table, devices = first_table(1, 4, 2, 2), replace(even_devices(2, 2), source_on=np.zeros(1, np.int32))
    plain, hedged = (
        problem_of(PlaceView(load, table, devices, PRICES, LONG), origins_of(load, devices), 1.0).token_s
        for load in (calm, bursty)
    )
    assert np.ptp(plain) == 0.0
    assert hedged[0, 3] == pytest.approx(1.5 * plain[0, 3])


def test_a_lost_expert_is_restored_where_it_harms_least():
    load = even_load(zipf_shares(2, 32, 0.8), 8)
    view = first_view(load, 6)
    view = replace(view, devices=replace(view.devices, is_alive=np.arange(8) != 5))
    problem = problem_of(view, origins_of(load, view.devices), 0.0)
    packing = present_packing(view, problem)
    changed = restore(problem, packing, allowance_of(PlaceLimits(), 1, 7))
    assert len(changed)
    held = packing.held[:, :32].any(axis=2)
    assert held.all()


def test_a_layer_that_lost_all_of_its_load_is_restored():
    load = even_load(np.array([[0.5, 0.3, 0.2, 0.0]]), 2)
    view = first_view(load, 4)
    table = replace(view.table, logical_of=np.array([[[0, 1, 2, EMPTY]], [[3, EMPTY, EMPTY, EMPTY]]], np.int32))
    view = replace(view, table=table, devices=replace(view.devices, is_alive=np.array([False, True])))
    assert (MoestroPlacement()(view).num_copies[1] == 1).all()
