"""A connection of the picker's port on a socket: clients that stop reading or vanish, and the end of the port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

pytest.importorskip("hpack")
pytest.importorskip("google.protobuf")

from gateway.rig import looped
from support.http2_peer import HELLO, Answers, Handler, Reader, Writer, data_frame, packed

from moestro.gateway.picker import grpc_connection
from moestro.gateway.picker.grpc_calls import GrpcCall
from moestro.gateway.picker.grpc_connection import GrpcConnection
from moestro.gateway.picker.http2_frames import ACK, PING, RST_STREAM, Http2Code, frame, settings, window_update
from moestro.web.ports.connections import Front, FrontLimits, bound_socket
from moestro.web.ports.faults import Fault, Faults, Port, PortFaults
from moestro.web.ports.http_connection import ConnectionSlot


@dataclass
class Served:
    port: int
    faults: Faults
    connections: set[GrpcConnection]
    handlers: list[Handler]
    front: Front


@contextlib.asynccontextmanager
async def serving(max_connections: int = 9) -> AsyncIterator[Served]:
    """A port whose method `/service/Method` sends each message back."""
    faults, connections, handlers = Faults(), set(), []

    def method(call: GrpcCall) -> Handler:
        handlers.append(Handler(call))
        return handlers[-1]

    def connect(slot: ConnectionSlot) -> GrpcConnection:
        return GrpcConnection({b"/service/Method": method}, connections, PortFaults(faults, Port.PICKER), slot)

    listener = bound_socket("127.0.0.1", 0)
    front = Front(Port.PICKER, listener, connect, FrontLimits(max_connections), faults).open()
    try:
        yield Served(listener.getsockname()[1], faults, connections, handlers, front)
    finally:
        front.close()
        for connection in list(connections):
            connection.close()
        await until(lambda: not connections)


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 the conditions are plain state of many objects
            await asyncio.sleep(0.005)


class Client:
    """A client on a socket, which reads only when a test wants it."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.writer, self.reader = Writer(), Reader()
        self._rest = b""
        self.has_end = False

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read(self, condition) -> Answers:
        """Read until a condition of the answers holds, or the server has closed the connection."""
        async with asyncio.timeout(30):
            while not condition(self.reader.found) and not self.has_end:
                try:
                    data = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16)
                except ConnectionError:
                    data = b""
                self.has_end = not data
                self._rest += data
                self._rest = self._rest[self._read_whole() :]
        return self.reader.found

    def _read_whole(self) -> int:
        at, data = 0, self._rest
        while at + 9 <= len(data) and (end := at + 9 + int.from_bytes(data[at : at + 3])) <= len(data):
            at = end
        self.reader.read(data[:at])
        return at


@contextlib.contextmanager
def client_of(served: Served):
    client = Client(served.port)
    with contextlib.closing(client.socket):
        yield client


@looped
async def test_a_call_on_a_socket_is_answered():
    async with serving() as served:
        with client_of(served) as client:
            await client.send(HELLO + client.writer.headers(1) + data_frame(1, packed(b"hello"), ends=True))
            found = await client.read(lambda found: 1 in found.ended)
            assert found.bodies == {1: packed(b"hello")}
            assert next(iter(served.connections)).peer == "127.0.0.1"
        await until(lambda: not served.connections)
        assert not served.faults.counts


@looped
async def test_a_client_that_stops_reading_is_read_no_more_and_then_cut(monkeypatch):
    async with serving() as served:
        with client_of(served) as client:
            hello = HELLO + settings({4: (1 << 31) - 1}) + window_update(0, (1 << 30))
            await client.send(hello + client.writer.headers(1))
            message = data_frame(1, packed(bytes(16_000)))

            async def send_forever() -> None:
                while True:
                    await client.send(message)

            sending = asyncio.create_task(send_forever())
            await until(lambda: any(each._is_unread for each in served.connections))
            [connection] = served.connections
            num_messages = -1
            while num_messages != len(served.handlers[0].messages):
                num_messages = len(served.handlers[0].messages)
                assert num_messages * 16_000 < 100 << 20  # Buffers of the kernel may hold some of them.
                await asyncio.sleep(0.1)
            assert not sending.done()
            monkeypatch.setattr(grpc_connection, "_TICK_S", 0.01)
            connection._timer.cancel()
            connection._tick()
            await until(lambda: not served.connections)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        assert served.faults.counts[Port.PICKER, Fault.UNREAD] == 1
        assert served.handlers[0].num_closed == 1


@looped
async def test_a_client_that_reads_late_gets_everything():
    async with serving() as served:
        with client_of(served) as client:
            hello = HELLO + settings({4: (1 << 31) - 1}) + window_update(0, (1 << 30))
            await client.send(hello + client.writer.headers(1))
            body = packed(bytes(range(256)) * 60)

            async def send_all() -> None:
                for _ in range(1000):
                    await client.send(data_frame(1, body))
                await client.send(data_frame(1, b"", ends=True))

            sending = asyncio.create_task(send_all())
            await until(lambda: any(each._is_unread for each in served.connections))
            found = await client.read(lambda found: 1 in found.ended)
            await sending
            assert found.bodies[1] == body * 1000


@looped
async def test_a_silent_client_gets_a_ping_and_is_given_up_without_an_answer(monkeypatch):
    monkeypatch.setattr(grpc_connection, "_TICK_S", 0.05)
    async with serving() as served:
        with client_of(served) as client, client_of(served) as other:
            await client.send(HELLO + client.writer.headers(1) + data_frame(1, packed(b"x")))
            await other.send(HELLO)
            for number in range(1, 4):
                found = await other.read(lambda found, number=number: num_pings(found) == number)
                assert not other.has_end
                await other.send(frame(PING, ACK, 0, bytes(8)))
            found = await client.read(lambda _: False)
            assert client.has_end
            assert num_pings(found) == 1
            await until(lambda: served.handlers[0].num_closed == 1)


def num_pings(found: Answers) -> int:
    return sum(each.kind == PING and each.flags == 0 for each in found.others)


@looped
async def test_a_connection_with_a_fault_gets_its_code_and_is_closed():
    async with serving() as served:
        with client_of(served) as client:
            await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            found = await client.read(lambda _: False)
            assert found.goaway == Http2Code.PROTOCOL_ERROR
        assert served.faults.counts == {(Port.PICKER, Fault.MALFORMED): 1}


@looped
async def test_a_bug_ends_its_connection_alone_and_is_logged(caplog):
    async with serving() as served:
        with client_of(served) as client, client_of(served) as other:
            await client.send(HELLO + client.writer.headers(1))
            await until(lambda: served.handlers)
            served.handlers[0].message = lambda data: 1 / 0
            await client.send(data_frame(1, packed(b"x")))
            found = await client.read(lambda _: False)
            assert found.goaway == Http2Code.INTERNAL_ERROR
            await other.send(HELLO + other.writer.headers(1) + data_frame(1, packed(b"x"), ends=True))
            assert (await other.read(lambda found: 1 in found.ended)).bodies == {1: packed(b"x")}
    assert "ZeroDivisionError" in caplog.text


@looped
async def test_idle_connections_give_way_on_a_full_port_and_those_with_calls_do_not():
    async with serving(max_connections=2) as served:
        with client_of(served) as busy, client_of(served) as idle:
            await busy.send(HELLO + busy.writer.headers(1))
            await idle.send(HELLO + idle.writer.headers(1) + data_frame(1, packed(b"x"), ends=True))
            await idle.read(lambda found: 1 in found.ended)
            await until(lambda: len(served.handlers) == 2)
            with client_of(served) as late:
                await late.send(HELLO + late.writer.headers(1) + data_frame(1, packed(b"x"), ends=True))
                await late.read(lambda found: 1 in found.ended)
                await idle.read(lambda _: False)
                assert idle.has_end
                await busy.send(data_frame(1, packed(b"x"), ends=True))
                assert 1 in (await busy.read(lambda found: 1 in found.ended)).ended


@looped
async def test_a_client_that_leaves_closes_its_calls():
    async with serving() as served:
        with client_of(served) as client:
            await client.send(HELLO + client.writer.headers(1) + client.writer.headers(3) + data_frame(1, packed(b"x")))
            await until(lambda: len(served.handlers) == 2)
            await client.send(frame(RST_STREAM, 0, 3, bytes(4)))
            await until(lambda: served.handlers[1].num_closed == 1)
        await until(lambda: not served.connections)
        assert [each.num_closed for each in served.handlers] == [1, 1]
        assert served.faults.counts == {(Port.PICKER, Fault.CLIENT_LEFT): 1}


@looped
async def test_a_drained_connection_finishes_and_a_closed_one_ends_its_calls():
    async with serving() as served:
        with client_of(served) as client:
            await client.send(HELLO + client.writer.headers(1) + client.writer.headers(3))
            await until(lambda: len(served.handlers) == 2)
            [connection] = served.connections
            connection.drain()
            await client.send(client.writer.headers(5) + data_frame(1, packed(b"x"), ends=True))
            found = await client.read(lambda found: 1 in found.ended and 5 in found.resets)
            assert found.resets == {5: Http2Code.REFUSED_STREAM}
            assert connection.num_calls == 1
            connection.close()
            await client.read(lambda _: False)
            assert client.has_end
            assert served.handlers[1].num_closed == 1
