"""Operator actions on the fleet: adds, drains and removes engines while the router runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from moestro.core.views import Figure
from moestro.gateway.clients.http_headers import EngineHead
from moestro.gateway.engines.fleet import EngineAddress, Fleet, RoutedEngine
from moestro.gateway.engines.health_checks import Watch
from moestro.gateway.engines.upstream import Address, Pool
from moestro.gateway.settings import EngineSettings, EngineUrl
from moestro.routing.policy_contract import FRESH_NS
from moestro.web.ports.tls import engine_context


class EngineView(msgspec.Struct, kw_only=True):
    """State of one engine, as the admin plane shows it. A figure of None was not reported within the last 5 s."""

    name: str
    url: str
    rank: int | None  # number of the data-parallel rank at the URL; None means that it has one engine
    condition: str
    breaker: str
    num_in_flight: int
    num_decisions: int
    models: tuple[str, ...]
    cause: str | None  # reason for the last connection failure
    expert_pressure: float | None
    expert_local_share: float | None


@dataclass(frozen=True, slots=True)
class EngineAdmin:
    """Applies the operator's actions to the fleet.

    Args:
        withheld: names of client headers that engines do not get.
        reading: method of comparing prompts, in words.
        takes_paths: whether an engine's API may be below a path.
    """

    fleet: Fleet
    watch: Watch
    settings: EngineSettings
    withheld: frozenset[bytes]
    reading: str
    takes_paths: bool = True

    def add(self, url: EngineUrl) -> EngineAddress:
        """Add the engines of an address and start its health checks; requests follow once a check has passed.

        Raises:
            ConfigError: an engine with this name or address exists already, or its path cannot be used.
        """
        if not self.takes_paths:
            url.check_is_endpoint()
        settings = self.settings
        tls = None
        if url.is_tls:
            tls = engine_context(settings.engine_ca_certs, settings.engine_certfile, settings.engine_keyfile)
        pool = Pool(Address(url.host, url.port, tls), self.settings.connect_timeout)
        key = self.settings.engine_api_key
        head = EngineHead(
            host=url.netloc.encode(),
            prefix=url.path.encode(),
            via=self.fleet.pseudonym,
            authorization=None if key is None else f"Bearer {key}".encode("utf-8", "surrogateescape"),
            withheld=self.withheld,
        )
        address = self.fleet.add(url.name, url.url, pool, head, self.settings.num_ranks, url.traits)
        self.watch.begin(address)
        return address

    async def remove(self, address: EngineAddress) -> None:
        """Send the engines of an address no more requests, let running ones finish, and close its connections."""
        self.fleet.remove(address)
        address.pool.retire()
        await self.watch.end(address)

    def drain(self, engine: RoutedEngine, *, is_draining: bool) -> None:
        """Drain the engine, or send it requests again."""
        engine.health.is_draining = is_draining
        self.fleet.look_now(engine)

    def views(self) -> list[EngineView]:
        """Return the state of all engines, in the order of their addition."""
        return [self.view(engine) for engine in self.fleet]

    def view(self, engine: RoutedEngine) -> EngineView:
        """Return the current state of one engine."""
        return EngineView(
            name=engine.name,
            url=engine.address.url,
            rank=engine.rank,
            condition=engine.condition,
            breaker=self.fleet.breaker_state(engine),
            num_in_flight=self.fleet.router.num_in_flight_on(engine.row),
            num_decisions=engine.counts.num_decisions,
            models=self.fleet.models.names_of(engine.row),
            cause=engine.unreachable or None,
            expert_pressure=self._fresh("expert_pressure", engine.row),
            expert_local_share=self._fresh("expert_local_share", engine.row),
        )

    def _fresh(self, figure: str, row: int) -> float | None:
        """Return a figure of an engine as policies see it now; None means missing or old."""
        column: Figure = getattr(self.fleet.router.table, figure)
        return float(column.values[row]) if column.known(time.monotonic_ns(), FRESH_NS)[row] else None
