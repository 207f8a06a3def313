"""One exchange of a proxy with the endpoint picker, sans-IO: messages come in, responses go out."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from moestro.core.request import Request
from moestro.errors import RequestError
from moestro.gateway.clients.http_headers import Incoming, RequestHead, header_text
from moestro.gateway.engines.fleet import RouteBounds, RoutedEngine
from moestro.gateway.engines.health_checks import (
    FIRST_ERROR,
    AnswerTail,
    begins_with_error,
    cached_shares,
    count_hits,
    judge_error_event,
    judge_status,
    judge_success,
    origin_of,
)
from moestro.gateway.engines.upstream import usage_in
from moestro.gateway.exchange import ExchangeContext
from moestro.gateway.picker import messages
from moestro.gateway.picker.ext_proc_pb2 import ProcessingRequest
from moestro.gateway.proxy import Admission
from moestro.gateway.tracing import RequestSpans
from moestro.routing.health import Origin
from moestro.routing.router import RouteDecision
from moestro.web.bodies import SMALL_BYTES, BodyHold, BodyMemory
from moestro.web.errors import AuthenticationError, GenerationError, InternalError, too_large
from moestro.web.tracing import TRACEPARENT

logger = logging.getLogger(__name__)

Responses = list[bytes]  # Serialized.

_LEFT_STATUS = 499  # nginx' status for a client that disconnected.
_PIECE_BYTES = 62_000  # Largest piece of a body that goes back, below the 64 KiB that gateways take in one message.
# Stages: no headers yet; the request's body arrives; it is complete and has no engine yet; it is with an engine; the
# answer's head has passed, and no byte of its body; its body passes; it has passed and is not counted yet; the exchange
# is over.
_NEW, _READING, _CHOOSING, _WAITING, _BEGINNING, _ANSWERING, _ANSWERED, _OVER = range(8)
# A proxy that refuses a request itself sends its own answer at any time, even before the request's headers.
_BEFORE_ANSWER = frozenset({_NEW, _READING, _CHOOSING, _WAITING})
_OF_ANSWER = frozenset({"response_headers", "response_trailers"})


class MessageOrderError(Exception):
    """A message that no proxy sends at this point of an exchange."""


class AfterSending:
    """Notes on exchanges that change none of their responses, taken in order once these have been sent.

    A proxy waits for each response, so what only counts comes after it. Before a decision, all is counted.

    Args:
        soon: Calls a function once the responses that are written now have been sent.
    """

    def __init__(self, soon: Callable[[Callable[[], None]], object]) -> None:
        self._soon = soon
        self._notes: deque[tuple[PickedExchange, Callable[[], None]]] = deque()

    def add(self, exchange: PickedExchange, note: Callable[[], None]) -> None:
        """Keep a note on `exchange`, which ends if the note raises an exception."""
        if not self._notes:
            self._soon(self.run)
        self._notes.append((exchange, note))

    def run(self) -> None:
        """Take all notes now."""
        while self._notes:
            exchange, note = self._notes.popleft()
            if not exchange.has_ended:
                try:
                    note()
                except Exception:
                    exchange.fail()


@dataclass(slots=True, kw_only=True)
class PickerContext:
    """The parts of the router that all exchanges of the picker use.

    Attributes:
        after: Notes that wait for the responses to be sent.
        memory: Memory of all bodies of requests without an answer yet.
        max_body_bytes: Most bytes of a request's body, packed and unpacked.
        max_endpoints: Most endpoints in an answer, the chosen one included.
        added: Headers that every request to an engine gets.
        removed: Names of client headers that engines do not get.
        doubt: Called with each engine that a proxy has passed over or could not reach.
        proxy_names_served: Whether any proxy has named the endpoint that served a request. Then an answer without one
            comes from no engine.
    """

    shared: ExchangeContext
    admission: Admission
    after: AfterSending
    memory: BodyMemory
    max_body_bytes: int
    max_endpoints: int
    added: list[tuple[str, bytes]] = field(default_factory=list)
    removed: Collection[str] = ()
    doubt: Callable[[RoutedEngine], None]
    proxy_names_served: bool = False


class PickedExchange:
    """Picks an engine for one request, and follows the request until its answer ends.

    `receive` takes each message of the proxy. Where `is_complete` holds afterwards, the caller reads the prompt of
    `incoming` and calls `pick`. `Router.ended` is called once for each `submit`.

    Args:
        peer: Address of the proxy, which stands for its clients where it does not name them.
        push: Sends a response that answers no message.

    Attributes:
        incoming: The request; None before its headers.
        deadline_s: Never, because the proxy keeps the time limits of its routes.
    """

    __slots__ = (
        "_arrival_ns", "_chunks", "_context", "_decision", "_endpoints", "_engine", "_has_body", "_has_trailers",
        "_hold", "_is_event_stream", "_is_in_router", "_is_streaming", "_is_success", "_model", "_num_bytes", "_origin",
        "_peer", "_push", "_request", "_sent_ns", "_spans", "_stage", "_status", "_subset", "_tail", "_why",
        "deadline_s", "incoming",
    )  # fmt: skip

    def __init__(self, context: PickerContext, peer: str, push: Callable[[bytes], None]) -> None:
        self._context = context
        self._push = push
        self._peer = peer
        self._stage = _NEW
        self._arrival_ns = self._sent_ns = 0
        self._chunks: list[bytes] = []
        self._num_bytes = self._status = 0
        self._hold: BodyHold | None = None
        self._has_trailers = False
        self._subset: frozenset[str] | None = None
        self._request: Request | None = None
        self._model: str | None = None
        self._decision: RouteDecision | None = None
        self._engine: RoutedEngine | None = None
        self._endpoints: dict[str, RoutedEngine] = {}  # In the order in which the proxy tries them.
        self._origin: Origin | None = None
        self._why = ""
        self._is_in_router = self._is_event_stream = self._is_success = False
        self._has_body = self._is_streaming = False  # Whether the answer's body has begun, and counts on the engine.
        self._tail = AnswerTail()
        self._spans: RequestSpans | None = None
        self.incoming: Incoming | None = None
        self.deadline_s = float("inf")

    @property
    def is_complete(self) -> bool:
        """Whether the request has arrived and waits for `pick`."""
        return self._stage == _CHOOSING

    @property
    def is_over(self) -> bool:
        """Whether the last response has been returned."""
        return self._stage >= _ANSWERED

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the exchange is counted any more."""
        return self._stage == _OVER

    # --- called by the port

    def receive(self, message: ProcessingRequest, now_ns: int) -> Responses:
        """Return the responses to a message, in order.

        Raises:
            MessageOrderError: No proxy sends this message now.
        """
        if self.is_over:
            return []  # The router has ended the exchange meanwhile.
        kind = message.WhichOneof("request")
        if kind in ("request_body", "response_body"):
            piece = getattr(message, kind)
            return self.receive_piece(messages.BodyPiece(kind, piece.body, piece.end_of_stream), now_ns)
        try:
            if kind in _OF_ANSWER:
                return self._receive_of_answer(kind, message, now_ns)
            if kind == "request_headers" and self._stage == _NEW:
                return self._begin(message, now_ns)
            if kind == "request_trailers" and self._stage == _READING:
                self._has_trailers = True
                return self._end_request()
        except RequestError as error:
            return self._refused(error)
        raise _misplaced(kind or "an empty message")

    def receive_piece(self, piece: messages.BodyPiece, now_ns: int) -> Responses:
        """Return the responses to a message with a piece of a body, in order.

        Raises:
            MessageOrderError: No proxy sends it now.
        """
        if self.is_over:
            return []
        try:
            if piece.kind == "request_body" and self._stage == _READING:
                return self._read(piece.data, is_last=piece.is_last)
            if piece.kind == "response_body" and self._stage in (_BEGINNING, _ANSWERING):
                return self._answer_piece(piece.data, now_ns, is_last=piece.is_last)
        except RequestError as error:
            return self._refused(error)
        raise _misplaced(piece.kind)

    def pick(self, request: Request, model: str | None, now_ns: int) -> Responses:
        """Choose an engine, and return what sends the request there.

        Args:
            request: The request by which the router decides.
            model: Model that the body names.
        """
        if self._stage != _CHOOSING:
            return []  # The router has refused it meanwhile.
        context = self._context
        context.after.run()  # So that the decision sees all that has ended.
        self._request, self._model = request, model
        context.shared.counts.num_requests += 1
        try:
            self._choose(self._outside_of(self._subset), now_ns)
        except RequestError as error:
            return self._refused(error)
        assert self.incoming is not None
        body = self.incoming.body
        self._stage, self._sent_ns = _WAITING, now_ns
        context.after.add(self, partial(self._note_choice, body))
        headers = [("x-request-id", self.incoming.request_id.encode()), *context.added]
        if self._spans is not None:
            headers.append((TRACEPARENT, self._spans.traceparent().encode()))
        via = b"1.1 %b" % context.shared.fleet.pseudonym
        responses = [messages.destination(list(self._endpoints), headers, via, context.removed)]
        # In fewer pieces than came: each message costs more than the bytes in it.
        view = memoryview(body)
        for begin in range(0, len(body), _PIECE_BYTES):
            end = begin + _PIECE_BYTES
            is_last = end >= len(body) and not self._has_trailers
            responses.append(messages.request_piece(view[begin:end], is_last=is_last))
        if not body and self._chunks and not self._has_trailers:
            responses.append(messages.request_piece(b"", is_last=True))
        if self._has_trailers:
            responses.append(messages.request_trailers())
        self._release_body()
        return responses

    def fails(self) -> Responses:
        """Return the refusal after an unexpected exception, and log it. Called from the exception's handler."""
        self._context.shared.faults.bug("a request failed", cast(BaseException, sys.exception()))
        return self._refused(InternalError(self.incoming.request_id if self.incoming else ""))

    def refused(self, error: RequestError) -> Responses:
        """Return the refusal of a request whose prompt cannot be read."""
        return self._refused(error)

    def closed(self) -> None:
        """End the exchange, because its stream is closed: by the proxy, whose client or engine has left, or here."""
        self._context.after.run()
        if self._stage == _OVER:
            return
        is_whole = self._is_event_stream and self._tail.has_last_event
        if self._engine is not None and not is_whole:
            self._engine.counts.num_left += 1
        self._finish(self._status if is_whole else _LEFT_STATUS)

    # --- called by the router for all running requests

    def refuse(self, error: RequestError) -> None:
        """End the exchange at the end of a drain, with the cause where the answer has not begun."""
        self._context.after.run()
        has_begun = self._stage in (_BEGINNING, _ANSWERING)
        for response in self._refused(error):
            if not has_begun:
                self._push(response)  # Otherwise the port closes the stream, and the proxy cuts the answer.

    def fail(self) -> None:
        """End the exchange because of an unexpected exception, and log it."""
        self.fails()

    def expire(self) -> None:
        """Do nothing: the proxy keeps the time limits of its routes."""

    def engine_hangs(self) -> None:
        """Refuse a request whose answer has not begun, because its engine has stopped answering.

        A proxy does not notice that, and cannot be sent on to another engine. The client gets 503 and retries.
        """
        self._context.after.run()
        if self._stage == _WAITING:
            for response in self._refused(_hanging()):
                self._push(response)

    def engine_drains(self) -> None:
        """Do nothing: the proxy lets the stream end where it is."""

    # --- the request

    def _begin(self, message: ProcessingRequest, now_ns: int) -> Responses:
        context = self._context
        context.after.run()  # What has ended frees its place among its key's requests.
        head = messages.head_of(message.request_headers)
        client = messages.client_address(message) or self._peer
        self.incoming = incoming = Incoming(head, b"", client)
        incoming.request_id = context.admission.request_id(head)
        self._arrival_ns = now_ns
        if error := messages.head_fault(head) or messages.mode_fault(message) or self._without_key(head):
            return self._refused(error)
        if (answer := context.admission.admit(incoming)) is not None:
            self._stage = _OVER
            return [messages.own_answer(answer, incoming.request_id)]
        if (length := head.named.get(b"content-length", b"")).isdigit() and int(length) > context.max_body_bytes:
            raise too_large(context.max_body_bytes)
        context.admission.enter(incoming)
        context.shared.active[incoming.request_id] = self
        if context.shared.traces is not None:
            self._spans = context.shared.traces.begin(incoming)
        self._subset = messages.subset_of(message.metadata_context)
        self._stage = _READING
        return self._end_request() if message.request_headers.end_of_stream else []

    def _without_key(self, head: RequestHead) -> RequestError | None:
        try:
            return self._context.admission.refuses(head)
        except AuthenticationError as error:
            return error

    def _read(self, data: bytes, *, is_last: bool) -> Responses:
        """Keep a part of the body."""
        context = self._context
        self._num_bytes += len(data)
        if self._num_bytes > context.max_body_bytes:
            raise too_large(context.max_body_bytes)
        if self._num_bytes > SMALL_BYTES:  # Smaller bodies are not counted.
            if self._hold is None:
                self._hold = BodyHold(context.memory, self._client_name())
            self._hold.resize(self._num_bytes)
        if data or not self._chunks:  # Proxies end a body with an empty piece, with which it would be copied once more.
            self._chunks.append(data)
        return self._end_request() if is_last else []

    def _end_request(self) -> Responses:
        assert self.incoming is not None
        self.incoming.body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._stage = _CHOOSING
        return []

    def _outside_of(self, subset: frozenset[str] | None) -> tuple[int, ...]:
        """Return the rows of engines that a proxy's hint leaves out."""
        if subset is None:
            return ()
        return tuple(engine.row for engine in self._context.shared.fleet if engine.pool.endpoint not in subset)

    def _choose(self, barred: Collection[int], now_ns: int) -> None:
        """Choose an engine; raise RequestError if none is left."""
        assert self._request is not None
        shared, before_ns = self._context.shared, time.monotonic_ns()
        fleet = shared.fleet
        client = self._client_name() if fleet.has_pauses else None
        decision = fleet.submit(self._request, RouteBounds(self._model, barred, client), now_ns)
        shared.counts.decision_s.observe((time.monotonic_ns() - before_ns) * 1e-9)
        self._decision, self._is_in_router = decision, True
        self._engine = engine = fleet[decision.engine]
        if self._spans is not None:  # Their context is in the response.
            self._spans.attempt(engine, decision, self._why, 0)
        self._endpoints = self._ordered(decision)

    def _note_choice(self, body: bytes) -> None:
        """Count and record the engine that gets the request."""
        self._origin = origin_of(self._client_name(), body)
        self._record_choice()

    def _record_choice(self) -> None:
        """Count and record the decision for the present engine."""
        assert self._engine is not None
        assert self._request is not None
        assert self._decision is not None
        self._engine.counts.num_decisions += 1
        self._context.shared.decision_log.routed(self._request, self._decision, self._why)

    def _ordered(self, decision: RouteDecision) -> dict[str, RoutedEngine]:
        """Return the chosen engine, then the next best ones, by endpoint."""
        fleet, candidates = self._context.shared.fleet, decision.candidates
        rows = [decision.engine]
        if candidates is not None:
            ranked = candidates.rows[candidates.ranked()].tolist()
            rows += [row for row in ranked if row != decision.engine]
        engines = [fleet[row] for row in rows[: self._context.max_endpoints]]
        return {engine.pool.endpoint: engine for engine in engines}

    # --- the answer

    def _receive_of_answer(self, kind: str, message: ProcessingRequest, now_ns: int) -> Responses:
        if kind == "response_headers" and self._stage in _BEFORE_ANSWER:
            return self._answer_head(message, now_ns)
        if kind == "response_trailers" and self._stage in (_BEGINNING, _ANSWERING):
            self._stage = _ANSWERED
            self._context.after.add(self, partial(self._end_answer, now_ns))
            return [messages.response_trailers()]
        raise _misplaced(kind)

    def _answer_head(self, message: ProcessingRequest, now_ns: int) -> Responses:
        self._find_server(messages.served_by(message.metadata_context), now_ns)
        is_last = message.response_headers.end_of_stream
        self._stage = _ANSWERED if is_last else _BEGINNING
        self._context.after.add(self, partial(self._note_head, message, now_ns, is_last=is_last))
        return [messages.answer_headers(self._own_headers(), ("x-moestro-engine", "x-moestro-reason"))]

    def _note_head(self, message: ProcessingRequest, now_ns: int, *, is_last: bool) -> None:
        """Count the head of the answer."""
        status, named = messages.answer_head(message.response_headers)
        self._status = status
        if self._spans is not None:
            self._spans.answered(status)
        engine, fleet = self._engine, self._context.shared.fleet
        if engine is not None:
            engine.counts.statuses[status] += 1
            if status >= FIRST_ERROR:
                judge_status(fleet, engine, (status, named), self._known_origin, self._sent_ns, now_ns)
        self._is_event_stream = named.get(b"content-type", b"").startswith(b"text/event-stream")
        if is_last:
            self._end_answer(now_ns)

    def _find_server(self, served: str, now_ns: int) -> None:
        """Move the request in the router to the engine that has answered it."""
        context, engine = self._context, self._engine
        if engine is None:
            return  # The proxy's own answer to a request without an engine.
        if served:
            context.proxy_names_served = True
        if self._endpoints.get(served) is engine or (not served and not context.proxy_names_served):
            return
        # The proxy went past this engine, or answers itself because it has reached none.
        context.after.run()
        for endpoint, passed in self._endpoints.items():
            if endpoint == served:
                break
            context.doubt(passed)
        self._end_in_router({})
        self._engine = None
        if not served:
            engine.counts.num_unreachable += 1
            return
        engine.counts.num_retried_away += 1
        context.shared.counts.retries["the proxy went on"] += 1
        self._why = f"{engine.name} did not serve it"
        try:
            self._choose(self._outside_of(frozenset((served,))), now_ns)
        except RequestError:
            # An engine that left the rotation meanwhile, or an endpoint that is none of ours: not counted anywhere.
            logger.debug("%s was served by %s, which is no engine in rotation", self._request_id(), served)
        else:
            self._record_choice()

    def _answer_piece(self, data: bytes, now_ns: int, *, is_last: bool) -> Responses:
        self._stage = _ANSWERED if is_last else _ANSWERING
        self._context.after.add(self, partial(self._note_piece, data, now_ns, is_last=is_last))
        return [messages.response_piece(data, is_last=is_last)]

    def _note_piece(self, data: bytes, now_ns: int, *, is_last: bool) -> None:
        """Count a piece of the answer, which may be the first or the last one."""
        if not self._has_body:
            self._begin_answer(data, now_ns)
        engine = self._engine
        if engine is not None and self._is_success:
            engine.last_byte_ns = engine.pool.arrived_ns = now_ns
        self._tail.add(data)
        if is_last:
            self._end_answer(now_ns)

    def _begin_answer(self, data: bytes, now_ns: int) -> None:
        """Count the first byte of an answer."""
        self._has_body = True
        if self._spans is not None:
            self._spans.began()
        engine, fleet = self._engine, self._context.shared.fleet
        if engine is None or self._request is None:
            return
        self._is_streaming = True
        engine.num_streaming += 1
        if self._status < 300:
            fleet.router.first_token(self._request.request_id, time.monotonic_ns())
            engine.health.silence.began(now_ns - self._sent_ns)
            engine.counts.first_byte_s.observe((now_ns - self._arrival_ns) * 1e-9)
        if self._status >= FIRST_ERROR:
            return
        if self._is_event_stream and begins_with_error(data):
            judge_error_event(fleet, engine, data, self._known_origin, self._sent_ns, now_ns)
        else:
            self._is_success = True
            judge_success(fleet, engine, self._sent_ns, now_ns)

    def _end_answer(self, now_ns: int) -> None:
        if not self._has_body:
            self._begin_answer(b"", now_ns)
        self._finish(self._status)

    def _own_headers(self) -> list[tuple[str, bytes]]:
        headers = [("x-request-id", self.incoming.request_id.encode())] if self.incoming is not None else []
        engine, decision = self._engine, self._decision
        if self._context.shared.rules.shows_route and engine is not None and decision is not None:
            reason = f"{decision.reason}; {self._why}" if self._why else decision.reason
            headers += [("x-moestro-engine", engine.name.encode()), ("x-moestro-reason", header_text(reason).encode())]
        return headers

    # --- the end

    def _refused(self, error: RequestError) -> Responses:
        """End the exchange with the router's own error. After the answer's head the proxy can only cut the answer."""
        incoming = self.incoming
        is_over = self._stage == _OVER
        self._context.shared.counts.refusals.add(error)
        self._finish(error.http_status)
        if is_over or incoming is None:
            return []
        return [messages.refusal(incoming.head.path, error, incoming.request_id)]

    def _finish(self, status: int) -> None:
        """End the exchange. An error while releasing its state does not keep the client from its answer."""
        if self._stage == _OVER:
            return
        self._stage = _OVER
        self._release_body()
        if self.incoming is None:
            return
        if self._context.shared.active.get(self.incoming.request_id) is self:
            del self._context.shared.active[self.incoming.request_id]
        if self.incoming.on_over is not None:
            self.incoming.on_over()
        try:
            self._release_state(status)
        except Exception:
            logger.exception("%s: its state could not be released", self._request_id())

    def _release_state(self, status: int) -> None:
        if self._is_streaming and self._engine is not None:
            self._engine.num_streaming -= 1
        usage = usage_in(self._tail) if self._status == 200 else {}
        if self._engine is not None and self._decision is not None and self._request is not None:
            count_hits(self._engine, self._request, self._decision, usage)
        self._end_in_router(usage)
        self._context.shared.decision_log.ended(self._request_id(), status, usage)
        if self._spans is not None:
            tenant = None if self._request is None else self._request.tenant
            self._spans.end(status, self._model, tenant, usage)

    def _release_body(self) -> None:
        """Drop the body, which is with the proxy again."""
        self._chunks = []
        if self.incoming is not None:
            self.incoming.body = b""
        if self._hold is not None:
            self._hold.release()

    def _end_in_router(self, usage: dict[bytes, int]) -> None:
        if self._is_in_router and self._request is not None:
            self._is_in_router = False
            self._context.shared.fleet.router.ended(
                self._request.request_id, time.monotonic_ns(), usage.get(b"completion_tokens"), *cached_shares(usage)
            )

    def _known_origin(self) -> Origin:
        assert self._origin is not None, "no engine has the request"
        return self._origin

    def _client_name(self) -> Hashable:
        assert self.incoming is not None
        return self._context.admission.client_of(self.incoming.head, self.incoming.client)

    def _request_id(self) -> str:
        return self.incoming.request_id if self.incoming is not None else ""


def _misplaced(kind: str) -> MessageOrderError:
    return MessageOrderError(f"{kind} may not come at this point of an exchange")


def _hanging() -> GenerationError:
    text = "The engine has stopped answering before it answered this request. Retry now: another engine gets it."
    error = GenerationError(text, code="upstream_unavailable")
    error.http_status, error.retry_after_s = 503, 1
    return error
