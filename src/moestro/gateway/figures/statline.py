"""Log lines about traffic, written every ten seconds while there is any."""

from __future__ import annotations

from dataclasses import dataclass

from moestro.gateway.engines.fleet import Fleet, RoutedEngine
from moestro.gateway.figures.prometheus import imbalance
from moestro.gateway.metrics import Counts

_MAX_LINES = 16  # limit of engines shown; /metrics has all


@dataclass(frozen=True, slots=True)
class _RouteTotals:
    """Totals of one engine at one moment."""

    num_decisions: int
    num_prompt: int
    num_predicted: float
    num_hit: int


class RouteLines:
    """Makes the traffic lines of each interval."""

    def __init__(self, fleet: Fleet, counts: Counts) -> None:
        self._fleet = fleet
        self._counts = counts
        self._before: dict[RoutedEngine, _RouteTotals] = {}
        self._refusals_before = self._retries_before = 0

    def lines(self, seconds: float) -> list[str]:
        """Return a line for each engine with requests in the last `seconds`, and one for all engines."""
        router, found = self._fleet.router, []
        num_decisions = 0
        engines = list(self._fleet)
        for engine in engines:
            gained = self._gained(engine)
            num_in_flight = router.num_in_flight_on(engine.row)
            num_decisions += gained.num_decisions
            if gained.num_decisions or num_in_flight:
                found.append(_line(engine, gained, num_in_flight, seconds))
        refusals, retries = self._counts.refusals.total(), self._counts.retries.total()
        num_refused, self._refusals_before = refusals - self._refusals_before, refusals
        num_retried, self._retries_before = retries - self._retries_before, retries
        if not found and not num_refused:
            return []
        whole = (
            f"all: {router.num_in_flight} in flight, {num_decisions / seconds:.1f} requests/s, {num_retried} retried,"
            f" {num_refused} refused, imbalance {imbalance(self._fleet, engines):.2f},"
            f" {self._fleet.num_up} of {len(engines)} engines up"
        )
        return [*found[:_MAX_LINES], whole]

    def _gained(self, engine: RoutedEngine) -> _RouteTotals:
        c = engine.counts
        now = _RouteTotals(c.num_decisions, c.num_prompt_tokens, c.num_predicted_tokens, c.num_hit_tokens)
        old = self._before.get(engine, _RouteTotals(0, 0, 0.0, 0))
        self._before[engine] = now
        return _RouteTotals(
            now.num_decisions - old.num_decisions,
            now.num_prompt - old.num_prompt,
            now.num_predicted - old.num_predicted,
            now.num_hit - old.num_hit,
        )


def _line(engine: RoutedEngine, gained: _RouteTotals, num_in_flight: int, seconds: float) -> str:
    hits = ""
    if gained.num_prompt:
        predicted, actual = gained.num_predicted / gained.num_prompt, gained.num_hit / gained.num_prompt
        hits = f", prefix hits {actual:.0%} (predicted {predicted:.0%})"
    condition = "" if engine.condition == "up" else f", {engine.condition}"
    return f"{engine.name}: {num_in_flight} in flight, {gained.num_decisions / seconds:.1f} requests/s{hits}{condition}"
