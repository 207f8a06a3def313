"""Health checks: background tasks that watch each engine while the router runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from moestro.gateway.clients.http_headers import LOOP_STATUS
from moestro.gateway.engines.fleet import Fleet, RoutedEngine
from moestro.gateway.engines.probe_client import NoAnswerError, ask
from moestro.routing.health.engine_health import Condition
from moestro.routing.scrape import MAX_BYTES, ScrapedLoad, scrape
from moestro.routing.settings import EngineSpec

logger = logging.getLogger(__name__)

MODELS_EVERY_S = 10.0
_MAX_MODELS_BYTES = 4 << 20
_MAX_HEALTH_BYTES = 64 << 10
_FORWARDED_PATH = "/get_model_info"  # Routers forward it, and engines answer it at no cost, if only with 404.
_AGAIN_S = 1.0
_MOST_CHECKS = 4  # of one engine at once; an engine that hangs for long holds no more connections
# A check is judged this long after its time is over. If this process was stopped, its answer is read meanwhile.
_READ_S = 0.02
_WELL = frozenset({Condition.UP, Condition.SUSPECTED})  # checked at the intervals of `Silence`

Watcher = Callable[[RoutedEngine], Awaitable[None]]  # watches one engine until cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRules:
    """Intervals and time limits of the checks.

    Attributes:
        health_path: path of the health check.
        soon_s: interval between checks of an unhealthy engine, seconds.
        limit_s: time after which an unanswered check is missed, seconds. Its answer still counts later.
        timeout_s: time for an engine to answer, seconds.
        metrics_s: interval between reads of `/metrics`, seconds; 0 disables them.
    """

    health_path: str = "/health"
    soon_s: float = 0.5
    limit_s: float = 1.0
    timeout_s: float = 3.0
    metrics_s: float = 1.0


class Watch:
    """Runs every watcher for every engine.

    Args:
        watchers: watchers, each run as one task per engine. Other sources, such as KV events, are watchers too.
    """

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers
        self._tasks: dict[RoutedEngine, list[asyncio.Task[None]]] = {}

    def begin(self, engine: RoutedEngine) -> None:
        """Start watching `engine`."""
        self._tasks[engine] = [asyncio.create_task(_run(watcher, engine)) for watcher in self._watchers]

    async def end(self, engine: RoutedEngine) -> None:
        """Stop watching `engine`."""
        tasks = self._tasks.pop(engine, [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stop watching all engines."""
        for engine in list(self._tasks):
            await self.end(engine)


class HealthWatch:
    """Watcher that runs the health checks, and periodically reads the engine's models.

    A check does not wait for the one before it. So an engine that answers late is found to be alive, and one that hangs
    has missed several checks after a few seconds.
    """

    def __init__(self, fleet: Fleet, rules: WatchRules) -> None:
        self._fleet = fleet
        self._rules = rules

    async def __call__(self, engine: RoutedEngine) -> None:
        """Check the engine's health until cancelled."""
        running: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as checks:
            while True:
                pause_ns = self._next_check_ns(engine) - time.monotonic_ns()
                if pause_ns > 0:
                    await asyncio.sleep(pause_ns * 1e-9)
                elif len(running) >= _MOST_CHECKS:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                else:
                    sent_ns = time.monotonic_ns()
                    engine.silence.checked(sent_ns)
                    task = checks.create_task(self._check(engine, sent_ns))
                    running.add(task)
                    task.add_done_callback(running.discard)

    def _next_check_ns(self, engine: RoutedEngine) -> int:
        silence = engine.silence
        if engine.condition in _WELL:
            return silence.next_check_ns
        return silence.checked_ns + int(self._rules.soon_s * 1e9)

    async def _check(self, engine: RoutedEngine, sent_ns: int) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._rules.limit_s, loop.call_later, _READ_S, self._miss, engine, sent_ns)
        passed = await self._passes(engine)
        if passed and time.monotonic() >= engine.models_due_s:
            engine.models_due_s = time.monotonic() + MODELS_EVERY_S
            if not await self._learn_models(engine):
                engine.models_due_s = 0.0
        now_ns = time.monotonic_ns()
        engine.health.checked(now_ns, passed=passed)
        if passed:
            engine.unreachable = ""
        self._fleet.look(engine, now_ns)

    def _miss(self, engine: RoutedEngine, sent_ns: int) -> None:
        """Count a check as missed, unless the engine has sent any byte since."""
        silence, now_ns = engine.silence, time.monotonic_ns()
        num_missed = silence.num_missed
        silence.missed(sent_ns)
        if silence.num_missed > num_missed:
            engine.unreachable = f"{self._rules.health_path}: nothing for {(now_ns - sent_ns) * 1e-9:.1f} s"
            self._fleet.look(engine, now_ns)

    async def _passes(self, engine: RoutedEngine) -> bool:
        try:
            status, body = await ask(engine, self._rules.health_path, self._rules.timeout_s, _MAX_HEALTH_BYTES)
        except NoAnswerError as error:
            engine.unreachable = f"{self._rules.health_path}: {error}"
            return False
        if self._is_own_refusal(status, body):
            self._fleet.looped(engine, time.monotonic_ns())
            return False
        if status >= 300:
            engine.unreachable = f"{self._rules.health_path} answered {status}"
        elif engine.health.is_loop_check_due(time.monotonic_ns()):
            await self._check_loop(engine)
        return status < 300

    async def _check_loop(self, engine: RoutedEngine) -> None:
        """Ask through the engine, because a router that leads back here answers its health check itself."""
        try:
            status, body = await ask(engine, _FORWARDED_PATH, self._rules.timeout_s, _MAX_HEALTH_BYTES)
        except NoAnswerError:
            return  # This shows neither a loop nor that there is none.
        if self._is_own_refusal(status, body):
            self._fleet.looped(engine, time.monotonic_ns())
        else:
            engine.health.loop_ended(time.monotonic_ns())

    def _is_own_refusal(self, status: int, body: bytes) -> bool:
        return status == LOOP_STATUS and self._fleet.pseudonym in body

    async def _learn_models(self, engine: RoutedEngine) -> bool:
        try:
            status, body = await ask(engine, "/v1/models", self._rules.timeout_s, _MAX_MODELS_BYTES)
        except NoAnswerError:
            return False
        if status == 200:
            self._fleet.models.learn(engine.row, body)
        return True


class MetricsWatch:
    """Watcher that reads `/metrics` and reports its figures to the router."""

    def __init__(self, fleet: Fleet, rules: WatchRules) -> None:
        self._fleet = fleet
        self._rules = rules

    async def __call__(self, engine: RoutedEngine) -> None:
        """Read `/metrics` until cancelled, at growing intervals for an engine without it."""
        pause_s = self._rules.metrics_s
        spec: EngineSpec | None = None
        while pause_s:
            asked_ns = time.monotonic_ns()
            try:
                status, text = await ask(engine, "/metrics", self._rules.timeout_s, MAX_BYTES)
            except NoAnswerError:
                status, text = 0, b""
            if status == 200:
                load = scrape(text)
                self._report(engine, load, asked_ns)
                spec = self._specify(engine, load, spec)
            pause_s = min(60.0, 2 * pause_s) if status == 404 else self._rules.metrics_s
            await asyncio.sleep(pause_s)

    def _report(self, engine: RoutedEngine, load: ScrapedLoad, asked_ns: int) -> None:
        """Report figures as of the time of the request, because they contain nothing that arrived later."""
        now_ns = time.monotonic_ns()
        self._fleet.router.report(engine.row, load.figures, asked_ns, now_ns)
        engine.totals = load.totals
        if load.num_tokens_computed is not None:
            num_in_flight = self._fleet.router.num_in_flight_on(engine.row)
            engine.health.counted(load.num_tokens_computed, num_in_flight, now_ns)

    def _specify(self, engine: RoutedEngine, load: ScrapedLoad, known: EngineSpec | None) -> EngineSpec | None:
        if load.num_kv_tokens is None and load.block_size is None:
            return known
        num_blocks = None if load.num_kv_tokens is None else load.num_kv_tokens // self._fleet.block_tokens
        spec = EngineSpec(num_blocks=num_blocks, block_size=load.block_size)
        if spec != known:
            self._fleet.router.set_spec(engine.row, spec)
        return spec


async def _run(watcher: Watcher, engine: RoutedEngine) -> None:
    """Run a watcher, and restart it after an unexpected exception so that the engine does not stay unwatched."""
    while True:
        try:
            await watcher(engine)
            return
        except Exception:
            logger.exception("the watcher of engine %s failed; it is restarted", engine.name)
        await asyncio.sleep(_AGAIN_S)
