"""Keeps web pages away from the planes of operators."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from moestro.web.errors import HttpError


def only_programs(is_allowed: Callable[[str], bool]) -> Middleware:
    """Refuse requests of web pages, even under a host name that resolves to this address (DNS rebinding).

    Args:
        is_allowed: Callable that returns whether a host name may address the plane; literal addresses always may.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
        if "Origin" in request.headers or not (is_allowed(host) or _is_address(host)):
            raise HttpError(403, "The admin plane does not answer requests from web pages.", "permission_denied")
        return await handler(request)

    return middleware


def _is_address(host: str) -> bool:
    return host.replace(".", "").isdigit() or ":" in host
