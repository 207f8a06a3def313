"""The API server's client of its engines: sends requests and aborts, delivers outputs. Uses no sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

from moestro.core.load_figures import IDLE
from moestro.core.request import WITHOUT_TOKEN, FinishReason, ModelInfo, Output, Request
from moestro.errors import ConfigError, EngineDiedError, MoestroError, NoEngineError, QueueFullError, RequestError
from moestro.routing.router import RouteDecision, Router
from moestro.routing.settings import EngineSpec
from moestro.server.engines.engine_reports import ExpertLoads, RequestLog
from moestro.server.engines.request_state import Inbox, Interrupted, Metrics, PromptChoices, RequestState
from moestro.web.errors import GenerationError, InternalError
from moestro.wire.load_report import LoadReport, merged_load
from moestro.wire.messages import (
    Abort,
    Add,
    EngineEvents,
    ExpertReport,
    Failed,
    FromRank,
    Outputs,
    Phase,
    ReadExperts,
    Ready,
    Refused,
    ToRank,
)
from moestro.workload.traces.request_record import RecordedRequest

logger = logging.getLogger(__name__)


Client = Hashable


class WaitingClients:
    """Counts the requests of each client that are prepared, or that wait in an engine for their first token.

    A full queue has an equal share for each client. A request of a client with less than that is sent to the engine
    all the same, and the engine takes a place from the client that has most (`engine.waiting`).
    The queues on the way to an engine thus have at most twice the places of one.

    Args:
        num_engines: Number of engines.
        num_places: Places of each engine's queue; None means no limit, so that no queue is ever full.
    """

    def __init__(self, num_engines: int, num_places: int | None) -> None:
        self._num_places = num_places or 0
        self._coming: Counter[Client] = Counter()
        self._waiting: list[Counter[Client]] = [Counter() for _ in range(num_engines)]
        self._place_of: dict[str, tuple[int, Client]] = {}

    @property
    def num_coming(self) -> int:
        """Number of requests that are being prepared."""
        return self._coming.total()

    @contextlib.contextmanager
    def coming(self, client: Client) -> Iterator[None]:
        """Count a request that is being prepared."""
        self._coming[client] += 1
        try:
            yield
        finally:
            _count_down(self._coming, client)

    def add(self, engine: int, client: Client, request_id: str) -> None:
        """Count a request that was sent to an engine."""
        self._place_of[request_id] = engine, client
        self._waiting[engine][client] += 1

    def discard(self, request_id: str) -> None:
        """Stop counting a request. A request that is not counted is ignored."""
        place = self._place_of.pop(request_id, None)
        if place is not None:
            engine, client = place
            _count_down(self._waiting[engine], client)

    def may_come(self, client: Client) -> bool:
        """Return whether a request of `client` is worth its preparation although all queues are full."""
        return _has_share(sum(self._waiting, self._coming), client, self._num_places * len(self._waiting))

    def makes_room_for(self, client: Client) -> list[int]:
        """Return the engines in whose full queues another client gives way to `client`."""
        return [engine for engine, held in enumerate(self._waiting) if _has_share(held, client, self._num_places)]


def _has_share(held: Counter[Client], client: Client, num_places: int) -> bool:
    """Return whether `client` has less than an equal share, and another client more than it would have."""
    num_own = held[client]
    others = [count for other, count in held.items() if other != client]
    share = max(1, num_places // (len(others) + 1))
    return num_own < share and max(others, default=0) > num_own + 1


def _count_down(counts: Counter[Client], client: Client) -> None:
    counts[client] -= 1
    if not counts[client]:
        del counts[client]


class RefusedByRankError(RequestError):
    """A rank refused a request; built from the rank's message.

    Attributes:
        request_id: Id of the request.
        may_be_repeated: Whether the rank may take the same request later.
    """

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message, param=refused.param, code=refused.code)
        self.request_id = refused.request_id
        self.may_be_repeated = refused.code == "queue_full"
        self.http_status = refused.http_status
        self.error_type = refused.error_type
        self.retry_after_s = refused.retry_after_s


_MOST_NAMED = 8  # engines in a line of the log
UNASSIGNED_S = 60.0  # Time that a request which lost its engine waits for another one, in seconds.


class EngineClient:
    """Sends requests to engines, and delivers the outputs to the requests' inboxes.

    Args:
        router: Router, which chooses engines; the client decides which of them are routable.
        send: Callable that sends a message to a rank; raises `NoEngineError` if the rank cannot be reached.
        metrics: Counters of requests, tokens and times.
        now_ns: Clock of the requests' `arrival_ns`.
        is_one_group: Whether the engines begin every step together.

    Attributes:
        follows_caches: Whether the engines report which blocks their prefix caches hold, because the router asks.
        on_answered: Callback for each request with a complete answer; None means no callback.
        loads: Load figures of each engine after its last step.
        phases: Phases of each engine's last start.
        expert_loads: Load of the experts, as the engines reported it last.
        log: Notes what happens to requests; None means that nothing does.

    Invariants: Every submitted request ends once: by an output with a finish reason, a refusal, `abort`, or an error.
    The error is for a request whose engine ended and which no other engine takes over. No output of an ended engine
    reaches an inbox after the `Interrupted`, because a request has no engine until `move`. An engine takes requests
    again only once `RankSocket` ignores its former process.
    """

    def __init__(
        self,
        router: Router,
        send: Callable[[int, ToRank], None],
        metrics: Metrics,
        now_ns: Callable[[], int] = time.monotonic_ns,
        *,
        is_one_group: bool = False,
    ) -> None:
        self._router = router
        self._group = 0 if is_one_group else None
        self._send = send
        self._metrics = metrics
        self._now_ns = now_ns
        self._requests: dict[str, RequestState] = {}
        self._waiting = WaitingClients(router.num_engines, router.max_num_queued)
        self._unassigned: dict[str, int] = {}  # Deadline of each request that waits for another engine.
        self._unsent_aborts: dict[int, list[str]] = {}  # Ids whose abort could not be sent, by engine.
        self._causes: dict[int, MoestroError] = {}
        self.expert_loads = ExpertLoads(router.num_engines, self._ask_experts)
        self.log: RequestLog | None = None
        self.follows_caches = router.num_engines > 1 and router.needs.hits
        self._is_up = [False] * router.num_engines
        self.loads = [IDLE] * router.num_engines
        self._reported_ns = [now_ns()] * router.num_engines
        self.phases: list[list[Phase]] = [[] for _ in range(router.num_engines)]
        self.on_answered: Callable[[RecordedRequest], None] | None = None
        self._ready: list[asyncio.Future[ModelInfo]] = [
            asyncio.get_running_loop().create_future() for _ in range(router.num_engines)
        ]

    @property
    def num_in_flight(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    @property
    def is_healthy(self) -> bool:
        """Whether any engine takes requests."""
        return self._router.num_routable > 0

    def is_routable(self, engine: int) -> bool:
        """Return whether `engine` takes requests."""
        return self._router.is_routable(engine)

    def num_in_flight_on(self, engine: int) -> int:
        """Return the number of requests of one engine that have not ended."""
        return self._router.num_in_flight_on(engine)

    def describe_unready(self) -> str:
        """Return some engines that are not ready, and the last phase of the start that each of them has completed."""
        unready = [engine for engine, is_up in enumerate(self._is_up) if not is_up]
        parts = [
            f"engine {engine} after {self.phases[engine][-1].name!r}"
            if self.phases[engine]
            else f"engine {engine} at its start"
            for engine in unready[:_MOST_NAMED]
        ]
        if len(unready) > _MOST_NAMED:
            parts.append(f"{len(unready) - _MOST_NAMED} more")
        return ", ".join(parts)

    async def all_ready(self) -> list[ModelInfo]:
        """Wait until every engine is ready, and return their model information.

        Raises:
            ConfigError, EngineDiedError: An engine failed; the text is the cause.
        """
        return await asyncio.gather(*self._ready)

    # --- from the handlers

    def submit(self, request: Request, inbox: Inbox, choices: PromptChoices | None = None) -> None:
        """Send `request` to the engine that the router chooses, and deliver its outputs to `inbox`.

        Args:
            choices: All choices of the request's prompt; None means that it is the only one.

        Raises:
            NoEngineError: No engine is ready.
            QueueFullError: The waiting queue of every engine is full, and no other client gives way in any.
        """
        state = RequestState(request, inbox, self._send_somewhere(request))
        if choices is not None:
            state.choices = choices
        self._requests[request.request_id] = state
        self._waiting.add(state.engine, request.client, request.request_id)

    def unused_id(self, request_id: str) -> str:
        """Return `request_id`, with a number behind it if a running request has it."""
        unused, number = request_id, 1
        while unused in self._requests:
            number += 1
            unused = f"{request_id}~{number}"
        return unused

    @contextlib.contextmanager
    def preparing(self, client: str | None) -> Iterator[None]:
        """Count a request of `client` that is being prepared, because it will need a place in a queue."""
        with self._waiting.coming(client):
            yield

    def check_room(self, client: str | None) -> None:
        """Raise the error that `submit` would raise after the requests that are being prepared."""
        try:
            self._router.check_room(num_coming=self._waiting.num_coming)
        except QueueFullError:
            if not self._waiting.may_come(client):
                raise

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Stop a request and count its end under `reason`. A request that has ended is ignored."""
        state = self._end(request_id, reason)
        if state is not None and state.is_placed:
            self._send_abort(state.engine, request_id)

    def _send_abort(self, engine: int, request_id: str) -> None:
        try:
            self._send(engine, Abort((request_id,)))
        except NoEngineError:  # The engine has ended, or does not keep up with its messages.
            self._unsent_aborts.setdefault(engine, []).append(request_id)

    def move(self, request: Request, *, has_begun: bool) -> None:
        """Send an interrupted request to another engine, at once or when one is ready. Aborted requests are ignored.

        Args:
            request: Request with the tokens to continue from; without such tokens its answer starts again.
            has_begun: Whether the client has received a part of the answer.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return
        metrics = self._metrics.engines[state.engine]
        metrics.num_moved += 1
        metrics.num_streams_resumed += has_begun
        state.moved(request)
        self._unassigned[request.request_id] = self._now_ns() + int(UNASSIGNED_S * 1e9)
        self._place(state)

    def replace(self, request_id: str, request: Request) -> None:
        """Stop a request on its engine, and let an engine continue its answer as `request`, which has another id.

        Both count as one request. An aborted request is ignored.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        now_ns = self._now_ns()
        self._unassigned.pop(request_id, None)
        self._waiting.discard(request_id)
        if self.log is not None:
            self.log.ended(state.request, state.engine, FinishReason.STOP, state.num_tokens, state.first_ns)
        if state.is_placed:
            self._router.ended(request_id, now_ns, state.num_tokens)
            self._send_abort(state.engine, request_id)
        state.request, state.num_tokens, state.is_placed = request, request.num_resumed_tokens, False
        self._requests[request.request_id] = state
        self._unassigned[request.request_id] = now_ns + int(UNASSIGNED_S * 1e9)
        self._place(state, "its reasoning reached its budget")

    def fail_all(self, error: RequestError) -> None:
        """End every request with `error`, and stop it on its engine."""
        for request_id, state in list(self._requests.items()):
            state.inbox.put_nowait(error)
            self.abort(request_id, FinishReason.ERROR)

    # --- from the supervisor

    def set_trusted(self, engine: int, *, trusted: bool) -> None:
        """Add a running engine to the rotation, or remove an engine that makes no progress."""
        self._router.set_routable(engine, routable=trusted and self._is_up[engine])

    def settle_unassigned(self) -> None:
        """Assign unassigned requests to engines, and fail those past their deadline."""
        now_ns = self._now_ns()
        for request_id, deadline_ns in list(self._unassigned.items()):
            if now_ns >= deadline_ns:
                self._fail(request_id, NoEngineError())
            elif not self._place(self._requests[request_id]):
                break

    def extend_unassigned(self, by_ns: int) -> None:
        """Extend the deadlines of unassigned requests by a time in which no engine could be started."""
        for request_id in self._unassigned:
            self._unassigned[request_id] += by_ns

    def retry_aborts(self) -> None:
        """Send unsent aborts again, so that engines do not compute for disconnected clients."""
        for engine, request_ids in list(self._unsent_aborts.items()):
            with contextlib.suppress(NoEngineError):
                self._send(engine, Abort(tuple(request_ids)))
                del self._unsent_aborts[engine]

    def fail_unassigned(self) -> None:
        """Fail the unassigned requests, because no engine will be restarted."""
        for request_id in list(self._unassigned):
            self._fail(request_id, NoEngineError())

    # --- from the ranks

    def on_ready(self, infos: Mapping[int, ModelInfo]) -> None:
        """Add engines to the rotation, all of them before any request is sent to one.

        Args:
            infos: Model information of each engine that is ready.
        """
        for engine, info in infos.items():
            self._is_up[engine] = True
            spec = EngineSpec(num_blocks=info.num_blocks, num_host_blocks=info.num_host_blocks, group=self._group)
            self._router.set_spec(engine, spec)
            if self.follows_caches:
                now_ns = self._now_ns()
                self._router.kv_cleared(engine, now_ns)
                self._router.kv_stored(engine, b"", now_ns)  # So that an empty cache counts as known.
            self._router.set_routable(engine, routable=True)
            if not self._ready[engine].done():
                self._ready[engine].set_result(info)
        self.settle_unassigned()

    def load_report(self) -> LoadReport:
        """Return the last report of all engines, and its age. That of an engine without requests is as of now."""
        now_ns, oldest_ns = self._now_ns(), 0
        for engine, reported_ns in enumerate(self._reported_ns):
            if self._router.num_in_flight_on(engine):
                oldest_ns = max(oldest_ns, now_ns - reported_ns)
        return LoadReport(oldest_ns // 1000, merged_load(self.loads))

    def on_message(self, engine: int, message: FromRank) -> None:
        """Process a message of a rank."""
        match message:
            case Outputs():
                now_ns = self._now_ns()
                self.loads[engine], self._reported_ns[engine] = message.load, message.as_of_ns
                try:
                    self._router.report(engine, message.load, message.as_of_ns, now_ns)
                    self._follow_cache(engine, message, now_ns)
                finally:  # An error of the router must not lose the outputs.
                    self._deliver_all(engine, message.outputs, now_ns)
            case Refused():
                self._refuse(message)
            case ExpertReport() | EngineEvents():
                self._take_report(engine, message)
            case Phase():
                self.phases[engine].append(message)
                logger.info("engine %d: %s took %.2f s", engine, message.name, message.seconds)
            case Ready(info):
                assert info is not None, "a worker without attention is no engine"
                self.on_ready({engine: info})
            case Failed():
                kind = ConfigError if message.is_config else EngineDiedError
                self._causes[engine] = kind(message.cause)
                self._take_down(engine)

    def _follow_cache(self, engine: int, message: Outputs, now_ns: int) -> None:
        """Pass on changes of the engine's prefix cache, before an output ends a prompt's claim on it."""
        if message.removed:
            self._router.kv_removed(engine, message.removed, now_ns)
        if message.stored:
            self._router.kv_stored(engine, message.stored, now_ns)
        if message.hosted:
            self._router.kv_hosted(engine, message.hosted, now_ns)

    def _take_report(self, engine: int, report: ExpertReport | EngineEvents) -> None:
        if isinstance(report, ExpertReport):
            self.expert_loads.on_message(engine, report, self._now_ns())
        elif self.log is not None:
            self.log.took(engine, report.events)

    def on_exit(self, engine: int, how: str) -> MoestroError:
        """Interrupt or end the requests of a rank whose process has ended, and return the cause.

        Args:
            how: One line that says how the process ended.
        """
        cause = self._causes.pop(engine, None) or EngineDiedError(f"engine {engine}: {how}")
        self._take_down(engine)
        self._unsent_aborts.pop(engine, None)
        if self.log is not None:
            self.log.engine_lost(engine)
        self._router.engine_lost(engine, self._now_ns())
        self.loads[engine] = IDLE
        self.expert_loads.ended(engine)
        self.phases[engine].clear()
        if not self._ready[engine].done():
            self._ready[engine].set_exception(cause)
            self._ready[engine].exception()  # Marked as retrieved: of several failures, only the first is awaited.
            return cause
        error = GenerationError("The engine that served this request has stopped. Retry.", code="engine_died")
        for request_id, state in list(self._requests.items()):
            if state.engine != engine or not state.is_placed:
                continue
            self._router.ended(request_id, self._now_ns())
            state.is_placed = False
            self._waiting.discard(request_id)
            if state.may_move():
                state.inbox.put_nowait(Interrupted(request_id, error))
            else:
                self._fail(request_id, error)
        return cause

    # --- inside

    def _ask_experts(self, engine: int, question: ReadExperts) -> bool:
        """Send a question to an engine that takes requests; others are not in the loop that reads messages."""
        if not self._is_up[engine]:
            return False
        try:
            self._send(engine, question)
        except NoEngineError:
            return False
        return True

    def _take_down(self, engine: int) -> None:
        """Remove an engine from the rotation until it is ready again."""
        self._is_up[engine] = False
        self._router.set_routable(engine, routable=False)

    def _send_somewhere(self, request: Request, because: str = "") -> int:
        while True:
            decision = self._decide(request)
            engine = decision.engine
            try:
                self._send(engine, Add(request))
            except NoEngineError:  # The engine is out of rotation until the supervisor handles its end.
                self._router.ended(request.request_id, self._now_ns())
                self._router.set_routable(engine, routable=False)
            except Exception:
                self._router.ended(request.request_id, self._now_ns())
                raise
            else:
                if self.log is not None:
                    self.log.routed(request, decision, because)
                return engine

    def _decide(self, request: Request) -> RouteDecision:
        """Let the router choose an engine with room or, where none has, one in which another client gives way."""
        now_ns = self._now_ns()
        try:
            return self._router.submit(request, now_ns)
        except QueueFullError:
            making_room = self._waiting.makes_room_for(request.client)
            if not making_room:
                raise
            return self._router.submit(request, now_ns, making_room=making_room)

    def _place(self, state: RequestState, because: str = "") -> bool:
        """Send an unassigned request to an engine, and return whether it was sent or has ended.

        Args:
            because: Why it is sent; empty means that its engine has ended.
        """
        request_id = state.request.request_id
        try:
            state.engine = self._send_somewhere(state.request, because or f"engine {state.engine} ended")
        except (NoEngineError, QueueFullError):
            return False
        except Exception:  # A user's policy may raise; the other requests must still be placed.
            logger.exception("request %s could not move to another engine", request_id)
            self._fail(request_id, InternalError(request_id))
            return True
        state.is_placed = state.is_prefilling = True
        self._waiting.add(state.engine, state.request.client, request_id)
        del self._unassigned[request_id]
        return True

    def _deliver_all(self, engine: int, outputs: Iterable[Output], now_ns: int) -> None:
        """Deliver the outputs of one step, and count its tokens."""
        metrics = self._metrics.engines[engine]
        num_before = metrics.num_prompt_tokens + metrics.num_generated_tokens
        for output in outputs:
            state = self._requests.get(output.request_id)
            # Another output was aborted or interrupted while it was in transit.
            if state is not None and state.engine == engine and state.is_placed:
                self._deliver(state, output, now_ns)
        if num_new := metrics.num_prompt_tokens + metrics.num_generated_tokens - num_before:
            metrics.step_tokens.observe(num_new)

    def _deliver(self, state: RequestState, output: Output, now_ns: int) -> None:
        """Count an output, and put it into the inbox of its request. An error ends only this request."""
        try:
            reason = output.finish_reason
            if reason is FinishReason.NON_FINITE:  # The other reasons without a token are the client's.
                logger.error(
                    "engine %d: request %s ended after %d tokens: its logits are not finite (NaN or infinity)",
                    state.engine, output.request_id, state.num_tokens,
                )  # fmt: skip
            if reason not in WITHOUT_TOKEN:
                if state.is_prefilling:
                    state.is_prefilling = False
                    self._waiting.discard(output.request_id)
                    self._router.first_token(output.request_id, now_ns)
                state.count_output(output, self._metrics.engines[state.engine], now_ns)
            if reason is not None:
                self._end(output.request_id, reason)
            state.inbox.put_nowait(output)
        except Exception:
            self._end_on_error(state, output.request_id)

    def _refuse(self, refusal: Refused) -> None:
        state = self._requests.get(refusal.request_id)
        try:
            if ended := self._end(refusal.request_id, None):
                ended.inbox.put_nowait(RefusedByRankError(refusal))
        except Exception:
            self._end_on_error(state, refusal.request_id)

    def _end_on_error(self, state: RequestState | None, request_id: str) -> None:
        """End a request whose message raised the current exception. A `state` of None means that it has ended."""
        self._metrics.num_delivery_errors += 1
        logger.exception(
            "request %s ends with an error, because a message of its engine could not be processed", request_id
        )
        if state is None:
            return
        state.inbox.put_nowait(InternalError(request_id))
        with contextlib.suppress(Exception):  # The same error may recur; the client has its response.
            self.abort(request_id, FinishReason.ERROR)

    def _fail(self, request_id: str, error: RequestError) -> None:
        if state := self._end(request_id, FinishReason.ERROR):
            state.inbox.put_nowait(error)

    def _end(self, request_id: str, reason: FinishReason | None) -> RequestState | None:
        """Remove a request. A `reason` of None means a refusal, which is counted elsewhere."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        self._unassigned.pop(request_id, None)
        self._waiting.discard(request_id)
        if state.is_placed:
            self._router.ended(request_id, self._now_ns(), state.num_tokens, *state.cached_shares)
        if reason is not None:
            self._count_end(state, reason)
        if self.log is not None:
            self.log.ended(state.request, state.engine, reason, state.num_tokens, state.first_ns)
        return state

    def _count_end(self, state: RequestState, reason: FinishReason) -> None:
        metrics = self._metrics.engines[state.engine]
        metrics.ended[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            if self.on_answered is not None:
                self.on_answered(state.recorded())
            state.count_answer(metrics, self._now_ns())
