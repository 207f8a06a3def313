"""Rounds of moves: they reach the goal, use empty slots alone, and leave no expert without a copy."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.core.experts.expert_table import EMPTY
from moestro.placement.live.async_migration import MoveRound, SlotDrop, SlotLoad, plan_rounds

BOTH = np.ones(2, np.bool_)


def slots(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32)


def test_a_move_loads_the_expert_and_gives_its_former_slot_up():
    (only,) = plan_rounds(slots([0, 1], [2, EMPTY]), slots([0, EMPTY], [1, 2]), BOTH)
    assert only == MoveRound([SlotLoad(1, 1, 1)], [SlotDrop(0, 1, 1)])


def test_an_exchange_takes_one_round_if_both_have_a_free_slot_and_two_if_one_has():
    assert len(plan_rounds(slots([0, EMPTY], [1, EMPTY]), slots([1, EMPTY], [0, EMPTY]), BOTH)) == 1
    first, second = plan_rounds(slots([0, 2], [1, EMPTY]), slots([1, 2], [0, EMPTY]), BOTH)
    assert first == MoveRound([SlotLoad(1, 1, 0)], [SlotDrop(0, 0, 0)])
    assert second == MoveRound([SlotLoad(0, 0, 1)], [SlotDrop(1, 0, 1)])


def test_an_exchange_of_full_workers_goes_through_a_free_slot_of_a_third_one():
    before, goal = slots([0], [1], [EMPTY]), slots([1], [0], [EMPTY])
    rounds = plan_rounds(before, goal, np.ones(3, np.bool_))
    assert rounds[0].loads == [SlotLoad(2, 0, 0)]
    assert len(rounds) == 3


def test_full_workers_exchange_through_a_second_copy():
    assert plan_rounds(slots([0, 2], [1, 2]), slots([1, 2], [0, 2]), BOTH)
    with pytest.raises(ValueError, match="no slot is free"):
        plan_rounds(slots([0, 2], [1, 3]), slots([1, 2], [0, 3]), BOTH)


def test_a_worker_that_does_not_run_keeps_its_slots_and_its_copy_does_not_count():
    takes = np.array([True, False])
    assert plan_rounds(slots([0, EMPTY], [0, 1]), slots([0, 1], [EMPTY, EMPTY]), takes) == [
        MoveRound([SlotLoad(0, 1, 1)], [])
    ]
    with pytest.raises(ValueError, match="expert 0 would have no copy on a worker that runs"):
        plan_rounds(slots([0, EMPTY], [0, 1]), slots([1, EMPTY], [0, EMPTY]), takes)


def test_nothing_to_do_takes_no_round_whatever_the_order():
    assert plan_rounds(slots([0, 1], [2, EMPTY]), slots([1, 0], [EMPTY, 2]), BOTH) == []


def random_slots(rng: np.random.Generator, num_workers: int, num_slots: int, num_experts: int) -> np.ndarray:
    rows = np.full((num_workers, num_slots), EMPTY, np.int32)
    cells = rng.permutation(num_workers * num_slots)
    rows.reshape(-1)[cells[:num_experts]] = rng.permutation(num_experts)
    copies = rng.random() * 1.2
    for cell in cells[num_experts:]:
        others = np.setdiff1d(np.arange(num_experts), rows[cell // num_slots])
        if len(others) and rng.random() < copies:
            rows.reshape(-1)[cell] = rng.choice(others)
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_any_goal_is_reached_unless_all_slots_hold_single_copies(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        num_workers, num_slots = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        num_experts = int(rng.integers(1, num_workers * num_slots + 1))
        now = random_slots(rng, num_workers, num_slots, num_experts)
        goal = random_slots(rng, num_workers, num_slots, num_experts)
        try:
            rounds = plan_rounds(now, goal, np.ones(num_workers, np.bool_))
        except ValueError:
            assert num_experts == num_workers * num_slots
            continue
        for loads, drops in rounds:
            for worker, slot, expert in loads:
                assert now[worker, slot] == EMPTY
                now[worker, slot] = expert
            for worker, slot, expert in drops:
                assert now[worker, slot] == expert
                now[worker, slot] = EMPTY
            assert set(range(num_experts)) <= set(now.reshape(-1).tolist())
        assert [set(row) - {EMPTY} for row in now.tolist()] == [set(row) - {EMPTY} for row in goal.tolist()]
