"""The figures of `moestro route` for the page at `/`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from moestro.core.clock import NS_PER_S
from moestro.core.load_figures import FIGURES, ROUTED_FIGURES, FigureUnit, LoadFigures
from moestro.core.views import Figure
from moestro.gateway.engines.fleet import Fleet, RoutedEngine
from moestro.gateway.metrics import Counts
from moestro.web.errors import is_client_error, is_overload
from moestro.web.statistics import Durations, EngineStatistics, LiveStatistics

_WHOLE = {FigureUnit.REQUESTS, FigureUnit.TOKENS, FigureUnit.TIMES}


@dataclass(slots=True, kw_only=True)
class FleetStatistics:
    """Reads the figures from the router's own state.

    Attributes:
        policy: Text form of the route policy.
        fresh_ns: Age up to which an engine's figures count.
        clients_port, operators_port: Ports of both planes, once they are bound.
    """

    fleet: Fleet
    counts: Counts
    policy: str
    fresh_ns: int
    clients_port: int | None = None
    operators_port: int | None = None

    def read(self) -> LiveStatistics:
        """Return the present figures."""
        now_ns, engines = time.monotonic_ns(), list(self.fleet)
        return LiveStatistics(
            program="route",
            policy=self.policy,
            mode=None,
            time_s=now_ns / NS_PER_S,
            num_requests=self.fleet.router.num_in_flight,
            num_refused=self.counts.refusals.total(),
            num_client_errors=self.counts.refusals.num_client_errors + _answers(engines, is_client_error),
            num_overload=self.counts.refusals.num_overload + _answers(engines, is_overload),
            num_retried=self.counts.retries.total(),
            first_token_s=Durations.of(engine.counts.first_byte_s for engine in engines),
            gap_s=None,
            clients_port=self.clients_port,
            operators_port=self.operators_port,
            engines=[self._engine(engine, now_ns) for engine in engines],
        )

    def json(self) -> bytes:
        """Return the present figures as JSON."""
        return msgspec.json.encode(self.read())

    def _engine(self, engine: RoutedEngine, now_ns: int) -> EngineStatistics:
        counts = engine.counts
        return EngineStatistics(
            name=engine.name,
            condition=engine.condition,
            breaker=self.fleet.breaker_state(engine),
            num_in_flight=self.fleet.router.num_in_flight_on(engine.row),
            num_requests=counts.num_decisions,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_cached_tokens=counts.num_hit_tokens,
            num_generated_tokens=engine.totals.num_generated_tokens,
            prompt_token_s=engine.totals.prompt_token_s,
            load=msgspec.structs.replace(
                self._load(engine.row, now_ns),
                num_queried_tokens=engine.totals.num_queried_tokens,
                num_hit_tokens=engine.totals.num_hit_tokens,
            ),
        )

    def _load(self, row: int, now_ns: int) -> LoadFigures:
        """Return the engine's figures that are fresh enough for the route policy."""
        found: dict[str, float] = {}
        for name in ROUTED_FIGURES:
            column: Figure = getattr(self.fleet.router.table, name)
            if column.known(now_ns, self.fresh_ns)[row]:
                value = float(column.values[row])
                found[name] = int(value) if FIGURES[name].unit in _WHOLE else value
        return msgspec.convert(found, LoadFigures)


def _answers(engines: Iterable[RoutedEngine], is_counted: Callable[[int], bool]) -> int:
    """Return how many answers of engines have a status of some kind."""
    return sum(count for engine in engines for status, count in engine.counts.statuses.items() if is_counted(status))
