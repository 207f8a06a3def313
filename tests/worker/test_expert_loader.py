"""Experts that come while a worker serves: in parts of so many bytes, into slots that nothing uses."""

from __future__ import annotations

import pytest
from support.migrating_group import run_at_once

from moestro.errors import UnsupportedModelError
from moestro.wire.messages import ExpertsPrepared, PrepareExperts
from moestro.worker import peer_inbox
from moestro.worker.peer_inbox import ExpertLoader, near_workers


class Memory:
    expert_bytes = 10

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.error: Exception | None = None

    def read(self, layer, experts):
        if self.error is not None:
            raise self.error
        return [f"weights of {layer}.{expert}" for expert in experts]

    def write(self, layer, slot, expert, weights):
        assert weights == f"weights of {layer}.{expert}"
        self.slots[slot] = expert


@pytest.fixture
def loading(monkeypatch):
    monkeypatch.setattr(peer_inbox.threading, "Thread", run_at_once)
    memory, sent, busy = Memory(), [], set()
    return ExpertLoader(memory, lambda layer, slot: slot not in busy, sent.append), memory, sent, busy


def question(ticket: int, max_bytes: int) -> PrepareExperts:
    return PrepareExperts(ticket=ticket, layer=2, slots=(4, 5, 6), experts=(7, 8, 9), max_bytes=max_bytes)


@pytest.mark.parametrize(("max_bytes", "num_steps"), [(1, 3), (19, 3), (20, 2), (1000, 1)])
def test_a_step_writes_no_more_bytes_than_it_may_but_one_expert_at_least(loading, max_bytes, num_steps):
    loader, memory, sent, _ = loading
    loader.begin(question(1, max_bytes))
    for _ in range(num_steps):
        assert loader.is_busy
        assert sent == []
        loader.step()
    assert memory.slots == {4: 7, 5: 8, 6: 9}
    assert sent == [ExpertsPrepared(1, num_bytes=30)]
    assert not loader.is_busy


def test_a_slot_that_is_used_is_waited_for(loading):
    loader, memory, sent, busy = loading
    busy.add(5)
    loader.begin(question(1, 1000))
    for _ in range(3):
        loader.step()
    assert memory.slots == {4: 7}
    busy.clear()
    loader.step()
    assert sent == [ExpertsPrepared(1, num_bytes=30)]


def test_the_latest_question_counts(loading):
    loader, memory, sent, _ = loading
    loader.begin(question(1, 10))
    loader.step()
    loader.begin(PrepareExperts(ticket=2, layer=2, slots=(5,), experts=(1,), max_bytes=10))
    loader.step()
    assert memory.slots == {4: 7, 5: 1}
    assert sent == [ExpertsPrepared(2, num_bytes=10)]


@pytest.mark.parametrize(
    ("error", "text"), [(UnsupportedModelError("no\nlayer"), "no layer"), (OSError("gone"), "OSError: gone")]
)
def test_experts_that_cannot_be_read_are_reported(loading, error, text):
    loader, memory, sent, _ = loading
    memory.error = error
    loader.begin(question(3, 10))
    loader.step()
    assert sent == [ExpertsPrepared(3, error=text)]
    assert not loader.is_busy


def test_workers_with_the_host_of_an_address_are_near():
    addresses = ("tcp://10.0.0.1:5", "tcp://10.0.0.2:5", "tcp://10.0.0.1:6", "", "tcp://[::1]:7")
    assert near_workers(addresses, 0) == (True, False, True, False, False)
    assert near_workers(("ipc://a/0", "ipc://a/1"), 1) == (True, True)
