"""The prompts that engines were sent, for another router: a standby that has them knows what caches hold.

What engines say of their caches (KV events) is not in it: they tell a standby themselves.
"""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from moestro.core.hashing import HASH_BYTES
from moestro.errors import RequestError
from moestro.serve.refusals import HttpError
from moestro.serve.route.fleet import Fleet

_MAX_BYTES = 1 << 30


class History(msgspec.Struct, frozen=True):
    """What one router gives another.

    Attributes:
        reading: how prompts become the names of their blocks, in words: both must do it alike.
        prompts: by the engine's URL, the blocks of each prompt, packed, the oldest first.
    """

    reading: str
    prompts: dict[str, list[bytes]]


_decode = msgspec.msgpack.Decoder(History).decode


class Handover:
    """Gives the history of this router's engines, and takes another's.

    Args:
        reading: see `History`.
    """

    def __init__(self, fleet: Fleet, reading: str) -> None:
        self._fleet = fleet
        self._reading = reading

    def routes(self) -> list[web.RouteDef]:
        """Of the admin plane."""
        return [web.get("/admin/index", self.give), web.put("/admin/index", self.take)]

    async def give(self, _http: web.Request) -> web.Response:
        """GET /admin/index: what `take` takes, as msgpack."""
        router = self._fleet.router
        prompts = {engine.url: router.prompts_sent(engine.row) for engine in self._fleet}
        return web.Response(body=msgspec.msgpack.encode(History(self._reading, prompts)))

    async def take(self, http: web.Request) -> web.Response:
        """PUT /admin/index: another router's history comes on top of this one's, as if it were sent now. Engines that
        are not here are passed over.
        """
        try:
            history = _decode(await _whole(http))
            if any(len(prompt) % HASH_BYTES for prompts in history.prompts.values() for prompt in prompts):
                raise ValueError("a prompt is no whole number of blocks")
        except (msgspec.MsgspecError, ValueError) as error:
            raise RequestError(f"This is no index of another router: {error}", code="invalid_value") from None
        if history.reading != self._reading:
            text = f"That router compares prompts {history.reading}, this one {self._reading}: they cannot be compared."
            raise HttpError(409, text, "invalid_value")
        now_ns, num_prompts = time.monotonic_ns(), 0
        for engine in self._fleet:
            for prompt in history.prompts.get(engine.url, ()):
                self._fleet.router.sent_elsewhere(engine.row, prompt, now_ns)
                num_prompts += 1
        return web.json_response({"prompts": num_prompts})


async def _whole(http: web.Request) -> bytes:
    """The body, which may be larger than the admin plane's others."""
    body = bytearray()
    async for piece in http.content.iter_any():
        body += piece
        if len(body) > _MAX_BYTES:
            raise HttpError(413, f"An index has {_MAX_BYTES} bytes at most.", "invalid_value")
    return bytes(body)
