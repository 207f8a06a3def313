"""Request bodies: read, unpacked and bounded."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator
from typing import Protocol

from aiohttp import web

from moestro.errors import RequestError, shown
from moestro.web.access import CLIENT_HEADER, Access
from moestro.web.errors import BodyTimeoutError, ContentEncodingError, HttpError, too_large

# Limits of request bodies: the memory of all, the share of each client, and the rate of arrival. Has no clock.

MAX_HELD_BYTES = 256 << 20
SMALL_BYTES = 64 << 10  # Uncounted bytes of each body, so that large bodies never crowd out ordinary requests.
MIN_BYTES_PER_S = 4 << 10  # A slow mobile network sends ten times as much.
MAX_SILENCE_S = 10.0  # Time for which a body may be behind the minimum rate.


class BodiesFullError(RequestError):
    """The bodies of a client, or of all clients, hold too much memory."""

    http_status = 503
    error_type = "service_unavailable"
    retry_after_s = 1

    def __init__(self, num_client_bytes: int, num_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"Request bodies hold {num_bytes} of {max_bytes} bytes, those of this client {num_client_bytes}."
            " A client may hold as much as is free. Retry later, or send smaller requests.",
            code="overloaded",
        )


class BodyMemory:
    """Counts the bytes that bodies hold, beyond the first 64 KiB of each, and divides the memory among clients.

    A client may hold at most as many bytes as stay free. One client can therefore take half of the memory, two can take
    a third each, and there is always room for another one. Source: Choudhury and Hahne, Dynamic Queue Length Thresholds
    for Shared-Memory Packet Switches, 1998, with a factor of 1.

    Attributes:
        max_bytes: Most bytes of all bodies.
        num_bytes: Present bytes of all bodies.
    """

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._of_client: Counter[Hashable] = Counter()  # Only clients that hold something.

    def grow(self, client: Hashable, num_bytes: int) -> None:
        """Count further bytes of a client.

        Raises:
            BodiesFullError: The client would hold more than stays free; nothing is counted.
        """
        held, total = self._of_client[client] + num_bytes, self.num_bytes + num_bytes
        if held > self.max_bytes - total:
            raise BodiesFullError(self._of_client[client], self.num_bytes, self.max_bytes)
        self._of_client[client], self.num_bytes = held, total

    def shrink(self, client: Hashable, num_bytes: int) -> None:
        """Stop counting bytes of a client."""
        self._of_client[client] -= num_bytes
        self.num_bytes -= num_bytes
        if not self._of_client[client]:
            del self._of_client[client]


class BodyHold:
    """Memory that one body of `client` holds."""

    __slots__ = ("_client", "_memory", "_num_counted")

    def __init__(self, memory: BodyMemory, client: Hashable) -> None:
        self._memory = memory
        self._client = client
        self._num_counted = 0

    def resize(self, num_bytes: int) -> None:
        """Count the body with its present size.

        Raises:
            BodiesFullError: The client would hold more than its share; the count stays as it is.
        """
        growth = max(0, num_bytes - SMALL_BYTES) - self._num_counted
        if growth > 0:
            self._memory.grow(self._client, growth)
        elif growth:
            self._memory.shrink(self._client, -growth)
        self._num_counted += growth

    def release(self) -> None:
        """Stop counting the body. A second call has no effect."""
        self.resize(0)


class BodyDeadline:
    """Time at which a body is too late. Each `MIN_BYTES_PER_S` bytes move it by a second.

    Args:
        now_s: Present time.
        limit_s: Time for the whole body, in seconds.

    Attributes:
        due_s: Time at which the body ends unless more of it arrives.
    """

    __slots__ = ("_end_s", "due_s")

    def __init__(self, now_s: float, limit_s: float) -> None:
        self._end_s = now_s + limit_s
        self.due_s = min(now_s + MAX_SILENCE_S, self._end_s)

    def arrived(self, num_bytes: int, now_s: float) -> float:
        """Count a part of the body, and return the new deadline."""
        self.due_s = min(self.due_s + num_bytes / MIN_BYTES_PER_S, now_s + MAX_SILENCE_S, self._end_s)
        return self.due_s

    def paused(self, pause_s: float) -> None:
        """Extend the deadline by the time for which this process stood still."""
        self.due_s += pause_s
        self._end_s += pause_s


# Unpacks request bodies with a Content-Encoding, within limits and in small pieces.
#
# aiohttp would unpack them in its parser: on the event loop, and before the key, the path and the size are checked. All
# ports therefore leave bodies packed until a handler reads them.

GZIP, DEFLATE = "gzip", "deflate"
_CODINGS = {GZIP: GZIP, "x-gzip": GZIP, DEFLATE: DEFLATE}  # RFC 9110, 8.4.1.3: x-gzip is an old name of gzip.
# Most bytes of one step, packed and unpacked. A step takes at most 0.3 ms, after which the event loop serves others.
_PIECE_BYTES = 64 << 10
# Most unpacked bytes for each packed one. JSON of chats packs 3 to 30 times; the worst that deflate allows is 1,032.
MAX_RATIO = 100
FREE_BYTES = 1 << 20  # Unpacked bytes without a bound on the ratio, so that a short and repetitive body is accepted.
MAX_MEMBERS = 64  # Concatenated gzip streams. Clients send one; a million empty ones would take seconds.


class _Inflater(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes: ...


def coding_in(content_encoding: str) -> str | None:
    """Return the coding that a Content-Encoding names; None means that the body is not packed.

    Raises:
        ContentEncodingError: The coding is not offered, or the body is packed several times.
    """
    names = [name for part in content_encoding.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _CODINGS:
        raise ContentEncodingError(content_encoding)
    return _CODINGS[names[0]]


class Unpacker:
    """Unpacks one body.

    Args:
        coding: `GZIP` or `DEFLATE`.
        max_bytes: Most bytes of the body, packed and unpacked.
    """

    def __init__(self, coding: str, max_bytes: int) -> None:
        self._coding = coding
        self._max_bytes = max_bytes
        self._num_packed = self._num_unpacked = self._num_members = 0
        self._inflater: _Inflater | None = None  # Of the current member.

    def pieces(self, packed: bytes | bytearray) -> Iterator[bytes]:
        """Yield what the next part of the body unpacks to. Each piece is one step of bounded work; it may be empty.

        Raises:
            HttpError: The body is not of this coding, or exceeds a limit.
        """
        for start in range(0, len(packed), _PIECE_BYTES):  # Each step copies the rest of its input.
            yield from self._steps(bytes(packed[start : start + _PIECE_BYTES]))

    def end(self) -> None:
        """Raise HttpError if the body ends too early."""
        if self._inflater is not None and not self._inflater.eof:
            raise HttpError(400, f"The request body ends within its {self._coding} data.", "bad_request")

    def _steps(self, rest: bytes) -> Iterator[bytes]:
        self._num_packed += len(rest)
        if self._num_packed > self._max_bytes:
            raise too_large(self._max_bytes)
        is_full = False  # Whether the last step left output behind.
        while rest or is_full:
            inflater = self._inflater
            if inflater is None or inflater.eof:
                inflater = self._inflater = self._next_member(rest)
            room = min(_PIECE_BYTES, self._max_bytes + 1 - self._num_unpacked)
            try:
                piece = inflater.decompress(rest, room)
            except zlib.error:
                raise self._invalid() from None
            rest = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            is_full = len(piece) == room and not inflater.eof
            self._num_unpacked += len(piece)
            self._check_size(self._num_packed - len(rest))
            yield piece

    def _next_member(self, data: bytes) -> _Inflater:
        self._num_members += 1
        if self._coding == GZIP:
            if self._num_members > MAX_MEMBERS:
                raise HttpError(400, f"The request body has more than {MAX_MEMBERS} gzip members.", "bad_request")
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        if self._num_members > 1:
            raise self._invalid()
        # Some clients send deflate without the header that RFC 1950 requires.
        has_header = data[0] & 0xF == zlib.DEFLATED
        return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)

    def _check_size(self, num_packed: int) -> None:
        if self._num_unpacked > self._max_bytes:
            raise too_large(self._max_bytes)
        if self._num_unpacked > FREE_BYTES and self._num_unpacked > MAX_RATIO * num_packed:
            text = f"The request body unpacks to more than {MAX_RATIO} times its size. Send it unpacked."
            raise HttpError(413, text, "request_too_large")

    def _invalid(self) -> HttpError:
        return HttpError(400, f"The request body is not valid {self._coding} data.", "bad_request")


def unpacked(packed: bytes, coding: str, max_bytes: int) -> bytes:
    """Return a whole body unpacked. Threads call it: it takes up to 0.2 s.

    Raises:
        HttpError: The body is not of this coding, ends too early, or exceeds a limit.
    """
    unpacker = Unpacker(coding, max_bytes)
    body = b"".join(unpacker.pieces(packed))
    unpacker.end()
    return body


# Reads request bodies within limits: the size and duration of each, and the memory of all.

MAX_BODY_BYTES = 32 << 20
BODY_TIMEOUT_S = 60.0
ACCESS = web.RequestKey("access", Access)  # The middleware adds it to each request; it names the request's client.


class Bodies:
    """Reads bodies, unpacks them, and counts the bytes that they hold until they are decoded.

    Args:
        max_held_bytes: Most bytes of all bodies at once, not counting the first 64 KiB of each.
        max_body_bytes: Most bytes of one body, packed and unpacked.

    Attributes:
        memory: Memory of all bodies.
    """

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.memory = BodyMemory(max_held_bytes)
        self._max_body_bytes = max_body_bytes

    @contextlib.asynccontextmanager
    async def reading(self, http: web.Request) -> AsyncIterator[bytes]:
        """Yield the whole body of a JSON request, and count its bytes while the block lasts.

        Raises:
            RequestError: The body is not declared as JSON, or cannot be read.
        """
        if http.content_type != "application/json" and not http.content_type.endswith("+json"):
            text = f"Content-Type must be application/json, got {shown(http.content_type)}."
            raise HttpError(415, text, "unsupported_media_type")
        async with self.holding(http) as body:
            yield body

    @contextlib.asynccontextmanager
    async def holding(self, http: web.Request) -> AsyncIterator[bytes]:
        """Yield the whole body of any request, and count its bytes while the block lasts.

        Raises:
            RequestError: The body is too slow or too large, cannot be unpacked, or other bodies hold too much.
        """
        coding = coding_in(http.headers.get("Content-Encoding", ""))
        hold = BodyHold(self.memory, client_of(http))
        try:
            body = await self._read(http, hold)
            if coding is not None:
                body = await self._unpack(body, Unpacker(coding, self._max_body_bytes), hold)
                hold.resize(len(body))
            yield bytes(body)
        finally:
            hold.release()

    async def _read(self, http: web.Request, hold: BodyHold) -> bytearray:
        """Return the body as it came."""
        body, loop = bytearray(), asyncio.get_running_loop()
        deadline = BodyDeadline(loop.time(), BODY_TIMEOUT_S)
        try:
            async with asyncio.timeout_at(deadline.due_s) as timeout:
                while part := await http.content.readany():
                    timeout.reschedule(deadline.arrived(len(part), loop.time()))
                    if len(body) + len(part) > self._max_body_bytes:
                        raise too_large(self._max_body_bytes)
                    hold.resize(len(body) + len(part))
                    body += part
        except TimeoutError:
            raise BodyTimeoutError(BODY_TIMEOUT_S) from None
        except web.RequestPayloadError:
            text = "The request body does not match its Transfer-Encoding."
            raise HttpError(400, text, "bad_request") from None
        return body

    async def _unpack(self, packed: bytearray, unpacker: Unpacker, hold: BodyHold) -> bytearray:
        """Return what a complete body unpacks to. An unfinished one would hold up to a hundred times its size."""
        body = bytearray()
        for piece in unpacker.pieces(packed):
            hold.resize(len(packed) + len(body) + len(piece))
            body += piece
            await asyncio.sleep(0)  # Other requests are served between two pieces.
        unpacker.end()
        return body


def client_of(http: web.Request) -> Hashable:
    """Return the name of a request's client (`Access.client_of`)."""
    headers = http.headers
    authorization, x_api_key = headers.get("Authorization", ""), headers.get("X-Api-Key", "")
    return http[ACCESS].client_of(authorization, x_api_key, http.remote or "", headers.get(CLIENT_HEADER, ""))


def tenant_of(http: web.Request) -> str | None:
    """Return the tenant of a request's key (`Access.tenant_of`)."""
    headers = http.headers
    return http[ACCESS].tenant_of(headers.get("Authorization", ""), headers.get("X-Api-Key", ""))
