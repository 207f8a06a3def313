"""The least that an API server could do: takes messages from a Unix stream socket, and writes a chunk to each client.

    python bench/micro/bare_forwarder.py SOCKET PORT

It has the event loop, the socket calls and the bytes of Moestro's server, and nothing else: the chunk is always the
same, and messages are not looked at. `step_parts.py` runs it, and measures its processor time beside the server's.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import cast

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-%032x","object":"text_completion","created":1764000000,"model":"qwen3-30b-a3b",'
    b'"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}\n\n' % 0
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
_READ_BYTES = 1 << 16


class Client(asyncio.Protocol):
    """Gets the chunks from its request on."""

    def __init__(self, transports: list[asyncio.Transport]) -> None:
        self._transports = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(HEAD)
        self._transports.append(self._transport)


async def forward(path: str, port: int) -> None:
    """Serve one sender and any number of clients until the sender leaves."""
    loop, transports = asyncio.get_running_loop(), list[asyncio.Transport]()
    await loop.create_server(lambda: Client(transports), "127.0.0.1", port)
    has_ended = asyncio.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(0)
        print("bound", flush=True)
        sender, _ = await loop.sock_accept(listener)
    sender.settimeout(0)

    def read() -> None:
        if not sender.recv(_READ_BYTES):
            loop.remove_reader(sender.fileno())
            has_ended.set()
            return
        for transport in transports:
            transport.write(CHUNK)

    loop.add_reader(sender.fileno(), read)
    await has_ended.wait()


if __name__ == "__main__":
    uvloop.run(forward(sys.argv[1], int(sys.argv[2])))
