"""Shares of experts: the slots with which the workers of a group start."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.core.experts.expert_table import (
    EMPTY,
    ExpertLayers,
    TableMessage,
    experts_of_shares,
    slots_of_shares,
    spread_evenly,
)
from moestro.flow.settings import GroupOptions


def test_shares_are_consecutive_and_equal_within_one():
    assert [experts_of_shares(7, 3, [share]).tolist() for share in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert experts_of_shares(7, 3, [2, 0]).tolist() == [5, 6, 0, 1, 2]
    assert experts_of_shares(7, 3, []).tolist() == []


def test_slots_of_one_share_each_are_the_even_table():
    even = spread_evenly(2, 7, [1, 2, 3], 4)
    assert (slots_of_shares(7, 3, ((), (0,), (1,), (2,))) == even.logical_of[:, 0]).all()


def test_all_workers_have_as_many_slots_as_the_fullest_one_and_the_spare_ones():
    slots = slots_of_shares(7, 3, ((0, 1), (1, 2)), num_spare=1)
    assert slots.tolist() == [[0, 1, 2, 3, 4, EMPTY], [3, 4, 5, 6, EMPTY, EMPTY]]


def test_a_message_has_the_layers_with_experts_and_gives_the_table_of_all_layers():
    experts = ExpertLayers(num_layers=5, layers=(1, 3), num_experts=2)
    logical_of = np.array([[[0, EMPTY], [1, 0]], [[1, EMPTY], [EMPTY, 1]]], np.int32)
    table = TableMessage.of_slots(experts, 7, logical_of, (True, True)).whole_table()
    assert table.version == 7
    assert (table.logical_of == logical_of[:, [0, 0, 0, 1, 1]]).all()
    assert table.is_alive.all()


@pytest.mark.parametrize(("homes", "experts", "copies"), [(2, 3, 1), (1, 3, 2), (3, 0, 1), (3, 0, 3), (2, 4, 4)])
def test_every_share_has_as_many_holders_as_copies(homes, experts, copies):
    options = GroupOptions(attention=homes, experts=experts, expert_copies=copies)
    held = options.first_shares
    holders = np.bincount([share for own in held for share in own], minlength=options.num_shares)
    assert (holders == copies).all()
    assert all(len(set(own)) == len(own) for own in held)
    assert all(
        bool(own) == (worker >= homes if experts else worker < homes)
        for worker, own in enumerate(held[: homes + experts])
    )
