"""Changes of the fleet while the router runs: engines of the operator and of lists come, go, drain and change."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from moestro.core.views import Figure
from moestro.errors import ConfigError
from moestro.gateway.clients.http_headers import EngineHead
from moestro.gateway.discovery.entries import EngineEntry
from moestro.gateway.discovery.lists import Change, ChangeKind, EngineLists
from moestro.gateway.engines.fleet import EngineAddress, Fleet, RoutedEngine
from moestro.gateway.engines.health_checks import Watch
from moestro.gateway.engines.upstream import Address, Pool
from moestro.gateway.settings import EngineSettings, EngineUrl, parsed_ranks
from moestro.routing.policy_contract import FRESH_NS
from moestro.web.ports.tls import EngineTls

logger = logging.getLogger(__name__)


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
    labels: Mapping[str, str]
    cause: str | None  # reason for the last connection failure
    expert_pressure: float | None
    expert_local_share: float | None


@dataclass(frozen=True, slots=True)
class EngineAdmin:
    """Applies the changes of the operator and of the lists of engines to the fleet.

    Args:
        withheld: names of client headers that engines do not get.
        reading: method of comparing prompts, in words.
        takes_paths: whether an engine's API may be below a path.
        lists: engines that there should be.
    """

    fleet: Fleet
    watch: Watch
    settings: EngineSettings
    withheld: frozenset[bytes]
    reading: str
    takes_paths: bool = True
    lists: EngineLists = field(default_factory=EngineLists)

    def add(self, url: EngineUrl) -> EngineAddress:
        """Add the engines of an address and start its health checks; requests follow once a check has passed.

        Raises:
            ConfigError: an engine with this name or address exists already, or its path cannot be used.
        """
        changes = self.lists.add(EngineEntry(url=url), time.monotonic_ns())
        try:
            for change in changes:
                self._apply(change)
        except ConfigError:
            self.lists.failed(url.name)
            raise
        address = self.fleet.address_named(url.name)
        assert address is not None
        return address

    def remove(self, address: EngineAddress) -> None:
        """Send the engines of an address no more requests, let running ones finish, and close its connections."""
        self.apply(self.lists.remove(address.name, time.monotonic_ns()))

    def drain(self, engine: RoutedEngine, *, is_draining: bool) -> None:
        """Drain the engine, or send it requests again."""
        engine.health.is_draining = is_draining
        self.fleet.look_now(engine)

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes in their order. An engine that cannot be added is logged and left out."""
        for change in changes:
            try:
                self._apply(change)
            except ConfigError as error:
                logger.warning("engine %s is left out: %s", change.entry.name, error)
                self.lists.failed(change.entry.name)

    def listed(self, source: str, entries: Sequence[EngineEntry]) -> None:
        """Take in the whole list of a source."""
        ignored = self.lists.ignored
        self.apply(self.lists.replace(source, entries, time.monotonic_ns()))
        for text in self.lists.ignored:
            if text not in ignored:
                logger.warning("engine %s; it is left out", text)

    def tick(self, now_ns: int) -> None:
        """Remove engines that no list has: those whose time is over, and those that are down."""
        self.apply(self.lists.expire(now_ns))
        if not self.lists.num_absent:
            return
        for address in self.fleet.addresses:
            if address.is_absent and all(engine.health.is_down for engine in address.engines):
                self.apply(self.lists.lost(address.name))

    def _apply(self, change: Change) -> None:
        kind, entry = change
        if kind is ChangeKind.ADD:
            self._add(entry)
            return
        address = self.fleet.address_named(entry.name)
        assert address is not None, "the lists know which engines exist"
        if kind is ChangeKind.REMOVE:
            self.fleet.remove(address)
            address.pool.retire()
            self.watch.end(address)
        elif kind is ChangeKind.LEAVE:
            logger.info("engine %s is listed no more", entry.name)
            self.fleet.set_absent(address, is_absent=True)
        else:
            if kind is ChangeKind.RETURN:
                logger.info("engine %s is listed again", entry.name)
                self.fleet.set_absent(address, is_absent=False)
            self._update(address, entry)

    def _add(self, entry: EngineEntry) -> None:
        settings, url = self.settings, entry.url
        if not self.takes_paths:
            url.check_is_endpoint()
            if entry.dp_ranks not in ("", "1"):
                raise ConfigError("--ext-proc names addresses, not ranks: leave dp_ranks out")
        tls = None
        if url.is_tls:
            tls = EngineTls(settings.engine_ca_certs, settings.engine_certfile, settings.engine_keyfile)
        pool = Pool(Address(url.host, url.port, tls, entry.server_name), settings.connect_timeout)
        num_ranks = self._num_ranks(entry)
        address = self.fleet.add(url.name, url.url, pool, self._head(entry), num_ranks, url.traits)
        address.labels = entry.labels
        self._declare_model(address, entry)
        self.watch.begin(address)

    def _update(self, address: EngineAddress, entry: EngineEntry) -> None:
        """Change what differs from the entry before, and keep what is known of the engine."""
        fleet = self.fleet
        address.labels, address.traits = entry.labels, entry.url.traits
        head = self._head(entry)
        if head.authorization != address.head.authorization:
            fleet.set_head(address, head)
        for engine in address.engines:
            fleet.specify(engine, fleet.spec_of(engine))
        num_ranks = self._num_ranks(entry)
        address.finds_ranks = num_ranks is None
        if num_ranks is not None and num_ranks != len(address.engines):
            fleet.set_ranks(address, range(num_ranks))
        self._declare_model(address, entry)

    def _declare_model(self, address: EngineAddress, entry: EngineEntry) -> None:
        for engine in address.engines:
            if entry.model and not self.fleet.models.names_of(engine.row):
                self.fleet.models.declare(engine.row, entry.model)

    def _num_ranks(self, entry: EngineEntry) -> int | None:
        ranks = entry.dp_ranks if self.takes_paths else ""
        return parsed_ranks(ranks) if ranks else self.settings.num_ranks

    def _head(self, entry: EngineEntry) -> EngineHead:
        key = self.settings.engine_api_key if entry.api_key is None else entry.api_key
        return EngineHead(
            host=entry.url.netloc.encode(),
            prefix=entry.url.path.encode(),
            via=self.fleet.pseudonym,
            authorization=None if key is None else f"Bearer {key}".encode("utf-8", "surrogateescape"),
            withheld=self.withheld,
        )

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
            labels=engine.address.labels,
            cause=engine.unreachable or None,
            expert_pressure=self._fresh("expert_pressure", engine.row),
            expert_local_share=self._fresh("expert_local_share", engine.row),
        )

    def _fresh(self, figure: str, row: int) -> float | None:
        """Return a figure of an engine as policies see it now; None means missing or old."""
        column: Figure = getattr(self.fleet.router.table, figure)
        return float(column.values[row]) if column.known(time.monotonic_ns(), FRESH_NS)[row] else None
