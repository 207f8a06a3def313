"""The record of a server: its router's decisions, its engines' events, and its answered requests, in one file."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import msgspec

from moestro.config.serve_settings import ServeSettings
from moestro.core.clock import NS_PER_S
from moestro.core.hashing import keyed_names
from moestro.core.load_figures import FIGURES, ROUTED_FIGURES
from moestro.core.request import ModelInfo
from moestro.core.scheduling_events import SequenceAdmitted, SequencePreempted
from moestro.routing.decision_log import Attempt, RequestTrace, ServerFacts
from moestro.routing.decision_record import Entry, Gap, PolicyText, RecordedRouter, keyed_entry
from moestro.routing.policy_contract import RouteInputs
from moestro.routing.router import Router
from moestro.routing.settings import RouterSettings
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.engine_reports import RequestLog
from moestro.server.experts.expert_signals import WATCH_S, ReadTable, TableWatch
from moestro.web.record_file import RecordFile, read_clocks, record_key
from moestro.web.tracing import (
    AttributeValue,
    SpanKind,
    SpanSink,
    TraceSpan,
    known,
    new_span_id,
    new_trace_id,
    parse_traceparent,
)
from moestro.workload.traces.request_record import Header, RecordedRequest

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


Recorded = Header | RecordedRequest | Entry


class Recording:
    """What is noted of requests: in a file with `--record`, in memory with `--admin-port` too, and as spans.

    Args:
        settings: settings of the server.
        sink: receiver of spans; None means that there are none.

    Attributes:
        log: joins what all levels do with each request; None means that nothing is noted.

    Raises:
        ConfigError: the file cannot be opened for writing.
    """

    def __init__(self, settings: ServeSettings, sink: SpanSink | None = None) -> None:
        self._settings = settings
        server, routing = settings.server, settings.routing
        self._file: RecordFile[Recorded] | None = None
        self._header: Header | None = None
        self._key_id = ""
        if server.record is not None:
            key = record_key(server.record_key_file)
            self._key_id = key.key_id
            self._file = RecordFile(
                server.record, partial(_keyed, key.secret), self._resumed, int(server.record_max_size * 2**30)
            )
        policy = routing.route_score or routing.route_policy
        self.log: RequestLog | None = None
        if self._file is not None or server.admin_port is not None or sink is not None:
            write = None if self._file is None else self._file.write
            on_trace = None if sink is None else span_writer(sink, server.served_model_name[0])
            self.log = RequestLog(policy, settings.num_engines, write, on_trace)

    @property
    def num_lost(self) -> int:
        """Number of lines that could not be written."""
        return 0 if self._file is None else self._file.num_lost

    def make_router(self, bounds: RouterSettings) -> Router:
        """Make the router, whose calls and decisions are recorded if there is a file."""
        routing = self._settings.routing
        policy = PolicyText(routing.route_policy, routing.route_score, route_inputs(self._settings))
        if self._file is not None:
            return RecordedRouter(policy, bounds, self._file.write, read_clocks(), self._key_id)
        router = Router(policy.make(), bounds)
        router.keeps_candidates = self.log is not None
        return router

    @contextlib.asynccontextmanager
    async def running(
        self, engines: EngineClient, info: ModelInfo, workers: Sequence[str], read_table: ReadTable | None
    ) -> AsyncIterator[None]:
        """Record the requests that are answered inside the block.

        Args:
            engines: Client of the engines.
            info: The loaded model.
            workers: Names of the workers over which experts are spread; empty where each engine has all.
            read_table: Reads the expert table of the group; None means that no experts move.
        """
        if self.log is None:
            yield
            return
        self.log.describe(server_facts(self._settings, info, workers))
        watch = None if read_table is None else TableWatch(read_table, self.log.moved)
        self.log.look = _looker(watch)
        async with contextlib.AsyncExitStack() as stack:
            if self._file is not None:
                self._header = self._make_header(info)
                self._file.write(self._header)
                engines.on_answered = self._file.write
                await stack.enter_async_context(self._file.writing())
            stack.callback(self.log.close)
            looking = asyncio.create_task(_look_forever(self.log))
            stack.callback(looking.cancel)
            yield

    def _resumed(self, num_lost: int) -> list[Recorded]:
        """Return what follows a gap: its mark, and the header, which may be among the lost lines."""
        clocks = read_clocks()
        head = [] if self._header is None else [msgspec.structs.replace(self._header, clocks=clocks)]
        return [Gap(num_lost, clocks), *head]

    def _make_header(self, info: ModelInfo) -> Header:
        settings = self._settings
        return Header(
            model=settings.server.served_model_name[0],
            device=info.device,
            pace_dilation=info.pace_dilation,
            num_engines=settings.num_engines,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            kv_offloading_size=settings.model.kv_offloading_size,
            limits=asdict(settings.scheduler),
            stepping=asdict(settings.stepping),
            route_policy=settings.routing.route_score or settings.routing.route_policy,
            clocks=read_clocks(),
            key_id=self._key_id,
        )


def _keyed(secret: bytes, line: Recorded) -> Recorded:
    """Return the form of a line that is written: block hashes are keyed."""
    match line:
        case RecordedRequest():
            return msgspec.structs.replace(line, block_hashes=keyed_names(secret, line.block_hashes))
        case Header():
            return line
        case _:
            return keyed_entry(secret, line)


def route_inputs(settings: ServeSettings) -> RouteInputs:
    """Return what the engines of a server report to its router: figures of experts only where engines share them."""
    has_group = settings.stepping.mode in ("ep", "async")
    figures = frozenset(name for name in ROUTED_FIGURES if has_group or FIGURES[name].is_from_rank)
    return RouteInputs(figures=figures, remedy="Engines that share experts report it: use --mode ep or async.")


def _looker(watch: TableWatch | None) -> Callable[[], None]:
    return (lambda: None) if watch is None else (lambda: watch.look(time.monotonic_ns()))


async def _look_forever(log: RequestLog) -> None:
    while True:
        log.look()
        await asyncio.sleep(WATCH_S)


def server_facts(settings: ServeSettings, info: ModelInfo, workers: Sequence[str]) -> ServerFacts:
    """Return what traces have to know of a server. `workers`: as in `Recording.running`."""
    return ServerFacts(
        mode=settings.stepping.mode,
        order=settings.scheduler.scheduling_policy,
        evict=settings.scheduler.evict_policy,
        num_experts=info.num_experts,
        expert_workers=tuple(workers) if info.num_experts else (),
        is_paced=settings.paced is not None,
    )
