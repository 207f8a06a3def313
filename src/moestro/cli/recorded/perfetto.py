"""A request's way through all levels as a trace that Perfetto opens (Chrome's trace event format, JSON)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from moestro.core.scheduling_events import BatchPassed, SequenceAdmitted, SequencePreempted, SequenceQueued
from moestro.errors import MoestroError
from moestro.routing.decision_log import RequestTrace

_PROCESS = 1
_REQUEST, _ROUTING, _EXPERTS, _FIRST_ENGINE = range(1, 5)  # Tracks, in the order in which they are shown.
_NS_PER_US = 1_000

Event = dict[str, object]


def write_perfetto(trace: RequestTrace, file: Path) -> None:
    """Write `trace` to `file`, for https://ui.perfetto.dev.

    Times are microseconds since the request's arrival. Decisions of routers have no time of their own in a record: the
    first stands at the arrival, and a further one at the first event on its engine, or at the request's end.

    Raises:
        MoestroError: The file cannot be written.
    """
    document = {"traceEvents": list(events(trace)), "otherData": {"request_id": trace.request_id}}
    try:
        file.write_bytes(msgspec.json.encode(document))
    except OSError as error:
        raise MoestroError(f"--perfetto {file} cannot be written: {error.strerror}") from None


def events(trace: RequestTrace) -> Iterator[Event]:
    """Yield the events of `trace`: a track for the request, one for routing, one for each engine, one for experts."""
    engines = {name: _FIRST_ENGINE + place for place, name in enumerate(_engines(trace))}
    tracks = {_REQUEST: "request", _ROUTING: "1 route", _EXPERTS: "3, 4 experts"}
    tracks |= {track: f"2 {name}" for name, track in engines.items()}
    yield _named("process_name", 0, trace.request_id)
    for track, name in tracks.items():
        yield _named("thread_name", track, name)
    yield _span("request", _REQUEST, 0, _end_us(trace), _facts(trace))
    yield from _decisions(trace)
    for name, track in engines.items():
        yield from _on_engine(trace, name, track)
    yield from _on_experts(trace)


def _engines(trace: RequestTrace) -> list[str]:
    return list(dict.fromkeys(each.engine for each in trace.events))


def _facts(trace: RequestTrace) -> Event:
    facts: Event = {"policy": trace.policy, "prompt_tokens": trace.prompt_tokens, "status": trace.status, **trace.usage}
    if trace.server is not None:
        facts |= {"mode": trace.server.mode, "order": trace.server.order}
        facts |= {"service_class": trace.service_class, "priority": trace.priority}
    return facts


def _decisions(trace: RequestTrace) -> Iterator[Event]:
    for place, attempt in enumerate(trace.attempts):
        first_event = (_us(each.event.now_ns, trace) for each in trace.events if each.engine == attempt.engine)
        when = next(first_event, _end_us(trace)) if place else 0.0
        facts: Event = {
            "reason": attempt.reason,
            "because": attempt.because,
            "score": attempt.score,
            "hit_tokens": attempt.hit_tokens,
            "candidates": {each.engine: each.score for each in attempt.candidates},
        }
        yield _instant(f"to {attempt.engine}", _ROUTING, when, facts)


def _on_engine(trace: RequestTrace, engine: str, track: int) -> Iterator[Event]:
    """Yield spans in which the request waited and ran on one engine, and what happened to it there."""
    state: tuple[str, float, Event] | None = None
    for each in trace.events:
        if each.engine != engine:
            continue
        event, when = each.event, _us(each.event.now_ns, trace)
        match event:
            case SequenceQueued():
                following: tuple[str, float, Event] | None = ("waits", when, msgspec.to_builtins(event))
            case SequenceAdmitted():
                following = ("runs", when, msgspec.to_builtins(event))
            case SequencePreempted() if event.request_id == trace.request_id:
                yield _instant(f"preempted by {event.by}", track, when, msgspec.to_builtins(event))
                following = ("waits", when, {})
            case SequencePreempted():
                yield _instant(f"preempts {event.request_id}", track, when, msgspec.to_builtins(event))
                continue
            case BatchPassed():
                what = "yields the device" if trace.request_id in event.passed else "passes a batch"
                yield _instant(what, track, when, msgspec.to_builtins(event))
                continue
        if state is not None:
            yield _span(state[0], track, state[1], when, state[2])
        state = following
    if state is not None:
        is_last = engine == trace.events[-1].engine
        end = _end_us(trace) if is_last else max(_us(e.event.now_ns, trace) for e in trace.events if e.engine == engine)
        yield _span(state[0], track, state[1], end, state[2])


def _on_experts(trace: RequestTrace) -> Iterator[Event]:
    for visits in trace.visits:
        yield _span(f"experts by {visits.engine}", _EXPERTS, 0, _end_us(trace), msgspec.to_builtins(visits))
    for change in trace.moves:
        what = f"experts move: table version {change.version}"
        yield _instant(what, _EXPERTS, _us(change.now_ns, trace), msgspec.to_builtins(change))


def _us(now_ns: int, trace: RequestTrace) -> float:
    assert trace.arrival_ns is not None, "a trace with events has their clock"
    return (now_ns - trace.arrival_ns) / _NS_PER_US


def _end_us(trace: RequestTrace) -> float:
    """Return the end of the request, or of what is known of one that still runs."""
    if trace.seconds is not None:
        return trace.seconds * 1e6
    return max((_us(each.event.now_ns, trace) for each in trace.events), default=0.0)


def _named(what: str, track: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": track, "args": {"name": name}}


def _span(name: str, track: int, begin_us: float, end_us: float, facts: Event) -> Event:
    times: Event = {"ts": begin_us, "dur": max(0.0, end_us - begin_us)}
    return {"ph": "X", "name": name, "pid": _PROCESS, "tid": track, **times, "args": facts}


def _instant(name: str, track: int, when_us: float, facts: Event) -> Event:
    return {"ph": "i", "s": "t", "name": name, "pid": _PROCESS, "tid": track, "ts": when_us, "args": facts}
