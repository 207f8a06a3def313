"""Spans of requests through the router: the request, its wait in the queue, and each attempt at an engine."""

from __future__ import annotations

import time
from collections.abc import Mapping

from moestro.core.views import Figure
from moestro.gateway.clients.http_headers import Incoming
from moestro.gateway.engines.fleet import Fleet, RoutedEngine
from moestro.routing.router import RouteDecision
from moestro.web.tracing import (
    TRACEPARENT,
    AttributeValue,
    SpanKind,
    SpanSink,
    TraceContext,
    TraceSpan,
    known,
    new_span_id,
    new_trace_id,
    parse_traceparent,
)

# Operations in the words of OpenTelemetry's conventions for generative AI.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}
_FIRST_ERROR = 500  # Lower statuses are the client's own errors, or none.
_FIGURES = ("num_waiting", "num_running", "kv_usage")


class RouterTraces:
    """Traces of one router.

    Args:
        sink: Receives the spans.
        policy: Text form of the route policy.
        fresh_ns: Age up to which a figure of an engine counts.
    """

    def __init__(self, sink: SpanSink, fleet: Fleet, policy: str, fresh_ns: int) -> None:
        self._sink = sink
        self._fleet = fleet
        self._policy = policy
        self._fresh_ns = fresh_ns

    def begin(self, incoming: Incoming) -> RequestSpans:
        """Begin the trace of a request, or continue the client's."""
        parent = parse_traceparent(incoming.head.named.get(TRACEPARENT.encode(), b""))
        trace_id = new_trace_id() if parent is None else parent.trace_id
        return RequestSpans(self, incoming, parent, trace_id, is_sampled=self._sink.samples(parent, trace_id))

    def end(self, trace_id: int, spans: list[TraceSpan]) -> None:
        """Send the spans of a request."""
        self._sink.put(trace_id, spans)

    def decision_attributes(self, engine: RoutedEngine, decision: RouteDecision) -> dict[str, AttributeValue | None]:
        """Return why an engine was chosen, and what the router knew of its queue."""
        table, row = self._fleet.router.table, engine.row
        figures: dict[str, AttributeValue | None] = {}
        for name in _FIGURES:
            figure: Figure | None = getattr(table, name, None)
            if figure is not None and figure.known(time.monotonic_ns(), self._fresh_ns)[row]:
                figures[f"moestro.engine.{name}"] = float(figure.values[row])
        return {
            "moestro.engine": engine.name,
            "moestro.route.policy": self._policy,
            "moestro.route.score": float(decision.score),
            "moestro.route.reason": decision.reason,
            "moestro.route.hit_tokens": decision.hit_tokens,
            "moestro.engine.num_in_flight": int(table.num_in_flight[row]),
            "server.address": engine.address.host,
            **figures,
        }


class RequestSpans:
    """The spans of one request, which are sent when it ends.

    Args:
        parent: The client's span; None without one.
        is_sampled: Whether spans are sent. The context goes on to engines in any case.
    """

    __slots__ = (
        "_attempt", "_begin_ns", "_begin_wall_ns", "_first_ns", "_incoming", "_is_sampled", "_parent", "_root_id",
        "_spans", "_trace_id", "_traces",
    )  # fmt: skip

    def __init__(
        self, traces: RouterTraces, incoming: Incoming, parent: TraceContext | None, trace_id: int, *, is_sampled: bool
    ) -> None:
        self._traces = traces
        self._incoming = incoming
        self._parent = parent
        self._trace_id = trace_id
        self._is_sampled = is_sampled
        self._root_id = new_span_id()
        self._begin_ns, self._begin_wall_ns = time.monotonic_ns(), time.time_ns()
        self._first_ns: int | None = None
        self._attempt: TraceSpan | None = None
        self._spans: list[TraceSpan] = []

    def attempt(self, engine: RoutedEngine, decision: RouteDecision, why: str, wait_ns: int) -> None:
        """Note a decision for the request.

        Args:
            why: Reason for another attempt; empty for the first.
            wait_ns: Wait in the router's queue before it.
        """
        now_ns = self._now_ns()
        self._end_attempt(now_ns, why)
        if wait_ns:
            self._spans.append(
                TraceSpan(name="queue", parent_id=self._root_id, begin_ns=now_ns - wait_ns, end_ns=now_ns)
            )
        attributes = self._traces.decision_attributes(engine, decision) if self._is_sampled else {}
        self._attempt = TraceSpan(
            name="attempt",
            kind=SpanKind.CLIENT,
            parent_id=self._root_id,
            begin_ns=now_ns,
            end_ns=now_ns,
            attributes=known({**attributes, "moestro.route.retry_cause": why or None}),
        )

    def traceparent(self) -> str:
        """Return the context for the engine of the current attempt."""
        span_id = self._root_id if self._attempt is None else self._attempt.span_id
        return TraceContext(self._trace_id, span_id, self._is_sampled).header()

    def answered(self, status: int) -> None:
        """Note the status of the current attempt's answer."""
        if self._attempt is not None:
            self._attempt.attributes["http.response.status_code"] = status
            if status >= _FIRST_ERROR:
                self._attempt.error = f"status {status}"

    def began(self) -> None:
        """Note the first byte of the answer."""
        self._first_ns = self._first_ns or self._now_ns()

    def end(self, status: int, model: str | None, tenant: str | None, usage: Mapping[bytes, int]) -> None:
        """Send the spans, because the request has ended."""
        if not self._is_sampled:
            return
        now_ns, head = self._now_ns(), self._incoming.head
        self._end_attempt(now_ns, "" if status < _FIRST_ERROR else f"status {status}")
        operation = _OPERATIONS.get(head.path)
        first_s = None if self._first_ns is None else (self._first_ns - self._begin_wall_ns) * 1e-9
        attributes: dict[str, AttributeValue | None] = {
            "http.request.method": head.method.decode("latin-1"),
            "url.path": head.path,
            "http.response.status_code": status,
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": model,
            "gen_ai.request.id": self._incoming.request_id,
            "gen_ai.usage.input_tokens": usage.get(b"prompt_tokens"),
            "gen_ai.usage.output_tokens": usage.get(b"completion_tokens"),
            "gen_ai.usage.cache_read.input_tokens": usage.get(b"cached_tokens"),
            "gen_ai.latency.time_to_first_token": first_s,
            "gen_ai.latency.e2e": (now_ns - self._begin_wall_ns) * 1e-9,
            "moestro.tenant": tenant,
        }
        root = TraceSpan(
            name=" ".join(part for part in (operation or head.path, model) if part),
            kind=SpanKind.SERVER,
            span_id=self._root_id,
            parent_id=None if self._parent is None else self._parent.span_id,
            begin_ns=self._begin_wall_ns,
            end_ns=now_ns,
            attributes=known(attributes),
            error=f"status {status}" if status >= _FIRST_ERROR else "",
        )
        self._traces.end(self._trace_id, [root, *self._spans])

    def _end_attempt(self, now_ns: int, error: str) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end_ns, attempt.error = now_ns, attempt.error or error
            self._spans.append(attempt)

    def _now_ns(self) -> int:
        """Return the time since 1970, by the monotonic clock since the request's arrival."""
        return self._begin_wall_ns + time.monotonic_ns() - self._begin_ns
