"""The plane of operators of a group: lists, adds, drains and removes workers with experts while the group serves."""

from __future__ import annotations

from collections import Counter

import msgspec
from aiohttp import web

from moestro.errors import shown
from moestro.server.coordinator import Coordinator
from moestro.server.supervisor import Supervisor
from moestro.web.access import Access
from moestro.web.errors import HttpError
from moestro.web.lifecycle import RESPONSE_FLUSH_S
from moestro.web.middleware import HttpMiddleware
from moestro.web.only_programs import only_programs

ADMIN_HOST = "127.0.0.1"
_MAX_BODY_BYTES = 1 << 10
_MAX_DIGITS = 9  # of a worker's number; Python refuses to read thousands


class WorkerAdmin:
    """Handles the operator's requests.

    Args:
        coordinator: Knows the workers.
        supervisor: Owns their processes.
    """

    def __init__(self, coordinator: Coordinator, supervisor: Supervisor) -> None:
        self._coordinator, self._supervisor = coordinator, supervisor

    async def runner(self, api_key: str | None) -> web.AppRunner:
        """Return an aiohttp runner of the plane, set up to serve. An `api_key` of None means that none is needed."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.middlewares.append(only_programs(lambda host: host == "localhost"))
        app.add_routes(
            [
                web.get("/admin/workers", self.workers),
                web.post("/admin/workers", self.add),
                web.post("/admin/workers/{number}/drain", self.drain),
                web.post("/admin/workers/{number}/resume", self.resume),
                web.delete("/admin/workers/{number}", self.remove),
            ]
        )
        middleware = HttpMiddleware(Access.of([api_key] if api_key else []), Counter(), _MAX_BODY_BYTES)
        return await middleware.runner(app, shutdown_timeout=RESPONSE_FLUSH_S)

    async def workers(self, _http: web.Request) -> web.Response:
        """Handle GET /admin/workers: return all workers."""
        return _json({"workers": self._coordinator.views()})

    async def add(self, _http: web.Request) -> web.Response:
        """Handle POST /admin/workers: start a worker with the experts that have the fewest copies, and answer 201."""
        worker = await self._supervisor.add_worker()
        return _json(self._coordinator.view(worker), status=201)

    async def drain(self, http: web.Request) -> web.Response:
        """Handle POST /admin/workers/{number}/drain: send the worker no more tokens until it is resumed."""
        worker = self._worker(http)
        self._coordinator.drain(worker, is_draining=True)
        return _json(self._coordinator.view(worker))

    async def resume(self, http: web.Request) -> web.Response:
        """Handle POST /admin/workers/{number}/resume: send the worker tokens again."""
        worker = self._worker(http)
        self._coordinator.drain(worker, is_draining=False)
        return _json(self._coordinator.view(worker))

    async def remove(self, http: web.Request) -> web.Response:
        """Handle DELETE /admin/workers/{number}: drain the worker, and end its process when its tokens have left."""
        self._supervisor.remove_worker(self._worker(http))
        return web.Response(status=204)

    def _worker(self, http: web.Request) -> int:
        """Return the place of the worker with experts of a path's number."""
        number = http.match_info["number"]
        is_number = number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS
        worker = self._coordinator.expert_worker(int(number)) if is_number else None
        if worker is None:
            raise HttpError(404, f"There is no expert worker {shown(number)}.", "not_found")
        return worker


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
