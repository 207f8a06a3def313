"""What engines report besides tokens: loads of experts, and what each level did with a request. Uses no sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad, SourceLoad, merge_sources
from moestro.core.processes import ending_on_error
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
from moestro.routing.decision_log import DecisionLog, RequestTrace, ServerFacts
from moestro.routing.decision_record import Entry, ScheduledOn
from moestro.routing.router import RouteDecision
from moestro.web.record_file import read_clocks
from moestro.wire.messages import ExpertReport, ReadExperts, load_of

logger = logging.getLogger(__name__)


# A report costs an engine less than a millisecond, and a scrape shows the one that the scrape before it requested.
REFRESH_NS = 5_000_000_000
ANSWER_S = 2.0  # an engine in a long step answers after it; until then its last report counts


@dataclass(slots=True)
class EngineReport:
    """What is known of one engine.

    Attributes:
        load: Load of its last report; None while it has counted nothing. It outlives the engine's process.
        at_ns: Time of the report; None means that none came.
        error: Why the engine counts no longer; "" means that it does.
        earlier_steps: Steps of former processes since the windows were cleared.
    """

    load: SourceLoad | None = None
    at_ns: int | None = None
    error: str = ""
    earlier_steps: int = 0

    @property
    def num_steps(self) -> int:
        """Steps of the present process's window."""
        return 0 if self.load is None else self.load.num_steps

    @property
    def num_visits(self) -> int:
        """Visits of tokens to experts since the process started."""
        return 0 if self.load is None else int(self.load.counts.sum())


@dataclass(slots=True, eq=False)
class _Question:
    """A question's number, the engines that have not answered it, and the event that all have."""

    number: int
    waits_for: set[int]
    answered: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, eq=False)
class GroupLoad:
    """Load of the experts by the tokens of all engines.

    Attributes:
        load: The load; each engine is a source.
        layers: int64[layers], the network's layer of each of its layers.
    """

    load: ExpertLoad
    layers: NDArray[np.int64]

    @property
    def balance(self) -> NDArray[np.float64]:
        """float64[layers], mean load of the experts over the largest; 1 means even, and no load counts as even."""
        total = self.load.total
        largest = total.max(axis=1)
        balance: NDArray[np.float64] = np.divide(
            total.mean(axis=1), largest, out=np.ones(len(total)), where=largest > 0
        )
        return balance


class ExpertLoads:
    """Asks engines for the load of their experts, and combines their reports.

    Args:
        num_engines: Number of engines.
        ask: Callable that sends a question to an engine, and returns whether the engine can be reached.

    Attributes:
        engines: What is known of each engine.
    """

    def __init__(self, num_engines: int, ask: Callable[[int, ReadExperts], bool]) -> None:
        self._ask = ask
        self.engines = [EngineReport() for _ in range(num_engines)]
        self._questions: list[_Question] = []
        self._number = 0  # of the last question
        self._last_question_ns: int | None = None
        self._merged: GroupLoad | None = None
        self._is_merged = False

    # --- questions --------------------------------------------------------------------------------------------------

    async def read(self, *, with_pairs: bool = False, clear: bool = False) -> None:
        """Ask all engines, and wait until they have answered, for at most `ANSWER_S`.

        Args:
            with_pairs: Whether to ask for pairs of experts.
            clear: Whether the engines empty their windows first.
        """
        number, waits_for = self._ask_all(with_pairs=with_pairs, clear=clear)
        if clear:
            for report in self.engines:
                report.earlier_steps = 0
        if not waits_for:
            return
        question = _Question(number, waits_for)
        self._questions.append(question)
        try:
            async with asyncio.timeout(ANSWER_S):
                await question.answered.wait()
        except TimeoutError:
            pass  # The reports say how old they are.
        finally:
            self._questions.remove(question)

    def refresh(self, now_ns: int) -> None:
        """Ask all engines without waiting, unless that was done a moment ago."""
        if self._last_question_ns is None or now_ns - self._last_question_ns >= REFRESH_NS:
            self._last_question_ns = now_ns
            self._ask_all()

    def _ask_all(self, *, with_pairs: bool = False, clear: bool = False) -> tuple[int, set[int]]:
        """Send a question. Returns its number, and the engines that will answer it."""
        self._number += 1
        question = ReadExperts(self._number, with_pairs=with_pairs, clear=clear)
        return self._number, {engine for engine in range(len(self.engines)) if self._ask(engine, question)}

    # --- from the engines -------------------------------------------------------------------------------------------

    def on_message(self, engine: int, message: ExpertReport, now_ns: int) -> None:
        """Take in a report.

        Raises:
            ValueError: Its arrays do not fit each other; the last report stays.
        """
        report = self.engines[engine]
        load = load_of(message)
        if load is not None and load.pairs is None and report.load is not None and load.num_steps:
            load = replace(load, pairs=report.load.pairs)  # The last ones, because not every question requests them.
        if load is not None or message.error:
            report.load = load or report.load
        report.at_ns, report.error = now_ns, message.error
        self._is_merged = False
        self._answered(engine, message.number)

    def ended(self, engine: int) -> None:
        """Note that an engine's process has ended. Its last report stays, until the next process has counted steps."""
        report = self.engines[engine]
        if report.load is not None:
            report.earlier_steps += report.load.num_steps
            report.load = replace(report.load, num_steps=0)
        self._is_merged = False
        self._answered(engine, self._number)

    def _answered(self, engine: int, number: int) -> None:
        for question in self._questions:
            if question.number <= number:
                question.waits_for.discard(engine)
                if not question.waits_for:
                    question.answered.set()

    # --- for operators ----------------------------------------------------------------------------------------------

    def num_steps(self) -> list[int]:
        """Return the steps of each engine since its window was cleared, with those of its former processes."""
        return [report.num_steps + report.earlier_steps for report in self.engines]

    def load(self) -> ExpertLoad | None:
        """Return the load of all engines together; None means that nothing was counted."""
        merged = self.merged()
        return None if merged is None else merged.load

    def merged(self) -> GroupLoad | None:
        """Return the load of all engines together; None means that nothing was counted."""
        if not self._is_merged:
            found = merge_sources([_with_earlier(report) for report in self.engines])
            self._merged = None if found is None else GroupLoad(*found)
            self._is_merged = True
        return self._merged


def _with_earlier(report: EngineReport) -> SourceLoad | None:
    """Return the load with the steps of former processes, which tell how busy the engine is."""
    if report.load is None:
        return None
    return replace(report.load, num_steps=report.load.num_steps + report.earlier_steps)


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
