"""Watcher of the sources of the route policy: log lines and metrics about those that an engine does not supply."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.gateway.engines.fleet import Fleet, RoutedEngine
from moestro.routing.kv.source_watch import KV_EVENTS, SourceChange, SourceNews, SourceWatch

logger = logging.getLogger(__name__)

_LOOK_S = 1.0

HasEvents = Callable[[RoutedEngine], bool]  # whether an engine has a publisher of KV events


class SourceReports(Collector):
    """Says once which sources an engine does not supply, and once that they are back.

    Args:
        fleet: engines, and the router whose policy needs the sources.
        policy: name of the policy, for log lines.
        fresh_ns: age up to which a figure counts, ns.
        has_events: whether an engine has a publisher of KV events.
    """

    def __init__(self, fleet: Fleet, policy: str, fresh_ns: int, has_events: HasEvents) -> None:
        self._fleet = fleet
        self._policy = policy
        self._needs = fleet.router.needs
        self._has_events = has_events
        self._fresh_ns = fresh_ns
        self._watch = SourceWatch(self._needs, fresh_ns)
        self._lacking: dict[int, set[str]] = {}  # by engine, figures that others have; each is logged once

    async def __call__(self, engine: RoutedEngine) -> None:
        """Watch one engine until cancelled."""
        try:
            while True:
                self.look(engine, time.monotonic_ns())
                await asyncio.sleep(_LOOK_S)
        finally:
            self._watch.remove(engine.row)
            self._lacking.pop(engine.row, None)

    def look(self, engine: RoutedEngine, now_ns: int) -> None:
        """Compare the sources of `engine` with the last look, and log what changed."""
        router = self._fleet.router
        if not router.is_routable(engine.row):
            self._watch.forget(engine.row)  # its health is reported elsewhere
            return
        lacks_events = router.lacks_kv_events(engine.row) if self._expects_events(engine) else None
        for news in self._watch.look(engine.row, router.table, now_ns, lacks_events=lacks_events):
            self._log(engine, news)
        self._log_lacking(engine, now_ns)

    def _log_lacking(self, engine: RoutedEngine, now_ns: int) -> None:
        """Log once the missing figures that other engines have, because no engine is compared by them."""
        missing = self._watch.missing(engine.row)
        known = self._lacking.get(engine.row, set()) & missing
        others = [each.row for each in self._fleet if each is not engine and self._fleet.router.is_routable(each.row)]
        table, added = self._fleet.router.table, []
        for figure in self._needs.figures:
            if figure in missing and figure not in known:
                is_fresh = getattr(table, figure).known(now_ns, self._fresh_ns)
                if any(is_fresh[row] for row in others):
                    added.append(figure)
        self._lacking[engine.row] = known.union(added)
        if added:
            logger.warning(
                "engine %s does not report %s, which other engines do; route policy %s compares no engine by %s and"
                " uses %s",
                engine.name, ", ".join(added), self._policy, "it" if len(added) == 1 else "them",
                self._replacement(added),
            )  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        """Yield a gauge for each engine and each source that the policy needs."""
        family = GaugeMetricFamily(
            "moestro:route_source_missing",
            "1 while the engine does not supply a source that the route policy reads.",
            labels=("engine", "source"),
        )
        for engine in self._fleet:
            missing = self._watch.missing(engine.row)
            for source in (*self._needs.figures, *((KV_EVENTS,) if self._expects_events(engine) else ())):
                family.add_metric((engine.name, source), source in missing)
        yield family

    def _expects_events(self, engine: RoutedEngine) -> bool:
        return self._needs.hits and self._has_events(engine)

    def _log(self, engine: RoutedEngine, news: SourceNews) -> None:
        named = ", ".join(news.sources)
        if news.change is SourceChange.AGAIN:
            logger.info("engine %s reports %s again", engine.name, named)
            return
        is_required = not set(news.sources).isdisjoint(self._needs.required)
        is_serious = is_required or news.change is SourceChange.STOPPED or KV_EVENTS in news.sources
        how = "no longer reports" if news.change is SourceChange.STOPPED else "does not report"
        logger.log(
            logging.WARNING if is_serious else logging.INFO,
            "engine %s %s %s; route policy %s uses %s",
            engine.name, how, named, self._policy, self._replacement(news.sources),
        )  # fmt: skip

    def _replacement(self, sources: Collection[str]) -> str:
        """Describe what the policy does without the missing sources."""
        parts = []
        if set(sources) - {KV_EVENTS, *self._needs.required}:
            parts.append(self._needs.otherwise or "nothing in their place")
        if not set(sources).isdisjoint(self._needs.required):
            parts.append("nothing in place of what it requires, and decides by load or in turn")
        if KV_EVENTS in sources:
            parts.append("a prediction of its cache from the prompts that it got")
        return "; ".join(parts)
