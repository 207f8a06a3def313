"""Accepts connections up to a limit, and refuses further ones."""

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

from moestro.core.hosts import in_address
from moestro.errors import ConfigError
from moestro.web.errors import ConnectionsFullError, error_json
from moestro.web.http_connection import HttpConnection
from moestro.web.log_limit import LogLimit
from moestro.web.rate_limits import AtATime, network_of

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 256 << 10
_OTHER_FILES = 128  # Other open files of the process: libraries, the ranks' pipes, the event loop.


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket. A server binds before it loads anything, so that a taken port is known at once."""
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
    return f"http://{in_address(host)}:{port}"


def warn_if_open(listener: socket.socket, api_keys: Collection[str]) -> None:
    """Log a warning if other machines can reach the server and no key is needed."""
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
    """Accept up to `max_connections` connections for a `runner` that is set up; further ones get 503.

    The caller has raised the limit of open files before it loaded anything (`allow_open_files`).

    Args:
        refusals: Counter of unreadable requests, by code.
        max_per_address: Most concurrent connections of one client address; None means no limit.
    """
    server, log = runner.server, LogLimit(logger)
    assert server is not None, "the runner is not set up"

    def protocol() -> asyncio.Protocol:
        return HttpConnection(server, refusals, log) if len(server.connections) < max_connections else TooMany()

    return await accept(protocol, listener, max_per_address)


async def accept(
    protocol: Callable[[], asyncio.Protocol], listener: socket.socket, max_per_address: int | None = None
) -> asyncio.Server:
    """Accept connections, each with a new `protocol`.

    Args:
        max_per_address: Most concurrent connections of one client address; a further one gets 503. None means no limit.
    """
    if max_per_address is not None:
        protocol = partial(_Counted, AtATime(max_per_address), protocol)
    # Accepted connections inherit this size. The kernel's default buffers megabytes for a client that does not read.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return await asyncio.get_running_loop().create_server(protocol, sock=listener, backlog=1024)


class TooMany(asyncio.Protocol):
    """Refuses a connection before it reads a request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the refusal and close the connection."""
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
    """Counts a connection for its address, and creates its `protocol` only if the address may have one more."""

    def __init__(self, open_connections: AtATime, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._open = open_connections
        self._make = protocol
        self._protocol: asyncio.Protocol = TooMany()
        self._network: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection, or refuse it."""
        peer = transport.get_extra_info("peername")
        network = network_of(str(peer[0]) if peer else "")
        if self._open.enter(network):
            self._network, self._protocol = network, self._make()
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's slot."""
        if self._network is not None:
            self._open.leave(self._network)
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Implement `asyncio.Protocol.data_received`."""
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """Implement `asyncio.Protocol.eof_received`."""
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Implement `asyncio.Protocol.pause_writing`."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Implement `asyncio.Protocol.resume_writing`."""
        self._protocol.resume_writing()


def allow_open_files(num_connections: int) -> None:
    """Raise the limit of open files so that it covers `num_connections` and the process's other files.

    Raises:
        ConfigError: The system does not allow so many open files.
    """
    wanted = num_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    if wanted > hard:
        raise ConfigError(f"--max-connections needs {wanted} open files, and this system allows {hard}: lower it")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
