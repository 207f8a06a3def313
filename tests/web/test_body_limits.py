"""Bodies of strangers: what one client may hold, and how slowly a body may arrive, at the clients' ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import zlib
from collections.abc import Iterator

import pytest
from aiohttp import web
from gateway.rig import FakeEngine, looped, request_bytes, rig
from hypothesis import given
from hypothesis import strategies as st
from support.running import MOESTRO, Running, call, free_port, wait_until

from moestro.web import bodies as bodies_module
from moestro.web.access import Access
from moestro.web.bodies import (
    MAX_SILENCE_S,
    MIN_BYTES_PER_S,
    Bodies,
    BodiesFullError,
    BodyDeadline,
    BodyHold,
    BodyMemory,
)
from moestro.web.errors import Refusals
from moestro.web.middleware import HttpMiddleware
from moestro.web.ports.connections import FrontLimits, bound_socket, http_front
from moestro.web.ports.faults import Faults, Port

MIB = 1 << 20
LARGEST = 32 * MIB
OTHER_ADDRESS = "127.0.0.2"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def router(fake: Running, tmp_path_factory) -> Iterator[Running]:
    running = Running(
        (MOESTRO, "route", "--engine", fake.url), tmp_path_factory.mktemp("router"), admin_port=free_port()
    )
    yield running
    running.kill()


def unfinished_gzip() -> bytes:
    """A request whose body has unpacked to almost 32 MiB, within the allowed ratio, and lacks its end."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    packed, size = bytearray(packer.compress(b'{"prompt": "') + packer.flush(zlib.Z_SYNC_FLUSH)), 12
    while size < LARGEST - 8192:
        part = packer.compress(b"a" * 8192) + packer.flush(zlib.Z_SYNC_FLUSH)
        size += 8192
        packed += part + b"\0\0\0\xff\xff" * max(0, (size // 95 - len(packed) - len(part)) // 5 + 1)
    return HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % (len(packed) + 1000) + packed


def unfinished_plain() -> bytes:
    body = b'{"prompt": "' + b"a" * (LARGEST - 13)
    return HEAD + b"Content-Length: %d\r\n\r\n" % (len(body) + 1) + body


def post_from(address: str, port: int, body: bytes) -> bytes:
    """The beginning of the answer to a completion from an address."""
    with socket.create_connection(("127.0.0.1", port), timeout=300, source_address=(address, 0)) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        return client.recv(12)


def wait_until_idle(server: Running) -> None:
    """Wait until the server needs little processor time for a second; a busy machine gives a busy server more."""

    def is_idle() -> bool:
        before_s = server.cpu_s()
        time.sleep(1)
        return server.cpu_s() - before_s < 0.1

    wait_until(is_idle)


@pytest.mark.parametrize("make", [unfinished_gzip, unfinished_plain])
@pytest.mark.parametrize("product", ["fake", "router"])
def test_a_client_with_unfinished_bodies_leaves_room_for_a_body_of_another(request, product, make):
    server: Running = request.getfixturevalue(product)
    port, held = server.address[1], make()
    honest = json.dumps({"prompt": "hi", "max_tokens": 1, "padding": " " * 3 * MIB}).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(9):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300))
            with contextlib.suppress(ConnectionError):  # The server refuses bodies above the client's share.
                client.sendall(held)
        wait_until_idle(server)  # It has read, and may have unpacked, what fits into the buffers of connections.
        for _ in range(12):
            assert post_from(OTHER_ADDRESS, port, honest) == b"HTTP/1.1 200"
        assert call(server, "GET", "/health").status == 200


def test_an_unfinished_packed_body_holds_its_packed_size():
    async def test() -> None:
        async def read(http: web.Request) -> web.Response:
            async with bodies.reading(http) as body:
                return web.json_response({"size": len(body)})

        bodies, app = Bodies(), web.Application()
        app.add_routes([web.post("/v1/completions", read)])
        runner = await HttpMiddleware(Access.of([]), Refusals(), LARGEST, Faults()).runner(app, shutdown_timeout=1)
        listener = bound_socket("127.0.0.1", 0)
        front = http_front(Port.CLIENTS, runner, listener, FrontLimits(9), Faults()).open()
        _, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        held = unfinished_gzip()
        writer.write(held)
        while bodies.memory.num_bytes < len(held) - (66 << 10):  # noqa: ASYNC110 - the condition is plain state
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert bodies.memory.num_bytes < len(held)
        writer.transport.abort()
        while bodies.memory.num_bytes:  # noqa: ASYNC110 - the condition is plain state
            await asyncio.sleep(0.01)
        front.close()
        await runner.cleanup()
        listener.close()

    asyncio.run(asyncio.wait_for(test(), 30))


@looped
async def test_each_key_has_a_share_of_its_own_at_the_router():
    async with rig(FakeEngine("e"), api_key=("one", "two")) as it:
        it.app.clients.memory.max_bytes = 500_000
        body = b"x" * 300_000
        holding = await it.caller()
        holding.send(request_bytes(body=body, Authorization="Bearer one")[:-1])
        await it.until(lambda: it.app.clients.memory.num_bytes > 200_000)
        assert (await it.call(body=body, Authorization="Bearer one")).code == "overloaded"
        assert (await it.call(body=b"x" * 150_000, Authorization="Bearer two")).status == 200
        holding.send(b"x")
        assert (await holding.answer()).status == 200


@looped
async def test_a_body_below_the_minimum_rate_is_408_at_the_router(monkeypatch):
    monkeypatch.setattr(bodies_module, "MAX_SILENCE_S", 0.2)
    async with rig(FakeEngine("e")) as it:
        slow, fast = await it.caller(), await it.caller()
        slow.send(request_bytes(body=b"x" * 100_000)[:-100])
        whole = request_bytes(body=b"x" * 100_000)
        answer = asyncio.ensure_future(slow.answer())
        at = 0
        while not answer.done():
            slow.send(b"x")
            fast.send(whole[at : at + 1000])
            at += 1000
            await asyncio.sleep(0.02)
        assert (answer.result().status, answer.result().code) == (408, "request_timeout")
        fast.send(whole[at:])
        assert (await fast.answer()).status == 200


def test_a_body_below_the_minimum_rate_is_408_at_the_server(monkeypatch):
    monkeypatch.setattr(bodies_module, "MAX_SILENCE_S", 0.2)

    async def test() -> None:
        bodies, app = Bodies(), web.Application()

        async def read(http: web.Request) -> web.Response:
            async with bodies.reading(http) as body:
                return web.json_response({"size": len(body)})

        app.add_routes([web.post("/v1/completions", read)])
        runner = await HttpMiddleware(Access.of([]), Refusals(), LARGEST, Faults()).runner(app, shutdown_timeout=1)
        listener = bound_socket("127.0.0.1", 0)
        front = http_front(Port.CLIENTS, runner, listener, FrontLimits(9), Faults()).open()
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        writer.write(HEAD + b"Content-Length: 100000\r\n\r\n" + b"x" * 90_000)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 408 ")
        writer.close()
        front.close()
        await runner.cleanup()
        listener.close()

    asyncio.run(asyncio.wait_for(test(), 30))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300_000)), max_size=60))
def test_no_client_holds_more_than_was_free_and_releases_return_all(steps):
    memory = BodyMemory(1 * MIB)
    holds = {client: BodyHold(memory, client) for client in range(5)}
    sizes = dict.fromkeys(holds, 0)
    for client, size in steps:
        counted = max(0, size - bodies_module.SMALL_BYTES)
        others = sum(sizes.values()) - sizes[client]
        try:
            holds[client].resize(size)
        except BodiesFullError:
            assert counted > sizes[client]
            assert 2 * counted > MIB - others
            continue
        assert counted <= sizes[client] or 2 * counted <= MIB - others
        sizes[client] = counted
        assert memory.num_bytes == sum(sizes.values()) < MIB
    for hold in holds.values():
        hold.release()
        hold.release()
    assert memory.num_bytes == 0
    assert not memory._of_client


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 200_000)), max_size=40))
def test_a_body_at_the_minimum_rate_is_in_time_and_silence_is_not(parts):
    deadline, now_s, slack_s = BodyDeadline(0.0, 60.0), 0.0, MAX_SILENCE_S
    for wait_s, size in parts:
        now_s, slack_s = now_s + wait_s, slack_s - wait_s
        assert (deadline.due_s < now_s - 1e-6) <= (slack_s < 1e-6 or now_s > 60.0)
        if slack_s < 0 or now_s > 60.0:
            assert deadline.due_s <= now_s + 1e-6
            return
        slack_s = min(MAX_SILENCE_S, slack_s + size / MIN_BYTES_PER_S)
        deadline.arrived(size, now_s)


def test_a_pause_of_the_process_moves_the_deadline():
    deadline = BodyDeadline(0.0, 60.0)
    deadline.paused(100.0)
    assert deadline.due_s == 100.0 + MAX_SILENCE_S
    assert deadline.arrived(1 << 20, 105.0) == 105.0 + MAX_SILENCE_S
