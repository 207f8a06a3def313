"""The operator's question why a request went as it did: GET /admin/explain/REQUEST_ID."""

from __future__ import annotations

import msgspec
from aiohttp import web

from moestro.errors import shown
from moestro.server.request_log import REMEMBERED, RequestLog
from moestro.web.errors import HttpError


class ExplainAdmin:
    """Handles the operator's requests.

    Args:
        log: Knows recent requests.
    """

    def __init__(self, log: RequestLog) -> None:
        self._log = log

    def routes(self) -> list[web.RouteDef]:
        """Return all routes."""
        return [web.get("/admin/explain/{request_id}", self.explain)]

    async def explain(self, http: web.Request) -> web.Response:
        """Handle GET /admin/explain/REQUEST_ID: return the trace of a request."""
        request_id = http.match_info["request_id"]
        if self._log.has_failed:
            raise HttpError(500, "Requests are no longer explained because of an error; the log has it.", "no_traces")
        trace = self._log.trace(request_id)
        if trace is None:
            text = f"Request {shown(request_id)} is unknown: it never arrived, or {REMEMBERED} newer ones have ended."
            raise HttpError(404, text, "not_found")
        return web.Response(body=msgspec.json.encode(trace), content_type="application/json")
