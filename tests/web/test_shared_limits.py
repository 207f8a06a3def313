"""Limits that several processes of one server share."""

from __future__ import annotations

import os
import random
import signal

import pytest

from moestro.web import rate_limits
from moestro.web.access import Access, ApiKeys
from moestro.web.rate_limits import (
    AtATime,
    ProcessLimits,
    RateLimitError,
    RequestLimits,
    RequestRate,
    SharedLimits,
    SharedRate,
    SharedSlots,
)
from moestro.web.settings import AccessSettings


def in_process(body) -> int:
    """Run `body` in a forked process, and return its exit status."""
    pid = os.fork()
    if not pid:
        os._exit(body())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_law_of_one_process_holds_for_several():
    """Whatever process a request reaches, the answers are those of one process with the same limit."""
    rng, table = random.Random(0), SharedLimits(3)
    places = [ProcessLimits(table, number) for number in range(3)]
    alone, slots = RequestRate(6), AtATime(2)
    rates, running = [SharedRate(each, "key", 6) for each in places], [SharedSlots(each, 2) for each in places]
    entered: list[tuple[str, int]] = []
    now_s, num_refused = 0.0, 0
    for _ in range(2000):
        now_s += rng.expovariate(1)
        key, at = rng.choice("abc"), rng.randrange(3)
        wait_s = rates[at].take(key, now_s)
        assert wait_s == pytest.approx(alone.take(key, now_s))
        is_free = running[at].enter(key)
        assert is_free == slots.enter(key)
        num_refused += (wait_s > 0) + (not is_free)
        if is_free:
            entered.append((key, at))
        if entered and rng.random() < 0.7:
            key, at = entered.pop(rng.randrange(len(entered)))
            running[at].leave(key)
            slots.leave(key)
    assert num_refused > 500


def test_processes_that_are_forked_see_each_others_requests():
    table = SharedLimits(4)
    own = SharedRate(ProcessLimits(table, 0), "key", 4)

    def take() -> int:
        rate = SharedRate(ProcessLimits(table, 1), "key", 4)
        return sum(rate.take("a", 0.0) == 0.0 for _ in range(3))

    assert in_process(take) == 3
    assert [own.take("a", 0.0) == 0.0 for _ in range(2)] == [True, False]
    assert own.take("b", 0.0) == 0.0


def test_no_request_is_counted_twice_or_lost_by_processes_at_once():
    table, num, each = SharedLimits(4), 4, 400

    def take(number: int) -> int:
        rate = SharedRate(ProcessLimits(table, number), "key", num * each // 2)
        return min(255, sum(rate.take("a", 0.0) == 0.0 for _ in range(each)) // 4)

    pids = []
    for number in range(num):
        pid = os.fork()
        if not pid:
            os._exit(take(number))
        pids.append(pid)
    taken = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert abs(sum(taken) * 4 - num * each // 2) < 4 * num, "one bucket, whichever process is faster"
    assert SharedRate(ProcessLimits(table, 0), "key", num * each // 2).take("a", 0.0) > 0


def test_the_requests_of_a_killed_process_end_with_it():
    table = SharedLimits(2)
    slots = SharedSlots(ProcessLimits(table, 0), 2)
    assert slots.enter("a")

    def enter_and_die() -> int:
        assert SharedSlots(ProcessLimits(table, 1), 2).enter("a")
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert in_process(enter_and_die) == -signal.SIGKILL
    assert not slots.enter("a"), "its end is not known yet"
    ProcessLimits(table, 1)  # its successor begins
    assert slots.enter("a")
    assert not slots.enter("a")


def test_the_least_recently_used_subject_without_a_running_request_gives_way(monkeypatch):
    monkeypatch.setattr(rate_limits, "_NUM_SETS", 1)
    limits = ProcessLimits(SharedLimits(1), 0)
    rate, slots = SharedRate(limits, "key", 1), SharedSlots(limits, 1)
    assert slots.enter("runs")
    names = [f"k{i}" for i in range(rate_limits._WAYS - 1)]
    for at, name in enumerate(names):
        assert rate.take(name, float(at)) == 0.0
    assert all(rate.take(name, 7.0) > 0 for name in names[1:])
    assert rate.take("new", 8.0) == 0.0
    assert rate.take(names[0], 9.0) == 0.0, "the oldest was forgotten"
    assert not slots.enter("runs"), "and what runs was not"


def test_limits_of_a_server_hold_in_all_its_processes():
    table = SharedLimits(2)
    settings = AccessSettings(
        max_requests_per_minute_per_key=2, max_requests_per_minute_per_address=3, max_concurrent_requests_per_key=1
    )
    one, other = (RequestLimits(settings, ProcessLimits(table, number)) for number in range(2))
    one.take(1, "10.0.0.1", 0.0)
    other.take(1, "10.0.0.2", 0.0)
    with pytest.raises(RateLimitError, match="This key may send 2"):
        one.take(1, "10.0.0.3", 0.0)
    other.take(2, "10.0.0.1", 0.0)
    one.take(2, "10.0.0.1", 0.0)
    with pytest.raises(RateLimitError, match="This address may send 3"):
        other.take(3, "10.0.0.1", 0.0)
    one.enter(1)
    with pytest.raises(RateLimitError, match="1 requests at a time"):
        other.enter(1)
    one.leave(1)
    with other.answering(1):
        pass


def test_a_key_has_one_name_in_all_processes():
    table = SharedLimits(2)
    names = {
        Access.of(["a", "b"], shared=ProcessLimits(table, number)).key_of("Bearer b", "") for number in range(2)
    } | {ApiKeys(["b"], secret=table.secret).find("Bearer b", "").name}
    assert len(names) == 1
