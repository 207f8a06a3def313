"""KV events among what looks after an engine: which publisher is its own, and by what name its model is asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import zmq

from moestro.gateway.fleet import Fleet, RoutedEngine
from moestro.gateway.kv_sources import KvSources
from moestro.gateway.kv_subscriber import KvSubscription
from moestro.routing.kv_events import KvFeed, KvFeedSettings
from moestro.web.log_limit import LogLimit
from moestro.wire.kv_names import NamingRules

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_NUM_SILENT_LOOKS = 60
_MAX_SOCKETS = 65536


class KvEventsWatch:
    """Keeps the router's exact index of an engine's cache, where that engine publishes it.

    Args:
        fleet: whose router is told.
        sources: who publishes where.
        block_size: tokens of a block, the router's and the engines'.
        tiers: names of the media whose blocks are hits.
    """

    def __init__(self, fleet: Fleet, sources: KvSources, block_size: int, tiers: tuple[str, ...]) -> None:
        self._fleet = fleet
        self._sources = sources
        self._block_size = block_size
        self._tiers = tiers
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._running: dict[RoutedEngine, KvSubscription] = {}

    async def __call__(self, engine: RoutedEngine) -> None:
        """Until cancelled; not at all for an engine that has no publisher."""
        source = self._sources.of(engine.name, urlsplit(engine.url).hostname or "")
        if source is None:
            return
        naming = NamingRules(model=await self._model_of(engine), block_size=self._block_size, tiers=self._tiers)
        settings = KvFeedSettings(
            engine=engine.row, name=engine.name, naming=naming, can_replay=source.replay is not None
        )
        log = LogLimit(logger)
        feed = KvFeed(self._fleet.router, settings, log.warning)
        subscription = KvSubscription(self._context, source, feed, lambda: engine.num_forgotten, log)
        self._running[engine] = subscription
        try:
            await subscription.run()
        except Exception:
            self._fleet.router.kv_lost(engine.row, time.monotonic_ns())  # for a while nobody listens
            raise
        finally:
            del self._running[engine]

    def __iter__(self) -> Iterator[tuple[RoutedEngine, KvSubscription]]:
        """What runs."""
        return iter(tuple(self._running.items()))

    def close(self) -> None:
        """After all have been cancelled."""
        self._context.destroy(linger=0)

    async def _model_of(self, engine: RoutedEngine) -> str:
        """The name that the engine lists first: its base model's. Its adapters are asked for by names of their own."""
        num_looks = 0
        while not (names := self._fleet.models.names_of(engine.row)):
            num_looks += 1
            if num_looks == _NUM_SILENT_LOOKS:
                logger.warning("KV events of engine %s wait until it lists its model in /v1/models", engine.name)
            await asyncio.sleep(_LOOK_S)
        return names[0]
