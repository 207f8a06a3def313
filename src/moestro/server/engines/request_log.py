"""Joins what all levels do with each request, for `--record` and `moestro explain`. A failure ends no request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from moestro.core.request import FinishReason, Request
from moestro.core.scheduling_events import (
    BatchPassed,
    EvictDecision,
    ExpertsMoved,
    OrderDecision,
    PoliciesStarted,
    RequestEvent,
    SchedulingEvent,
    SequenceAdmitted,
    SequenceLeft,
    SequencePreempted,
    SequenceQueued,
)
from moestro.core.side_job import ending_on_error
from moestro.routing.record.decision_log import DecisionLog
from moestro.routing.record.decision_record import Entry, ScheduledOn
from moestro.routing.record.request_trace import RequestTrace, ServerFacts
from moestro.routing.router import RouteDecision
from moestro.web.record_file import read_clocks

logger = logging.getLogger(__name__)

REMEMBERED = 1000  # ended requests that `moestro explain` knows; a trace takes about 5 kB
_STATUS = {FinishReason.STOP: 200, FinishReason.LENGTH: 200, FinishReason.ABORT: 499, None: 400}
_FAILED = 500
_guarded = ending_on_error(logger, "requests are no longer explained or recorded; they are served as before")


class RequestLog:
    """Takes in decisions of the router, events of engines and changes of the expert table.

    Args:
        policy: text form of the route policy.
        num_engines: number of engines.
        write: receiver of entries of a decision record; None means no record.
        on_trace: receiver of the traces of ended requests; None means none besides `write`.

    Attributes:
        has_failed: whether the log has ended because of an error.
        look: called before a request's trace is complete, to learn of the last changes of the expert table.
    """

    def __init__(
        self,
        policy: str,
        num_engines: int,
        write: Callable[[Entry], None] | None,
        on_trace: Callable[[RequestTrace], None] | None = None,
    ) -> None:
        self._names = [f"engine {engine}" for engine in range(num_engines)]
        self._log = DecisionLog(policy, REMEMBERED, lambda: self._names, _both(write, on_trace), read_clocks)
        self._write = write
        self._has_recorder = [False] * num_engines
        self._observes = [False] * num_engines
        self._left: dict[str, int] = {}  # engine of each running request that left it, and may go to another one
        self.has_failed = False
        self.look: Callable[[], None] = lambda: None

    # --- from the API server

    def describe(self, server: ServerFacts) -> None:
        """Note what traces have to know of the server."""
        self._log.server = server

    @_guarded
    def routed(self, request: Request, decision: RouteDecision, because: str) -> None:
        """Note that a request was sent to an engine. `because`: reason for another engine; empty for the first."""
        self._left.pop(request.request_id, None)
        self._log.routed(request, decision, because)

    @_guarded
    def ended(
        self, request: Request, engine: int, reason: FinishReason | None, num_tokens: int, first_ns: int = 0
    ) -> None:
        """Note the end of a request on `engine`.

        Args:
            reason: None means a refusal by the engine.
            first_ns: time of the first token; 0 means that none came.
        """
        request_id = request.request_id
        usage = {b"prompt_tokens": request.num_prompt_tokens, b"completion_tokens": num_tokens}
        has_left = self._left.pop(request_id, None) == engine
        is_complete = has_left or reason is None or not self._has_recorder[engine]
        self.look()
        self._log.ended(
            request_id, _STATUS.get(reason, _FAILED), usage, is_complete=is_complete, first_token_ns=first_ns or None
        )

    @_guarded
    def engine_lost(self, engine: int) -> None:
        """Note that an engine's process has ended, so that no more events come from it."""
        self._has_recorder[engine] = False
        self._log.complete_all()

    @_guarded
    def moved(self, change: ExpertsMoved) -> None:
        """Note that a group serves by another expert table."""
        self._log.moved(change)
        if self._write is not None:
            self._write(change)

    def trace(self, request_id: str) -> RequestTrace | None:
        """Return the trace of a request by its id, or by that of its answer; None means unknown or forgotten."""
        return self._log.trace(request_id) or self._log.trace(f"{request_id}-0")

    def recent(self, limit: int) -> list[RequestTrace]:
        """Return traces of the newest requests, as `DecisionLog.recent` does."""
        return self._log.recent(limit)

    @_guarded
    def close(self) -> None:
        """Write the traces of ended requests whose engines have yet to report on them."""
        self._log.complete_all()

    # --- from the engines

    @_guarded
    def took(self, engine: int, events: Sequence[SchedulingEvent]) -> None:
        """Take in what the scheduler of an engine did."""
        for event in events:
            self._take(engine, event)

    def _take(self, engine: int, event: SchedulingEvent) -> None:
        match event:
            case PoliciesStarted():
                self._has_recorder[engine], self._observes[engine] = True, event.observes
                self._replayed(engine, event)
            case OrderDecision() | EvictDecision():
                self._replayed(engine, event)
            case SequenceLeft():
                self._left_engine(engine, event)
            case _:
                self._happened(engine, event)

    def _happened(self, engine: int, event: RequestEvent) -> None:
        """Add an event to the traces of its requests."""
        name = self._names[engine]
        match event:
            case BatchPassed():
                for request_id in (*event.by, *event.passed):
                    self._log.scheduled(request_id, name, event)
            case SequencePreempted():
                self._log.scheduled(event.request_id, name, event)
                if event.by != event.request_id:
                    self._log.scheduled(event.by, name, event)
            case SequenceQueued() | SequenceAdmitted():
                self._log.scheduled(event.request_id, name, event)
                if isinstance(event, SequenceAdmitted) and self._observes[engine]:
                    self._replayed(engine, event)

    def _left_engine(self, engine: int, event: SequenceLeft) -> None:
        self._log.visited(event.request_id, self._names[engine], event.visits)
        if self._observes[engine]:
            self._replayed(engine, msgspec.structs.replace(event, visits=()))
        if self._log.is_running(event.request_id):
            self._left[event.request_id] = engine
        else:
            self._log.complete(event.request_id)

    def _replayed(self, engine: int, event: SchedulingEvent) -> None:
        if self._write is not None:
            self._write(ScheduledOn(engine, event))


def _both(
    write: Callable[[Entry], None] | None, on_trace: Callable[[RequestTrace], None] | None
) -> Callable[[RequestTrace], None] | None:
    """Return the receiver of traces for two receivers, of which each may be None."""
    if write is None or on_trace is None:
        return write or on_trace

    def receive(trace: RequestTrace) -> None:
        write(trace)
        on_trace(trace)

    return receive
