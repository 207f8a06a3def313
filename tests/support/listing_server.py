"""`moestro serve` before fake ranks, or `moestro route`, which also writes its routes to ROUTES_FILE of its TMPDIR.

The arguments are those of `fake_server.py`, or `route` and its flags. Each line is one application: a list of pairs
of method and path.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from moestro.cli import main
from moestro.gateway.clients.paths import Routes
from moestro.web.middleware import HttpMiddleware

ROUTES_FILE = "routes.jsonl"


def _list(routes: list[tuple[str, str]]) -> None:
    with (Path(os.environ["TMPDIR"]) / ROUTES_FILE).open("a") as file:
        file.write(json.dumps(routes) + "\n")


def _listing(runner: Any) -> Any:
    async def listed(self: HttpMiddleware, app: web.Application, **options: Any) -> web.AppRunner:
        _list([(route.method, route.resource.canonical) for route in app.router.routes() if route.resource])
        return await runner(self, app, **options)

    return listed


if __name__ == "__main__":
    from replaced import replace_names

    replace_names(HttpMiddleware, runner=_listing(HttpMiddleware.runner))
    if sys.argv[1] == "route":
        known = Routes()
        paths = [*known._exact.items(), *((f"{tree}x", route) for tree, route in known._trees)]
        _list([(method.decode(), path) for path, route in paths for method in sorted(route.methods)])
        main(sys.argv[1:])
    else:
        runpy.run_path(str(Path(__file__).with_name("fake_server.py")), run_name="__main__")
