"""Reads request bodies within limits: the size and duration of each, and the memory of all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from moestro.errors import BusyError, shown
from moestro.web.errors import BodyTimeoutError, HttpError, too_large
from moestro.web.packed_bodies import Unpacker, coding_in

MAX_BODY_BYTES = 32 << 20
BODY_TIMEOUT_S = 60.0
MAX_HELD_BYTES = 256 << 20
_SMALL_BYTES = 64 << 10  # Uncounted bytes of each body, so that large bodies never crowd out ordinary requests.


class Bodies:
    """Reads bodies, unpacks them, and counts the bytes that they hold until they are decoded.

    Args:
        max_held_bytes: Most bytes of all bodies at once, not counting the first 64 KiB of each.
        max_body_bytes: Most bytes of one body, packed and unpacked.
    """

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._max_body_bytes = max_body_bytes
        self._num_bytes = 0
        self._num_bodies = 0

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
        body = bytearray()
        self._num_bodies += 1
        try:
            await self._read(http, body, None if coding is None else Unpacker(coding, self._max_body_bytes))
            yield bytes(body)
        finally:
            self._num_bodies -= 1
            self._num_bytes -= _counted(len(body))

    async def _read(self, http: web.Request, body: bytearray, unpacker: Unpacker | None) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while part := await http.content.readany():
                    if unpacker is None:
                        self._take(body, part)
                        continue
                    for piece in unpacker.pieces(part):
                        self._take(body, piece)
                        await asyncio.sleep(0)  # Other requests are served between two pieces.
        except TimeoutError:
            raise BodyTimeoutError(BODY_TIMEOUT_S) from None
        except web.RequestPayloadError:
            text = "The request body does not match its Transfer-Encoding."
            raise HttpError(400, text, "bad_request") from None
        if unpacker is not None:
            unpacker.end()

    def _take(self, body: bytearray, part: bytes) -> None:
        size = len(body) + len(part)
        if size > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        growth = _counted(size) - _counted(len(body))
        if growth and self._num_bytes + growth > self._max_held_bytes:
            raise BusyError(self._num_bodies)
        self._num_bytes += growth
        body += part


def _counted(num_bytes: int) -> int:
    return max(0, num_bytes - _SMALL_BYTES)
