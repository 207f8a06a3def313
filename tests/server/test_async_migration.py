"""Migration in a group: two phases by version, and what remains when workers end between any two messages."""

from __future__ import annotations

import numpy as np
import pytest
from server.test_coordinator import LAYERS, Group, in_loop

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.wire.messages import ExpertsPrepared, Members, PrepareExperts, TableServed

NUM_EXPERTS = LAYERS.num_experts


class MovingGroup(Group):
    """One home, and two workers with experts, that serve."""

    def __init__(self, num_redundant: int = 2, **options) -> None:
        super().__init__(**({"attention": 1, "experts": 2} | options), num_redundant=num_redundant)
        self.serve(*self.coordinator.present)
        self.sent.clear()
        self.migration = self.coordinator.migration

    def rows(self) -> list[list[list[int]]]:
        """Experts of each of the first two workers and each layer."""
        return [[sorted({*own} - {EMPTY}) for own in row] for row in self.migration.table.logical_of[:2].tolist()]

    def start(self, *rows: list[list[int]], max_bytes: int = 100) -> None:
        logical_of = np.full_like(self.migration.table.logical_of, EMPTY)
        for row, layers in enumerate(rows):
            for layer, experts in enumerate(layers):
                logical_of[row, layer, : len(experts)] = experts
        self.migration.start(ExpertTable(0, logical_of, NUM_EXPERTS, np.ones(len(logical_of), np.bool_)), max_bytes)

    def question_to(self, worker: int) -> PrepareExperts:
        return [message for message in self.sent[worker] if isinstance(message, PrepareExperts)][-1]

    def prepare(self, *workers: int, **answer) -> None:
        for worker in workers:
            self.hear(ExpertsPrepared(self.question_to(worker).ticket, **({"num_bytes": 10} | answer)), worker)

    def sent_to(self, worker: int) -> Members:
        return [message for message in self.sent[worker] if isinstance(message, Members)][-1]

    def confirm(self, *homes: int) -> None:
        for home in homes:
            self.hear(TableServed(self.sent_to(home).version), home)


EVEN = [[0, 1, 2], [0, 1, 2]], [[3, 4, 5], [3, 4, 5]]
SWAPPED = [[0, 1, 3], [0, 1, 2]], [[2, 4, 5], [3, 4, 5]]  # 2 and 3 of the first layer
BOTH_LAYERS = [[0, 1, 3], [0, 1, 3]], [[2, 4, 5], [2, 4, 5]]


@in_loop
def test_a_layer_is_prepared_then_committed_then_drained():
    group = MovingGroup()
    group.start(*SWAPPED, max_bytes=77)
    question = group.question_to(1)
    assert (question.layer, question.slots, question.experts, question.max_bytes) == (0, (3,), (3,), 77)
    assert group.question_to(2).experts == (2,)
    assert 0 not in group.sent, "homes hear nothing before the commit"
    group.prepare(1)
    assert 0 not in group.sent
    group.prepare(2)
    table = group.sent_to(0).table.whole_table()
    assert table.logical_of[1, 0].tolist() == [0, 1, EMPTY, 3]
    assert table.logical_of[2, 0].tolist() == [EMPTY, 4, 5, 2]
    assert group.rows() == [*map(list, EVEN)], "a home may send by the former table"
    assert group.migration.progress.is_running
    group.confirm(0)
    assert group.rows() == [*map(list, SWAPPED)]
    progress = group.migration.progress
    assert (progress.num_layers, progress.num_committed, progress.num_bytes) == (1, 1, 20)
    assert (progress.is_running, progress.error) == (False, "")


@in_loop
def test_the_next_layer_waits_for_the_homes_and_a_home_that_ends_is_not_waited_for():
    group = MovingGroup(attention=2)
    group.start(*BOTH_LAYERS)
    group.prepare(2, 3)
    group.confirm(0)
    group.hear(TableServed(group.sent_to(1).version - 1), 1)  # of an earlier table
    assert group.question_to(2).layer == 0
    group.end(1)
    assert group.question_to(2).layer == 2
    group.launch(1)
    group.join(1)
    group.prepare(2, 3)
    assert group.migration.progress.num_committed == 1
    group.confirm(0, 1)
    assert group.migration.progress.num_committed == 2
    assert group.rows() == [*map(list, BOTH_LAYERS)]


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_destination_that_is_killed_before_the_commit_leaves_the_former_table(has_answered):
    def test():
        group = MovingGroup()
        group.start(*SWAPPED)
        if has_answered:
            group.prepare(1)
        group.end(1)
        assert group.rows() == [*map(list, EVEN)]
        assert "expert worker 0 ended before" in group.migration.progress.error
        group.prepare(2)  # too late
        assert group.rows() == [*map(list, EVEN)]
        assert group.sent_to(0).table.whole_table().logical_of[2, 0].tolist() == [3, 4, 5, EMPTY]
        group.launch(1)
        assert slots_at_start(group, 1) == [0, 1, 2, EMPTY]
        group.join(1)
        group.start(*SWAPPED)
        group.prepare(1, 2)
        group.confirm(0)
        assert group.rows() == [*map(list, SWAPPED)]

    in_loop(test)()


def slots_at_start(group: Group, worker: int) -> list[int]:
    table = group.coordinator.spec(worker).expert_table(LAYERS.num_layers, NUM_EXPERTS)
    return table.logical_of[worker, 0].tolist()


@in_loop
def test_a_worker_that_is_killed_after_the_commit_starts_with_its_new_experts():
    group = MovingGroup()
    group.start(*SWAPPED)
    group.prepare(1, 2)
    group.end(1)
    assert group.sent_to(0).table.whole_table().logical_of[1, 0].tolist() == [0, 1, EMPTY, 3]
    group.confirm(0)
    group.launch(1)
    assert slots_at_start(group, 1) == [0, 1, EMPTY, 3]
    assert group.migration.progress.num_committed == 1


@in_loop
def test_copies_are_given_up_without_a_load():
    group = MovingGroup(expert_copies=2)
    goal = [[0, 1, 3], [0, 1, 3]], [[0, 2, 4, 5], [0, 2, 4, 5]]
    group.start(*goal)
    group.confirm(0)
    group.confirm(0)
    assert group.rows() == [*map(list, goal)]
    assert not any(isinstance(message, PrepareExperts) for message in group.sent[1] + group.sent[2])


@in_loop
def test_an_expert_stays_where_it_is_if_its_other_copy_runs_no_more():
    """Expert 2 was to leave worker 1, because worker 2 has it; but worker 2 ends meanwhile."""
    group = MovingGroup(experts=3, expert_copies=2, num_redundant=3)
    assert group.rows()[0][0] == [0, 1, 2, 3]
    rows = [[0, 1, 3, 4], [0, 1, 2, 3]], [[2, 3, 4, 5]] * 2, [[0, 1, 4, 5]] * 2
    group.start(*rows)
    group.end(2)
    group.prepare(1)
    assert group.migration.progress.error == ("the other workers that hold expert 2 of layer 0 do not run any more")
    assert group.rows()[0][0] == [0, 1, 2, 3]


@in_loop
def test_a_cancelled_migration_ends_before_the_commit_or_after_the_drain():
    group = MovingGroup()
    group.start(*BOTH_LAYERS)
    group.migration.cancel()
    assert (group.migration.progress.is_running, group.migration.progress.error) == (False, "cancelled")
    group.prepare(1, 2)
    assert group.rows() == [*map(list, EVEN)]
    group.start(*BOTH_LAYERS)
    group.prepare(1, 2)
    group.migration.cancel()
    assert group.migration.progress.is_running
    group.confirm(0)
    assert (group.migration.progress.num_committed, group.migration.progress.error) == (1, "cancelled")
    assert group.rows() == [*map(list, SWAPPED)]
    group.migration.cancel()


@in_loop
def test_an_expert_that_cannot_be_loaded_ends_the_migration():
    group = MovingGroup()
    group.start(*SWAPPED)
    group.prepare(1, error="no such file")
    assert group.migration.progress.error == "expert worker 0 cannot load experts: no such file"
    assert group.rows() == [*map(list, EVEN)]


@in_loop
def test_what_does_not_fit_is_refused():
    group = MovingGroup(num_redundant=0)
    with pytest.raises(ValueError, match=r"layer 0: no slot is free .* --num-redundant-experts"):
        group.start(*SWAPPED)
    with pytest.raises(ValueError, match="shape"):
        group.migration.start(ExpertTable(0, np.zeros((1, 1, 1), np.int32), 1, np.ones(1, np.bool_)), 1)
    group = MovingGroup()
    group.start(*SWAPPED)
    with pytest.raises(ValueError, match="a migration is running"):
        group.start(*SWAPPED)
    group.end(1)
    with pytest.raises(ValueError, match="expert 5 would have no copy"):
        group.start([[0, 1, 2, 5], [0, 1, 2]], [[3, 4], [3, 4, 5]])


@in_loop
def test_slots_are_spread_evenly_and_rounded_up():
    assert MovingGroup(num_redundant=3).migration.table.logical_of.shape[2] == 3 + 2
