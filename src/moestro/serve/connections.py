"""How many clients may be connected, and what one too many hears."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from typing import cast

from aiohttp import web

from moestro.errors import ConfigError
from moestro.serve.refusals import ConnectionsFullError, error_json

logger = logging.getLogger(__name__)

# Also the time that a connection has for the headers of its first request. Longer than the pools of common clients and
# proxies keep an idle connection, so that the side that closes it is theirs.
IDLE_S = 75.0
SEND_BUFFER_BYTES = 256 << 10
_OTHER_FILES = 128  # that the process keeps open besides: libraries, the ranks' pipes, the event loop


async def listen(runner: web.AppRunner, listener: socket.socket, max_connections: int) -> asyncio.Server:
    """Accept connections for `runner`, which is set up, up to `max_connections` at a time; more hear 503 at once."""
    _allow_open_files(max_connections + _OTHER_FILES)
    # Accepted connections inherit it. The kernel's own choice lets megabytes pile up before anybody who does not read.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    server = runner.server
    assert server is not None, "the runner is not set up"

    def protocol() -> asyncio.BaseProtocol:
        return server() if len(server.connections) < max_connections else _TooMany()

    return await asyncio.get_running_loop().create_server(protocol, sock=listener, backlog=1024)


class _TooMany(asyncio.Protocol):
    """Refuses, whatever is asked."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        error = ConnectionsFullError()
        body = error_json(error)
        head = (
            f"HTTP/1.1 {error.http_status} Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: {error.retry_after_s}\r\nConnection: close\r\n\r\n"
        )
        stream = cast(asyncio.WriteTransport, transport)
        stream.write(head.encode() + body)
        stream.close()


def _allow_open_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    if wanted > hard:
        raise ConfigError(f"--max-connections needs {wanted} open files, and this system allows {hard}: lower it")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
