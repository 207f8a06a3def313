"""Loads that come with answers: the router has them before its next decision, and polls need not be fast."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from gateway.rig import FakeEngine, Received, Wire, looped, rig
from support.running import complete, routing

from moestro.gateway.clients.http_headers import HeaderCache
from moestro.routing.decision_record import Submitted, decode_entry

HEADER = "x-moestro-load"


def report(age_us: int = 0, **figures: float) -> str:
    return json.dumps({"age_us": age_us, "load": figures})


def answering(*values: str):
    """A script that answers with these loads in turn."""
    left = iter(values)

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        assert request.header(HEADER) == "1", "the router asks each engine"
        wire.reply(headers=f"{HEADER}: {next(left)}\r\n")

    return script


def table_of(it):
    return it.app.shared.fleet.router.table


def figure(it, name: str, row: int = 0) -> tuple[float, float]:
    """Value and age, seconds, of a figure as the next decision sees it."""
    router = it.app.shared.fleet.router
    router._take_reports()  # as the next decision does
    column = getattr(router.table, name)
    return column.values[row], (time.monotonic_ns() - int(column.as_of_ns[row])) * 1e-9


@looped
async def test_each_answer_brings_the_load_and_the_client_does_not_see_it():
    """The second and third heads are known but for the load, so they are not parsed."""
    loads = [report(num_running=each, num_waiting=0, queued_prefill_tokens=10 * each) for each in (3, 5, 7)]
    async with rig(FakeEngine("e", answering(*loads))) as it:
        caller = await it.caller()
        for num in (3, 5, 7):
            caller.ask()
            answer = await caller.answer()
            assert answer.status == 200
            assert HEADER not in answer.headers
            assert figure(it, "num_running")[0] == num
            assert figure(it, "queued_prefill_tokens")[0] == 10 * num


@looped
async def test_a_stream_brings_the_load_with_its_first_byte():
    begun, release = asyncio.Event(), asyncio.Event()

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
        wire.write(f"{head}{HEADER}: {report(num_running=9, num_waiting=1)}\r\n\r\n".encode())
        wire.chunk(b"data: 1\n\n")
        begun.set()
        await release.wait()
        wire.end_stream()

    async with rig(FakeEngine("e", script)) as it:
        call = asyncio.create_task(it.call(body={"stream": True}))
        await begun.wait()
        await it.until(lambda: figure(it, "num_running")[0] == 9)
        assert not call.done()
        release.set()
        assert HEADER not in (await call).headers


@looped
async def test_the_age_of_a_report_is_the_engine_s_and_the_time_on_the_way():
    async with rig(FakeEngine("e", answering(report(2_000_000, num_running=1, num_waiting=0)))) as it:
        await it.call()
        assert 2.0 <= figure(it, "num_running")[1] < 4.0


@looped
async def test_a_request_that_left_just_before_a_report_is_not_contained_in_it():
    """A burst: the answer to the first request comes while the second is on its way to the engine."""
    release = asyncio.Event()

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        if b"slow" in request.body:
            await release.wait()
        wire.reply(headers=f"{HEADER}: {report(num_running=0, num_waiting=0)}\r\n")

    async with rig(FakeEngine("e", script)) as it:
        caller, other = await it.caller(), await it.caller()
        caller.ask(body={"prompt": "fast"})
        other.ask(body={"prompt": "slow"})
        await caller.answer()
        figure(it, "num_running")
        assert table_of(it).num_unseen[0] == 1
        release.set()
        await other.answer()


@pytest.mark.parametrize("value", ["", "{", "1", '{"age_us": -5, "load": {"num_running": 3}}', "x" * 2000])
@looped
async def test_what_is_no_report_changes_nothing(value):
    async with rig(FakeEngine("e", answering(value, value))) as it:
        caller = await it.caller()
        for _ in range(2):
            caller.ask()
            assert (await caller.answer()).status == 200
        assert figure(it, "num_running")[0] == 0


@looped
async def test_an_engine_without_the_header_keeps_the_figures_of_its_metrics():
    engine = FakeEngine("e")
    engine.metrics = b"vllm:num_requests_running 4\nvllm:num_requests_waiting 2\n"
    async with rig(engine, metrics_interval=0.02) as it:
        await it.until(lambda: figure(it, "num_running")[0] == 4)
        answer = await it.call()
        assert HEADER not in answer.headers
        assert figure(it, "num_waiting")[0] == 2


@looped
async def test_a_client_neither_asks_an_engine_nor_speaks_for_one():
    seen = []

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        seen.append([value for name, value in request.headers if name.lower() == HEADER])
        wire.reply()

    async with rig(FakeEngine("e", script)) as it:
        await it.call(x_moestro_load=report(num_running=99))
        assert seen == [["1"]]
        assert figure(it, "num_running")[0] == 0


@looped
async def test_a_rank_of_a_server_is_sent_no_question_because_the_load_would_be_that_of_all():
    seen = []

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        seen.append(request.header(HEADER))
        wire.reply(headers=f"{HEADER}: {report(num_running=8, num_waiting=0)}\r\n")

    async with rig(FakeEngine("e", script), dp_ranks="2") as it:
        await it.call()
        assert seen == [None]
        assert figure(it, "num_running", 0)[0] == figure(it, "num_running", 1)[0] == 0


def test_a_decision_s_record_has_the_age_of_the_load_of_the_answer_before(fake, tmp_path):
    """A real router before a real server, without polls."""
    record = tmp_path / "record.jsonl"
    flags = ("--metrics-interval", "0", "--route-policy", "lmetric", "--record", str(record))
    with routing(fake, tmp_path, *flags) as router:
        for _ in range(4):
            assert complete(router, max_tokens=4).status == 200
        router.stop()
    decisions = [each.decision for each in map(decode_entry, record.read_bytes().splitlines()) if is_decision(each)]
    assert len(decisions) == 4
    assert "queued_prefill_tokens" not in decisions[0].ages_ns, "the first answer brings the first load"
    assert all(0 <= each.ages_ns["queued_prefill_tokens"] < 10e9 for each in decisions[1:])


def is_decision(entry: object) -> bool:
    return isinstance(entry, Submitted) and entry.decision is not None


def test_a_head_is_known_again_whatever_its_varying_header_has():
    known: HeaderCache[str] = HeaderCache(4, HEADER)
    head = b"HTTP/1.1 200 OK\r\nx-moestro-load: 1\r\nContent-Length: 2\r\n\r\n"
    known.learn(head + b"ok", "head", has_length=True)
    other = head.replace(b": 1", b": 22").replace(b": 2\r\n\r\n", b": 345\r\n\r\n")
    assert known.find(other) == ("head", len(other), 345, b"22")
    assert known.find(head.replace(b"x-moestro-load: 1\r\n", b"")) is None
    assert known.find(head.replace(b": 1\r", b": \x01\r")) is None, "the parser judges other bytes"
    assert known.find(head.replace(b"x-moestro-load", b"X-Moestro-Load")) is None
