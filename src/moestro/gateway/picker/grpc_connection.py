"""One connection of a gRPC client, as asyncio's protocol: what the sans-IO parts write, and when a peer is given up."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from moestro.gateway.picker.grpc_calls import Methods, PartialMessages, open_call
from moestro.gateway.picker.http2 import Http2Connection, Http2Stream, StreamReceiver
from moestro.gateway.picker.http2_frames import Fields, Http2Code
from moestro.web.ports.faults import Fault, PortFaults
from moestro.web.ports.http_connection import ConnectionSlot

_TICK_S = 5.0
# Ticks without a byte of the peer, after which it gets a PING, and is given up: its machine may vanish, and its
# requests must not stay in flight. Ticks, not seconds: a pause of this process is no silence of its peers.
_PING_TICKS, _SILENT_TICKS = 4, 6
_UNREAD_TICKS = 12  # For which a peer may leave its answers unread.
_HIGH_WATER_BYTES = 1 << 20  # Unread bytes from which on nothing more is read of the peer.


class GrpcConnection(asyncio.Protocol):
    """Serves the calls of one connection.

    Args:
        methods: What is served.
        connections: All open connections, this one among them while it is open.
        slot: Place of the connection at its port.

    Attributes:
        peer: IP address of the client; empty if it has none.
    """

    def __init__(
        self, methods: Methods, connections: set[GrpcConnection], faults: PortFaults, slot: ConnectionSlot
    ) -> None:
        self._methods = methods
        self._connections = connections
        self._faults = faults
        self._slot = slot
        self._http2 = Http2Connection(self, time.monotonic_ns())
        self._partials = PartialMessages()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_ticks = 0  # Since the peer has sent or, where it is not read, taken a byte.
        self._is_unread = self._is_busy = False
        self.peer = ""

    @property
    def num_calls(self) -> int:
        """Open calls."""
        return self._http2.num_streams

    # --- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else ""
        self._connections.add(self)
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Answer what the client has sent, in one write."""
        self._num_ticks = 0
        try:
            self._http2.receive(data, time.monotonic_ns())
        except Exception as error:
            self._faults.of_all.bug("a connection of the endpoint picker failed", error)
            self._http2.fail(Http2Code.INTERNAL_ERROR, "")
        self.flush()

    def pause_writing(self) -> None:
        """Read no more, because the client does not read its answers."""
        self._num_ticks, self._is_unread = 0, True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read again."""
        self._num_ticks, self._is_unread = 0, False
        if self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the calls, and release the connection's place."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._connections.discard(self)
        if self._http2.num_streams:
            self._faults.count(Fault.CLIENT_LEFT)
        try:
            self._http2.lost()
        finally:
            self._slot.release()

    # --- called by calls and the port

    def opened(self, stream: Http2Stream, fields: Fields) -> StreamReceiver:
        """Implement `StreamHost.opened`."""
        return open_call(stream, fields, self._methods, self, self._partials)

    def flush(self) -> None:
        """Send what has been written."""
        transport, http2 = self._transport, self._http2
        if transport is None:
            return
        if (data := http2.take()) and not transport.is_closing():
            transport.write(data)
        if http2.is_over:
            self._close(transport)
        is_busy = http2.num_streams > 0
        if is_busy is not self._is_busy:
            self._is_busy = is_busy
            if is_busy:
                self._slot.begins()
            else:
                self._slot.ends()

    def drain(self) -> None:
        """Refuse new calls, and let the others finish."""
        self._http2.drain()
        self.flush()

    def close(self) -> None:
        """End the calls and the connection."""
        self._http2.fail(Http2Code.NO_ERROR, "the server stops")
        self.flush()

    # --- inside

    def _close(self, transport: asyncio.Transport) -> None:
        """Close the connection once its last bytes are sent."""
        if not transport.is_closing():
            if self._http2.has_failed:
                self._faults.count(Fault.MALFORMED)
            transport.close()

    def _tick(self) -> None:
        """Look after the peer at each interval."""
        transport = self._transport
        if transport is None:
            return
        self._num_ticks += 1
        if transport.is_closing() or self._num_ticks >= (_UNREAD_TICKS if self._is_unread else _SILENT_TICKS):
            if self._is_unread:
                self._faults.count(Fault.UNREAD)
            transport.abort()
            return
        if self._num_ticks == _PING_TICKS and not self._is_unread:
            self._http2.ping()
            self.flush()
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
