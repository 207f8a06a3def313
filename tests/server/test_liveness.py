"""Judging ranks by their signs of life, and deciding when one is started again: on made-up clocks."""

from __future__ import annotations

import asyncio

import pytest

from moestro.server.engines.request_state import Metrics
from moestro.server.processes.supervisor import Launching, Supervisor
from moestro.server.processes.watchdog import (
    FIRST_DELAY_S,
    LAST_DELAY_S,
    MAX_FAILED_STARTS,
    STEADY_S,
    Liveness,
    LivenessTimeouts,
    RankStatus,
    RestartRule,
)
from moestro.web.ports.lifecycle import PauseMeter

S = 10**9
TIMEOUTS = LivenessTimeouts(start_ns=100 * S, doubt_ns=55 * S, silence_ns=60 * S, stall_ns=30 * S, step_ns=300 * S)


def ready_rank() -> Liveness:
    liveness = Liveness(TIMEOUTS, 0)
    liveness.ready(0)
    return liveness


def beat(liveness: Liveness, now_s: int, num_steps: int = 0) -> None:
    liveness.on_message(now_s * S)
    liveness.counted(num_steps, now_s * S)


def test_a_rank_without_requests_needs_only_to_send_messages():
    liveness = ready_rank()
    for now_s in range(0, 1000, 50):
        beat(liveness, now_s)
        assert liveness.judge(0, now_s * S) is RankStatus.FINE


def test_silence_means_that_the_process_stands_still_whatever_it_has_to_do():
    liveness = ready_rank()
    assert liveness.judge(0, 54 * S) is RankStatus.FINE
    assert liveness.judge(0, 55 * S) is RankStatus.SILENT
    assert liveness.judge(0, 59 * S) is RankStatus.SILENT
    assert liveness.judge(0, 60 * S) is RankStatus.HUNG
    assert "--engine-timeout" in liveness.reason


def test_an_idle_rank_is_doubted_later_and_its_rare_heartbeats_count_as_punctual():
    timeouts = LivenessTimeouts(
        start_ns=S, doubt_ns=3 * S, silence_ns=100 * S, stall_ns=S**2, step_ns=S**2, idle_doubt_ns=20 * S
    )
    liveness = Liveness(timeouts, 0)
    liveness.ready(0)
    liveness.on_message(S)
    liveness.counted(0, S, is_idle=True)
    assert liveness.judge(0, 20 * S) is RankStatus.FINE
    assert liveness.judge(0, 21 * S) is RankStatus.SILENT
    beat(liveness, 11, num_steps=1)  # it has work, ten seconds later
    assert liveness.judge(1, 13 * S) is RankStatus.FINE
    assert liveness.judge(1, 14 * S) is RankStatus.SILENT


def test_a_rank_whose_heartbeats_were_late_is_doubted_later_for_a_while():
    liveness = Liveness(
        LivenessTimeouts(start_ns=S, doubt_ns=3 * S, silence_ns=100 * S, stall_ns=S**2, step_ns=S**2), 0
    )
    liveness.ready(0)
    beat(liveness, 1)
    assert liveness.judge(0, 4 * S) is RankStatus.SILENT
    beat(liveness, 5)  # after 4 s
    assert liveness.judge(0, 12 * S) is RankStatus.FINE
    assert liveness.judge(0, 13 * S) is RankStatus.SILENT
    for now_s in range(6, 206):
        beat(liveness, now_s)
    assert liveness.judge(0, 207 * S) is RankStatus.FINE
    assert liveness.judge(0, 208 * S) is RankStatus.SILENT


def test_a_rank_with_messages_but_no_step_is_stalled_and_in_the_end_hung():
    liveness = ready_rank()
    verdicts = []
    for now_s in (10, 29, 30, 299, 300):
        beat(liveness, now_s)
        verdicts.append(liveness.judge(5, now_s * S))
    assert verdicts == [RankStatus.FINE, RankStatus.FINE, RankStatus.STALLED, RankStatus.STALLED, RankStatus.HUNG]
    assert liveness.reason == "no step for 300 s with 5 requests (--step-timeout)"


def test_a_step_clears_the_suspicion():
    liveness = ready_rank()
    beat(liveness, 40)
    assert liveness.judge(1, 40 * S) is RankStatus.STALLED
    beat(liveness, 41, num_steps=1)
    assert liveness.judge(1, 41 * S) is RankStatus.FINE


def test_the_time_without_requests_does_not_count_as_standing_still():
    liveness = ready_rank()
    beat(liveness, 1000)
    assert liveness.judge(0, 1000 * S) is RankStatus.FINE
    beat(liveness, 1029)
    assert liveness.judge(1, 1029 * S) is RankStatus.FINE


@pytest.mark.parametrize("pause_s", [12, 1000])
def test_the_time_in_which_the_api_server_stood_still_does_not_count(pause_s):
    liveness = ready_rank()
    beat(liveness, 10)
    assert liveness.judge(1, 20 * S) is RankStatus.FINE
    now_s = 20 + pause_s
    liveness.paused(pause_s * S, now_s * S)
    assert liveness.judge(1, (now_s + 9) * S) is RankStatus.FINE  # 19 s without a step, and silence of as long
    assert liveness.judge(1, (now_s + 10) * S) is RankStatus.STALLED
    assert liveness.judge(1, (now_s + 49) * S) is RankStatus.STALLED
    assert liveness.judge(1, (now_s + 50) * S) is RankStatus.HUNG
    assert "--engine-timeout" in liveness.reason


def test_a_message_after_a_pause_is_not_put_into_the_future_by_it():
    liveness = ready_rank()
    beat(liveness, 1000, num_steps=1)  # read before the pause was measured
    liveness.paused(900 * S, 1000 * S)
    assert liveness.judge(1, 1060 * S) is RankStatus.HUNG


def test_a_start_has_its_whole_time_although_the_api_server_stood_still():
    liveness = Liveness(TIMEOUTS, 0)
    liveness.paused(500 * S, 510 * S)
    assert liveness.judge(0, 599 * S) is RankStatus.FINE
    assert liveness.judge(0, 600 * S) is RankStatus.HUNG


def test_a_pause_is_what_a_tick_comes_too_late():
    meter = PauseMeter(100 * S, longest_ns=2 * S)
    assert [meter.tick(at_s * S) for at_s in (101, 103, 105, 120, 121)] == [0, 0, 0, 13 * S, 0]


def test_a_start_may_take_its_own_time_also_in_silence():
    liveness = ready_rank()
    liveness.launched(1000 * S)
    assert liveness.judge(0, 1099 * S) is RankStatus.FINE
    assert liveness.judge(0, 1100 * S) is RankStatus.HUNG
    assert "--startup-timeout" in liveness.reason


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


def test_only_an_engine_that_was_reported_as_stalled_is_reported_as_recovered(caplog):
    class Engines:
        def num_in_flight_on(self, engine: int) -> int:
            return 1

        def set_trusted(self, engine: int, *, trusted: bool) -> None:
            self.is_trusted = trusted

    class Judge:
        reason = "no step for 40 s"

        def __init__(self, *statuses: RankStatus) -> None:
            self.left = list(statuses)

        def judge(self, num_owed: int, now_ns: int) -> RankStatus:
            return self.left.pop(0)

    async def test():
        launching = Launching(
            spec=lambda rank, launch, listener: None, launcher=None, timeouts=TIMEOUTS, expert_timeouts=TIMEOUTS
        )
        engines = Engines()
        supervisor = Supervisor(engines, None, Metrics(1), launching)
        (state,) = supervisor._ranks
        for statuses, num_lines in (
            ((RankStatus.HUNG, RankStatus.FINE), 0),
            ((RankStatus.STALLED, RankStatus.HUNG, RankStatus.FINE), 1),
        ):
            state.liveness = Judge(*statuses)
            for _ in statuses:
                supervisor._watchdog.look_at(0, state, 0)
            assert engines.is_trusted
            assert caplog.text.count("engine 0 makes progress again") == num_lines

    asyncio.run(test())
