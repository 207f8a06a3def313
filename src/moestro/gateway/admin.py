"""The admin plane: adds, drains and removes engines and explains decisions, on its own port with its own key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from moestro.errors import ConfigError, RequestError, shown
from moestro.gateway.engines.engine_admin import EngineAdmin
from moestro.gateway.engines.fleet import RoutedEngine
from moestro.gateway.settings import AdminSettings, EngineUrl, is_loopback
from moestro.routing.record.decision_log import DecisionLog
from moestro.web.access.control import Access
from moestro.web.access.origins import only_programs
from moestro.web.bodies import Bodies
from moestro.web.errors import HttpError, Refusals
from moestro.web.middleware import HttpMiddleware
from moestro.web.ports.faults import Faults
from moestro.web.ports.lifecycle import RESPONSE_FLUSH_S
from moestro.web.prometheus import CONTENT_TYPE
from moestro.web.statistics import LiveStatistics, limit_in, page_routes

MAX_BODY_BYTES = 64 << 10

_Handler = Callable[[web.Request], Awaitable[web.Response]]


@dataclass(frozen=True, kw_only=True)
class AdminHandlers:
    """Handlers of the admin plane's paths, for one process or for all workers of a router."""

    metrics: _Handler
    engines: _Handler
    add: _Handler
    engine: _Handler
    remove: _Handler
    drain: _Handler
    resume: _Handler
    explain: _Handler
    decisions: _Handler
    statistics: Callable[[], LiveStatistics | Awaitable[LiveStatistics]]


async def admin_runner(handlers: AdminHandlers, settings: AdminSettings, faults: Faults) -> web.AppRunner:
    """Return an aiohttp runner of the admin plane, set up to serve."""
    app = web.Application()
    app.middlewares.append(only_programs(lambda host: host == settings.admin_host or is_loopback(host)))
    app.add_routes(
        [
            web.get("/metrics", handlers.metrics),
            web.get("/admin/engines", handlers.engines),
            web.post("/admin/engines", handlers.add),
            web.get("/admin/engines/{name}", handlers.engine),
            web.delete("/admin/engines/{name}", handlers.remove),
            web.post("/admin/engines/{name}/drain", handlers.drain),
            web.post("/admin/engines/{name}/resume", handlers.resume),
            web.get("/admin/explain/{request_id}", handlers.explain),
            web.get("/admin/decisions", handlers.decisions),
            *page_routes("route", "operators", lambda _: handlers.statistics()),
        ]
    )
    access = Access.of([settings.admin_api_key] if settings.admin_api_key else [])
    middleware = HttpMiddleware(access, Refusals(), MAX_BODY_BYTES, faults)
    return await middleware.runner(app, shutdown_timeout=RESPONSE_FLUSH_S)


class _NewEngine(msgspec.Struct):
    url: str


class Admin:
    """Handles the operator's requests.

    Args:
        metrics: returns the text of `/metrics`.
        statistics: returns the answer of `/statistics`.
    """

    def __init__(
        self,
        engine_admin: EngineAdmin,
        decision_log: DecisionLog,
        metrics: Callable[[], bytes],
        statistics: Callable[[], LiveStatistics],
    ) -> None:
        self._engine_admin = engine_admin
        self._decision_log = decision_log
        self._metrics = metrics
        self._statistics = statistics
        self._bodies = Bodies(max_body_bytes=MAX_BODY_BYTES)

    async def runner(self, settings: AdminSettings, faults: Faults) -> web.AppRunner:
        """Return an aiohttp runner of the admin plane, set up to serve."""
        handlers = AdminHandlers(
            metrics=self.metrics,
            engines=self.engines,
            add=self.add,
            engine=self.engine,
            remove=self.remove,
            drain=self.drain,
            resume=self.resume,
            explain=self.explain,
            decisions=self.decisions,
            statistics=self._statistics,
        )
        return await admin_runner(handlers, settings, faults)

    async def metrics(self, _http: web.Request) -> web.Response:
        """Handle GET /metrics."""
        return web.Response(body=self._metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def engines(self, _http: web.Request) -> web.Response:
        """Handle GET /admin/engines: return all engines."""
        return _json({"engines": self._engine_admin.views()})

    async def engine(self, http: web.Request) -> web.Response:
        """Handle GET /admin/engines/{name}: return one engine, or all ranks of an address."""
        return self._shown(self._named(http))

    async def add(self, http: web.Request) -> web.Response:
        """Handle POST /admin/engines {"url": "NAME=http://HOST:PORT"}: add an engine and answer 201."""
        try:
            async with self._bodies.holding(http) as body:
                url = EngineUrl.parse(msgspec.json.decode(body, type=_NewEngine).url)
            address = self._engine_admin.add(url)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError) as error:
            raise RequestError(shown(error), param="url", code="invalid_value") from None
        return self._shown(address.engines, status=201)

    async def remove(self, http: web.Request) -> web.Response:
        """Handle DELETE /admin/engines/{name}: send the engine no more requests, and let running ones finish."""
        engine = self._named(http)[0]
        if engine.address.name != http.match_info["name"]:
            text = f"{engine.name} is a rank of {engine.address.name}: drain the rank, or remove {engine.address.name}."
            raise HttpError(409, text, "is_a_rank")
        self._engine_admin.remove(engine.address)
        return web.Response(status=204)

    async def drain(self, http: web.Request) -> web.Response:
        """Handle POST /admin/engines/{name}/drain: send the engine no more requests until it is resumed."""
        return self._set_draining(http, is_draining=True)

    async def resume(self, http: web.Request) -> web.Response:
        """Handle POST /admin/engines/{name}/resume: send the engine requests again."""
        return self._set_draining(http, is_draining=False)

    def _set_draining(self, http: web.Request, *, is_draining: bool) -> web.Response:
        engines = self._named(http)
        for engine in engines:
            self._engine_admin.drain(engine, is_draining=is_draining)
        return self._shown(engines)

    async def explain(self, http: web.Request) -> web.Response:
        """Handle GET /admin/explain/{request_id}: return the request's engines, scores, reasons and outcome."""
        request_id = http.match_info["request_id"]
        story = self._decision_log.trace(request_id)
        if story is None:
            text = f"Request {shown(request_id)} is unknown: it never arrived, or --remember newer requests have ended."
            raise HttpError(404, text, "not_found")
        return _json(story)

    async def decisions(self, http: web.Request) -> web.Response:
        """Handle GET /admin/decisions?limit=N: return the decisions for the newest requests."""
        return _json({"decisions": self._decision_log.recent(limit_in(http.query))})

    def _named(self, http: web.Request) -> list[RoutedEngine]:
        """Return the engine of a name, or the ranks of an address."""
        name, fleet = http.match_info["name"], self._engine_admin.fleet
        if (engine := fleet.named(name)) is not None:
            return [engine]
        if (address := fleet.address_named(name)) is not None:
            return list(address.engines)
        raise HttpError(404, f"There is no engine {shown(name)}.", "not_found")

    def _shown(self, engines: Sequence[RoutedEngine], status: int = 200) -> web.Response:
        views = [self._engine_admin.view(engine) for engine in engines]
        return _json(views[0] if len(views) == 1 else {"engines": views}, status)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
