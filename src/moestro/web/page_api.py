"""Handlers that aiohttp's servers share for the page at `/`: its files, and the data that it asks for."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from moestro.web.errors import HttpError
from moestro.web.page import PAGE_HEADERS, PAGE_PATHS, Plane, Program, page_file
from moestro.web.statistics import LiveStatistics

_DEFAULT_LIMIT, _MOST = 50, 1000


def page_routes(
    program: Program, plane: Plane, read: Callable[[bool], LiveStatistics | Awaitable[LiveStatistics]]
) -> list[web.RouteDef]:
    """Return the routes of the page's files and of /statistics.

    Args:
        program: Program that serves the page.
        plane: Port that serves the page.
        read: Callable that returns the present figures, with the load of experts if its argument is true.
    """

    async def files(http: web.Request) -> web.Response:
        """Handle GET / and /page/{name}: return a file of the page."""
        if http.path not in PAGE_PATHS:
            raise HttpError(404, "The page has no such file.", "not_found")
        file = page_file(http.path, program, plane)
        return web.Response(body=file.body, headers={"Content-Type": file.content_type, **PAGE_HEADERS})

    async def statistics(http: web.Request) -> web.Response:
        """Handle GET /statistics: return the present figures, with ?experts=true also the load of experts."""
        experts = http.query.get("experts", "false")
        if experts not in {"true", "false"}:
            raise HttpError(400, "experts must be true or false.", "bad_request")
        found = read(experts == "true")
        if inspect.isawaitable(found):
            found = await found
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    return [web.get("/", files), web.get("/page/{name}", files), web.get("/statistics", statistics)]


def limit_in(query: Mapping[str, str]) -> int:
    """Return the number of entries that `?limit=N` asks for, 1 to 1,000; 50 without it.

    Raises:
        HttpError: It is no such number.
    """
    text = query.get("limit", str(_DEFAULT_LIMIT))
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_MOST))
    if not is_number or not 1 <= int(text) <= _MOST:
        raise HttpError(400, f"limit must be a number from 1 to {_MOST}.", "bad_request")
    return int(text)
