"""What Moestro's placement policy keeps to in every group: coverage, limits, payback, determinism."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support.expert_loads import PRICES, even_load, first_table, random_view, zipf_shares

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.errors import ConfigError
from moestro.placement.contract import PLACE_POLICIES, Devices, PlaceLimits, PlaceView, even_devices
from moestro.placement.payback import live_table, payback
from moestro.placement.policies.moestro import MoestroPlacement
from moestro.placement.score import moves_between, score

POLICY = MoestroPlacement()
SEEDS = range(120)


@cache
def answer(seed: int) -> tuple[PlaceView, ExpertTable]:
    """A random view and what the policy makes of it."""
    view = random_view(seed)
    return view, POLICY(view)


def changed_layers(view: PlaceView, new: ExpertTable) -> int:
    """Layers in which a live device holds other experts, or an expert is divided differently."""
    alive = view.devices.is_alive
    differs = (view.table.logical_of != new.logical_of)[alive].any(axis=(0, 2))
    if (old := live_table(view.table, view.devices)) is not None:
        differs |= (np.abs(old.parts - new.parts) > 1e-9).any(axis=(0, 2))
    return int(differs.sum())


def num_lost(view: PlaceView) -> int:
    """Experts of all layers without a copy on a live device."""
    return int((view.table.num_copies[view.devices.is_alive].sum(axis=0) == 0).sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_live_devices_hold_every_expert_in_the_slots_that_they_have(seed):
    view, new = answer(seed)
    assert (new.is_alive == view.devices.is_alive).all()
    is_slot = np.arange(new.logical_of.shape[2]) < view.devices.num_slots[:, None]
    used = np.moveaxis(new.logical_of != EMPTY, 1, 0)
    assert not used[:, ~is_slot].any()
    assert (new.num_copies[view.devices.is_alive].sum(axis=0) >= 1).all()  # the table itself refuses two on one device
    assert new is view.table or new.version == view.table.version + 1


@pytest.mark.parametrize("seed", SEEDS)
def test_what_moves_is_within_the_limits(seed):
    view, new = answer(seed)
    moves, lost = moves_between(view.table, new, view.devices), num_lost(view)
    limits = view.limits
    if limits.max_bytes is not None:
        assert len(moves) <= max(limits.max_bytes // view.prices.expert_bytes, lost)
    if limits.max_receives is not None and not lost:
        assert np.bincount(moves.target, minlength=1).max() <= limits.max_receives
    if limits.max_layers is not None:
        layers_lost = int((view.table.num_copies[view.devices.is_alive].sum(axis=0) == 0).any(axis=1).sum())
        assert changed_layers(view, new) <= max(limits.max_layers, layers_lost)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_change_saves_more_than_it_costs(seed):
    view, new = answer(seed)
    if num_lost(view):
        return
    found = payback(view, new)
    assert found.after.step_s <= found.before.step_s * (1 + 1e-9)
    if len(found.moves):
        assert found.steps is not None
        assert found.steps * (1 + POLICY.hysteresis) <= view.limits.horizon_steps * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(0, 120, 10))
def test_equal_input_gives_an_equal_table(seed):
    first, second = answer(seed)[1], POLICY(random_view(seed))
    np.testing.assert_array_equal(first.logical_of, second.logical_of)
    np.testing.assert_array_equal(first.parts, second.parts)


@pytest.mark.parametrize("seed", range(0, 120, 5))
def test_the_present_table_stays_where_nothing_pays(seed):
    view, new = answer(seed)
    served = live_table(view.table, view.devices)
    if served is None:
        return
    again = replace(view, table=new)
    idle = replace(again, load=ExpertLoad(again.load.tokens * 0, again.load.variance, again.load.activated * 0, 1.0))
    assert POLICY(idle) is new
    assert POLICY(replace(again, limits=PlaceLimits(max_layers=0))) is new


def test_without_a_horizon_nothing_moves_but_shares():
    load = even_load(zipf_shares(4, 16, 0.8), 4)
    view = PlaceView(load, first_table(4, 16, 4, 5), even_devices(4, 5), PRICES, PlaceLimits(horizon_steps=0.0))
    assert POLICY(view) is view.table
    view = replace(view, limits=PlaceLimits(max_receives=0))
    new = POLICY(view)
    assert len(moves_between(view.table, new, view.devices)) == 0
    assert new.shares is not None


def test_a_single_device_keeps_its_table():
    load = even_load(zipf_shares(2, 8, 0.8), 1)
    view = PlaceView(load, first_table(2, 8, 1, 8), even_devices(1, 8), PRICES, PlaceLimits())
    assert POLICY(view) is view.table


@pytest.mark.parametrize("max_receives", [None, 2])
def test_empty_slots_of_a_device_that_joins_are_filled(max_receives):
    load = even_load(zipf_shares(3, 16, 0.6), 4)
    table = first_table(3, 16, 4, 8)
    logical_of = table.logical_of.copy()
    logical_of[:, :, 4:] = EMPTY
    logical_of[3] = EMPTY
    logical_of[0, :, 4:] = logical_of[0, :, :4] + 12
    limits = PlaceLimits(max_receives=max_receives, horizon_steps=1e7)
    view = PlaceView(
        load, ExpertTable(0, logical_of, 16, np.array([True, True, True, False])), even_devices(4, 8), PRICES, limits
    )
    new = POLICY(view)
    before, after = (score(load, each, view.devices, PRICES) for each in (view.table, new))
    assert (new.logical_of[3] != EMPTY).any()
    assert after.mean_balance > before.mean_balance


def test_too_few_live_slots_are_refused():
    even = even_devices(4, 4)
    devices = Devices(even.node_of, even.num_slots, np.array([True, False, True, True]), even.speed, even.source_on)
    view = PlaceView(even_load(zipf_shares(2, 16, 0.6), 4), first_table(2, 16, 4, 4), devices, PRICES, PlaceLimits())
    with pytest.raises(ValueError, match="16 experts do not fit into the 12 slots"):
        POLICY(view)


@pytest.mark.parametrize("text", ["moestro:target=0", "moestro:target=1.1", "moestro:slack=-1", "moestro:rounds=-1"])
def test_settings_out_of_range_are_refused(text):
    with pytest.raises(ConfigError):
        PLACE_POLICIES.make(text)
