"""Watcher for KV events: subscribes to each engine's publisher under the name of the engine's model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

from moestro.gateway.engines.fleet import Fleet, RoutedEngine
from moestro.gateway.kv.kv_sources import KvSources
from moestro.gateway.kv.kv_subscriber import KvSubscription
from moestro.routing.kv.kv_events import KvFeed, KvFeedSettings
from moestro.web.ports.faults import LogLimit
from moestro.wire.kv_names import NamingRules

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_NUM_SILENT_LOOKS = 60


class KvEventsWatch:
    """Watcher that keeps the router's exact index of an engine's cache, for engines that publish KV events.

    Args:
        fleet: fleet whose router receives the cache contents.
        sources: publishers' endpoints.
        block_size: tokens per block, equal in router and engines.
        tiers: names of the storage media whose blocks count as hits.
    """

    def __init__(self, fleet: Fleet, sources: KvSources, block_size: int, tiers: tuple[str, ...]) -> None:
        self._fleet = fleet
        self._sources = sources
        self._block_size = block_size
        self._tiers = tiers
        self._running: dict[RoutedEngine, KvSubscription] = {}

    async def __call__(self, engine: RoutedEngine) -> None:
        """Follow the engine's events until cancelled. Returns at once for an engine without a publisher."""
        source = self._sources.of(engine.address.name, engine.address.host, engine.rank)
        if source is None:
            return
        naming = NamingRules(model=await self._model_of(engine), block_size=self._block_size, tiers=self._tiers)
        settings = KvFeedSettings(
            engine=engine.row, name=engine.name, naming=naming, can_replay=source.replay is not None
        )
        log = LogLimit(logger)
        feed = KvFeed(self._fleet.router, settings, log.warning)
        subscription = KvSubscription(source, feed, lambda: engine.num_forgotten, log)
        self._running[engine] = subscription
        try:
            await subscription.run()
        except Exception:
            self._fleet.router.kv_lost(engine.row, time.monotonic_ns())  # events are missed until the restart
            raise
        finally:
            del self._running[engine]

    def __iter__(self) -> Iterator[tuple[RoutedEngine, KvSubscription]]:
        """Iterate over the engines with a running subscription."""
        return iter(tuple(self._running.items()))

    async def _model_of(self, engine: RoutedEngine) -> str:
        """Wait for the engine's model list and return its first name, the base model's; adapters have other names."""
        num_looks = 0
        while not (names := self._fleet.models.names_of(engine.row)):
            num_looks += 1
            if num_looks == _NUM_SILENT_LOOKS:
                logger.warning("KV events of engine %s wait until it lists its model in /v1/models", engine.name)
            await asyncio.sleep(_LOOK_S)
        return names[0]
