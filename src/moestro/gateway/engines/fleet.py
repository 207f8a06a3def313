"""The engines behind the router: their connections, health and counts, and their place in the rotation."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from moestro.core.request import Request
from moestro.errors import ConfigError, NoEngineError
from moestro.gateway.clients.http_headers import EngineHead
from moestro.gateway.engines.models import Models
from moestro.gateway.engines.upstream import Pool
from moestro.gateway.metrics import EngineCounts
from moestro.routing.health.breaker import BreakerState
from moestro.routing.health.engine_health import Condition, Health, HealthRules
from moestro.routing.health.silence import Silence
from moestro.routing.router import RouteDecision, Router
from moestro.routing.scrape import EngineTotals

logger = logging.getLogger(__name__)

_IN_ROTATION = frozenset({Condition.UP, Condition.PROBING, Condition.SUSPECTED})
_CONDITIONS_OF_A_NEW_PROCESS = frozenset({Condition.DOWN, Condition.OPEN})


class RouteBounds(NamedTuple):
    """What bounds the choice of an engine for a request.

    Attributes:
        model: Model that the engine must serve. None, or a model that no engine lists, allows every engine.
        tried: Rows of engines that have failed this request.
        client: Name of the client. Needed only while the fleet has pauses.
    """

    model: str | None
    tried: Collection[int] = ()
    client: Hashable = None


@dataclass(slots=True, eq=False, kw_only=True)
class RoutedEngine:
    """One engine behind the router.

    Attributes:
        row: Number of the engine in the router.
        name: Name of the engine in headers, logs and metrics.
        url: Base URL of the engine.
        condition: Result of the last health verdict, which decides whether the engine gets requests.
        last_byte_ns: Time of the last byte of an answer; 0 after the health verdict has used it.
        num_streaming: Number of answers that have begun and not ended.
        unreachable: Cause of the last connection failure; empty after a success.
        num_forgotten: Number of times that the router discarded the known cache contents.
        totals: What the engine counted since its start, as its `/metrics` showed last.
        models_due_s: Time on `time.monotonic` at which the engine's models are read again.
    """

    row: int
    name: str
    url: str
    pool: Pool
    head: EngineHead
    health: Health
    counts: EngineCounts = field(default_factory=EngineCounts)
    condition: Condition = Condition.UNCHECKED
    last_byte_ns: int = 0
    num_streaming: int = 0
    unreachable: str = ""
    num_forgotten: int = 0
    totals: EngineTotals = field(default_factory=EngineTotals)
    models_due_s: float = 0.0

    @property
    def silence(self) -> Silence:
        """Signs of life, with all bytes that have arrived by now."""
        silence = self.health.silence
        silence.arrived(self.pool.arrived_ns)
        return silence


class Fleet:
    """All engines behind the router.

    Args:
        router: Router that chooses among the engines in rotation.
        block_tokens: Tokens per block of the router.

    Attributes:
        models: Models of each engine.
        pseudonym: Name of this router in Via. No client can guess it, so none can make the router refuse others.
        names: Names by row, including removed engines. Adding an engine replaces the tuple.
    """

    def __init__(self, router: Router, block_tokens: int, rules: HealthRules, now_ns: Callable[[], int]) -> None:
        self.router = router
        self.block_tokens = block_tokens
        self._rules = rules
        self._now_ns = now_ns
        self._by_row: dict[int, RoutedEngine] = {}
        self.names: tuple[str, ...] = ()
        self._returning: set[int] = set()  # Rows in slow start or in doubt.
        self._suspected: set[int] = set()  # Rows that get requests only where no other engine can.
        self._pausing: set[int] = set()  # Rows that some clients leave alone for now.
        self.models = Models()
        self.pseudonym = f"moestro-{secrets.token_hex(8)}".encode()

    def __iter__(self) -> Iterator[RoutedEngine]:
        return iter(tuple(self._by_row.values()))

    def __len__(self) -> int:
        return len(self._by_row)

    def __getitem__(self, row: int) -> RoutedEngine:
        return self._by_row[row]

    def add(self, name: str, url: str, pool: Pool, head: EngineHead) -> RoutedEngine:
        """Add an engine, which gets requests once a health check has passed.

        Raises:
            ConfigError: Another engine has this name or address.
        """
        for engine in self._by_row.values():
            if engine.name == name or engine.url == url:
                raise ConfigError(f"engine {name}={url}: {engine.name}={engine.url} exists already")
        row = self.router.add_engine()
        self.names = (*self.names[:row], name, *self.names[row + 1 :])
        health = Health(self._rules, self._now_ns())
        engine = self._by_row[row] = RoutedEngine(row=row, name=name, url=url, pool=pool, head=head, health=health)
        return engine

    def remove(self, engine: RoutedEngine) -> None:
        """Send `engine` no more requests; its running requests still finish."""
        del self._by_row[engine.row]
        self._returning.discard(engine.row)
        self._pausing.discard(engine.row)
        self._suspected.discard(engine.row)
        self.router.remove_engine(engine.row, self._now_ns())
        self.models.forget(engine.row)

    def named(self, name: str) -> RoutedEngine | None:
        """Return the engine named `name`, or None for an unknown name."""
        return next((engine for engine in self._by_row.values() if engine.name == name), None)

    @property
    def has_pauses(self) -> bool:
        """Whether some clients leave some engines alone, so that `submit` needs to know the client."""
        return bool(self._pausing)

    def submit(self, request: Request, bounds: RouteBounds, now_ns: int) -> RouteDecision:
        """Let the router choose an engine for a request.

        Raises:
            NoEngineError: No engine is left; the error contains the time after which to retry.
            QueueFullError: All remaining engines are full.
        """
        is_open = not (bounds.tried or self._returning or self._suspected or self._pausing) and self.models.are_alike
        exclude = () if is_open else self._excluded(bounds, now_ns)
        try:
            return self.router.submit(request, now_ns, exclude)
        except NoEngineError as error:
            error.retry_after_s = self._retry_after_s(now_ns)
            raise

    def look_now(self, engine: RoutedEngine) -> None:
        """Update the condition of `engine` after the operator changed it."""
        self.look(engine, self._now_ns())

    def look(self, engine: RoutedEngine, now_ns: int) -> None:
        """Update the condition of `engine`, and take it into rotation or out of it."""
        if self._by_row.get(engine.row) is not engine:
            return
        num_in_flight = self.router.num_in_flight_on(engine.row)
        health = engine.health
        if engine.last_byte_ns:
            health.progressed(num_in_flight, engine.last_byte_ns)
            health.streamed()
            engine.last_byte_ns = 0
        wait_ns = self._longest_wait_ns(engine, now_ns) if engine.silence.num_missed else 0
        before, after = engine.condition, health.condition(num_in_flight, engine.num_streaming, now_ns, wait_ns)
        engine.condition = after
        is_routable = after in _IN_ROTATION
        if is_routable != self.router.is_routable(engine.row):
            self.router.set_routable(engine.row, routable=is_routable)
        if is_routable and health.share(now_ns) < 1:
            self._returning.add(engine.row)
        else:
            self._returning.discard(engine.row)
        if health.pauses.last(now_ns):
            self._pausing.add(engine.row)
        else:
            self._pausing.discard(engine.row)
        if after is Condition.SUSPECTED:
            self._suspected.add(engine.row)
        else:
            self._suspected.discard(engine.row)
        if before is not after:
            self._log_change(engine, before, now_ns)

    def looped(self, engine: RoutedEngine, now_ns: int) -> None:
        """Record that a request for `engine` has come back to this router."""
        engine.counts.num_loops += 1
        engine.health.looped(now_ns)
        engine.unreachable = "it leads back to this router, which answers 508"
        self.look(engine, now_ns)

    def lost(self, engine: RoutedEngine, cause: str, now_ns: int) -> None:
        """Record that `engine` is unreachable, and discard the known contents of its cache."""
        engine.unreachable = cause
        if self._by_row.get(engine.row) is engine:
            num_forgotten = engine.num_forgotten
            self.look(engine, now_ns)
            if engine.num_forgotten == num_forgotten:  # `look` discards them only when the engine leaves rotation.
                self._forget(engine, now_ns)

    def has_other(self, tried: Collection[int], model: str | None) -> bool:
        """Return whether an engine outside of `tried` that serves `model` gets requests, and is not suspected."""
        barred = self._suspected.union(tried, self.models.excluded(model))
        return any(row not in barred and self.router.is_routable(row) for row in self._by_row)

    def is_ready(self, engine: RoutedEngine) -> bool:
        """Return whether `engine` gets requests as long as any other engine does."""
        return self.router.is_routable(engine.row) and engine.row not in self._suspected

    @property
    def num_up(self) -> int:
        """Number of engines that get requests."""
        return self.router.num_routable

    def _excluded(self, bounds: RouteBounds, now_ns: int) -> list[int]:
        """Return the rows in rotation that must not get this request."""
        lacking = self.models.excluded(bounds.model)
        in_rotation = [row for row in self._by_row if self.router.is_routable(row)]
        excluded = [row for row in in_rotation if row in bounds.tried or row in lacking]
        left = [row for row in in_rotation if row not in excluded]
        if trusted := [row for row in left if row not in self._suspected]:
            excluded += [row for row in left if row in self._suspected]
            left = trusted
        # An engine that has refused this client is the last resort: it refuses again in its own words, or serves.
        calm = [row for row in left if not self._is_paused(row, bounds.client, now_ns)]
        if calm and len(calm) < len(left):
            excluded += [row for row in left if row not in calm]
            left = calm
        settled = [row for row in left if row not in self._returning]
        if settled and len(settled) < len(left):
            most = max(self.router.num_in_flight_on(row) for row in settled)
            excluded += [row for row in left if row in self._returning and not self._has_share(row, most, now_ns)]
        return excluded

    def _is_paused(self, row: int, client: Hashable, now_ns: int) -> bool:
        return row in self._pausing and self._by_row[row].health.pauses.concern(client, now_ns)

    def _longest_wait_ns(self, engine: RoutedEngine, now_ns: int) -> int:
        """Return the time for which a request has waited for its first byte; 0 means that none waits."""
        since_ns = self.router.waits_since_ns(engine.row)
        return 0 if since_ns is None else now_ns - since_ns

    def _has_share(self, row: int, most: int, now_ns: int) -> bool:
        """Return whether an engine in slow start may get one more request; settled engines have at most `most`."""
        share = self._by_row[row].health.share(now_ns)
        return self.router.num_in_flight_on(row) < max(1, math.ceil(share * most))

    def _retry_after_s(self, now_ns: int) -> int:
        waits = [wait for engine in self._by_row.values() if (wait := engine.health.wait_ns(now_ns)) is not None]
        return min(60, max(1, math.ceil(min(waits, default=0) / 1e9)))

    def _log_change(self, engine: RoutedEngine, before: Condition, now_ns: int) -> None:
        engine.counts.num_transitions += 1
        after = engine.condition
        if after is Condition.UP:
            engine.unreachable = ""
            logger.info("engine %s is up (was %s)", engine.name, before)
            return
        cause = f": {engine.unreachable}" if engine.unreachable else ""
        level = logging.INFO if after in (Condition.DRAINING, Condition.PROBING, Condition.BUSY) else logging.WARNING
        logger.log(level, "engine %s is %s%s", engine.name, after, cause)
        if after in _CONDITIONS_OF_A_NEW_PROCESS and before not in _CONDITIONS_OF_A_NEW_PROCESS:
            self._forget(engine, now_ns)

    def _forget(self, engine: RoutedEngine, now_ns: int) -> None:
        engine.num_forgotten += 1
        self.router.engine_lost(engine.row, now_ns)

    def breaker_state(self, engine: RoutedEngine) -> BreakerState:
        """Return the present state of an engine's breaker."""
        return engine.health.breaker.state(self._now_ns())
