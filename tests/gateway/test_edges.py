"""HTTP at its edges: what is ambiguous or without a bound is refused with a clear status, on both sides."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from gateway.rig import CHAT, FakeEngine, Received, Wire, looped, request_bytes, rig

from moestro.gateway.settings import EngineUrl
from moestro.web.ports.heads import MAX_HEAD_BYTES

START = f"POST {CHAT} HTTP/1.1\r\n".encode()
LENGTH = b"Content-Length: 2\r\n"
HOST = b"Host: x\r\n"
KEY = b"Authorization: Bearer k\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def refusals(*rows: tuple[str, bytes, int, str]):
    return pytest.mark.parametrize(("data", "status", "code"), [row[1:] for row in rows], ids=[row[0] for row in rows])


@refusals(
    ("no Host", START + LENGTH + b"\r\n{}", 400, "bad_request"),
    ("two Hosts", START + HOST + HOST + LENGTH + b"\r\n{}", 400, "bad_request"),
    ("a Host that is none", START + b"Host: a b\r\n" + LENGTH + b"\r\n{}", 400, "bad_request"),
    ("a Host with a path", START + b"Host: a/b\r\n" + LENGTH + b"\r\n{}", 400, "bad_request"),
    ("two keys", START + HOST + KEY + b"AUTHORIZATION: Bearer l\r\n" + LENGTH + b"\r\n{}", 400, "bad_request"),
    ("gzip", START + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, "unsupported_transfer_encoding"),
    (
        "gzip in a line of its own",
        START + HOST + b"Transfer-Encoding: gzip\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
        400,
        "bad_request",
    ),
    ("chunks in HTTP/1.0", START.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n0\r\n\r\n", 400, "bad_request"),
    ("HTTP/0.9", b"GET /version\r\n\r\n", 400, "bad_request"),
    ("an expectation", START + HOST + LENGTH + b"Expect: 200-ok\r\n\r\n{}", 417, "expectation_failed"),
    ("more than one", START + HOST + LENGTH + b"Expect: 100-continue, x\r\n\r\n{}", 417, "expectation_failed"),
)
@looped
async def test_a_head_that_is_ambiguous_or_not_understood_is_refused(data, status, code):
    engine = FakeEngine("e")
    async with rig(engine) as it:
        caller = await it.caller()
        caller.send(data)
        answer = await caller.answer()
        assert (answer.status, answer.code) == (status, code)
        assert answer.json["error"].keys() == {"message", "type", "param", "code"}
        assert answer.headers["connection"] == "close"
        assert await caller.is_closed()
        assert not engine.received
        assert it.counts.refusals == {code: 1}


@pytest.mark.parametrize("host", ["", "x", "x:80", "[::1]:80", "a.b-c_d~e"])
@looped
async def test_a_host_may_be_any_name_and_empty(host):
    async with rig(FakeEngine("e")) as it:
        caller = await it.caller()
        caller.send(START + f"Host: {host}\r\n".encode() + LENGTH + b"\r\n{}")
        assert (await caller.answer()).status == 200


@looped
async def test_old_http_needs_no_host_and_gets_no_permission_to_go_on():
    async with rig(FakeEngine("e")) as it:
        caller = await it.caller()
        caller.send(START.replace(b"1.1", b"1.0") + LENGTH + b"Expect: 100-continue\r\n\r\n")
        await asyncio.sleep(0.02)
        caller.send(b"{}")
        assert (await caller.answer()).status == 200


@looped
async def test_permission_to_go_on_comes_after_the_answer_before_it():
    release = asyncio.Event()

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        await release.wait()
        wire.reply()

    async with rig(FakeEngine("e", script)) as it:
        caller = await it.caller()
        second = request_bytes(body=b"{}", Expect="100-continue")
        caller.send(request_bytes(body=b"{}") + second[:-2])
        await it.until(lambda: it.num_in_flight == 1)
        release.set()
        assert (await caller.answer()).status == 200
        assert await caller.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        caller.send(second[-2:])
        assert (await caller.answer()).status == 200


@looped
async def test_a_flood_of_malformed_requests_is_one_log_line_without_what_was_sent(caplog):
    caplog.set_level(logging.INFO)
    async with rig(FakeEngine("e")) as it:
        for _ in range(20):
            caller = await it.caller()
            caller.send(b"GET /sec\x00ret HTTP/1.1\r\nSecret: \x00\r\n\r\n")
            answer = await caller.answer()
            assert answer.status == 400
            assert "ret" not in answer.json["error"]["message"]
        assert it.counts.refusals["bad_request"] == 20
    lines = [message for message in caplog.messages if "refused" in message]
    assert len(lines) == 1
    assert "Secret" not in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("is_sent_at_once", [True, False])
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@looped
async def test_garbage_behind_a_good_request_takes_nothing_from_its_answer(connection, is_sent_at_once):
    release = asyncio.Event()

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        await release.wait()
        wire.reply(b"x" * 300_000)

    async with rig(FakeEngine("e", script)) as it:
        caller = await it.caller()
        garbage = b"\x00GARBAGE" * (40_000)
        good = request_bytes(body=b"{}", Connection=connection)
        caller.send(good + garbage if is_sent_at_once else good)
        await it.until(lambda: it.num_in_flight == 1)
        if not is_sent_at_once:
            caller.send(garbage)
        await asyncio.sleep(0.05)
        release.set()
        await asyncio.sleep(0.05)
        answer = await caller.answer()
        assert (answer.status, len(answer.body)) == (200, 300_000)
        if connection == "keep-alive":
            assert (await caller.answer()).code == "bad_request"
        assert await caller.is_closed()


ENDLESS = {
    "a trailer": (b"0\r\nA: ", b"v" * 1000),
    "trailers": (b"0\r\n", b"A: v\r\n" * 170),
    "a trailer's name": (b"0\r\n", b"A" * 1000),
    "a chunk extension": (b"1;", b"x" * 1000),
    "a chunk extension at the end": (b"1\r\nx\r\n0;", b"x" * 1000),
}


@pytest.mark.parametrize(("begin", "piece"), ENDLESS.values(), ids=ENDLESS)
@looped
async def test_what_comes_around_chunks_has_the_bound_of_a_head(begin, piece):
    engine = FakeEngine("e")
    async with rig(engine) as it:
        for is_slow in (False, True):
            caller = await it.caller()
            caller.send(START + HOST + CHUNKED + b"\r\n" + begin)
            for _ in range(4 * MAX_HEAD_BYTES // len(piece)):
                caller.send(piece)
                if is_slow:
                    await asyncio.sleep(0)
            answer = await caller.answer()
            assert (answer.status, answer.code) == (431, "head_too_large")
            assert await caller.is_closed()
        assert not engine.received


@looped
async def test_a_hundred_megabytes_of_trailer_delay_no_client():
    async with rig(FakeEngine("e")) as it:
        caller = await it.caller()
        caller.send(START + HOST + CHUNKED + b"\r\n0\r\nA: ")

        async def pour() -> None:
            for _ in range(400):
                caller.send(b"v" * (1 << 18))
                await caller.writer.drain()

        pouring = asyncio.create_task(pour())
        longest_s = 0.0
        while not pouring.done():
            begin_s = time.thread_time()
            assert (await it.call("/health", method="GET")).status == 200
            longest_s = max(longest_s, time.thread_time() - begin_s)
        assert (await caller.answer()).status == 431
        assert longest_s < 1.0  # it was seconds, all in one


@looped
async def test_small_trailers_and_extensions_are_read_and_dropped():
    engine = FakeEngine("e")
    async with rig(engine) as it:
        caller = await it.caller()
        trailers = b"".join(b"T%d: %b\r\n" % (number, b"v" * 1000) for number in range(60))
        for _ in range(3):
            caller.send(START + HOST + CHUNKED + b"\r\n2;a=b\r\n{}\r\n0;c\r\n" + trailers + b"\r\n")
            assert (await caller.answer()).status == 200
        assert all(request.body == b"{}" and request.header("t1") is None for request in engine.received)


def says(data: bytes):
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.write(data)

    return script


OK = b"HTTP/1.1 200 OK\r\n"
BAD_ANSWERS = {
    **{
        str(status): b"HTTP/1.1 %03d X\r\nContent-Length: 2\r\n\r\nok" % status
        for status in (0, 20, 99, 103, 150, 600, 999)
    },
    "a coding that is not known": OK + b"Transfer-Encoding: gzip\r\n\r\nok",
    "a coding around the chunks": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "a coding after the chunks": OK + CHUNKED + b"Transfer-Encoding: gzip\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "a long head at once": OK + b"A: " + b"v" * (MAX_HEAD_BYTES + 1) + b"\r\nContent-Length: 2\r\n\r\nok",
    "interim answers without end": b"HTTP/1.1 100 X\r\nA: v\r\n\r\n" * (MAX_HEAD_BYTES // 10),
}


@pytest.mark.parametrize("data", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
@looped
async def test_an_answer_that_no_client_could_use_is_a_bad_gateway_and_the_engines_failure(data):
    bad = FakeEngine("bad", says(data))
    async with rig(bad, health_interval=30) as it:
        answer = await it.call()
        assert (answer.status, answer.code) == (502, "upstream_unavailable")
        assert "its answer" in answer.json["error"]["message"]
        assert it.engine("bad").counts.num_unreachable == 1
        assert it.engine("bad").health.breaker._evidence.num_witnesses == 1


@looped
async def test_another_engine_answers_in_place_of_one_with_an_impossible_status():
    bad, good = FakeEngine("bad", says(BAD_ANSWERS["999"])), FakeEngine("good")
    async with rig(bad, good, health_interval=30, route_policy="round_robin") as it:
        answers = [await it.call() for _ in range(4)]
        assert {answer.status for answer in answers} == {200}
        assert it.engine("bad").counts.num_unreachable >= 1


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("begin", "piece"), ENDLESS.values(), ids=ENDLESS)
@looped
async def test_what_comes_around_an_engines_chunks_has_the_bound_of_a_head(begin, piece, is_known):
    """The answer has begun, so the client's connection is cut, and the engine's failure is counted."""

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.open_stream()
        wire.chunk(b"data: 1\n\n")
        if is_known and len(engine.received) == 1:
            wire.end_stream()
            return
        await asyncio.sleep(0.01)
        wire.write(begin)
        for _ in range(4 * MAX_HEAD_BYTES // len(piece)):
            wire.write(piece)
            await asyncio.sleep(0)

    engine = FakeEngine("e", script)
    async with rig(engine, health_interval=30) as it:
        if is_known:
            await it.call()
        caller = await it.caller()
        caller.ask()
        status, _ = await caller.head()
        assert status == 200
        assert b"upstream_disconnected" in await caller.reader.read()
        assert it.engine("e").counts.num_broken == 1


@pytest.mark.parametrize("behind", [b"x", b"GARBAGE\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
@looped
async def test_bytes_behind_the_end_of_a_connection_are_dropped_without_a_log(caplog, behind):
    async with rig(FakeEngine("e")) as it:
        it.faults.watch(asyncio.get_running_loop())
        caller = await it.caller()
        caller.send(b"GET /health HTTP/1.0\r\n\r\n" + behind)
        assert (await caller.answer()).status == 200
        assert await caller.is_closed()
        await asyncio.sleep(0.05)
        assert not caplog.messages


@looped
async def test_engines_with_tls_share_one_context_and_one_look_at_its_files():
    async with rig(FakeEngine("e")) as it:
        added = [it.app.engine_admin.add(EngineUrl.parse(f"https://127.0.0.1:{port}")) for port in (7, 9)]
        first, second = (each.pool._address.tls for each in added)
        assert first is second
        assert first is not None
        assert it.engine("e").pool._address.tls is None
