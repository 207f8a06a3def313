"""Reads request bodies within limits: the size and duration of each, and the memory of all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable

from aiohttp import web

from moestro.errors import shown
from moestro.web.access.control import CLIENT_HEADER, Access
from moestro.web.bodies.body_limits import MAX_HELD_BYTES, BodyDeadline, BodyHold, BodyMemory
from moestro.web.bodies.packed_bodies import Unpacker, coding_in
from moestro.web.errors import BodyTimeoutError, HttpError, too_large

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
