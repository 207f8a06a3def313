"""Health of engines: what an answer says about its engine, and tasks that watch each address while the router runs."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.core.load_figures import LoadFigures
from moestro.core.request import Request
from moestro.gateway.clients.http_headers import (
    LOOP_HEADER,
    LOOP_STATUS,
    AnswerHead,
    EngineHead,
    Incoming,
    Named,
    RequestHead,
)
from moestro.gateway.engines.fleet import CheckAlarm, EngineAddress, Fleet, RoutedEngine
from moestro.gateway.engines.upstream import EngineConnection
from moestro.routing.health import Condition, Origin
from moestro.routing.policy_contract import KV_EVENTS, SourceChange, SourceNews, SourceWatch
from moestro.routing.router import RouteDecision
from moestro.routing.scrape import MAX_BYTES, MAX_RANKS, MetricsReader, ScrapedLoad

logger = logging.getLogger(__name__)


class NoAnswerError(Exception):
    """An engine's missing or unusable answer; the message names the cause."""


class _Whole:
    """Sink that collects an answer of bounded size.

    Attributes:
        is_done: whether the answer is complete and its connection was returned to the pool.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = self._status = 0
        self.is_done = False
        self.answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def head(self, head: AnswerHead, length: int | None) -> None:
        """Implement `Sink.head`."""
        self._status = head.status

    def body(self, data: bytes, *, is_last: bool) -> None:
        """Implement `Sink.body`."""
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            self.broken(f"its answer has more than {self._max_bytes} bytes")
        else:
            self._pieces.append(data)

    def done(self) -> None:
        """Implement `Sink.done`."""
        self.is_done = True
        if not self.answer.done():
            pieces = self._pieces
            self.answer.set_result((self._status, pieces[0] if len(pieces) == 1 else b"".join(pieces)))

    def broken(self, cause: str) -> None:
        """Implement `Sink.broken`."""
        if not self.answer.done():
            self.answer.set_exception(NoAnswerError(cause))


async def ask(address: EngineAddress, path: str, timeout_s: float, max_bytes: int) -> tuple[int, bytes]:
    """Send `GET path` on a connection to `address`, and return the answer's status and body.

    Raises:
        NoAnswerError: no answer arrived in time, or the answer is too large.
    """
    end_s, late = asyncio.get_running_loop().time() + timeout_s, f"nothing within {timeout_s:g} s"
    if (kept := address.pool.take()) is not None:
        sink = _Whole(max_bytes)
        # A timer of the sink takes a fraction of the time of `asyncio.timeout`, which counts for a hundred engines.
        timer = asyncio.get_running_loop().call_at(end_s, sink.broken, late)
        try:
            return await _ask_on(kept, address, path, sink)
        except NoAnswerError:
            pass  # an idle connection may have been closed; only a new one proves a failure
        finally:
            timer.cancel()
    try:
        async with asyncio.timeout_at(end_s):
            return await _ask_on(await address.pool.connect(), address, path, _Whole(max_bytes))
    except TimeoutError:
        raise NoAnswerError(late) from None
    except OSError as error:
        raise NoAnswerError(f"cannot connect: {error}") from None


async def _ask_on(connection: EngineConnection, address: EngineAddress, path: str, sink: _Whole) -> tuple[int, bytes]:
    if not connection.is_open:
        raise NoAnswerError("it closed the connection at once")
    try:
        connection.send(_request_for(address.head, path), b"", sink, is_bodiless=False)
        return await sink.answer
    finally:
        if not sink.is_done:  # a complete answer has returned the connection to the pool
            connection.close()


@lru_cache(maxsize=4096)  # some hundred bytes each
def _request_for(head: EngineHead, path: str) -> bytes:
    return head.of(Incoming(RequestHead(b"GET", path.encode(), [], {}), b"", "127.0.0.1", "moestro-route"))


MODELS_EVERY_S = 10.0
_MAX_MODELS_BYTES = 4 << 20
_MAX_HEALTH_BYTES = 64 << 10
_FORWARDED_PATH = "/get_model_info"  # Routers forward it, and engines answer it at no cost, if only with 404.
_SERVER_INFO_PATHS = ("/server_info", "/get_server_info")  # of SGLang: the newer one, and the older one
_MAX_INFO_BYTES = 4 << 20
_AGAIN_S = 1.0
_HURRY_S = 0.1  # interval between reads of /metrics while requests wait for figures
_UNHEARD_CHECKS = 10  # of an address that has never passed one, until the log says why
_MOST_CHECKS = 4  # of one engine at once; an engine that hangs for long holds no more connections
# A check is judged this long after its time is over. If this process was stopped, its answer is read meanwhile.
_READ_S = 0.02
# Regular checks begin at multiples of this time, so that those of several engines share a wake-up of the router.
_SLOT_S = 0.1
_MIN_SLOTTED_S = 5 * _SLOT_S  # A shorter pause ends when it is over.
_GOLDEN = 0.618034  # Its multiples, modulo 1, are spread evenly, however many there are.
_WELL = frozenset({Condition.UP, Condition.SUSPECTED, Condition.ABSENT})  # checked at the intervals of `Silence`

Watched = TypeVar("Watched", EngineAddress, RoutedEngine)
AddressWatcher = Callable[[EngineAddress], Awaitable[None]]  # watches one address until cancelled
EngineWatcher = Callable[[RoutedEngine], Awaitable[None]]  # watches one engine until cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRules:
    """Intervals and time limits of the checks.

    Attributes:
        health_path: path of the health check.
        soon_s: interval between checks of an unhealthy engine, seconds.
        limit_s: time after which an unanswered check is missed, seconds. Its answer still counts later.
        timeout_s: time for an engine to answer, seconds.
        metrics_s: interval between reads of `/metrics`, seconds; 0 disables them.
    """

    health_path: str = "/health"
    soon_s: float = 0.5
    limit_s: float = 1.0
    timeout_s: float = 3.0
    metrics_s: float = 1.0


class Watch:
    """Runs every watcher for every address and every engine.

    Args:
        of_addresses: watchers, each run as one task per address.
        of_engines: watchers, each run as one task per engine, also for engines that an address gets later.
    """

    def __init__(self, of_addresses: Sequence[AddressWatcher], of_engines: Sequence[EngineWatcher] = ()) -> None:
        self._of_addresses = of_addresses
        self._of_engines = of_engines
        self._tasks: dict[EngineAddress, list[asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def begin(self, address: EngineAddress) -> None:
        """Start watching `address` and its engines."""
        tasks = [asyncio.create_task(_run(watcher, address)) for watcher in self._of_addresses]
        self._tasks[address] = [*tasks, asyncio.create_task(self._watch_engines(address))]

    def end(self, address: EngineAddress) -> None:
        """Stop watching `address` and its engines."""
        for task in self._tasks.pop(address, []):
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Stop watching all addresses, and wait until no task is left."""
        for address in list(self._tasks):
            self.end(address)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _watch_engines(self, address: EngineAddress) -> None:
        """Watch the engines that the address has, whenever they change."""
        tasks: dict[RoutedEngine, list[asyncio.Task[None]]] = {}
        try:
            while True:
                for engine in [engine for engine in tasks if engine not in address.engines]:
                    await _cancel(tasks.pop(engine))
                for engine in address.engines:
                    if engine not in tasks:
                        tasks[engine] = [asyncio.create_task(_run(watcher, engine)) for watcher in self._of_engines]
                await address.ranks_changed.wait()
                address.ranks_changed.clear()
        finally:
            await _cancel([task for each in tasks.values() for task in each])


def _slot_s(begin_s: float, pause_s: float) -> float:
    """Return the end of a pause, up to `_SLOT_S` early so that other engines' pauses end at the same time."""
    end_s = begin_s + pause_s
    return end_s if pause_s < _MIN_SLOTTED_S else end_s // _SLOT_S * _SLOT_S


def _first_share(address: EngineAddress) -> float:
    """Return the part of its first pause after which an address is checked again: engines come together, and part."""
    return 0.5 + 0.5 * (address.engines[0].row * _GOLDEN % 1)


class _ServerInfo(msgspec.Struct):
    dp_size: int = 0


class HealthWatch:
    """Watcher that runs the health checks of an address, and periodically reads its models.

    A check does not wait for the one before it. So an engine that answers late is found to be alive, and one that hangs
    has missed several checks after a few seconds.
    """

    def __init__(self, fleet: Fleet, rules: WatchRules) -> None:
        self._fleet = fleet
        self._rules = rules

    async def __call__(self, address: EngineAddress) -> None:
        """Check the health of the address until cancelled."""
        running: set[asyncio.Task[None]] = set()
        due_s, alarm = partial(self._next_check_s, address, 1.0), address.alarm
        due_first_s = partial(self._next_check_s, address, _first_share(address))
        num_sent = 0
        async with asyncio.TaskGroup() as checks:
            while True:
                await alarm.wait(due_first_s if num_sent == 1 else due_s)
                if len(running) >= _MOST_CHECKS:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    continue
                sent_ns, is_requested = time.monotonic_ns(), alarm.is_requested
                address.silence.checked(sent_ns)
                alarm.is_requested = False
                task = checks.create_task(self._check(address, sent_ns, is_requested=is_requested))
                running.add(task)
                task.add_done_callback(running.discard)
                num_sent += 1
                if num_sent == _UNHEARD_CHECKS and address.engines[0].condition is Condition.UNCHECKED:
                    logger.warning("engine %s has passed no health check yet: %s", address.name, address.unreachable)

    def _next_check_s(self, address: EngineAddress, share: float) -> float:
        """Return the time of the next check.

        Args:
            share: part of the time until a regular check that passes before it.
        """
        silence = address.silence
        checked_s = silence.checked_ns * 1e-9
        for engine in address.engines:
            if engine.condition is not Condition.UP and engine.condition not in _WELL:
                return checked_s + self._rules.soon_s
        pause_s = (silence.next_check_ns - silence.checked_ns) * 1e-9
        # A check without an answer is no regular one: the time to a verdict is the operator's.
        return checked_s + pause_s if silence.is_awaited else _slot_s(checked_s, share * pause_s)

    async def _check(self, address: EngineAddress, sent_ns: int, *, is_requested: bool) -> None:
        loop = asyncio.get_running_loop()
        late = loop.call_later(self._rules.limit_s, loop.call_later, _READ_S, self._miss, address, sent_ns)
        passed = await self._passes(address)
        if address.pool.arrived_ns >= sent_ns:
            late.cancel()  # A byte has arrived in time, so the check cannot be missed any more.
        if passed and time.monotonic() >= address.models_due_s:
            address.models_due_s = time.monotonic() + MODELS_EVERY_S
            if not await self._learn_models(address):
                address.models_due_s = 0.0
        now_ns = time.monotonic_ns()
        if passed:
            address.unreachable = ""
        elif is_requested:  # One failure proves little, so the next check follows soon.
            loop.call_later(self._rules.soon_s, address.alarm.request)
        # Output of one rank excuses a failed check of the address, and so all its ranks.
        if passed or not any(engine.health.has_just_answered(now_ns) for engine in address.engines):
            for engine in address.engines:
                engine.health.checked(now_ns, passed=passed)
        self._look(address, now_ns)

    def _miss(self, address: EngineAddress, sent_ns: int) -> None:
        """Count a check as missed, unless the address has sent any byte since."""
        silence, now_ns = address.silence, time.monotonic_ns()
        num_missed = silence.num_missed
        silence.missed(sent_ns)
        if silence.num_missed > num_missed:
            # A check that failed has named a cause, such as a wrong certificate, which says more.
            if not address.unreachable:
                address.unreachable = f"{self._rules.health_path}: nothing for {(now_ns - sent_ns) * 1e-9:.1f} s"
            self._look(address, now_ns)

    def _look(self, address: EngineAddress, now_ns: int) -> None:
        for engine in address.engines:
            self._fleet.look(engine, now_ns)

    async def _passes(self, address: EngineAddress) -> bool:
        try:
            status, body = await ask(address, self._rules.health_path, self._rules.timeout_s, _MAX_HEALTH_BYTES)
        except NoAnswerError as error:
            address.unreachable = f"{self._rules.health_path}: {error}"
            return False
        now_ns = time.monotonic_ns()
        if self._is_own_refusal(status, body):
            self._fleet.looped(address.engines[0], now_ns)
            return False
        if status >= 300:
            address.unreachable = f"{self._rules.health_path} answered {status}"
        elif any(engine.health.is_loop_check_due(now_ns) for engine in address.engines):
            await self._check_loop(address)
        return status < 300

    async def _check_loop(self, address: EngineAddress) -> None:
        """Ask through the engine, because a router that leads back here answers its health check itself."""
        try:
            status, body = await ask(address, _FORWARDED_PATH, self._rules.timeout_s, _MAX_HEALTH_BYTES)
        except NoAnswerError:
            return  # This shows neither a loop nor that there is none.
        if self._is_own_refusal(status, body):
            self._fleet.looped(address.engines[0], time.monotonic_ns())
            return
        for engine in address.engines:
            engine.health.loop_ended(time.monotonic_ns())

    def _is_own_refusal(self, status: int, body: bytes) -> bool:
        return status == LOOP_STATUS and self._fleet.pseudonym in body

    async def _learn_models(self, address: EngineAddress) -> bool:
        try:
            status, body = await ask(address, "/v1/models", self._rules.timeout_s, _MAX_MODELS_BYTES)
        except NoAnswerError:
            return False
        if status == 200:
            for engine in address.engines:
                self._fleet.models.learn(engine.row, body)
        return True


class FiguresListener(Protocol):
    """Receives the figures of all engines, beside the router."""

    @property
    def needs_figures(self) -> bool:
        """Whether newer figures are needed soon."""
        ...

    def reported(self, row: int, figures: LoadFigures) -> None:
        """Take in the figures of the engine in `row`."""


class MetricsWatch:
    """Watcher that reads `/metrics` of an address and reports the figures of its engines to the router.

    It also finds the data-parallel ranks of a server, by their figures, or by the answer of SGLang's server info.
    """

    def __init__(self, fleet: Fleet, rules: WatchRules, listener: FiguresListener | None = None) -> None:
        self._fleet = fleet
        self._rules = rules
        self._listener = listener

    async def __call__(self, address: EngineAddress) -> None:
        """Read `/metrics` until cancelled, at growing intervals for an address without it."""
        pause_s, reader, share = self._rules.metrics_s, MetricsReader(), _first_share(address)
        while pause_s:
            requested_ns = time.monotonic_ns()
            try:
                status, text = await ask(address, "/metrics", self._rules.timeout_s, MAX_BYTES)
            except NoAnswerError:
                status, text = 0, b""
            reader.take(text if status == 200 else b"")
            if address.finds_ranks and status:
                await self._find_ranks(address, tuple(reader.by_rank))
            if status == 200:
                self._take(address, reader, requested_ns)
            pause_s = min(60.0, 2 * pause_s) if status == 404 else self._rules.metrics_s
            await self._rest(share * pause_s)
            share = 1.0

    async def _rest(self, pause_s: float) -> None:
        """Wait until the next read, which comes early while the listener needs figures."""
        loop = asyncio.get_running_loop()
        end_s = _slot_s(loop.time(), pause_s)
        while (left_s := end_s - loop.time()) > CheckAlarm.TIMER_S:
            await asyncio.sleep(left_s if self._listener is None else min(left_s, _HURRY_S))
            if self._listener is not None and self._listener.needs_figures:
                return

    async def _find_ranks(self, address: EngineAddress, ranks: Sequence[int]) -> None:
        """Give the address the ranks that its figures name, or else those of its server info."""
        for path in () if ranks else _SERVER_INFO_PATHS:
            try:
                status, body = await ask(address, path, self._rules.timeout_s, _MAX_INFO_BYTES)
            except NoAnswerError:
                return
            if num_ranks := _num_ranks(body) if status == 200 else 0:
                ranks = range(num_ranks)
                break
        known = address.ranks or (0,)
        if (ranks and len(ranks) != len(known)) or (len(ranks) > 1 and tuple(ranks) != known):
            logger.info("engine %s has %d data-parallel ranks (had %d)", address.name, len(ranks), len(known))
            self._fleet.set_ranks(address, ranks)

    def _take(self, address: EngineAddress, reader: MetricsReader, requested_ns: int) -> None:
        """Report the figures of each engine. A rank that the text does not name has none."""
        for engine in address.engines:
            load = reader.load if engine.rank is None else reader.by_rank.get(engine.rank)
            if load is None:
                continue
            self._report(engine, load, requested_ns)
            self._specify(engine, load)

    def _report(self, engine: RoutedEngine, load: ScrapedLoad, requested_ns: int) -> None:
        """Report figures as of the time of the request, because they contain nothing that arrived later."""
        now_ns = time.monotonic_ns()
        self._fleet.router.report(engine.row, load.figures, requested_ns, now_ns)
        if self._listener is not None:
            self._listener.reported(engine.row, load.figures)
        engine.totals = load.totals
        if load.num_tokens_computed is not None:
            num_in_flight = self._fleet.router.num_in_flight_on(engine.row)
            engine.health.counted(load.num_tokens_computed, num_in_flight, now_ns)

    def _specify(self, engine: RoutedEngine, load: ScrapedLoad) -> None:
        if load.num_kv_tokens is None and load.block_size is None:
            return
        num_blocks = None if load.num_kv_tokens is None else load.num_kv_tokens // self._fleet.block_tokens
        spec = msgspec.structs.replace(
            engine.spec,
            num_blocks=num_blocks,
            num_host_blocks=(load.num_host_tokens or 0) // self._fleet.block_tokens,
            block_size=load.block_size,
        )
        self._fleet.specify(engine, spec)


def _num_ranks(info: bytes) -> int:
    """Return the number of ranks in an answer of SGLang's server info; 0 if it names none."""
    try:
        found = msgspec.json.decode(info, type=_ServerInfo).dp_size
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
    return found if 1 <= found <= MAX_RANKS else 0


async def _run(watcher: Callable[[Watched], Awaitable[None]], watched: Watched) -> None:
    """Run a watcher, and restart it after an unexpected exception so that nothing stays unwatched."""
    while True:
        try:
            await watcher(watched)
            return
        except Exception:
            logger.exception("the watcher of engine %s failed; it is restarted", watched.name)
        await asyncio.sleep(_AGAIN_S)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_LOOK_S = 2.0

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
                now_s = asyncio.get_running_loop().time()
                await asyncio.sleep(_slot_s(now_s, _LOOK_S) - now_s)
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
        table, added = self._fleet.router.table, []
        for figure in self._needs.figures:
            if figure in missing and figure not in known:
                is_fresh = getattr(table, figure).known(now_ns, self._fresh_ns)
                # Engines without /metrics lack a figure together, and then each look at all others would be in vain.
                if is_fresh.any() and self._is_given_by_others(engine, is_fresh):
                    added.append(figure)
        self._lacking[engine.row] = known.union(added)
        if added:
            logger.warning(
                "engine %s does not report %s, which other engines do; route policy %s compares no engine by %s and"
                " uses %s",
                engine.name, ", ".join(added), self._policy, "it" if len(added) == 1 else "them",
                self._replacement(added),
            )  # fmt: skip

    def _is_given_by_others(self, engine: RoutedEngine, is_fresh: NDArray[np.bool_]) -> bool:
        """Return whether another engine in rotation reports a figure, by the rows that do."""
        router = self._fleet.router
        return any(is_fresh[each.row] and each is not engine and router.is_routable(each.row) for each in self._fleet)

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


FIRST_ERROR = 400
_RATE_LIMITED = 429  # Concerns the client (RFC 6585).
_OVERLOADED = frozenset({503, 529})  # 529 comes from Dynamo and Anthropic.
_FAILED = frozenset({500, 502, 504})
# First event of a stream that has failed before its first token, in OpenAI's or Anthropic's form.
_ERROR_EVENT = re.compile(rb'\s*(?:event: ?error\r?\n)?data: ?\{"(?:error"|(?:type|object)": ?"error")')
_ERROR_OF_REQUEST = re.compile(rb'"code": ?4\d\d\b')  # Such an event stands for a 4xx.
_DIGEST_BYTES = 4096  # Bytes at each end of a body by which bodies differ; a failure must not hash 32 MiB.

_TAIL_BYTES = 4096  # Kept end of an answer, which contains its usage.
_MAX_TAIL_BYTES = 4 * _TAIL_BYTES  # The tail is cut only beyond this size, not at every piece.
_LAST_BYTES = 256  # Longest end of a stream in which the last event is looked for.
# Many clients close the connection after this event, of OpenAI's or of Anthropic's API.
_LAST_EVENT = re.compile(rb'(?:data: \[DONE\]|data: ?\{"type": ?"message_stop"[^\n]*)\s*\Z')

Originator = Callable[[], Origin]  # Names the client and the body of a request, only when a failure counts.


class AnswerTail(bytearray):
    """The last bytes of an answer."""

    def add(self, data: bytes) -> None:
        """Append a piece, and drop what is too old to contain the usage."""
        if len(self) > _MAX_TAIL_BYTES:
            del self[:-_TAIL_BYTES]
        self += data

    @property
    def has_last_event(self) -> bool:
        """Whether a stream has sent its last event, and lacks only its last chunk."""
        return _LAST_EVENT.search(self, max(0, len(self) - _LAST_BYTES)) is not None


def origin_of(client: Hashable, body: bytes) -> Origin:
    """Return the client and the digest of a body, by which failures of one request are known as one."""
    return Origin(client, hash((len(body), body[:_DIGEST_BYTES], body[-_DIGEST_BYTES:])))


def blame(fleet: Fleet, engine: RoutedEngine, origin: Origin, sent_ns: int, now_ns: int) -> None:
    """Count a failure that may be the engine's or the request's own."""
    engine.health.breaker.failed(origin, sent_ns, now_ns)
    fleet.look(engine, now_ns)


def judge_status(
    fleet: Fleet, engine: RoutedEngine, head: tuple[int, Named], originator: Originator, sent_ns: int, now_ns: int
) -> bool:
    """Count a failure status, and return whether the engine leads back to this router.

    Args:
        head: Status and headers of the answer.
        sent_ns: Time at which the request was sent.
    """
    status, named = head
    if status == LOOP_STATUS and named.get(LOOP_HEADER) == fleet.pseudonym:
        fleet.looped(engine, now_ns)
        return True
    if status in _FAILED:
        blame(fleet, engine, originator(), sent_ns, now_ns)
    elif status in _OVERLOADED or status == _RATE_LIMITED:
        is_overloaded = status in _OVERLOADED
        client = originator().client
        engine.health.refused(client, _retry_after_ns(named), now_ns, is_overloaded=is_overloaded)
        fleet.look(engine, now_ns)
    return False


def begins_with_error(data: bytes) -> bool:
    """Return whether the first bytes of an event stream are an error, although its status is 200."""
    return _ERROR_EVENT.match(data) is not None


def judge_error_event(
    fleet: Fleet, engine: RoutedEngine, data: bytes, originator: Originator, sent_ns: int, now_ns: int
) -> None:
    """Count a stream that begins with an error, unless the error stands for a 4xx."""
    if not _ERROR_OF_REQUEST.search(data):
        blame(fleet, engine, originator(), sent_ns, now_ns)


def judge_success(fleet: Fleet, engine: RoutedEngine, sent_ns: int, now_ns: int) -> None:
    """Count an answer that begins well."""
    engine.health.succeeded(sent_ns, now_ns)
    if engine.condition is not Condition.UP:
        fleet.look(engine, now_ns)


def count_hits(engine: RoutedEngine, request: Request, decision: RouteDecision, usage: dict[bytes, int]) -> None:
    """Count the prompt tokens of an answer, and those that were predicted and reported as cached."""
    num_prompt_tokens = usage.get(b"prompt_tokens", 0)
    if not num_prompt_tokens:
        return
    counts = engine.counts
    counts.num_prompt_tokens += num_prompt_tokens
    counts.num_hit_tokens += usage.get(b"cached_tokens", 0)
    counts.num_host_hit_tokens += usage.get(b"host_cached_tokens", 0)
    share = min(1.0, decision.hit_tokens / request.num_prompt_tokens)
    counts.num_predicted_tokens += share * num_prompt_tokens


def cached_shares(usage: dict[bytes, int]) -> tuple[float | None, float | None]:
    """Return the part of the prompt that the engine had cached, and that it copied from host memory; None: unknown."""
    num_prompt_tokens = usage.get(b"prompt_tokens", 0)
    num_cached, num_copied = usage.get(b"cached_tokens"), usage.get(b"host_cached_tokens")
    if not num_prompt_tokens or num_cached is None:
        return None, None
    share = min(num_cached / num_prompt_tokens, 1.0)
    return share, None if num_copied is None else min(num_copied / num_prompt_tokens, share)


def _retry_after_ns(named: Named) -> int | None:
    """Return the delay in `Retry-After`; None if it is absent or a date."""
    value = named.get(b"retry-after", b"")
    return int(value) * 1_000_000_000 if value.isdigit() and len(value) <= 6 else None
