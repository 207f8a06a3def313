"""Reads complete requests from the bytes of one client connection, without sockets or a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from moestro.errors import RequestError
from moestro.gateway.clients.client_limits import ClientLimits
from moestro.gateway.clients.header_cache import HeaderCache
from moestro.gateway.clients.http_headers import Headers, Incoming, RequestHead, fault_of, size_of
from moestro.web.bodies import SMALL_BYTES, BodiesFullError, BodyHold, BodyMemory
from moestro.web.errors import HttpError, too_large
from moestro.web.ports.heads import MAX_HEAD_BYTES, MAX_HEADERS, FramingCount, head_too_large

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
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            pass  # The head was refused already; the parser mistakes the body for upgraded data.
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
        self.is_in_head = self.is_between = True
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
            return HttpError(501, "Upgrade is not supported: leave the header out.", "upgrade_not_supported")
        if refusal := self._host.refuses(head):
            return refusal
        if int(named.get(b"content-length", b"0")) > limits.max_body_bytes:
            return too_large(limits.max_body_bytes)
        self._on_head()
        self.wants_continue = b"expect" in named and not is_old
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
