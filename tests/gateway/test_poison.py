"""One client's requests that an engine fails in any way, at full rate, cost the requests of others nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
from gateway.rig import KEYS, FakeEngine, Received, Rig, Wire, looped, rig, say_ok
from gateway.test_reliability import answering, hang_up, make_older, say_nothing, stream_and_hang_up

NUM_STRANGERS = 8


async def begin_with_an_error(engine: FakeEngine, wire: Wire, request: Received) -> None:
    wire.open_stream()
    wire.chunk(b'data: {"error":{"message":"no","type":"t","param":null,"code":500}}\n\n')
    wire.end_stream()


POISONS = {
    **{str(status): answering(status) for status in (400, 429, 500, 502, 503, 504, 529)},
    "paused": answering(429, "Retry-After: 60\r\n"),
    "cut": hang_up,
    "cut late": stream_and_hang_up,
    "hang": say_nothing,
    "an error first": begin_with_an_error,
}


def poisoned_by(poison) -> object:
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        await (poison if b"poison" in request.body else say_ok)(engine, wire, request)

    return script


@contextlib.asynccontextmanager
async def strangers(it: Rig, *keys: str):
    """Send poison from eight connections, each body different; yields how many were sent."""
    sent: Counter[str] = Counter()

    async def send_forever(number: int) -> None:
        while True:
            sent["all"] += 1
            caller = await it.caller()
            body = {"prompt": f"poison {number} {sent['all']}"}
            caller.ask("/v1/completions", body, Authorization=f"Bearer {keys[number % len(keys)]}")
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await caller.answer()
            caller.hang_up()

    tasks = [asyncio.create_task(send_forever(number)) for number in range(NUM_STRANGERS)]
    try:
        yield sent
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("num_engines", [1, 3])
@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
@looped
async def test_poison_of_one_client_fails_no_request_of_the_others(poison, num_engines):
    engines = [FakeEngine(name, poisoned_by(poison)) for name in "abc"[:num_engines]]
    limits = {"first_byte_timeout": 0.5} if poison is say_nothing else {}
    async with rig(*engines, api_key=KEYS, health_interval=30, **limits) as it, strangers(it, KEYS[0]) as sent:
        statuses: Counter[int] = Counter()
        while sent["all"] < 3 * NUM_STRANGERS or statuses.total() < 10:
            make_older(*(it.engine(engine.name) for engine in engines))  # as if a second had passed
            statuses[(await it.call(body={"prompt": "fine"}, Authorization=f"Bearer {KEYS[1]}")).status] += 1
        assert set(statuses) == {200}
        assert {it.engine(engine.name).health.breaker.state(0) for engine in engines} == {"closed"}


@looped
async def test_poison_keeps_no_engine_out_that_has_returned():
    """Its requests wait for ever on an engine of which a single success is still missing."""
    async with rig(FakeEngine("e", poisoned_by(say_nothing)), api_key=KEYS) as it:
        it.engine("e").health.breaker.unreachable(0)
        it.app.shared.fleet.look_now(it.engine("e"))
        assert (await it.call(Authorization=f"Bearer {KEYS[1]}")).status == 503
        await it.until(lambda: it.engine("e").condition == "probing")
        async with strangers(it, KEYS[0]) as sent:
            await it.until(lambda: sent["all"] == NUM_STRANGERS == it.num_in_flight)
            assert (await it.call(Authorization=f"Bearer {KEYS[1]}")).status == 200
            assert it.engine("e").condition == "up"


@looped
async def test_an_engine_that_fails_one_client_only_gets_one_request_at_a_time_beside_others():
    """It may fail for all, and a single client cannot show it: the other engine takes what it can."""
    bad, good = FakeEngine("bad", poisoned_by(answering(500))), FakeEngine("good", poisoned_by(answering(500)))
    async with rig(bad, good, route_policy="round_robin") as it:
        for number in range(10):
            await it.call(body={"prompt": f"poison {number}"})
        await it.call(body={"prompt": "fine"})
        names = [engine.name for engine in it.app.shared.fleet if engine.health.breaker._evidence.num_failures]
        assert len(names) == 1, "the success cleared the other one"
        [name] = names
        doubted = it.engine(name)
        make_older(doubted)
        it.app.shared.fleet.look_now(doubted)
        assert doubted.condition == "up"
        fake = bad if name == "bad" else good
        fake.script = say_nothing
        num_before = len(fake.received)
        for _ in range(6):
            (await it.caller()).ask(body={"prompt": "waits"})
        await it.until(lambda: it.app.shared.fleet.router.num_in_flight_on(doubted.row) > 0)
        assert len(fake.received) == num_before + 1


@looped
async def test_an_error_of_the_request_as_first_event_is_no_failure():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.open_stream()
        wire.chunk(b'data: {"error": {"message": "bad", "type": "BadRequestError", "code": 400}}\n\n')
        wire.end_stream()

    async with rig(FakeEngine("e", script)) as it:
        assert (await it.call()).status == 200
        assert it.engine("e").health.breaker._evidence.num_failures == 0


@looped
async def test_an_engine_that_begins_every_stream_with_an_error_is_out():
    async with rig(FakeEngine("e", begin_with_an_error), api_key=KEYS) as it:
        for number in range(2):
            for key in KEYS:
                answer = await it.call(body={"prompt": f"{key} {number}"}, Authorization=f"Bearer {key}")
                assert answer.status == 200
                make_older(it.engine("e"))
            if it.engine("e").condition == "open":
                break
        assert it.engine("e").condition == "open"


@looped
async def test_a_500_goes_to_another_engine_only_where_the_operator_wants_it():
    for retry_on, num_received in (((502,), 1), ((500,), 2)):
        engines = [FakeEngine(name, answering(500)) for name in "ab"]
        async with rig(*engines, retry_on=retry_on) as it:
            answer = await it.call()
            assert (answer.status, answer.json["error"]["message"]) == (500, "no")
            assert sum(len(engine.received) for engine in engines) == num_received


@looped
async def test_one_client_does_not_use_up_the_retries_of_the_others():
    """All requests of the stranger are refused everywhere; those of others by one engine alone."""
    full, free = FakeEngine("full", answering(503)), FakeEngine("free", poisoned_by(answering(503)))
    async with rig(full, free, api_key=KEYS, route_policy="round_robin", health_interval=30) as it:
        async with strangers(it, KEYS[0]) as sent:
            await it.until(lambda: it.counts.num_retries_denied > 10)
            num_denied, statuses = it.counts.num_retries_denied, Counter()
            while it.counts.num_retries_denied < num_denied + 10 or statuses.total() < 10:
                statuses[(await it.call(body={"prompt": "fine"}, Authorization=f"Bearer {KEYS[1]}")).status] += 1
        assert sent["all"]
        assert set(statuses) == {200}
