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


@pytest.mark.parametrize("is_told", [False, True])
def test_the_end_of_an_answer_takes_the_place_of_its_first_token_unless_a_message_has_told_of_it(is_told):
    sender, receiver = router(1, "least_loaded"), router(1, "least_loaded")
    sender.journal = Journal(RUN, lambda row: "e")
    outlet = Outlet(sender.journal, beat_ns=MS)
    replica = Replica(RouterRun("receiver", 1), receiver, {"e": 0}.get, rules=ReplicaRules())
    for number in range(2):
        sender.submit(request(f"{number}"), 0)
    sender.first_token("0", 0)
    messages = list(outlet.due(0)) if is_told else []
    sender.ended("0", 0)
    messages += outlet.due(1)
    operations = [type(each).__name__ for message in messages for each in message.operations]
    assert operations == ["Began", "Began", *(["Computed"] if is_told else []), "Finished"]
    for message in messages:
        assert replica.receive(message, MS) is None
    assert (receiver.load_on(0), replica.counts.num_differences) == (1, 0)
    snapshots = sender.journal.snapshot(2)
    assert [began.is_computed for part in snapshots for began in part.flights] == [False]
