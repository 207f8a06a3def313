"""Agreement on moves: whatever the order of messages, all workers move and commit in the same steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moestro.core.layer_moves import LayerPlan
from moestro.core.move_agreement import MoveAction, MoveAgreement
from moestro.errors import InvariantError


def plan(version: int) -> LayerPlan:
    return LayerPlan(version=version, layer=0, num_workers=1, logical_of=b"", parts=b"", max_bytes_per_step=1)


def open_step(workers: list[MoveAgreement]) -> MoveAction:
    gathered = np.stack([worker.numbers() for worker in workers])
    actions = {worker.decide(gathered) for worker in workers}
    assert len(actions) == 1
    (action,) = actions
    if action in {MoveAction.COMMIT, MoveAction.DROP}:
        for worker in workers:
            worker.settled()
    return action


def test_a_plan_waits_for_all_moves_and_is_committed_when_all_are_prepared():
    workers = [MoveAgreement(3), MoveAgreement(3)]
    assert open_step(workers) is MoveAction.REST
    workers[0].take(plan(5))
    assert open_step(workers) is MoveAction.WAIT
    workers[1].take(plan(5))
    assert open_step(workers) is MoveAction.MOVE
    workers[1].is_prepared = True
    assert open_step(workers) is MoveAction.MOVE
    workers[0].is_prepared = True
    assert open_step(workers) is MoveAction.COMMIT
    assert [worker.version for worker in workers] == [5, 5]
    assert open_step(workers) is MoveAction.REST


def test_a_cancelled_plan_is_dropped_by_all_also_where_it_comes_later():
    workers = [MoveAgreement(3), MoveAgreement(3)]
    workers[0].take(plan(4))
    workers[0].cancel(4)
    assert open_step(workers) is MoveAction.DROP
    workers[1].take(plan(4))
    workers[1].cancel(4)
    assert open_step(workers) is MoveAction.REST
    assert [worker.version for worker in workers] == [3, 3]


def test_a_cancellation_that_comes_too_late_changes_nothing():
    workers = [MoveAgreement(0), MoveAgreement(0)]
    for worker in workers:
        worker.take(plan(1))
        worker.is_prepared = True
    workers[0].cancel(1)
    assert open_step(workers) is MoveAction.COMMIT
    workers[1].cancel(1)
    assert open_step(workers) is MoveAction.REST


def test_different_tables_are_an_error():
    with pytest.raises(InvariantError, match=r"tables \[1, 2\]"):
        open_step([MoveAgreement(1), MoveAgreement(2)])


@pytest.mark.parametrize("seed", range(30))
def test_law_all_workers_have_the_same_table_whatever_comes_when(seed):
    """Messages of one server reach each worker in order, and after any number of steps."""
    rng = random.Random(seed)
    workers = [MoveAgreement(0) for _ in range(rng.randrange(1, 5))]
    queues: list[list[tuple[str, int]]] = [[] for _ in workers]
    version, moved, ends = 0, 0, []
    has_plan = False
    for _ in range(400):
        if not has_plan:
            version, moved, has_plan = version + 1, rng.randrange(4), True
            for queue in queues:
                queue.append(("take", version))
        elif rng.random() < 0.03:
            for queue in queues:
                queue.append(("cancel", version))
        for worker, queue in zip(workers, queues, strict=True):
            while queue and rng.random() < 0.4:
                kind, number = queue.pop(0)
                worker.take(plan(number)) if kind == "take" else worker.cancel(number)
        action = open_step(workers)
        if action is MoveAction.MOVE:
            moved -= 1
            for worker in workers:
                assert worker.plan is not None
                worker.is_prepared = moved <= 0
        if action in {MoveAction.COMMIT, MoveAction.DROP}:
            ends.append(action)
            has_plan = False
            assert {worker.version for worker in workers} == {version} or action is MoveAction.DROP
    assert ends.count(MoveAction.COMMIT) > 5
    assert len({worker.version for worker in workers}) == 1
