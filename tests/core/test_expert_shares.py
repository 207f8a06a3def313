"""Shares of experts: each worker's slots, and the tables of groups in which workers come and go."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.core.expert_table import EMPTY, SharedExperts, spread_evenly
from moestro.flow.settings import GroupOptions

EXPERTS = SharedExperts(num_layers=2, num_experts=7, num_shares=3)


def test_shares_are_consecutive_and_equal_within_one():
    assert [EXPERTS.slots_of([share]).tolist() for share in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert EXPERTS.slots_of([2, 0]).tolist() == [5, 6, 0, 1, 2]
    assert EXPERTS.slots_of([]).tolist() == []


def test_a_table_of_one_share_each_is_the_even_one():
    held = ((), (0,), (1,), (2,))
    even = spread_evenly(2, 7, [1, 2, 3], 4)
    assert (EXPERTS.table(0, held, held).logical_of == even.logical_of).all()


def test_shares_that_are_not_used_keep_their_slots():
    table = EXPERTS.table(4, ((0, 1), (1, 2)), ((0,), (1, 2)))
    assert table.version == 4
    assert table.logical_of[0, 0].tolist() == [0, 1, 2, EMPTY, EMPTY]
    assert table.logical_of[1, 1].tolist() == [3, 4, 5, 6, EMPTY]


def test_a_share_that_nobody_uses_is_refused():
    with pytest.raises(ValueError, match="no copy"):
        EXPERTS.table(0, ((0, 1), (1, 2)), ((0,), (1,)))


@pytest.mark.parametrize(("homes", "experts", "copies"), [(2, 3, 1), (1, 3, 2), (3, 0, 1), (3, 0, 3), (2, 4, 4)])
def test_every_share_has_as_many_holders_as_copies(homes, experts, copies):
    options = GroupOptions(attention=homes, experts=experts, expert_copies=copies)
    held = [options.shares_of(worker) for worker in range(options.num_places)]
    holders = np.bincount([share for own in held for share in own], minlength=options.num_shares)
    assert (holders == copies).all()
    assert all(len(set(own)) == len(own) for own in held)
    assert all(
        bool(own) == (worker >= homes if experts else worker < homes)
        for worker, own in enumerate(held[: homes + experts])
    )
