"""Idle engines cost little: their checks share wake-ups, and what time does not change is not looked at."""

from __future__ import annotations

import asyncio
import time

import pytest
from gateway.rig import looped, reading_of, settings_of

from moestro.core.request import Request, SamplingParams
from moestro.gateway.app import RouterApp, assemble
from moestro.gateway.engines import health_checks
from moestro.gateway.engines.fleet import CheckAlarm, RouteBounds, RoutedEngine
from moestro.gateway.engines.health_checks import _first_share, _slot_s
from moestro.routing.health import Condition, Origin
from moestro.web.ports.faults import Faults

S = 1_000_000_000
T = time.monotonic_ns() + 3600 * S  # after all that the router notes by its own clock


class FakePool:
    """Where an engine is; nothing connects to it."""

    arrived_ns = 0

    def sweep(self, now_s: float) -> None:
        pass


def router(num_engines: int = 1, **settings: object) -> tuple[RouterApp, list[RoutedEngine]]:
    """A router before engines that have passed a health check, without tasks."""
    urls = tuple(f"http://127.0.0.1:{at + 1}" for at in range(num_engines))
    given = settings_of(engine=urls, **settings)
    app = assemble(given, reading_of(given.routing), Faults())
    fleet = app.shared.fleet
    for url in urls:
        for engine in fleet.add(url, url, pool=FakePool(), head=None).engines:
            engine.health.checked(T, passed=True)
            fleet.look(engine, T)
    return app, [*fleet]


def looks_at(monkeypatch: pytest.MonkeyPatch, app: RouterApp) -> list[RoutedEngine]:
    looks: list[RoutedEngine] = []
    look = app.shared.fleet.look

    def noting(engine: RoutedEngine, now_ns: int) -> None:
        looks.append(engine)
        look(engine, now_ns)

    monkeypatch.setattr(app.shared.fleet, "look", noting)
    return looks


def send(app: RouterApp, now_ns: int) -> None:
    request = Request(request_id="r", num_prompt_tokens=1, sampling=SamplingParams(max_tokens=1), arrival_ns=now_ns)
    app.shared.fleet.submit(request, RouteBounds(None), now_ns)


def test_a_sweep_passes_over_engines_that_are_up_and_rest(monkeypatch):
    app, [engine] = router()
    looks = looks_at(monkeypatch, app)
    list(app.shared.fleet.sweep(T + S))
    assert not looks
    send(app, T + S)
    list(app.shared.fleet.sweep(T + S))
    assert looks == [engine]


@pytest.mark.parametrize("change", ["drains", "fails", "is refused", "is silent", "has sent", "is down"])
def test_a_sweep_looks_at_engines_that_time_may_change(monkeypatch, change):
    app, [engine] = router()
    health = engine.health
    if change == "drains":
        health.is_draining = True
    elif change == "fails":
        health.breaker.failed(Origin("client", "body"), T, T)
    elif change == "is refused":
        health.refused("client", 9 * S, T, is_overloaded=False)
        app.shared.fleet.look(engine, T)
    elif change == "is silent":
        health.silence.num_missed = 1
    elif change == "has sent":
        engine.last_byte_ns = 1
    else:
        engine.condition = Condition.DOWN
    looks = looks_at(monkeypatch, app)
    list(app.shared.fleet.sweep(T + S))
    assert looks == [engine]


def test_engines_that_rest_are_swept_in_turns_until_something_happens_to_them():
    app, engines = router(100)
    fleet = app.shared.fleet
    assert len(list(fleet.sweep(T))) == 100
    turns = [list(fleet.sweep(T + at)) for at in range(4)]
    assert sorted(address.name for turn in turns for address in turn) == sorted(each.address.name for each in engines)
    send(app, T + S)
    busy = next(engine for engine in engines if fleet.router.num_in_flight_on(engine.row))
    fleet.look(engines[-1], T + S)
    for at in range(4):
        swept = [address.name for address in fleet.sweep(T + S + at)]
        assert busy.address.name in swept
        assert at or engines[-1].address.name in swept


def test_an_engine_that_has_rested_for_long_has_all_its_time_for_the_first_request():
    app, [engine] = router(stall_timeout=5.0)
    fleet = app.shared.fleet
    engine.health.counted(1.0, 0, T)
    for at in range(1, 100):
        list(fleet.sweep(T + at * S))
    engine.health.counted(1.0, 0, T + 99 * S)
    send(app, T + 99 * S)
    list(fleet.sweep(T + 100 * S))
    assert engine.condition is Condition.UP
    list(fleet.sweep(T + 103 * S))
    assert engine.condition is Condition.UP


def test_pauses_end_together_and_never_late_but_short_ones_end_where_they_end():
    begins = [100.0 + at / 997 for at in range(200)]
    ends = [_slot_s(begin, 1.0) for begin in begins]
    assert all(0 <= begin + 1.0 - end <= health_checks._SLOT_S + 1e-9 for begin, end in zip(begins, ends, strict=True))
    assert len(set(ends)) <= 4
    assert _slot_s(100.003, 0.3) == 100.003 + 0.3


def test_engines_that_come_together_part_at_their_first_pause():
    _, engines = router(100)
    slots = [int((_slot_s(7.0, _first_share(engine.address))) * 10) for engine in engines]
    assert max(slots.count(slot) for slot in set(slots)) <= 25
    assert all(0.5 <= _first_share(engine.address) < 1 for engine in engines)


@looped
async def test_a_check_that_is_put_off_wakes_no_task_before_its_new_time():
    loop, alarm, calls = asyncio.get_running_loop(), CheckAlarm(), []
    due_s = [loop.time() + 0.02, loop.time() + 0.05]

    def due() -> float:
        calls.append(loop.time())
        return due_s[min(len(calls) - 1, 1)]

    await alarm.wait(due)
    assert loop.time() >= due_s[1] - 2 * CheckAlarm.TIMER_S
    assert len(calls) >= 3
    assert not alarm.is_requested


@looped
async def test_a_requested_check_comes_at_once_also_if_nothing_waited_for_it():
    alarm = CheckAlarm()
    alarm.request()
    await alarm.wait(lambda: float(1 << 30))
    assert alarm.is_requested
    alarm.is_requested = False
    waiting = asyncio.ensure_future(alarm.wait(lambda: float(1 << 30)))
    await asyncio.sleep(0)
    alarm.request()
    await waiting
    assert alarm.is_requested
