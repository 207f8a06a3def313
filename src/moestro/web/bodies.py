"""Reads request bodies within limits: the size and duration of each, and the memory of all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from moestro.errors import BusyError
from moestro.web.errors import BodyTimeoutError, HttpError, too_large

MAX_BODY_BYTES = 32 << 20
BODY_TIMEOUT_S = 60.0
MAX_HELD_BYTES = 256 << 20
_SMALL_BYTES = 64 << 10  # Uncounted bytes of each body, so that large bodies never crowd out ordinary requests.


class Bodies:
    """Reads bodies, and counts the bytes that they hold until they are decoded."""

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._num_bytes = 0
        self._num_bodies = 0

    @contextlib.asynccontextmanager
    async def reading(self, http: web.Request) -> AsyncIterator[bytes]:
        """Yield the whole body of a JSON request, and count its bytes while the block lasts.

        Raises:
            RequestError: The body is not declared as JSON, is too slow or too large, or other bodies hold too much.
        """
        if http.content_type != "application/json" and not http.content_type.endswith("+json"):
            text = f"Content-Type must be application/json, got {http.content_type}."
            raise HttpError(415, text, "unsupported_media_type")
        body = bytearray()
        self._num_bodies += 1
        try:
            await self._read(http, body)
            yield bytes(body)
        finally:
            self._num_bodies -= 1
            self._num_bytes -= _counted(len(body))

    async def _read(self, http: web.Request, body: bytearray) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while part := await http.content.readany():
                    self._take(body, part)
        except TimeoutError:
            raise BodyTimeoutError(BODY_TIMEOUT_S) from None
        except web.RequestPayloadError:
            text = "The request body does not match its Transfer-Encoding or its Content-Encoding."
            raise HttpError(400, text, "bad_request") from None

    def _take(self, body: bytearray, part: bytes) -> None:
        size = len(body) + len(part)
        if size > MAX_BODY_BYTES:
            raise too_large(MAX_BODY_BYTES)
        growth = _counted(size) - _counted(len(body))
        if growth and self._num_bytes + growth > self._max_held_bytes:
            raise BusyError(self._num_bodies)
        self._num_bytes += growth
        body += part


def _counted(num_bytes: int) -> int:
    return max(0, num_bytes - _SMALL_BYTES)
