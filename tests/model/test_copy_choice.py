"""Choice of copies: the split follows the shares within one visit per expert, whatever the sizes of batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.moving_tables import random_target

from moestro.core.experts.expert_table import EMPTY, ExpertTable, spread_evenly
from moestro.model.experts.spread_device import PERIOD, CopyChoice

CPU = torch.device("cpu")


def random_rows(seed: int, *, has_shares: bool) -> tuple[np.ndarray, np.ndarray, int]:
    rng = np.random.default_rng(seed)
    num_workers, num_experts = int(rng.integers(2, 6)), int(rng.integers(8, 20))
    even = spread_evenly(1, num_experts, list(range(num_workers)), num_workers)
    logical_of = np.full((num_workers, 1, min(even.logical_of.shape[2] + 4, num_experts)), EMPTY, np.int32)
    logical_of[:, :, : even.logical_of.shape[2]] = even.logical_of
    table = random_target(rng, ExpertTable(0, logical_of, num_experts, even.is_alive), has_shares=has_shares)
    return table.logical_of[:, 0], table.slot_parts[:, 0], num_experts


@pytest.mark.parametrize("has_shares", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_law_the_split_follows_the_shares_within_one_visit_whatever_the_batches(seed, has_shares):
    rng = np.random.default_rng(seed)
    rows, parts, num_experts = random_rows(seed, has_shares=has_shares)
    choice = CopyChoice(rows, parts, num_experts, worker=seed % len(rows), device=CPU)
    visits, total = np.zeros(rows.size), np.zeros(num_experts)
    popularity = rng.dirichlet(np.full(num_experts, 0.5))
    rounding = 1 / PERIOD if has_shares else 0.0
    for size in rng.choice([0, 1, 2, 7, 60, 900], 40).tolist():
        experts = rng.choice(num_experts, size, p=popularity)
        slots = choice.slots_for(torch.from_numpy(experts)).numpy()
        assert (rows.reshape(-1)[slots] == experts).all()
        visits += np.bincount(slots, minlength=rows.size)
        total += np.bincount(experts, minlength=num_experts)
        due = parts.reshape(-1) * np.where(rows.reshape(-1) == EMPTY, 0, total[rows.reshape(-1)])
        of_slot = np.where(rows.reshape(-1) == EMPTY, 0, total[rows.reshape(-1)])
        assert (np.abs(visits - due) < 1 + rounding * of_slot + 1e-9).all()
    assert choice.slots_for(torch.empty(0, dtype=torch.int64)).tolist() == []


def test_the_place_in_a_batch_alone_decides_nothing():
    """Batches of one token each visit all copies in turn, and so do the tokens of one batch."""
    rows, parts = np.array([[0], [0]], np.int32), np.full((2, 1), 0.5)
    alone = CopyChoice(rows, parts, 1, worker=0, device=CPU)
    expert = torch.zeros(1, dtype=torch.int64)
    assert [int(alone.slots_for(expert)) for _ in range(4)] == [0, 1, 0, 1]
    together = CopyChoice(rows, parts, 1, worker=1, device=CPU)
    assert together.slots_for(expert.repeat(5)).tolist() == [1, 0, 1, 0, 1]
    assert together.slots_for(expert.repeat(2)).tolist() == [0, 1]


def test_a_single_copy_is_visited_by_all():
    choice = CopyChoice(np.array([[1, EMPTY], [0, 2]], np.int32), np.array([[1.0, 0], [1, 1]]), 3, 0, CPU)
    assert choice.slots_for(torch.tensor([0, 1, 2, 2])).tolist() == [2, 0, 3, 3]
