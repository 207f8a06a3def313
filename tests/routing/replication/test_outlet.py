"""An outlet sends a journal that grows while its peer is slow: each operation once, under its own number."""

from __future__ import annotations

import pytest
from support.routers import request, router

from moestro.routing.replication import journal as journals
from moestro.routing.replication.journal import Journal, Outlet, RouterRun, Snapshot
from moestro.routing.replication.replica import Replica, ReplicaRules

MS = 1_000_000
RUN = RouterRun("sender", 1)


@pytest.mark.parametrize("num_more", [3, 30])
def test_operations_that_are_gone_before_their_message_are_replaced_by_a_snapshot(monkeypatch, num_more):
    """They were taken from the wrong end of the list, under the numbers of those that were gone."""
    monkeypatch.setattr(journals, "_MAX_KEPT", 20)
    monkeypatch.setattr(journals, "MAX_OPERATIONS", 7)
    sender, receiver = router(1, "least_loaded"), router(1, "least_loaded")
    sender.journal = Journal(RUN, lambda row: "e")
    outlet = Outlet(sender.journal, beat_ns=MS)
    replica = Replica(RouterRun("receiver", 1), receiver, {"e": 0}.get, rules=ReplicaRules())
    for number in range(15):
        sender.submit(request(f"{number}"), 0)
    messages = [outlet.next_due(0)]
    for number in range(15, 15 + num_more):  # while the message is on its way
        sender.submit(request(f"{number}"), 0)
        sender.ended(f"{number - 15}", 0)
    while (message := outlet.next_due(len(messages))) is not None:
        messages.append(message)
    for message in messages:
        assert replica.receive(message, MS) is None
    assert any(isinstance(message, Snapshot) for message in messages) == (num_more == 30)
    assert (replica.counts.num_differences, replica.counts.num_repeated, replica.counts.num_gaps) == (0, 0, 0)
    assert receiver.load_on(0) == sender.load_on(0) == 15


def test_each_message_has_the_time_of_its_sending():
    """A slow line made a router look silent, because all messages of one look at the journal had one time."""
    sender = router(1, "least_loaded")
    sender.journal = Journal(RUN, lambda row: "e")
    outlet = Outlet(sender.journal, beat_ns=MS)
    for number in range(2 * journals.MAX_OPERATIONS):
        sender.submit(request(f"{number}"), 0)
    assert [outlet.next_due(at).now_ns for at in (5, 9)] == [5, 9]
    assert outlet.next_due(10) is None


@pytest.mark.parametrize("report", ["nothing", "batch", "beat", "snapshot"])
def test_an_end_replaces_an_unreported_first_token(report):
    sender, receivers = router(1, "least_loaded"), [router(1, "least_loaded") for _ in range(2)]
    journal = sender.journal = Journal(RUN, lambda row: "e")
    changes = []
    journal.on_change = lambda: changes.append(journal.head_seq)
    outlets = [Outlet(journal, beat_ns=MS) for _ in receivers]  # of which the second is behind
    replicas = [Replica(RouterRun(f"{at}", 1), it, {"e": 0}.get) for at, it in enumerate(receivers)]
    for number in range(2):
        sender.submit(request(f"{number}"), 0)
    messages = list(outlets[0].due(0)) if report == "beat" else []
    sender.first_token("0", 0)
    if report == "batch":
        messages += outlets[0].due(0)
    elif report == "beat":
        journal.batch(journal.head_seq + 1, 1)  # to another peer, which has all
    elif report == "snapshot":
        assert [began.is_computed for part in journal.snapshot(0) for began in part.flights] == [True, False]
    sender.ended("0", 0)
    is_replaced = report == "nothing"
    assert changes == ([1, 2, 3, 3] if is_replaced else [1, 2, 3, 4])
    messages += outlets[0].due(2 * MS)
    for replica, each in zip(replicas, (messages, list(outlets[1].due(2 * MS))), strict=True):
        operations = [operation for message in each for operation in message.operations]
        names = [type(operation).__name__ for operation in operations]
        assert names == ["Began", "Began", *([] if is_replaced else ["Computed"]), "Finished"]
        assert all(replica.receive(message, MS) is None for message in each)
        assert replica.counts.num_differences == 0
    assert [it.load_on(0) for it in receivers] == [1, 1]
    assert [began.is_computed for part in journal.snapshot(2) for began in part.flights] == [False]
