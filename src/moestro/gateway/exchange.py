"""Exchange: sends one request to an engine, retries on another if it fails before answering, and relays the answer."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import msgspec

from moestro.core.request import Request, ServiceClass
from moestro.errors import RequestError
from moestro.gateway.clients.downstream import ClientConnection
from moestro.gateway.clients.http_headers import AnswerHead, Incoming, header_text
from moestro.gateway.clients.paths import CLASS_PATHS
from moestro.gateway.engines.fleet import Counts, Fleet, RouteBounds, RoutedEngine
from moestro.gateway.engines.health_checks import (
    FIRST_ERROR,
    AnswerTail,
    begins_with_error,
    blame,
    cached_shares,
    count_hits,
    judge_error_event,
    judge_status,
    judge_success,
    origin_of,
)
from moestro.gateway.engines.upstream import EngineConnection, usage_in
from moestro.gateway.request_queue import RequestQueue
from moestro.gateway.resume.request import ResumableRequest
from moestro.gateway.resume.stream import ResumableStream, Resumption, continued
from moestro.gateway.tracing import RouterTraces
from moestro.routing.decision_log import DecisionLog
from moestro.routing.health import Origin, RetryBudget
from moestro.routing.router import RouteDecision
from moestro.web.access import Access
from moestro.web.errors import GenerationError, HttpError, InternalError, error_body
from moestro.web.ports.faults import Faults
from moestro.wire import load_report

logger = logging.getLogger(__name__)

_STALE_NS = 1_000_000_000  # A kept connection that its engine has closed fails within this time.
_MAX_RESUMED = 3  # Engines that one stream may lose after its first byte, as in `moestro serve`.
_MAX_LOST = 1  # Engines that one request may lose: a request that loses two may be the cause.
# Time between the departure of a request and its arrival in the engine's inbox, at most, on a network at rest. Requests
# that left within it before a report count as not contained in it, so that a burst is not sent to one engine.
_TRANSIT_NS = 5_000_000
_LEFT_STATUS = 499  # nginx' status for a client that disconnected.

# Stages of an exchange: no engine has the request; a connection is being made; the request is sent and no byte of a
# body has arrived; bytes are on their way to the client; the exchange is over. Plain numbers, because each request
# compares them a dozen times. A table of stages and events takes 127 more lines, and 6 % more of an exchange's own CPU
# time in a stream of 64 pieces.
_CHOOSING, _CONNECTING, _WAITING, _ANSWERING, _OVER = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRules:
    """Limits of an exchange.

    Attributes:
        max_retries: Number of times that a request may go to another engine after a failure status.
        retry_on: Statuses after which a request goes to another engine.
        first_byte_s: Time until the answer's body begins, seconds.
        idle_s: Time between two bytes of the body, seconds.
        shows_route: Whether answers name their engine and the reason for the choice.
        class_fields: Fields of a body by which engines know the class; empty means that bodies stay as they are.
    """

    max_retries: int = 3
    retry_on: frozenset[int] = frozenset({429, 502, 503, 504, 529})
    first_byte_s: float = 600.0
    idle_s: float = 300.0
    shows_route: bool = True
    class_fields: Mapping[ServiceClass, Mapping[str, bytes | None]] = field(default_factory=dict)


class RunningRequest(Protocol):
    """A request between its admission and its end, at any port.

    Attributes:
        deadline_s: Time on `time.monotonic` at which the request expires unless the deadline is moved.
    """

    deadline_s: float

    def refuse(self, error: RequestError) -> None:
        """End the request with an error of the router."""

    def fail(self) -> None:
        """End the request because of an unexpected exception. Called from the exception's handler."""

    def expire(self) -> None:
        """End the request after its deadline."""

    def engine_hangs(self) -> None:
        """Move the request to another engine if possible, because its engine has stopped answering."""

    def engine_drains(self) -> None:
        """Move the request's stream to another engine if possible, because its engine drains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """The parts of the router that all exchanges use.

    Attributes:
        access: Names the client of a request.
        active: Running requests of all ports by request id, which is unique among them.
        faults: Keeps the log short whatever clients cause.
        resumption: Makes streams that can go on elsewhere; None means that no stream does.
        queue: Holds requests while all their engines are saturated; None means that none waits in the router.
        traces: Makes the spans of requests; None means that there are none.
    """

    fleet: Fleet
    access: Access
    rules: ExchangeRules
    budget: RetryBudget
    counts: Counts
    decision_log: DecisionLog
    active: dict[str, RunningRequest]
    faults: Faults
    resumption: Resumption | None = None
    queue: RequestQueue | None = None
    traces: RouterTraces | None = None


class Exchange:
    """Relays one client's request to an engine and the answer back. `Router.ended` is called once for each `submit`.

    Attributes:
        deadline_s: Time on `time.monotonic` at which the exchange expires unless the deadline is moved.
    """

    __slots__ = (
        "_arrival_ns", "_client", "_connection", "_decision", "_engine", "_head", "_idle_s", "_incoming",
        "_is_event_stream", "_is_in_router", "_is_success", "_length", "_model", "_num_lost", "_num_resumed",
        "_num_retries", "_outgoing", "_request", "_resumable", "_sent_ns", "_shared", "_spans", "_stage", "_status",
        "_stream", "_tail", "_task", "_tried", "_why", "deadline_s",
    )  # fmt: skip

    def __init__(self, shared: ExchangeContext, client: ClientConnection, incoming: Incoming) -> None:
        self._shared = shared
        self._client = client
        self._incoming = self._outgoing = incoming  # The client's request, and the one for the engine.
        self._arrival_ns = self._sent_ns = now_ns = time.monotonic_ns()
        self._idle_s = shared.rules.idle_s
        self._stage = _CHOOSING
        self._request: Request | None = None
        self._model: str | None = None
        self._resumable: ResumableRequest | str | None = None
        self._engine: RoutedEngine | None = None
        self._decision: RouteDecision | None = None
        self._is_in_router = False
        self._connection: EngineConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._tried: tuple[int, ...] = ()
        self._num_retries = self._num_lost = self._num_resumed = self._status = 0
        self._why = ""
        self._head: AnswerHead | None = None
        self._length: int | None = None
        self._tail = AnswerTail()
        self._stream: ResumableStream | None = None
        self._is_event_stream = self._is_success = False
        self._spans = None if shared.traces is None else shared.traces.begin(incoming)
        self.deadline_s = now_ns * 1e-9 + shared.rules.first_byte_s
        shared.active[incoming.request_id] = self

    def start(self, request: Request, model: str | None, resumable: ResumableRequest | str | None = None) -> None:
        """Send the request to an engine that serves `model`.

        Args:
            resumable: Request in resumable form, or what keeps its stream from going on elsewhere; None without either.
        """
        if self._stage == _OVER:
            return  # The client disconnected while the request was read.
        self._request, self._model, self._resumable = request, model, resumable
        self._shared.budget.request(self._client_name())
        self._shared.counts.num_requests += 1
        queue = self._shared.queue
        if queue is None or not self._incoming.body:
            self.go()
            return
        try:
            queue.enter(self, request, model, self._client_name())
        except RequestError as error:
            self.refuse(error)
        except Exception:
            self.fail()

    def go(self, full: Collection[int] = (), wait_ns: int = 0) -> None:
        """Send the request to an engine that is not among `full`, after a wait in the router's queue."""
        if self._stage == _OVER:
            return
        try:
            self._choose(full, wait_ns)
            resumable, self._resumable = self._resumable, None
            self._prepare_stream(resumable)
            self._send()
        except RequestError as error:
            self.refuse(error)
        except Exception:
            self.fail()

    def refuse(self, error: RequestError) -> None:
        """End the exchange with an error of the router. A stream that has begun is cut off with the cause in it."""
        if self._stage == _OVER:
            return
        has_begun = self._client.has_begun
        self._release_engine(completed=False)
        self._shared.counts.refusals.add(error)
        self._finish(error.http_status)
        if has_begun:
            self._cut(error)
        else:
            self._client.refuse(error, self._own_lines())

    def fail(self) -> None:
        """End the exchange because of an unexpected exception, and log it. Called from the exception's handler."""
        self._shared.faults.bug("a request failed", cast(BaseException, sys.exception()))
        self.refuse(InternalError(self._incoming.request_id))

    def expire(self) -> None:
        """End the exchange after its deadline."""
        rules = self._shared.rules
        if self._engine is not None:
            self._blame(self._engine, time.monotonic_ns())
            self._engine.counts.num_broken += 1
        if self._stage == _ANSWERING:
            if not self._continue_elsewhere("sent nothing for too long"):
                self.refuse(_broken(f"the engine sent nothing for {rules.idle_s:g} s"))
        elif self._client.has_begun:
            self.refuse(_broken(f"no engine continued it within {rules.first_byte_s:g} s"))
        else:
            text = f"No engine began to answer within {rules.first_byte_s:g} s."
            self.refuse(HttpError(504, text, "upstream_timeout"))

    def give_up_engine(self) -> bool:
        """Take the request from its engine if no byte of its answer has left, and return whether it was taken."""
        if self._stage not in (_CONNECTING, _WAITING) or self._client.has_begun:
            return False
        self._release_engine(completed=False)
        self._end_in_router({})
        self._stage, self._status = _CHOOSING, 0
        self._engine = self._decision = self._head = None
        self._tried = self._tried[:-1]  # The engine has not failed.
        self._why = "it gave way to a latency-sensitive request"
        return True

    # --- called by the client's connection

    def client_left(self) -> None:
        """End the exchange and stop the engine's work, because the client disconnected."""
        if self._stage == _OVER:
            return
        is_whole = self._is_event_stream and self._tail.has_last_event
        if self._engine is not None and not is_whole:
            self._engine.counts.num_left += 1
        self._release_engine(completed=False)
        self._finish(self._status if is_whole else _LEFT_STATUS)

    def client_is_slow(self) -> None:
        """Stop reading from the engine. From now on, the client's write timeout applies."""
        self.deadline_s = self._idle_s = float("inf")
        if self._connection is not None:
            self._connection.pause()

    def client_is_ready(self) -> None:
        """Read from the engine again."""
        self._idle_s = self._shared.rules.idle_s
        if self._stage == _ANSWERING:
            self.deadline_s = time.monotonic() + self._idle_s
        if self._connection is not None:
            self._connection.resume()

    # --- called by the engine's connection

    def head(self, head: AnswerHead, length: int | None) -> None:
        """Keep the head of an answer until its body begins: servers send "200" before they compute anything."""
        engine, status = self._engine, head.status
        assert engine is not None
        self._status = status
        engine.counts.statuses[status] += 1
        if self._spans is not None:
            self._spans.answered(status)
        if self._connection is not None and self._connection.load_report:
            self._take_load(engine, self._connection.load_report)
        if status >= FIRST_ERROR and self._take_failure(engine, head):
            return
        self._head, self._length = head, length
        if self._client.has_begun and not (status == 200 and head.is_event_stream):
            self.refuse(_broken(f"the engine that was to continue it answered {status}"))

    def _take_load(self, engine: RoutedEngine, value: bytes) -> None:
        """Report the load that came with an answer, so that the next decision has it."""
        report = load_report.read(value)
        if report is None or engine.rank is not None:
            return
        shared, arrived_ns = self._shared, engine.pool.arrived_ns
        shared.fleet.router.report(engine.row, report.load, arrived_ns - report.age_us * 1000 - _TRANSIT_NS, arrived_ns)
        if shared.queue is not None:
            shared.queue.reported(engine.row, report.load)

    def body(self, data: bytes, *, is_last: bool) -> None:
        """Pass a part of the answer to the client."""
        engine = self._engine
        assert engine is not None
        now_ns = engine.pool.arrived_ns
        if self._stage == _WAITING:
            self._begin(engine, now_ns, data)
        if self._is_success:
            engine.last_byte_ns = now_ns  # An engine that only refuses does not get on with its work.
        self.deadline_s = now_ns * 1e-9 + self._idle_s
        if self._stream is None:
            self._pass(data, is_last=is_last)
            return
        self._pass(self._stream.feed(data), is_last=is_last)
        if self._stream.failure and not self._continue_elsewhere("ended a stream with an error"):
            self._pass(self._stream.give_up(), is_last=is_last)

    def _pass(self, data: bytes, *, is_last: bool = False) -> None:
        """Write a part of the answer, which may be empty, to the client."""
        if not data:
            return
        self._tail.add(data)
        self._client.piece(data, is_last=is_last)

    def done(self) -> None:
        """End the complete answer."""
        if self._stage == _WAITING:
            assert self._engine is not None
            self._begin(self._engine, time.monotonic_ns(), b"")  # The answer had no body.
        if self._stream is not None and not self._stream.is_complete:
            self._connection = None  # Another request may have it already.
            if not self._stream.obstacle and self._continue_elsewhere("ended a stream too early"):
                return
            self._pass(self._stream.give_up())
        self._release_engine(completed=True)
        self._finish(self._status)
        self._client.end()

    def broken(self, cause: str) -> None:
        """Handle an engine that closed the connection or sent invalid HTTP."""
        connection, self._connection = self._connection, None
        engine, now_ns = self._engine, time.monotonic_ns()
        assert engine is not None
        assert connection is not None
        if self._stage == _ANSWERING:
            self._blame(engine, now_ns)
            engine.counts.num_broken += 1
            if not self._continue_elsewhere("broke off a stream"):
                self.refuse(_broken(cause))
        elif self._head is None and not connection.is_fresh and now_ns - self._sent_ns < _STALE_NS:
            self._connect()  # The engine closed an idle connection, which is no failure.
        else:
            self._lose(engine, cause, now_ns, was_sent=True)

    # --- sending to an engine

    def _choose(self, full: Collection[int] = (), wait_ns: int = 0) -> None:
        """Choose an engine that is not among `full`; raise RequestError if none is left."""
        assert self._request is not None
        shared, before_ns = self._shared, time.monotonic_ns()
        fleet, counts = shared.fleet, shared.counts
        client = self._client_name() if fleet.has_pauses else None
        decision = fleet.submit(self._request, RouteBounds(self._model, self._tried, client, full), before_ns)
        counts.decision_s.observe((time.monotonic_ns() - before_ns) * 1e-9)
        self._decision, self._is_in_router = decision, True
        self._engine = engine = fleet[decision.engine]
        engine.counts.num_decisions += 1
        self._tried += (decision.engine,)
        shared.decision_log.routed(self._request, decision, self._why, wait_ns)
        if self._spans is not None:
            self._spans.attempt(engine, decision, self._why, wait_ns)

    def _send(self) -> None:
        assert self._engine is not None
        connection = self._engine.pool.take()
        if connection is not None:
            self._send_on(connection)
        else:
            self._connect()

    def _connect(self) -> None:
        self._stage = _CONNECTING
        self._task = asyncio.get_running_loop().create_task(self._connect_and_send())

    async def _connect_and_send(self) -> None:
        engine = self._engine
        assert engine is not None
        try:
            connection = await engine.pool.connect()
        except OSError as error:
            self._task = None
            self._lose(engine, f"cannot connect: {error}", time.monotonic_ns(), was_sent=False)
            return
        self._task = None
        if connection.is_open:
            self._send_on(connection)
        else:
            self._lose(engine, "it closed the connection at once", time.monotonic_ns(), was_sent=False)

    def _send_on(self, connection: EngineConnection) -> None:
        assert self._engine is not None
        incoming = self._engine.outgoing(self._outgoing, self._class_fields())
        self._connection = connection
        self._stage = _WAITING
        self._sent_ns = time.monotonic_ns()
        traceparent = "" if self._spans is None else self._spans.traceparent()
        client = None if self._engine.head.authorization is None else self._client_name()
        head = self._engine.head.of(incoming, client, traceparent)
        connection.send(head, incoming.body, self, is_bodiless=incoming.head.method == b"HEAD")

    def _class_fields(self) -> Mapping[str, bytes | None]:
        """Return the fields of the body by which engines know the request's class."""
        fields, path = self._shared.rules.class_fields, self._outgoing.head.path
        return fields[self._request.service_class] if fields and self._request and path in CLASS_PATHS else {}

    # --- retries

    def engine_hangs(self) -> None:
        """Move the request to another engine, because its engine has stopped answering.

        A request whose answer has begun moves only if its stream is resumable, and another one moves once.
        """
        if self._stage == _ANSWERING:
            self._continue_elsewhere("stopped answering")
            return
        shared, is_waiting = self._shared, self._stage in (_CONNECTING, _WAITING)
        if not is_waiting or self._num_lost >= _MAX_LOST or not shared.fleet.has_other(self._tried, self._model):
            return
        if self._task is not None:
            self._task.cancel()
            self._task = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()  # An engine that awakes finds its client gone.
        self._num_lost += 1
        if self._try_elsewhere("stopped answering"):
            shared.budget.charge(self._client_name(), time.monotonic_ns())
        else:
            self.refuse(_unavailable("it stopped answering"))

    def _lose(self, engine: RoutedEngine, cause: str, now_ns: int, *, was_sent: bool) -> None:
        """Retry on another engine after the engine was lost before any byte of its answer."""
        engine.counts.num_unreachable += 1
        if was_sent:
            self._blame(engine, now_ns)  # The request may be what ended the connection.
        else:
            self._shared.fleet.unreachable(engine.address, cause, now_ns)
        self._connection = self._head = None
        self._num_lost += was_sent
        if self._num_lost <= _MAX_LOST and self._try_elsewhere("lost" if was_sent else "unreachable"):
            self._shared.budget.charge(self._client_name(), now_ns)
            return
        self.refuse(_unavailable(cause))

    def _take_failure(self, engine: RoutedEngine, head: AnswerHead) -> bool:
        """Count a failure status, and return whether the request goes to another engine."""
        now_ns, shared, status = time.monotonic_ns(), self._shared, head.status
        if judge_status(shared.fleet, engine, (status, head.named), self._origin, self._sent_ns, now_ns):
            return self._leave_answer("leads back to this router")
        if status not in shared.rules.retry_on or self._num_retries >= shared.rules.max_retries:
            return False
        if not shared.fleet.has_other(self._tried, self._model):
            return False
        if not shared.budget.grant(self._client_name(), now_ns):
            shared.counts.num_retries_denied += 1
            return False
        is_moved = self._leave_answer(f"answered {status}")
        self._num_retries += is_moved
        return is_moved

    def _leave_answer(self, cause: str) -> bool:
        """Send the request to another engine and drop the answer; return False without another engine."""
        connection, self._connection = self._connection, None
        if not self._try_elsewhere(cause):
            self._connection = connection
            return False
        if connection is not None:
            connection.close()
        return True

    def _blame(self, engine: RoutedEngine, now_ns: int) -> None:
        """Count a failure that may be the engine's or the request's own."""
        blame(self._shared.fleet, engine, self._origin(), self._sent_ns, now_ns)

    def _origin(self) -> Origin:
        return origin_of(self._client_name(), self._incoming.body)

    def _client_name(self) -> Hashable:
        named = self._incoming.head.named
        key, other = named.get(b"authorization", b""), named.get(b"x-api-key", b"")
        return self._shared.access.client_of(key, other, self._incoming.client)

    def _try_elsewhere(self, cause: str, detail: str = "") -> bool:
        """Send the request to an engine that it has not tried, and return False without such an engine.

        Args:
            cause: Cause by which the retry is counted.
            detail: What else the decision's record says.
        """
        engine, decision = self._engine, self._decision
        assert engine is not None
        self._end_in_router({})
        self._why = f"{engine.name} {cause}{detail}"
        try:
            self._choose()
            self._head = None
            self._send()
        except RequestError:
            self._engine, self._decision = engine, decision
            return False
        except Exception:
            self.fail()
            return True
        engine.counts.num_retried_away += 1
        self._shared.counts.retries[cause] += 1
        return True

    # --- streams that go on elsewhere

    def _prepare_stream(self, resumable: ResumableRequest | str | None) -> None:
        """Make the stream of a resumable request, or record why it is not resumable."""
        if isinstance(resumable, ResumableRequest):
            assert self._shared.resumption is not None
            self._stream = self._shared.resumption.stream_of(resumable)
            self._outgoing = replace(self._incoming, body=resumable.body)
        elif resumable is not None:
            self._note_obstacle(resumable)

    def _note_obstacle(self, obstacle: str) -> None:
        self._shared.counts.not_resumable[obstacle] += 1
        self._shared.decision_log.not_resumable(self._incoming.request_id, obstacle)

    def engine_drains(self) -> None:
        """Move a stream whose engine drains; an answer that is not resumable ends there."""
        stream = self._stream
        if self._stage == _ANSWERING and stream is not None and stream.can_resume and not stream.is_finished:
            self._continue_elsewhere("drains")

    def _continue_elsewhere(self, cause: str) -> bool:
        """Complete the client's stream, or let another engine continue it; return False if neither is possible."""
        stream, engine = self._stream, self._engine
        if stream is None or engine is None:
            return False
        left = b"" if stream.is_complete else stream.end()
        if stream.is_complete:
            self._pass(left)
            self._release_engine(completed=False)
            self._finish(self._status)
            self._client.end()
            return True
        return self._resume(stream, engine, cause)

    def _resume(self, stream: ResumableStream, engine: RoutedEngine, cause: str) -> bool:
        shared, now_ns = self._shared, time.monotonic_ns()
        has_other = shared.fleet.has_other((engine.row,), self._model)
        if not stream.can_resume or not has_other or self._num_resumed >= _MAX_RESUMED:
            return False
        self._release_engine(completed=False)
        self._stage = _CHOOSING
        self._num_resumed += 1
        self._tried = (engine.row,)
        self.deadline_s = now_ns * 1e-9 + shared.rules.first_byte_s
        continuation = stream.resume()
        self._outgoing = continued(self._incoming, continuation)
        self._request = _with_resumed(self._request, continuation.num_tokens)
        if not self._try_elsewhere(cause, f"; resumed behind {continuation.num_tokens} tokens"):
            self.refuse(_broken(f"its engine {cause}, and no other engine can continue it"))
            return True
        shared.counts.resumed[cause] += 1
        shared.budget.charge(self._client_name(), now_ns)
        return True

    def _go_on(self, engine: RoutedEngine, now_ns: int) -> None:
        """Note the first bytes of a continuation."""
        self._stage, self._num_lost, self._is_success = _ANSWERING, 0, True
        engine.num_streaming += 1
        if self._client.is_slow and self._connection is not None:
            self._connection.pause()
        if self._request is not None:
            self._shared.fleet.router.first_token(self._request.request_id, now_ns)
            if self._shared.queue is not None:
                self._shared.queue.began(self._request.request_id)
        engine.health.silence.began(now_ns - self._sent_ns)
        judge_success(self._shared.fleet, engine, self._sent_ns, now_ns)

    # --- back to the client

    def _begin(self, engine: RoutedEngine, now_ns: int, data: bytes) -> None:
        """Begin the client's answer with the engine's first bytes, after which no retry is possible."""
        head, length = self._head, self._length
        assert head is not None
        if self._client.has_begun:
            self._go_on(engine, now_ns)
            return
        status = head.status
        self._stage = _ANSWERING
        engine.num_streaming += 1
        if self._spans is not None:
            self._spans.began()
        if status < 300 and self._request is not None:
            self._shared.fleet.router.first_token(self._request.request_id, now_ns)
            if self._shared.queue is not None:
                self._shared.queue.began(self._request.request_id)
            engine.health.silence.began(now_ns - self._sent_ns)
            engine.counts.first_byte_s.observe((now_ns - self._arrival_ns) * 1e-9)
        self._is_event_stream = head.is_event_stream
        if status != 200 or not head.is_event_stream:
            self._stream = None
        if status < FIRST_ERROR:
            self._judge_beginning(engine, now_ns, data)
        framing = b"" if length is None else b"Content-Length: %d\r\n" % length
        has_end = length is not None or self._incoming.head.method == b"HEAD" or status in (204, 304)
        self._client.begin(b"%b%b%b" % (head.lines, framing, self._own_lines()), has_length=has_end)

    def _judge_beginning(self, engine: RoutedEngine, now_ns: int, data: bytes) -> None:
        """Count an answer that begins well, and a stream that begins with an error although its status is 200."""
        fleet = self._shared.fleet
        if self._is_event_stream and begins_with_error(data):
            judge_error_event(fleet, engine, data, self._origin, self._sent_ns, now_ns)
        else:
            self._is_success = True
            judge_success(fleet, engine, self._sent_ns, now_ns)

    def _own_lines(self) -> bytes:
        shared, engine, decision = self._shared, self._engine, self._decision
        if not shared.rules.shows_route or engine is None or decision is None:
            return f"X-Request-Id: {self._incoming.request_id}\r\n".encode()
        reason = f"{decision.reason}; {self._why}" if self._why else decision.reason
        return (
            f"X-Request-Id: {self._incoming.request_id}\r\nx-moestro-engine: {engine.name}\r\n"
            f"x-moestro-reason: {header_text(reason)}\r\n"
        ).encode()

    def _cut(self, error: RequestError) -> None:
        """Write the cause and close the connection, because every client notices this end of a broken stream."""
        if self._is_event_stream:
            if self._stream is not None:
                self._pass(self._stream.give_up())
            border = b"" if self._tail.endswith(b"\n\n") else b"\n\n"
            body = error_body(self._incoming.head.path, error, self._incoming.request_id)
            self._client.piece(border + b"event: error\ndata: " + body + b"\n\n")
        self._client.cut()

    # --- the end

    def _release_engine(self, *, completed: bool) -> None:
        """Release the engine's connection; close it unless the answer is complete."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        connection, self._connection = self._connection, None
        if connection is not None and not completed:
            connection.close()
        if self._engine is not None and self._stage == _ANSWERING:
            self._engine.num_streaming -= 1

    def _finish(self, status: int) -> None:
        """End the exchange. An error while releasing its state does not keep the client from its answer."""
        self._stage = _OVER
        self.deadline_s = float("inf")
        self._shared.active.pop(self._incoming.request_id, None)
        if self._shared.queue is not None:
            self._shared.queue.leave(self._incoming.request_id)
        if self._incoming.on_over is not None:
            self._incoming.on_over()
        try:
            self._release_state(status)
        except Exception:
            logger.exception("%s: its state could not be released", self._incoming.request_id)

    def _release_state(self, status: int) -> None:
        if self._stream is not None and self._stream.why_not and status != _LEFT_STATUS:
            self._note_obstacle(self._stream.why_not)
        usage = usage_in(self._tail) if self._status == 200 else {}
        if self._engine is not None and self._decision is not None and self._request is not None:
            count_hits(self._engine, self._request, self._decision, usage)
        self._end_in_router(usage)
        if self._shared.queue is not None:
            self._shared.queue.ended(self._incoming.request_id, usage.get(b"completion_tokens", 0))
        self._shared.decision_log.ended(self._incoming.request_id, status, usage)
        if self._spans is not None:
            tenant = None if self._request is None else self._request.tenant
            self._spans.end(status, self._model, tenant, usage)

    def _end_in_router(self, usage: dict[bytes, int]) -> None:
        if self._is_in_router and self._request is not None:
            self._is_in_router = False
            self._shared.fleet.router.ended(
                self._request.request_id, time.monotonic_ns(), usage.get(b"completion_tokens"), *cached_shares(usage)
            )
            if self._shared.queue is not None:
                self._shared.queue.left_engine(self._request.request_id)


def _unavailable(cause: str) -> GenerationError:
    text = f"The engine failed before it answered ({cause}), and no other engine can take the request."
    error = GenerationError(text, code="upstream_unavailable")
    error.http_status = 502
    return error


def _with_resumed(request: Request | None, num_tokens: int) -> Request | None:
    """Return the request with the number of tokens that an engine computes before it continues the answer."""
    if request is None or num_tokens >= request.sampling.max_tokens:
        return request  # The router's limit is an estimate where the client gives none.
    return msgspec.structs.replace(request, resumed_token_ids=bytes(4 * num_tokens))


def _broken(cause: str) -> GenerationError:
    return GenerationError(f"The answer cannot be completed: {cause}.", code="upstream_disconnected")
