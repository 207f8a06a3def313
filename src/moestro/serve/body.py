"""Reading a request's body, with a limit to the time it may take (its size is aiohttp's to limit)."""

from __future__ import annotations

import asyncio

from aiohttp import web

from moestro.serve.refusals import BodyTimeoutError, HttpError

MAX_BODY_BYTES = 32 << 20
BODY_TIMEOUT_S = 60.0


async def read_json(http: web.Request) -> bytes:
    """The whole body, if it is JSON by its own account and comes in time."""
    if http.content_type != "application/json" and not http.content_type.endswith("+json"):
        text = f"Content-Type must be application/json, got {http.content_type}."
        raise HttpError(415, text, "unsupported_media_type")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await http.read()
    except TimeoutError:
        raise BodyTimeoutError(BODY_TIMEOUT_S) from None
