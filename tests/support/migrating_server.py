"""`moestro serve --mode async` whose admin port starts migrations and shows them: the arguments are the verb's."""

from __future__ import annotations

import sys

import msgspec
import numpy as np
from aiohttp import web
from replaced import replace_names

from moestro.cli import main
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.server.admin import WorkerAdmin

REAL_ROUTES = WorkerAdmin.routes


def routes(self: WorkerAdmin) -> list[web.RouteDef]:
    migration = self._coordinator.migration

    def state() -> web.Response:
        progress = migration.progress
        body = {name: getattr(progress, name) for name in progress.__slots__}
        body["logical_of"] = migration.table.logical_of.tolist()
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def show(_http: web.Request) -> web.Response:
        return state()

    async def start(http: web.Request) -> web.Response:
        """Move some experts, in every layer, from the one of the first two workers that has them to the other one."""
        table = migration.table
        logical_of = table.logical_of.copy()
        for layer in range(logical_of.shape[1]):
            for expert in await http.json():
                source, target = (0, 1) if expert in logical_of[0, layer] else (1, 0)
                logical_of[source, layer][logical_of[source, layer] == expert] = EMPTY
                empty = np.flatnonzero(logical_of[target, layer] == EMPTY)[0]
                logical_of[target, layer, empty] = expert
        migration.start(ExpertTable(0, logical_of, table.num_experts, table.is_alive), max_bytes_per_step=1)
        return state()

    return [*REAL_ROUTES(self), web.get("/admin/migration", show), web.post("/admin/migration", start)]


if __name__ == "__main__":
    replace_names(WorkerAdmin, routes=routes)
    main(sys.argv[1:])
