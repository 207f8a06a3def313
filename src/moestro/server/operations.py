"""The paths that operators and their tools look at: probes, figures, versions."""

from __future__ import annotations

import msgspec
from aiohttp import web

from moestro import __version__
from moestro.server.engine_client import Engines
from moestro.server.prometheus import Exposition
from moestro.server.traffic import Traffic
from moestro.web.prometheus import CONTENT_TYPE


class Operations:
    """Answers them from what is known already: none of them waits for an engine."""

    def __init__(self, engines: Engines, traffic: Traffic, exposition: Exposition) -> None:
        self._engines = engines
        self._traffic = traffic
        self._exposition = exposition

    def routes(self) -> list[web.RouteDef]:
        """All of them; GET includes HEAD."""
        return [
            web.get("/health", self.health),
            web.get("/ping", self.health),
            web.post("/ping", self.health),
            web.get("/ready", self.ready),
            web.get("/readyz", self.ready),
            web.get("/version", self.version),
            web.get("/load", self.load),
            web.get("/metrics", self.metrics),
        ]

    async def health(self, _http: web.Request) -> web.Response:
        """GET /health, /ping: 200 while any engine takes requests; also while the server drains."""
        return web.Response(status=200 if self._engines.is_healthy else 503)

    async def ready(self, _http: web.Request) -> web.Response:
        """GET /ready, /readyz: 200 while a new request would be taken."""
        is_ready = self._engines.is_healthy and not self._traffic.is_draining
        return web.Response(status=200 if is_ready else 503)

    async def version(self, _http: web.Request) -> web.Response:
        """GET /version."""
        return web.Response(body=msgspec.json.encode({"version": __version__}), content_type="application/json")

    async def load(self, _http: web.Request) -> web.Response:
        """GET /load: requests being answered, and what each engine said of itself last."""
        figures = {"server_load": self._traffic.num_answering, "engines": self._engines.loads}
        return web.Response(body=msgspec.json.encode(figures), content_type="application/json")

    async def metrics(self, _http: web.Request) -> web.Response:
        """GET /metrics: everything that is counted, for Prometheus."""
        return web.Response(body=self._exposition.text(), headers={"Content-Type": CONTENT_TYPE})
