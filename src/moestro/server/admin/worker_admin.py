"""The operator's view of a group: lists, adds, drains and removes workers with experts while the group serves."""

from __future__ import annotations

import msgspec
from aiohttp import web

from moestro.errors import shown
from moestro.server.experts.coordinator import Coordinator
from moestro.server.processes.supervisor import Supervisor
from moestro.web.errors import HttpError

_MAX_DIGITS = 9  # of a worker's number; Python refuses to read thousands


class WorkerAdmin:
    """Handles the operator's requests.

    Args:
        coordinator: Knows the workers.
        supervisor: Owns their processes.
    """

    def __init__(self, coordinator: Coordinator, supervisor: Supervisor) -> None:
        self._coordinator, self._supervisor = coordinator, supervisor

    def routes(self) -> list[web.RouteDef]:
        """Return all routes."""
        return [
            web.get("/admin/workers", self.workers),
            web.post("/admin/workers", self.add),
            web.post("/admin/workers/{number}/drain", self.drain),
            web.post("/admin/workers/{number}/resume", self.resume),
            web.delete("/admin/workers/{number}", self.remove),
        ]

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
