"""Prometheus metrics of the router."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.gateway.engines.fleet import Fleet, RoutedEngine
from moestro.gateway.metrics import Counts, EngineCounts
from moestro.routing.health.breaker import BreakerState
from moestro.routing.health.engine_health import Condition
from moestro.routing.record.decision_record import Entry
from moestro.web.ports.faults import Faults
from moestro.web.prometheus import buckets
from moestro.web.record_file import RecordFile

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
