"""The policy `eplb`: the device loads of DeepSeek's placement, no expert twice on a device, and clear refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable, spread_evenly
from moestro.errors import ConfigError
from moestro.placement.contract import PLACE_POLICIES, PlaceLimits, PlacePrices, PlaceView, even_devices
from moestro.placement.eplb import rebalance_experts
from moestro.placement.policies.baselines import Eplb
from moestro.placement.score import score

PRICES = PlacePrices(
    token_s=1e-6, expert_s=1e-5, row_s=(0.0, 1e-7, 1e-6), expert_bytes=1 << 20, move_bytes_per_s=(1e12, 1e11, 1e10)
)


def make_view(total: np.ndarray, num_devices: int, num_slots: int, num_nodes: int = 1, num_groups: int = 1):
    """Spread the experts evenly; all tokens come from the first device."""
    num_layers, num_experts = total.shape
    tokens = np.zeros((num_devices, *total.shape))
    tokens[0] = total
    load = ExpertLoad(tokens, np.zeros(total.shape), np.minimum(total, 1.0), 1.0)
    spread = spread_evenly(num_layers, num_experts, list(range(num_devices)), num_devices).logical_of
    logical_of = np.full((num_devices, num_layers, num_slots), EMPTY, np.int32)
    logical_of[:, :, : spread.shape[2]] = spread
    table = ExpertTable(3, logical_of, num_experts, np.ones(num_devices, np.bool_))
    devices = even_devices(num_devices, num_slots, num_nodes)
    return PlaceView(load, table, devices, PRICES, PlaceLimits(), num_groups)


def random_view(seed: int) -> PlaceView:
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 4))
    num_devices = num_nodes * int(rng.integers(1, 4))
    num_groups = num_nodes * int(rng.integers(1, 3))
    num_experts = num_groups * int(rng.integers(1, 5))
    num_slots = -(-num_experts // num_devices) + int(rng.integers(0, 3))
    # Few hot experts make EPLB put copies of one expert on one device.
    total = rng.integers(0, 1000, (3, num_experts)) ** int(rng.integers(1, 4)) / 7.0
    return make_view(total, num_devices, num_slots, num_nodes, num_groups)


@pytest.mark.parametrize("seed", range(40))
def test_each_device_has_the_load_of_deepseeks_placement(seed):
    view = random_view(seed)
    table = Eplb()(view)
    num_devices, _, num_slots = table.logical_of.shape
    num_nodes = int(view.devices.node_of.max()) + 1
    physical, _, count = rebalance_experts(
        view.load.total, num_devices * num_slots, view.num_groups, num_nodes, num_devices
    )
    slots = physical.reshape(len(physical), num_devices, num_slots)
    num_doubled = 0
    for layer, loads in enumerate(view.load.total):
        for device in range(num_devices):
            held = slots[layer, device]
            expected = sum(loads[expert] / count[layer, expert] for expert in held)
            assert score(view.load, table, view.devices, PRICES).tokens[layer, device] == pytest.approx(expected)
            filled = table.logical_of[device, layer]
            assert sorted(set(held)) == sorted(filled[filled != EMPTY])
            num_doubled += len(held) - len(set(held))
    assert (table.logical_of == EMPTY).sum() == num_doubled
    assert table is view.table or (table.shares is None) == (num_doubled == 0)


def test_some_of_these_cases_have_an_expert_twice_on_a_device():
    assert sum(Eplb()(random_view(seed)).shares is not None for seed in range(40)) >= 10


def test_two_copies_on_a_device_become_one_with_the_shares_of_both():
    """Loads 10 and 1 in six slots: five copies of expert 0, of which each device has two or three."""
    table = Eplb()(make_view(np.array([[10.0, 1.0]]), 2, 3))
    assert table.num_copies[:, 0].tolist() == [[1, 0], [1, 1]]
    assert table.parts[:, 0].tolist() == [[0.6, 0.0], [0.4, 1.0]]
    assert (table.logical_of == EMPTY).sum() == 3


def test_where_every_slot_has_an_expert_each_one_keeps_its_number_of_copies():
    policy, num_doubled = PLACE_POLICIES.make("eplb:hierarchy=never"), 0
    for seed in range(12):
        total = np.random.default_rng(seed).uniform(100, 100 + 20 * seed, (3, 8))
        view = make_view(total, 4, 4)
        _, _, count = rebalance_experts(total, 16, 1, 1, 4)
        table = policy(replace(view, fills_slots=True))
        assert (table.num_copies.sum(axis=0) == count).all()
        num_doubled += bool((policy(view).logical_of == EMPTY).any())
    assert num_doubled > 3, "the rule puts an expert twice on a device"


@pytest.mark.parametrize("seed", range(20))
def test_an_expert_that_stays_on_its_device_stays_in_its_slot(seed):
    view = random_view(seed)
    first = Eplb()(view)
    rng = np.random.default_rng(seed)
    drifted = replace(view, table=first, load=replace(view.load, tokens=view.load.tokens * rng.lognormal(0, 0.3)))
    drifted.load.tokens[0] *= rng.lognormal(0, 0.3, view.load.total.shape)
    second = Eplb()(drifted)
    for device, layer, slot in np.argwhere(first.logical_of != EMPTY):
        expert = first.logical_of[device, layer, slot]
        if expert in second.logical_of[device, layer]:
            assert second.logical_of[device, layer, slot] == expert


@pytest.mark.parametrize("seed", range(10))
def test_the_same_load_changes_nothing_again(seed):
    view = random_view(seed)
    first = Eplb()(view)
    again = replace(view, table=first)
    assert Eplb()(again) is first


def test_groups_stay_on_a_node_where_the_hierarchy_says_so():
    total = np.arange(1.0, 33.0).reshape(1, 32) ** 2
    view = make_view(total, 8, 5, num_nodes=4, num_groups=8)
    held = Eplb("always")(view).num_copies[:, 0].reshape(4, 2, 8, 4).sum(axis=(1, 3))  # [nodes, groups]
    assert ((held > 0).sum(axis=0) == 1).all()
    balance = {
        name: score(view.load, Eplb(name)(view), view.devices, PRICES).mean_balance for name in ("auto", "never")
    }
    assert balance["never"] > balance["auto"]
    assert (Eplb("auto")(view).logical_of == Eplb("always")(view).logical_of).all()
    whole = replace(view, num_groups=1)
    assert (Eplb("auto")(whole).logical_of == Eplb("never")(whole).logical_of).all()
    with pytest.raises(ValueError, match="use hierarchy=auto or never"):
        Eplb("always")(whole)


def test_nodes_may_lie_in_any_order():
    view = make_view(np.arange(1.0, 17.0).reshape(1, 16), 4, 5, num_nodes=2, num_groups=2)
    mixed = replace(view, devices=replace(view.devices, node_of=np.array([0, 1, 0, 1], np.int32)))
    held = Eplb()(mixed).num_copies[:, 0]
    by_node = held[[0, 2]].sum(axis=0), held[[1, 3]].sum(axis=0)
    assert not (by_node[0] * by_node[1]).any()


def test_devices_without_slots_take_no_part():
    view = make_view(np.arange(1.0, 9.0).reshape(1, 8), 4, 4)
    logical_of = np.full((4, 1, 4), EMPTY, np.int32)
    logical_of[2, 0], logical_of[3, 0] = np.arange(4), np.arange(4, 8)
    devices = replace(view.devices, num_slots=np.array([0, 0, 4, 4], np.int32))
    table = Eplb()(replace(view, table=replace(view.table, logical_of=logical_of), devices=devices))
    assert (table.logical_of[:2] == EMPTY).all()
    assert table.num_copies.sum(axis=0).tolist() == [[1] * 8]


def test_dead_devices_get_nothing():
    view = make_view(np.arange(1.0, 9.0).reshape(1, 8), 4, 4, num_nodes=2, num_groups=2)
    devices = replace(view.devices, is_alive=np.array([True, True, False, True]))
    table = Eplb()(replace(view, devices=devices))  # the nodes are no longer alike, so groups do not count
    assert (table.logical_of[2] == EMPTY).all()
    assert not table.is_alive[2]
    assert (table.num_copies.sum(axis=0) >= 1).all()


def test_what_eplb_cannot_place_is_refused_with_a_way_out():
    view = make_view(np.ones((1, 8)), 4, 4, num_nodes=2, num_groups=2)
    change = {
        "no live device has slots": {"is_alive": np.zeros(4, np.bool_)},
        "8 experts do not fit into 4 slots": {"is_alive": np.array([True, False, False, False])},
        "equally many slots": {"num_slots": np.array([4, 4, 4, 3], np.int32)},
        "use hierarchy=auto or never": {"node_of": np.array([0, 0, 0, 1], np.int32)},
    }
    for words, fields in change.items():
        with pytest.raises(ValueError, match=words):
            Eplb("always")(replace(view, devices=replace(view.devices, **fields)))


def test_an_unknown_hierarchy_is_refused():
    assert isinstance(PLACE_POLICIES.make("eplb:hierarchy=never"), Eplb)
    with pytest.raises(ConfigError, match="hierarchy must be one of auto, always, never, got 'sometimes'"):
        PLACE_POLICIES.make("eplb:hierarchy=sometimes")
