"""Moves between two placements of a layer: they lead to the new one, within the limits of each round."""

from __future__ import annotations

import numpy as np
import pytest
from support.moving_tables import random_target

from moestro.core.experts.expert_table import EMPTY, ExpertLayers, ExpertTable, TableMessage, spread_evenly
from moestro.core.experts.layer_moves import moves_between, rounds_of, with_layer

NUM_LAYERS = 4


def two_placements(seed: int) -> tuple[ExpertTable, ExpertTable, np.random.Generator]:
    rng = np.random.default_rng(seed)
    num_workers, num_experts = int(rng.integers(1, 6)), int(rng.integers(6, 20))
    num_slots = -(-num_experts // num_workers) + int(rng.integers(0, 4))
    logical_of = np.full((num_workers, NUM_LAYERS, min(num_slots, num_experts)), EMPTY, np.int32)
    even = spread_evenly(NUM_LAYERS, num_experts, list(range(num_workers)), num_workers).logical_of
    logical_of[:, :, : even.shape[2]] = even
    first = random_target(rng, ExpertTable(0, logical_of, num_experts, np.ones(num_workers, np.bool_)))
    return first, random_target(rng, first), rng


@pytest.mark.parametrize("seed", range(40))
def test_law_moves_in_rounds_lead_to_the_new_placement_and_every_expert_stays_live(seed):
    old_table, new_table, rng = two_placements(seed)
    per_round = int(rng.integers(1, 4))
    for layer in range(NUM_LAYERS):
        old, new = old_table.logical_of[:, layer], new_table.logical_of[:, layer]
        moves = moves_between(old, new)
        rounds = rounds_of(moves, len(old), per_round)
        assert sorted(np.concatenate([*rounds, np.empty(0, np.int64)]).tolist()) == list(range(len(moves.expert)))
        arrived = np.full_like(new, EMPTY)
        most = 0
        for each in rounds:
            sent, taken = (np.bincount(column[each], minlength=len(old)) for column in (moves.source, moves.worker))
            assert max(sent.max(), taken.max()) <= per_round
            # What is sent comes from the old placement, which all workers serve until the commit.
            assert (old[moves.source[each], moves.source_slot[each]] == moves.expert[each]).all()
            arrived[moves.worker[each], moves.slot[each]] = moves.expert[each]
        for column in (moves.source, moves.worker):
            most = max(most, int(np.bincount(column, minlength=1).max(initial=0)))
        assert len(rounds) <= 2 * -(-most // per_round), "each move shares its round with its worker's others"
        assert (np.where(arrived == EMPTY, np.where(old == new, old, EMPTY), arrived) == new).all()


@pytest.mark.parametrize("seed", range(10))
def test_an_expert_crosses_only_to_a_worker_without_it(seed):
    old_table, new_table, _ = two_placements(seed)
    for layer in range(NUM_LAYERS):
        old = old_table.logical_of[:, layer]
        moves = moves_between(old, new_table.logical_of[:, layer])
        for expert, worker, crosses in zip(moves.expert, moves.worker, moves.crosses, strict=True):
            assert crosses == (expert not in old[worker])


def test_holders_of_an_expert_send_in_turn():
    old = np.array([[0], [0], [1], [1]], np.int32)
    new = np.array([[0], [0], [0], [0]], np.int32)
    moves = moves_between(old, new)
    assert moves.source.tolist() == [0, 1]


def test_nothing_moves_to_the_same_placement():
    old = np.array([[0, 1], [2, EMPTY]], np.int32)
    assert rounds_of(moves_between(old, old), 2, 1) == []


@pytest.mark.parametrize("seed", range(5))
def test_layers_one_by_one_make_the_target(seed):
    table, target, _ = two_placements(seed)
    for layer in range(NUM_LAYERS):
        table = with_layer(table, layer + 5, layer, target.logical_of[:, layer], target.slot_parts[:, layer])
    assert table.version == NUM_LAYERS + 4
    assert (table.logical_of == target.logical_of).all()
    assert np.allclose(table.slot_parts, target.slot_parts)


def test_equal_parts_are_no_shares():
    """Policies compare a table's shares with None."""
    even = spread_evenly(2, 4, [0, 1], 2)
    rows = np.array([[0, 1], [2, 3]], np.int32)
    assert with_layer(even, 1, 0, rows, np.ones((2, 2))).shares is None


@pytest.mark.parametrize("seed", range(5))
def test_a_table_comes_back_from_its_message(seed):
    _, table, _ = two_placements(seed)
    experts = ExpertLayers(num_layers=6, layers=(1, 2, 3, 5), num_experts=table.num_experts)
    found = TableMessage.of_table(experts, table).table()
    assert (found.logical_of == table.logical_of).all()
    assert (found.slot_parts == table.slot_parts).all()
    assert (found.version, found.num_experts) == (table.version, table.num_experts)
