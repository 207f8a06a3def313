"""Heads that are known again are answered as if they had been parsed."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest
from gateway.rig import CHAT, FakeEngine, Received, Wire, looped, rig

from moestro.gateway.clients.http_headers import HeaderCache

HEAD = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\nX-A: 1\r\n\r\n"


def test_a_head_is_known_again_by_all_but_the_digits_of_its_length():
    known: HeaderCache[str] = HeaderCache(4)
    known.learn(HEAD + b"x" * 12, "head", has_length=True)
    longer = HEAD.replace(b"12", b"12345")
    assert known.find(longer + b"body") == ("head", len(longer), 12345, b"")
    for other in (HEAD[:-1], HEAD.replace(b"X-A: 1", b"X-A: 2"), HEAD.replace(b"12", b""), HEAD.replace(b"12", b"+12")):
        assert known.find(other) is None


def test_no_more_are_remembered_than_may_be():
    known: HeaderCache[int] = HeaderCache(4)
    heads = [HEAD.replace(b"X-A: 1", b"X-A: %d" % i) for i in range(9)]
    for i, head in enumerate(heads):
        known.learn(head, i, has_length=True)
        assert known.find(head) == (i, len(head), 12, b"")
        assert sum(known.find(each) is not None for each in heads) <= 4


def test_a_head_that_spells_its_length_in_its_own_way_is_not_taken_for_one_without():
    known: HeaderCache[str] = HeaderCache(4)
    for spelt in (b"CONTENT-LENGTH: 12", b"Content-Length:   12", b"Content-Length: 12 "):
        head = HEAD.replace(b"Content-Length: 12", spelt)
        known.learn(head, "head", has_length=True)
        assert known.find(head) is None


def test_a_head_after_blank_lines_is_never_known():
    known: HeaderCache[str] = HeaderCache(4)
    for blank in (b"\r\n\r\n", b"\r\n", b"\n"):
        known.learn(blank + b"GET /v1/x HTTP/1.1\r\nHost: x\r\n\r\n", "head", has_length=False)
        known.learn(blank + HEAD, "head", has_length=True)
        assert known.find(blank) is None
        assert known.find(b"\r\n\r\n" + HEAD) is None


@looped
async def test_blank_lines_are_no_request_of_another_client():
    engine = FakeEngine("e")
    async with rig(engine, api_key=("k",)) as it:
        caller = await it.caller()
        caller.send(b"\r\n\r\nGET /v1/responses/1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n\r\n")
        assert (await caller.answer()).status == 200
        stranger = await it.caller()
        stranger.send(b"\r\n\r\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stranger.reader.read(1), 0.3)
        assert sum(each.target == "/v1/responses/1" for each in engine.received) == 1


@pytest.mark.parametrize("name", ["Content-Length", "content-length", "CONTENT-LENGTH", "Content-length"])
@looped
async def test_bodies_that_come_after_their_heads_are_never_taken_for_requests(name):
    async def echo(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.reply(request.body)

    engine = FakeEngine("e", echo)
    smuggled = f"GET /smuggled HTTP/1.1\r\nHost: x\r\n{name}: 0\r\n\r\n".encode()
    async with rig(engine) as it:
        caller = await it.caller()
        for size in (0, 1, 20, 0, 1, 20):
            body = smuggled * size
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{name}: {len(body)}\r\n\r\n".encode()
            for parts in ([head + body], [head, body], [head[:-2], head[-2:] + body], [head + body[:9], body[9:]]):
                for part in parts:
                    caller.send(part)
                    await asyncio.sleep(0.002)
                assert (await caller.answer()).body == body
        assert {request.target for request in engine.received} == {CHAT}


@looped
async def test_law_answers_are_the_same_whichever_borders_they_come_with():
    """Chunks and reads cut at random; some answers with trailers, extensions, or in a head of another spelling."""
    rng = random.Random(7)
    texts = [rng.randbytes(rng.randrange(1, 400)).hex().encode() for _ in range(150)]
    todo = iter(texts)

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        text, extension, trailer = next(todo), rng.choice(["", "", ";x=1"]), rng.choice(["", "", "T: 1\r\n"])
        spelt = rng.choice(["Transfer-Encoding", "transfer-encoding"])
        cuts = sorted({0, len(text), *rng.choices(range(len(text)), k=rng.randrange(4))})
        chunks = [text[a:b] for a, b in pairwise(cuts)]
        data = f"HTTP/1.1 200 OK\r\n{spelt}: chunked\r\n\r\n".encode()
        data += b"".join(b"%x%b\r\n%b\r\n" % (len(each), extension.encode(), each) for each in chunks)
        data += b"0\r\n%b\r\n" % trailer.encode()
        borders = sorted({0, len(data), *rng.choices(range(len(data)), k=rng.randrange(5))})
        for start, end in pairwise(borders):
            wire.write(data[start:end])
            await asyncio.sleep(0.001)

    engine = FakeEngine("e", script)
    async with rig(engine) as it:
        caller = await it.caller()
        for text in texts:
            caller.ask(body={"stream": True})
            assert (await caller.answer()).body == text
        assert len({id(wire) for wire in engine.wires}) <= 2, "connections are kept after all of these"


@looped
async def test_a_connection_with_a_surplus_answer_is_not_used_again():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        extra = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" if len(engine.received) == 3 else b""
        wire.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + extra)

    engine = FakeEngine("e", script)
    async with rig(engine, health_interval=30) as it:
        caller = await it.caller()
        for _ in range(6):
            caller.ask()
            assert (await caller.answer()).body == b"ok"
        assert len(engine.wires) > 1


@looped
async def test_a_known_request_still_needs_its_key():
    async with rig(FakeEngine("e"), api_key=("k",)) as it:
        caller = await it.caller()
        for key, status in (("k", 200), ("k", 200), ("x", 401)):
            caller.ask(Authorization=f"Bearer {key}")
            assert (await caller.answer()).status == status
