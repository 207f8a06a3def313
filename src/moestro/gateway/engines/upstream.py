"""Connections to one engine, kept alive and reused, and what its answers tell. Plain callbacks, no tasks."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from moestro.core.processes import in_address
from moestro.gateway.clients.http_headers import AnswerHead, HeaderCache, Headers, answer_lines, size_of
from moestro.web.ports.heads import MAX_HEAD_BYTES
from moestro.web.ports.tls import EngineTls
from moestro.wire.load_report import LOAD_REPORT_HEADER

_HIGH_WATER_BYTES = 1 << 20  # a request's body is written at once; this only sets asyncio's own limit
_MAX_IDLE = 256  # idle connections kept
_MAX_IDLE_S = 60.0
_LATE_S = 1.0  # a timeout that fires this much too late means that this process was stopped
_MAX_SLOW_CONNECTS = 5  # times that an engine may take too long to accept while it answers others
_MAX_KNOWN = 16  # cached heads per engine; heads contain a date and change every second
_BODILESS = frozenset({204, 304})
_FIRST_STATUS, _FIRST_FINAL_STATUS, _LAST_STATUS = 100, 200, 599  # RFC 9110, 15
_TOO_LONG = f"its answer has more than {MAX_HEAD_BYTES} bytes of a head or of trailers"
_LOAD = LOAD_REPORT_HEADER.encode()
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})\r\n")


class Sink(Protocol):
    """Receives one answer of an engine."""

    def head(self, head: AnswerHead, length: int | None) -> None:
        """Begin the answer, whose body has `length` bytes; None means an unknown length."""

    def body(self, data: bytes, *, is_last: bool) -> None:
        """Receive a part of the body. With `is_last`, the end follows at once."""

    def done(self) -> None:
        """End the complete answer. Its connection may serve another request from now on."""

    def broken(self, cause: str) -> None:
        """End an incomplete answer, or one that never began. The connection is closed."""


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of an engine.

    Attributes:
        tls: TLS of its connections; None means plain HTTP.
        server_name: Name in its certificate; empty means `host`.
    """

    host: str
    port: int
    tls: EngineTls | None = None
    server_name: str = ""


class Pool:
    """The connections to one engine.

    Args:
        connect_s: Time within which a connection must be made, seconds.

    Attributes:
        known: Cached heads of answers, which need no parsing.
        arrived_ns: Time on `time.monotonic_ns` of the last byte that the engine has sent; 0 before the first.
        endpoint: Address to which the last connection was made, as `IP:PORT`; empty before the first.
    """

    def __init__(self, address: Address, connect_s: float) -> None:
        self._address = address
        self._connect_s = connect_s
        self._max_idle = _MAX_IDLE
        self.known: HeaderCache[AnswerHead] = HeaderCache(_MAX_KNOWN, LOAD_REPORT_HEADER)
        self.arrived_ns = 0
        self.endpoint = ""
        self._idle: list[EngineConnection] = []
        self._all: set[EngineConnection] = set()

    def take(self) -> EngineConnection | None:
        """Return the most recently used idle connection, or None without one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def connect(self) -> EngineConnection:
        """Return a new connection.

        An engine that sends other answers meanwhile is overloaded, not gone: it gets more time to accept.

        Raises:
            OSError: The connection cannot be made; the subclass TimeoutError means that it took too long.
        """
        num_slow = 0
        while True:
            begun_ns = time.monotonic_ns()
            try:
                return await self._connect()
            except TimeoutError:
                if (time.monotonic_ns() - begun_ns) * 1e-9 >= self._connect_s + _LATE_S:
                    continue  # The timeout fired late: this process was stopped, and the engine had no time to accept.
                num_slow += 1
                if self.arrived_ns < begun_ns or num_slow == _MAX_SLOW_CONNECTS:
                    raise TimeoutError(f"no connection within {num_slow * self._connect_s:g} s") from None

    async def _connect(self) -> EngineConnection:
        address, connection = self._address, EngineConnection(self)
        try:
            async with asyncio.timeout(self._connect_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection,
                    address.host,
                    address.port,
                    ssl=None if address.tls is None else address.tls.context,
                    server_hostname=(address.server_name or None) if address.tls else None,
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def give_back(self, connection: EngineConnection) -> None:
        """Keep an idle connection for the next request, or close it beyond the limit."""
        if len(self._idle) < self._max_idle:
            self._idle.append(connection)
        else:
            connection.close()

    def made(self, connection: EngineConnection, peer: tuple[str, int] | None) -> None:
        """Add an open connection to `peer`, host and port. None means that the connection is lost already."""
        self._all.add(connection)
        if peer is not None:
            self.endpoint = f"{in_address(peer[0])}:{peer[1]}"

    def lost(self, connection: EngineConnection) -> None:
        """Remove a closed connection."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self, now_s: float) -> None:
        """Close connections that have been idle for long; called periodically."""
        while self._idle and self._idle[0].idle_since_s < now_s - _MAX_IDLE_S:
            self._idle.pop(0).close()

    def retire(self) -> None:
        """Close idle connections now, and those in use after their answers."""
        self._max_idle = 0
        self.sweep(float("inf"))

    def close(self) -> None:
        """Close all connections, including those in use."""
        for connection in list(self._all):
            connection.close()


class EngineConnection(asyncio.Protocol):
    """One connection to an engine.

    Attributes:
        is_fresh: Whether it has carried no answer yet. An engine may close a used connection while it is idle.
        idle_since_s: Time on `time.monotonic` at which it became idle.
        load_report: Load of the server in the head of the present answer; empty without it.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._sink: Sink | None = None
        self._is_bodiless = self._is_paused = False
        self._reset()
        self.is_fresh = True
        self.idle_since_s = 0.0

    def _reset(self) -> None:
        self._head: AnswerHead | None = None  # None until the head is complete
        self._length: int | None = None
        self._headers: Headers = []
        self._pieces: list[bytes] = []
        self._first_read = b""  # first read of the answer
        self._skipped_head = b""  # head that the parser has not seen; it has not seen the complete chunks after it
        self._num_between_bytes = 0  # read since the last byte of a body: heads, chunk framing, trailers
        self._num_trailer_bytes = 0
        self._fault = ""  # fault that makes the answer unusable although the parser accepts it
        self._is_between = True  # no byte of the answer has arrived
        self._has_end = False  # whether the answer declares its end; otherwise it ends with the connection
        self._is_head_due = False
        self._is_complete = False
        self._says_more = False
        self.load_report = b""

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, sink: Sink, *, is_bodiless: bool) -> None:
        """Send a request whose answer goes to `sink`.

        Args:
            is_bodiless: Whether the answer has no body regardless of its head, as with HEAD.
        """
        assert self._transport is not None
        assert self._sink is None, "an answer is under way"
        self._sink, self._is_bodiless = sink, is_bodiless
        self._transport.writelines((head, body) if body else (head,))

    def pause(self) -> None:
        """Stop reading, so that the engine has to wait."""
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Resume reading."""
        if self._transport is not None and self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Abort the connection and drop the current answer. The engine notices at once."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    # --- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the open connection."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        peer = transport.get_extra_info("peername")
        self._pool.made(self, peer and peer[:2])

    def connection_lost(self, exc: Exception | None) -> None:
        """End the current answer, because the connection is closed."""
        self._transport = None
        self._pool.lost(self)
        sink, self._sink = self._sink, None
        if sink is None:
            return
        if exc is None and self._head is not None and not self._has_end:
            sink.done()
        else:
            sink.broken(str(exc) if exc else "the connection was closed")

    def data_received(self, data: bytes) -> None:
        """Pass data of the answer on, parsed only as far as needed."""
        self._pool.arrived_ns = time.monotonic_ns()
        if self._sink is None:
            self.close()  # Data without a request is invalid.
            return
        if self._is_between:
            self._is_between = False
            if not self._is_bodiless and self._take_known(data):
                return
            self._first_read = data
        elif self._skipped_head and self._take_chunks(data):
            return
        self._parse(data)
        self._first_read = b""

    # --- called by the parser

    def on_message_begin(self) -> None:
        """Note the beginning of a second answer to the same request."""
        if self._is_complete:
            self._says_more = True  # the connection cannot be reused

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, or drop a trailer, which follows the body."""
        if self._head is None:
            self._headers.append((name.lower(), name, value))
            return
        self._num_trailer_bytes += len(name) + len(value)
        if self._num_trailer_bytes > MAX_HEAD_BYTES:
            self._reject(_TOO_LONG)

    def on_headers_complete(self) -> None:
        """Check the complete head."""
        status = self._parser.get_status_code()
        if self._is_complete:
            return
        if not _FIRST_STATUS <= status <= _LAST_STATUS:
            self._reject(f"its answer has the status {status:03d}")
        if status < _FIRST_FINAL_STATUS:
            return
        named = {lower: value for lower, _, value in self._headers}
        codings = [value.lower() for lower, _, value in self._headers if lower == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            self._reject("its answer has a Transfer-Encoding that is not chunked")
        if self._num_between_bytes > MAX_HEAD_BYTES and size_of(self._headers) > MAX_HEAD_BYTES:
            self._reject(_TOO_LONG)
        self._num_between_bytes = 0
        self.load_report = named.get(_LOAD, b"")
        lines = answer_lines(status, self._headers, named)
        self._head = AnswerHead(status, named, lines, self._parser.should_keep_alive())
        self._is_head_due = True
        length = named.get(b"content-length")
        self._length = None if length is None else int(length)
        self._has_end = length is not None or bool(codings) or status in _BODILESS

    def on_body(self, piece: bytes) -> None:
        """Keep a part of the body."""
        self._num_between_bytes = 0
        if self._head is None:
            self._reject("its answer has an interim status and a body")
        elif not self._is_complete:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """Note the end of the answer, or of an interim one."""
        if self._head is None:
            self._headers = []  # drop an interim answer (1xx)
            self._first_read = b""
        else:
            self._is_complete = True

    # --- answers that are not parsed

    def _take_known(self, data: bytes) -> bool:
        """Deliver an answer with a cached head that is complete or chunked, and return False if it must be parsed."""
        found = self._pool.known.find(data)
        if found is None:
            return False
        head, begin, length, self.load_report = found
        sink, body = self._sink, data[begin:]
        assert sink is not None
        if length is None:
            self._head, self._skipped_head, self._has_end = head, data[:begin], True
            sink.head(head, None)
            if body and self._sink is sink and not self._take_chunks(body):
                self._parse(body)
        elif length == len(body):
            self._head, self._is_complete = head, True
            sink.head(head, length)
            self._hand_on(body)
        else:
            return False
        return True

    def _take_chunks(self, data: bytes) -> bool:
        """Deliver complete chunks, and return False if the data is anything else.

        In that case the parser gets the head again. It does not need the chunks that were delivered before.
        """
        at, end, pieces = 0, len(data), []
        while at < end:
            size = _CHUNK_SIZE.match(data, at)
            if size is None:
                break
            begin = size.end()
            after = begin + int(size[1], 16)
            if data[after : after + 2] != b"\r\n":
                break
            at = after + 2
            if after == begin:
                self._is_complete = at == end
                break
            pieces.append(data[begin:after])
        if at == end and (pieces or self._is_complete):
            self._hand_on(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            return True
        head, self._head, self._is_complete = self._head, None, False
        self._parser.feed_data(self._skipped_head)
        self._head, self._skipped_head, self._is_head_due = head, b"", False
        return False

    # --- inside

    def _parse(self, data: bytes) -> None:
        is_in_head = self._head is None
        self._num_between_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._reject(f"its answer is not HTTP: {error}")
        if self._num_between_bytes > MAX_HEAD_BYTES:
            self._reject(_TOO_LONG)
        if self._fault:
            self._break(self._fault)
            return
        if is_in_head and self._head is not None and self._first_read:
            self._learn(self._head)
        self._deliver()

    def _learn(self, head: AnswerHead) -> None:
        """Cache this head if it declares the framing of its body in the usual form."""
        named = head.named
        if self._is_bodiless or head.status in _BODILESS:
            return
        has_length = b"content-length" in named
        if (named.get(b"transfer-encoding", b"").lower() == b"chunked") != has_length:
            self._pool.known.learn(self._first_read, head, has_length=has_length)

    def _deliver(self) -> None:
        sink = self._sink
        if self._is_head_due and sink is not None:
            assert self._head is not None
            self._is_head_due = False
            sink.head(self._head, self._length)
        if self._is_bodiless and self._head is not None:
            self._is_complete, self._pieces = True, []  # the parser waits for a body that never arrives
        pieces, self._pieces = self._pieces, []
        if pieces or self._is_complete:
            self._hand_on(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _hand_on(self, data: bytes) -> None:
        """Deliver a part of the body, and the end if complete. The sink may detach itself after either call."""
        sink = self._sink
        if data and sink is not None:
            sink.body(data, is_last=self._is_complete)
        if self._is_complete and self._sink is not None:
            self._finish()

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        assert self._head is not None
        if self._head.is_kept and not self._is_bodiless and not self._says_more and self.is_open:
            self.resume()
            self._reset()
            self.is_fresh = False
            self.idle_since_s = time.monotonic()
            self._pool.give_back(self)
        else:
            self.close()
        if sink is not None:
            sink.done()

    def _reject(self, cause: str) -> None:
        """Mark the connection to be closed once the parser has returned; the first cause counts."""
        self._fault = self._fault or cause

    def _break(self, cause: str) -> None:
        sink = self._sink
        self.close()
        if sink is not None:
            sink.broken(cause)


_USAGE = re.compile(
    rb'"(prompt_tokens|completion_tokens|cached_tokens|host_cached_tokens|input_tokens|output_tokens'
    rb'|cache_(?:creation|read)_input_tokens)"'
    rb"\s*:\s*(\d{1,15})"
)


def usage_in(tail: bytes | bytearray) -> dict[bytes, int]:
    """Return the token counts in the last bytes of a response, plain or streamed; empty if it reports none.

    JSON escapes quotation marks inside of strings, so generated text cannot imitate a count.
    """
    at = tail.rfind(b'"usage"')
    found = {name: int(count) for name, count in _USAGE.findall(tail, at)} if at >= 0 else {}
    return _in_words_of_chats(found) if b"output_tokens" in found else found


def _in_words_of_chats(found: dict[bytes, int]) -> dict[bytes, int]:
    """Return the counts of a response or a message. A message's input tokens exclude those of its cache."""
    usage = {b"completion_tokens": found[b"output_tokens"]}
    if b"input_tokens" in found:
        cached = found.get(b"cache_read_input_tokens", 0)
        usage[b"prompt_tokens"] = found[b"input_tokens"] + cached + found.get(b"cache_creation_input_tokens", 0)
        if b"cache_read_input_tokens" in found or b"cached_tokens" in found:
            usage[b"cached_tokens"] = found.get(b"cached_tokens", cached)
        if b"host_cached_tokens" in found:
            usage[b"host_cached_tokens"] = found[b"host_cached_tokens"]
    return usage
