"""The server's side of moves in mode `ep`: layers one by one, cancellations, ends of ranks, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from support.moving_tables import random_target

from moestro.core.experts.expert_table import EMPTY, ExpertLayers, ExpertTable, TableMessage
from moestro.core.experts.layer_moves import SettledLayer
from moestro.errors import NoEngineError
from moestro.placement.live.ep_migration import EpMigration
from moestro.wire.messages import (
    DropLayer,
    ExpertsPlaced,
    LayerMoving,
    LayerSettled,
    MoveLayer,
    Ready,
    decode_from_rank,
    decode_to_rank,
    encode,
)

EXPERTS = ExpertLayers(num_layers=5, layers=(1, 2, 4), num_experts=4)


def first_table() -> ExpertTable:
    logical_of = np.array([[[0, 1, EMPTY]] * 3, [[2, 3, EMPTY]] * 3], np.int32)
    return ExpertTable(0, logical_of, 4, np.ones(2, np.bool_))


class Group:
    """Two ranks that answer when a test says so."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.sent: list[list] = [[], []]
        self.unreachable: set[int] = set()
        self.migration = EpMigration(2, self._send)
        self.migration.on_message(0, ExpertsPlaced(TableMessage.of_table(EXPERTS, first_table())))
        for rank in range(2 if is_ready else 1):
            self.migration.on_message(rank, Ready(None))
        self.rng = np.random.default_rng(1)

    def _send(self, rank: int, message) -> None:
        if rank in self.unreachable:
            raise NoEngineError
        self.sent[rank].append(decode_to_rank(encode(message)))

    def target(self) -> ExpertTable:
        return random_target(self.rng, self.migration.table)

    def settle(self, *, is_committed: bool = True, num_bytes: int = 100) -> None:
        """Report the end of the layer that was sent last."""
        version = next(each.plan.version for each in reversed(self.sent[0]) if isinstance(each, MoveLayer))
        settled = SettledLayer(version=version, is_committed=is_committed, num_bytes=num_bytes)
        self.migration.on_message(0, decode_from_rank(encode(LayerSettled(settled))))


@pytest.fixture
def group() -> Group:
    return Group()


def test_layers_are_sent_one_by_one_to_all_ranks_and_the_table_follows_each_commit(group):
    target = group.target()
    group.migration.start(target, 5000)
    for number in range(3):
        assert len(group.sent[0]) == len(group.sent[1]) == number + 1
        plan = group.sent[1][-1].plan
        assert (plan.layer, plan.version, plan.max_bytes_per_step) == (EXPERTS.layers[number], number + 1, 5000)
        assert (plan.rows() == target.logical_of[:, number]).all()
        assert np.allclose(plan.part_rows(), target.slot_parts[:, number])
        assert (group.migration.table.logical_of[:, number] != target.logical_of[:, number]).any()
        group.settle()
        assert (group.migration.table.logical_of[:, : number + 1] == target.logical_of[:, : number + 1]).all()
        assert group.migration.table.version == number + 1
    progress = group.migration.progress
    assert (progress.num_layers, progress.num_committed, progress.num_bytes) == (3, 3, 300)
    assert (progress.is_running, progress.error) == (False, "")
    assert np.allclose(group.migration.table.slot_parts, target.slot_parts)


def test_bytes_of_a_layer_that_moves_are_progress(group):
    """Otherwise a large layer looks as if it stood still."""
    group.migration.start(group.target(), 1)
    found = []
    for version, num_bytes in ((1, 40), (1, 80), (7, 999)):
        group.migration.on_message(0, decode_from_rank(encode(LayerMoving(version, num_bytes))))
        found.append(group.migration.progress.num_bytes)
    group.settle(num_bytes=100)
    group.migration.on_message(0, LayerMoving(2, 40))
    assert [*found, group.migration.progress.num_bytes] == [40, 80, 80, 140]


def test_layers_that_stay_are_left_out(group):
    logical_of = first_table().logical_of.copy()
    logical_of[0, 1] = [1, 0, 2]
    group.migration.start(ExpertTable(9, logical_of, 4, np.ones(2, np.bool_)), 1)
    assert group.sent[0][-1].plan.layer == 2
    group.settle()
    assert not group.migration.progress.is_running
    group.migration.start(group.migration.table, 1)
    assert group.migration.progress.num_layers == 0
    assert not group.migration.progress.is_running


def test_other_shares_alone_are_a_change(group):
    logical_of = first_table().logical_of.copy()
    logical_of[1, 0, 2] = 0
    shares = np.where(logical_of == EMPTY, 0.0, 1.0)
    shares[0, 0, 0], shares[1, 0, 2] = 0.25, 0.75
    for table in (
        ExpertTable(0, logical_of, 4, np.ones(2, np.bool_)),
        ExpertTable(0, logical_of, 4, np.ones(2, np.bool_), shares),
    ):
        group.migration.start(table, 1)
        assert group.migration.progress.num_layers == 1
        group.settle()
    assert group.migration.table.shares is not None
    assert np.allclose(group.migration.table.shares, shares)


def test_a_cancelled_migration_keeps_the_committed_layers_and_no_other(group):
    target = group.target()
    group.migration.start(target, 1)
    group.settle()
    group.migration.cancel()
    group.migration.cancel()
    assert [each[-1] for each in group.sent] == [DropLayer(2)] * 2
    assert len(group.sent[0]) == 3
    assert group.migration.progress.is_running, "until the ranks have agreed"
    group.settle(is_committed=False, num_bytes=7)
    assert group.migration.progress.error == "cancelled"
    assert group.migration.progress.num_bytes == 107
    assert (group.migration.table.logical_of[:, 0] == target.logical_of[:, 0]).all()
    assert (group.migration.table.logical_of[:, 1:] == first_table().logical_of[:, 1:]).all()
    group.migration.start(target, 1)
    assert group.sent[0][-1].plan.version == 3, "numbers of plans only grow"


def test_a_layer_that_is_committed_meanwhile_counts(group):
    group.migration.start(group.target(), 1)
    group.migration.cancel()
    group.settle()
    progress = group.migration.progress
    assert (progress.num_committed, progress.is_running, progress.error) == (1, False, "cancelled")
    assert group.migration.table.version == 1


def test_the_end_of_a_rank_ends_the_migration_and_the_group_restarts_with_the_committed_table(group):
    target = group.target()
    group.migration.start(target, 1)
    group.settle()
    group.migration.ended(1)
    group.migration.ended(0)
    assert group.migration.progress.error == "engine 1 ended"
    with pytest.raises(ValueError, match="not ready"):
        group.migration.start(target, 1)
    group.settle()  # late
    placed = group.migration.placed
    assert placed is not None
    assert placed.version == 1
    assert placed.experts == EXPERTS
    assert (placed.table().logical_of[:, 0] == target.logical_of[:, 0]).all()
    assert (placed.table().logical_of[:, 1] == first_table().logical_of[:, 1]).all()
    group.migration.on_message(0, ExpertsPlaced(placed))
    for rank in range(2):
        group.migration.on_message(rank, Ready(None))
    group.migration.start(target, 1)
    assert group.sent[0][-1].plan.version == 3, "the second plan of the former group is not mistaken for it"


def test_a_rank_that_cannot_be_reached_ends_the_migration(group):
    group.unreachable = {1}
    group.migration.start(group.target(), 1)
    assert group.sent[0][-1] == DropLayer(1)
    group.settle(is_committed=False)
    assert group.migration.progress.error == "engine 1 could not be reached"


def test_what_does_not_fit_is_refused(group):
    target = group.target()
    with pytest.raises(ValueError, match="must be at least 1"):
        group.migration.start(target, 0)
    with pytest.raises(ValueError, match=r"\(2, 2, 3\), and the group has 4 in \(2, 3, 3\)"):
        group.migration.start(ExpertTable(0, target.logical_of[:, :2], 4, np.ones(2, np.bool_)), 1)
    few = EpMigration(2, lambda *_: None)  # of a network so small that one rank can have all experts
    rows, one = np.array([[[0, 1]], [[0, 1]]], np.int32), ExpertLayers(num_layers=1, layers=(0,), num_experts=2)
    few.on_message(0, ExpertsPlaced(TableMessage.of_table(one, ExpertTable(0, rows, 2, np.ones(2, np.bool_)))))
    for rank in range(2):
        few.on_message(rank, Ready(None))
    with pytest.raises(ValueError, match="dead engines"):
        few.start(ExpertTable(0, rows, 2, np.array([True, False])), 1)
    group.migration.start(target, 1)
    with pytest.raises(ValueError, match="is running"):
        group.migration.start(target, 1)
    with pytest.raises(ValueError, match="not ready"):
        Group(is_ready=False).migration.start(target, 1)
