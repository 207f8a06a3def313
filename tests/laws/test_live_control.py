"""Law of live placement: one migration at a time, which ends in its plan's table or keeps whole layers of the former.

Histories have intervals, drift, cancels, freezes, drains, failing policies, late answers, and workers that die in any
state of a migration.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from support.examples import num_examples
from support.live_control import AsyncWorkers, LiveHistory, LockStepRanks

from moestro.placement.live.control import DecisionOutcome, MigrationOutcome, Trigger
from moestro.placement.live.ep_migration import EpMigration
from moestro.worker import peer_inbox

NUM_TURNS = 600


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Experts are read at once, so that every history can be repeated."""
    run_at_once = lambda target, name, daemon: SimpleNamespace(start=target)  # noqa: E731
    monkeypatch.setattr(peer_inbox.threading, "Thread", run_at_once)


def run_history(seed: int, workers_of, death_rate: float, num_turns: int = NUM_TURNS) -> LiveHistory:
    async def inside() -> LiveHistory:  # The coordinator's start is a future of the loop.
        history = LiveHistory(seed, workers_of)
        for _ in range(num_turns):
            history.turn(death_rate=death_rate)
        history.settle()
        return history

    return asyncio.run(inside())


def run_histories() -> None:
    """Run some histories of a group whose ranks live."""
    for seed in range(4):
        run_history(seed, LockStepRanks, 0.0)


@pytest.mark.parametrize("workers_of", [LockStepRanks, AsyncWorkers], ids=["ep", "async"])
@pytest.mark.parametrize("death_rate", [0.0, 0.01])
def test_any_history_has_one_migration_at_a_time_and_each_ends_in_commit_or_cancel(workers_of, death_rate):
    outcomes, decisions, triggers = set(), set(), set()
    for seed in range(num_examples(3, thorough=200)):
        history = run_history(seed, workers_of, death_rate)
        outcomes |= set(history.control.num_migrations)
        decisions |= set(history.control.num_decisions)
        triggers |= history.triggers
    assert {Trigger.INTERVAL, Trigger.DRIFT, Trigger.OPERATOR} <= triggers
    assert {MigrationOutcome.COMPLETED, MigrationOutcome.CANCELLED} <= outcomes
    assert {DecisionOutcome.STARTED, DecisionOutcome.FAILED} <= decisions


def test_a_cancel_that_does_not_wait_for_the_ranks_is_noticed(monkeypatch):
    monkeypatch.setattr(EpMigration, "cancel", lambda self: self._stop("cancelled"))
    with pytest.raises((AssertionError, ValueError)):
        run_histories()


def test_a_cancel_that_keeps_half_a_layer_is_noticed(monkeypatch):
    real = EpMigration._settled

    def settled(self, found) -> None:
        if not found.is_committed and self._table is not None and self._target is not None:
            self._table.logical_of[:, self._places[0]] = self._target.logical_of[:, self._places[0], ::-1]
        real(self, found)

    monkeypatch.setattr(EpMigration, "_settled", settled)
    with pytest.raises((AssertionError, ValueError)):
        run_histories()


def test_rounds_above_the_budget_are_noticed(monkeypatch):
    monkeypatch.setattr("support.live_control.rounds_of", lambda moves, *_: [slice(None)] if len(moves.expert) else [])
    with pytest.raises(AssertionError, match="bytes between two steps"):
        run_histories()
