"""How many clients may be connected, and what one too many hears."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from ipaddress import ip_address
from typing import cast

from aiohttp import web

from moestro.errors import ConfigError
from moestro.web.errors import ConnectionsFullError, error_json
from moestro.web.http_connection import HttpConnection
from moestro.web.log_limit import LogLimit
from moestro.web.rate_limits import AtATime, network_of

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 256 << 10
_OTHER_FILES = 128  # that the process keeps open besides: libraries, the ranks' pipes, the event loop


def bound_socket(host: str, port: int) -> socket.socket:
    """Bound before anything is loaded, so that a taken port is known at once; it listens once there is an answer."""
    listener = None
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        text = f"cannot listen on {host}:{port} ({error.strerror}): give another --host or --port"
        raise ConfigError(text) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def warn_if_open(listener: socket.socket, api_keys: Collection[str]) -> None:
    """Log a warning where other machines can reach the server and it asks for no key."""
    if not api_keys and not ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback:
        url = url_of(listener)
        logger.warning("listening on %s without --api-key: every host that reaches this machine can use it", url)


async def listen(
    runner: web.AppRunner,
    listener: socket.socket,
    refusals: Counter[str],
    max_connections: int,
    max_per_address: int | None = None,
) -> asyncio.Server:
    """Accept connections for `runner`, which is set up, up to `max_connections` at a time; more are answered 503.

    Args:
        refusals: Counts what could not be read, by code.
        max_per_address: Connections of one client address at a time; None means no limit.
    """
    allow_open_files(max_connections)
    server, log = runner.server, LogLimit(logger)
    assert server is not None, "the runner is not set up"

    def protocol() -> asyncio.Protocol:
        return HttpConnection(server, refusals, log) if len(server.connections) < max_connections else TooMany()

    return await accept(protocol, listener, max_per_address)


async def accept(
    protocol: Callable[[], asyncio.Protocol], listener: socket.socket, max_per_address: int | None = None
) -> asyncio.Server:
    """Accept connections, each for a `protocol` of its own.

    Args:
        max_per_address: Connections of one client address at a time; one more is answered 503. None means no limit.
    """
    if max_per_address is not None:
        protocol = partial(_Counted, AtATime(max_per_address), protocol)
    # Accepted connections inherit it. The kernel's own choice lets megabytes pile up before anybody who does not read.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return await asyncio.get_running_loop().create_server(protocol, sock=listener, backlog=1024)


class TooMany(asyncio.Protocol):
    """Refuses, whatever is asked."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say so and hang up."""
        error = ConnectionsFullError()
        body = error_json(error)
        head = (
            f"HTTP/1.1 {error.http_status} Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: {error.retry_after_s}\r\nConnection: close\r\n\r\n"
        )
        stream = cast(asyncio.WriteTransport, transport)
        stream.write(head.encode() + body)
        stream.close()


class _Counted(asyncio.Protocol):
    """A connection that counts for its address: `protocol` is made for it only if the address may have one more."""

    def __init__(self, open_connections: AtATime, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._open = open_connections
        self._make = protocol
        self._protocol: asyncio.Protocol = TooMany()
        self._network: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the connection, or refuse it."""
        peer = transport.get_extra_info("peername")
        network = network_of(str(peer[0]) if peer else "")
        if self._open.enter(network):
            self._network, self._protocol = network, self._make()
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Make room for another one."""
        if self._network is not None:
            self._open.leave(self._network)
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hand it on."""
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """Hand it on."""
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Hand it on."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Hand it on."""
        self._protocol.resume_writing()


def allow_open_files(num_connections: int) -> None:
    """Let the process have so many connections, and the files that it needs besides.

    Raises:
        ConfigError: the system does not allow it.
    """
    wanted = num_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    if wanted > hard:
        raise ConfigError(f"--max-connections needs {wanted} open files, and this system allows {hard}: lower it")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
