"""The plane of operators: a port of its own on the loopback interface, with a key of its own."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp import web

from moestro.web.access.control import Access
from moestro.web.access.origins import only_programs
from moestro.web.errors import Refusals
from moestro.web.middleware import HttpMiddleware
from moestro.web.ports.connections import Front
from moestro.web.ports.faults import Faults
from moestro.web.ports.lifecycle import RESPONSE_FLUSH_S

ADMIN_HOST = "127.0.0.1"
# A placement of DeepSeek-V3 on 320 devices with its shares and moves takes 2 MB.
ADMIN_BODY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class OperatorsPort:
    """The open port of operators."""

    runner: web.AppRunner
    listener: socket.socket
    front: Front

    async def close(self) -> None:
        """Accept no further connection, and end the open ones."""
        self.front.close()
        await self.runner.cleanup()
        self.listener.close()


async def admin_runner(routes: Iterable[web.RouteDef], api_key: str | None, faults: Faults) -> web.AppRunner:
    """Return an aiohttp runner of the plane, set up to serve. An `api_key` of None means that none is needed."""
    app = web.Application()
    app.middlewares.append(only_programs(lambda host: host == "localhost"))
    app.add_routes(routes)
    middleware = HttpMiddleware(Access.of([api_key] if api_key else []), Refusals(), ADMIN_BODY_BYTES, faults)
    return await middleware.runner(app, shutdown_timeout=RESPONSE_FLUSH_S)
