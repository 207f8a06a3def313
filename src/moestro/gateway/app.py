"""Assembles the router from its settings, with the OpenAPI document of the paths that it answers or passes on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from moestro.gateway.admin import EngineAdmin
from moestro.gateway.clients.downstream import ClientConnections, ClientLimits
from moestro.gateway.clients.http_headers import CORS_HEADERS, KEY_HEADERS, TRACE_HEADERS
from moestro.gateway.clients.paths import MODELS, OWN_PATHS, Routes
from moestro.gateway.clients.request_body import PromptReader
from moestro.gateway.discovery.discovery import Discovery, DnsNames, EngineFile, EngineSource
from moestro.gateway.discovery.kubernetes import Kubernetes
from moestro.gateway.discovery.lists import EngineLists, KeepRules
from moestro.gateway.engines.fleet import Counts, Fleet
from moestro.gateway.engines.health_checks import (
    EngineWatcher,
    HasEvents,
    HealthWatch,
    MetricsWatch,
    SourceReports,
    Watch,
    WatchRules,
)
from moestro.gateway.engines.kv_subscriber import KvEventsWatch
from moestro.gateway.exchange import ExchangeContext, ExchangeRules
from moestro.gateway.figures import FleetStatistics, KvFigures, RouteCollector
from moestro.gateway.part_settings import DiscoverySettings, KvSources
from moestro.gateway.peers import PeerCollector, PeerExchange
from moestro.gateway.proxy import Admission, Proxy, own_answers
from moestro.gateway.request_queue import RequestQueue, RequestQueueRules
from moestro.gateway.resume.stream import Resumption
from moestro.gateway.settings import EngineSettings, FrontSettings, RecordSettings, RouteSettings
from moestro.gateway.shadow import LogFollower, ShadowObserver, ShadowProxy
from moestro.gateway.tracing import RouterTraces
from moestro.routing.decision_log import DecisionLog
from moestro.routing.decision_record import Entry, Gap, PolicyText, RecordedRouter, keyed_entry
from moestro.routing.health import BreakerRules, HealthRules, RetryBudget, RetryRules, SilenceRules
from moestro.routing.policy_contract import FRESH_NS, RouteInputs
from moestro.routing.route_queue import EngineSaturation, RouteQueue
from moestro.routing.router import Router
from moestro.routing.scrape import SCRAPED_FIGURES
from moestro.routing.settings import RouterSettings
from moestro.text.thread_pool import PrepareThreads
from moestro.web.access import Access
from moestro.web.errors import AnthropicErrorBody, ErrorBody
from moestro.web.figures import Exposition, LiveStatistics
from moestro.web.openapi import EMPTY, ApiPath, document_of
from moestro.web.page import HEALTH_PATHS, PAGE_PATHS, PUBLIC, READY_PATHS
from moestro.web.ports.connections import FrontLimits
from moestro.web.ports.faults import Faults
from moestro.web.rate_limits import ProcessLimits
from moestro.web.record_file import RecordFile, read_clocks, record_key
from moestro.web.tracing import SpanSink

_PROBES = frozenset({*HEALTH_PATHS, *READY_PATHS})
_TEXTS = {"/metrics": "text/plain", "/docs": "text/html", "/": "text/html"}
_MESSAGES = "/v1/messages"


def router_document(routes: Routes) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a router with `routes`. Engines decide the fields of bodies."""
    own = [_own(path) for path in OWN_PATHS if path not in PAGE_PATHS or path == "/"]
    own += [
        ApiPath(path=f"{MODELS}{{name}}", summary="Describe one model.", says="The model, as an engine describes it."),
        ApiPath(path="/page/{name}", summary="A file of the page.", says="The file.", media_type="*/*", is_public=True),
    ]
    passed = [
        ApiPath(
            path=path,
            method=method,
            summary="Answered by an engine.",
            says="The engine's answer.",
            has_any_body=method in ("post", "put"),
            is_streamed=method == "post",
            error=AnthropicErrorBody if path.startswith(_MESSAGES) else ErrorBody,
        )
        for path, methods in routes.passed()
        for method in sorted({name.decode().lower() for name in methods} - {"head", "options"})
    ]
    return document_of([*own, *passed])


def _own(path: str) -> ApiPath:
    return ApiPath(
        path=path,
        summary="Answered by the router.",
        says=EMPTY if path in _PROBES else "The router's answer.",
        answer=LiveStatistics if path == "/statistics" else None,
        media_type=_TEXTS.get(path, "application/json"),
        is_public=path in PUBLIC,
    )


_SOON_S = 0.5  # Interval between checks of an unhealthy engine, so that a started server is found soon.


@dataclass(frozen=True, slots=True)
class RouterApp:
    """The parts of a router, without its listening sockets.

    Attributes:
        record: File for its decisions; None means that they are not recorded.
        threads: Threads that parse and hash large bodies.
        kv_events: Follows the engines' caches; None means that no engine publishes KV events.
        front_limits: Limits of the clients' port.
        discovery: Follows the lists of engines.
        peers: Exchanges requests with other routers; None means that there is none.
        shadow: Follows the router in use; None means that this router is no shadow.
    """

    shared: ExchangeContext
    admission: Admission
    clients: ClientConnections
    engine_admin: EngineAdmin
    exposition: Exposition
    statistics: FleetStatistics
    record: RecordFile[Entry] | None
    threads: PrepareThreads
    kv_events: KvEventsWatch | None
    front_limits: FrontLimits
    discovery: Discovery
    peers: PeerExchange | None = None
    shadow: ShadowObserver | None = None


def assemble(
    settings: RouteSettings,
    prompt_reader: PromptReader,
    faults: Faults,
    sink: SpanSink | None = None,
    peer_name: str | None = None,
    limits: ProcessLimits | None = None,
) -> RouterApp:
    """Make the parts of a router without starting any of them.

    Args:
        prompt_reader: Makes the hashes of a prompt's blocks.
        faults: Faults of the process's connections, for its metrics.
        sink: Receives the spans of requests; None means no traces.
        peer_name: Name of this router among others; None means that it has no peers.
        limits: Limits that this process shares with others at its port; None means that it is alone there.

    Raises:
        ConfigError: The settings contradict each other or name unusable resources.
    """
    front = settings.front
    router, record = _router(settings, prompt_reader)
    fleet = Fleet(router, prompt_reader.block_tokens, _health_rules(settings), time.monotonic_ns)
    access = Access.of(front.api_key, settings.access, shared=limits)
    shared = _exchange_context(settings, fleet, record, faults, sink, access)
    counts, queue = shared.counts, shared.queue
    collectors, watchers, kv_events = _observers(settings, fleet, queue)
    withheld, watch = _withheld(access, sink), _watch(settings.engines, fleet, queue, watchers)
    engine_admin = _engine_admin(settings, fleet, watch, withheld, prompt_reader.words)
    discovery = Discovery(_sources(settings.discovery), engine_admin.listed, engine_admin.tick)
    peers = _peers(settings, fleet, peer_name, prompt_reader.words, shared.decision_log)
    shadow = _shadow(settings, shared, record)
    collectors += [] if peers is None else [PeerCollector(peers)]
    collectors += [] if shadow is None else [shadow]
    exposition = Exposition(RouteCollector(fleet, counts, record, faults), *collectors, discovery)
    statistics, routes = _statistics(settings, fleet, counts), Routes(front.open_path)
    answers = own_answers(exposition.text, statistics.json, msgspec.json.encode(router_document(routes)))
    admission = Admission(fleet, shared.active, _needed(prompt_reader, router, record, peers), access, routes, answers)
    return RouterApp(
        shared=shared,
        admission=admission,
        clients=_clients(front, shared, admission, shadow),
        engine_admin=engine_admin,
        exposition=exposition,
        statistics=statistics,
        record=record,
        threads=prompt_reader.threads,
        kv_events=kv_events,
        front_limits=FrontLimits(front.max_connections, settings.access.max_connections_per_address),
        discovery=discovery,
        peers=peers,
        shadow=shadow,
    )


def _exchange_context(
    settings: RouteSettings,
    fleet: Fleet,
    record: RecordFile[Entry] | None,
    faults: Faults,
    sink: SpanSink | None,
    access: Access,
) -> ExchangeContext:
    return ExchangeContext(
        fleet=fleet,
        access=access,
        rules=_exchange_rules(settings),
        budget=RetryBudget(RetryRules(share=settings.reliability.retry_share), time.monotonic_ns()),
        counts=Counts(),
        decision_log=_decision_log(settings, fleet, record),
        active={},
        faults=faults,
        resumption=Resumption(fleet.models.context_of) if settings.reliability.resume_streams else None,
        queue=_request_queue(settings, fleet),
        traces=None if sink is None else RouterTraces(sink, fleet, _policy_text(settings), _fresh_ns(settings.engines)),
    )


def _needed(
    reader: PromptReader, router: Router, record: RecordFile[Entry] | None, peers: PeerExchange | None
) -> PromptReader:
    """Return a reader that names a prompt's blocks only if the policy, a record or another router reads the names."""
    is_read = router.needs.prompts or router.needs.hits or record is not None or peers is not None
    return reader if is_read else reader.without_names()


def _engine_admin(
    settings: RouteSettings, fleet: Fleet, watch: Watch, withheld: frozenset[bytes], words: str
) -> EngineAdmin:
    lists = EngineLists(KeepRules(keep_ns=int(settings.discovery.keep_vanished * 1e9)))
    takes_paths = settings.picker.ext_proc is None
    return EngineAdmin(fleet, watch, settings.engines, withheld, words, takes_paths=takes_paths, lists=lists)


def _sources(settings: DiscoverySettings) -> list[EngineSource]:
    """Return the lists of engines to follow; ConfigError if one cannot be followed."""
    sources: list[EngineSource] = []
    if settings.engine_file is not None:
        file = EngineFile(settings.engine_file, settings.labels)
        file.check()
        sources.append(file)
    if settings.engine_dns:
        sources.append(DnsNames(settings.engine_dns, settings.dns_interval))
    if settings.service_discovery:
        sources.append(Kubernetes(settings))
    return sources


def _policy_text(settings: RouteSettings) -> str:
    return settings.policy.route_score or settings.policy.route_policy


def _decision_log(settings: RouteSettings, fleet: Fleet, record: RecordFile[Entry] | None) -> DecisionLog:
    write = record.write if record else None
    return DecisionLog(_policy_text(settings), settings.record.remember, lambda: fleet.names, write, read_clocks)


def _statistics(settings: RouteSettings, fleet: Fleet, counts: Counts) -> FleetStatistics:
    policy, fresh_ns = _policy_text(settings), _fresh_ns(settings.engines)
    return FleetStatistics(fleet=fleet, counts=counts, policy=policy, fresh_ns=fresh_ns)


def _peers(
    settings: RouteSettings, fleet: Fleet, name: str | None, reading: str, decision_log: DecisionLog
) -> PeerExchange | None:
    if name is None:
        return None
    peers = PeerExchange(settings.peers, fleet, name, reading)
    decision_log.peer_ages_s = peers.ages_s
    return peers


def _shadow(
    settings: RouteSettings, shared: ExchangeContext, record: RecordFile[Entry] | None
) -> ShadowObserver | None:
    """Make what follows the router in use; None for a router that sends requests itself."""
    log = settings.shadow.access_log
    if not settings.shadow.shadow:
        return None
    assert log is not None, "checked by the settings"
    assert record is not None, "checked by the settings"
    return ShadowObserver(shared.fleet, shared.decision_log, record.write, LogFollower(log), shared.counts)


def _watch(engines: EngineSettings, fleet: Fleet, queue: RequestQueue | None, of_engines: list[EngineWatcher]) -> Watch:
    rules = WatchRules(
        health_path=engines.health_path,
        soon_s=min(_SOON_S, engines.health_interval),
        limit_s=_silence_rules(engines).limit_ns * 1e-9,
        timeout_s=engines.probe_timeout,
        metrics_s=engines.metrics_interval,
    )
    return Watch([HealthWatch(fleet, rules), MetricsWatch(fleet, rules, queue)], of_engines)


def _observers(
    settings: RouteSettings, fleet: Fleet, queue: RequestQueue | None
) -> tuple[list[Collector], list[EngineWatcher], KvEventsWatch | None]:
    """Make what watches single engines: collectors of its figures, watchers of each engine, and that of KV events."""
    engines = settings.engines
    policy = settings.policy.route_score or settings.policy.route_policy
    reports = SourceReports(fleet, policy, _fresh_ns(engines), _has_events(engines.kv_sources))
    collectors: list[Collector] = [reports] if queue is None else [reports, queue]
    watchers: list[EngineWatcher] = [reports]
    if not engines.kv_sources:
        return collectors, watchers, None
    kv_events = KvEventsWatch(fleet, engines.kv_sources, settings.routing.block_size, engines.kv_tiers)
    return [*collectors, KvFigures(kv_events)], [*watchers, kv_events], kv_events


def _record(settings: RecordSettings) -> tuple[RecordFile[Entry] | None, str]:
    """Open the record, if there is one, and return it with the fingerprint of its key."""
    if settings.record is None:
        return None, ""
    key = record_key(settings.record_key_file)
    file: RecordFile[Entry] = RecordFile(settings.record, partial(keyed_entry, key.secret), _resumed)
    return file, key.key_id


def _resumed(num_lost: int) -> list[Entry]:
    return [Gap(num_lost, read_clocks())]


def _router(settings: RouteSettings, prompt_reader: PromptReader) -> tuple[Router, RecordFile[Entry] | None]:
    """Make the router, and open the file for its decisions if there is one."""
    record, key_id = _record(settings.record)
    policy = PolicyText(settings.policy.route_policy, settings.policy.route_score, _inputs(settings.engines))
    bounds = RouterSettings(
        block_size=prompt_reader.block_tokens,
        seed=settings.routing.seed,
        index_bytes=settings.routing.index_memory_bytes,
        fresh_ns=_fresh_ns(settings.engines),
        compares_known=True,
        engine_block_size=settings.routing.block_size,
    )
    is_recorded, is_picker = record is not None, settings.picker.ext_proc is not None
    router = (
        Router(policy.make(), bounds)
        if record is None
        else RecordedRouter(policy, bounds, record.write, read_clocks(), key_id)
    )
    router.keeps_candidates = is_recorded or settings.record.remember > 0 or is_picker  # it names the next best
    return router, record


def _inputs(engines: EngineSettings) -> RouteInputs:
    """Return what `/metrics` of the engines can give to a policy."""
    figures = SCRAPED_FIGURES if engines.metrics_interval else frozenset[str]()
    remedy = "It comes with the engines' /metrics: set --metrics-interval above 0, or choose another policy."
    return RouteInputs(figures=figures, remedy=remedy)


def _fresh_ns(engines: EngineSettings) -> int:
    """Return the age up to which a figure counts: one read of `/metrics` may be late, and one may be missing."""
    return max(FRESH_NS, int((2 * engines.metrics_interval + engines.probe_timeout) * 1e9))


def _has_events(sources: KvSources) -> HasEvents:
    return lambda engine: sources.of(engine.address.name, "", engine.rank) is not None


def _health_rules(settings: RouteSettings) -> HealthRules:
    reliability = settings.reliability
    return HealthRules(
        stall_ns=int(reliability.stall_timeout * 1e9),
        slow_start_ns=int(reliability.slow_start * 1e9),
        breaker=BreakerRules(num_witnesses=reliability.breaker_failures),
        silence=_silence_rules(settings.engines),
    )


def _silence_rules(engines: EngineSettings) -> SilenceRules:
    return SilenceRules(check_ns=int(engines.health_interval * 1e9), hang_ns=int(engines.hang_timeout * 1e9))


def _request_queue(settings: RouteSettings, fleet: Fleet) -> RequestQueue | None:
    queue = settings.queue
    if not queue.has_queue:
        return None
    rules = RequestQueueRules(ttl_s=queue.queue_ttl, refusal_status=queue.queue_refusal, evicts=queue.evict_best_effort)
    saturation = EngineSaturation(queue.saturation, _fresh_ns(settings.engines))
    return RequestQueue(fleet, RouteQueue(queue.make_policy(), queue.rules), saturation, rules)


def _exchange_rules(settings: RouteSettings) -> ExchangeRules:
    reliability, front = settings.reliability, settings.front
    return ExchangeRules(
        max_retries=reliability.max_retries,
        retry_on=frozenset(reliability.retry_on),
        first_byte_s=reliability.first_byte_timeout,
        idle_s=reliability.idle_timeout,
        shows_route=front.route_headers,
        class_fields=settings.queue.class_fields,
    )


def _withheld(access: Access, sink: SpanSink | None) -> frozenset[bytes]:
    """Return the names of client headers that engines do not get."""
    nothing: frozenset[bytes] = frozenset()
    keys = KEY_HEADERS if access.keys else nothing
    cors = CORS_HEADERS if access.cors is not None else nothing
    return keys | cors | (TRACE_HEADERS if sink is not None else nothing)


def _clients(
    front: FrontSettings, shared: ExchangeContext, admission: Admission, shadow: ShadowObserver | None
) -> ClientConnections:
    proxy = Proxy(shared, admission) if shadow is None else ShadowProxy(shared, admission, shadow)
    limits = ClientLimits(max_body_bytes=front.max_body_bytes, body_s=front.body_timeout, write_s=front.write_timeout)
    return ClientConnections(proxy, limits, shared.faults, shared.access.cors)
