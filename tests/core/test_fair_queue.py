"""Turns of clients in a queue, and who loses a place in a full one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.clients import FairQueue


def test_clients_take_turns():
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "b2", "c1"):
        assert queue.push(item[0], item) is None
    assert [queue.pop() for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    with pytest.raises(IndexError):
        queue.pop()


def test_a_full_queue_takes_the_newest_item_of_the_client_with_most():
    queue: FairQueue[str] = FairQueue(3)
    assert [queue.push("a", item) for item in ("a1", "a2", "a3", "a4")] == [None, None, None, "a4"]
    assert queue.push("b", "b1") == "a3"
    assert queue.push("b", "b2") == "b2", "both would have two"
    assert [queue.pop() for _ in range(3)] == ["a1", "b1", "a2"]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["push", "push", "pop", "discard"])), max_size=100))
def test_law_shares_are_even_and_nothing_is_lost(steps):
    queue: FairQueue[int] = FairQueue(6)
    waiting: list[tuple[int, int]] = []
    for number, (client, what) in enumerate(steps):
        if what == "push":
            loser = queue.push(client, number)
            waiting.append((client, number))
            assert (loser is None) == (len(waiting) <= 6)
            if loser is not None:
                counts = Counter(each for each, _ in waiting)
                [owner] = [each for each, item in waiting if item == loser]
                assert counts[owner] == max(counts.values())
                assert loser == max(item for each, item in waiting if each == owner)
                waiting.remove((owner, loser))
        elif what == "pop" and waiting:
            item = queue.pop()
            [owner] = [each for each, other in waiting if other == item]
            assert item == min(other for each, other in waiting if each == owner)
            waiting.remove((owner, item))
        elif what == "discard" and waiting:
            queue.discard(*waiting.pop(len(waiting) // 2))
            queue.discard(client, -1)
        assert len(queue) == len(waiting)
