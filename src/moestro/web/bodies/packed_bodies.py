"""Unpacks request bodies with a Content-Encoding, within limits and in small pieces.

aiohttp would unpack them in its parser: on the event loop, and before the key, the path and the size are checked. All
ports therefore leave bodies packed until a handler reads them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

from moestro.web.errors import ContentEncodingError, HttpError, too_large

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
