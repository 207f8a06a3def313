"""Agreement on moves: whatever the order of messages, all workers move and commit in the same steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moestro.core.experts.layer_moves import LayerPlan, MoveAction, MoveAgreement
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


class Server:
    """Sends one plan after the other, and cancels some. Its messages reach each worker in order, at any time."""

    def __init__(self, rng: random.Random, workers: list[MoveAgreement]) -> None:
        self._rng, self._workers = rng, workers
        self._queues: list[list[tuple[str, int]]] = [[] for _ in workers]
        self.version, self.has_plan = 0, False

    def act(self) -> None:
        """Send something, and let some of the messages arrive."""
        if not self.has_plan:
            self.version, self.has_plan = self.version + 1, True
            self._send("take")
        elif self._rng.random() < 0.03:
            self._send("cancel")
        for worker, queue in zip(self._workers, self._queues, strict=True):
            while queue and self._rng.random() < 0.4:
                kind, number = queue.pop(0)
                worker.take(plan(number)) if kind == "take" else worker.cancel(number)

    def _send(self, kind: str) -> None:
        for queue in self._queues:
            queue.append((kind, self.version))


@pytest.mark.parametrize("seed", range(30))
def test_law_all_workers_have_the_same_table_whatever_comes_when(seed):
    rng = random.Random(seed)
    workers = [MoveAgreement(0) for _ in range(rng.randrange(1, 5))]
    server, left, ends = Server(rng, workers), 0, []
    for _ in range(400):
        if not server.has_plan:
            left = rng.randrange(4)
        server.act()
        action = open_step(workers)
        if action is MoveAction.MOVE:
            left -= 1
            for worker in workers:
                worker.is_prepared = left <= 0
        if action in {MoveAction.COMMIT, MoveAction.DROP}:
            ends.append(action)
            server.has_plan = False
            assert action is MoveAction.DROP or {worker.version for worker in workers} == {server.version}
    assert ends.count(MoveAction.COMMIT) > 5
    assert len({worker.version for worker in workers}) == 1
