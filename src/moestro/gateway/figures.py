"""Figures of a running router: metrics for Prometheus, the figures of the page at `/`, log lines, and the banner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro import __version__
from moestro.core.clock import NS_PER_S
from moestro.core.load_figures import FIGURES, ROUTED_FIGURES, FigureUnit, LoadFigures
from moestro.core.views import Figure
from moestro.gateway.admin import EngineView
from moestro.gateway.engines.fleet import Counts, EngineCounts, Fleet, RoutedEngine
from moestro.gateway.engines.kv_subscriber import KvEventsWatch
from moestro.routing.decision_record import Entry
from moestro.routing.health import BreakerState, Condition
from moestro.routing.kv_events import KvFeed
from moestro.web.banner import Banner, curl_line
from moestro.web.errors import is_client_error, is_overload
from moestro.web.figures import Durations, EngineStatistics, LiveStatistics, buckets
from moestro.web.ports.faults import Faults
from moestro.web.record_file import RecordFile

_MAX_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSummary:
    """Facts about a router for its banner.

    Attributes:
        policy: name of the route policy.
        prompts: method of comparing prompts, in words.
        seconds: time since the start of the process, seconds.
        picker_url: address of the endpoint picker; empty without one.
        peers: addresses of other routers.
        num_workers: processes that share the port.
        followed: access log that a shadow follows; empty if this router is none.
    """

    engines: Sequence[EngineView]
    policy: str
    prompts: str
    url: str
    admin_url: str
    needs_key: bool
    seconds: float
    picker_url: str = ""
    peers: Sequence[str] = ()
    num_workers: int = 1
    followed: str = ""


def route_banner(summary: RouteSummary) -> Banner:
    """Return the banner of a router that accepts requests. Its example works once an engine is up."""
    models = [model for engine in summary.engines for model in engine.models]
    body = {"model": models[0] if models else "MODEL", "prompt": "Hello", "max_tokens": 16}
    rows = [
        *_engine_rows(summary.engines),
        ("policy", summary.policy),
        ("prompts", summary.prompts),
        ("ready in", f"{summary.seconds:.1f} s"),
        ("admin", f"{summary.admin_url}/admin/engines, /admin/explain/REQUEST_ID, /metrics"),
        ("serving", f"{summary.url} (OpenAI's API under /v1)"),
        ("page", f"{summary.url}/ (a chat, engines), {summary.admin_url}/ (decisions, drains)"),
    ]
    if summary.picker_url:
        rows.insert(-2, ("picker", f"{summary.picker_url} (Envoy's ext_proc)"))
    if summary.num_workers > 1:
        rows.insert(-2, ("workers", str(summary.num_workers)))
    if summary.peers:
        rows.insert(-2, ("peers", ", ".join(summary.peers[:_MAX_SHOWN])))
    if summary.followed:
        rows.insert(0, ("shadow", f"sends engines no request, and follows {summary.followed}"))
    return Banner(
        title=f"Moestro {__version__} route",
        rows=rows,
        example=curl_line(summary.url, body, needs_key=summary.needs_key, options="-i "),
    )


def _engine_rows(engines: Sequence[EngineView]) -> list[tuple[str, str]]:
    num_up = sum(engine.condition == "up" for engine in engines)
    rows = [("engines", f"{num_up} of {len(engines)} up")]
    for engine in engines[:_MAX_SHOWN]:
        what = ", ".join(engine.models) if engine.condition == "up" else f"{engine.condition}: {engine.cause}"
        rows.append(("", f"{engine.name}  {engine.url}  {what}"))
    if len(engines) > _MAX_SHOWN:
        rows.append(("", f"and {len(engines) - _MAX_SHOWN} more"))
    return rows


_BREAKER_NUMBERS = {BreakerState.CLOSED: 0, BreakerState.PROBING: 1, BreakerState.OPEN: 2}
_ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[EngineCounts], float]], ...] = (
    ("decisions", "Requests given to the engine, including retries.", lambda c: c.num_decisions),
    ("retried_away", "Requests that were retried on another engine.", lambda c: c.num_retried_away),
    (
        "unreachable",
        "Connections that failed, or broke before an answer.",
        lambda c: c.num_unreachable,
    ),
    ("broken_answers", "Answers that began and were not completed.", lambda c: c.num_broken),
    ("clients_left", "Requests whose client disconnected.", lambda c: c.num_left),
    ("loops", "Requests that came back to this router, which refused them with 508.", lambda c: c.num_loops),
    ("condition_changes", "Changes of the engine's condition.", lambda c: c.num_transitions),
    ("prompt_tokens", "Prompt tokens of answers that report usage.", lambda c: c.num_prompt_tokens),
    ("predicted_hit_tokens", "Prompt tokens predicted to be in the engine's cache.", lambda c: c.num_predicted_tokens),
    ("hit_tokens", "Prompt tokens that the engine reports as cached.", lambda c: c.num_hit_tokens),
    (
        "host_hit_tokens",
        "Prompt tokens that the engine reports as copied from host memory.",
        lambda c: c.num_host_hit_tokens,
    ),
)


class RouteCollector(Collector):
    """Exposes the router's counters as Prometheus metric families."""

    def __init__(self, fleet: Fleet, counts: Counts, record: RecordFile[Entry] | None, faults: Faults) -> None:
        self._fleet = fleet
        self._counts = counts
        self._record = record
        self._faults = faults

    def collect(self) -> Iterator[Metric]:
        """Yield all families with their current values."""
        engines = list(self._fleet)
        yield from self._of_engines(engines)
        yield from self._of_all(engines)

    def _of_engines(self, engines: list[RoutedEngine]) -> Iterator[Metric]:
        router = self._fleet.router
        for name, text, of_counts in _ENGINE_COUNTERS:
            family = CounterMetricFamily(f"moestro:route_{name}", text, labels=("engine",))
            for engine in engines:
                family.add_metric((engine.name,), of_counts(engine.counts))
            yield family
        yield _gauge("in_flight", "Requests on the engine.", ((e, router.num_in_flight_on(e.row)) for e in engines))
        listed = [engine for engine in engines if not engine.address.is_absent]
        text = "1 while the engine gets requests. An engine that no list has any more has no value."
        yield _gauge("engine_ready", text, ((e, self._fleet.is_ready(e)) for e in listed))
        text = "State of the breaker: 0 closed, 1 probing (one request at a time), 2 open."
        yield _gauge("breaker_state", text, ((e, _BREAKER_NUMBERS[self._fleet.breaker_state(e)]) for e in engines))
        condition = GaugeMetricFamily(
            "moestro:route_engine_condition", "1 for the engine's current condition.", labels=("engine", "condition")
        )
        answers = CounterMetricFamily("moestro:route_answers", "Answers of the engine.", labels=("engine", "status"))
        first = HistogramMetricFamily(
            "moestro:route_first_byte_seconds", "Arrival to the first byte of the answer's body.", labels=("engine",)
        )
        for engine in engines:
            for each in Condition:
                condition.add_metric((engine.name, each), engine.condition is each)
            for status, count in sorted(engine.counts.statuses.items()):
                answers.add_metric((engine.name, str(status)), count)
            first.add_metric((engine.name,), buckets(engine.counts.first_byte_s), engine.counts.first_byte_s.total)
        yield from (condition, answers, first)

    def _of_all(self, engines: list[RoutedEngine]) -> Iterator[Metric]:
        counts, router = self._counts, self._fleet.router
        yield CounterMetricFamily("moestro:route_requests", "Requests for engines.", value=counts.num_requests)
        for name, text, by_reason in (
            ("retries", "Retries, by cause.", counts.retries),
            ("streams_resumed", "Streams that went on elsewhere, by cause.", counts.resumed),
            (
                "streams_not_resumable",
                "Streams that could not go on elsewhere, by the request's field or another cause.",
                counts.not_resumable,
            ),
            ("refused", "Requests refused or cut off by the router, by the error's code.", counts.refusals),
        ):
            family = CounterMetricFamily(f"moestro:route_{name}", text, labels=("reason",))
            for reason, count in sorted(by_reason.items()):
                family.add_metric((reason,), count)
            yield family
        yield self._faults.family("moestro:route_connection_faults")
        text = "Retries that the budget did not allow."
        yield CounterMetricFamily("moestro:route_retries_denied", text, value=counts.num_retries_denied)
        text = "Maximum over mean of the requests in flight on engines in rotation; at least 1."
        yield GaugeMetricFamily("moestro:route_imbalance", text, value=imbalance(self._fleet, engines))
        text = "Lines that --record could not write."
        num_lost = 0 if self._record is None else self._record.num_lost
        yield CounterMetricFamily("moestro:route_record_lines_lost", text, value=num_lost)
        text = "Approximate memory of the prefix index."
        yield GaugeMetricFamily("moestro:route_index_bytes", text, value=router.index_bytes)
        decision = HistogramMetricFamily("moestro:route_decision_seconds", "Duration of a routing decision.")
        decision.add_metric((), buckets(counts.decision_s), counts.decision_s.total)
        yield decision


def imbalance(fleet: Fleet, engines: Iterable[RoutedEngine]) -> float:
    """Return the maximum over the mean of all routers' requests on engines in rotation; 1 without any request."""
    loads = [fleet.router.load_on(e.row) for e in engines if fleet.router.is_routable(e.row)]
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0


def _gauge(name: str, text: str, values: Iterable[tuple[RoutedEngine, float]]) -> Metric:
    family = GaugeMetricFamily(f"moestro:route_{name}", text, labels=("engine",))
    for engine, value in values:
        family.add_metric((engine.name,), value)
    return family


_WHOLE = {FigureUnit.REQUESTS, FigureUnit.TOKENS, FigureUnit.TIMES}


@dataclass(slots=True, kw_only=True)
class FleetStatistics:
    """Reads the figures from the router's own state.

    Attributes:
        policy: Text form of the route policy.
        fresh_ns: Age up to which an engine's figures count.
        clients_port, operators_port: Ports of both planes, once they are bound.
    """

    fleet: Fleet
    counts: Counts
    policy: str
    fresh_ns: int
    clients_port: int | None = None
    operators_port: int | None = None

    def read(self) -> LiveStatistics:
        """Return the present figures."""
        now_ns, engines = time.monotonic_ns(), list(self.fleet)
        return LiveStatistics(
            program="route",
            policy=self.policy,
            mode=None,
            time_s=now_ns / NS_PER_S,
            num_requests=self.fleet.router.num_in_flight,
            num_refused=self.counts.refusals.total(),
            num_client_errors=self.counts.refusals.num_client_errors + _answers(engines, is_client_error),
            num_overload=self.counts.refusals.num_overload + _answers(engines, is_overload),
            num_retried=self.counts.retries.total(),
            first_token_s=Durations.of(engine.counts.first_byte_s for engine in engines),
            gap_s=None,
            clients_port=self.clients_port,
            operators_port=self.operators_port,
            engines=[self._engine(engine, now_ns) for engine in engines],
        )

    def json(self) -> bytes:
        """Return the present figures as JSON."""
        return msgspec.json.encode(self.read())

    def _engine(self, engine: RoutedEngine, now_ns: int) -> EngineStatistics:
        counts = engine.counts
        return EngineStatistics(
            name=engine.name,
            condition=engine.condition,
            breaker=self.fleet.breaker_state(engine),
            num_in_flight=self.fleet.router.num_in_flight_on(engine.row),
            num_requests=counts.num_decisions,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_cached_tokens=counts.num_hit_tokens,
            num_generated_tokens=engine.totals.num_generated_tokens,
            prompt_token_s=engine.totals.prompt_token_s,
            load=msgspec.structs.replace(
                self._load(engine.row, now_ns),
                num_queried_tokens=engine.totals.num_queried_tokens,
                num_hit_tokens=engine.totals.num_hit_tokens,
                num_host_hit_tokens=engine.totals.num_host_hit_tokens,
            ),
        )

    def _load(self, row: int, now_ns: int) -> LoadFigures:
        """Return the engine's figures that are fresh enough for the route policy."""
        found: dict[str, float] = {}
        for name in ROUTED_FIGURES:
            column: Figure = getattr(self.fleet.router.table, name)
            if column.known(now_ns, self.fresh_ns)[row]:
                value = float(column.values[row])
                found[name] = int(value) if FIGURES[name].unit in _WHOLE else value
        return msgspec.convert(found, LoadFigures)


def _answers(engines: Iterable[RoutedEngine], is_counted: Callable[[int], bool]) -> int:
    """Return how many answers of engines have a status of some kind."""
    return sum(count for engine in engines for status, count in engine.counts.statuses.items() if is_counted(status))


_MAX_LINES = 16  # limit of engines shown; /metrics has all


@dataclass(frozen=True, slots=True)
class _RouteTotals:
    """Totals of one engine at one moment."""

    num_decisions: int
    num_prompt: int
    num_predicted: float
    num_hit: int


class RouteLines:
    """Makes the traffic lines of each interval."""

    def __init__(self, fleet: Fleet, counts: Counts) -> None:
        self._fleet = fleet
        self._counts = counts
        self._before: dict[RoutedEngine, _RouteTotals] = {}
        self._refusals_before = self._retries_before = 0

    def lines(self, seconds: float) -> list[str]:
        """Return a line for each engine with requests in the last `seconds`, and one for all engines."""
        router, found = self._fleet.router, []
        num_decisions = 0
        engines = list(self._fleet)
        for engine in engines:
            gained = self._gained(engine)
            num_in_flight = router.num_in_flight_on(engine.row)
            num_decisions += gained.num_decisions
            if gained.num_decisions or num_in_flight:
                found.append(_line(engine, gained, num_in_flight, seconds))
        refusals, retries = self._counts.refusals.total(), self._counts.retries.total()
        num_refused, self._refusals_before = refusals - self._refusals_before, refusals
        num_retried, self._retries_before = retries - self._retries_before, retries
        if not found and not num_refused:
            return []
        whole = (
            f"all: {router.num_in_flight} in flight, {num_decisions / seconds:.1f} requests/s, {num_retried} retried,"
            f" {num_refused} refused, imbalance {imbalance(self._fleet, engines):.2f},"
            f" {self._fleet.num_up} of {len(engines)} engines up"
        )
        return [*found[:_MAX_LINES], whole]

    def _gained(self, engine: RoutedEngine) -> _RouteTotals:
        c = engine.counts
        now = _RouteTotals(c.num_decisions, c.num_prompt_tokens, c.num_predicted_tokens, c.num_hit_tokens)
        old = self._before.get(engine, _RouteTotals(0, 0, 0.0, 0))
        self._before[engine] = now
        return _RouteTotals(
            now.num_decisions - old.num_decisions,
            now.num_prompt - old.num_prompt,
            now.num_predicted - old.num_predicted,
            now.num_hit - old.num_hit,
        )


def _line(engine: RoutedEngine, gained: _RouteTotals, num_in_flight: int, seconds: float) -> str:
    hits = ""
    if gained.num_prompt:
        predicted, actual = gained.num_predicted / gained.num_prompt, gained.num_hit / gained.num_prompt
        hits = f", prefix hits {actual:.0%} (predicted {predicted:.0%})"
    condition = "" if engine.condition == "up" else f", {engine.condition}"
    return f"{engine.name}: {num_in_flight} in flight, {gained.num_decisions / seconds:.1f} requests/s{hits}{condition}"


_COUNTERS: tuple[tuple[str, str, Callable[[KvFeed], float]], ...] = (
    ("batches", "Applied batches of KV events.", lambda f: f.counts.stream.batches),
    ("replayed", "Batches of KV events that a replay brought.", lambda f: f.counts.stream.replayed),
    ("gaps", "Gaps in the sequence of batches.", lambda f: f.counts.stream.gaps),
    ("losses", "Gaps that no replay filled, after which the index was dropped.", lambda f: f.counts.stream.lost),
    ("unanswered_replays", "Replays that were not answered in time.", lambda f: f.counts.stream.unanswered),
    ("restarts", "Restarts of the publishing process.", lambda f: f.counts.stream.restarts),
    ("stored_blocks", "Blocks that were stored and indexed.", lambda f: f.counts.blocks.stored),
    ("removed_blocks", "Blocks that were removed from all tiers.", lambda f: f.counts.blocks.removed),
    ("unknown_events", "Events of unknown types.", lambda f: f.counts.unknown),
    ("illegible_events", "Events or messages that could not be read.", lambda f: f.counts.illegible),
)


class KvFigures(Collector):
    """Exposes KV event figures: one metric family per figure, labelled by engine."""

    def __init__(self, watch: KvEventsWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """Yield all families with their current values."""
        running = list(self._watch)
        for name, text, of_feed in _COUNTERS:
            family = CounterMetricFamily(f"moestro:route_kv_{name}", text, labels=("engine",))
            for engine, subscription in running:
                family.add_metric((engine.name,), of_feed(subscription.feed))
            yield family
        left_out = CounterMetricFamily(
            "moestro:route_kv_left_out_blocks",
            "Blocks that were stored but not indexed, by cause.",
            labels=("engine", "cause"),
        )
        incomplete = CounterMetricFamily(
            "moestro:route_kv_incomplete",
            "Times that the known blocks ceased to be all blocks that the engine holds, by reason.",
            labels=("engine", "reason"),
        )
        blocks = _kv_gauge("blocks", "Blocks that the engine holds.")
        hosted = _kv_gauge("hosted_blocks", "Blocks that the engine holds in host memory alone.")
        is_complete = _kv_gauge("complete", "1 while the router knows all blocks that the engine holds.")
        lag = _kv_gauge("lag_seconds", "Delay of the newest batch from its time stamp to its arrival.")
        for engine, subscription in running:
            feed, named = subscription.feed, subscription.feed.counts.blocks
            for reason, number in feed.counts.incomplete.items():
                incomplete.add_metric((engine.name, reason), number)
            for cause in ("orphaned", "unnamed", "malformed", "other_size", "other_tier", "other_group", "over_bound"):
                left_out.add_metric((engine.name, cause), getattr(named, cause))
            blocks.add_metric((engine.name,), feed.num_blocks)
            hosted.add_metric((engine.name,), feed.num_hosted_blocks)
            is_complete.add_metric((engine.name,), feed.is_complete)
            lag.add_metric((engine.name,), subscription.lag_s)
        yield from (left_out, incomplete, blocks, hosted, is_complete, lag)


def _kv_gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"moestro:route_kv_{name}", text, labels=("engine",))
