"""Empty slots get the copies that level devices best, for engines that know no empty slot."""

import numpy as np
import pytest

from moestro.core.expert_table import EMPTY
from moestro.placement.filling import fill_empty


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
    assert fill_empty(placed, load, np.array([[[0, 1], [2, 1]]])).tolist() == [[[0, 1], [2, 1]]]
    assert fill_empty(placed, load, np.array([[[0, 1], [2, 0]]])).tolist() == [[[0, 1], [2, 0]]]


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
