"""How many clients may be connected, and what one too many hears."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable
from typing import cast

from aiohttp import web

from moestro.errors import ConfigError
from moestro.serve.http_connection import HttpConnection
from moestro.serve.log_limit import LogLimit
from moestro.serve.refusals import ConnectionsFullError, error_json

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


async def listen(
    runner: web.AppRunner, listener: socket.socket, max_connections: int, refusals: Counter[str]
) -> asyncio.Server:
    """Accept connections for `runner`, which is set up, up to `max_connections` at a time; more hear 503 at once.

    Args:
        refusals: Counts what could not be read, by code.
    """
    allow_open_files(max_connections)
    server, log = runner.server, LogLimit(logger)
    assert server is not None, "the runner is not set up"

    def protocol() -> asyncio.BaseProtocol:
        return HttpConnection(server, refusals, log) if len(server.connections) < max_connections else TooMany()

    return await accept(protocol, listener)


async def accept(protocol: Callable[[], asyncio.BaseProtocol], listener: socket.socket) -> asyncio.Server:
    """Accept connections, each for a `protocol` of its own."""
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
