"""`moestro explain`: finds and prints the trace of a request, of a running router or server or of a record.

`--perfetto` writes it as a trace that Perfetto opens (Chrome's trace event format, JSON).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moestro.cli.admin_port import ask_admin
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
from moestro.errors import ConfigError, MoestroError
from moestro.files.text_files import open_utf8
from moestro.routing.decision_log import Attempt, EngineVisits, RequestTrace, ServerFacts
from moestro.routing.decision_record import decode_entry, is_entry

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


_TIMEOUT_S = 10.0
_LEFT_STATUS = 499


class _AdminError(msgspec.Struct):
    message: str


class _AdminErrorBody(msgspec.Struct):
    error: _AdminError


def find_trace(request_id: str, *, admin_url: str, admin_api_key: str | None, record: Path | None) -> RequestTrace:
    """Find the trace of a request.

    Args:
        request_id: id of the request, or of its answer, of which the first choice is meant.
        admin_url: URL of the operators' port of a running router or server.
        record: file of `--record` to search instead; None means the running one.

    Raises:
        ConfigError: the request is unknown, or the file cannot be read.
    """
    if record is not None:
        return _from_file(request_id, record)
    return _from_router(request_id, admin_url.rstrip("/"), admin_api_key)


def tell(trace: RequestTrace, console: Console, *, as_json: bool = False) -> None:
    """Print the engines, the queue, preemptions, experts and the outcome of one request, or its trace as JSON."""
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(trace)).decode()
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    for line in _trace_lines(trace):
        console.print(line, highlight=False, soft_wrap=isinstance(line, str))


def _from_file(request_id: str, record: Path) -> RequestTrace:
    wanted, ids = request_id.encode(), {request_id, f"{request_id}-0"}
    found: RequestTrace | None = None
    try:
        with open_utf8(record) as lines:
            for number, line in enumerate(lines, 1):
                if wanted in line:
                    try:
                        entry = decode_entry(line) if is_entry(line) else None
                    except msgspec.MsgspecError as error:
                        raise ConfigError(f"{record}:{number} is not an entry of a record: {error}") from None
                    if isinstance(entry, RequestTrace) and entry.request_id in ids:
                        found = entry
    except OSError as error:
        raise ConfigError(f"--record {record} cannot be read: {error.strerror}") from None
    if found is None:
        raise ConfigError(f"request {request_id} is not in {record}")
    return found


def _from_router(request_id: str, admin_url: str, key: str | None) -> RequestTrace:
    url = f"{admin_url}/admin/explain/{quote(request_id, safe='')}"
    try:
        status, body = ask_admin(url, key, _TIMEOUT_S)
    except (OSError, HTTPException, ValueError) as error:
        raise MoestroError(
            f"nothing answers at {admin_url} ({error or 'timed out'}): give the --admin-url of a router or server with"
            " --admin-port, or --record FILE"
        ) from None
    try:
        if status == 200:
            return msgspec.json.decode(body, type=RequestTrace)
        text = msgspec.json.decode(body, type=_AdminErrorBody).error.message
        if status != HTTPStatus.NOT_FOUND or text.startswith("Request "):  # Others do not know the path.
            raise ConfigError(text)
    except msgspec.MsgspecError:
        pass
    raise MoestroError(
        f"{admin_url} is not the operators' port of Moestro (status {status}): give that of --admin-port"
    )


def _trace_lines(story: RequestTrace) -> Iterator[str | Table]:
    when = datetime.fromtimestamp(story.time).astimezone().isoformat(sep=" ", timespec="milliseconds")
    tokens = f"{story.prompt_tokens:,} prompt tokens"
    tenant = f"  tenant {escape(story.tenant)}" if story.tenant else ""
    yield f"[bold]{escape(story.request_id)}[/bold]  {when}  {tokens}  {escape(story.policy)}{tenant}"
    for attempt in story.attempts:
        yield from _attempt_lines(attempt)
    yield from tell_levels(story)
    if story.not_resumable:
        yield f"its stream could not go on elsewhere: {escape(story.not_resumable)}"
    if story.served_by:
        yield f"a shadow chose this: the router in use sent the request to [bold]{escape(story.served_by)}[/bold]"
    yield _outcome(story)


def _attempt_lines(attempt: Attempt) -> Iterator[str | Table]:
    because = f" ({escape(attempt.because)})" if attempt.because else ""
    wait = f", after {attempt.wait_s:.3f} s in the router's queue" if attempt.wait_s else ""
    yield f"to [bold]{escape(attempt.engine)}[/bold]{because}{wait}: {escape(attempt.reason)}"
    has_hosted = any(each.host_tokens for each in attempt.candidates)
    has_speeds = any((each.speed, each.decode_speed) != (1, 1) for each in attempt.candidates)
    more = (*(["on the host"] if has_hosted else ()), *(["prompt speed", "answer speed"] if has_speeds else ()))
    table = Table("engine", "score", "hit tokens", *more, box=None, padding=(0, 2))
    for candidate in attempt.candidates:
        chosen = "[bold]*[/bold] " if candidate.engine == attempt.engine else "  "
        score = "" if candidate.score is None else f"{candidate.score:,.6g}"
        row = [chosen + escape(candidate.engine), score, f"{candidate.hit_tokens:,}"]
        row += [f"{candidate.host_tokens:,}"] if has_hosted else []
        row += [f"{candidate.speed:.2f}", f"{candidate.decode_speed:.2f}"] if has_speeds else []
        table.add_row(*row)
    yield table
    if attempt.num_candidates > len(attempt.candidates):
        yield f"  and {attempt.num_candidates - len(attempt.candidates)} more with higher scores"
    for figure, engines in attempt.not_compared.items():
        yield f"  no engine was compared by {figure}, which {escape(', '.join(engines))} had not reported"
    if attempt.peer_ages_s:
        ages = ", ".join(f"{escape(name)} {age_s * 1e3:.0f} ms" for name, age_s in attempt.peer_ages_s.items())
        yield f"  age of what was known of other routers: {ages}"
    if attempt.regret is not None:
        than = "more" if attempt.regret <= 0 else "less: the score alone did not decide"
        yield f"  the runner-up would have scored {abs(attempt.regret):,.6g} {than}"


def _outcome(story: RequestTrace) -> str:
    if story.status is None:
        return "still running"
    end = "the client left" if story.status == _LEFT_STATUS else f"answered {story.status}"
    usage = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in story.usage.items())
    return f"{end} after {story.seconds or 0:.3f} s" + (f"; {usage}" if usage else "")


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
