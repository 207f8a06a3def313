"""What the operator does to the fleet: engines are added, drained and removed while the router runs."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

import msgspec

from moestro.gateway.fleet import Fleet, RoutedEngine
from moestro.gateway.health_checks import Watch
from moestro.gateway.http_headers import EngineHead
from moestro.gateway.settings import EngineSettings, EngineUrl
from moestro.gateway.upstream import Address, Pool


class EngineView(msgspec.Struct, kw_only=True):
    """One engine, as the admin plane shows it."""

    name: str
    url: str
    condition: str
    breaker: str
    num_in_flight: int
    num_decisions: int
    models: tuple[str, ...]
    cause: str | None  # why it could not be reached


@dataclass(frozen=True, slots=True)
class EngineAdmin:
    """The operator's hands.

    Args:
        withheld: headers of clients that engines do not get.
        reading: how prompts are compared, in words.
    """

    fleet: Fleet
    watch: Watch
    settings: EngineSettings
    withheld: frozenset[bytes]
    reading: str

    def add(self, url: EngineUrl) -> RoutedEngine:
        """A new engine, looked after from now on; it gets requests once a check has passed.

        Raises:
            ConfigError: it is there already.
        """
        tls = ssl.create_default_context() if url.is_tls else None
        pool = Pool(Address(url.host, url.port, tls), self.settings.connect_timeout)
        key = self.settings.engine_api_key
        head = EngineHead(
            host=url.netloc.encode(),
            prefix=url.path.encode(),
            authorization=None if key is None else f"Bearer {key}".encode("utf-8", "surrogateescape"),
            withheld=self.withheld,
        )
        engine = self.fleet.add(url.name, url.url, pool, head)
        self.watch.begin(engine)
        return engine

    async def remove(self, engine: RoutedEngine) -> None:
        """It gets no more requests; what runs there is still answered, and then its connections are closed."""
        self.fleet.remove(engine)
        engine.pool.retire()
        await self.watch.end(engine)

    def drain(self, engine: RoutedEngine, *, is_draining: bool) -> None:
        """It gets no more requests, or gets them again."""
        engine.health.is_draining = is_draining
        self.fleet.look_now(engine)

    def views(self) -> list[EngineView]:
        """All engines, in the order in which they came."""
        return [self.view(engine) for engine in self.fleet]

    def view(self, engine: RoutedEngine) -> EngineView:
        """One engine, as it is now."""
        return EngineView(
            name=engine.name,
            url=engine.url,
            condition=engine.condition,
            breaker=self.fleet.breaker_state(engine),
            num_in_flight=self.fleet.router.num_in_flight_on(engine.row),
            num_decisions=engine.counts.num_decisions,
            models=self.fleet.models.names_of(engine.row),
            cause=engine.unreachable or None,
        )
