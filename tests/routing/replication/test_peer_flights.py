"""Requests of other routers in the counts of one: none is taken for a foreign one, whenever it becomes known."""

from __future__ import annotations

from support.routers import request, router

from moestro.core.load_figures import LoadFigures
from moestro.routing.in_flight import PeerRequest
from moestro.routing.router import Router

MS = 1_000_000


def report(it: Router, num_requests: int, as_of_ns: int, prefill: int = 0) -> None:
    figures = LoadFigures(num_waiting=num_requests, num_running=0, queued_prefill_tokens=prefill)
    it.report(0, figures, as_of_ns, as_of_ns + MS)


def counts(it: Router) -> tuple[int, int, int]:
    """In flight, not in the last report, and of routers that are no peers."""
    table = it.table
    return int(table.num_in_flight[0]), int(table.num_unseen[0]), int(table.num_foreign[0])


def began(it: Router, key: str, at_ns: int, now_ns: int, tokens: int = 10) -> None:
    it.began_elsewhere(key, 0, PeerRequest(at_ns, tokens, tokens), now_ns)


def test_a_report_that_includes_a_peers_request_names_no_foreign_one():
    it = router(1, "least_loaded")
    began(it, "p/1/0", 5 * MS, 6 * MS)
    assert counts(it) == (1, 1, 0)
    report(it, 1, 10 * MS)
    assert counts(it) == (1, 0, 0)
    report(it, 3, 20 * MS)
    assert counts(it) == (1, 0, 2)


def test_a_request_that_becomes_known_after_the_report_of_it_is_foreign_no_more():
    it = router(1, "least_loaded")
    it.submit(request("mine"), 1 * MS)
    report(it, 2, 10 * MS, 30)
    assert counts(it) == (1, 0, 1)
    began(it, "p/1/0", 9 * MS, 15 * MS, tokens=29)  # sent before the report, and known after it
    assert counts(it) == (2, 0, 0)
    assert it.table.reported_prefill_tokens[0] == 30, "its tokens are in the report"
    began(it, "p/1/1", 12 * MS, 15 * MS, tokens=7)
    assert counts(it) == (3, 1, 0)
    assert it.table.reported_prefill_tokens[0] == 37
    it.first_token_elsewhere("p/1/1", 16 * MS)
    assert it.table.reported_prefill_tokens[0] == 30
    it.ended_elsewhere("p/1/1", 16 * MS)
    it.ended_elsewhere("p/1/0", 16 * MS)
    assert counts(it) == (1, 0, 0)


def test_a_request_that_has_ended_may_still_be_in_the_next_report():
    it = router(1, "least_loaded")
    began(it, "p/1/0", 5 * MS, 6 * MS)
    it.ended_elsewhere("p/1/0", 20 * MS)
    report(it, 1, 10 * MS)
    assert counts(it) == (0, 0, 0)
    report(it, 1, 30 * MS)
    assert counts(it) == (0, 0, 1)


def test_an_engine_that_was_replaced_keeps_the_requests_without_what_was_reported():
    it = router(1, "least_loaded")
    began(it, "p/1/0", 5 * MS, 6 * MS)
    it.engine_lost(0, 7 * MS)
    assert counts(it) == (1, 0, 0)
    it.ended_elsewhere("p/1/0", 8 * MS)
    assert counts(it) == (0, 0, 0)


def test_a_removed_engine_has_no_requests_of_peers_and_its_number_is_free():
    it = router(2, "least_loaded")
    began(it, "p/1/0", 5 * MS, 6 * MS)
    it.remove_engine(0, 7 * MS)
    began(it, "p/1/1", 8 * MS, 8 * MS)
    assert it.add_engine() == 0
    assert counts(it) == (0, 0, 0)
    it.ended_elsewhere("p/1/0", 9 * MS)
    assert counts(it) == (0, 0, 0)
