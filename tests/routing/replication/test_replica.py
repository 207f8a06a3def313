"""What one peer's messages do to a router, one by one."""

from __future__ import annotations

from support.routers import router

from moestro.routing.replication.journal import (
    Began,
    Computed,
    Digest,
    Finished,
    OperationBatch,
    RouterRun,
    Snapshot,
    Want,
)
from moestro.routing.replication.replica import MAX_PEERS, Replica, ReplicaRules
from moestro.routing.router import Router

MS = 1_000_000
OWN = RouterRun("own", 1)


def replica() -> tuple[Replica, Router]:
    it = router(1, "least_loaded")
    return Replica(OWN, it, {"e": 0}.get, rules=ReplicaRules()), it


def batch(run: int, first: int, *operations, now_ns=0, head=None, flights=(), name="peer") -> OperationBatch:
    digest = Digest(len(flights), sum(flights))
    head_seq = first + len(operations) - 1 if head is None else head
    return OperationBatch(RouterRun(name, run), first, now_ns, head_seq, digest, list(operations))


def began(serial: int, engine="e", at_ns=0) -> Began:
    return Began(serial, engine, at_ns, 10, 10)


def load(it: Router) -> int:
    return it.load_on(0)


def test_operations_are_applied_once_and_in_order():
    made, it = replica()
    first = batch(5, 1, began(0), began(1), now_ns=1, flights=(0, 1))
    assert made.receive(first, MS) is None
    assert made.receive(first, 2 * MS) is None
    assert (load(it), made.counts.num_repeated) == (2, 2)
    # a part of it is known
    assert made.receive(batch(5, 2, began(1), Finished(0), now_ns=2, flights=(1,)), 3 * MS) is None
    assert load(it) == 1
    # number 4 is missing; it is requested once in a while
    late = batch(5, 5, Finished(1), now_ns=3)
    assert made.receive(late, 4 * MS) == Want(RouterRun("peer", 5), 4)
    assert made.receive(late, 5 * MS) is None
    assert made.receive(late, 60 * MS) == Want(RouterRun("peer", 5), 4)
    assert load(it) == 1


def test_messages_of_an_earlier_run_change_nothing():
    made, it = replica()
    made.receive(batch(4, 1, began(0), now_ns=1, flights=(0,)), MS)
    made.receive(batch(5, 1, began(0), began(1), now_ns=1, flights=(0, 1)), 2 * MS)
    assert load(it) == 2
    assert made.receive(batch(4, 2, Finished(0), now_ns=2), 3 * MS) is None
    assert made.receive(Snapshot(RouterRun("peer", 4), 9, 3, 0, True, [began(7)]), 3 * MS) is None
    assert load(it) == 2


def test_a_digest_that_differs_asks_for_a_snapshot_which_replaces_all():
    made, it = replica()
    differing = batch(5, 1, began(0), began(1), now_ns=1, flights=(0, 3))
    assert made.receive(differing, MS) == Want(RouterRun("peer", 5), None)
    parts = [Snapshot(RouterRun("peer", 5), 2, 2, part, part == 1, [began(3 * part)]) for part in range(2)]
    for part in reversed(parts):  # in any order
        assert made.receive(part, 2 * MS) is None
    assert load(it) == 2
    assert not it.counts_elsewhere("peer/5/1")
    assert it.counts_elsewhere("peer/5/3")
    assert made.receive(batch(5, 3, Finished(3), Finished(0), now_ns=3), 3 * MS) is None
    assert load(it) == 0


def test_own_messages_and_those_of_too_many_peers_change_nothing():
    made, it = replica()
    assert made.receive(batch(9, 1, began(0), now_ns=1, flights=(0,), name="own"), MS) is None
    for number in range(MAX_PEERS + 5):
        made.receive(batch(1, 1, began(0), now_ns=1, flights=(0,), name=f"peer {number}"), MS)
    assert load(it) == made.num_peers == MAX_PEERS
    made.tick(3_000 * MS)
    assert (load(it), made.num_peers) == (0, 0)
    made.tick(700_000 * MS)
    made.receive(batch(1, 1, began(0), now_ns=1, flights=(0,), name="another"), 700_001 * MS)
    assert load(it) == 1


def test_requests_on_unknown_engines_count_once_the_engine_is_known():
    made, it = replica()
    rows: dict[str, int] = {}
    made._row_of = rows.get
    made.receive(batch(5, 1, began(0, "far"), now_ns=1, flights=(0,)), MS)
    assert (load(it), made.num_flights) == (0, 1)
    rows["far"] = 0
    made.engines_changed(2 * MS)
    made.engines_changed(3 * MS)
    assert load(it) == 1
    made.receive(batch(5, 2, Finished(0), now_ns=2), 4 * MS)
    assert load(it) == 0


def test_a_computed_prompt_stays_computed_on_an_engine_that_becomes_known():
    made, it = replica()
    rows: dict[str, int] = {}
    made._row_of = rows.get
    made.receive(batch(5, 1, began(0, "far"), Computed(0), now_ns=1, flights=(0,)), MS)
    rows["far"] = 0
    made.engines_changed(2 * MS)
    assert (load(it), int(it.table.num_prefilling[0])) == (1, 0)
    it.first_token_elsewhere = None  # a request that is counted already is left alone
    made.engines_changed(3 * MS)
