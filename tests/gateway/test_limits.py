"""What the router bears of clients and of engines, and what it says when it is too much."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import time
from collections import Counter

import pytest
from gateway.rig import CHAT, FakeEngine, Received, Wire, looped, request_bytes, rig

from moestro.web.ports.faults import Fault, Port
from moestro.web.ports.heads import MAX_HEAD_BYTES

MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "two lengths": b"POST /v1/x HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "length and chunks": b"POST /v1/x HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative length": b"POST /v1/x HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "a folded header": b"POST /v1/x HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
    "bare line feeds": b"POST /v1/x HTTP/1.1\nA: b\n\n",
    "a zero byte": b"POST /v1/x HTTP/1.1\r\nA: \x00\r\n\r\n",
    "a space before the colon": b"POST /v1/x HTTP/1.1\r\nA : b\r\n\r\n",
    "a bad chunk": b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
@looped
async def test_malformed_http_is_refused_in_openais_form_and_the_connection_ends(data):
    engine = FakeEngine("e")
    async with rig(engine) as it:
        caller = await it.caller()
        caller.send(data)
        answer = await caller.answer()
        assert (answer.status, answer.code) == (400, "bad_request")
        assert answer.json["error"].keys() == {"message", "type", "param", "code"}
        assert answer.json["error"]["message"].startswith("Malformed HTTP")
        assert answer.headers["connection"] == "close"
        assert await caller.is_closed()
        assert not engine.received


@looped
async def test_what_came_before_malformed_bytes_is_still_answered():
    async with rig(FakeEngine("e")) as it:
        caller = await it.caller()
        caller.send(request_bytes(body={}) + b"GARBAGE\r\n\r\n")
        assert (await caller.answer()).status == 200
        assert (await caller.answer()).status == 400
        assert await caller.is_closed()


@looped
async def test_a_head_has_a_bound_in_one_read_or_in_many():
    async with rig(FakeEngine("e")) as it:
        assert (await it.call(X_Long="v" * (MAX_HEAD_BYTES + 1))).status == 431
        assert (await it.call(X_Long="v" * (MAX_HEAD_BYTES - 1000))).status == 200
        caller = await it.caller()
        caller.send(b"GET /v1/models HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(MAX_HEAD_BYTES // 1000 + 2):
                caller.send(b"X: " + b"v" * 1000 + b"\r\n")
                await caller.writer.drain()
                await asyncio.sleep(0)
        assert (await caller.answer()).code == "head_too_large"


@looped
async def test_a_head_has_the_bound_also_in_one_read_with_a_request_before_it():
    async with rig(FakeEngine("e")) as it:
        caller = await it.caller()
        caller.send(request_bytes(body={}) + request_bytes(body={}, X_Long="v" * (MAX_HEAD_BYTES + 1)))
        assert [(await caller.answer()).status, (await caller.answer()).status] == [200, 431]
        assert await caller.is_closed()


@pytest.mark.parametrize("is_chunked", [False, True])
@looped
async def test_a_body_has_a_bound_which_is_known_before_it_is_read(is_chunked):
    engine = FakeEngine("e")
    async with rig(engine, max_body_bytes=10_000) as it:
        caller = await it.caller()
        if is_chunked:
            caller.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for _ in range(11):
                caller.send(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        else:
            caller.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 10001\r\n\r\n".encode())
        answer = await caller.answer()
        assert (answer.status, answer.code) == (413, "request_too_large")
        caller.send(b"x" * 10_000)  # a client that goes on hears the answer all the same
        assert await caller.is_closed()
        assert not engine.received
        assert (await it.call(body=b"x" * 10_000)).status == 200


@pytest.mark.parametrize("given", [None, "mine"])
@looped
async def test_a_refusal_before_the_body_has_the_requests_id(given):
    async with rig(FakeEngine("e"), max_body_bytes=10_000) as it:
        caller = await it.caller()
        own = "" if given is None else f"X-Request-Id: {given}\r\n"
        caller.send(f"POST /v1/messages HTTP/1.1\r\nHost: x\r\n{own}Content-Length: 10001\r\n\r\n".encode())
        answer = await caller.answer()
        assert (answer.status, answer.json["request_id"]) == (413, answer.headers["x-request-id"])
        assert answer.headers["x-request-id"].startswith(given or "req-")


@looped
async def test_a_body_that_is_too_large_is_refused_before_100_continue():
    async with rig(FakeEngine("e"), max_body_bytes=10_000) as it:
        caller = await it.caller()
        caller.send(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 10001\r\n\r\n".encode()
        )
        assert (await caller.answer()).status == 413


@looped
async def test_a_chat_of_half_a_million_messages_does_not_hold_up_the_others():
    """The bound is several times what is measured: 0.06 s."""
    engine = FakeEngine("e")
    async with rig(engine) as it:
        message = b'{"role":"user","content":[{"type":"text","text":"x"}]},'
        swarm = await it.caller()
        body = b'{"model": "m", "messages": [' + message * 550_000 + message[:-1] + b"]}"
        swarm.ask(body=body)
        answering = asyncio.ensure_future(swarm.answer())
        longest = 0.0
        while not answering.done():
            since = time.thread_time()
            await asyncio.sleep(0.001)
            longest = max(longest, time.thread_time() - since)
        assert answering.result().status == 200
        assert engine.received[0].body == body
        assert longest < 1.5


@looped
async def test_all_bodies_together_have_a_bound_too():
    async with rig(FakeEngine("e")) as it:
        it.app.clients.memory.max_bytes = 500_000
        holding = await it.caller()
        whole = request_bytes(body=b"x" * 300_000)
        holding.send(whole[:-1])
        await it.until(lambda: it.app.clients.memory.num_bytes > 200_000)
        refused = await it.call(body=b"x" * 300_000)
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "overloaded", "1")
        assert (await it.call(body=b"x" * 1000)).status == 200
        holding.send(whole[-1:])
        assert (await holding.answer()).status == 200
        assert it.app.clients.memory.num_bytes == 0


@looped
async def test_a_body_must_arrive_in_time():
    async with rig(FakeEngine("e"), body_timeout=0.1) as it:
        caller = await it.caller()
        caller.send(request_bytes(body=b"x" * 100)[:-50])
        answer = await caller.answer()
        assert (answer.status, answer.code) == (408, "request_timeout")


@looped
async def test_a_connection_without_a_request_is_closed_after_a_while_and_so_is_half_a_head():
    async with rig(FakeEngine("e")) as it:
        it.app.clients.limits = type(it.app.clients.limits)(idle_s=0.1)
        idle, slow, used = await it.caller(), await it.caller(), await it.caller()
        slow.send(b"GET /v1/models HT")
        used.ask()
        assert (await used.answer()).status == 200
        for caller in (idle, slow, used):
            assert await caller.is_closed()


@looped
async def test_one_connection_too_many_is_refused_if_all_others_carry_requests():
    async with rig(FakeEngine("e", hold), max_connections=2) as it:
        kept = [await it.caller(), await it.caller()]
        for caller in kept:
            caller.ask()
        await it.until(lambda: len(it.app.shared.active) == 2)
        refused = await (await it.caller()).answer()
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "too_many_connections", "1")
        assert len(it.app.shared.active) == 2
        for caller in kept:
            caller.hang_up()
        await it.until_idle()


async def hold(engine: FakeEngine, wire: Wire, request: Received) -> None:
    await asyncio.sleep(60)


@looped
async def test_an_idle_connection_gives_way_to_one_connection_too_many():
    async with rig(FakeEngine("e"), max_connections=2) as it:
        kept = [await it.caller(), await it.caller()]
        for caller in kept:
            caller.ask()
            assert (await caller.answer()).status == 200
        assert (await it.call()).status == 200
        assert await kept[0].is_closed()
        assert it.faults.counts[Port.CLIENTS, Fault.DISPLACED] == 1


@looped
async def test_a_slow_reader_makes_its_engine_wait_and_loses_nothing():
    total, written = 40 << 20, 0

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        nonlocal written
        wire.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while written < total:
            if wire.transport.get_write_buffer_size() < 1 << 20:
                wire.write(b"x" * (1 << 18))
                written += 1 << 18
            await asyncio.sleep(0)

    async with rig(FakeEngine("e", script)) as it:
        # Small buffers in the kernel, so that not all of it fits there.
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", it.port))
        caller = await it.caller(plain)
        caller.ask()
        await asyncio.sleep(0.3)
        stuck_at = written
        assert stuck_at < total
        await asyncio.sleep(0.1)
        assert written == stuck_at, "the engine was not made to wait"
        status, _ = await caller.head()
        body = await caller.reader.readexactly(total)
        assert (status, len(body)) == (200, total)


@looped
async def test_a_client_that_does_not_read_is_cut_off_and_its_engine_freed():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.open_stream()
        while True:
            wire.chunk(b"x" * 100_000)
            await asyncio.sleep(0.001)

    engine = FakeEngine("e", script)
    async with rig(engine, write_timeout=0.2) as it:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", it.port))
        plain.send(request_bytes(body={}))
        await it.until(lambda: bool(engine.received))
        await it.until_idle()
        plain.close()


async def break_off(engine: FakeEngine, wire: Wire, request: Received) -> None:
    wire.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + bytes(200_000))
    await asyncio.sleep(0.02)
    wire.transport.abort()


async def reply(engine: FakeEngine, wire: Wire, request: Received) -> None:
    wire.reply(bytes(200_000))


@pytest.mark.parametrize(("script", "connection"), [(reply, "close"), (reply, "keep-alive"), (break_off, "keep-alive")])
@looped
async def test_a_client_that_leaves_the_end_of_its_answer_unread_is_cut_off_too(script, connection):
    """What is left of it is too little for its engine to be made to wait, and the answer is over for its engine."""
    async with rig(FakeEngine("e", script), write_timeout=0.2) as it:
        clients = it.app.clients
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", it.port))
        await it.until(lambda: len(clients.open) == 1)
        [client] = clients.open
        clients.limits = dataclasses.replace(clients.limits, idle_s=0.2)
        client._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        plain.send(request_bytes(body={}, Connection=connection))
        await it.until(lambda: client._transport.get_write_buffer_size() > 0)
        await it.until(lambda: not clients.open)
        plain.close()


@looped
async def test_requests_sent_ahead_are_left_unread_when_they_are_many():
    release = asyncio.Event()

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        await release.wait()
        wire.reply()

    async with rig(FakeEngine("e", script)) as it:
        caller = await it.caller()
        one = request_bytes(body=b"x" * 1000)
        caller.send(one)
        await it.until(lambda: it.num_in_flight == 1)
        for _ in range(20_000):
            caller.send(one)
        await asyncio.sleep(0.2)
        [client] = it.app.clients.open
        assert len(client._early) < 1 << 20
        release.set()
        for _ in range(100):
            assert (await caller.answer()).status == 200


async def longest_turn(work: asyncio.Future) -> float:
    """CPU seconds of the loop's longest turn until `work` was done; the load of the machine does not count."""
    longest = 0.0
    while not work.done():
        since = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - since)
    return longest


@looped
async def test_thousands_of_requests_in_one_read_are_in_order_and_delay_no_client():
    async with rig(FakeEngine("e")) as it:
        handler, caller = it.app.clients.handler, await it.caller()
        handle = handler.handle

        turn, turns = 0, []

        def counted(client, incoming):
            turns.append(turn)
            return handle(client, incoming)

        handler.handle = counted
        caller.send(b"GET /health HTTP/1.1\r\nHost:\r\n\r\n" * 600 + b"GET /nowhere HTTP/1.1\r\nHost:\r\n\r\n")

        async def answers():
            return [(await caller.answer()).status for _ in range(601)]

        answering = asyncio.ensure_future(answers())
        while not answering.done():
            await asyncio.sleep(0)
            turn += 1
        assert max(Counter(turns).values()) <= 2, "the loop has other work between two answers"
        assert answering.result() == [200] * 600 + [404]


@pytest.mark.parametrize("num_at_once", [1, 5000])
@looped
async def test_a_client_that_asks_on_and_never_reads_is_cut_off_and_takes_little_memory(num_at_once):
    async with rig(FakeEngine("e"), write_timeout=0.5) as it:
        clients, most = it.app.clients, 0
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", it.port))
        await it.until(lambda: len(clients.open) == 1)
        [client] = clients.open
        client._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        since = asyncio.get_running_loop().time()
        while clients.open and asyncio.get_running_loop().time() < since + 8:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                plain.send(b"GET /metrics HTTP/1.1\r\nHost:\r\n\r\n" * num_at_once)
            await asyncio.sleep(0.01)
            if client._transport is not None:
                most = max(most, client._transport.get_write_buffer_size() + len(client._early))
        plain.close()
        assert not clients.open
        assert most < 1 << 20


@looped
async def test_what_a_client_reads_late_is_whole_and_it_is_not_cut_off_once_it_has_read():
    async with rig(FakeEngine("e"), write_timeout=2.0) as it:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", it.port))
        caller = await it.caller(plain)
        caller.send(b"GET /metrics HTTP/1.1\r\nHost:\r\n\r\n" * 1000)
        await asyncio.sleep(0.1)
        assert {(await caller.answer()).status for _ in range(1000)} == {200}
        await asyncio.sleep(2.5)
        caller.ask()
        assert (await caller.answer()).status == 200


CHUNKED = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


@pytest.mark.parametrize("chunk", [b"1\r\nx\r\n", b"2\r\nxx\r\n", b"2;" + b"e" * 60_000 + b"\r\nxx\r\n"])
@looped
async def test_a_body_of_little_but_framing_is_refused(chunk):
    engine = FakeEngine("e")
    async with rig(engine) as it:
        caller = await it.caller()
        caller.send(CHUNKED + chunk * (1_000_000 // len(chunk)))
        answering = asyncio.ensure_future(caller.answer())
        assert await longest_turn(answering) < 0.3
        assert (answering.result().status, answering.result().code) == (431, "head_too_large")
        assert not engine.received


@pytest.mark.parametrize(("size", "num"), [(1, 5_000), (5, 100_000), (16, 100_000), (1000, 3_000)])
@looped
async def test_ordinary_chunks_make_one_body_that_takes_little_more_memory_than_its_bytes(size, num):
    engine = FakeEngine("e")
    async with rig(engine) as it:
        caller = await it.caller()
        body = random.Random(size).randbytes(size * num)
        chunks = [b"%x\r\n%b\r\n" % (size, body[at : at + size]) for at in range(0, len(body), size)]
        caller.send(CHUNKED + b"".join(chunks))
        await it.until(lambda: len(it.app.clients.open) == 1)
        [client] = it.app.clients.open
        await it.until(lambda: client._reader._framing.num_body_bytes == len(body))
        assert isinstance(client._reader._body, bytearray)
        caller.send(b"0\r\n\r\n")
        assert (await caller.answer()).status == 200
        assert engine.received[0].body == body
        assert it.app.clients.memory.num_bytes == 0


BAD_ANSWERS = {
    "no HTTP": b"<html>hello</html>",
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * (2 * MAX_HEAD_BYTES),
    "an upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
    "length and chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("data", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
@looped
async def test_an_engine_that_talks_nonsense_is_a_bad_gateway(data):
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.write(data)

    async with rig(FakeEngine("e", script)) as it:
        answer = await it.call()
        assert (answer.status, answer.code) == (502, "upstream_unavailable")


@looped
async def test_an_answer_that_goes_on_after_its_end_is_not_the_next_clients_answer():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")

    async with rig(FakeEngine("e", script)) as it:
        caller = await it.caller()
        for _ in range(3):
            caller.ask()
            assert (await caller.answer()).body == b"ok"


@looped
async def test_law_random_bytes_never_stop_the_router():
    """Valid requests with bytes changed, cut and doubled: it answers or hangs up, and serves the next one."""
    rng = random.Random(2)
    good = request_bytes(body={"messages": [{"role": "user", "content": "hi"}]}, X_A="b", Expect="100-continue")
    async with rig(FakeEngine("e"), body_timeout=0.05) as it:
        it.app.clients.limits = type(it.app.clients.limits)(idle_s=0.05, body_s=0.05, linger_s=0.05)
        for _ in range(300):
            data = bytearray(good * rng.choice([1, 1, 2]))
            for _ in range(rng.randrange(1, 6)):
                at = rng.randrange(len(data))
                data[at : at + rng.choice([0, 1, 1, 4])] = rng.randbytes(rng.choice([0, 1, 1, 3]))
            caller = await it.caller()
            for start in range(0, len(data), 97):
                caller.send(bytes(data[start : start + 97]))
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                caller.hang_up()
        assert (await it.call()).status == 200
