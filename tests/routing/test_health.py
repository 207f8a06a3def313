"""The verdict on an engine: checks, answers, silence, the operator; time is a number here."""

from __future__ import annotations

import pytest

from moestro.routing.health import BreakerRules, Condition, Health, HealthRules, Origin

S = 1_000_000_000
RULES = HealthRules(num_failed_checks=2, stall_ns=30 * S, slow_start_ns=10 * S, breaker=BreakerRules(open_ns=5 * S))


@pytest.fixture
def health() -> Health:
    health = Health(RULES, 0)
    health.checked(0, passed=True)
    assert health.condition(0, 0, 0) is Condition.UP
    return health


def refuse(health: Health, for_ns: int | None, now_ns: int) -> None:
    """Refuse requests of several clients, the first of which came a second before."""
    health.refused("a", for_ns, now_ns - S, is_overloaded=True)
    for client in "bcd":
        health.refused(client, for_ns, now_ns, is_overloaded=True)


def test_an_engine_gets_nothing_before_its_first_check_has_passed():
    health = Health(RULES, 0)
    assert health.condition(0, 0, 0) is Condition.UNCHECKED
    health.checked(0, passed=False)
    assert health.condition(0, 0, 0) is Condition.UNCHECKED
    assert health.wait_ns(0) is None


def test_failed_checks_in_a_row_take_it_out_and_one_that_passes_brings_it_back(health):
    health.checked(10 * S, passed=False)
    assert health.condition(0, 0, 10 * S) is Condition.UP
    health.checked(15 * S, passed=False)
    assert health.condition(0, 0, 15 * S) is Condition.DOWN
    assert health.wait_ns(15 * S) is None
    health.checked(20 * S, passed=True)
    assert health.condition(0, 0, 20 * S) is Condition.UP


def test_an_engine_without_requests_is_found_to_be_down_too(health):
    for second in (10, 15):
        health.checked(second * S, passed=False)
        found = health.condition(0, 0, second * S)
    assert found is Condition.DOWN


def test_checks_that_fail_while_answers_flow_do_not_count(health):
    for second in range(10):
        health.progressed(5, second * S)
        health.checked(second * S, passed=False)
    assert health.condition(5, 5, 9 * S) is Condition.UP


def test_an_engine_that_cannot_be_reached_is_out_until_a_check_and_a_success(health):
    health.breaker.unreachable(0)
    assert health.condition(0, 0, S) is Condition.OPEN
    assert health.wait_ns(S) == RULES.breaker.open_ns
    health.checked(5 * S, passed=True)
    assert health.condition(0, 0, 5 * S) is Condition.PROBING
    assert health.share(5 * S) == 0.0
    health.succeeded(5 * S, 6 * S)
    assert health.condition(0, 0, 6 * S) is Condition.UP


def test_an_engine_that_refuses_different_clients_is_left_alone_for_as_long_as_it_asks(health):
    refuse(health, 3 * S, 0)
    refuse(health, 1 * S, 0)
    assert health.condition(0, 0, 2 * S) is Condition.BUSY
    assert health.wait_ns(2 * S) == 1 * S
    assert health.condition(0, 0, 3 * S) is Condition.UP
    refuse(health, 10_000 * S, 10 * S)
    assert health.wait_ns(10 * S) == RULES.max_busy_ns
    refuse(health, None, 100 * S)
    assert health.wait_ns(100 * S) == RULES.default_busy_ns


def test_a_busy_engine_is_left_alone_too_while_the_breaker_would_probe_it(health):
    health.breaker.unreachable(0)
    refuse(health, 20 * S, 0)
    assert health.condition(0, 0, S) is Condition.OPEN
    health.checked(6 * S, passed=True)
    assert health.condition(0, 0, 6 * S) is Condition.BUSY
    assert health.wait_ns(6 * S) == 14 * S
    assert health.condition(0, 0, 20 * S) is Condition.PROBING


def test_the_refusals_of_one_client_concern_that_client_alone(health):
    for is_overloaded in (True, False):
        health.refused("a", 3 * S, 0, is_overloaded=is_overloaded)
    health.refused("b", 3 * S, 0, is_overloaded=False)  # Its rate limit says nothing about the engine.
    assert health.condition(0, 0, S) is Condition.UP
    assert health.pauses.concern("a", S)
    assert not health.pauses.concern("c", S)


def test_an_engine_whose_requests_fail_gets_no_share_where_others_can_take_it(health):
    for _ in range(RULES.breaker.num_witnesses):
        health.breaker.failed(Origin("one", "body"), 0, 0)
    assert health.condition(0, 0, 2 * S) is Condition.UP
    assert health.share(2 * S) == 0.0
    health.succeeded(2 * S, 3 * S)
    assert health.share(3 * S) == 1.0


def test_an_engine_that_leads_back_is_out_until_a_check_finds_no_loop(health):
    health.looped(0)
    assert health.condition(0, 0, 0) is Condition.LOOP
    assert health.wait_ns(0) is None
    health.checked(S, passed=True)
    assert health.condition(0, 0, S) is Condition.LOOP
    assert [health.is_loop_check_due(now) for now in (S - 1, S)] == [False, True]
    health.looped(S)
    assert not health.is_loop_check_due(2 * S)
    health.loop_ended(3 * S)
    assert health.condition(0, 0, 3 * S) is Condition.UP


def test_the_operators_wish_comes_first(health):
    health.is_draining = True
    health.looped(0)
    health.breaker.unreachable(0)
    assert health.condition(3, 1, 0) is Condition.DRAINING
    assert health.wait_ns(0) is None


class TestStall:
    def test_streams_that_stand_still_while_the_queue_grows(self, health):
        health.progressed(4, 0)
        assert health.condition(5, 4, 29 * S) is Condition.UP
        assert health.condition(5, 4, 30 * S) is Condition.STALLED
        health.progressed(5, 31 * S)
        assert health.condition(5, 4, 31 * S) is Condition.UP

    def test_a_queue_that_does_not_grow_is_none(self, health):
        health.progressed(5, 0)
        assert health.condition(5, 5, 100 * S) is Condition.UP

    def test_silence_without_expected_output_is_none(self, health):
        health.progressed(1, 0)
        assert health.condition(9, 0, 100 * S) is Condition.UP

    def test_a_counter_of_tokens_that_stands_still_is_silence_too(self, health):
        for second in range(32):
            health.counted(1000.0, 2, second * S)
        assert health.condition(9, 0, 31 * S) is Condition.STALLED
        health.counted(1001.0, 9, 32 * S)
        assert health.condition(9, 0, 32 * S) is Condition.UP

    def test_an_engine_without_requests_has_nothing_to_get_on_with(self, health):
        health.counted(1000.0, 0, 0)
        assert health.condition(0, 0, 100 * S) is Condition.UP
        health.counted(1000.0, 2, 101 * S)
        assert health.condition(2, 1, 101 * S) is Condition.UP


class TestSlowStart:
    def test_the_first_start_of_all_is_not_slow(self, health):
        assert health.share(0) == 1.0

    def test_an_engine_that_comes_back_is_brought_up_step_by_step(self, health):
        for second in (1, 2):
            health.checked(second * S, passed=False)
        assert health.condition(0, 0, 2 * S) is Condition.DOWN
        health.checked(100 * S, passed=True)
        assert health.condition(0, 0, 100 * S) is Condition.UP
        assert [health.share(second * S) for second in (100, 105, 110, 200)] == [0.0, 0.5, 1.0, 1.0]

    def test_having_been_busy_is_no_return(self, health):
        refuse(health, S, 0)
        assert health.condition(0, 0, 0) is Condition.BUSY
        assert health.condition(0, 0, 2 * S) is Condition.UP
        assert health.share(2 * S) == 1.0


def test_the_time_in_which_the_router_stood_still_is_no_silence_of_the_engine(health):
    health.counted(7, 1, 0)
    health.progressed(1, 0)
    health.paused(100 * S, 110 * S)
    assert health.condition(2, 1, 129 * S) is Condition.UP
    assert health.condition(2, 1, 130 * S) is Condition.STALLED
    health.progressed(1, 130 * S)
    health.paused(100 * S, 130 * S)  # never beyond the present
    assert health.condition(2, 1, 160 * S) is Condition.STALLED
