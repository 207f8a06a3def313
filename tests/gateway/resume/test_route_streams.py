"""The router before engines with token ids, which die, hang, drain and fail in the middle of streams."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from typing import Any

import pytest
from gateway.resume.test_stream import check_as_one_answer
from gateway.rig import CHAT, FakeEngine, Received, Rig, Wire, admin_of, looped, rig
from support.token_engine import TokenEngine

COMPLETIONS = "/v1/completions"


class StreamingEngine(FakeEngine):
    """Streams what a `TokenEngine` answers, an event at a time, and misbehaves at the event number `fails_at`."""

    def __init__(self, name: str, form: str = "vllm", pause_s: float = 0.001, **more: Any) -> None:
        super().__init__(name, StreamingEngine.stream)
        self.tokens = TokenEngine(form, name, **more)
        self.pause_s = pause_s
        self.fails_at: int | None = None
        self.fail = die
        self.is_stopped = asyncio.Event()

    async def answer(self, wire: Wire, request: Received) -> None:
        if self.is_stopped.is_set():
            await asyncio.sleep(3600)
        if request.target.endswith("/v1/models"):
            card = {"id": "m", "object": "model", "max_model_len": 512}
            wire.reply(json.dumps({"object": "list", "data": [card]}).encode())
        else:
            await super().answer(wire, request)

    async def stream(self, wire: Wire, request: Received) -> None:
        events = self.tokens.answer(request.target, request.body)
        wire.open_stream()
        for i, event in enumerate(events):
            if self.fails_at == i:
                self.fails_at = None
                await self.fail(self, wire)
                return
            wire.chunk(event)
            await asyncio.sleep(self.pause_s)
        wire.end_stream()


async def die(engine: StreamingEngine, wire: Wire) -> None:
    wire.transport.abort()


async def break_off_within_an_event(engine: StreamingEngine, wire: Wire) -> None:
    wire.write(b'ff\r\ndata: {"id":"x","choices":[{"index":0,')
    await asyncio.sleep(0.01)
    wire.transport.abort()


async def hang(engine: StreamingEngine, wire: Wire) -> None:
    engine.is_stopped.set()
    await asyncio.sleep(3600)


async def end_early(engine: StreamingEngine, wire: Wire) -> None:
    wire.end_stream()


async def abort(engine: StreamingEngine, wire: Wire) -> None:
    choice = {"index": 0, "text": "", "delta": {}, "finish_reason": "abort", "token_ids": []}
    wire.chunk(b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n")
    wire.end_stream()


async def report_a_fault(engine: StreamingEngine, wire: Wire) -> None:
    wire.chunk(
        b'data: {"error":{"message":"EngineDeadError","type":"InternalServerError","param":null,"code":500}}\n\n'
    )
    wire.chunk(b"data: [DONE]\n\n")
    wire.end_stream()


def body_of(path: str = CHAT, text: str = "hello", **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {"model": "m", "stream": True, "temperature": 0, "max_tokens": 60, "min_tokens": 40, **prompt, **fields}


def calm(path: str, body: dict[str, Any], form: str = "vllm") -> bytes:
    return b"".join(TokenEngine(form).answer(path, json.dumps(body).encode()))


@pytest.mark.parametrize(("path", "form"), [(CHAT, "vllm"), (CHAT, "moestro"), (COMPLETIONS, "vllm")])
@pytest.mark.parametrize("fails_at", [0, 1, 17])
@pytest.mark.parametrize("fail", [die, break_off_within_an_event, end_early, report_a_fault, abort])
@looped
async def test_stream_goes_on_elsewhere(path, form, fails_at, fail):
    engines = StreamingEngine("a", form), StreamingEngine("b", form)
    body = body_of(path, stream_options={"include_usage": True})
    async with rig(*engines, resume_streams=True) as it:
        for engine in engines:
            engine.fails_at, engine.fail = fails_at, fail
        engines[random.Random(fails_at).randrange(2)].fails_at = None  # Either may be the first.
        answers = [await it.call(path, body) for _ in range(3)]
        for answer in answers:
            check_as_one_answer(answer.body, calm(path, body, form), path=path, has_ids=False)
        assert sum(it.counts.resumed.values()) + sum(it.counts.retries.values()) >= 1
        assert not it.counts.not_resumable


@looped
async def test_stream_of_an_engine_that_hangs_goes_on_elsewhere():
    engines = StreamingEngine("a"), StreamingEngine("b")
    async with rig(*engines, resume_streams=True, hang_timeout=0.5, health_interval=0.1) as it:
        for engine in engines:
            engine.fails_at, engine.fail = 9, hang

        async def only_one_hangs(engine: StreamingEngine, wire: Wire) -> None:
            for other in engines:
                other.fails_at = None
            await hang(engine, wire)

        for engine in engines:
            engine.fail = only_one_hangs
        answer = await it.call(body=body_of())
        check_as_one_answer(answer.body, calm(CHAT, body_of()), path=CHAT, has_ids=False)
        assert it.counts.resumed == {"stopped answering": 1}


@looped
async def test_streams_of_an_engine_that_drains_go_on_elsewhere():
    engines = StreamingEngine("a", pause_s=0.02), StreamingEngine("b", pause_s=0.02)
    async with rig(*engines, resume_streams=True) as it, admin_of(it) as admin:
        calls = [asyncio.create_task(it.call(body=body_of(text=f"hello {i}"))) for i in range(8)]
        await it.until(lambda: it.engine("a").num_streaming > 1)
        await asyncio.sleep(0.2)
        async with admin.post("/admin/engines/a/drain") as done:
            assert done.status == 200
        await it.until(lambda: not it.engine("a").num_streaming)
        assert not all(call.done() for call in calls), "they ended before they could move"
        for i, call in enumerate(calls):
            expected = calm(CHAT, body_of(text=f"hello {i}"))
            check_as_one_answer((await call).body, expected, path=CHAT, has_ids=False)
        assert it.counts.resumed["drains"] > 1


@looped
async def test_engine_that_continues_the_stream_of_a_slow_client_waits_for_it():
    num_tokens, text = 200, "x" * 50_000

    async def stream(engine: FakeEngine, wire: Wire, request: Received) -> None:
        prompt = json.loads(request.body)["prompt"]
        num_before = 0 if isinstance(prompt, str) else len(prompt) - 1
        wire.open_stream()
        for at in range(num_before, num_tokens):
            choice = {"index": 0, "text": text, "token_ids": [7], "finish_reason": None}
            choice |= {"prompt_token_ids": [1]} if at == num_before else {}
            choice |= {"finish_reason": "length"} if at == num_tokens - 1 else {}
            wire.chunk(b"data: " + json.dumps({"id": "x", "model": "m", "choices": [choice]}).encode() + b"\n\n")
        wire.chunk(b"data: [DONE]\n\n")
        wire.end_stream()

    engines = FakeEngine("a", stream), FakeEngine("b", stream)
    async with rig(*engines, resume_streams=True) as it:
        connected = socket.create_connection(("127.0.0.1", it.port))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        caller = await it.caller(connected)
        caller.ask(
            COMPLETIONS, {"model": "m", "prompt": "hi", "stream": True, "temperature": 0, "max_tokens": num_tokens}
        )
        await it.until(lambda: len(it.app.shared.active) == 1)
        [exchange] = it.app.shared.active.values()
        await it.until(lambda: exchange._connection is not None and exchange._connection._is_paused)
        first = exchange._engine.name
        it.app.engine_admin.switch(first, is_draining=True)
        await it.until(lambda: exchange._engine.name != first and exchange._engine.num_streaming == 1)
        assert exchange._connection._is_paused
        body = (await caller.answer()).body
        assert body.count(text.encode()) == num_tokens
        assert it.counts.resumed == {"drains": 1}


@looped
async def test_stream_that_is_not_resumable_ends_with_an_error_and_says_why():
    engines = StreamingEngine("a"), StreamingEngine("b")
    async with rig(*engines, resume_streams=True) as it, admin_of(it) as admin:
        for engine in engines:
            engine.fails_at = 9
        body = body_of(presence_penalty=0.5)
        answer = await ended_early(it, body)
        assert b"upstream_disconnected" in answer
        assert it.counts.not_resumable == {"presence_penalty": 1}
        assert [json.loads(each.body) for engine in engines for each in engine.received] == [body]
        async with admin.get("/admin/explain/the-one") as found:
            assert (await found.json())["not_resumable"] == "presence_penalty"
        assert (
            'moestro:route_streams_not_resumable_total{reason="presence_penalty"} 1.0'
            in it.app.exposition.text().decode()
        )


async def ended_early(it: Rig, body: dict[str, Any]) -> bytes:
    """The body of an answer whose connection is cut."""
    caller = await it.caller()
    caller.ask(CHAT, body, X_Request_Id="the-one")
    await caller.head()
    return await caller.reader.read()


@looped
async def test_stream_without_another_engine_ends_with_an_error():
    engine = StreamingEngine("a")
    async with rig(engine, resume_streams=True) as it:
        engine.fails_at = 9
        answer = await ended_early(it, body_of())
        assert b"upstream_disconnected" in answer
        assert answer.count(b"event: error") == 1


@looped
async def test_engines_without_token_ids_end_chats_with_an_error():
    engines = StreamingEngine("a", has_ids=False), StreamingEngine("b", has_ids=False)
    async with rig(*engines, resume_streams=True) as it:
        for engine in engines:
            engine.fails_at = 9
        assert b"upstream_disconnected" in await ended_early(it, body_of())
        assert it.counts.not_resumable == {"no token ids": 1}


@looped
async def test_continuation_that_is_refused_ends_the_stream_with_an_error():
    engines = StreamingEngine("a"), StreamingEngine("b")

    async def refuse(engine: FakeEngine, wire: Wire, request: Received) -> None:
        if request.target == COMPLETIONS:
            wire.reply(b'{"error":{"message":"no","type":"BadRequestError","code":400}}', 400)
        else:
            await StreamingEngine.stream(engine, wire, request)

    for engine in engines:
        engine.script = refuse
    async with rig(*engines, resume_streams=True) as it:
        for engine in engines:
            engine.fails_at = 9
        answer = await ended_early(it, body_of())
        assert b"answered 400" in answer
        assert answer.count(b"event: error") == 1


@looped
async def test_busy_engine_passes_a_continuation_on_to_a_third():
    engines = [StreamingEngine(name) for name in "abc"]
    refused = []

    async def refuse_once(engine: FakeEngine, wire: Wire, request: Received) -> None:
        if request.target == COMPLETIONS and not refused:
            refused.append(engine.name)
            wire.reply(b"{}", 503)
        else:
            await StreamingEngine.stream(engine, wire, request)

    for engine in engines:
        engine.script = refuse_once
    async with rig(*engines, resume_streams=True) as it:
        for engine in engines:
            engine.fails_at = 9
        task = asyncio.create_task(it.call(body=body_of()))
        await it.until(lambda: any(engine.fails_at is None for engine in engines))
        for engine in engines:
            engine.fails_at = None
        check_as_one_answer((await task).body, calm(CHAT, body_of()), path=CHAT, has_ids=False)
        assert refused


@looped
async def test_bodies_pass_unchanged_without_the_flag():
    engines = StreamingEngine("a"), StreamingEngine("b")
    async with rig(*engines) as it:
        body = body_of()
        assert (await it.call(body=body)).status == 200
        assert [each.body for engine in engines for each in engine.received] == [json.dumps(body).encode()]


@looped
async def test_requests_without_a_stream_pass_unchanged_with_the_flag():
    async with rig(FakeEngine("a"), resume_streams=True) as it:
        body = {"messages": [{"role": "user", "content": "hi"}], "presence_penalty": 1}
        assert (await it.call(body=body)).status == 200
        assert not it.counts.not_resumable


@looped
async def test_many_streams_survive_engines_that_die_again_and_again():
    rng = random.Random(5)
    engines = [StreamingEngine(name, pause_s=0.01, groups=lambda: rng.choice((1, 1, 1, 2))) for name in "abc"]
    async with rig(*engines, resume_streams=True) as it:
        for victim in engines + engines:
            paths = [rng.choice((CHAT, COMPLETIONS)) for _ in range(10)]
            bodies = [body_of(path, f"hello {rng.random()}") for path in paths]
            calls = [asyncio.create_task(it.call(path, body)) for path, body in zip(paths, bodies, strict=True)]
            await it.until(lambda name=victim.name: it.engine(name).num_streaming > 1)
            await asyncio.sleep(rng.random() / 10)
            port = victim.port
            victim.die()
            for path, body, call in zip(paths, bodies, calls, strict=True):
                check_as_one_answer((await call).body, calm(path, body), path=path, has_ids=False)
            await victim.start(port)
            await it.until(lambda name=victim.name: it.app.shared.fleet.is_ready(it.engine(name)))
        assert sum(it.counts.resumed.values()) > 6


@looped
async def test_stream_that_loses_four_engines_ends_with_an_error():
    engines = [StreamingEngine(name) for name in "abc"]

    async def always_die(engine: StreamingEngine, wire: Wire) -> None:
        engine.fails_at = 5
        await die(engine, wire)

    async with rig(*engines, resume_streams=True) as it:
        for engine in engines:
            engine.fails_at, engine.fail = 5, always_die
        assert b"upstream_disconnected" in await ended_early(it, body_of())
        assert sum(it.counts.resumed.values()) == 3
