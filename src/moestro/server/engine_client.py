"""The front door's view of its engines: who is ready, which request is where, who waits for its outputs. No sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moestro.core.hashing import name_key
from moestro.core.request import FinishReason, Output, Request
from moestro.core.views import EngineFigures
from moestro.errors import ConfigError, EngineDiedError, MoestroError, NoEngineError, QueueFullError, RequestError
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec
from moestro.server.metrics import Metrics
from moestro.server.rank_errors import RefusedByRankError
from moestro.web.errors import GenerationError, InternalError
from moestro.wire.messages import (
    Abort,
    Add,
    Failed,
    FromRank,
    Heartbeat,
    ModelInfo,
    Outputs,
    Phase,
    RankLoad,
    Ready,
    Refused,
    ToRank,
)
from moestro.workload.request_record import RecordedRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The engine of a request has ended; the outputs before this are all that came of it.

    The reader of the inbox calls `Engines.move`, or ends the answer with `error`.
    """

    request_id: str
    error: RequestError


# One per HTTP request; after an error nothing more is worth reading.
Inbox = asyncio.Queue[Output | Interrupted | RequestError]

# A request that has lost this many engines and one more may be the cause, even if it gains tokens in between.
MAX_MOVES = 3
HOMELESS_S = 60.0  # how long a request that lost its engine waits for another


@dataclass(slots=True)
class _Flight:
    """One request on its way.

    Attributes:
        engine: the engine that has it or, between two engines, had it last.
        is_placed: whether `engine` has it.
        is_prefilling: whether no output has come from that engine.
        num_moves: number of engines that it was moved away from.
        num_tokens: tokens of its answer so far.
        num_tokens_before: `num_tokens` at its last move.
        has_output, has_token: whether an output, and a token, has come from any engine.
    """

    request: Request
    inbox: Inbox
    engine: int
    is_placed: bool = True
    is_prefilling: bool = True
    num_moves: int = 0
    num_tokens: int = 0
    num_tokens_before: int = 0
    has_output: bool = False
    has_token: bool = False
    num_hit_tokens: int = 0
    admitted_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0

    def may_move(self) -> bool:
        """Whether another engine may be risked. A request that gained nothing on its last one may be what ended it."""
        got_on = not self.num_moves or self.num_tokens > self.num_tokens_before
        return got_on and self.num_moves < MAX_MOVES


class Engines:
    """Sends requests to engines and their outputs to whoever waits.

    Args:
        router: chooses engines; this object tells it who can be chosen.
        send: hands a message to a rank; raises `NoEngineError` if it cannot be reached.
        metrics: where everything is counted.
        now_ns: the clock of the requests' `arrival_ns`.

    Attributes:
        on_answered: told of each request that was answered whole; None: nobody wants to know.
        loads: how full each engine said it is, after its last step.
        phases: of each engine's last start.

    Invariants: every submitted request ends once: by an output with a finish reason, a refusal, `abort`, or an error
    when its engine ends and no other takes it over. No output of an engine that ended reaches an inbox after the
    `Interrupted`: a request has no engine until `move`, and an engine takes requests again only once `RankSocket`
    ignores its former process.
    """

    def __init__(
        self,
        router: Router,
        send: Callable[[int, ToRank], None],
        metrics: Metrics,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._router = router
        self._send = send
        self._metrics = metrics
        self._now_ns = now_ns
        self._flights: dict[str, _Flight] = {}
        self._homeless: dict[str, int] = {}  # until when each waits
        self._unsent_aborts: dict[int, list[str]] = {}  # by engine: ids of which it could not be told
        self._causes: dict[int, MoestroError] = {}
        self._is_up = [False] * router.num_engines
        self.loads = [RankLoad()] * router.num_engines
        self.phases: list[list[Phase]] = [[] for _ in range(router.num_engines)]
        self.on_answered: Callable[[RecordedRequest], None] | None = None
        self._ready: list[asyncio.Future[ModelInfo]] = [
            asyncio.get_running_loop().create_future() for _ in range(router.num_engines)
        ]

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._flights)

    @property
    def is_healthy(self) -> bool:
        """Whether any engine takes requests."""
        return self._router.num_routable > 0

    def is_routable(self, engine: int) -> bool:
        """Whether this one does."""
        return self._router.is_routable(engine)

    def num_in_flight_on(self, engine: int) -> int:
        """Requests of one engine that have not ended."""
        return self._router.num_in_flight_on(engine)

    async def all_ready(self) -> list[ModelInfo]:
        """Wait for every engine.

        Raises:
            ConfigError, EngineDiedError: one of them failed; the text is its cause.
        """
        return await asyncio.gather(*self._ready)

    # --- from the handlers

    def submit(self, request: Request, inbox: Inbox) -> None:
        """Send `request` to the engine that the router chooses; what becomes of it comes to `inbox`.

        Raises:
            NoEngineError: no engine is ready.
            QueueFullError: each has as many waiting requests as it may have.
        """
        self._flights[request.request_id] = _Flight(request, inbox, self._send_somewhere(request))

    def check_room(self) -> None:
        """Raise what `submit` would raise now."""
        self._router.check_room()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Stop a request, if it has not ended; `reason`: under which its end is counted."""
        flight = self._end(request_id, reason)
        if flight is None or not flight.is_placed:
            return
        try:
            self._send(flight.engine, Abort((request_id,)))
        except NoEngineError:  # it is gone, or does not keep up with what is sent
            self._unsent_aborts.setdefault(flight.engine, []).append(request_id)

    def move(self, request: Request, *, has_begun: bool) -> None:
        """Send an interrupted request to another engine, now or when there is one; ignored if it was aborted meanwhile.

        Args:
            request: with the tokens from which it goes on, or none: its answer begins anew.
            has_begun: whether the client has a part of the answer.
        """
        flight = self._flights.get(request.request_id)
        if flight is None:
            return
        metrics = self._metrics.engines[flight.engine]
        metrics.num_moved += 1
        metrics.num_streams_resumed += has_begun
        flight.request = request
        flight.num_moves += 1
        flight.num_tokens_before, flight.num_tokens = flight.num_tokens, request.num_resumed_tokens
        self._homeless[request.request_id] = self._now_ns() + int(HOMELESS_S * 1e9)
        self._place(flight)

    def fail_all(self, error: RequestError) -> None:
        """End every request with `error`, and stop it on its engine."""
        for request_id, flight in list(self._flights.items()):
            flight.inbox.put_nowait(error)
            self.abort(request_id, FinishReason.ERROR)

    # --- from the supervisor

    def set_trusted(self, engine: int, *, trusted: bool) -> None:
        """Take an engine that is up into rotation, or out of it because it does not get on."""
        self._router.set_routable(engine, routable=trusted and self._is_up[engine])

    def settle_homeless(self) -> None:
        """Find engines for the requests that lost theirs; those that have waited for too long end."""
        now_ns = self._now_ns()
        for request_id, deadline_ns in list(self._homeless.items()):
            if now_ns >= deadline_ns:
                self._fail(request_id, NoEngineError())
            elif not self._place(self._flights[request_id]):
                break

    def extend_homeless(self, by_ns: int) -> None:
        """Let the requests that lost their engine wait longer: in that time no other could be started."""
        for request_id in self._homeless:
            self._homeless[request_id] += by_ns

    def retry_aborts(self) -> None:
        """Tell the engines of the aborts that they could not be told of: else they would compute for nobody."""
        for engine, request_ids in list(self._unsent_aborts.items()):
            with contextlib.suppress(NoEngineError):
                self._send(engine, Abort(tuple(request_ids)))
                del self._unsent_aborts[engine]

    def fail_homeless(self) -> None:
        """No engine will come back: end the requests that wait for one."""
        for request_id in list(self._homeless):
            self._fail(request_id, NoEngineError())

    # --- from the ranks

    def on_message(self, engine: int, message: FromRank) -> None:
        """Take in what a rank said."""
        match message:
            case Outputs():
                now_ns = self._now_ns()
                self.loads[engine] = message.load
                try:
                    self._router.report(engine, _figures(message.load), message.as_of_ns, now_ns)
                finally:  # figures that the router cannot take must not cost a request its tokens
                    for output in message.outputs:
                        with self._ending_on_error(output.request_id):
                            self._deliver(engine, output, now_ns)
            case Heartbeat():
                pass
            case Refused():
                with self._ending_on_error(message.request_id):
                    if flight := self._end(message.request_id, None):
                        flight.inbox.put_nowait(RefusedByRankError(message))
            case Phase():
                self.phases[engine].append(message)
                logger.info("engine %d: %s took %.2f s", engine, message.name, message.seconds)
            case Ready():
                self._is_up[engine] = True
                self._router.set_spec(engine, EngineSpec(num_blocks=message.info.num_blocks))
                self._router.set_routable(engine, routable=True)
                if not self._ready[engine].done():
                    self._ready[engine].set_result(message.info)
                self.settle_homeless()
            case Failed():
                kind = ConfigError if message.is_config else EngineDiedError
                self._causes[engine] = kind(message.cause)
                self._take_down(engine)

    def on_exit(self, engine: int, how: str) -> MoestroError:
        """A rank's process has ended: its requests are interrupted, or end. `how`: one line. Returns the cause."""
        cause = self._causes.pop(engine, None) or EngineDiedError(f"engine {engine}: {how}")
        self._take_down(engine)
        self._unsent_aborts.pop(engine, None)
        self._router.engine_lost(engine, self._now_ns())
        self.loads[engine] = RankLoad()
        self.phases[engine].clear()
        if not self._ready[engine].done():
            self._ready[engine].set_exception(cause)
            self._ready[engine].exception()  # seen: of several that fail, only the first is waited for
            return cause
        error = GenerationError("The engine that served this request has stopped. Retry.", code="engine_died")
        for request_id, flight in list(self._flights.items()):
            if flight.engine != engine or not flight.is_placed:
                continue
            self._router.ended(request_id, self._now_ns())
            flight.is_placed = False
            if flight.may_move():
                flight.inbox.put_nowait(Interrupted(request_id, error))
            else:
                self._fail(request_id, error)
        return cause

    # --- inside

    def _take_down(self, engine: int) -> None:
        """Out of rotation until it is ready again."""
        self._is_up[engine] = False
        self._router.set_routable(engine, routable=False)

    def _send_somewhere(self, request: Request) -> int:
        while True:
            engine = self._router.submit(request, self._now_ns()).engine
            try:
                self._send(engine, Add(request))
            except NoEngineError:  # its end will be noticed presently; until then it is out of rotation
                self._router.ended(request.request_id, self._now_ns())
                self._router.set_routable(engine, routable=False)
            except Exception:
                self._router.ended(request.request_id, self._now_ns())
                raise
            else:
                return engine

    def _place(self, flight: _Flight) -> bool:
        """Send a request that lost its engine to another. Returns whether that is settled: it went, or it ended."""
        request_id = flight.request.request_id
        try:
            flight.engine = self._send_somewhere(flight.request)
        except (NoEngineError, QueueFullError):
            return False
        except Exception:  # of a user's policy, for instance: the others are to be placed nevertheless
            logger.exception("request %s could not move to another engine", request_id)
            self._fail(request_id, InternalError(request_id))
            return True
        flight.is_placed = flight.is_prefilling = True
        del self._homeless[request_id]
        return True

    @contextlib.contextmanager
    def _ending_on_error(self, request_id: str) -> Iterator[None]:
        """An error of ours inside the block, in counting for instance, ends this request with an error, and no more."""
        flight = self._flights.get(request_id)
        try:
            yield
        except Exception:
            self._metrics.num_delivery_errors += 1
            logger.exception(
                "request %s ends with an error, because a message of its engine could not be processed", request_id
            )
            if flight is None:
                return
            flight.inbox.put_nowait(InternalError(request_id))
            with contextlib.suppress(Exception):  # the same error again; the client has its answer
                self.abort(request_id, FinishReason.ERROR)

    def _deliver(self, engine: int, output: Output, now_ns: int) -> None:
        flight = self._flights.get(output.request_id)
        if flight is None or flight.engine != engine or not flight.is_placed:
            return  # aborted, or interrupted, while this was on its way
        if output.finish_reason is FinishReason.NON_FINITE:
            logger.error(
                "engine %d: request %s ended after %d tokens: its logits are not finite (NaN or infinity)",
                engine, output.request_id, flight.num_tokens,
            )  # fmt: skip
        else:
            self._measure(flight, output, now_ns)
        if output.finish_reason is not None:
            self._end(output.request_id, output.finish_reason)
        flight.inbox.put_nowait(output)

    def _measure(self, flight: _Flight, output: Output, now_ns: int) -> None:
        metrics, num_tokens = self._metrics.engines[flight.engine], len(output.token_ids)
        if flight.is_prefilling:
            flight.is_prefilling = False
            self._router.first_token(flight.request.request_id, now_ns)
        if not flight.has_output:
            flight.has_output = True
            flight.admitted_ns, flight.num_hit_tokens = output.admitted_ns, output.num_cached_tokens
            metrics.num_prompt_tokens += flight.request.num_prompt_tokens
            metrics.queue_s[flight.request.service_class].observe(
                (output.admitted_ns - flight.request.arrival_ns) / 1e9
            )
            metrics.prefill_s.observe((now_ns - output.admitted_ns) / 1e9)
        if not num_tokens:
            return  # a prompt was scored, and nothing generated
        metrics.num_generated_tokens += num_tokens
        if flight.has_token:
            metrics.gap_s.observe((now_ns - flight.last_ns) / 1e9)
        else:
            flight.has_token = True
            metrics.first_token_s[flight.request.service_class].observe((now_ns - flight.request.arrival_ns) / 1e9)
            flight.first_ns = now_ns
        flight.num_tokens += num_tokens
        flight.last_ns = now_ns

    def _fail(self, request_id: str, error: RequestError) -> None:
        if flight := self._end(request_id, FinishReason.ERROR):
            flight.inbox.put_nowait(error)

    def _end(self, request_id: str, reason: FinishReason | None) -> _Flight | None:
        """Take a request out of the books; `reason` None: it was refused, which is counted elsewhere."""
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return None
        self._homeless.pop(request_id, None)
        if flight.is_placed:
            self._router.ended(request_id, self._now_ns(), flight.num_tokens)
        if reason is not None:
            self._count_end(flight, reason)
        return flight

    def _count_end(self, flight: _Flight, reason: FinishReason) -> None:
        metrics = self._metrics.engines[flight.engine]
        metrics.ended[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            if self.on_answered is not None:
                self.on_answered(_recorded(flight))
            metrics.whole_s.observe((self._now_ns() - flight.request.arrival_ns) / 1e9)
            metrics.decode_s.observe((flight.last_ns - flight.first_ns) / 1e9)
            metrics.prompt_tokens.observe(flight.request.num_prompt_tokens)
            metrics.generation_tokens.observe(flight.num_tokens)
            if flight.num_tokens > 1:
                mean_gap_s = (flight.last_ns - flight.first_ns) / 1e9 / (flight.num_tokens - 1)
                metrics.mean_gap_s[flight.request.service_class].observe(mean_gap_s)


def _recorded(flight: _Flight) -> RecordedRequest:
    request = flight.request
    return RecordedRequest(
        request_id=request.request_id,
        arrival_ns=request.arrival_ns,
        admitted_ns=flight.admitted_ns,
        first_token_ns=flight.first_ns,
        last_token_ns=flight.last_ns,
        engine=flight.engine,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=flight.num_tokens,
        num_hit_tokens=flight.num_hit_tokens,
        max_tokens=request.sampling.max_tokens,
        block_hashes=request.block_hashes,
        priority=request.priority,
        service_class=request.service_class,
        user=name_key(request.user),
    )


def _figures(load: RankLoad) -> EngineFigures:
    return EngineFigures(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        kv_usage=load.kv_usage,
        queued_prefill_tokens=load.queued_prefill_tokens,
        num_tokens=load.num_tokens,
    )
