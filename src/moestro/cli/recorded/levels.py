"""What queues, preemptions, experts and moves of experts did to a request, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from moestro.core.clock import NS_PER_S
from moestro.core.scheduling_events import (
    BatchPassed,
    ExpertMove,
    ExpertsMoved,
    ExpertVisits,
    RequestEvent,
    SequenceAdmitted,
    SequencePreempted,
    SequenceQueued,
)
from moestro.routing.record.request_trace import EngineVisits, RequestTrace, ServerFacts

_MOST_MOVES = 8  # moves of one change that are named
_MOST_WORKERS = 16  # columns of the table of experts


def tell_levels(trace: RequestTrace) -> Iterator[str | Table]:
    """Describe what the server of a trace did after the choice of the engine. Nothing for the trace of a router."""
    if trace.server is not None:
        yield from _queue(trace, trace.server)
        yield from _experts(trace, trace.server)


# --- queue and preemption -------------------------------------------------------------------------------------------


def _queue(trace: RequestTrace, server: ServerFacts) -> Iterator[str]:
    priority = f", priority {trace.priority}" if trace.priority else ""
    yield f"[bold]queue[/bold] by {escape(server.order)}; class {trace.service_class}{priority}"
    if not trace.events:
        yield "  the engine has not looked at it yet" if trace.status is None else "  it was never admitted"
    engine = ""
    for each in trace.events:
        if each.engine != engine:
            engine = each.engine
            yield f"  on {escape(engine)}"
        yield f"  {_when(each.event.now_ns, trace)}  {escape(_event(each.event, trace.request_id))}"
    if trace.num_omitted_events:
        yield f"  and {trace.num_omitted_events:,} events more"
    if trace.events and not any(_is_preempted(each.event, trace.request_id) for each in trace.events):
        yield "  it was never preempted"


def _is_preempted(event: RequestEvent, request_id: str) -> bool:
    match event:
        case SequencePreempted():
            return event.request_id == request_id
        case BatchPassed():
            return request_id in event.passed
        case _:
            return False


def _when(now_ns: int, trace: RequestTrace) -> str:
    assert trace.arrival_ns is not None, "a trace with events has their clock"
    return f"{(now_ns - trace.arrival_ns) / NS_PER_S:+8.3f} s"


def _event(event: RequestEvent, request_id: str) -> str:
    match event:
        case SequenceQueued():
            return _queued(event)
        case SequenceAdmitted():
            return _admitted(event)
        case SequencePreempted():
            return _preempted(event, request_id)
        case BatchPassed():
            if request_id in event.passed:
                return f"yielded the device to {_some(event.by)}, and kept its KV: they are latency-sensitive"
            return f"entered the device ahead of {_some(event.passed)}, which are best-effort"


def _queued(event: SequenceQueued) -> str:
    again = "waits again" if event.was_preempted else "waits"
    where = f"{again} at place {event.place + 1} of {event.num_waiting}"
    if not event.ahead:
        return f"{where}, {_key(event.key)}"
    if event.key != event.ahead_key:
        return f"{where}, {_key(event.key)}; {event.ahead} before it has {_key(event.ahead_key)}"
    if event.key:
        return f"{where}, {_key(event.key)}; {event.ahead} before it has the same and came earlier"
    return f"{where}; {event.ahead} before it came earlier"


def _admitted(event: SequenceAdmitted) -> str:
    again = "" if event.is_first else " again"
    cached = f"; {event.num_cached:,} tokens need no computation" if event.num_cached else ""
    before = f"; admissions of others while it waited: {event.num_before:,}" if event.num_before else ""
    key = f"; by then {_key(event.key)}" if event.key else ""
    return f"admitted{again}{cached}{before}{key}"


def _preempted(event: SequencePreempted, request_id: str) -> str:
    if event.request_id != request_id:
        why = "because KV blocks had run out"
        if event.is_for_class:
            why = "because it is latency-sensitive"
        elif event.is_for_client:
            why = "because that one's client held more than its share"
        return f"preempted {event.request_id}, {why}"
    kept = "its KV goes to host memory if there is room" if event.keeps else "its KV is computed again"
    if event.by == request_id:
        return f"preempted itself: KV blocks had run out, and it comes last; {kept}"
    why = "needed KV blocks, which had run out"
    if event.is_for_class:
        why = "waits and is latency-sensitive"
    elif event.is_for_client:
        why = "waits, while this one's client holds more than its share"
    return f"preempted by {event.by}, which {why}; {event.num_computed:,} tokens were computed, and {kept}"


def _key(key: dict[str, float]) -> str:
    return ", ".join(f"{name}: {value:,.6g}" for name, value in key.items()) or "by arrival alone"


def _some(request_ids: Sequence[str]) -> str:
    return ", ".join(request_ids)


# --- experts --------------------------------------------------------------------------------------------------------


def _experts(trace: RequestTrace, server: ServerFacts) -> Iterator[str | Table]:
    yield "[bold]experts[/bold]"
    if not server.num_experts:
        yield "  none: the network is dense"
        return
    if not server.expert_workers:
        if server.is_paced:
            yield "  not computed: the devices are modelled"
        else:
            yield f"  its engine computed all of them: in mode {server.mode} each engine has all experts"
        return
    if not trace.visits:
        yield "  not counted: its engine tells of them when the request has left it"
    for visits in trace.visits:
        yield from _visited(visits, server)
    yield from _moved(trace, server)


def _visited(reported: EngineVisits, server: ServerFacts) -> Iterator[str | Table]:
    for visits in reported.visits:
        yield f"  (token, expert) pairs of {escape(reported.engine)} by table version {visits.version}:"
        yield _pairs(visits, server)


def _pairs(visits: ExpertVisits, server: ServerFacts) -> Table:
    """Lay out the pairs of one version; workers without any are left out."""
    totals = [sum(column) for column in zip(*visits.num_pairs, strict=True)]
    workers = [worker for worker, total in enumerate(totals) if total][:_MOST_WORKERS]
    table = Table("layers", *(escape(_name(worker, server)) for worker in workers), box=None, padding=(0, 2))
    begin = 0
    for end, pairs in zip(visits.ends, visits.num_pairs, strict=True):
        layers = str(begin) if end == begin + 1 else f"{begin} to {end - 1}"
        table.add_row(f"  {layers}", *(f"{pairs[worker]:,}" for worker in workers))
        begin = end
    return table


def _moved(trace: RequestTrace, server: ServerFacts) -> Iterator[str]:
    if not trace.moves:
        yield "  no expert moved meanwhile"
    for change in trace.moves:
        yield f"  {_when(change.now_ns, trace)}  {escape(_change(change, server))}"


def _change(change: ExpertsMoved, server: ServerFacts) -> str:
    dead = f"; dead: {', '.join(_name(worker, server) for worker in change.dead)}" if change.dead else ""
    if not change.num_moves:
        return f"table version {change.version}: the same copies{dead}"
    named = [_move(layer, move, server) for layer, move in change.moves[:_MOST_MOVES]]
    more = change.num_moves - len(named)
    rest = f"; and {more:,} more in layers {', '.join(map(str, change.layers))}" if more else ""
    return f"table version {change.version}: {'; '.join(named)}{rest}{dead}"


def _move(layer: int, move: ExpertMove, server: ServerFacts) -> str:
    what = f"expert {move.expert} of layer {layer}"
    if move.source < 0:
        return f"{what} got a copy on {_name(move.target, server)}"
    if move.target < 0:
        return f"{what} lost its copy on {_name(move.source, server)}"
    return f"{what} from {_name(move.source, server)} to {_name(move.target, server)}"


def _name(worker: int, server: ServerFacts) -> str:
    names = server.expert_workers
    return names[worker] if worker < len(names) else f"worker {worker}"
