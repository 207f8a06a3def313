"""Handlers of `/openapi.json` and `/docs`. Both have no data of the server, so that they need no key."""

from __future__ import annotations

import msgspec
from aiohttp import web

from moestro.server.openapi import openapi_document
from moestro.web.openapi import DOCS_HEADERS, docs_page

ROOT_PATH = web.AppKey("root_path", str)  # Prefix under which a proxy shows the server; empty means none.


def docs_routes(*, is_strict: bool) -> list[web.RouteDef]:
    """Return the routes of both paths.

    Args:
        is_strict: Whether the server refuses unknown fields.
    """
    document = openapi_document(is_strict=is_strict)

    async def openapi(http: web.Request) -> web.Response:
        root_path = http.app[ROOT_PATH]
        servers = {"servers": [{"url": root_path}]} if root_path else {}
        return web.Response(body=msgspec.json.encode(document | servers), content_type="application/json")

    async def docs(_http: web.Request) -> web.Response:
        return web.Response(body=docs_page(), content_type="text/html", charset="utf-8", headers=DOCS_HEADERS)

    return [web.get("/openapi.json", openapi), web.get("/docs", docs)]
