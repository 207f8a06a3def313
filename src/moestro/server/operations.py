"""The paths that operators and their tools look at: probes, figures, versions."""

from __future__ import annotations

import msgspec
from aiohttp import web

from moestro.server.engine_client import EngineClient
from moestro.server.traffic import Traffic
from moestro.web.probes import HEALTH_PATHS, READY_PATHS, VERSION_BODY, probe_status
from moestro.web.prometheus import CONTENT_TYPE, Exposition


class Operations:
    """Answers them from what is known already: none of them waits for an engine."""

    def __init__(self, engines: EngineClient, traffic: Traffic, exposition: Exposition) -> None:
        self._engines = engines
        self._traffic = traffic
        self._exposition = exposition

    def routes(self) -> list[web.RouteDef]:
        """All of them; GET includes HEAD."""
        return [
            *(web.get(path, self.probe) for path in (*HEALTH_PATHS, *READY_PATHS)),
            web.post("/ping", self.probe),
            web.get("/version", self.version),
            web.get("/load", self.load),
            web.get("/metrics", self.metrics),
        ]

    async def probe(self, http: web.Request) -> web.Response:
        """GET /health, /ping: 200 while any engine takes requests. GET /ready, /readyz: also only before a drain."""
        is_healthy, is_draining = self._engines.is_healthy, self._traffic.is_draining
        return web.Response(status=probe_status(http.path, is_healthy=is_healthy, is_draining=is_draining))

    async def version(self, _http: web.Request) -> web.Response:
        """GET /version."""
        return web.Response(body=VERSION_BODY, content_type="application/json")

    async def load(self, _http: web.Request) -> web.Response:
        """GET /load: requests being answered, and what each engine said of itself last."""
        figures = {"server_load": self._traffic.num_answering, "engines": self._engines.loads}
        return web.Response(body=msgspec.json.encode(figures), content_type="application/json")

    async def metrics(self, _http: web.Request) -> web.Response:
        """GET /metrics: everything that is counted, for Prometheus."""
        return web.Response(body=self._exposition.text(), headers={"Content-Type": CONTENT_TYPE})
