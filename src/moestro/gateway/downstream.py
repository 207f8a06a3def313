"""One client's connection: reads requests, whole, and writes answers, piece by piece. Plain callbacks, no tasks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from moestro.errors import BusyError, RequestError
from moestro.gateway.answering import Answering
from moestro.gateway.client_limits import ClientLimits
from moestro.gateway.header_cache import KnownHeads
from moestro.gateway.http_headers import MAX_HEAD_BYTES, Headers, Incoming, RequestHead, fault_of, own_head, size_of
from moestro.web.cors import Cors
from moestro.web.errors import BodyTimeoutError, HttpError, error_json, too_large

_HIGH_WATER_BYTES = 256 << 10  # of an answer that the client has not read yet; then its engine is made to wait
_MAX_EARLY_BYTES = 64 << 10  # of requests sent before the answer to the one before; then they are left unread
_SMALL_BYTES = 64 << 10  # of each body, that are not counted: large ones never crowd out ordinary requests
_MAX_KNOWN = 1024  # heads of requests, of all connections
# Of a request whose head is not to be known again: it is one of its kind, or wants more than to be read.
_ONCE_ONLY = frozenset({b"x-request-id", b"traceparent", b"transfer-encoding", b"expect"})
_UNREADABLE = RequestHead(b"GET", b"", [], {}, is_last=True)


class Handler(Protocol):
    """Answers requests."""

    def refuses(self, head: RequestHead) -> RequestError | None:
        """Return the error for a request whose body has not come yet; None admits every head of the same bytes."""

    def refused(self, error: RequestError, address: str) -> None:
        """Take note that a request from `address` is refused before it is read to its end."""

    def handle(self, client: Client, incoming: Incoming) -> Answering | None:
        """Answer now, or return who will, and call `client`'s methods later."""


class Clients:
    """All connections.

    Attributes:
        open: those that are.
        cors: added to every answer; None means nothing.
        known: heads of requests that may be answered without parsing them again.
        num_held_bytes: of bodies, beyond what is small.
    """

    def __init__(self, handler: Handler, limits: ClientLimits, cors: Cors | None = None) -> None:
        self.handler = handler
        self.cors = cors
        self.limits = limits
        self.open: set[Client] = set()
        self.known: KnownHeads[RequestHead] = KnownHeads(_MAX_KNOWN)
        self.num_held_bytes = 0
        self.is_closing = False

    def __call__(self) -> Client:
        """A protocol for a new connection."""
        return Client(self)

    def sweep(self, now_s: float) -> None:
        """Close what has taken too long; to be called now and then."""
        for client in [client for client in self.open if client.deadline_s < now_s]:
            client.expire()

    def paused(self, pause_s: float) -> None:
        """The router stood still for so long: clients have as much more time."""
        for client in self.open:
            client.deadline_s += pause_s

    def close_idle(self) -> None:
        """Connections without a request end now, the others after their answer."""
        self.is_closing = True
        for client in list(self.open):
            client.close_if_idle()

    def close(self) -> None:
        """All end at once, as they stand."""
        self.is_closing = True
        for client in list(self.open):
            client.abort()


class Client(asyncio.Protocol):
    """One connection.

    Attributes:
        deadline_s: when it is closed unless something happens before; on `time.monotonic`.
        has_begun: the head of the current answer is out.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._handler = clients.handler
        self._small_bytes = min(_SMALL_BYTES, clients.limits.max_body_bytes)
        self._transport: asyncio.Transport | None = None
        self._parser = HttpRequestParser(self)
        self._address = ""
        self._headers: Headers = []
        self._head = _UNREADABLE
        self._target = b""
        self._body: bytes | bytearray = b""  # as it came, where it came in one piece
        self._num_body_bytes = 0
        self._num_held_bytes = 0
        self._num_between_bytes = 0  # read since the last byte of a body: of a head, between chunks, of trailers
        self._num_read_bytes = 0  # since the head, or since the request before; of a body, those in its head's read not
        self._num_trailer_bytes = 0
        self._is_in_head = True
        self._wants_continue = False  # the client sends its body when it is told to
        self._is_between = True  # nothing of a next request has been read
        self._first_read = b""  # what the current request began with, if it began a read
        self._refusal: RequestError | None = None  # the last thing to be said on this connection
        self._is_lingering = False
        self._is_going_on = False  # or will in the loop's next turn
        self._is_full = False  # the client has much to read: nothing more is answered until it has
        self._ready: deque[Incoming] = deque()  # read, and not answered yet
        self._out: list[bytes] = []  # to be written
        self._early = b""  # came while an answer was under way
        self._current: Incoming | None = None
        self._answering: Answering | None = None
        self._is_chunked = False
        self._is_last = False  # the connection ends after the current answer
        self.has_begun = False
        self.deadline_s = self._idle_until_s = time.monotonic() + clients.limits.idle_s
        self._unread_until_s = float("inf")  # what was unread at first has to be read

    # --- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        self._clients.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed, by whom ever. A client that closes its sending side alone counts as gone, as it mostly is."""
        self._clients.open.discard(self)
        self._transport = None
        self._let_go(self._num_held_bytes)
        answering, self._answering = self._answering, None
        self._current = None
        self._ready.clear()
        if answering is not None:
            answering.client_left()

    def pause_writing(self) -> None:
        """The client reads more slowly than its engine writes, or than it asks."""
        self._is_full = True
        if self._current is not None:
            self.deadline_s = time.monotonic() + self._clients.limits.write_s
        if self._answering is not None:
            self._answering.client_is_slow()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._is_full, self._unread_until_s = False, float("inf")
        if self._current is not None:
            self.deadline_s = float("inf")
        elif not self._is_lingering and self._transport is not None and not self._transport.is_closing():
            self._wait(self._clients.limits.idle_s)
            self._go_on()
        if self._answering is not None:
            self._answering.client_is_ready()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._is_lingering:
            return
        if self._current is None and not self._is_going_on and not self._is_full:
            if self._is_between and self._take_known(data):
                return
            self._first_read = data if self._is_between else b""
            self._feed(data)
            self._first_read = b""
            self._go_on()
            return
        self._early += data
        if len(self._early) > _MAX_EARLY_BYTES and self._transport is not None:
            self._transport.pause_reading()

    # --- the parser's calls

    def on_message_begin(self) -> None:
        """A request begins."""
        self._is_between = False
        self._headers, self._target, self._body = [], b"", b""
        if self._refusal is None:
            self._head = _UNREADABLE
        self._num_body_bytes = self._num_trailer_bytes = 0

    def on_url(self, part: bytes) -> None:
        """A part of the target."""
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or (after the body) a trailer, which is dropped."""
        if self._is_in_head:
            self._headers.append((name.lower(), name, value))
            return
        self._num_trailer_bytes += len(name) + len(value)
        if self._num_trailer_bytes > MAX_HEAD_BYTES:
            self._refusal = self._refusal or _head_too_large()

    def on_headers_complete(self) -> None:
        """The body begins, if there is one."""
        self._is_in_head = False
        if self._refusal is None:
            self._refusal = self._check_head()

    def on_body(self, piece: bytes) -> None:
        """A part of the body; kept, if there is room for it."""
        self._num_between_bytes = 0
        if self._refusal is not None:
            return
        before, after = self._num_body_bytes, self._num_body_bytes + len(piece)
        self._num_body_bytes = after
        if after <= self._small_bytes or self._has_room(before, after):
            if before and not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += piece

    def on_message_complete(self) -> None:
        """The request is whole."""
        body, self._body = self._body, b""
        self._is_in_head = self._is_between = True
        self._num_between_bytes = self._num_read_bytes = 0
        self._wants_continue = False
        if self._refusal is not None:
            return
        head = self._head
        if self._first_read:
            if _ONCE_ONLY.isdisjoint(head.named):
                has_length = b"content-length" in head.named
                self._clients.known.learn(self._first_read, head, has_length=has_length)
            self._first_read = b""  # what follows it in the same read is another's
        self._ready.append(Incoming(head, bytes(body), self._address))

    # --- answers

    def reply(self, head: bytes, body: bytes = b"") -> None:
        """A whole answer; `head` is open at its end and says how long the body is."""
        self._begin(head)
        if body and self._current is not None and self._current.head.method != b"HEAD":
            self._out.append(body)
        self.end()

    def refuse(self, error: RequestError, added: bytes = b"") -> None:
        """An error in OpenAI's form; `added`: whole lines for its head."""
        body = error_json(error)
        if error.retry_after_s is not None:
            added += b"Retry-After: %d\r\n" % error.retry_after_s
        if error.http_status == 401:
            added += b"WWW-Authenticate: Bearer\r\n"
        self.reply(own_head(error.http_status, "application/json", len(body), added), body)

    def begin(self, head: bytes, *, has_length: bool) -> None:
        """An answer whose body comes in pieces; without a length in `head`, in chunks. It goes out with the first."""
        current = self._current
        assert current is not None, "there is no request to answer"
        self._let_go_of(current)
        if not has_length and current.head.is_old:
            self._is_last = True
        elif not has_length:
            self._is_chunked = True
            head += b"Transfer-Encoding: chunked\r\n"
        self._begin(head)

    def piece(self, data: bytes, *, is_last: bool = False) -> None:
        """More of the body, which is not empty; `is_last`: the end follows at once, and goes out with it."""
        if self._is_chunked:
            self._out.append(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._out.append(data)
        if not is_last:
            self._flush()

    def end(self) -> None:
        """The answer is complete; go on with the next request."""
        if self._is_chunked:
            self._out.append(b"0\r\n\r\n")
        if self._answering is not None or self._transport is None or not self._transport.get_write_buffer_size():
            self._unread_until_s = float("inf")  # of what an engine says, the client had to read most already
        self._flush()
        current, self._current = self._current, None
        self._answering = None
        if self._transport is None or current is None:
            return
        self._let_go_of(current)
        has_more = bool(self._early) or self._refusal is not None
        is_over = self._is_last or self._clients.is_closing
        if self._is_lingering or (is_over and has_more):
            self._linger()
        elif is_over:
            self._close()
        else:
            self._wait(self._clients.limits.idle_s)
            if self._ready or has_more or self._wants_continue:
                self._go_on()

    def cut(self) -> None:
        """The answer cannot be completed: the connection ends as it stands, so that no client takes it for whole."""
        self._current = self._answering = None
        self._close()  # what was written before is sent; the last chunk is not

    def expire(self) -> None:
        """The deadline has passed."""
        if self._transport is None:
            return
        is_unread = self._transport.is_closing() or self._transport.get_write_buffer_size() > 0
        if self._current is not None or self._is_lingering or is_unread:
            self._transport.abort()  # it does not read, or does not hear
        elif time.monotonic() < self._idle_until_s:
            self.deadline_s = self._idle_until_s  # it has read all since
        elif not self._is_in_head:
            self._end_with(BodyTimeoutError(self._clients.limits.body_s))
        else:
            self._transport.close()

    def abort(self) -> None:
        """End it at once, whatever is unsent."""
        if self._transport is not None:
            self._transport.abort()

    def close_if_idle(self) -> None:
        """Close it, unless a request is being answered."""
        if self._current is None and not self._is_going_on and self._transport is not None:
            self._transport.close()

    # --- the rest

    def _wait(self, wait_s: float) -> None:
        """Give the client so long for its next move; not longer to read what it has left unread, whatever it sends."""
        now_s, is_unread = time.monotonic(), self._transport is not None and self._transport.get_write_buffer_size() > 0
        until_s = min(self._unread_until_s, now_s + self._clients.limits.write_s) if is_unread else float("inf")
        self._unread_until_s, self._idle_until_s = until_s, now_s + wait_s
        self.deadline_s = min(until_s, now_s + wait_s)

    def _feed(self, data: bytes) -> None:
        self._num_between_bytes += len(data)  # too many, where some of a body comes with them; then it is forgotten
        self._num_read_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            pass  # refused when its head was read: the parser takes its body for what follows an upgrade
        except HttpParserError as error:
            self._refusal = self._refusal or HttpError(400, f"Malformed HTTP: {error}.", "bad_request")
        # Chunks may be framed in 64 KiB and as many bytes as they carry: those of 6 bytes and more, however many.
        if self._num_between_bytes > MAX_HEAD_BYTES or self._num_read_bytes > MAX_HEAD_BYTES + 2 * self._num_body_bytes:
            self._refusal = self._refusal or _head_too_large()

    def _take_known(self, data: bytes) -> bool:
        """Answer a whole, small request that begins as one before did. False: `data` is to be parsed."""
        found = self._clients.known.find(data)
        if found is None:
            return False
        head, begin, length = found
        if begin + (length or 0) != len(data) or len(data) > self._small_bytes:
            return False
        self._answer(Incoming(head, data[begin:], self._address))
        return True

    def _go_on(self) -> None:
        """Answer what has been read, one request a turn of the loop, for there may be thousands in one read."""
        if self._is_going_on or self._is_full:
            return
        self._is_going_on, is_more = True, False
        while self._current is None and self._transport is not None and not self._transport.is_closing():
            if self._ready:
                self._answer(self._ready.popleft())
                is_more = self._current is None and not self._is_full
                break
            if self._refusal is not None:
                self._end_with(self._refusal)
                break
            if not self._early:
                if self._wants_continue:
                    self._wants_continue = False
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                break
            early, self._early = self._early, b""
            self._transport.resume_reading()
            self._feed(early)
        self._is_going_on = is_more and bool(self._ready or self._early or self._refusal or self._wants_continue)
        if self._is_going_on:
            asyncio.get_running_loop().call_soon(self._go_on_now)  # until then, what comes is early

    def _go_on_now(self) -> None:
        self._is_going_on = False
        self._go_on()

    def _answer(self, incoming: Incoming) -> None:
        self._current = incoming
        self._is_last = incoming.head.is_last
        self.deadline_s = float("inf")
        self._is_chunked = self.has_begun = False
        answering = self._handler.handle(self, incoming)
        if self._current is incoming:
            self._answering = answering

    def _check_head(self) -> RequestError | None:
        """Read the head of the request that has begun, and return the first thing that is wrong with it."""
        limits, parser = self._clients.limits, self._parser
        named = {lower: value for lower, _, value in self._headers}
        if size_of(self._headers) + len(self._target) > MAX_HEAD_BYTES:  # in one read with another request
            return _head_too_large()
        self._num_between_bytes = self._num_read_bytes = 0
        version, is_last = parser.get_http_version(), not parser.should_keep_alive()
        is_old = version == "1.0"
        self._head = head = RequestHead(parser.get_method(), self._target, self._headers, named, is_last, is_old)
        if fault := fault_of(head, version):
            return fault
        if parser.should_upgrade():
            return HttpError(501, "Upgrade is not supported: leave the header out.", "upgrade_not_supported")
        if refusal := self._handler.refuses(head):
            return refusal
        if int(named.get(b"content-length", b"0")) > limits.max_body_bytes:
            return too_large(limits.max_body_bytes)
        self._wait(limits.body_s)
        self._wants_continue = b"expect" in named and not is_old
        return None

    def _has_room(self, before: int, after: int) -> bool:
        """Whether a body that had `before` bytes may have `after`, which is not small."""
        clients, limits = self._clients, self._clients.limits
        growth = after - max(before, _SMALL_BYTES)
        if after > limits.max_body_bytes:
            self._refusal = too_large(limits.max_body_bytes)
        elif clients.num_held_bytes + growth > limits.max_held_bytes:
            self._refusal = BusyError(len(clients.open))
        else:
            clients.num_held_bytes += growth
            self._num_held_bytes += growth
            return True
        return False

    def _let_go_of(self, incoming: Incoming) -> None:
        """Its body is needed no more."""
        body, incoming.body = incoming.body, b""
        if len(body) > _SMALL_BYTES:
            self._let_go(len(body) - _SMALL_BYTES)

    def _let_go(self, num_bytes: int) -> None:
        self._clients.num_held_bytes -= num_bytes
        self._num_held_bytes -= num_bytes

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
        """Refuse what cannot be read to its end; what follows it cannot be trusted either."""
        self._body = b""
        self._let_go(self._num_held_bytes)
        self._handler.refused(error, self._address)
        self._current = Incoming(self._head, b"")
        self._is_chunked, self._is_last, self._is_lingering = False, True, True
        self.refuse(error)

    def _close(self) -> None:
        """Close it when all that was written is sent, for which the client has to read."""
        self.deadline_s = time.monotonic() + self._clients.limits.write_s
        if self._transport is not None:
            self._transport.close()

    def _linger(self) -> None:
        """Close our side alone: a reset would take the answer from a client that has sent more than was read."""
        self._is_lingering, self._early = True, b""
        self.deadline_s = time.monotonic() + self._clients.limits.linger_s
        if self._transport is not None:
            self._transport.resume_reading()
            self._transport.write_eof()

    def _flush(self) -> None:
        """Each write is a system call, and each of these wakes somebody: as few as can be."""
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.writelines(out)


def _head_too_large() -> HttpError:
    rule = f"A head may have {MAX_HEAD_BYTES} bytes, and so may trailers; to frame chunks, as many more as they carry."
    return HttpError(431, rule, "head_too_large")
