"""Keeps foreign web pages away from the planes of operators."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from moestro.web.errors import HttpError
from moestro.web.ports.heads import host_name


def only_programs(is_allowed: Callable[[str], bool]) -> Middleware:
    """Refuse requests of foreign web pages, even under a host name that resolves to this address (DNS rebinding).

    The plane's own page may ask. A browser names the origin of a page in every request that is not a GET, and in every
    request to another origin, so that a foreign page cannot pass for the own one.

    Args:
        is_allowed: Callable that returns whether a host name may address the plane; literal addresses always may.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        named = request.headers.get("Host", "")
        host = host_name(named)
        is_own = request.headers.get("Origin", f"http://{named}") == f"http://{named}"
        if not is_own or not (is_allowed(host) or _is_address(host)):
            raise HttpError(403, "The admin plane does not answer requests from other web pages.", "permission_denied")
        return await handler(request)

    return middleware


def _is_address(host: str) -> bool:
    return host.replace(".", "").isdigit() or ":" in host
