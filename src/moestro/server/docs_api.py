"""Handlers of `/openapi.json` and `/docs`. Both are the same for every server, so that they need no key."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec
from aiohttp import web

from moestro.server.openapi import openapi_document

# The page loads nothing but the document.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline';"
    " script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def docs_routes() -> list[web.RouteDef]:
    """Return the routes of both paths."""
    return [web.get("/openapi.json", _openapi), web.get("/docs", _docs)]


async def _openapi(_http: web.Request) -> web.Response:
    return web.Response(body=_document(), content_type="application/json")


async def _docs(_http: web.Request) -> web.Response:
    return web.Response(body=_page(), content_type="text/html", charset="utf-8", headers=_PAGE_HEADERS)


@cache
def _document() -> bytes:
    return msgspec.json.encode(openapi_document())


@cache
def _page() -> bytes:
    return (files("moestro") / "assets" / "api_docs.html").read_bytes()
