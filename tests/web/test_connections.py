"""The front of a port: its own budget of connections, times for slow readers, and what reaches the log."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Iterator

import pytest
import uvloop
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from support.running import MOESTRO, Running, call, call_admin, free_port

from moestro.errors import ConfigError
from moestro.web.access import Access
from moestro.web.errors import Refusals
from moestro.web.middleware import HttpMiddleware
from moestro.web.ports.connections import (
    MAX_OPERATOR_CONNECTIONS,
    Front,
    FrontLimits,
    allow_open_files,
    bound_socket,
    http_front,
)
from moestro.web.ports.faults import Fault, Faults, Port
from moestro.web.ports.http_connection import ConnectionSlot, ConnectionTable

SECRET = "do-not-repeat-me"


class Quiet(asyncio.Protocol):
    """A connection that says nothing. Its request is complete with the first byte."""

    def __init__(self, slot: ConnectionSlot) -> None:
        self._slot = slot

    def data_received(self, data: bytes) -> None:
        self._slot.begins()

    def connection_lost(self, exc: Exception | None) -> None:
        self._slot.release()


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the conditions are plain state
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def opened(limits: FrontLimits, listener: socket.socket | None = None):
    """A front whose connections say nothing, with its address and faults."""
    listener, faults = listener or bound_socket("127.0.0.1", 0), Faults()
    front = Front(Port.CLIENTS, listener, Quiet, limits, faults).open()
    try:
        yield front, listener.getsockname()[1], faults
    finally:
        front.close()
        listener.close()


def from_address(address: str, port: int, request: bytes = b"") -> socket.socket:
    """A connection from a local address, and what it sends."""
    client = socket.create_connection(("127.0.0.1", port), timeout=300, source_address=(address, 0))
    client.sendall(request)
    return client


def test_a_burst_never_opens_more_than_the_budget_and_each_place_returns():
    async def burst() -> None:
        async with opened(FrontLimits(4)) as (front, port, faults):
            with contextlib.ExitStack() as stack:
                first = [stack.enter_context(from_address("127.0.0.1", port, b"x")) for _ in range(4)]
                await until(lambda: front.num_open == 4)
                await asyncio.sleep(0.1)
                clients = [stack.enter_context(from_address("127.0.0.1", port)) for _ in range(46)]
                await until(lambda: faults.counts[Port.CLIENTS, Fault.TOO_MANY] == 46)
                assert front.num_open == 4
                assert [client.recv(12) for client in clients] == [b"HTTP/1.1 503"] * 46
                assert {is_closed(client) for client in first} == {False}
            await until(lambda: front.num_open == 0)

    uvloop.run(burst())


def is_closed(client: socket.socket) -> bool:
    client.settimeout(0.05)
    with contextlib.suppress(TimeoutError):
        try:
            return not client.recv(1)
        except ConnectionResetError:
            return True
    return False


def test_the_oldest_idle_connection_of_the_address_with_most_gives_way():
    async def full() -> None:
        async with opened(FrontLimits(4)) as (front, port, faults):
            with contextlib.ExitStack() as stack:
                few = stack.enter_context(from_address("127.0.0.3", port))
                many = [stack.enter_context(from_address("127.0.0.2", port)) for _ in range(3)]
                await until(lambda: front.num_open == 4)
                many[0].sendall(b"x")
                await asyncio.sleep(0.1)
                newcomer = stack.enter_context(from_address("127.0.0.1", port))
                await until(lambda: faults.counts[Port.CLIENTS, Fault.DISPLACED] == 1)
                assert [is_closed(each) for each in (few, *many, newcomer)] == [False, False, True, False, False]
                assert front.num_open == 4

    uvloop.run(full())


def test_an_address_with_all_connections_busy_leaves_spare_ones_to_others():
    async def full() -> None:
        async with opened(FrontLimits(32)) as (front, port, faults):
            with contextlib.ExitStack() as stack:
                many = [stack.enter_context(from_address("127.0.0.2", port, b"x")) for _ in range(32)]
                await until(lambda: front.num_open == 32)
                await asyncio.sleep(0.1)
                more = [stack.enter_context(from_address(f"127.0.0.{last}", port, b"x")) for last in (2, 3, 3, 4, 5)]
                await until(lambda: faults.counts[Port.CLIENTS, Fault.TOO_MANY] >= 2)
                await until(lambda: front.num_open == 34)
                assert [is_closed(each) for each in (*many, *more)] == [False] * 37  # Refused ones have their answer.
                assert faults.counts[Port.CLIENTS, Fault.DISPLACED] <= 1

    uvloop.run(full())


@given(st.lists(st.tuples(st.sampled_from(["enter", "begin", "end", "leave"]), st.integers(0, 3)), max_size=80))
def test_law_only_idle_connections_of_addresses_with_more_give_way(steps):
    table, slots = ConnectionTable(), {address: [] for address in "abcd"}
    busy: set[ConnectionSlot] = set()
    for what, number in steps:
        address = "abcd"[number]
        if what == "enter":
            slots[address].append(table.enter(address))
            slots[address][-1].opened(Drained())
        elif slots[address]:
            slot = slots[address][0]
            if what == "leave":
                slots[address].remove(slot)
                busy.discard(slot)
                slot.release()
                slot.release()
            elif what == "begin":
                busy.add(slot)
                slot.begins()
            else:
                if slot in busy:
                    slots[address].sort(key=lambda each: each is slot)  # It is the newest idle one from now on.
                busy.discard(slot)
                slot.ends()
        assert table.num_open == sum(map(len, slots.values()))
        sizes = {each: len(own) for each, own in slots.items()}
        for newcomer in "abcde":
            idle = {each: [slot for slot in own if slot not in busy] for each, own in slots.items()}
            allowed = [
                each for each in idle if idle[each] and (each == newcomer or sizes[each] > sizes.get(newcomer, 0))
            ]
            found = table.giving_way_to(newcomer)
            if not allowed:
                assert found is None
                continue
            most = max(sizes[each] for each in allowed)
            assert found in [idle[each][0] for each in allowed if sizes[each] == most]


class Drained:
    """A transport whose client has read everything."""

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None: ...


def test_each_address_has_a_budget_of_its_own():
    async def two() -> None:
        async with opened(FrontLimits(4, 1)) as (front, port, faults):
            kept, refused = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
            await until(lambda: faults.counts[Port.CLIENTS, Fault.TOO_MANY_OF_ADDRESS] == 1)
            kept.close()
            refused.close()
            await until(lambda: front.num_open == 0)

    uvloop.run(two())


class FullListener(socket.socket):
    """A listener of a process that has no file left at first."""

    num_failures = 1

    def accept(self):
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


def test_a_port_without_a_file_left_accepts_again_later():
    async def full() -> None:
        listener = FullListener()
        listener.bind(("127.0.0.1", 0))
        async with opened(FrontLimits(4), listener) as (front, port, faults):
            with socket.create_connection(("127.0.0.1", port)):
                await until(lambda: front.num_open == 1)
            assert faults.counts[Port.CLIENTS, Fault.OUT_OF_FILES] == 1

    uvloop.run(full())


def test_more_connections_than_open_files_are_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"the connections of all ports need .* lower --max-connections"):
        allow_open_files(1 << 31)


def test_idle_connections_to_the_operators_port_leave_both_ports_alone(fake: Running):
    idle = [socket.create_connection(("127.0.0.1", fake.admin_port)) for _ in range(MAX_OPERATOR_CONNECTIONS + 50)]
    assert call(fake, "GET", "/health").status == 200
    assert call_admin(fake, "GET", "/statistics").status == 200
    text = call(fake, "GET", "/metrics").body.decode()
    assert 'moestro:connection_faults_total{kind="displaced",port="operators"}' in text
    for each in idle:
        each.close()


BEGUN = {
    "nothing": b"",
    "head": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
    "body": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    "kept": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("begun", BEGUN)
@pytest.mark.parametrize("product", ["serve", "route"])
def test_one_address_with_all_connections_of_a_port_leaves_it_open_to_others(small_ports, product, begun):
    server: Running = small_ports[product]
    stranger = [from_address("127.0.0.2", server.address[1], BEGUN[begun]) for _ in range(40)]
    operators = [from_address("127.0.0.2", server.admin_port) for _ in range(MAX_OPERATOR_CONNECTIONS)]
    for _ in range(5):
        assert call(server, "GET", "/health").status == 200
        body = {"prompt": "hi", "max_tokens": 1}
        assert call(server, "POST", "/v1/completions", body).status == 200
        assert call_admin(server, "GET", "/health").status in (200, 404)  # There is no such path everywhere.
    for each in (*stranger, *operators):
        each.close()


@pytest.fixture(scope="module")
def small_ports(fake_command, tmp_path_factory) -> Iterator[dict[str, Running]]:
    """A server and a router before it, whose ports have 16 connections each."""
    command = (*fake_command, "--max-connections", "16")
    serving = Running(command, tmp_path_factory.mktemp("serve"), admin_port=free_port())
    command = (MOESTRO, "route", "--engine", serving.url, "--max-connections", "16")
    routing = Running(command, tmp_path_factory.mktemp("route"), admin_port=free_port())
    yield {"serve": serving, "route": routing}
    routing.kill()
    serving.kill()


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_a_client_that_leaves_its_answer_unread_is_cut_off(connection):
    async def unread() -> None:
        async def large(_http: web.Request) -> web.Response:
            return web.Response(body=bytes(8 << 20))

        faults, listener = Faults(), bound_socket("127.0.0.1", 0)
        app = web.Application()
        app.add_routes([web.get("/", large)])
        runner = await HttpMiddleware(Access.of([]), Refusals(), 100, faults).runner(app, shutdown_timeout=1)
        front = http_front(Port.CLIENTS, runner, listener, FrontLimits(4, write_s=0.2), faults).open()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
            client.send(f"GET / HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\n\r\n".encode())
            await until(lambda: faults.counts[Port.CLIENTS, Fault.UNREAD] == 1)
            await until(lambda: front.num_open == 0)
        front.close()
        await runner.cleanup()
        listener.close()

    uvloop.run(unread())


def test_a_bug_is_one_traceback_a_minute_without_the_text_of_its_exception(caplog):
    faults = Faults()
    for _ in range(3):
        try:
            int(SECRET)
        except ValueError as error:
            faults.bug("it failed", error)
    assert len(caplog.messages) == 1
    assert "int(SECRET)" in caplog.text
    assert "ValueError" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(("is_clients", "error"), [(True, ConnectionResetError), (True, KeyError), (False, OSError)])
def test_the_loop_logs_bugs_and_counts_clients(caplog, is_clients, error):
    faults = Faults()

    async def failing() -> None:
        faults.watch(asyncio.get_running_loop())
        context = {"message": "it failed", "exception": error(SECRET)}
        asyncio.get_running_loop().call_exception_handler(context | ({"protocol": Quiet(None)} if is_clients else {}))

    asyncio.run(failing())
    is_counted = is_clients and error is ConnectionResetError
    assert faults.counts[Port.UNKNOWN, Fault.CLIENT_LEFT] == is_counted
    assert bool(caplog.messages) != is_counted
    assert SECRET not in caplog.text


def test_a_line_of_a_kind_of_fault_comes_once_a_minute(caplog):
    caplog.set_level(logging.INFO)
    faults = Faults()
    for _ in range(100):
        for fault in Fault:
            faults.count(Port.CLIENTS, fault)
    assert len(caplog.messages) == len(Fault) - 1  # Clients may leave whenever they like.
    [*_, sample] = faults.family("a").samples
    assert sample.value == 100
