"""When an engine's breaker opens, and how it comes to close again; time is a number here."""

from __future__ import annotations

import random

import pytest

from moestro.routing.health import BackOff, Breaker, BreakerRules, BreakerState, Origin

S = 1_000_000_000
RULES = BreakerRules(num_witnesses=3, silence_ns=1 * S, open_ns=2 * S, max_open_ns=16 * S)
OTHERS = tuple(Origin(f"client {i}", f"body {i}") for i in range(5))


def fail(breaker: Breaker, now_ns: int, *origins: Origin) -> None:
    for origin in origins:
        breaker.failed(origin, now_ns, now_ns)


@pytest.fixture
def opened() -> Breaker:
    """Opened at 1 s, for 2 s."""
    breaker = Breaker(RULES)
    fail(breaker, 0, *OTHERS[:2])
    fail(breaker, S, OTHERS[2])
    assert breaker.state(S) is BreakerState.OPEN
    return breaker


@pytest.fixture
def unreachable() -> Breaker:
    breaker = Breaker(RULES)
    breaker.unreachable(0)
    return breaker


class TestEvidence:
    def test_failures_of_different_clients_and_bodies_open_it(self, opened):
        assert opened.opens_in_ns(S) == 2 * S

    @pytest.mark.parametrize("origins", [[Origin("one", i) for i in range(99)], [Origin(i, "one") for i in range(99)]])
    def test_failures_of_one_client_or_of_one_body_do_not(self, origins):
        breaker = Breaker(RULES)
        for now_s in range(100):
            fail(breaker, now_s * S, *origins)
        assert breaker.state(100 * S) is BreakerState.CLOSED

    def test_a_success_between_them_keeps_it_closed(self):
        breaker = Breaker(RULES)
        fail(breaker, 0, *OTHERS[:2])
        breaker.succeeded(0, S)
        fail(breaker, 2 * S, *OTHERS[2:4])
        fail(breaker, 9 * S, OTHERS[3])
        assert breaker.state(9 * S) is BreakerState.CLOSED

    def test_output_of_a_running_answer_is_such_a_success(self):
        breaker = Breaker(RULES)
        fail(breaker, 0, *OTHERS[:2])
        breaker.streamed()
        fail(breaker, S, *OTHERS[2:4])
        assert breaker.state(S) is BreakerState.CLOSED

    def test_others_get_time_to_succeed_before_it_opens(self):
        breaker = Breaker(RULES)
        fail(breaker, 0, *OTHERS)
        fail(breaker, S - 1, *OTHERS)
        assert breaker.state(S - 1) is BreakerState.CLOSED
        fail(breaker, S, OTHERS[0])
        assert breaker.state(S) is BreakerState.OPEN

    def test_one_clients_failures_put_it_in_doubt_until_a_success(self):
        breaker = Breaker(RULES)
        fail(breaker, 0, *[OTHERS[0]] * 3)
        assert not breaker.is_in_doubt(S - 1)
        assert breaker.is_in_doubt(S)
        breaker.succeeded(S, S)
        assert not breaker.is_in_doubt(9 * S)


class TestProbing:
    def test_it_admits_requests_after_its_time_and_a_success_closes_it(self, opened):
        opened.check_passed(2 * S)
        assert opened.state(2 * S) is BreakerState.OPEN, "health checks passed all along"
        assert opened.state(3 * S) is BreakerState.PROBING
        assert opened.is_in_doubt(3 * S)
        opened.succeeded(3 * S, 4 * S)
        assert opened.state(4 * S) is BreakerState.CLOSED
        assert not opened.is_in_doubt(9 * S)

    def test_one_client_cannot_keep_it_open(self, opened):
        for now_s in range(3, 30):
            fail(opened, now_s * S, *[Origin("one", i) for i in range(9)])
        assert opened.state(30 * S) is BreakerState.PROBING

    def test_each_opening_lasts_twice_as_long_up_to_a_bound(self, opened):
        now = S
        for seconds in (4, 8, 16, 16):
            now += opened.opens_in_ns(now)
            fail(opened, now, *OTHERS[:2])
            assert opened.opens_in_ns(now) == seconds * S

    def test_requests_from_before_it_opened_neither_close_nor_open_it(self, opened):
        opened.succeeded(0, 4 * S)
        for origin in OTHERS:
            opened.failed(origin, 0, 4 * S)
        assert opened.state(4 * S) is BreakerState.PROBING


class TestUnreachable:
    def test_an_engine_that_cannot_be_reached_is_out_at_once(self, unreachable):
        assert unreachable.state(10**15) is BreakerState.OPEN
        assert unreachable.opens_in_ns(10**15) == RULES.open_ns

    def test_a_passed_check_admits_requests_of_which_one_closes_it(self, unreachable):
        unreachable.check_passed(100)
        assert unreachable.state(100) is BreakerState.PROBING
        unreachable.succeeded(100, 200)
        assert unreachable.state(200) is BreakerState.CLOSED

    def test_it_is_out_again_at_the_next_refused_connection(self, unreachable):
        unreachable.check_passed(100)
        unreachable.unreachable(200)
        assert unreachable.state(10**15) is BreakerState.OPEN


def test_failures_that_ended_long_ago_do_not_lengthen_a_back_off():
    back_off = BackOff(S, 8 * S)
    assert [back_off.next_ns(now_s * S) // S for now_s in range(5)] == [1, 2, 4, 8, 8]
    back_off.end(10 * S)
    assert back_off.next_ns(18 * S - 1) == 8 * S
    back_off.end(20 * S)
    assert back_off.next_ns(28 * S) == S


def test_law_no_history_of_one_client_or_one_body_opens_it():
    """One stranger among requests that may fail or succeed, at any pace, with the breaker in any earlier state."""
    rng = random.Random(2)
    for history in range(300):
        breaker, now, is_client = Breaker(RULES), 0, history % 2 == 0
        if rng.random() < 0.5:
            breaker.unreachable(now)
            breaker.check_passed(now)
        for i in range(100):
            now += rng.choice([0, S // 7, S, 40 * S])
            sent = now - rng.choice([0, 0, 5 * S])
            if rng.random() < 0.1:
                breaker.succeeded(sent, now)
            else:
                breaker.failed(Origin("one", i) if is_client else Origin(i, "one"), sent, now)
            assert breaker.state(now) is not BreakerState.OPEN


def test_law_enough_clients_with_their_own_bodies_open_it():
    """Whatever one stranger adds, and however often each of the others fails."""
    rng = random.Random(3)
    for _ in range(300):
        breaker, now = Breaker(RULES), 0
        honest = [Origin(f"c{i}", f"b{i}") for i in range(RULES.num_witnesses)]
        noise = [Origin("stranger", i) for i in range(50)]
        failures = honest + rng.choices(honest, k=5) + rng.sample(noise, rng.randrange(50))
        rng.shuffle(failures)
        for origin in [*failures, failures[0]]:
            now += S // 7 if origin is not failures[0] else S
            fail(breaker, now, origin)
            if breaker.state(now) is BreakerState.OPEN:
                break
        assert breaker.state(now) is BreakerState.OPEN


def test_law_a_success_a_second_keeps_it_closed_whatever_fails():
    rng = random.Random(4)
    for _ in range(100):
        breaker, now, due = Breaker(RULES), 0, 0
        for i in range(200):
            now += rng.choice([0, S // 50, S // 7])
            if now >= due:
                breaker.succeeded(now, now)
                due = now + S // 2
            fail(breaker, now, Origin(i, i))
            assert breaker.state(now) is BreakerState.CLOSED
