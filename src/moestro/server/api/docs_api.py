"""The API described by the server itself: /openapi.json, and a page of it at /docs."""

from __future__ import annotations

from functools import cache

import msgspec
from aiohttp import web

from moestro.server.api.openapi import openapi_document
from moestro.web.openapi import DOCS_HEADERS, docs_page

ROOT_PATH = web.AppKey("root_path", str)  # Prefix under which a proxy shows the server; empty means none.


def docs_routes(*, is_strict: bool) -> list[web.RouteDef]:
    """Return the routes of both paths.

    Args:
        is_strict: Whether the server refuses unknown fields.
    """

    @cache
    def document(root_path: str) -> bytes:
        servers = {"servers": [{"url": root_path}]} if root_path else {}
        return msgspec.json.encode(openapi_document(is_strict=is_strict) | servers)

    async def openapi(http: web.Request) -> web.Response:
        return web.Response(body=document(http.app[ROOT_PATH]), content_type="application/json")

    async def docs(_http: web.Request) -> web.Response:
        return web.Response(body=docs_page(), content_type="text/html", charset="utf-8", headers=DOCS_HEADERS)

    return [web.get("/openapi.json", openapi), web.get("/docs", docs)]
