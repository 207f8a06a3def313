"""The front door's view of its engines: who is ready, which request is where, who waits for its outputs. No sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from moestro.cluster.router import Router
from moestro.core.request import Output, Request
from moestro.errors import ConfigError, EngineDiedError, MoestroError, NoEngineError, RequestError
from moestro.serve.messages import Abort, Add, Failed, FromRank, ModelInfo, Outputs, Phase, Ready, Refused, ToRank
from moestro.serve.refusals import GenerationError, RefusedByRankError

logger = logging.getLogger(__name__)

Inbox = asyncio.Queue[Output | RequestError]  # one per HTTP request; after an error nothing more is worth reading


@dataclass(slots=True)
class EngineLoad:
    """How full an engine said it is, after its last step."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # fraction 0 .. 1


@dataclass(frozen=True, slots=True)
class _Flight:
    engine: int
    inbox: Inbox


class Engines:
    """Sends requests to engines and their outputs to whoever waits.

    Args:
        num_engines: engines, numbered from 0.
        route_policy: a name that `Router` knows.
        send: hands a message to a rank; raises `NoEngineError` if it cannot be reached.

    Invariant: every submitted request ends once: by an output with a finish reason, a refusal, `abort`, or its
    engine's end. Until then the router counts it, afterwards nobody does.
    """

    def __init__(self, num_engines: int, route_policy: str, send: Callable[[int, ToRank], None]) -> None:
        self._router = Router(num_engines, route_policy)
        self._send = send
        self._flights: dict[str, _Flight] = {}
        self._causes: dict[int, MoestroError] = {}
        self.loads = [EngineLoad() for _ in range(num_engines)]
        self.phases: dict[int, list[Phase]] = {engine: [] for engine in range(num_engines)}
        self._ready: list[asyncio.Future[ModelInfo]] = [
            asyncio.get_running_loop().create_future() for _ in range(num_engines)
        ]

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return self._router.num_in_flight

    @property
    def is_healthy(self) -> bool:
        """Whether any engine takes requests."""
        return self._router.num_routable > 0

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
            NoEngineError: no engine can take it.
        """
        engine = self._router.submit(request).engine
        try:
            self._send(engine, Add(request))
        except NoEngineError:
            self._router.ended(engine)
            raise
        self._flights[request.request_id] = _Flight(engine, inbox)

    def abort(self, request_id: str) -> None:
        """Stop a request, if it has not ended."""
        flight = self._end(request_id)
        if flight is None:
            return
        try:
            self._send(flight.engine, Abort((request_id,)))
        except NoEngineError:
            logger.debug("engine %d is gone, and %s with it", flight.engine, request_id)

    def fail_all(self, error: RequestError) -> None:
        """End every request with `error`, and stop it on its engine."""
        for request_id, flight in list(self._flights.items()):
            flight.inbox.put_nowait(error)
            self.abort(request_id)

    # --- from the ranks

    def on_message(self, engine: int, message: FromRank) -> None:
        """Take in what a rank said."""
        match message:
            case Outputs():
                self.loads[engine] = EngineLoad(message.num_running, message.num_waiting, message.kv_usage)
                for output in message.outputs:
                    self._deliver(output)
            case Refused():
                if flight := self._end(message.request_id):
                    flight.inbox.put_nowait(RefusedByRankError(message))
            case Phase():
                self.phases[engine].append(message)
                logger.info("engine %d: %s took %.2f s", engine, message.name, message.seconds)
            case Ready():
                self._router.set_routable(engine, routable=True)
                if not self._ready[engine].done():
                    self._ready[engine].set_result(message.info)
            case Failed():
                kind = ConfigError if message.is_config else EngineDiedError
                self._causes[engine] = kind(message.cause)

    def on_exit(self, engine: int, how: str) -> None:
        """A rank's process has ended: so have its requests. `how`: one line."""
        cause = self._causes.get(engine) or EngineDiedError(f"engine {engine}: {how}")
        self._router.set_routable(engine, routable=False)
        self.loads[engine] = EngineLoad()
        if not self._ready[engine].done():
            self._ready[engine].set_exception(cause)
            self._ready[engine].exception()  # seen: of several that fail, only the first is waited for
            return
        logger.error("engine %d is gone: %s", engine, cause)
        error = GenerationError("The engine that served this request has stopped. Retry.", code="engine_died")
        for request_id, flight in list(self._flights.items()):
            if flight.engine == engine:
                self._end(request_id)
                flight.inbox.put_nowait(error)

    def _deliver(self, output: Output) -> None:
        request_id = output.request_id
        # Unknown: aborted while this was on its way.
        flight = self._flights.get(request_id) if output.finish_reason is None else self._end(request_id)
        if flight is not None:
            flight.inbox.put_nowait(output)

    def _end(self, request_id: str) -> _Flight | None:
        flight = self._flights.pop(request_id, None)
        if flight is not None:
            self._router.ended(flight.engine)
        return flight
