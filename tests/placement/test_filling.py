"""Empty slots get the copies that level devices best, for engines that know no empty slot."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.contract import PlaceLimits
from moestro.placement.search.filling import PresentCopies, fill_empty
from moestro.placement.search.problem import held_by


def loads_of(placed: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Load of each device of one layer, if the copies of an expert have equal parts."""
    each = load / np.bincount(placed[placed != EMPTY], minlength=len(load))
    return np.array([sum(each[expert] for expert in held if expert != EMPTY) for held in placed.tolist()])


def test_a_level_layer_stays_level_though_its_hottest_expert_has_the_most_tokens_a_copy():
    # Device 1 has room. A copy of expert 0 there would take half of its load from device 0 and overload device 1.
    placed = np.array([[[0, 1], [2, EMPTY]]])
    filled = fill_empty(placed, np.array([[9.0, 1.0, 10.0]]))
    assert filled.tolist() == [[[0, 1], [2, 1]]]


def test_the_present_expert_stays_where_no_device_becomes_slower_than_the_slowest():
    placed = np.array([[[0, 1], [2, EMPTY]]])
    load = np.array([[6.0, 6.0, 4.0]])
    for present in ([[[0, 1], [2, 1]]], [[[0, 1], [2, 0]]]):
        assert fill_empty(placed, load, PresentCopies(np.array(present), PlaceLimits(), 1)).tolist() == present


def test_the_present_expert_stays_where_the_limits_leave_no_move():
    placed, present = np.array([[[0, 1], [2, EMPTY]]]), np.array([[[0, 1], [2, 0]]])
    load = np.array([[9.0, 1.0, 10.0]])  # expert 1 would level best
    unlimited = PresentCopies(present, PlaceLimits(), 1)
    assert fill_empty(placed, load, unlimited).tolist() == [[[0, 1], [2, 1]]]
    for limits in (PlaceLimits(max_bytes=0), PlaceLimits(max_receives=0)):
        assert fill_empty(placed, load, PresentCopies(present, limits, 1)).tolist() == present.tolist()


@pytest.mark.parametrize("limits", [PlaceLimits(max_receives=1), PlaceLimits(max_bytes=1)])
def test_filling_counts_what_it_moves(limits):
    present = np.array([[[1, 2, 0, 5], [3, 1, 0, 5], [4, 2, 0, 5]]])
    placed = np.array([[[EMPTY, EMPTY, 1, 2], [3, 1, 0, 5], [4, 2, 0, 5]]])
    load = np.array([[20.0, 8.0, 8.0, 20.0, 20.0, 20.0]])  # copies of experts 3 and 4 level best
    unlimited = fill_empty(placed, load, PresentCopies(present, PlaceLimits(), 1))
    assert set(unlimited[0, 0].tolist()) == {1, 2, 3, 4}
    held = set(fill_empty(placed, load, PresentCopies(present, limits, 1))[0, 0].tolist())
    assert (len(held & {3, 4}), len(held & {0, 5})) == (1, 1)


def test_filling_changes_no_more_layers_than_the_limits_allow():
    present = np.array([[[0, 1], [2, 0]], [[0, 1], [2, EMPTY]]])
    load = np.array([[9.0, 1.0, 10.0]] * 2)
    copies = PresentCopies(present, PlaceLimits(max_layers=1), 1)
    placed = np.array([[[0, 1], [2, 0]], [[0, 1], [2, EMPTY]]])
    assert fill_empty(placed, load, copies).tolist() == [[[0, 1], [2, 0]], [[0, 1], [2, 1]]]
    assert copies.limits_beside_filling(3).max_layers == 0


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"max_bytes": 9}, "moves 10 bytes, and the limit is 9"),
        ({"max_receives": 1}, "moves 2 copies to one device, and the limit is 1"),
        ({"max_layers": 1}, "changes 2 layers, and the limit is 1"),
    ],
)
def test_filling_that_must_exceed_a_limit_is_refused(limit, words):
    present = PresentCopies(np.array([[[0, 1], [2, EMPTY]]] * 2), PlaceLimits(**limit), 5)
    with pytest.raises(ValueError, match=f"filling the empty slots {words}"):
        present.limits_beside_filling(3)


@given(st.integers(0, 2**32 - 1), st.integers(0, 6), st.integers(0, 3), st.sampled_from([5, 12, 14]))
def test_filling_never_moves_more_than_the_limits_allow(seed, spare, spare_each, num_slots):
    rng = np.random.default_rng(seed)
    num_layers, num_devices, num_experts, each = 3, 4, 12, 3
    present = np.full((num_layers, num_devices, num_slots), EMPTY)
    for layer, device in np.ndindex(num_layers, num_devices):
        own = np.arange(device * each, (device + 1) * each)
        others = rng.permutation(np.setdiff1d(np.arange(num_experts), own))[: rng.integers(num_slots - each + 1)]
        present[layer, device, : each + len(others)] = np.concatenate([own, others])
    missing = PresentCopies(present, PlaceLimits(), 7).missing(num_experts)
    most = int(missing.sum(axis=0).max()) + spare_each
    copies = PresentCopies(present, PlaceLimits(max_bytes=7 * (int(missing.sum()) + spare), max_receives=most), 7)
    left = copies.limits_beside_filling(num_experts)
    assert (left.max_bytes, left.max_receives) == (7 * spare, spare_each)
    placed = present.copy()
    placed[:, :, each:][rng.random((num_layers, num_devices, num_slots - each)) < 0.5] = EMPTY
    for layer in range(min(num_layers, spare, spare_each)):  # what a policy moves within the limits that are left
        device = int(rng.integers(num_devices))
        lacks, room = np.setdiff1d(np.arange(num_experts), placed[layer, device]), placed[layer, device] == EMPTY
        if len(lacks) and room.any():
            placed[layer, device, room.argmax()] = rng.choice(lacks)
    filled = fill_empty(placed, rng.pareto(1.2, (num_layers, num_experts)), copies)
    assert (filled != EMPTY).all()
    had, has = held_by(present, num_experts)[:, :-1], held_by(filled, num_experts)[:, :-1]
    assert (has.sum(axis=1) == min(num_slots, num_experts)).all()
    received = (has & ~had).sum(axis=1)
    assert received.sum() <= missing.sum() + spare
    assert received.sum(axis=0).max() <= most


@pytest.mark.parametrize("seed", range(20))
def test_filled_slots_keep_what_was_there_and_repeat_nothing_on_a_device(seed):
    rng = np.random.default_rng(seed)
    num_devices, num_experts, num_slots = 4, 12, 5
    experts = rng.permutation(num_experts)
    placed = np.full((1, num_devices, num_slots), EMPTY)
    for nth, expert in enumerate(experts.tolist()):
        placed[0, nth % num_devices, nth // num_devices] = expert
    load = rng.pareto(1.2, (1, num_experts))
    filled = fill_empty(placed, load)
    assert (filled != EMPTY).all()
    assert (filled[placed != EMPTY] == placed[placed != EMPTY]).all()
    assert all(len(set(held)) == num_slots for held in filled[0].tolist())
    # The lightest expert that a device lacks is always a choice, so the slowest device hardly gets slower.
    assert (loads_of(filled[0], load[0]) ** 2).sum() <= (loads_of(placed[0], load[0]) ** 2).sum() * 1.05
