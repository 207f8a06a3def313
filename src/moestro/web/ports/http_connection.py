"""One connection to an aiohttp server: bounded in bytes and time, and without a way into the log.

Parser errors get OpenAI's form. Requests before such an error are answered. A request whose body breaks off is refused
at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

from aiohttp import web
from aiohttp.http import HttpRequestParser, RawRequestMessage
from aiohttp.http_exceptions import (
    BadStatusLine,
    HttpProcessingError,
    InvalidHeader,
    InvalidURLError,
    LineTooLong,
    TransferEncodingError,
)
from aiohttp.streams import StreamReader

from moestro.errors import RequestError
from moestro.web.errors import HttpError, InternalError, error_json
from moestro.web.ports.faults import Fault, PortFaults
from moestro.web.ports.heads import (
    IDLE_S,
    LINGER_S,
    MAX_HEAD_BYTES,
    FramingCount,
    head_too_large,
)

# Connections of a port by client address, and which of them gives way when the port is full. Has no sockets.

# Addresses and connections that are looked at for one that gives way: a full port must not slow down what it serves.
_MAX_LOOKS = 64


class Transport(Protocol):
    """What the table needs of an asyncio transport."""

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the client has not taken yet."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class ConnectionSlot:
    """Place of one connection at its port. The connection's protocol calls its methods.

    Attributes:
        transport: Transport of the connection; None until it is open.
    """

    __slots__ = ("_address", "_is_answering", "_table", "transport")

    def __init__(self, table: ConnectionTable, address: _Address) -> None:
        self._table: ConnectionTable | None = table
        self._address = address
        self._is_answering = False
        self.transport: Transport | None = None

    def opened(self, transport: Transport) -> None:
        """Record that the connection is open. From now on it may give way."""
        self.transport = transport
        if self._table is not None and not self._is_answering:
            self._address.idle[self] = None

    def begins(self) -> None:
        """Record a complete request: the connection gives way to none until `ends`. May be called several times."""
        self._is_answering = True
        self._address.idle.pop(self, None)

    def ends(self) -> None:
        """Record that the request has been answered."""
        self._is_answering = False
        if self._table is not None and self.transport is not None:
            self._address.idle[self] = None

    def release(self) -> None:
        """Give the place back. A second call has no effect."""
        table, self._table = self._table, None
        if table is not None:
            self._address.idle.pop(self, None)
            table.left(self._address)

    def displace(self) -> None:
        """Close the connection, and give its place back at once."""
        self.release()
        if self.transport is not None:
            self.transport.abort()


class _Address:
    """Connections of one client address.

    Attributes:
        num_open: Open connections.
        idle: Connections without a complete request. The one that has had none for the longest time comes first.
    """

    __slots__ = ("idle", "name", "num_open")

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_open = 0
        self.idle: dict[ConnectionSlot, None] = {}


class ConnectionTable:
    """Open connections of one port.

    Attributes:
        num_open: Open connections.
        num_closed: Connections that have ended.
    """

    def __init__(self) -> None:
        self.num_open = self.num_closed = 0
        self._by_name: dict[str, _Address] = {}
        self._by_count: dict[int, dict[_Address, None]] = {}  # Addresses by their number of connections.

    def num_of(self, address: str) -> int:
        """Return the number of open connections of an address."""
        found = self._by_name.get(address)
        return 0 if found is None else found.num_open

    def enter(self, address: str) -> ConnectionSlot:
        """Add a connection of an address."""
        found = self._by_name.get(address)
        if found is None:
            found = self._by_name[address] = _Address(address)
        self._count(found, 1)
        return ConnectionSlot(self, found)

    def left(self, address: _Address) -> None:
        """Remove a connection of an address; `ConnectionSlot.release` calls it."""
        self._count(address, -1)
        self.num_closed += 1
        if not address.num_open:
            del self._by_name[address.name]

    def giving_way_to(self, address: str) -> ConnectionSlot | None:
        """Return the connection that gives way to a new one of `address`; None means that none does.

        It has no complete request, and is the oldest such connection of the address that has most. An address that has
        no more connections than `address` gives way to it only where it is the same.
        """
        num_own, num_looks = self.num_of(address), 0
        for count in sorted((count for count in self._by_count if count > num_own), reverse=True):
            for found in self._by_count[count]:
                if (slot := _oldest_idle(found)) is not None:
                    return slot
                num_looks += 1
                if num_looks == _MAX_LOOKS:
                    return None
        own = self._by_name.get(address)
        return None if own is None else _oldest_idle(own)

    def _count(self, address: _Address, change: int) -> None:
        before = address.num_open
        address.num_open = after = before + change
        self.num_open += change
        if before:
            group = self._by_count[before]
            del group[address]
            if not group:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, {})[address] = None


def _oldest_idle(address: _Address) -> ConnectionSlot | None:
    """Return the oldest connection without a complete request and without bytes of an answer for its client."""
    for _, slot in zip(range(_MAX_LOOKS), address.idle, strict=False):
        if slot.transport is None or not slot.transport.get_write_buffer_size():
            return slot
    return None


_READ_BYTES = 1 << 16  # Unread bytes of a body after which the connection stops reading.
# Fixed texts, because the parser's own messages repeat the client's data.
_FAULTS: tuple[tuple[type[HttpProcessingError], str], ...] = (
    (InvalidURLError, "the path is not valid"),
    (BadStatusLine, "the request line is not valid"),
    (InvalidHeader, "the value of a header is not valid"),
    (TransferEncodingError, "a chunk of the body is not valid"),
    (HttpProcessingError, "a header or the body's framing is not valid, or Host is missing or repeated"),
)


class HttpConnection(web.RequestHandler):
    """Serves one connection of `server`.

    aiohttp offers no hook for the parser's errors. This class alone uses its private names `_parser`, `_messages`,
    `_max_msg_queue_size`, `_request_count`, `_current_request` and `_handle_request`. `test_http_edges.py` and
    `test_connections.py` in `tests/web` fail when their meaning changes.

    Args:
        faults: Faults of the connection's port.
        write_s: Time that the client may leave its answer unread, in seconds.
        slot: Place of the connection at its port.
    """

    def __init__(self, server: web.Server, faults: PortFaults, write_s: float, slot: ConnectionSlot) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, keepalive_timeout=IDLE_S, lingering_time=LINGER_S, access_log=None)  # type: ignore[arg-type]
        self._faults = faults
        self._write_s = write_s
        self._slot = slot
        self._wire: asyncio.Transport | None = None  # The transport, also while it closes.
        self._cut: asyncio.TimerHandle | None = None  # Runs while the client leaves its answer unread.
        self._framing = FramingCount()
        self._body: StreamReader | None = None  # Body of the newest request.
        self._is_unreadable = False  # Whether the data that arrives is no longer HTTP.
        # With a queue of one request, the parser never reads invalid data together with a request before it. aiohttp
        # would drop that request. The number of headers is checked with the complete head, whose size is bounded here.
        self._parser = HttpRequestParser(
            self,
            loop,
            _READ_BYTES,
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
            max_headers=MAX_HEAD_BYTES,
            payload_exception=web.RequestPayloadError,
            max_msg_queue_size=1,
            auto_decompress=False,  # `Bodies` unpacks a body when a handler reads it.
        )

    # --- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve."""
        self._wire = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the handler, and release the connection's place."""
        if self._current_request is not None:
            self._faults.count(Fault.CLIENT_LEFT)
        self._wire = None
        self._stop_cut()
        super().connection_lost(exc)
        self._slot.release()

    def pause_writing(self) -> None:
        """Give the client a limited time to read."""
        super().pause_writing()
        self._start_cut()

    def resume_writing(self) -> None:
        """Go on, because the client has read."""
        super().resume_writing()
        self._stop_cut()

    def data_received(self, data: bytes) -> None:
        """Parse `data` request by request, until the queue is full or the parser needs more data.

        The parser stops at the end of each request, also where only the body of an earlier one ends.
        """
        if self._is_unreadable:
            return  # The data is dropped, because nothing marks where a request begins.
        num_first = self._request_count
        self._framing.read(len(data))
        reached = None
        while reached != self._reached and not self._is_unreadable:
            reached = self._reached
            super().data_received(data)
            self._look_at_newest()
            data = b""
            if len(self._messages) >= self._max_msg_queue_size:
                break
        self._check_framing(is_new=self._request_count > num_first)
        self._look_for_complete()

    def cut_unread(self) -> None:
        """Close the connection at once, because its client does not read its answer."""
        if self._wire is not None:
            self._faults.count(Fault.UNREAD)
            self._wire.abort()

    async def start(self) -> None:
        """Answer the connection's requests. Afterwards the client has a limited time to read the last answer."""
        try:
            await super().start()
        finally:
            if self._cut is None:
                self._start_cut()

    async def _handle_request(
        self,
        request: web.BaseRequest,
        start_time: float | None,
        request_handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    ) -> tuple[web.StreamResponse, bool]:
        """Answer a request. Its connection gives way to none from the end of its body to the end of its response."""
        if request.content.is_eof():
            self._slot.begins()
        try:
            return await super()._handle_request(request, start_time, request_handler)
        finally:
            self._slot.ends()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the response, and let the client notice the end of the connection if it is the last one."""
        sent, has_left = await super().finish_response(request, resp, start_time)
        if not has_left and not sent.keep_alive:
            await self._linger()
        return sent, has_left

    # --- errors

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to a parser error, and close the connection after it."""
        if request.writer.output_size > 0 or self.transport is None or self.transport.is_closing():
            raise ConnectionError("a response is already under way, or the client has left")
        if isinstance(exc, HttpProcessingError):
            error = _refusal_of(exc)
            self._faults.count(Fault.HEAD_TOO_LARGE if error.http_status == 431 else Fault.MALFORMED)
        else:
            if exc is not None:
                self._faults.of_all.bug("a request failed outside of its handler", exc)
            error = InternalError("-")
        response = web.Response(status=error.http_status, body=error_json(error), content_type="application/json")
        response.headers["Server"] = "moestro"
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Count a client's disconnect; log all else as a bug of ours."""
        error = kw.get("exc_info")
        if isinstance(error, ConnectionError):
            self._faults.count(Fault.CLIENT_LEFT)
        elif isinstance(error, web.RequestPayloadError | RequestError):
            self._faults.count(Fault.MALFORMED)  # aiohttp has read the rest of a broken body after its answer.
        elif isinstance(error, BaseException):
            self._faults.of_all.bug("a connection failed", error)

    # --- inside

    @property
    def _reached(self) -> tuple[int, bool]:
        """How far the parser is: the number of requests, and whether the newest one is complete."""
        return self._request_count, self._body is None or self._body.is_eof()

    def _look_at_newest(self) -> None:
        """Fail a request whose body cannot be parsed; aiohttp would wait for the rest of the body."""
        body = self._body
        if self._messages:
            newest, newest_body = self._messages[-1]
            if isinstance(newest, RawRequestMessage):
                if newest_body is not body:
                    self._body = newest_body
                    self._framing.num_body_bytes = 0
            elif not self._is_unreadable:
                self._is_unreadable = True
                if body is not None and not body.is_eof():
                    body.set_exception(_refusal_of(cast(HttpProcessingError, newest.exc)))
        if body is not None and body.exception() is not None and not body.is_eof():
            body.feed_eof()  # No further data can arrive for this body.

    def _look_for_complete(self) -> None:
        """Keep the connection's place as long as a complete request waits for its answer."""
        current = self._current_request
        bodies = [current.content] if current is not None else [body for _, body in self._messages]
        if bodies and bodies[0].is_eof():
            self._slot.begins()

    def _check_framing(self, *, is_new: bool) -> None:
        """End the connection if heads, trailers or the framing of chunks exceed their limits."""
        framing, body = self._framing, self._body
        if is_new:
            framing.restart()
        if body is not None and (growth := body.total_bytes - framing.num_body_bytes) > 0:
            framing.body(growth)
        is_parsed = len(self._messages) < self._max_msg_queue_size  # Otherwise the parser holds the rest back.
        if framing.is_over and is_parsed and not self._is_unreadable:
            self._parser = _Overrun()  # type: ignore[assignment]
            super().data_received(b"")
            self._look_at_newest()

    async def _linger(self) -> None:
        """Close the server's side, and drop what arrives until the client closes its own, for `LINGER_S` at most.

        An immediate close would reset the connection of a client that is still sending, and the response would be lost.
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self._is_unreadable = True
        transport.resume_reading()
        if transport.can_write_eof():  # TLS has no half-closed connections.
            transport.write_eof()
        # The client's end cancels this task.
        await asyncio.sleep(LINGER_S)
        if self._body is not None and not self._body.is_eof():
            self._body.feed_eof()  # aiohttp would wait for the rest.

    def _start_cut(self) -> None:
        self._stop_cut()
        if self._wire is not None:
            self._cut = self._loop.call_later(self._write_s, self.cut_unread)

    def _stop_cut(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None


class _Overrun:
    """Takes the place of the parser where a head, trailers or chunk framing exceed their limits."""

    def feed_data(self, data: bytes) -> None:
        """Implement `HttpRequestParser.feed_data`."""
        raise LineTooLong(b"", MAX_HEAD_BYTES)

    def feed_eof(self) -> None:
        """Implement `HttpRequestParser.feed_eof`."""

    def message_consumed(self) -> None:
        """Implement `HttpRequestParser.message_consumed`."""

    def pause_reading(self) -> None:
        """Implement `HttpRequestParser.pause_reading`."""

    def set_upgraded(self, val: bool) -> None:  # noqa: FBT001 - aiohttp's signature
        """Implement `HttpRequestParser.set_upgraded`."""


def _refusal_of(error: HttpProcessingError) -> RequestError:
    if isinstance(error, LineTooLong):
        return head_too_large()
    fault = next(text for kind, text in _FAULTS if isinstance(error, kind))
    return HttpError(400, f"Malformed HTTP: {fault}.", "bad_request")
