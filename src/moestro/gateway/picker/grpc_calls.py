"""Calls of gRPC over the streams of HTTP/2, sans-IO: messages of bytes in both directions, and a status at the end."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Final, Protocol
from urllib.parse import quote

from moestro.gateway.picker.http2 import Http2Stream, StreamReceiver
from moestro.gateway.picker.http2_frames import Fields

MAX_MESSAGE_BYTES: Final = 8 << 20  # One piece of a body, or a head.
_MAX_PARTIAL_BYTES = 64 << 20  # Of all incomplete messages of a connection.
_MAX_TEXT = 500
_PREFIX = struct.Struct(">BL")
_PREFIX_BYTES = _PREFIX.size
_CONTENT_TYPES = frozenset({b"application/grpc", b"application/grpc+proto"})


class GrpcStatus(IntEnum):
    """Status of a call, in gRPC's numbers."""

    OK = 0
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class CallHandler(Protocol):
    """Answers one call."""

    def message(self, data: bytes | memoryview) -> None:
        """Take the next message, whose bytes stay as they are."""

    def half_closed(self) -> None:
        """Note that the client sends no further message."""

    def closed(self) -> None:
        """Note that the client, or its connection, has ended the call."""


Methods = Mapping[bytes, Callable[["GrpcCall"], CallHandler]]  # By path, such as `/package.Service/Method`.


class CallHost(Protocol):
    """The connection of a call."""

    @property
    def peer(self) -> str:
        """IP address of the client."""
        ...

    def flush(self) -> None:
        """Send what has been written."""


def _number(value: int) -> bytes:
    """Return the length of a string as HPACK writes it (RFC 7541, section 5.1)."""
    if value < 127:
        return bytes((value,))
    value -= 127
    digits = bytearray((127,))
    while value >= 128:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _field(name: bytes, value: bytes) -> bytes:
    """Return a header field in HPACK that no table keeps, so that a block is the same on every connection."""
    return b"\0" + _number(len(name)) + name + _number(len(value)) + value


_STATUS_200 = b"\x88"  # The static table has it.
_HEAD = _STATUS_200 + _field(b"content-type", b"application/grpc")
_OK_TRAILERS = _field(b"grpc-status", b"0")


def _trailers(status: GrpcStatus, text: str) -> bytes:
    if status is GrpcStatus.OK:
        return _OK_TRAILERS
    message = quote(text[:_MAX_TEXT], safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}").encode()
    return _field(b"grpc-status", b"%d" % status) + _field(b"grpc-message", message)


class PartialMessages:
    """Counts the bytes of incomplete messages of one connection."""

    __slots__ = ("num_bytes",)

    def __init__(self) -> None:
        self.num_bytes = 0


class GrpcCall:
    """One call: splits what the client sends into messages, and writes those of the handler.

    Attributes:
        handler: Answers the call; None once the call has ended.
    """

    __slots__ = ("_has_head", "_host", "_needed", "_partial", "_partials", "_stream", "handler")

    def __init__(self, stream: Http2Stream, host: CallHost, partials: PartialMessages) -> None:
        self._stream = stream
        self._host = host
        self._partials = partials
        self._partial = bytearray()
        self._needed = _PREFIX_BYTES  # Bytes of `_partial` with which a message, or its prefix, is complete.
        self._has_head = False
        self.handler: CallHandler | None = None

    # --- called by the handler

    @property
    def peer(self) -> str:
        """IP address of the client."""
        return self._host.peer

    def send(self, message: bytes) -> None:
        """Write a message; it is sent once the messages that have arrived are answered, or with `flush`."""
        stream = self._stream
        if stream.is_over:
            return
        if not self._has_head:
            self._has_head = True
            stream.send_head(_HEAD)
        stream.send(_PREFIX.pack(0, len(message)) + message)

    def end(self, status: GrpcStatus = GrpcStatus.OK, text: str = "") -> None:
        """End the call. The handler gets nothing more."""
        trailers = _trailers(status, text)
        self._forget()
        self._stream.end(trailers if self._has_head else _HEAD + trailers)

    def refuse(self, http_status: int) -> None:
        """Answer a request that is none of gRPC."""
        self._forget()
        self._stream.end(_field(b":status", b"%d" % http_status))

    def hold(self) -> None:
        """Let the client send no more than a window, until `release`."""
        self._stream.is_held = True

    def release(self) -> None:
        """Let the client send again."""
        self._stream.release()

    def flush(self) -> None:
        """Send what has been written outside of the handler's methods."""
        self._host.flush()

    # --- called by the stream

    def received(self, data: bytes, begin: int, end: int) -> None:
        """Take bytes of the stream, and pass on the messages that they complete."""
        if self._partial:
            begin = self._complete(data, begin, end)
        while end - begin >= _PREFIX_BYTES:
            is_packed, size = _PREFIX.unpack_from(data, begin)
            if is_packed or size > MAX_MESSAGE_BYTES:
                self._refuse_message(is_packed)
                return
            stop = begin + _PREFIX_BYTES + size
            if stop > end:
                break
            if self.handler is None:
                return
            self.handler.message(data[begin + _PREFIX_BYTES : stop])
            begin = stop
        if begin < end and self.handler is not None:
            self._keep(data[begin:end])

    def half_closed(self) -> None:
        """Pass on the end of the client's messages."""
        if self._partial:
            handler = self.handler
            self.end(GrpcStatus.INTERNAL, "the last message is not complete")
            if handler is not None:
                handler.closed()
        elif self.handler is not None:
            self.handler.half_closed()

    def closed(self) -> None:
        """Pass on the end of the stream."""
        handler = self.handler
        self._forget()
        if handler is not None:
            handler.closed()

    # --- inside

    def _complete(self, data: bytes, begin: int, end: int) -> int:
        """Append to the incomplete message, and pass it on once it is complete; return where the next one begins."""
        partial, is_prefix = self._partial, self._needed == _PREFIX_BYTES
        while True:
            size = min(self._needed - len(partial), end - begin)
            partial += memoryview(data)[begin : begin + size]
            self._partials.num_bytes += size
            begin += size
            if len(partial) < self._needed:
                return end
            if not is_prefix:
                break
            is_prefix = False
            is_packed, size = _PREFIX.unpack(partial)
            if is_packed or size > MAX_MESSAGE_BYTES:
                self._refuse_message(is_packed)
                return end
            self._needed += size
        message = memoryview(partial)[_PREFIX_BYTES:]
        self._drop_partial()
        if self.handler is not None:
            self.handler.message(message)
        return begin

    def _keep(self, part: bytes) -> None:
        """Keep the beginning of a message."""
        self._partial = bytearray(part)
        self._partials.num_bytes += len(part)
        has_prefix = len(part) >= _PREFIX_BYTES
        self._needed = _PREFIX_BYTES + (_PREFIX.unpack_from(part)[1] if has_prefix else 0)
        if self._partials.num_bytes > _MAX_PARTIAL_BYTES:
            self._fail(GrpcStatus.RESOURCE_EXHAUSTED, "too many incomplete messages on this connection")

    def _refuse_message(self, is_packed: int) -> None:
        if is_packed:
            self._fail(GrpcStatus.UNIMPLEMENTED, "compressed messages are not supported: send grpc-encoding identity")
        else:
            self._fail(GrpcStatus.RESOURCE_EXHAUSTED, f"a message may have {MAX_MESSAGE_BYTES} bytes")

    def _fail(self, status: GrpcStatus, text: str) -> None:
        """End the call because of what the client has sent."""
        handler = self.handler
        self.end(status, text)
        if handler is not None:
            handler.closed()

    def _forget(self) -> None:
        """Drop the handler, which holds this call, and an incomplete message."""
        self.handler = None
        if self._partial:
            self._drop_partial()

    def _drop_partial(self) -> None:
        self._partials.num_bytes -= len(self._partial)
        self._partial = bytearray()
        self._needed = _PREFIX_BYTES


def open_call(
    stream: Http2Stream, fields: Fields, methods: Methods, host: CallHost, partials: PartialMessages
) -> StreamReceiver:
    """Return the call of a new stream, which has ended already if the request is none that is served."""
    call = GrpcCall(stream, host, partials)
    if fields[b":method"] != b"POST":
        call.refuse(405)
    elif fields.get(b"content-type", b"").partition(b";")[0].strip().lower() not in _CONTENT_TYPES:
        call.refuse(415)
    elif fields.get(b"te") != b"trailers":  # By it a client finds out whether a proxy would drop trailers.
        call.end(GrpcStatus.UNKNOWN, "te: trailers is missing")
    elif (method := methods.get(fields[b":path"])) is None:
        call.end(GrpcStatus.UNIMPLEMENTED, "the method is unknown")
    else:
        call.handler = method(call)
    return call
