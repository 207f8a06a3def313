"""Pauses that an engine asks for, by client."""

from __future__ import annotations

from moestro.routing.health import Pauses


def test_a_pause_concerns_the_refused_client_alone():
    pauses = Pauses(0)
    pauses.refused("a", 10)
    assert pauses.concern("a", 9)
    assert not pauses.concern("b", 9)
    assert not pauses.concern("a", 10)


def test_the_longest_pause_of_a_client_counts():
    pauses = Pauses(0)
    pauses.refused("a", 10)
    pauses.refused("a", 5)
    assert pauses.concern("a", 9)


def test_refusals_of_one_client_make_no_engine_busy_and_those_of_others_do():
    pauses = Pauses(silence_ns=10)
    assert not any(pauses.overloaded("a", 7, now) for now in range(100))
    assert not any(pauses.overloaded("b", 7, now) for now in (100, 101))
    assert pauses.overloaded("b", 7, 102) == 7


def test_refusals_of_many_clients_make_an_engine_busy():
    pauses = Pauses(silence_ns=10)
    assert not any(pauses.overloaded(client, 7, client) for client in range(10))
    assert pauses.overloaded(10, 7, 10) == 7


def test_an_engine_that_serves_a_request_meanwhile_is_not_busy():
    pauses = Pauses(silence_ns=10)
    refused = [(client, 7, now) for now, client in enumerate("abababab")]
    assert not any(pauses.overloaded(*each) for each in refused)
    pauses.succeeded()
    assert not any(pauses.overloaded(client, 7, 20 + now) for client, _, now in refused)
    assert pauses.overloaded("c", 7, 30)


def test_a_long_pause_that_one_client_gets_is_not_that_of_the_others():
    pauses = Pauses(silence_ns=10)
    for now in range(10):
        pauses.overloaded("a", 60, now)
        pauses.overloaded("b", 5, now)
    assert pauses.overloaded("a", 60, 10) == 5
    pauses.succeeded()
    for now in range(20, 30):
        pauses.overloaded("a", 60, now)
        pauses.overloaded("b", 50, now)
    assert pauses.overloaded("b", 50, 30) == 50


def test_memory_is_bounded_and_pauses_that_are_over_are_forgotten():
    pauses = Pauses(0, max_clients=3)
    for i in range(100):
        pauses.refused(i, 10)
    assert len(pauses) == 3
    assert pauses.concern(99, 0)
    assert not pauses.concern(0, 0)
    assert pauses.last(9)
    assert not pauses.last(10)
    assert not len(pauses)
