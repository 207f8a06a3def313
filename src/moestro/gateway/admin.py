"""The admin plane: adds, changes, drains and removes engines, and explains decisions, on a port with its own key."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from moestro.core.views import Figure
from moestro.errors import ConfigError, RequestError, shown
from moestro.gateway.clients.http_headers import EngineHead
from moestro.gateway.discovery.lists import Change, ChangeKind, EngineEntry, EngineLists
from moestro.gateway.discovery.operator_changes import (
    ChangeMade,
    OperatorChange,
    OperatorChanges,
    leave_drained,
    leave_removed,
)
from moestro.gateway.engines.fleet import EngineAddress, Fleet, RoutedEngine
from moestro.gateway.engines.health_checks import Watch
from moestro.gateway.engines.upstream import Address, Pool
from moestro.gateway.settings import AdminSettings, EngineSettings, EngineUrl, is_loopback, parsed_ranks
from moestro.routing.decision_log import DecisionLog
from moestro.routing.policy_contract import FRESH_NS
from moestro.web.access import Access, only_programs
from moestro.web.bodies import Bodies
from moestro.web.errors import HttpError, Refusals
from moestro.web.figures import CONTENT_TYPE, LiveStatistics, limit_in, page_routes
from moestro.web.middleware import HttpMiddleware
from moestro.web.ports.faults import Faults
from moestro.web.ports.lifecycle import RESPONSE_FLUSH_S
from moestro.web.ports.tls import EngineTls

logger = logging.getLogger(__name__)


class EngineView(msgspec.Struct, kw_only=True):
    """State of one engine, as the admin plane shows it. A figure of None was not reported within the last 5 s."""

    name: str
    url: str
    rank: int | None  # number of the data-parallel rank at the URL; None means that it has one engine
    condition: str
    breaker: str
    num_in_flight: int
    num_decisions: int
    models: tuple[str, ...]
    labels: Mapping[str, str]
    cause: str | None  # reason for the last connection failure
    expert_pressure: float | None
    expert_local_share: float | None


@dataclass(slots=True)
class EngineAdmin:
    """Applies the changes of the operator and of the lists of engines to the fleet.

    Args:
        withheld: names of client headers that engines do not get.
        reading: method of comparing prompts, in words.
        takes_paths: whether an engine's API may be below a path.
        lists: engines that there should be.

    A list may name an engine only later, or again: the operators' changes hold until they take them back.

    Raises:
        ConfigError: a file of certificates for engines cannot be used.
    """

    fleet: Fleet
    watch: Watch
    settings: EngineSettings
    withheld: frozenset[bytes]
    reading: str
    takes_paths: bool = True
    lists: EngineLists = field(default_factory=EngineLists)
    _changes: OperatorChanges = field(default_factory=OperatorChanges, init=False)
    _is_worker: bool = field(default=False, init=False)
    _tls: EngineTls | None = field(default=None, init=False)  # of all engines with TLS

    def __post_init__(self) -> None:
        self.fleet.is_drained = lambda engine: leave_drained(self._changes.read(), engine.name, engine.address.name)
        self.lists.removed = lambda: leave_removed(self._changes.read())
        if self.settings.engine_ca_certs is not None or self.settings.engine_certfile is not None:
            self._engine_tls()  # Files that cannot be used end the start: lists and operators bring engines only later.

    def follow(self, changes: OperatorChanges) -> None:
        """Let changes hold that the process of the admin plane writes for all workers, of which this is one."""
        self._changes, self._is_worker = changes, True

    def _note(self, made: ChangeMade, name: str, url: str = "") -> None:
        """Remember a change for engines of this name that come later."""
        if not self._is_worker:
            self._changes.write([*self._changes.read(), OperatorChange(made, name, url)])

    def add(self, url: EngineUrl) -> EngineAddress:
        """Add the engines of an address and start its health checks; requests follow once a check has passed.

        Raises:
            ConfigError: an engine with this name or address exists already, or its path cannot be used.
        """
        changes = self.lists.add(EngineEntry(url=url), time.monotonic_ns())
        try:
            for change in changes:
                self._apply(change)
        except ConfigError:
            self.lists.failed(url.name)
            raise
        address = self.fleet.address_named(url.name)
        assert address is not None
        if url.name in self.lists.removed():
            self._note(ChangeMade.ADD, url.name, f"{url.name}={url.url}")
        return address

    def remove(self, address: EngineAddress) -> None:
        """Send the engines of an address no more requests, let running ones finish, and close its connections."""
        self._note(ChangeMade.REMOVE, address.name)
        self.apply(self.lists.remove(address.name, time.monotonic_ns()))

    def drain(self, engine: RoutedEngine, *, is_draining: bool) -> None:
        """Drain the engine, or send it requests again."""
        engine.health.is_draining = is_draining
        self.fleet.look_now(engine)

    def switch(self, name: str, *, is_draining: bool) -> list[RoutedEngine]:
        """Drain the engines of a name, or send them requests again, also those of this name that come later."""
        engines = self.named(name)
        for engine in engines:
            self.drain(engine, is_draining=is_draining)
        if engines:
            self._note(ChangeMade.DRAIN if is_draining else ChangeMade.RESUME, name)
        return engines

    def named(self, name: str) -> list[RoutedEngine]:
        """Return the engine of a name, or the ranks of an address; none without either."""
        if (engine := self.fleet.named(name)) is not None:
            return [engine]
        address = self.fleet.address_named(name)
        return [] if address is None else list(address.engines)

    def repeat(self, changes: Iterable[OperatorChange]) -> None:
        """Make the operators' changes in their order, in a process that starts. Those of absent engines pass."""
        for made, target, url in map(msgspec.structs.astuple, changes):
            try:
                if made is ChangeMade.ADD:
                    self.add(EngineUrl.parse(url))
                elif made is ChangeMade.REMOVE:
                    for address in {engine.address for engine in self.named(target)}:
                        self.remove(address)
                else:
                    self.switch(target, is_draining=made is ChangeMade.DRAIN)
            except ConfigError as error:
                logger.info("an operator's change is not repeated: %s %s: %s", made, shown(target), error)

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes in their order. An engine that cannot be added is logged and left out."""
        for change in changes:
            try:
                self._apply(change)
            except ConfigError as error:
                logger.warning("engine %s is left out: %s", change.entry.name, error)
                self.lists.failed(change.entry.name)

    def listed(self, source: str, entries: Sequence[EngineEntry]) -> None:
        """Take in the whole list of a source."""
        ignored = self.lists.ignored
        self.apply(self.lists.replace(source, entries, time.monotonic_ns()))
        for text in self.lists.ignored:
            if text not in ignored:
                logger.warning("engine %s; it is left out", text)

    def tick(self, now_ns: int) -> None:
        """Remove engines that no list has: those whose time is over, and those that are down."""
        self.apply(self.lists.expire(now_ns))
        if not self.lists.num_absent:
            return
        for address in self.fleet.addresses:
            if address.is_absent and all(engine.health.is_down for engine in address.engines):
                self.apply(self.lists.lost(address.name))

    def _apply(self, change: Change) -> None:
        kind, entry = change
        if kind is ChangeKind.ADD:
            self._add(entry)
            return
        address = self.fleet.address_named(entry.name)
        assert address is not None, "the lists know which engines exist"
        if kind is ChangeKind.REMOVE:
            self.fleet.remove(address)
            address.pool.retire()
            self.watch.end(address)
        elif kind is ChangeKind.LEAVE:
            logger.info("engine %s is listed no more", entry.name)
            self.fleet.set_absent(address, is_absent=True)
        else:
            if kind is ChangeKind.RETURN:
                logger.info("engine %s is listed again", entry.name)
                self.fleet.set_absent(address, is_absent=False)
            self._update(address, entry)

    def _add(self, entry: EngineEntry) -> None:
        url = entry.url
        if not self.takes_paths:
            url.check_is_endpoint()
            if entry.dp_ranks not in ("", "1"):
                raise ConfigError("--ext-proc names addresses, not ranks: leave dp_ranks out")
        tls = self._engine_tls() if url.is_tls else None
        pool = Pool(Address(url.host, url.port, tls, entry.server_name), self.settings.connect_timeout)
        num_ranks = self._num_ranks(entry)
        address = self.fleet.add(url.name, url.url, pool, self._head(entry), num_ranks, url.traits)
        address.labels = entry.labels
        self._declare_model(address, entry)
        self.watch.begin(address)

    def _engine_tls(self) -> EngineTls:
        """Return the TLS of all engines. The system's authorities are read for the first engine that needs them."""
        if self._tls is None:
            settings = self.settings
            self._tls = EngineTls(settings.engine_ca_certs, settings.engine_certfile, settings.engine_keyfile)
        return self._tls

    def _update(self, address: EngineAddress, entry: EngineEntry) -> None:
        """Change what differs from the entry before, and keep what is known of the engine."""
        fleet = self.fleet
        address.labels, address.traits = entry.labels, entry.url.traits
        head = self._head(entry)
        if head.authorization != address.head.authorization:
            fleet.set_head(address, head)
        for engine in address.engines:
            fleet.specify(engine, fleet.spec_of(engine))
        num_ranks = self._num_ranks(entry)
        address.finds_ranks = num_ranks is None
        if num_ranks is not None and num_ranks != len(address.engines):
            fleet.set_ranks(address, range(num_ranks))
        self._declare_model(address, entry)

    def _declare_model(self, address: EngineAddress, entry: EngineEntry) -> None:
        for engine in address.engines:
            if entry.model and not self.fleet.models.names_of(engine.row):
                self.fleet.models.declare(engine.row, entry.model)

    def _num_ranks(self, entry: EngineEntry) -> int | None:
        ranks = entry.dp_ranks if self.takes_paths else ""
        return parsed_ranks(ranks) if ranks else self.settings.num_ranks

    def _head(self, entry: EngineEntry) -> EngineHead:
        key = self.settings.engine_api_key if entry.api_key is None else entry.api_key
        return EngineHead(
            host=entry.url.netloc.encode(),
            prefix=entry.url.path.encode(),
            via=self.fleet.pseudonym,
            authorization=None if key is None else f"Bearer {key}".encode("utf-8", "surrogateescape"),
            withheld=self.withheld,
        )

    def views(self) -> list[EngineView]:
        """Return the state of all engines, in the order of their addition."""
        return [self.view(engine) for engine in self.fleet]

    def view(self, engine: RoutedEngine) -> EngineView:
        """Return the current state of one engine."""
        return EngineView(
            name=engine.name,
            url=engine.address.url,
            rank=engine.rank,
            condition=engine.condition,
            breaker=self.fleet.breaker_state(engine),
            num_in_flight=self.fleet.router.num_in_flight_on(engine.row),
            num_decisions=engine.counts.num_decisions,
            models=self.fleet.models.names_of(engine.row),
            labels=engine.address.labels,
            cause=engine.unreachable or None,
            expert_pressure=self._fresh("expert_pressure", engine.row),
            expert_local_share=self._fresh("expert_local_share", engine.row),
        )

    def _fresh(self, figure: str, row: int) -> float | None:
        """Return a figure of an engine as policies see it now; None means missing or old."""
        column: Figure = getattr(self.fleet.router.table, figure)
        return float(column.values[row]) if column.known(time.monotonic_ns(), FRESH_NS)[row] else None


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


def url_to_add(body: bytes | memoryview) -> str:
    """Return the NAME=URL in the body of a request to add an engine.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: the body has another form.
    """
    return msgspec.json.decode(body, type=_NewEngine).url


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
                url = EngineUrl.parse(url_to_add(body))
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
        self._named(http)
        return self._shown(self._engine_admin.switch(http.match_info["name"], is_draining=is_draining))

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
        name = http.match_info["name"]
        if engines := self._engine_admin.named(name):
            return engines
        raise HttpError(404, f"There is no engine {shown(name)}.", "not_found")

    def _shown(self, engines: Sequence[RoutedEngine], status: int = 200) -> web.Response:
        views = [self._engine_admin.view(engine) for engine in engines]
        return _json(views[0] if len(views) == 1 else {"engines": views}, status)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
