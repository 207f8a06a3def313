"""The front of a port: its own budget of connections, times for slow readers, and what reaches the log."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket

import pytest
import uvloop
from aiohttp import web
from support.running import Running, call, call_admin, wait_until

from moestro.errors import ConfigError
from moestro.web.access import Access
from moestro.web.connections import (
    MAX_OPERATOR_CONNECTIONS,
    Front,
    FrontLimits,
    allow_open_files,
    bound_socket,
    http_front,
)
from moestro.web.faults import Fault, Faults, Port
from moestro.web.middleware import HttpMiddleware
from moestro.web.refusals import Refusals

SECRET = "do-not-repeat-me"


class Quiet(asyncio.Protocol):
    """A connection that says nothing."""

    def __init__(self, on_lost) -> None:
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()


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


def test_a_burst_never_opens_more_than_the_budget_and_each_place_returns():
    async def burst() -> None:
        async with opened(FrontLimits(4)) as (front, port, faults):
            with contextlib.ExitStack() as stack:
                clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(50)]
                await until(lambda: front.num_open + faults.counts[Port.CLIENTS, Fault.TOO_MANY] == 50)
                assert front.num_open == 4
                assert [client.recv(12) for client in clients[4:]] == [b"HTTP/1.1 503"] * 46
            await until(lambda: front.num_open == 0)

    uvloop.run(burst())


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


def test_idle_connections_to_the_operators_port_leave_the_clients_port_alone(fake: Running):
    idle = [socket.create_connection(("127.0.0.1", fake.admin_port)) for _ in range(MAX_OPERATOR_CONNECTIONS + 50)]
    assert b"too_many_connections" in idle[-1].recv(4096)
    assert call(fake, "GET", "/health").status == 200
    for each in idle:
        each.close()
    wait_until(lambda: call_admin(fake, "GET", "/statistics").status == 200)
    text = call(fake, "GET", "/metrics").body.decode()
    assert 'moestro:connection_faults_total{kind="too_many_connections",port="operators"}' in text


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
