"""Judging ranks by their signs of life, and deciding when one is started again: on made-up clocks."""

from __future__ import annotations

import pytest

from moestro.server.liveness import Patience, Pulse, Verdict
from moestro.server.restarts import FIRST_DELAY_S, LAST_DELAY_S, MAX_FAILED_STARTS, STEADY_S, RestartRule
from moestro.web.pauses import PauseMeter

S = 10**9
PATIENCE = Patience(start_ns=100 * S, silence_ns=60 * S, stall_ns=30 * S, step_ns=300 * S)


def ready_pulse() -> Pulse:
    pulse = Pulse(PATIENCE, 0)
    pulse.ready(0)
    return pulse


def beat(pulse: Pulse, now_s: int, num_steps: int = 0) -> None:
    pulse.heard(now_s * S)
    pulse.counted(num_steps, now_s * S)


def test_a_rank_without_requests_needs_only_to_be_heard():
    pulse = ready_pulse()
    for now_s in range(0, 1000, 50):
        beat(pulse, now_s)
        assert pulse.judge(0, now_s * S) is Verdict.FINE


def test_silence_means_that_the_process_stands_still_whatever_it_has_to_do():
    pulse = ready_pulse()
    assert pulse.judge(0, 59 * S) is Verdict.FINE
    assert pulse.judge(0, 60 * S) is Verdict.HUNG
    assert "--engine-timeout" in pulse.reason


def test_a_rank_that_is_heard_but_makes_no_step_is_stalled_and_in_the_end_hung():
    pulse = ready_pulse()
    verdicts = []
    for now_s in (10, 29, 30, 299, 300):
        beat(pulse, now_s)
        verdicts.append(pulse.judge(5, now_s * S))
    assert verdicts == [Verdict.FINE, Verdict.FINE, Verdict.STALLED, Verdict.STALLED, Verdict.HUNG]
    assert pulse.reason == "no step for 300 s with 5 requests (--step-timeout)"


def test_a_step_clears_the_suspicion():
    pulse = ready_pulse()
    beat(pulse, 40)
    assert pulse.judge(1, 40 * S) is Verdict.STALLED
    beat(pulse, 41, num_steps=1)
    assert pulse.judge(1, 41 * S) is Verdict.FINE


def test_the_time_without_requests_does_not_count_as_standing_still():
    pulse = ready_pulse()
    beat(pulse, 1000)
    assert pulse.judge(0, 1000 * S) is Verdict.FINE
    beat(pulse, 1029)
    assert pulse.judge(1, 1029 * S) is Verdict.FINE


@pytest.mark.parametrize("pause_s", [12, 1000])
def test_the_time_in_which_the_api_server_stood_still_does_not_count(pause_s):
    pulse = ready_pulse()
    beat(pulse, 10)
    assert pulse.judge(1, 20 * S) is Verdict.FINE
    now_s = 20 + pause_s
    pulse.paused(pause_s * S, now_s * S)
    assert pulse.judge(1, (now_s + 9) * S) is Verdict.FINE  # 19 s without a step, and silence of as long
    assert pulse.judge(1, (now_s + 10) * S) is Verdict.STALLED
    assert pulse.judge(1, (now_s + 49) * S) is Verdict.STALLED
    assert pulse.judge(1, (now_s + 50) * S) is Verdict.HUNG
    assert "--engine-timeout" in pulse.reason


def test_what_was_heard_after_a_pause_is_not_put_into_the_future_by_it():
    pulse = ready_pulse()
    beat(pulse, 1000, num_steps=1)  # read before the pause was measured
    pulse.paused(900 * S, 1000 * S)
    assert pulse.judge(1, 1060 * S) is Verdict.HUNG


def test_a_start_has_its_whole_time_although_the_api_server_stood_still():
    pulse = Pulse(PATIENCE, 0)
    pulse.paused(500 * S, 510 * S)
    assert pulse.judge(0, 599 * S) is Verdict.FINE
    assert pulse.judge(0, 600 * S) is Verdict.HUNG


def test_a_pause_is_what_a_tick_comes_too_late():
    meter = PauseMeter(100 * S, longest_ns=2 * S)
    assert [meter.tick(at_s * S) for at_s in (101, 103, 105, 120, 121)] == [0, 0, 0, 13 * S, 0]


def test_a_start_may_take_its_own_time_also_in_silence():
    pulse = ready_pulse()
    pulse.launched(1000 * S)
    assert pulse.judge(0, 1099 * S) is Verdict.FINE
    assert pulse.judge(0, 1100 * S) is Verdict.HUNG
    assert "--startup-timeout" in pulse.reason


def test_the_delay_before_a_restart_doubles_up_to_a_bound():
    rule = RestartRule()
    delays = []
    for now_s in range(10):
        rule.ready(now_s * S)
        delays.append(rule.ended(now_s * S))
    assert delays == [min(LAST_DELAY_S, FIRST_DELAY_S * 2**i) for i in range(10)]


def test_a_rank_that_served_for_long_starts_afresh():
    rule = RestartRule()
    for _ in range(5):
        rule.ready(0)
        rule.ended(S)
    rule.ready(0)
    assert rule.ended(int(STEADY_S * S)) == FIRST_DELAY_S


@pytest.mark.parametrize("num_good", [0, 1, 7])
def test_a_rank_is_given_up_after_failed_starts_in_a_row_and_not_for_failures_after_a_start(num_good):
    rule = RestartRule()
    for _ in range(num_good):
        rule.ready(0)
        assert rule.ended(1) is not None
    assert all(rule.ended(1) is not None for _ in range(MAX_FAILED_STARTS - 1))
    assert rule.ended(1) is None
