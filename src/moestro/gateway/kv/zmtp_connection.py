"""A connection to one socket of a publisher, which holds a bounded number of bytes of what the publisher sends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import cast

from moestro.wire.kv_events import MAX_MESSAGE_BYTES
from moestro.wire.zmtp import ZmtpError, ZmtpReader, greeting, keep_alive, ready

_CONNECT_S = 5.0
_HELD_BYTES = 256 << 10  # received and not taken, besides a message that is not whole; then TCP slows the peer down
_ANSWER_BYTES = 64 << 10  # answers to a peer that does not read them
_FRAMES_AT_ONCE = 64  # limit of what one call reads, be it complete messages or not
_TCP = "tcp://"
_IPC = "ipc://"


class ZmtpConnection(asyncio.Protocol):
    """One connection. It never reconnects: one connection is one process of the publisher.

    Args:
        socket_type: type of this end.
        peers: types that the other end may have.
        wake: called when a message may have arrived, or the connection has ended.

    Attributes:
        is_over: whether the connection has ended, or could not be made.
        fault: how the peer broke the protocol or a bound; empty means that it did not.
    """

    def __init__(self, socket_type: bytes, peers: frozenset[bytes], wake: Callable[[], None]) -> None:
        self.is_over = False
        self.fault = ""
        self._socket_type = socket_type
        self._wake = wake
        self._reader = ZmtpReader(peers, MAX_MESSAGE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._first = b""
        self._connecting: asyncio.Task[None] | None = None

    @property
    def is_made(self) -> bool:
        """Whether the handshake is complete."""
        return self._reader.is_made

    def open(self, endpoint: str, first: bytes) -> None:
        """Connect to `endpoint`, and send the message `first` after the handshake."""
        self._first = first
        self._connecting = asyncio.create_task(self._connect(endpoint))

    def take(self) -> list[bytes] | None:
        """Return a received message, or None without one that is whole. After a fault of the peer there is none."""
        if self.is_over and self.fault:
            return None
        frames: list[bytes] | None = None
        try:
            for _ in range(_FRAMES_AT_ONCE):
                if self._reader.wants_more:
                    break
                frames, answer = self._reader.take()
                self._answer(answer)
                if self._first and self._reader.is_made:  # libzmq ends a connection with a message before its handshake
                    self._answer(self._first)
                    self._first = b""
                if frames is not None:
                    break
        except ZmtpError as error:
            self.fault = str(error)
            self.close()
        self._resume()
        return frames

    @property
    def has_more(self) -> bool:
        """Whether another call of `take` may return a message."""
        return not self.fault and not self._reader.wants_more

    def close(self) -> None:
        """End the connection."""
        self.is_over = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    # --- from the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake with the publisher."""
        self._transport = connected = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        if self.is_over:
            connected.abort()
            return
        raw = connected.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            keep_alive(raw)
        connected.write(greeting() + ready(self._socket_type))

    def data_received(self, data: bytes) -> None:
        """Hold the data for `take`, and slow the peer down if it is much."""
        if self.fault:
            return
        self._reader.add(data)
        if not self._reader.wants_more and self._reader.num_held_bytes > _HELD_BYTES and not self._is_paused:
            self._is_paused = True
            assert self._transport is not None
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Implement `asyncio.Protocol`."""
        self.is_over = True
        self._wake()

    # --- inside

    async def _connect(self, endpoint: str) -> None:
        """Connect, and give up a handshake that takes too long."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_CONNECT_S):
                if endpoint.startswith(_IPC):
                    await loop.create_unix_connection(lambda: self, _unix_path(endpoint.removeprefix(_IPC)))
                else:
                    host, _, port = endpoint.removeprefix(_TCP).rpartition(":")
                    await loop.create_connection(lambda: self, host.strip("[]"), int(port))
            await asyncio.sleep(_CONNECT_S)
        if not self.is_made:
            self.close()
            self._wake()

    def _answer(self, answer: bytes) -> None:
        transport = self._transport
        if answer and transport is not None and transport.get_write_buffer_size() < _ANSWER_BYTES:
            transport.write(answer)

    def _resume(self) -> None:
        reader = self._reader
        if self._is_paused and not self.is_over and (reader.wants_more or reader.num_held_bytes <= _HELD_BYTES):
            self._is_paused = False
            assert self._transport is not None
            self._transport.resume_reading()


def _unix_path(path: str) -> str:
    """Return a path as the system takes it; libzmq writes an abstract one with a leading @."""
    return "\0" + path[1:] if path.startswith("@") else path
