"""The engines behind the router: their addresses, models, health and counts, and their place in the rotation.

The counters are plain numbers that the hot path updates; `figures.py` exposes them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from moestro.core.request import Request
from moestro.errors import ConfigError, NoEngineError
from moestro.gateway.clients.http_headers import EngineHead, Incoming
from moestro.gateway.clients.paths import GENERATE_PATH
from moestro.gateway.clients.request_body import with_fields
from moestro.gateway.engines.upstream import Pool
from moestro.gateway.part_settings import ANY_TRAITS, NO_GROUP, EngineTraits
from moestro.routing.health import BreakerState, Condition, Health, HealthRules, Silence
from moestro.routing.router import RouteDecision, Router
from moestro.routing.scrape import EngineTotals
from moestro.routing.settings import ANY_ENGINE, EngineSpec
from moestro.web.errors import Refusals
from moestro.web.figures import Histogram

logger = logging.getLogger(__name__)


_NONE: frozenset[int] = frozenset()
_SWEEPS_OF_RESTING = 4  # Sweeps in which each engine that rests is looked at once.
_MAX_MODELS = 10_000  # limit per engine; further entries are ignored


class _Listed(msgspec.Struct):
    data: list[msgspec.Raw]


class _Id(msgspec.Struct):
    id: str


class _ContextField(msgspec.Struct):
    max_model_len: int | None = None


class Models:
    """The model cards of `/v1/models` by engine, as the engines wrote them."""

    def __init__(self) -> None:
        self._cards: dict[int, dict[str, bytes]] = {}
        self._resting: dict[int, dict[str, bytes]] = {}  # Of engines that no list has.
        self._excluded: dict[str, frozenset[int]] = {}

    def learn(self, row: int, body: bytes) -> None:
        """Store an engine's model list. A malformed list is ignored."""
        try:
            raws = msgspec.json.decode(body, type=_Listed).data[:_MAX_MODELS]
            cards = {msgspec.json.decode(raw, type=_Id).id: bytes(raw) for raw in raws}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if row in self._resting:
            self._resting[row] = cards
        elif cards != self._cards.get(row):
            self._cards[row] = cards
            self._index()

    def declare(self, row: int, name: str) -> None:
        """Store the operator's word for an engine's model, until the engine lists its models."""
        self.learn(row, b'{"data":[%b]}' % msgspec.json.encode({"id": name, "object": "model"}))

    def forget(self, row: int) -> None:
        """Drop the models of a removed engine."""
        self._resting.pop(row, None)
        if self._cards.pop(row, None) is not None:
            self._index()

    def rest(self, row: int) -> None:
        """Leave out the models of an engine that gets no requests, until `wake`."""
        self._resting[row] = self._cards.pop(row, {})
        self._index()

    def wake(self, row: int) -> None:
        """Count the models of a resting engine again."""
        if (cards := self._resting.pop(row, None)) is not None:
            self._cards[row] = cards
            self._index()

    def excluded(self, model: str | None) -> frozenset[int]:
        """Return the rows known not to serve `model`. The set is empty for a model that no engine lists."""
        return self._excluded.get(model, _NONE) if model is not None else _NONE

    @property
    def are_alike(self) -> bool:
        """Whether all engines serve the same models, as far as known."""
        return not self._excluded

    def names_of(self, row: int) -> tuple[str, ...]:
        """Return the names of the models that one engine serves."""
        return tuple(self._cards.get(row, {}))

    def listed(self) -> bytes:
        """Return the body of `GET /v1/models`, with each name once."""
        cards = self._merged()
        return b'{"object":"list","data":[%b]}' % b",".join(cards[name] for name in sorted(cards))

    def card(self, name: str) -> bytes | None:
        """Return the body of `GET /v1/models/NAME`, or None for an unknown model."""
        return self._merged().get(name)

    def context_of(self, name: str | None) -> int | None:
        """Return the tokens of the longest sequence of a model; None if its engines differ or do not report it.

        Args:
            name: Name of the model; None means all models.
        """
        cards = [card for each in self._cards.values() for known, card in each.items() if name in (None, known)]
        lengths = {_length_of(card) for card in cards}
        return lengths.pop() if len(lengths) == 1 else None

    def _merged(self) -> dict[str, bytes]:
        merged: dict[str, bytes] = {}
        for cards in self._cards.values():
            merged = cards | merged
        return merged

    def _index(self) -> None:
        names = {name for cards in self._cards.values() for name in cards}
        lacking = {name: frozenset(row for row, cards in self._cards.items() if name not in cards) for name in names}
        self._excluded = {name: rows for name, rows in lacking.items() if rows}


def _length_of(card: bytes) -> int | None:
    try:
        return msgspec.json.decode(card, type=_ContextField).max_model_len
    except msgspec.ValidationError:
        return None


_DECISION_S = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_FIRST_BYTE_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0),
)


class EngineCounts:
    """Cumulative counts of one engine since the router started.

    Attributes:
        statuses: number of responses by HTTP status.
        first_byte_s: time from a request's arrival to the first byte of its response body, seconds.
        num_predicted_tokens, num_hit_tokens, num_prompt_tokens: predicted cached, actually cached, and all prompt
            tokens of requests whose responses report usage. The prediction is the predicted share times the reported
            prompt tokens.
        num_host_hit_tokens: those of `num_hit_tokens` that engines copied from host memory.
        num_loops: number of requests that came back to this router.
        num_transitions: number of changes of the engine's condition.
    """

    __slots__ = (
        "first_byte_s", "num_broken", "num_decisions", "num_hit_tokens", "num_host_hit_tokens", "num_left", "num_loops",
        "num_predicted_tokens", "num_prompt_tokens", "num_retried_away", "num_transitions", "num_unreachable",
        "statuses",
    )  # fmt: skip

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.first_byte_s = Histogram(_FIRST_BYTE_S)
        self.num_decisions = 0
        self.num_predicted_tokens = 0.0
        self.num_hit_tokens = self.num_host_hit_tokens = 0
        self.num_prompt_tokens = 0
        self.num_retried_away = 0
        self.num_unreachable = 0
        self.num_broken = 0
        self.num_left = 0
        self.num_loops = 0
        self.num_transitions = 0


class Counts:
    """Cumulative counts of all engines together.

    Attributes:
        decision_s: duration of each decision, seconds.
        refusals: number of refused requests by error code.
        retries: number of retries by cause.
        resumed: number of streams that went on elsewhere, by cause.
        not_resumable: number of streams that could not, by the field of the request or another cause.
    """

    def __init__(self) -> None:
        self.decision_s = Histogram(_DECISION_S)
        self.refusals = Refusals()
        self.retries: Counter[str] = Counter()
        self.resumed: Counter[str] = Counter()
        self.not_resumable: Counter[str] = Counter()
        self.num_retries_denied = 0
        self.num_requests = 0


_IN_ROTATION = frozenset({Condition.UP, Condition.PROBING, Condition.SUSPECTED})
_OLD_RANK_FIELDS: tuple[str, ...] = ("data_parallel_rank",)  # SGLang's older name of `routed_dp_rank`
_EXPECTED = frozenset({Condition.ABSENT, Condition.BUSY, Condition.DRAINING, Condition.PROBING})
_CONDITIONS_OF_A_NEW_PROCESS = frozenset({Condition.DOWN, Condition.OPEN})


class RouteBounds(NamedTuple):
    """What bounds the choice of an engine for a request.

    Attributes:
        model: Model that the engine must serve. None, or a model that no engine lists, allows every engine.
        tried: Rows of engines that have failed this request.
        client: Name of the client. Needed only while the fleet has pauses.
        full: Rows of saturated engines.
    """

    model: str | None
    tried: Collection[int] = ()
    client: Hashable = None
    full: Collection[int] = ()


class CheckAlarm:
    """Wakes the watcher of an address when its health check is due, or when one is requested.

    Bytes of the server put the check off. The timer then starts again, and wakes no task.

    Attributes:
        is_requested: Whether a check is requested. The watcher resets it.
    """

    TIMER_S = 0.001  # Resolution of the event loop's timers.

    def __init__(self) -> None:
        self.is_requested = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """Have the server's health checked at once."""
        self.is_requested = True
        self._wake()

    async def wait(self, due_s: Callable[[], float]) -> None:
        """Return once a check is due or requested.

        Args:
            due_s: Returns the time on the event loop's clock at which the check is due.
        """
        self._waiter = asyncio.get_running_loop().create_future()
        self._look(due_s)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._timer is not None:
                self._timer.cancel()

    def _look(self, due_s: Callable[[], float]) -> None:
        loop = asyncio.get_running_loop()
        pause_s = due_s() - loop.time()
        if pause_s <= self.TIMER_S or self.is_requested:
            self._wake()
        else:
            self._timer = loop.call_later(pause_s, self._look, due_s)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True, eq=False, kw_only=True)
class EngineAddress:
    """One server behind the router, which has one engine, or one for each of its data-parallel ranks.

    Attributes:
        name: Name of the address; the engine has it too, and ranks have it with `@RANK`.
        url: Base URL of the server.
        head: Head of the router's own requests, which go to no rank.
        life: Signs of life of the server.
        finds_ranks: Whether the ranks follow from what the server shows of itself.
        traits: What the operator says of the engines.
        engines: Engines behind the address, in the order of their ranks.
        ranks_changed: Set after `engines` has changed.
        unreachable: Cause of the last connection failure; empty after a success.
        models_due_s: Time on `time.monotonic` at which the server's models are read again.
        labels: Labels that the operator's list gives it.
        is_absent: Whether no list of engines has it any more.
        alarm: Wakes the watcher of the server's health.
    """

    name: str
    url: str
    pool: Pool
    head: EngineHead
    life: Silence
    finds_ranks: bool = False
    traits: EngineTraits = ANY_TRAITS
    engines: list[RoutedEngine] = field(default_factory=list)
    ranks_changed: asyncio.Event = field(default_factory=asyncio.Event)
    unreachable: str = ""
    models_due_s: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    is_absent: bool = False
    alarm: CheckAlarm = field(default_factory=CheckAlarm)

    @property
    def silence(self) -> Silence:
        """Signs of life, with all bytes that have arrived by now."""
        self.life.arrived(self.pool.arrived_ns)
        return self.life

    @property
    def host(self) -> str:
        """Host of the URL."""
        return urlsplit(self.url).hostname or ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of the data-parallel ranks; empty for a server with one engine."""
        return tuple(engine.rank for engine in self.engines if engine.rank is not None)


@dataclass(slots=True, eq=False, kw_only=True)
class RoutedEngine:
    """One engine behind the router.

    Attributes:
        row: Number of the engine in the router.
        name: Name of the engine in headers, logs and metrics.
        rank: Number of the data-parallel rank at the address; None for the only engine of its address.
        head: Head of requests to the engine, which names its rank.
        condition: Result of the last health verdict, which decides whether the engine gets requests.
        last_byte_ns: Time of the last byte of an answer; 0 after the health verdict has used it.
        num_streaming: Number of answers that have begun and not ended.
        num_forgotten: Number of times that the router discarded the known cache contents.
        totals: What the engine counted since its start, as its `/metrics` showed last.
        spec: What the router knows of the engine's properties.
    """

    row: int
    name: str
    address: EngineAddress
    rank: int | None
    head: EngineHead
    health: Health
    counts: EngineCounts = field(default_factory=EngineCounts)
    condition: Condition = Condition.UNCHECKED
    last_byte_ns: int = 0
    num_streaming: int = 0
    num_forgotten: int = 0
    totals: EngineTotals = field(default_factory=EngineTotals)
    spec: EngineSpec = ANY_ENGINE

    @property
    def pool(self) -> Pool:
        """Connections to the address, which its ranks share."""
        return self.address.pool

    @property
    def url(self) -> str:
        """Base URL of the address, with `@RANK` for a data-parallel rank. No other engine has it."""
        return self.address.url if self.rank is None else f"{self.address.url}@{self.rank}"

    @property
    def unreachable(self) -> str:
        """Cause of the last connection failure; empty after a success."""
        return self.address.unreachable

    @property
    def silence(self) -> Silence:
        """Signs of life of the server, with all bytes that have arrived by now."""
        return self.address.silence

    def outgoing(self, incoming: Incoming, fields: Mapping[str, bytes | None]) -> Incoming:
        """Return the request as the engine gets it: SGLang's own path reads the rank from the body alone.

        Args:
            fields: further fields of the body, as `with_fields` takes them.
        """
        rank = self.head.rank
        if rank is not None and incoming.head.path == GENERATE_PATH:
            fields = {**fields, **dict.fromkeys(_OLD_RANK_FIELDS), "routed_dp_rank": b"%d" % rank}
        return replace(incoming, body=with_fields(incoming.body, fields)) if fields else incoming


class Fleet:
    """All engines behind the router.

    Args:
        router: Router that chooses among the engines in rotation.
        block_tokens: Tokens per block of the router.

    Attributes:
        models: Models of each engine.
        pseudonym: Name of this router in Via. No client can guess it, so none can make the router refuse others.
        names: Names by row, including removed engines. Adding an engine replaces the tuple.
        on_failure: Called with the row of an engine that no longer answers.
        is_drained: Whether an operator has drained the engine that an added one is named like.
    """

    def __init__(self, router: Router, block_tokens: int, rules: HealthRules, now_ns: Callable[[], int]) -> None:
        self.router = router
        self.block_tokens = block_tokens
        self._rules = rules
        self._now_ns = now_ns
        self._addresses: dict[str, EngineAddress] = {}  # By name.
        self._by_row: dict[int, RoutedEngine] = {}
        self._groups: dict[str, int] = {}  # Numbers in the router, by name.
        self.names: tuple[str, ...] = ()
        self.on_failure: Callable[[int], None] = lambda row: None
        self.is_drained: Callable[[RoutedEngine], bool] = lambda engine: False
        self._rows: dict[str, int] = {}  # By URL.
        self._returning: set[int] = set()  # Rows in slow start or in doubt.
        self._suspected: set[int] = set()  # Rows that get requests only where no other engine can.
        self._pausing: set[int] = set()  # Rows that some clients leave alone for now.
        self._resting: set[int] = set()  # Rows about which nothing has changed since a sweep found that they rest.
        self._num_sweeps = 0
        self.models = Models()
        self.pseudonym = f"moestro-{secrets.token_hex(8)}".encode()

    def __iter__(self) -> Iterator[RoutedEngine]:
        return iter(tuple(self._by_row.values()))

    def __len__(self) -> int:
        return len(self._by_row)

    def __getitem__(self, row: int) -> RoutedEngine:
        return self._by_row[row]

    @property
    def addresses(self) -> tuple[EngineAddress, ...]:
        """The servers behind the router."""
        return tuple(self._addresses.values())

    def add(
        self,
        name: str,
        url: str,
        pool: Pool,
        head: EngineHead,
        num_ranks: int | None = 1,
        traits: EngineTraits = ANY_TRAITS,
    ) -> EngineAddress:
        """Add the engines of an address, which get requests once a health check has passed.

        Args:
            head: Head of the router's own requests to the address.
            num_ranks: Number of data-parallel ranks. None means that the server's own figures show it.
            traits: What the operator says of the engines.

        Raises:
            ConfigError: Another address has this name or URL.
        """
        for known in self._addresses.values():
            if known.name == name or known.url == url:
                raise ConfigError(f"engine {name}={url}: {known.name}={known.url} exists already")
        address = self._addresses[name] = EngineAddress(
            name=name,
            url=url,
            pool=pool,
            head=head,
            life=Silence(self._rules.silence),
            finds_ranks=num_ranks is None,
            traits=traits,
        )
        self.set_ranks(address, range(num_ranks or 1))
        return address

    def set_ranks(self, address: EngineAddress, ranks: Sequence[int]) -> None:
        """Give `address` an engine for each of `ranks`, and remove the others.

        A server with one rank chooses nothing, so its engine has no rank. A new engine is as well as those before it.

        Args:
            ranks: Numbers by which the server's figures name its ranks, ascending. A request names a rank by its place
                in them: a server that has the ranks 2 and 3 of a larger group takes 0 and 1.
        """
        wanted: list[int | None] = [None] if len(ranks) == 1 else [*ranks]
        before = address.engines
        kept = {engine.rank: engine for engine in before if engine.rank in wanted}
        is_well = any(engine.condition in _IN_ROTATION for engine in before)
        is_draining = bool(before) and all(engine.health.is_draining for engine in before)
        address.engines = [kept.get(rank) or self._add_engine(address, rank, at) for at, rank in enumerate(wanted)]
        for at, engine in enumerate(address.engines):
            if engine.rank is not None and engine.head.rank != at:
                engine.head = replace(engine.head, rank=at)
        for engine in before:
            if engine not in address.engines:
                self._remove_engine(engine)
        for engine in address.engines:
            if engine not in before:
                engine.health.is_draining = is_draining or self.is_drained(engine)
                engine.health.is_absent = address.is_absent
                if is_well:
                    engine.health.checked(self._now_ns(), passed=True)
                self.look_now(engine)
        address.models_due_s = 0.0
        address.ranks_changed.set()

    def _add_engine(self, address: EngineAddress, rank: int | None, at: int) -> RoutedEngine:
        spec = self._spec_of(address, rank)
        row = self.router.add_engine(spec)
        name = address.name if rank is None else f"{address.name}@{rank}"
        self.names = (*self.names[:row], name, *self.names[row + 1 :])
        head = address.head if rank is None else replace(address.head, rank=at)
        health = Health(self._rules, self._now_ns(), address.life)
        engine = RoutedEngine(row=row, name=name, address=address, rank=rank, head=head, health=health, spec=spec)
        self._by_row[row] = engine
        self._rows[engine.url] = row
        return engine

    def spec_of(self, engine: RoutedEngine) -> EngineSpec:
        """Return what the operator says of an engine now, and what its reports have shown."""
        known = engine.spec
        return msgspec.structs.replace(
            self._spec_of(engine.address, engine.rank),
            num_blocks=known.num_blocks,
            num_host_blocks=known.num_host_blocks,
            block_size=known.block_size,
        )

    def _spec_of(self, address: EngineAddress, rank: int | None) -> EngineSpec:
        """Return what is known of an engine before its first report: what the operator says of it, and its group.

        The data-parallel ranks of a server share the experts of a network, so they begin every step together.
        """
        group, name = None, address.traits.group
        if name is None and rank is not None:
            name = f"@{address.name}"  # No operator can give this name.
        if name is not None and name != NO_GROUP:
            group = self._groups.setdefault(name, len(self._groups))
        return msgspec.structs.replace(address.traits.spec, group=group)

    def set_absent(self, address: EngineAddress, *, is_absent: bool) -> None:
        """Send the engines of `address` no requests while no list has them, and keep what is known of them."""
        address.is_absent = is_absent
        for engine in address.engines:
            engine.health.is_absent = is_absent
            if is_absent:
                self.models.rest(engine.row)
            else:
                self.models.wake(engine.row)
            self.look_now(engine)

    def set_head(self, address: EngineAddress, head: EngineHead) -> None:
        """Replace the head of requests to `address`."""
        address.head = head
        for engine in address.engines:
            engine.head = head if engine.rank is None else replace(head, rank=engine.head.rank)

    def specify(self, engine: RoutedEngine, spec: EngineSpec) -> None:
        """Tell the router properties of `engine`."""
        if spec != engine.spec:
            engine.spec = spec
            self.router.set_spec(engine.row, spec)

    def remove(self, address: EngineAddress) -> None:
        """Send the engines of `address` no more requests; their running requests still finish."""
        del self._addresses[address.name]
        for engine in address.engines:
            self._remove_engine(engine)

    def _remove_engine(self, engine: RoutedEngine) -> None:
        del self._by_row[engine.row]
        del self._rows[engine.url]
        for rows in (self._returning, self._pausing, self._suspected, self._resting):
            rows.discard(engine.row)
        self.router.remove_engine(engine.row, self._now_ns())
        self.models.forget(engine.row)

    def named(self, name: str) -> RoutedEngine | None:
        """Return the engine named `name`, or None for an unknown name."""
        return next((engine for engine in self._by_row.values() if engine.name == name), None)

    def row_of(self, url: str) -> int | None:
        """Return the row of the engine at `url` (`RoutedEngine.url`), or None for an unknown one."""
        return self._rows.get(url)

    def check_soon(self, row: int) -> None:
        """Let the health of an engine be checked at once, because another router takes it for dead."""
        if (engine := self._by_row.get(row)) is not None:
            engine.address.alarm.request()

    def address_named(self, name: str) -> EngineAddress | None:
        """Return the address named `name`, or None for an unknown name."""
        return self._addresses.get(name)

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
        is_bound = bounds.tried or bounds.full or self._returning or self._suspected or self._pausing
        is_open = not is_bound and self.models.are_alike
        exclude = () if is_open else self._excluded(bounds, now_ns)
        try:
            decision = self.router.submit(request, now_ns, exclude)
        except NoEngineError as error:
            error.retry_after_s = self._retry_after_s(now_ns)
            raise
        if decision.engine in self._resting:
            self._resting.discard(decision.engine)
            self._by_row[decision.engine].health.rests(now_ns)  # Until now: its request has all its time.
        return decision

    def look_now(self, engine: RoutedEngine) -> None:
        """Update the condition of `engine` after the operator changed it."""
        self.look(engine, self._now_ns())

    def sweep(self, now_ns: int) -> Iterator[EngineAddress]:
        """Update what time alone may change, several times a second, and yield the servers that it has looked at.

        It looks at those that rest in turns.
        """
        self._num_sweeps += 1
        for turn, address in enumerate(self.addresses, self._num_sweeps):
            if turn % _SWEEPS_OF_RESTING and all(engine.row in self._resting for engine in address.engines):
                continue
            address.pool.sweep(now_ns * 1e-9)
            for engine in address.engines:
                row = engine.row
                is_well = engine.condition is Condition.UP and not address.life.num_missed
                is_idle = not engine.last_byte_ns and not self.router.num_in_flight_on(row)
                is_settled = row not in self._returning and row not in self._pausing
                if is_well and is_idle and is_settled and engine.health.rests(now_ns):
                    self._resting.add(row)
                else:
                    self.look(engine, now_ns)
            yield address

    def look(self, engine: RoutedEngine, now_ns: int) -> None:
        """Update the condition of `engine`, and take it into rotation or out of it."""
        if self._by_row.get(engine.row) is not engine:
            return
        self._resting.discard(engine.row)
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
        """Record that a request for `engine` has come back to this router: its address leads here."""
        engine.counts.num_loops += 1
        engine.address.unreachable = "it leads back to this router, which answers 508"
        for each in engine.address.engines:
            each.health.looped(now_ns)
            self.look(each, now_ns)

    def unreachable(self, address: EngineAddress, cause: str, now_ns: int) -> None:
        """Record that `address` takes no connection: all its engines are gone."""
        for engine in address.engines:
            engine.health.breaker.unreachable(now_ns)
            self.lost(engine, cause, now_ns)

    def lost(self, engine: RoutedEngine, cause: str, now_ns: int) -> None:
        """Record that `engine` is unreachable, and discard the known contents of its cache."""
        engine.address.unreachable = cause
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

    def open_to(self, bounds: RouteBounds, now_ns: int) -> list[int]:
        """Return the rows of the engines that a request may go to, full or not; empty if there is none.

        An engine that may hang, and one that has refused this client, is left out where any other is left.
        """
        lacking = self.models.excluded(bounds.model)
        left = [
            row
            for row in self._by_row
            if self.router.is_routable(row) and row not in bounds.tried and row not in lacking
        ]
        left = [row for row in left if row not in self._suspected] or left
        # An engine that has refused this client is the last resort: it refuses again in its own words, or serves.
        return [row for row in left if not self._is_paused(row, bounds.client, now_ns)] or left

    def _excluded(self, bounds: RouteBounds, now_ns: int) -> list[int]:
        """Return the rows in rotation that must not get this request."""
        left = self.open_to(bounds, now_ns)
        left = [row for row in left if row not in bounds.full] or left
        settled = [row for row in left if row not in self._returning]
        if settled and len(settled) < len(left):
            most = max(self.router.load_on(row) for row in settled)
            left = [row for row in left if row not in self._returning or self._has_share(row, most, now_ns)]
        kept = set(left)
        return [row for row in self._by_row if row not in kept and self.router.is_routable(row)]

    def _is_paused(self, row: int, client: Hashable, now_ns: int) -> bool:
        return row in self._pausing and self._by_row[row].health.pauses.concern(client, now_ns)

    def _longest_wait_ns(self, engine: RoutedEngine, now_ns: int) -> int:
        """Return the time for which a request at the address has waited for its first byte; 0 means that none waits."""
        since_ns = [self.router.waits_since_ns(each.row) for each in engine.address.engines]
        return now_ns - min((each for each in since_ns if each is not None), default=now_ns)

    def _has_share(self, row: int, most: int, now_ns: int) -> bool:
        """Return whether an engine in slow start may get one more request; settled engines have at most `most`."""
        share = self._by_row[row].health.share(now_ns)
        return self.router.load_on(row) < max(1, math.ceil(share * most))

    def _retry_after_s(self, now_ns: int) -> int:
        waits = [wait for engine in self._by_row.values() if (wait := engine.health.wait_ns(now_ns)) is not None]
        return min(60, max(1, math.ceil(min(waits, default=0) / 1e9)))

    def _log_change(self, engine: RoutedEngine, before: Condition, now_ns: int) -> None:
        engine.counts.num_transitions += 1
        after = engine.condition
        if after is Condition.UP:
            engine.address.unreachable = ""
            logger.info("engine %s is up (was %s)", engine.name, before)
            return
        cause = f": {engine.unreachable}" if engine.unreachable else ""
        level = logging.INFO if after in _EXPECTED or engine.health.is_absent else logging.WARNING
        logger.log(level, "engine %s is %s%s", engine.name, after, cause)
        if after in _CONDITIONS_OF_A_NEW_PROCESS and before not in _CONDITIONS_OF_A_NEW_PROCESS:
            self._forget(engine, now_ns)
            self.on_failure(engine.row)

    def _forget(self, engine: RoutedEngine, now_ns: int) -> None:
        engine.num_forgotten += 1
        self.router.engine_lost(engine.row, now_ns)

    def breaker_state(self, engine: RoutedEngine) -> BreakerState:
        """Return the present state of an engine's breaker."""
        return engine.health.breaker.state(self._now_ns())
