"""Handlers of `/openapi.json` and `/docs`. Both are the same for every server, so that they need no key."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec
from aiohttp import web

from moestro.server.openapi import openapi_document

ROOT_PATH = web.AppKey("root_path", str)  # Prefix under which a proxy shows the server; empty means none.

# The page loads nothing but the document.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline';"
    " script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def docs_routes() -> list[web.RouteDef]:
    """Return the routes of both paths."""
    return [web.get("/openapi.json", _openapi), web.get("/docs", _docs)]


async def _openapi(http: web.Request) -> web.Response:
    return web.Response(body=_document(http.app[ROOT_PATH]), content_type="application/json")


async def _docs(_http: web.Request) -> web.Response:
    return web.Response(body=_page(), content_type="text/html", charset="utf-8", headers=_PAGE_HEADERS)


@cache
def _document(root_path: str) -> bytes:
    servers = {"servers": [{"url": root_path}]} if root_path else {}
    return msgspec.json.encode(openapi_document() | servers)


@cache
def _page() -> bytes:
    return (files("moestro") / "assets" / "api_docs.html").read_bytes()
