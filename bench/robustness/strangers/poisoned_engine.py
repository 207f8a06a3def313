"""An engine that fails poisoned requests and serves the others; its own process.

    poisoned_engine.py PORT [--busy]

With `--busy` it refuses one in four of the other requests with 503, drawn at random, as an engine does whose queue is
full at times. A fixed order would fall into step with that of another engine, and refuse a request on both or on none.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

from aiohttp import web

_EVENT = b'data: {"choices":[{"text":"x"}]}\n\n'
_ERROR_EVENT = b'data: {"error":{"message":"poison","type":"server_error","param":null,"code":500}}\n\n'
_REFUSAL = {"error": {"message": "poison", "type": "server_error", "param": None, "code": None}}


async def _complete(http: web.Request) -> web.StreamResponse:
    words = str(json.loads(await http.read()).get("prompt")).split()
    if "--busy" in sys.argv and words[:1] != ["poison"] and random.random() < 0.25:
        return web.json_response(_REFUSAL, status=503)
    if words[:1] != ["poison"]:
        return web.json_response({"choices": [{"text": "x"}]})
    kind = words[1]
    if kind == "hang":
        await asyncio.sleep(3600)
    if kind == "cut":
        _cut(http)
    elif kind in ("cut-late", "error-event"):
        return await _stream(http, kind)
    headers = {"Retry-After": "60"} if kind in ("429", "503") else {}
    return web.json_response(_REFUSAL, status=int(kind) if kind.isdigit() else 500, headers=headers)


async def _stream(http: web.Request, kind: str) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(http)
    await stream.write(_EVENT if kind == "cut-late" else _ERROR_EVENT)
    if kind == "cut-late":
        await asyncio.sleep(0.01)
        _cut(http)
    return stream


def _cut(http: web.Request) -> None:
    if http.transport is not None:  # The router may have left.
        http.transport.abort()


async def _models(http: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


async def _health(http: web.Request) -> web.Response:
    return web.Response()


if __name__ == "__main__":
    app = web.Application()
    app.add_routes(
        [
            web.post("/v1/completions", _complete),
            web.get("/v1/models", _models),
            web.get("/health", _health),
        ]
    )
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
