"""The operator's questions why requests went as they did: GET /admin/explain/REQUEST_ID and /admin/decisions."""

from __future__ import annotations

import msgspec
from aiohttp import web

from moestro.errors import shown
from moestro.server.engines.request_log import REMEMBERED, RequestLog
from moestro.web.errors import HttpError
from moestro.web.statistics import limit_in


class ExplainAdmin:
    """Handles the operator's requests.

    Args:
        log: Knows recent requests.
    """

    def __init__(self, log: RequestLog) -> None:
        self._log = log

    def routes(self) -> list[web.RouteDef]:
        """Return all routes."""
        return [web.get("/admin/explain/{request_id}", self.explain), web.get("/admin/decisions", self.decisions)]

    async def decisions(self, http: web.Request) -> web.Response:
        """Handle GET /admin/decisions?limit=N: return the decisions for the newest requests."""
        limit = limit_in(http.query)
        self._check()
        return web.Response(
            body=msgspec.json.encode({"decisions": self._log.recent(limit)}), content_type="application/json"
        )

    async def explain(self, http: web.Request) -> web.Response:
        """Handle GET /admin/explain/REQUEST_ID: return the trace of a request."""
        request_id = http.match_info["request_id"]
        self._check()
        trace = self._log.trace(request_id)
        if trace is None:
            text = f"Request {shown(request_id)} is unknown: it never arrived, or {REMEMBERED} newer ones have ended."
            raise HttpError(404, text, "not_found")
        return web.Response(body=msgspec.json.encode(trace), content_type="application/json")

    def _check(self) -> None:
        if self._log.has_failed:
            raise HttpError(500, "Requests are no longer explained because of an error; the log has it.", "no_traces")
