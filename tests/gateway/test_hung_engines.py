"""Engines that accept connections and answer nothing: no new requests, and those that wait move once."""

from __future__ import annotations

import asyncio

import pytest
from gateway.rig import FakeEngine, Received, Rig, Wire, looped, rig, say_ok

from moestro.routing.health import Condition

# Long enough that a busy machine suspects no engine that answers.
HANG = {"hang_timeout": 1.2, "health_interval": 30, "probe_timeout": 5.0}


class Hanging(FakeEngine):
    """An engine that answers nothing while `hangs`, as one whose process is stopped, and then everything."""

    def __init__(self, name: str, script=say_ok) -> None:
        super().__init__(name, script)
        self.wakes = asyncio.Event()
        self.wakes.set()
        self.num_arrived = 0

    def stop(self) -> None:
        self.wakes.clear()

    async def answer(self, wire: Wire, request: Received) -> None:
        self.num_arrived += request.method == "POST"
        await self.wakes.wait()
        await super().answer(wire, request)


async def stream_slowly(engine: Hanging, wire: Wire, request: Received) -> None:
    wire.open_stream()
    for _ in range(300):
        await engine.wakes.wait()
        wire.chunk(b"data: 1\n\n")
        await asyncio.sleep(0.01)
    wire.end_stream()


async def say_nothing(engine: FakeEngine, wire: Wire, request: Received) -> None:
    await asyncio.sleep(3600)


async def until(it: Rig, name: str, condition: Condition) -> None:
    await it.until(lambda: it.engine(name).condition is condition)


async def ask_until_on(it: Rig, engine: Hanging, count: int = 1) -> list[asyncio.Task]:
    """Send requests until `count` of them wait on `engine`."""
    fields = []
    for _ in range(50 * count):
        if engine.num_arrived >= count:
            return fields
        fields.append(asyncio.ensure_future(it.call(X_Request_Id=f"r{len(fields)}")))
        await asyncio.sleep(0.02)
    raise AssertionError(f"{engine.name} gets no requests")


@looped
async def test_requests_that_wait_on_a_hung_engine_move_once_and_are_answered_once():
    hung, other = Hanging("hung"), FakeEngine("other")
    async with rig(hung, other, route_policy="round_robin", **HANG) as it:
        hung.stop()
        fields = await ask_until_on(it, hung, 3)
        answers = await asyncio.gather(*fields)
        assert {answer.status for answer in answers} == {200}
        assert {answer.json["from"] for answer in answers} == {"other"}
        moved = [answer for answer in answers if "hung stopped answering" in answer.headers["x-moestro-reason"]]
        assert len(moved) == it.counts.retries["stopped answering"] == hung.num_arrived
        assert it.engine("hung").condition is Condition.DOWN
        num_received = len(other.received)
        hung.wakes.set()
        await it.until_up("hung")
        assert not hung.received, "an answer was computed twice"
        assert len(other.received) == num_received


@looped
async def test_the_record_of_a_moved_request_names_both_engines_and_the_cause():
    hung, other = Hanging("hung"), FakeEngine("other")
    async with rig(hung, other, route_policy="round_robin", **HANG) as it:
        hung.stop()
        await asyncio.gather(*await ask_until_on(it, hung))
        traces = it.app.shared.decision_log.recent(50)
        [trace] = [trace for trace in traces if len(trace.attempts) == 2]
        assert [(each.engine, each.because) for each in trace.attempts] == [
            ("hung", ""),
            ("other", "hung stopped answering"),
        ]
        assert trace.status == 200


@looped
async def test_a_suspected_engine_gets_no_new_request_while_another_can_take_it():
    hung, other = Hanging("hung"), FakeEngine("other")
    async with rig(hung, other, route_policy="round_robin", **(HANG | {"hang_timeout": 6.0})) as it:
        hung.stop()
        await until(it, "hung", Condition.SUSPECTED)
        for _ in range(10):
            assert (await it.call()).json["from"] == "other"
        assert hung.num_arrived == 0
        assert not it.app.shared.fleet.is_ready(it.engine("hung"))
        hung.wakes.set()
        await it.until_up("hung")
        assert it.engine("hung").num_forgotten == 0
        assert it.engine("hung").health.share(0) == 1.0


@pytest.mark.parametrize("models", [("m",), ("only here",)])
@looped
async def test_where_all_engines_that_can_are_suspected_they_still_get_requests(models):
    """All engines are suspected, or the only one that serves the model."""
    hung, other = Hanging("hung"), Hanging("other")
    hung.models = models
    async with rig(hung, other, **(HANG | {"hang_timeout": 6.0})) as it:
        hung.stop()
        if models == ("m",):
            other.stop()
            await until(it, "other", Condition.SUSPECTED)
        await until(it, "hung", Condition.SUSPECTED)
        fields = asyncio.ensure_future(it.call(body={"model": models[0], "prompt": "x"}))
        await it.until(lambda: hung.num_arrived + other.num_arrived == 1)
        hung.wakes.set()
        other.wakes.set()
        assert (await fields).status == 200


@looped
async def test_an_answer_that_has_begun_is_never_moved():
    hung, other = Hanging("hung", stream_slowly), Hanging("other", stream_slowly)
    async with rig(hung, other, **HANG) as it:
        caller = await it.caller()
        caller.ask(body={"stream": True})
        status, headers = await caller.head()
        assert await caller.reader.readuntil(b"data: 1")
        engine = hung if headers["x-moestro-engine"] == "hung" else other
        engine.stop()
        await until(it, engine.name, Condition.DOWN)
        await asyncio.sleep(0.1)
        engine.wakes.set()
        rest = b"".join([piece async for piece in _pieces_after_first(caller)])
        assert status == 200
        assert rest.count(b"data: 1") == 299
        assert hung.num_arrived + other.num_arrived == 1


async def _pieces_after_first(caller):
    await caller.reader.readexactly(len(b"\n\n\r\n"))
    async for piece in caller.pieces():
        yield piece


@looped
async def test_a_request_that_meets_two_hung_engines_moves_once():
    engines = [Hanging(name, say_nothing) for name in "abc"]
    async with rig(*engines, first_byte_timeout=5.0, **HANG) as it:
        a, b, c = [it.engine(engine.name) for engine in engines]
        for engine in (b, c):
            it.app.engine_admin.drain(engine, is_draining=True)
        fields = asyncio.ensure_future(it.call())
        await it.until(lambda: engines[0].num_arrived == 1)
        engines[0].stop()
        it.app.engine_admin.drain(b, is_draining=False)
        await it.until(lambda: engines[1].num_arrived == 1)
        engines[1].stop()
        it.app.engine_admin.drain(c, is_draining=False)
        await until(it, "b", Condition.DOWN)
        assert a.condition is Condition.DOWN
        assert (await fields).code == "upstream_timeout"
        assert [engine.num_arrived for engine in engines] == [1, 1, 0]


@looped
async def test_an_engine_that_streams_and_answers_no_check_is_not_suspected():
    class Busy(Hanging):
        async def answer(self, wire: Wire, request: Received) -> None:
            if request.method == "POST":
                self.stop()
                wire.open_stream()
                for _ in range(300):
                    wire.chunk(b"data: 1\n\n")
                    await asyncio.sleep(0.01)
                wire.end_stream()
                self.wakes.set()
            else:
                await super().answer(wire, request)

    async with rig(Busy("busy"), **HANG) as it:
        num_changes = it.engine("busy").counts.num_transitions
        await it.call(body={"stream": True})
        assert it.engine("busy").counts.num_transitions == num_changes


@looped
async def test_an_engine_that_answers_each_check_late_is_not_down():
    class Late(FakeEngine):
        delay_s = 0.0

        async def answer(self, wire: Wire, request: Received) -> None:
            await asyncio.sleep(self.delay_s)
            await super().answer(wire, request)

    late = Late("late")
    async with rig(late, **HANG) as it:
        late.delay_s = 1.5 * HANG["hang_timeout"] / 4  # each check is missed, and answered before the next is missed
        num_forgotten = it.engine("late").num_forgotten
        for _ in range(4):
            assert (await it.call()).status == 200
        assert it.engine("late").condition is not Condition.DOWN
        assert it.engine("late").num_forgotten == num_forgotten
