"""Spans of a request in `moestro serve`, made of its trace when it has ended: queue, prefill, decode, preemptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from moestro.core.clock import NS_PER_S
from moestro.core.scheduling_events import SequenceAdmitted, SequencePreempted
from moestro.routing.record.request_trace import Attempt, RequestTrace
from moestro.web.tracing.spans import (
    AttributeValue,
    SpanKind,
    SpanSink,
    TraceSpan,
    known,
    new_span_id,
    new_trace_id,
    parse_traceparent,
)

_FIRST_ERROR = 500


class _Stretch(NamedTuple):
    """A part of the request's time in an engine, on the monotonic clock."""

    name: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue | None]


def span_writer(sink: SpanSink, model: str) -> Callable[[RequestTrace], None]:
    """Return what sends the spans of each request that has ended.

    Args:
        model: Name of the served model.
    """

    def write(trace: RequestTrace) -> None:
        parent = parse_traceparent(trace.traceparent)
        trace_id = new_trace_id() if parent is None else parent.trace_id
        if sink.samples(parent, trace_id):
            sink.put(trace_id, _spans_of(trace, model, None if parent is None else parent.span_id))

    return write


def _spans_of(trace: RequestTrace, model: str, parent_id: int | None) -> list[TraceSpan]:
    begun_ns = trace.arrival_ns or 0
    wall_ns = int(trace.time * NS_PER_S) - begun_ns  # What the wall clock is ahead of the monotonic one.
    ended_ns = begun_ns + int((trace.seconds or 0.0) * NS_PER_S)
    stretches = list(_stretches(trace, begun_ns, ended_ns))
    status = trace.status or 0
    root = TraceSpan(
        name="llm_request",
        kind=SpanKind.SERVER,
        span_id=new_span_id(),
        parent_id=parent_id,
        begin_ns=wall_ns + begun_ns,
        end_ns=wall_ns + ended_ns,
        attributes=known(_attributes(trace, model, stretches)),
        error=f"status {status}" if status >= _FIRST_ERROR else "",
    )
    return [
        root,
        *(
            TraceSpan(
                name=each.name,
                parent_id=root.span_id,
                begin_ns=wall_ns + each.begin_ns,
                end_ns=wall_ns + each.end_ns,
                attributes=known(each.attributes),
            )
            for each in stretches
        ),
    ]


def _attributes(trace: RequestTrace, model: str, stretches: list[_Stretch]) -> dict[str, AttributeValue | None]:
    seconds: dict[str, float] = {}
    for each in stretches:
        seconds[each.name] = seconds.get(each.name, 0.0) + (each.end_ns - each.begin_ns) / NS_PER_S
    first_ns = trace.first_token_ns
    last: Attempt | None = trace.attempts[-1] if trace.attempts else None
    return {
        "gen_ai.request.model": model,
        "gen_ai.request.id": trace.request_id,
        "gen_ai.usage.input_tokens": trace.usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": trace.usage.get("completion_tokens"),
        "gen_ai.latency.time_in_queue": seconds.get("queue"),
        "gen_ai.latency.time_to_first_token": (first_ns - (trace.arrival_ns or 0)) / NS_PER_S if first_ns else None,
        "gen_ai.latency.time_in_model_prefill": seconds.get("prefill"),
        "gen_ai.latency.time_in_model_decode": seconds.get("decode"),
        "gen_ai.latency.e2e": trace.seconds,
        "http.response.status_code": trace.status,
        "moestro.num_preemptions": sum(each.name == "preempted" for each in stretches),
        "moestro.engine": None if last is None else last.engine,
        "moestro.route.policy": trace.policy,
        "moestro.route.score": None if last is None else last.score,
        "moestro.route.reason": None if last is None else last.reason,
        "moestro.route.hit_tokens": None if last is None else last.hit_tokens,
        "moestro.service_class": trace.service_class or None,
        "moestro.tenant": trace.tenant or None,
    }


def _stretches(trace: RequestTrace, begun_ns: int, ended_ns: int) -> Iterator[_Stretch]:
    """Yield queue, prefill and decode, which follow each other, and preemptions, which lie inside of the latter two."""
    admissions = [each.event for each in trace.events if isinstance(each.event, SequenceAdmitted)]
    first = next((event for event in admissions if event.is_first), None)
    admitted_ns = ended_ns if first is None else first.now_ns
    first_token_ns = trace.first_token_ns or ended_ns
    yield _Stretch("queue", begun_ns, admitted_ns, {})
    if first is not None:
        cached = {"moestro.cached_tokens": first.num_cached}
        yield _Stretch("prefill", admitted_ns, max(admitted_ns, first_token_ns), dict(cached))
    if trace.first_token_ns:
        tokens = {"gen_ai.usage.output_tokens": trace.usage.get("completion_tokens")}
        yield _Stretch("decode", first_token_ns, max(first_token_ns, ended_ns), dict(tokens))
    for each in trace.events:
        event = each.event
        if isinstance(event, SequencePreempted) and event.request_id == trace.request_id:
            back_ns = next((admission.now_ns for admission in admissions if admission.now_ns >= event.now_ns), ended_ns)
            yield _Stretch("preempted", event.now_ns, back_ns, _preemption(event, each.engine))


def _preemption(event: SequencePreempted, engine: str) -> dict[str, AttributeValue | None]:
    cause = "class" if event.is_for_class else "client" if event.is_for_client else "kv"
    return {
        "moestro.engine": engine,
        "moestro.preemption.by": event.by,
        "moestro.preemption.cause": cause,
        "moestro.preemption.computed_tokens": event.num_computed,
        "moestro.preemption.keeps_kv": event.keeps,
    }
