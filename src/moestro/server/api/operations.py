"""Handlers of the paths for operators and their tools: probes, load, metrics, version, and the documents of the API."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import msgspec
from aiohttp import web

from moestro.server.api.openapi import openapi_document
from moestro.server.api.server_info import ServerInfo
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.traffic import Traffic
from moestro.web.openapi import DOCS_HEADERS, docs_page
from moestro.web.page import HEALTH_PATHS, READY_PATHS, VERSION_BODY, probe_status
from moestro.web.prometheus import CONTENT_TYPE, Exposition
from moestro.web.statistics import LiveStatistics, page_routes

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


class Operations:
    """Handles requests of operators from the API server's own state, without waiting for an engine.

    Args:
        statistics: Callable that returns the answer of /statistics, with the load of experts if its argument is true.
        is_strict: Whether the server refuses unknown fields, as its document then says.
    """

    def __init__(
        self,
        engines: EngineClient,
        traffic: Traffic,
        exposition: Exposition,
        info: ServerInfo,
        statistics: Callable[[bool], LiveStatistics],
        *,
        is_strict: bool,
    ) -> None:
        self._is_strict = is_strict
        self._engines = engines
        self._info = info
        self._traffic = traffic
        self._exposition = exposition
        self._statistics = statistics

    def routes(self) -> list[web.RouteDef]:
        """Return all routes; GET includes HEAD."""
        return [
            *(web.get(path, self.probe) for path in (*HEALTH_PATHS, *READY_PATHS)),
            web.post("/ping", self.probe),
            web.get("/version", self.version),
            web.get("/load", self.load),
            web.get("/metrics", self.metrics),
            web.get("/server_info", self.server_info),
            *docs_routes(is_strict=self._is_strict),
            *page_routes("serve", "clients", self._statistics),
        ]

    async def probe(self, http: web.Request) -> web.Response:
        """Handle GET /health and /ping: 200 while any engine takes requests; /ready, /readyz also fail in a drain."""
        is_healthy, is_draining = self._engines.is_healthy, self._traffic.is_draining
        return web.Response(status=probe_status(http.path, is_healthy=is_healthy, is_draining=is_draining))

    async def version(self, _http: web.Request) -> web.Response:
        """Handle GET /version."""
        return web.Response(body=VERSION_BODY, content_type="application/json")

    async def server_info(self, _http: web.Request) -> web.Response:
        """Handle GET /server_info."""
        return web.Response(body=msgspec.json.encode(self._info), content_type="application/json")

    async def load(self, _http: web.Request) -> web.Response:
        """Handle GET /load: the number of running requests, and the last load figures of each engine."""
        figures = {"server_load": self._traffic.num_answering, "engines": self._engines.loads}
        return web.Response(body=msgspec.json.encode(figures), content_type="application/json")

    async def metrics(self, _http: web.Request) -> web.Response:
        """Handle GET /metrics: all metrics in Prometheus' text format."""
        return web.Response(body=self._exposition.text(), headers={"Content-Type": CONTENT_TYPE})
