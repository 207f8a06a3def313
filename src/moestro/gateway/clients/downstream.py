"""Client connections of the router: requests are answered in order, piece by piece. Plain callbacks, no tasks.

The reader that makes complete requests of the bytes is sans-IO: it has neither sockets nor a clock.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from moestro.errors import RequestError
from moestro.gateway.clients.http_headers import (
    HeaderCache,
    Headers,
    Incoming,
    RequestHead,
    fault_of,
    own_head,
    size_of,
)
from moestro.web.access import Cors
from moestro.web.bodies import SMALL_BYTES, BodiesFullError, BodyDeadline, BodyHold, BodyMemory
from moestro.web.errors import BodyTimeoutError, HttpError, error_body, error_json, too_large
from moestro.web.ports.faults import Fault, Faults, Port
from moestro.web.ports.heads import IDLE_S, LINGER_S, MAX_HEAD_BYTES, MAX_HEADERS, WRITE_S, FramingCount, head_too_large
from moestro.web.ports.http_connection import ConnectionSlot


class Answering(Protocol):
    """Answers a request; a client's connection calls it."""

    def client_left(self) -> None:
        """Stop, because the client is gone."""

    def client_is_slow(self) -> None:
        """Write nothing more to the client until it reads again."""

    def client_is_ready(self) -> None:
        """Write to the client again, which has read what it was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits that apply to every connection.

    Attributes:
        max_body_bytes: largest request body, bytes.
        idle_s: time after which a connection without a request, or with an incomplete head, is closed, seconds.
        body_s: time for a request body to arrive, seconds.
        write_s: time that a client may leave its response unread, seconds.
        linger_s: time for a client to notice a refusal that arrives while it still sends, seconds.
    """

    max_body_bytes: int = 32 << 20
    idle_s: float = IDLE_S
    body_s: float = 60.0
    write_s: float = WRITE_S
    linger_s: float = LINGER_S


# Heads with one of these are not cached: each is unique, or needs more than reading.
_ONCE_ONLY = frozenset({b"x-request-id", b"traceparent", b"transfer-encoding", b"expect"})
_UNREADABLE = RequestHead(b"GET", b"", [], {}, is_last=True)


class ReaderHost(Protocol):
    """State that the readers of all connections share.

    Attributes:
        limits: Limits of every connection.
        known: Cached heads of requests, which need no parsing.
        memory: Memory of all bodies of requests without a response yet.
        rechecks_heads: Whether a cached head is checked again.
    """

    rechecks_heads: bool
    limits: ClientLimits
    known: HeaderCache[RequestHead]
    memory: BodyMemory

    def client_of(self, head: RequestHead, address: str) -> Hashable:
        """Return the name of a request's client."""

    def refuses(self, head: RequestHead) -> RequestError | None:
        """Return the error for a request whose body has not arrived; None admits every head with the same bytes."""


class RequestReader:
    """Reads requests and finds the first fault in them.

    Args:
        host: State that all readers share.
        on_head: Callback after a head is read, before its body.

    Attributes:
        address: Address of the client.
        head: Head of the newest request.
        ready: Complete requests that are not answered yet.
        refusal: Error that ends the connection; None means no error so far.
        is_between: Whether the reader is between two requests.
        is_in_head: Whether the reader expects the end of a head, not of a body.
        wants_continue: Whether the client waits for "100 Continue" before it sends the body.
    """

    def __init__(self, host: ReaderHost, on_head: Callable[[], None]) -> None:
        self._host = host
        self._on_head = on_head
        self._small_bytes = min(SMALL_BYTES, host.limits.max_body_bytes)
        self._parser = HttpRequestParser(self)
        self._headers: Headers = []
        self._target = b""
        self._body: bytes | bytearray = b""  # A single piece is kept as received.
        self._first_read = b""  # First read of the current request, if the request began it.
        self._plain_head = b""  # Head of the current request without its `Upgrade`, which is read in its place.
        self._hold: BodyHold | None = None  # Of the body being read; None while it is small.
        self._holds: set[BodyHold] = set()  # Of all bodies of this connection.
        self._framing = FramingCount()
        self._num_trailer_bytes = 0
        self.address = ""
        self.head = _UNREADABLE
        self.ready: deque[Incoming] = deque()
        self.refusal: RequestError | None = None
        self.is_between = self.is_in_head = True
        self.wants_continue = False

    def find_known(self, data: bytes) -> Incoming | None:
        """Return a complete small request with a cached head; None means that `data` must be parsed."""
        if not self.is_between:
            return None
        found = self._host.known.find(data)
        if found is None:
            return None
        head, begin, length, _ = found
        if begin + (length or 0) != len(data) or len(data) > self._small_bytes:
            return None
        if self._host.rechecks_heads and self._host.refuses(head) is not None:
            return None  # Its key is valid no more, and the parsed request is refused.
        return Incoming(head, data[begin:], self.address)

    def feed(self, data: bytes, *, is_one_read: bool) -> None:
        """Parse `data`. Complete requests go to `ready`, and the first error to `refusal`.

        Args:
            is_one_read: Whether `data` came in one read, so that a head at its beginning can be remembered.
        """
        self._first_read = data if is_one_read and self.is_between else b""
        self._framing.read(len(data))
        try:
            self._parse(data)
        except HttpParserError as error:
            self.refusal = self.refusal or HttpError(400, f"Malformed HTTP: {error}.", "bad_request")
        if self._framing.is_over:
            self.refusal = self.refusal or head_too_large()
        self._first_read = b""

    def release(self, incoming: Incoming) -> None:
        """Drop the body of a request that no longer needs it."""
        incoming.body = b""
        if incoming.hold is not None:
            incoming.hold.release()
            self._holds.discard(incoming.hold)

    def release_all(self) -> None:
        """Drop the body being read, and stop counting all bodies of this connection."""
        self._body = b""
        for hold in self._holds:
            hold.release()
        self._holds.clear()

    def _parse(self, data: bytes) -> None:
        """Parse `data`, and read a request whose `Upgrade` is ignored again without it.

        The parser stops behind the head of such a request, and takes its body for another protocol's data.
        """
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
            except HttpParserUpgrade as error:
                head, self._plain_head = self._plain_head, b""
                if not head:
                    return  # It was refused.
                rest = rest[error.args[0] :]
                self._parser = HttpRequestParser(self)
                self._parser.feed_data(head)
            else:
                return

    # --- called by the parser

    def on_message_begin(self) -> None:
        """Begin a new request."""
        self.is_between = False
        self._headers, self._target, self._body, self._hold = [], b"", b"", None
        if self.refusal is None:
            self.head = _UNREADABLE
        self._framing.num_body_bytes = self._num_trailer_bytes = 0

    def on_url(self, part: bytes) -> None:
        """Append a part of the target."""
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, or drop a trailer, which follows the body."""
        if self.is_in_head:
            self._headers.append((name.lower(), name, value))
            return
        self._num_trailer_bytes += len(name) + len(value)
        if self._num_trailer_bytes > MAX_HEAD_BYTES:
            self.refusal = self.refusal or head_too_large()

    def on_headers_complete(self) -> None:
        """Check the complete head."""
        self.is_in_head = False
        if self.refusal is None:
            self.refusal = self._check_head()

    def on_body(self, piece: bytes) -> None:
        """Keep a part of the body, within the limits."""
        if self.refusal is not None:
            self._framing.body(0)
            return
        before = self._framing.num_body_bytes
        self._framing.body(len(piece))
        after = before + len(piece)
        if after <= self._small_bytes or self._has_room(after):
            if before and not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += piece

    def on_message_complete(self) -> None:
        """Move the complete request to `ready`."""
        body, self._body = self._body, b""
        self.is_in_head = True
        if self._plain_head:
            return
        self.is_between = True
        self._framing.restart()
        self.wants_continue = False
        if self.refusal is not None:
            return
        head = self.head
        if self._first_read:
            if _ONCE_ONLY.isdisjoint(head.named):
                has_length = b"content-length" in head.named
                self._host.known.learn(self._first_read, head, has_length=has_length)
            self._first_read = b""  # The rest of the same read belongs to another request.
        self.ready.append(Incoming(head, bytes(body), self.address, hold=self._hold))

    # --- inside

    def _check_head(self) -> RequestError | None:
        """Build the head of the current request, and return its first fault."""
        limits, parser = self._host.limits, self._parser
        named = {lower: value for lower, _, value in self._headers}
        # One read may contain several requests, so that their bytes on the wire are not known.
        if len(self._headers) > MAX_HEADERS or size_of(self._headers) + len(self._target) > MAX_HEAD_BYTES:
            return head_too_large()
        self._framing.restart()
        version, is_last = parser.get_http_version(), not parser.should_keep_alive()
        is_old = version == "1.0"
        self.head = head = RequestHead(parser.get_method(), self._target, self._headers, named, is_last, is_old)
        if fault := fault_of(head, version):
            return fault
        if parser.should_upgrade():
            return self._ignore_upgrade(head)
        if refusal := self._host.refuses(head):
            return refusal
        if int(named.get(b"content-length", b"0")) > limits.max_body_bytes:
            return too_large(limits.max_body_bytes)
        self._on_head()
        self.wants_continue = b"expect" in named and not is_old
        return None

    def _ignore_upgrade(self, head: RequestHead) -> RequestError | None:
        """Let the head be read again without its `Upgrade`; return the error for one that needs another protocol."""
        if head.method == b"CONNECT" or b"websocket" in head.named[b"upgrade"].lower():
            return HttpError(501, "Upgrade is not supported: leave the header out.", "upgrade_not_supported")
        lines = [b"%b: %b\r\n" % (name, value) for lower, name, value in head.headers if lower != b"upgrade"]
        version = self._parser.get_http_version().encode()
        self._plain_head = b"%b %b HTTP/%b\r\n%b\r\n" % (head.method, head.target, version, b"".join(lines))
        self._first_read = b""  # Only heads as received are remembered.
        return None

    def _has_room(self, num_bytes: int) -> bool:
        """Return whether a body may grow to `num_bytes`, more than the uncounted part."""
        host = self._host
        if num_bytes > host.limits.max_body_bytes:
            self.refusal = too_large(host.limits.max_body_bytes)
            return False
        if self._hold is None:
            self._hold = BodyHold(host.memory, host.client_of(self.head, self.address))
            self._holds.add(self._hold)
        try:
            self._hold.resize(num_bytes)
        except BodiesFullError as error:
            self.refusal = error
        return self.refusal is None


_HIGH_WATER_BYTES = 256 << 10  # Unsent bytes of an answer, beyond which reading from the engine pauses.
_MAX_EARLY_BYTES = 64 << 10  # Bytes read ahead while an answer is under way, beyond which reading pauses.
_MAX_KNOWN = 1024  # Cached request heads of all connections.
_FAULTS = {"bad_request": Fault.MALFORMED, "head_too_large": Fault.HEAD_TOO_LARGE}


class ClientHandler(Protocol):
    """Answers clients' requests."""

    @property
    def rechecks_heads(self) -> bool:
        """Whether a head that was admitted may be refused later, because keys change."""
        ...

    def refuses(self, head: RequestHead) -> RequestError | None:
        """Return the error for a request whose body has not arrived; None admits every head with the same bytes."""

    def client_of(self, head: RequestHead, address: str) -> Hashable:
        """Return the name of a request's client."""

    def refused(self, incoming: Incoming, error: RequestError, address: str) -> bytes:
        """Count a request that is refused before it is complete, and give it an id.

        Returns:
            Further lines for the head of the refusal.
        """

    def handle(self, client: ClientConnection, incoming: Incoming) -> Answering | None:
        """Answer now, or return the object that will answer later through `client`."""


class ClientConnections:
    """All client connections and their shared state.

    Attributes:
        open: Open connections.
        cors: Source of CORS headers for every answer; None means no CORS headers.
        faults: Counter of faults of connections.
        known: Cached heads of requests, which need no parsing.
        memory: Memory of all bodies of requests without a response yet.
        is_closing: Whether each connection closes after its answer.
        rechecks_heads: Whether a cached head is checked again.
    """

    def __init__(self, handler: ClientHandler, limits: ClientLimits, faults: Faults, cors: Cors | None = None) -> None:
        self.handler = handler
        self.faults = faults
        self.cors = cors
        self.limits = limits
        self.open: set[ClientConnection] = set()
        self.known: HeaderCache[RequestHead] = HeaderCache(_MAX_KNOWN)
        self.memory = BodyMemory()
        self.is_closing = False
        self.rechecks_heads = handler.rechecks_heads

    def __call__(self, slot: ConnectionSlot) -> ClientConnection:
        """Return a protocol for a new connection, which has `slot` at its port."""
        return ClientConnection(self, slot)

    def refuses(self, head: RequestHead) -> RequestError | None:
        """Return the handler's error for a request whose body has not arrived."""
        return self.handler.refuses(head)

    def client_of(self, head: RequestHead, address: str) -> Hashable:
        """Return the handler's name of a request's client."""
        return self.handler.client_of(head, address)

    def sweep(self, now_s: float) -> None:
        """Close connections whose deadline has passed; called periodically."""
        for client in [client for client in self.open if client.deadline_s < now_s]:
            client.expire()

    def paused(self, pause_s: float) -> None:
        """Extend the clients' deadlines by the time for which the router itself stood still."""
        for client in self.open:
            client.paused(pause_s)

    def close_idle(self) -> None:
        """Close connections without a request now, and the others after their answer."""
        self.is_closing = True
        for client in list(self.open):
            client.close_if_idle()

    def close(self) -> None:
        """Abort all connections."""
        self.is_closing = True
        for client in list(self.open):
            client.abort()


class ClientConnection(asyncio.Protocol):
    """One client connection.

    Attributes:
        deadline_s: Time on `time.monotonic` at which the connection is closed unless the deadline is moved.
        has_begun: Whether the head of the current answer is written.
    """

    def __init__(self, clients: ClientConnections, slot: ConnectionSlot) -> None:
        self._clients = clients
        self._slot = slot
        self._handler = clients.handler
        self._reader = RequestReader(clients, self._on_head)
        self._transport: asyncio.Transport | None = None
        self._is_lingering = False
        self._is_going_on = False  # Whether `_go_on` runs, or is scheduled for the loop's next turn.
        self._is_full = False  # Whether the client must read before the next request is answered.
        self._out: list[bytes] = []  # Data to write at the next flush.
        self._early = b""  # Bytes that arrived while an answer was under way.
        self._current: Incoming | None = None
        self._answering: Answering | None = None
        self._is_chunked = False
        self._is_last = False  # Whether the connection ends after the current answer.
        self.has_begun = False
        self.deadline_s = self._idle_until_s = time.monotonic() + clients.limits.idle_s
        self._unread_until_s = float("inf")  # Deadline for the client to read the unsent data.
        self._arrival: BodyDeadline | None = None  # Of the newest body.

    @property
    def max_body_bytes(self) -> int:
        """Most bytes of a request's body, packed and unpacked."""
        return self._clients.limits.max_body_bytes

    @property
    def is_slow(self) -> bool:
        """Whether the client must read before it gets more."""
        return self._is_full

    # --- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the open connection."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        peer = transport.get_extra_info("peername")
        self._reader.address = str(peer[0]) if peer else ""
        self._clients.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the current answer. Called when either side closes; a half-close counts as a disconnect."""
        self._clients.open.discard(self)
        self._slot.release()
        self._transport = None
        self._reader.release_all()
        answering, self._answering = self._answering, None
        self._current = None
        self._reader.ready.clear()
        if answering is not None:
            self._count(Fault.CLIENT_LEFT)
            answering.client_left()

    def pause_writing(self) -> None:
        """Pause reading from the engine, because the client reads too slowly."""
        self._is_full = True
        if self._current is not None:
            self.deadline_s = time.monotonic() + self._clients.limits.write_s
        if self._answering is not None:
            self._answering.client_is_slow()

    def resume_writing(self) -> None:
        """Continue after the client has caught up."""
        self._is_full, self._unread_until_s = False, float("inf")
        if self._current is not None:
            self.deadline_s = float("inf")
        elif not self._is_lingering and self._transport is not None and not self._transport.is_closing():
            self._wait(self._clients.limits.idle_s)
            self._go_on()
        if self._answering is not None:
            self._answering.client_is_ready()

    def data_received(self, data: bytes) -> None:
        """Answer a complete request; keep data that arrives while an answer is under way."""
        if self._is_lingering:
            return
        if self._current is None and not self._is_going_on and not self._is_full:
            if incoming := self._reader.find_known(data):
                self._answer(incoming)
                return
            self._feed(data, is_one_read=True)
            self._go_on()
            return
        self._early += data
        if len(self._early) > _MAX_EARLY_BYTES and self._transport is not None:
            self._transport.pause_reading()

    # --- answers

    def reply(self, head: bytes, body: bytes = b"") -> None:
        """Write a complete answer. `head` contains the body's length, but not the final empty line."""
        self._begin(head)
        if body and self._current is not None and self._current.head.method != b"HEAD":
            self._out.append(body)
        self.end()

    def refuse(self, error: RequestError, added: bytes = b"") -> None:
        """Write an error in the form of the path's API, with `added` as further lines of its head."""
        current = self._current
        body = error_json(error) if current is None else error_body(current.head.path, error, current.request_id)
        if error.retry_after_s is not None:
            added += b"Retry-After: %d\r\n" % error.retry_after_s
        for name, value in error.headers.items():
            added += f"{name}: {value}\r\n".encode()
        self.reply(own_head(error.http_status, "application/json", len(body), added), body)

    def begin(self, head: bytes, *, has_length: bool) -> None:
        """Begin an answer whose body arrives in pieces. The head is sent with the first piece.

        Args:
            has_length: Whether `head` has the body's length; otherwise the body is chunked.
        """
        current = self._current
        assert current is not None, "there is no request to answer"
        self._reader.release(current)
        if not has_length and current.head.is_old:
            self._is_last = True
        elif not has_length:
            self._is_chunked = True
            head += b"Transfer-Encoding: chunked\r\n"
        self._begin(head)

    def piece(self, data: bytes, *, is_last: bool = False) -> None:
        """Write a non-empty part of the body. With `is_last`, the data is sent together with the end."""
        if self._is_chunked:
            self._out.append(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._out.append(data)
        if not is_last:
            self._flush()

    def end(self) -> None:
        """End the answer and continue with the next request."""
        if self._is_chunked:
            self._out.append(b"0\r\n\r\n")
        if self._answering is not None or self._transport is None or not self._transport.get_write_buffer_size():
            self._unread_until_s = float("inf")  # An engine's answer is mostly read by now.
        self._flush()
        current, self._current = self._current, None
        self._answering = None
        self._slot.ends()
        if self._transport is None or current is None:
            return
        reader = self._reader
        reader.release(current)
        has_more = bool(self._early) or reader.refusal is not None
        is_over = self._is_last or self._clients.is_closing
        if self._is_lingering or (is_over and has_more):
            self._linger()
        elif is_over:
            self._close()
        else:
            if reader.is_in_head:
                self._wait(self._clients.limits.idle_s)
            else:
                self._on_head()  # The body was not read while the answer was under way.
            if reader.ready or has_more or reader.wants_continue:
                self._go_on()

    def cut(self) -> None:
        """Close the connection in the middle of an answer, so that no client takes the answer for complete."""
        self._current = self._answering = None
        self._close()  # Written data is still sent; the last chunk is not.

    def expire(self) -> None:
        """Close the connection after its deadline."""
        if self._transport is None:
            return
        is_unread = self._transport.is_closing() or self._transport.get_write_buffer_size() > 0
        if self._current is not None or self._is_lingering or is_unread:
            if is_unread:
                self._count(Fault.UNREAD)
            self._transport.abort()  # The client does not read, or ignores the end of the connection.
        elif time.monotonic() < self._idle_until_s:
            self.deadline_s = self._idle_until_s  # The client has read everything in the meantime.
        elif not self._reader.is_in_head:
            self._end_with(BodyTimeoutError(self._clients.limits.body_s))
        else:
            self._transport.close()

    def paused(self, pause_s: float) -> None:
        """Extend the deadlines by the time for which the router itself stood still."""
        self.deadline_s += pause_s
        if self._arrival is not None:
            self._arrival.paused(pause_s)

    def abort(self) -> None:
        """Close the connection now and drop what is unsent."""
        if self._transport is not None:
            self._transport.abort()

    def close_if_idle(self) -> None:
        """Close the connection, unless a request is being answered."""
        if self._current is None and not self._is_going_on and self._transport is not None:
            self._transport.close()

    # --- inside

    def _wait(self, wait_s: float) -> None:
        """Set the deadline for the client's next bytes to `wait_s` from now, or earlier if unsent data is due."""
        now_s, is_unread = time.monotonic(), self._transport is not None and self._transport.get_write_buffer_size() > 0
        until_s = min(self._unread_until_s, now_s + self._clients.limits.write_s) if is_unread else float("inf")
        self._unread_until_s, self._idle_until_s = until_s, now_s + wait_s
        self.deadline_s = min(until_s, now_s + wait_s)

    def _on_head(self) -> None:
        """Give the client time to send the body."""
        now_s = time.monotonic()
        self._arrival = BodyDeadline(now_s, self._clients.limits.body_s)
        self._wait(self._arrival.due_s - now_s)

    def _feed(self, data: bytes, *, is_one_read: bool) -> None:
        """Parse `data`, and move the deadline of a body that has not ended."""
        self._reader.feed(data, is_one_read=is_one_read)
        if not self._reader.is_in_head and self._arrival is not None:
            now_s = time.monotonic()
            self._wait(self._arrival.arrived(len(data), now_s) - now_s)

    def _go_on(self) -> None:
        """Answer received requests, one per turn of the loop, because one read may contain thousands."""
        if self._is_going_on or self._is_full or self._is_lingering:
            return  # A connection that lingers has had its last answer; what follows is dropped.
        reader = self._reader
        self._is_going_on, is_more = True, False
        while self._current is None and self._transport is not None and not self._transport.is_closing():
            if reader.ready:
                self._answer(reader.ready.popleft())
                is_more = self._current is None and not self._is_full
                break
            if reader.refusal is not None:
                self._end_with(reader.refusal)
                break
            if not self._early:
                if reader.wants_continue:
                    reader.wants_continue = False
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                break
            early, self._early = self._early, b""
            self._transport.resume_reading()
            self._feed(early, is_one_read=False)
        self._is_going_on = is_more and bool(reader.ready or self._early or reader.refusal or reader.wants_continue)
        if self._is_going_on:
            asyncio.get_running_loop().call_soon(self._go_on_now)  # Data that arrives before that turn is early.

    def _go_on_now(self) -> None:
        self._is_going_on = False
        self._go_on()

    def _answer(self, incoming: Incoming) -> None:
        self._slot.begins()
        self._current = incoming
        self._is_last = incoming.head.is_last
        self.deadline_s = float("inf")
        self._is_chunked = self.has_begun = False
        answering = self._handler.handle(self, incoming)
        if self._current is incoming:
            self._answering = answering

    def _begin(self, head: bytes) -> None:
        self.has_begun = True
        current, cors = self._current, self._clients.cors
        if cors is not None and current is not None:
            head += cors.answer_lines(current.head.named.get(b"origin"))
        if self._is_last or self._clients.is_closing:
            head += b"Connection: close\r\n\r\n"
        elif current is not None and current.head.is_old:
            head += b"Connection: keep-alive\r\n\r\n"
        else:
            head += b"\r\n"
        self._out.append(head)

    def _end_with(self, error: RequestError) -> None:
        """Refuse an incomplete request and end the connection, because the following data cannot be trusted."""
        self._reader.release_all()
        if (fault := _FAULTS.get(error.code or "")) is not None:
            self._count(fault)
        self._current = Incoming(self._reader.head, b"")
        self._is_chunked, self._is_last, self._is_lingering = False, True, True
        self.refuse(error, self._handler.refused(self._current, error, self._reader.address))

    def _count(self, fault: Fault) -> None:
        self._clients.faults.count(Port.CLIENTS, fault)

    def _close(self) -> None:
        """Close the connection once all written data is sent, with a deadline for the client to read it."""
        self.deadline_s = time.monotonic() + self._clients.limits.write_s
        if self._transport is not None:
            self._transport.close()

    def _linger(self) -> None:
        """Close only the sending side: a reset would destroy the answer if the client has sent unread data."""
        self._is_lingering, self._early = True, b""
        self.deadline_s = time.monotonic() + self._clients.limits.linger_s
        if self._transport is not None:
            self._transport.resume_reading()
            if self._transport.can_write_eof():  # TLS has no half-closed connections; the deadline ends this one.
                self._transport.write_eof()

    def _flush(self) -> None:
        """Write everything in one system call, because each call wakes the other side."""
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.writelines(out)
