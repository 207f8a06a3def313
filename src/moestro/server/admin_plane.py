"""The plane of operators: a port of its own on the loopback interface, with a key of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from aiohttp import web

from moestro.web.access import Access
from moestro.web.lifecycle import RESPONSE_FLUSH_S
from moestro.web.middleware import HttpMiddleware
from moestro.web.only_programs import only_programs

ADMIN_HOST = "127.0.0.1"
# A placement of DeepSeek-V3 on 320 devices with its shares and moves takes 2 MB.
ADMIN_BODY_BYTES = 8 << 20


async def admin_runner(routes: Iterable[web.RouteDef], api_key: str | None) -> web.AppRunner:
    """Return an aiohttp runner of the plane, set up to serve. An `api_key` of None means that none is needed."""
    app = web.Application()
    app.middlewares.append(only_programs(lambda host: host == "localhost"))
    app.add_routes(routes)
    middleware = HttpMiddleware(Access.of([api_key] if api_key else []), Counter(), ADMIN_BODY_BYTES)
    return await middleware.runner(app, shutdown_timeout=RESPONSE_FLUSH_S)
