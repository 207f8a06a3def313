"""What goes through the router comes out as it went in, both ways."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from gateway.rig import CHAT, FakeEngine, Received, Wire, looped, request_bytes, rig

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "é" * 300}], "odd": [1e-3, None]}).encode()


async def echo(engine: FakeEngine, wire: Wire, request: Received) -> None:
    wire.reply(request.body)


@looped
async def test_bodies_pass_byte_for_byte():
    engine = FakeEngine("e", echo)
    async with rig(engine) as it:
        answer = await it.call(body=BODY)
        assert answer.body == BODY
        assert engine.received[0].body == BODY
        assert answer.headers["content-length"] == str(len(BODY))
        assert "transfer-encoding" not in answer.headers


@looped
async def test_a_chunked_body_reaches_the_engine_whole_and_with_its_length():
    engine = FakeEngine("e", echo)
    async with rig(engine) as it:
        caller = await it.caller()
        caller.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for start in range(0, len(BODY), 100):
            piece = BODY[start : start + 100]
            caller.send(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(0)
        caller.send(b"0\r\nTrailer: dropped\r\n\r\n")
        assert (await caller.answer()).body == BODY
        assert engine.received[0].header("content-length") == str(len(BODY))
        assert engine.received[0].header("transfer-encoding") is None
        assert engine.received[0].header("trailer") is None


@looped
async def test_a_stream_passes_piece_by_piece_at_any_border():
    events = b"".join(b'data: {"i": %d, "t": "\xc3\xa9"}\n\n' % i for i in range(50)) + b"data: [DONE]\n\n"
    rng = random.Random(0)
    borders = sorted(rng.sample(range(1, len(events)), 60))
    sent = [events[a:b] for a, b in zip([0, *borders], [*borders, len(events)], strict=True)]
    taken = asyncio.Event()

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.open_stream()
        for piece in sent:
            wire.chunk(piece)
            await taken.wait()  # the next one is sent when the client has this one: nothing is held back
            taken.clear()
        wire.end_stream()

    async with rig(FakeEngine("e", script)) as it:
        caller = await it.caller()
        caller.ask(body={"stream": True})
        status, headers = await caller.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        got = []
        async for piece in caller.pieces():
            got.append(piece)
            taken.set()
        assert got == sent


@looped
async def test_law_the_borders_of_reads_never_matter():
    """Requests cut at random, also in the middle of heads, and several at a time."""
    engine, rng = FakeEngine("e", echo), random.Random(1)
    bodies = [BODY[: rng.randrange(len(BODY))] for _ in range(40)]
    wire_bytes = b"".join(request_bytes(body=body, X_Odd="v" * rng.randrange(50)) for body in bodies)
    async with rig(engine) as it:
        caller = await it.caller()
        answers = asyncio.ensure_future(_answers(caller, len(bodies)))
        at = 0
        while at < len(wire_bytes):
            size = rng.choice([1, 2, 7, 300, 5000])
            caller.send(wire_bytes[at : at + size])
            at += size
            await asyncio.sleep(0)
        assert [answer.body for answer in await answers] == bodies


async def _answers(caller, count):
    return [await caller.answer() for _ in range(count)]


@looped
async def test_heads_lose_what_belongs_to_one_connection_and_keep_the_rest():
    engine = FakeEngine("e", echo)
    async with rig(engine) as it:
        answer = await it.call(
            body=BODY,
            Connection="keep-alive, X-Private",
            X_Private="1",
            Keep_Alive="timeout=5",
            TE="trailers",
            X_Kept="a  b",
            Traceparent="00-1-2-01",
            X_Forwarded_For="1.2.3.4",
            X_Forwarded_Host="evil",
        )
        got = engine.received[0]
        for name in ("connection", "x-private", "keep-alive", "te", "x-forwarded-host"):
            assert got.header(name) is None
        assert got.header("host") == f"127.0.0.1:{engine.port}"
        assert got.header("x-kept") == "a  b"
        assert got.header("traceparent") == "00-1-2-01"
        assert got.header("x-forwarded-for") == "1.2.3.4, 127.0.0.1"
        assert got.header("x-request-id") == answer.headers["x-request-id"]
        assert answer.headers["x-moestro-engine"] == "e"
        assert answer.headers["x-moestro-reason"]


@looped
async def test_an_engine_cannot_speak_in_the_routers_name():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.reply(
            headers="X-Moestro-Engine: other\r\nX-Request-Id: other\r\nConnection: X-Hop\r\nX-Hop: 1\r\nServer: s\r\n"
        )

    async with rig(FakeEngine("e", script)) as it:
        answer = await it.call(X_Request_Id="mine-1")
        assert answer.headers["x-moestro-engine"] == "e"
        assert answer.headers["x-request-id"] == "mine-1"
        assert "x-hop" not in answer.headers
        assert answer.headers["server"] == "s"


@looped
async def test_connections_are_kept_on_both_sides():
    engine = FakeEngine("e")
    async with rig(engine) as it:
        caller = await it.caller()
        for _ in range(20):
            caller.ask()
            assert (await caller.answer()).status == 200
        used = {id(wire) for wire in engine.wires}
        assert len(used) <= 2  # one for requests, one perhaps for a check at the same time


@looped
async def test_pipelined_requests_are_answered_in_order():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        await asyncio.sleep(0.02 if request.body == b"0" else 0)
        wire.reply(request.body)

    async with rig(FakeEngine("e", script)) as it:
        caller = await it.caller()
        caller.send(b"".join(request_bytes(body=b"%d" % i) for i in range(5)))
        assert [answer.body for answer in await _answers(caller, 5)] == [b"0", b"1", b"2", b"3", b"4"]


@looped
async def test_thousands_of_requests_in_one_read_are_answered():
    async with rig(FakeEngine("e")) as it:
        caller = await it.caller()
        caller.send(request_bytes("/version", method="GET") * 3000)
        assert {answer.status for answer in await _answers(caller, 3000)} == {200}


@looped
async def test_answers_without_a_length_end_with_their_connection():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nall ")
        await asyncio.sleep(0.01)
        wire.write(b"of it")
        wire.transport.close()

    async with rig(FakeEngine("e", script)) as it:
        answer = await it.call()
        assert answer.body == b"all of it"
        assert answer.headers["transfer-encoding"] == "chunked"


@looped
async def test_old_clients_get_no_chunks():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.open_stream()
        wire.chunk(b"a")
        wire.chunk(b"b")
        wire.end_stream()

    async with rig(FakeEngine("e", script)) as it:
        caller = await it.caller()
        caller.send(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        status, headers = await caller.head()
        assert status == 200
        assert "transfer-encoding" not in headers
        assert await caller.reader.read() == b"ab"


@looped
async def test_permission_to_go_on_is_given_here():
    engine = FakeEngine("e", echo)
    async with rig(engine) as it:
        caller = await it.caller()
        head, _, _ = request_bytes(body=BODY, Expect="100-continue").partition(b"\r\n\r\n")
        caller.send(head + b"\r\n\r\n")
        assert await caller.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert not engine.received
        caller.send(BODY)
        assert (await caller.answer()).body == BODY
        assert engine.received[0].header("expect") is None


@looped
async def test_interim_answers_of_engines_are_not_passed_on():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
        wire.reply(b"late")

    async with rig(FakeEngine("e", script)) as it:
        answer = await it.call()
        assert (answer.status, answer.body) == (200, b"late")
        assert "link" not in answer.headers


@pytest.mark.parametrize("status", [204, 304])
@looped
async def test_answers_that_have_no_body_have_none(status):
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.write(f"HTTP/1.1 {status} X\r\n\r\n".encode())

    async with rig(FakeEngine("e", script)) as it:
        caller = await it.caller()
        for _ in range(2):
            caller.ask()
            got, headers = await caller.head()
            assert got == status
            assert "transfer-encoding" not in headers


@looped
async def test_head_is_answered_with_a_head():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")

    async with rig(FakeEngine("e", script)) as it:
        caller = await it.caller()
        for path, length in (("/v1/responses/r", "1000"), ("/version", None)):
            caller.ask(path, method="HEAD")
            answer = await caller.answer(is_head=True)
            assert answer.status == 200
            assert length is None or answer.headers["content-length"] == length
        caller.ask("/version", method="GET")
        assert "version" in (await caller.answer()).json


@looped
async def test_an_upgrade_to_websockets_is_refused_and_its_body_is_never_taken_for_a_request():
    engine = FakeEngine("e", echo)
    async with rig(engine) as it:
        caller = await it.caller()
        caller.ask(body=request_bytes("/v1/smuggled"), Connection="Upgrade", Upgrade="WebSocket")
        answer = await caller.answer()
        assert (answer.status, answer.code) == (501, "upgrade_not_supported")
        assert await caller.is_closed()
        assert not engine.received


JAVA = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2_Settings": "AAEAAEAA"}


@pytest.mark.parametrize("size", [1, 60, 1 << 20])
@looped
async def test_another_upgrade_is_ignored_in_any_split_and_the_body_is_a_body(size):
    """Java's HTTP client offers HTTP/2 with each request on a connection without TLS."""
    engine = FakeEngine("e", echo)
    async with rig(engine) as it:
        caller = await it.caller()
        inner = request_bytes("/v1/smuggled")
        sent = b"".join([
            request_bytes("/v1/completions", inner, **JAVA),
            request_bytes("/version", method="GET", **JAVA),
            request_bytes("/v1/completions", b"{}", Connection="Upgrade", Upgrade="h2c", X_Own="1"),
        ])  # fmt: skip
        for begin in range(0, len(sent), size):
            caller.send(sent[begin : begin + size])
            await asyncio.sleep(0)
        answers = [await caller.answer() for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert [request.body for request in engine.received] == [inner, b"{}"]
        assert not any(request.header(name) for request in engine.received for name in ("upgrade", "http2-settings"))
        assert engine.received[1].header("x-own") == "1"


@looped
async def test_the_load_header_of_the_engine_that_answers_is_passed_on():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        assert request.header("endpoint-load-metrics-format") == "TEXT"
        wire.reply(headers="endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0.5\r\n")

    async with rig(FakeEngine("a", script)) as it:
        answer = await it.call(endpoint_load_metrics_format="TEXT")
        assert answer.headers["endpoint-load-metrics"] == "TEXT named_metrics.kv_cache_usage_perc=0.5"


@looped
async def test_ids_that_a_client_has_taken_ahead_harm_no_other_request():
    """Each answer shows an id of the router, so a client can name those that would come next."""
    release = asyncio.Event()

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        if b"wait" in request.body:
            await release.wait()
        wire.reply()

    async with rig(FakeEngine("e", script)) as it:
        shown = (await it.call()).headers["x-request-id"]
        prefix, serial = shown[: shown.rindex("-") + 1], int(shown[shown.rindex("-") + 1 :], 16)
        ahead = [f"{prefix}{serial + number:x}" for number in range(1, 40)]
        ahead += [f"mine~{serial + number:x}" for number in range(1, 40)]
        taken = [asyncio.create_task(it.call(body={"prompt": "wait"}, X_Request_Id=name)) for name in [*ahead, "mine"]]
        await it.until(lambda: len(it.app.shared.active) == len(taken))
        answers = [await it.call(**given) for given in ({}, {"X_Request_Id": "mine"}, {}, {"X_Request_Id": "mine"})]
        assert [answer.status for answer in answers] == [200] * 4
        release.set()
        answers += await asyncio.gather(*taken)
        assert {answer.status for answer in answers} == {200}
        assert len({answer.headers["x-request-id"] for answer in answers}) == len(answers)
