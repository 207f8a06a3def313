"""Engines that refuse, fail, hang up, fall silent or go away; clients that do."""

from __future__ import annotations

import asyncio
import random

import pytest
from gateway.rig import KEYS, Answer, Caller, FakeEngine, Received, Wire, looped, rig, say_ok

from moestro.routing.health import RetryBudget, RetryRules


def answering(status: int, headers: str = "") -> object:
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.reply(b'{"error":{"message":"no","type":"t","param":null,"code":null}}', status, headers=headers)

    return script


async def hang_up(engine: FakeEngine, wire: Wire, request: Received) -> None:
    wire.transport.abort()


async def say_nothing(engine: FakeEngine, wire: Wire, request: Received) -> None:
    await asyncio.sleep(3600)


async def stream_and_hang_up(engine: FakeEngine, wire: Wire, request: Received) -> None:
    wire.open_stream()
    for i in range(3):
        wire.chunk(b'data: {"i": %d}\n\n' % i)
    await asyncio.sleep(0.02)
    wire.transport.abort()


async def promise_and_hang_up(engine: FakeEngine, wire: Wire, request: Received) -> None:
    wire.open_stream()  # the head is out, and nothing was computed
    await asyncio.sleep(0.02)
    wire.transport.abort()


async def of_each_client(it) -> list[Answer]:
    """Answers to three different requests of each client."""
    bodies = [{"messages": [{"role": "user", "content": f"{key} {i}"}]} for key in KEYS for i in range(3)]
    return [await it.call(body=body, Authorization=f"Bearer {KEYS[i // 3]}") for i, body in enumerate(bodies)]


def make_older(*engines) -> None:
    """Let the first failure of each engine be a second older."""
    for engine in engines:
        for evidence in (engine.health.breaker._evidence, engine.health.pauses):
            if evidence._since_ns:
                evidence._since_ns -= 1_000_000_000


async def both(it, **more) -> set[str]:
    """Names of the engines that answer repeated requests."""
    return {(await it.call()).headers["x-moestro-engine"] for _ in range(8)}


class TestElsewhere:
    """Before the first byte of an answer, and never after."""

    @pytest.mark.parametrize("status", [429, 502, 503, 504])
    @looped
    async def test_an_answer_that_is_none_is_requested_elsewhere(self, status):
        bad, good = FakeEngine("bad", answering(status)), FakeEngine("good")
        async with rig(bad, good) as it:
            answers = [await it.call() for _ in range(10)]
            assert {answer.status for answer in answers} == {200}
            assert bad.received, "it received no request"
            assert any(f"bad answered {status}" in answer.headers["x-moestro-reason"] for answer in answers)
            assert it.counts.retries[f"answered {status}"] == len(bad.received)

    @pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 501, 508])
    @looped
    async def test_what_is_the_clients_fault_is_the_clients_answer(self, status):
        one, two = FakeEngine("one", answering(status)), FakeEngine("two", answering(status))
        async with rig(one, two) as it:
            for _ in range(20):
                assert (await it.call()).status == status
            assert len(one.received) + len(two.received) == 20
            assert {it.engine(name).condition for name in ("one", "two")} == {"up"}

    @looped
    async def test_where_no_engine_does_better_the_client_gets_the_engines_own_words(self):
        engines = [FakeEngine(name, answering(503, "Retry-After: 7\r\n")) for name in "ab"]
        async with rig(*engines) as it:
            answer = await it.call()
            assert (answer.status, answer.headers["retry-after"]) == (503, "7")
            assert answer.json["error"]["message"] == "no"
            assert sum(len(engine.received) for engine in engines) == 2

    @looped
    async def test_each_engine_is_tried_once_and_no_more_than_the_bound(self):
        engines = [FakeEngine(name, answering(500)) for name in "abcdef"]
        async with rig(*engines, max_retries=2, retry_on=(500,)) as it:
            assert (await it.call()).status == 500
            assert sorted(len(engine.received) for engine in engines) == [0, 0, 0, 1, 1, 1]

    @pytest.mark.parametrize("script", [hang_up, promise_and_hang_up])
    @looped
    async def test_an_engine_that_hangs_up_before_a_byte_loses_no_request(self, script):
        bad, good = FakeEngine("bad", script), FakeEngine("good")
        async with rig(bad, good, health_interval=30) as it:
            assert {(await it.call()).status for _ in range(10)} == {200}
            assert bad.received

    @looped
    async def test_a_request_that_ended_two_engines_is_given_to_no_third(self):
        engines = [FakeEngine(name, hang_up) for name in "abc"]
        async with rig(*engines, health_interval=30) as it:
            answer = await it.call()
            assert (answer.status, answer.code) == (502, "upstream_unavailable")
            assert sum(bool(engine.received) for engine in engines) == 2

    @looped
    async def test_engines_that_cannot_be_reached_cost_a_request_nothing(self):
        engines = [FakeEngine(name) for name in "abcd"]
        async with rig(*engines, health_interval=30) as it:
            for engine in engines[:3]:
                engine.die()
            assert {(await it.call()).status for _ in range(10)} == {200}
            assert len(engines[3].received) == 10

    @looped
    async def test_after_the_first_byte_the_stream_ends_so_that_every_client_notices(self):
        engine, other = FakeEngine("e", stream_and_hang_up), FakeEngine("other", stream_and_hang_up)
        async with rig(engine, other) as it:
            caller = await it.caller()
            caller.ask(body={"stream": True})
            await caller.head()
            rest = await caller.reader.read()
            assert rest.count(b"data: {") == 4
            assert b'event: error\ndata: {"error":{"message":"The answer cannot be completed' in rest
            assert b'"code":"upstream_disconnected"' in rest
            assert not rest.endswith(b"0\r\n\r\n"), "a clean end would pass for success"
            assert b"[DONE]" not in rest
            assert len(engine.received) + len(other.received) == 1

    @looped
    async def test_an_answer_that_is_no_stream_is_cut_off(self):
        async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
            wire.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            await asyncio.sleep(0.02)
            wire.transport.abort()

        async with rig(FakeEngine("e", script)) as it:
            caller = await it.caller()
            caller.ask()
            await caller.head()
            assert await caller.reader.read() == b"{"

    @looped
    async def test_a_kept_connection_that_was_closed_meanwhile_is_no_fault(self):
        """The engine closes as it reads: what a server does whose patience with idle connections has just ended."""
        is_closing = False

        async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
            if is_closing and wire is first:
                wire.transport.abort()
            else:
                wire.reply()

        engine = FakeEngine("e", script)
        async with rig(engine, health_interval=30) as it:
            await it.call()
            [first] = [wire for wire in engine.wires if not wire.is_lost.is_set()]
            is_closing = True
            assert (await it.call()).status == 200
            assert it.engine("e").condition == "up"
            assert it.engine("e").counts.num_unreachable == 0

    @looped
    async def test_the_budget_keeps_retries_from_multiplying_an_overload(self):
        engines = [FakeEngine(name, answering(502)) for name in "ab"]
        async with rig(*engines, retry_share=0.1) as it:
            budget = RetryBudget(RetryRules(share=0.1, per_s=0.0, burst=5.0), 0)
            object.__setattr__(it.app.shared, "budget", budget)
            statuses = [(await it.call()).status for _ in range(50)]
            assert statuses.count(502) >= 45
            assert sum(len(engine.received) for engine in engines) <= 60
            assert it.counts.num_retries_denied > 0


class TestOut:
    """Engines out of rotation, and back."""

    @looped
    async def test_failures_of_different_clients_open_the_breaker_and_a_success_closes_it(self):
        bad, good = FakeEngine("bad", answering(502)), FakeEngine("good")
        async with rig(bad, good, api_key=KEYS, health_interval=30, route_policy="round_robin") as it:
            assert {answer.status for answer in await of_each_client(it)} == {200}
            assert it.engine("bad").condition == "up", "no request has had time to succeed"
            make_older(it.engine("bad"))
            await of_each_client(it)
            assert it.engine("bad").condition == "open"
            assert it.engine("bad").num_forgotten == 1
            num_received = len(bad.received)
            await of_each_client(it)
            assert len(bad.received) == num_received
            bad.script = say_ok
            await it.until(lambda: it.engine("bad").condition == "probing")
            names = {answer.headers["x-moestro-engine"] for answer in await of_each_client(it)}
            assert names == {"bad", "good"}
            assert it.engine("bad").condition == "up"

    @looped
    async def test_health_checks_take_an_engine_out_and_bring_it_back(self):
        engine, other = FakeEngine("e"), FakeEngine("other")
        async with rig(engine, other) as it:
            engine.health = 503
            await it.until(lambda: it.engine("e").condition == "down")
            assert await both(it) == {"other"}
            engine.health = 200
            await it.until_up("e")
            assert await both(it) == {"e", "other"}

    @looped
    async def test_a_refused_connection_stays_the_cause_when_its_check_counts_as_missed(self, caplog, monkeypatch):
        monkeypatch.setattr("moestro.gateway.engines.health_checks._UNHEARD_CHECKS", 3)
        async with rig(is_up=False, engine=("e=http://127.0.0.1:9",), hang_timeout=1) as it:
            address, causes = it.engine("e").address, set()
            await it.until(lambda: causes.add(address.unreachable) or address.silence.num_missed > 2)
            assert all("cannot connect" in cause for cause in causes if cause), causes
            await it.until(lambda: "engine e has passed no health check yet: /health: cannot connect" in caplog.text)

    @looped
    async def test_an_engine_that_is_started_again_is_found_soon(self):
        engine, other = FakeEngine("e"), FakeEngine("other")
        async with rig(engine, other) as it:
            port = engine.port
            engine.die()
            assert await both(it) == {"other"}
            await it.until(lambda: it.engine("e").condition != "up")
            await engine.start(port)
            await it.until(lambda: it.engine("e").condition in ("probing", "up"))
            assert await both(it) == {"e", "other"}

    @pytest.mark.parametrize("status", [429, 503, 529])
    @looped
    async def test_a_client_leaves_an_engine_that_refuses_it_alone_for_as_long_as_it_asks(self, status):
        busy, other = FakeEngine("busy", answering(status, "Retry-After: 60\r\n")), FakeEngine("other")
        async with rig(busy, other) as it:
            assert await both(it) == {"other"}
            assert len(busy.received) == 1
            assert it.engine("busy").condition == "up"

    @looped
    async def test_an_engine_that_refuses_one_client_serves_the_others(self):
        async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
            await (answering(429, "Retry-After: 60\r\n") if b"tenant" in request.body else say_ok)(
                engine, wire, request
            )

        async with rig(FakeEngine("e", script), api_key=KEYS) as it:
            limited = [await it.call(body={"user": "tenant"}, Authorization="Bearer key-0") for _ in range(20)]
            assert {(answer.status, answer.headers["retry-after"]) for answer in limited} == {(429, "60")}
            assert {answer.status for answer in await of_each_client(it)} == {200}

    @looped
    async def test_an_engine_that_is_overloaded_for_different_clients_is_left_alone_by_all(self):
        busy, other = FakeEngine("busy", answering(503, "Retry-After: 60\r\n")), FakeEngine("other")
        async with rig(busy, other, api_key=KEYS, route_policy="round_robin") as it:
            await of_each_client(it)
            assert it.engine("busy").condition == "up"
            assert len(busy.received) == len(KEYS), "each client is refused once"
            make_older(it.engine("busy"))
            it.engine("busy").health.pauses._until_ns.clear()
            await of_each_client(it)
            assert it.engine("busy").condition == "busy"
            assert len(busy.received) == len(KEYS) + 2, "three refusals beside those of the most refused client"

    @looped
    async def test_a_probe_that_finds_the_engine_busy_leaves_it_alone_too(self):
        bad, other = FakeEngine("bad", answering(503, "Retry-After: 60\r\n")), FakeEngine("other")
        async with rig(bad, other, api_key=KEYS, route_policy="round_robin") as it:
            it.engine("bad").health.breaker.unreachable(0)
            await it.until(lambda: it.engine("bad").condition == "probing")
            await of_each_client(it)
            make_older(it.engine("bad"))
            it.engine("bad").health.pauses._until_ns.clear()
            await of_each_client(it)
            assert it.engine("bad").condition == "busy"

    @looped
    async def test_a_cut_answer_forgets_no_cache_and_a_refused_connection_does(self):
        bad, other = FakeEngine("bad", hang_up), FakeEngine("other")
        async with rig(bad, other, health_interval=30) as it:
            await both(it)
            assert bad.received
            assert it.engine("bad").num_forgotten == 0
            bad.die()
            await both(it)
            assert it.engine("bad").condition == "open"
            assert it.engine("bad").num_forgotten == 1
            it.app.shared.fleet.lost(it.engine("bad"), "again", 10**18)
            assert it.engine("bad").num_forgotten == 2

    @looped
    async def test_all_engines_gone_is_503_with_the_time_to_come_again(self):
        async with rig(FakeEngine("e"), FakeEngine("f"), health_interval=30) as it:
            for name in ("e", "f"):
                now_ns = int(asyncio.get_running_loop().time() * 1e9)
                it.engine(name).health.refused("a", 9_000_000_000, now_ns - 1_000_000_000, is_overloaded=True)
                for client in "bcd":
                    it.engine(name).health.refused(client, 9_000_000_000, now_ns, is_overloaded=True)
                it.app.engine_admin.fleet.look_now(it.engine(name))
            answer = await it.call()
            assert (answer.status, answer.code) == (503, "no_engine")
            assert 8 <= int(answer.headers["retry-after"]) <= 9
            assert (await it.call("/health", method="GET")).status == 503

    @looped
    async def test_before_the_first_check_nothing_is_sent(self):
        engine = FakeEngine("e")
        engine.health = 500
        async with rig(engine, is_up=False) as it:
            assert (await it.call()).status == 503
            assert not engine.received
            engine.health = 200
            await it.until_up("e")
            assert (await it.call()).status == 200

    @looped
    async def test_a_stream_that_stands_still_while_the_queue_grows_takes_the_engine_out(self):
        go_on = asyncio.Event()

        async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
            wire.open_stream()
            wire.chunk(b"data: 1\n\n")
            await go_on.wait()
            wire.chunk(b"data: 2\n\n")
            wire.end_stream()

        wedged, other = FakeEngine("wedged", script), FakeEngine("other")
        async with rig(wedged, stall_timeout=0.1) as it:
            first = await it.caller()
            first.ask(body={"stream": True})
            await first.head()
            await asyncio.sleep(0.15)
            assert it.engine("wedged").condition == "up", "its queue has not grown"
            second = await it.caller()
            wedged.script = say_nothing
            second.ask()
            await it.until(lambda: it.engine("wedged").condition == "stalled")
            assert (await it.call()).status == 503
            go_on.set()
            await it.until_up("wedged")
            await other.start()
            other.die()

    @looped
    async def test_an_engine_that_comes_back_is_given_its_share_step_by_step(self):
        engine, other = FakeEngine("e", say_nothing), FakeEngine("other", say_nothing)
        async with rig(engine, other, slow_start=1000) as it:
            engine.health = 500
            await it.until(lambda: it.engine("e").condition == "down")
            engine.health = 200
            await it.until_up("e")
            for _ in range(20):
                (await it.caller()).ask()
            await it.until(lambda: it.num_in_flight == 20)
            assert it.app.shared.fleet.router.num_in_flight_on(it.engine("e").row) == 1


class TestTime:
    @looped
    async def test_an_answer_must_begin_in_time_and_the_engine_is_notified(self):
        engine = FakeEngine("e", say_nothing)
        async with rig(engine, first_byte_timeout=0.1) as it:
            answer = await it.call()
            assert (answer.status, answer.code) == (504, "upstream_timeout")
            [wire] = [wire for wire in engine.wires if wire.tasks or wire.is_lost.is_set()][:1]
            await wire.is_lost.wait()

    @looped
    async def test_an_answer_that_stands_still_is_ended_with_the_cause(self):
        async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
            wire.open_stream()
            wire.chunk(b"data: 1\n\n")
            await asyncio.sleep(3600)

        async with rig(FakeEngine("e", script), idle_timeout=0.1) as it:
            caller = await it.caller()
            caller.ask(body={"stream": True})
            await caller.head()
            assert b"the engine sent nothing for 0.1 s" in await caller.reader.read()


class TestClientsThatLeave:
    @pytest.mark.parametrize("script", [say_nothing, stream_and_hang_up])
    @looped
    async def test_the_engine_hears_of_it_at_once(self, script):
        async def stream_forever(engine: FakeEngine, wire: Wire, request: Received) -> None:
            wire.open_stream()
            while True:
                wire.chunk(b"data: x\n\n")
                await asyncio.sleep(0.005)

        engine = FakeEngine("e", say_nothing if script is say_nothing else stream_forever)
        async with rig(engine, health_interval=30) as it:
            caller = await it.caller()
            caller.ask(body={"stream": True})
            await it.until(lambda: bool(engine.received))
            await asyncio.sleep(0.02)
            [wire] = [wire for wire in engine.wires if wire.tasks]
            caller.hang_up()
            await wire.is_lost.wait()
            assert it.num_in_flight == 0
            assert it.engine("e").counts.num_left == 1
            assert it.engine("e").condition == "up"

    @looped
    async def test_a_client_that_leaves_while_a_connection_is_made_leaves_nothing_behind(self):
        engine = FakeEngine("e")
        async with rig(engine, health_interval=30) as it:
            for _ in range(50):
                it.engine("e").pool.sweep(float("inf"))
                caller = await it.caller()
                caller.ask()
                await asyncio.sleep(random.random() * 0.002)
                caller.hang_up()
            await it.until_idle()


class TestManyAtOnce:
    @looped
    async def test_killing_an_engine_in_mid_run_loses_no_request_that_had_not_begun_to_answer(self):
        """Two engines, one killed while it computes, streams and queues: clients without a byte get whole answers."""

        async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
            await asyncio.sleep(rng.random() * 0.2)
            wire.open_stream()
            await asyncio.sleep(rng.random() * 0.2)
            for i in range(5):
                wire.chunk(b"data: %d\n\n" % i)
                await asyncio.sleep(rng.random() * 0.1)
            wire.chunk(b"data: [DONE]\n\n")
            wire.end_stream()

        async def one(it) -> str:
            caller: Caller = await it.caller()
            caller.ask(body={"stream": True})
            status, _ = await caller.head()
            if status != 200:
                return f"failed {status}"
            body = await _all_of(caller)
            return "whole" if b"[DONE]" in body else "broken" if b"event: error" in body else "silent"

        rng = random.Random(3)
        doomed, other = FakeEngine("doomed", script), FakeEngine("other", script)
        async with rig(doomed, other) as it:
            running = [asyncio.ensure_future(one(it)) for _ in range(100)]
            await it.until(lambda: it.num_in_flight > 50 and it.engine("doomed").num_streaming > 5)
            doomed.die()
            running += [asyncio.ensure_future(one(it)) for _ in range(50)]
            ends = await asyncio.gather(*running)
            assert set(ends) <= {"whole", "broken"}
            assert ends.count("broken") == it.engine("doomed").counts.num_broken > 0
            assert it.counts.retries["lost"] > 0, "none was waiting when it died"

    @looped
    async def test_law_whatever_happens_every_request_ends_once_and_nothing_stays_counted(self):
        """Engines that do anything, clients that leave at any time; the rig checks the books at the end."""

        async def anything(engine: FakeEngine, wire: Wire, request: Received) -> None:
            await asyncio.sleep(rng.choice([0, 0, 0.002, 0.01]))
            await rng.choice(
                [
                    say_ok,
                    say_ok,
                    say_ok,
                    answering(500),
                    answering(503),
                    hang_up,
                    promise_and_hang_up,
                    stream_and_hang_up,
                ]
            )(engine, wire, request)

        async def one(it) -> None:
            caller: Caller = await it.caller()
            caller.ask(body={"messages": [{"role": "user", "content": "x" * rng.randrange(3000)}]})
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.03)
                caller.hang_up()
                return
            await caller.head()

        rng = random.Random(4)
        engines = [FakeEngine(name, anything) for name in "abcd"]
        async with rig(*engines) as it:
            for _ in range(10):
                await asyncio.gather(*(one(it) for _ in range(30)))
            await it.until_idle()
            assert it.counts.num_requests == 300
            table = it.app.shared.fleet.router.table
            assert not table.num_in_flight.any()
            assert not table.prefill_tokens.any()
            assert not any(engine.num_streaming for engine in it.app.shared.fleet)


async def _all_of(caller: Caller) -> bytes:
    body = b""
    while b"0\r\n\r\n" not in body[-5:]:
        data = await caller.reader.read(65536)
        if not data:
            break
        body += data
    return body
