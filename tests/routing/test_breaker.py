"""When an engine's breaker opens, and how it comes to close again; time is a number here."""

from __future__ import annotations

import random

import pytest

from moestro.routing.breaker import Breaker, BreakerRules, BreakerState

S = 1_000_000_000
RULES = BreakerRules(num_in_row=3, window=8, open_ns=1 * S, max_open_ns=8 * S)


def fail(breaker: Breaker, now_ns: int, times: int = 1, *, at_once: bool = False) -> None:
    for _ in range(times):
        breaker.failed(breaker.sent(), now_ns, at_once=at_once)


@pytest.fixture
def opened() -> Breaker:
    breaker = Breaker(RULES)
    fail(breaker, 0, 3)
    assert breaker.state(0) is BreakerState.OPEN
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not():
    breaker = Breaker(RULES)
    fail(breaker, 0, 2)
    breaker.succeeded(breaker.sent(), 0)
    fail(breaker, 0, 2)
    assert breaker.admits(0)
    fail(breaker, 0)
    assert not breaker.admits(0)
    assert breaker.opens_in_ns(0) == S


def test_half_of_the_last_outcomes_open_it_too_once_there_are_enough():
    breaker = Breaker(RULES)
    for _ in range(3):
        fail(breaker, 0)
        breaker.succeeded(breaker.sent(), 0)
    breaker.succeeded(breaker.sent(), 0)
    assert breaker.admits(0)
    fail(breaker, 0)
    assert not breaker.admits(0)


@pytest.mark.parametrize("num_in_row", [5, 15, 50])
def test_it_takes_as_many_failures_in_a_row_as_were_asked_for(num_in_row):
    for num_before in (0, 100):
        breaker = Breaker(BreakerRules(num_in_row=num_in_row))
        for _ in range(num_before):
            breaker.succeeded(breaker.sent(), 0)
        fail(breaker, 0, num_in_row - 1)
        assert breaker.admits(0)
        fail(breaker, 0)
        assert not breaker.admits(0)


def test_an_engine_that_cannot_be_reached_is_out_after_one_failure():
    breaker = Breaker(RULES)
    fail(breaker, 0, at_once=True)
    assert not breaker.admits(0)


def test_one_probe_at_a_time_and_its_success_closes(opened):
    assert opened.state(S) is BreakerState.PROBING
    probe = opened.sent()
    assert not opened.admits(S)
    opened.succeeded(probe, S)
    assert opened.state(S) is BreakerState.CLOSED


def test_a_probe_whose_client_left_makes_room_for_another(opened):
    probe = opened.sent()
    opened.abandoned(probe)
    assert opened.admits(S)


def test_each_opening_lasts_twice_as_long_up_to_a_bound(opened):
    now = 0
    for seconds in (2, 4, 8, 8):
        now += opened.opens_in_ns(now)
        fail(opened, now)
        assert opened.opens_in_ns(now) == seconds * S


def test_having_been_closed_for_long_sets_the_time_back(opened):
    opened.succeeded(opened.sent(), S)
    fail(opened, 2 * S, 3)
    assert opened.opens_in_ns(2 * S) == 2 * S
    opened.succeeded(opened.sent(), 4 * S)
    fail(opened, 20 * S, 3)
    assert opened.opens_in_ns(20 * S) == S


def test_requests_sent_before_it_opened_say_nothing_about_the_probe():
    breaker = Breaker(RULES)
    early = [breaker.sent() for _ in range(2)]
    fail(breaker, 0, 3)
    probe = breaker.sent()
    breaker.succeeded(early[0], S)
    breaker.failed(early[1], S)
    assert breaker.state(S) is BreakerState.PROBING
    breaker.succeeded(probe, S)
    assert breaker.admits(S)


def test_a_passed_health_check_lets_the_probe_go_at_once(opened):
    opened.check_passed(100)
    assert opened.state(100) is BreakerState.PROBING


def test_law_at_most_one_request_is_out_while_it_is_not_closed():
    rng = random.Random(1)
    for _ in range(200):
        breaker, now, out = Breaker(RULES), 0, []
        for _ in range(200):
            now += rng.choice([0, S // 3, S])
            if rng.random() < 0.5 and breaker.admits(now):
                closed = breaker.state(now) is BreakerState.CLOSED
                out.append((breaker.sent(), closed))
                assert closed or sum(not was_closed for _, was_closed in out) == 1
            elif out:
                mark, _ = out.pop(rng.randrange(len(out)))
                ending = rng.choice([breaker.succeeded, breaker.failed, breaker.failed])
                breaker.abandoned(mark) if rng.random() < 0.2 else ending(mark, now)
            if breaker.state(now) is BreakerState.CLOSED:
                out = [(mark, True) for mark, _ in out]
            assert 0 <= breaker.opens_in_ns(now) <= RULES.max_open_ns
