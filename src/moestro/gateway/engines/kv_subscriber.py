"""Subscriptions to the KV events of each engine's publisher: watched, connected, and made again when they end.

A connection holds a bounded number of bytes of what the publisher sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import cast

from moestro.gateway.engines.fleet import Fleet, RoutedEngine
from moestro.gateway.part_settings import KvSource, KvSources
from moestro.routing.kv_events import KvFeed, KvFeedSettings
from moestro.web.ports.faults import LogLimit
from moestro.wire.kv_events import MAX_MESSAGE_BYTES
from moestro.wire.kv_names import NamingRules
from moestro.wire.zmtp import SUBSCRIBE_TO_ALL, ZmtpError, ZmtpReader, greeting, keep_alive, message, ready

logger = logging.getLogger(__name__)


_CONNECT_S = 5.0
_HELD_BYTES = 256 << 10  # received and not taken, besides a message that is not whole; then TCP slows the peer down
_ANSWER_BYTES = 64 << 10  # answers to a peer that does not read them
_FRAMES_AT_ONCE = 64  # limit of what one call reads, be it complete messages or not
_TCP = "tcp://"
_IPC = "ipc://"


class ZmtpConnection(asyncio.Protocol):
    """One connection. It never reconnects: one connection is one process of the publisher.

    Args:
        socket_type: type of this end.
        peers: types that the other end may have.
        wake: called when a message may have arrived, or the connection has ended.

    Attributes:
        is_over: whether the connection has ended, or could not be made.
        fault: how the peer broke the protocol or a bound; empty means that it did not.
    """

    def __init__(self, socket_type: bytes, peers: frozenset[bytes], wake: Callable[[], None]) -> None:
        self.is_over = False
        self.fault = ""
        self._socket_type = socket_type
        self._wake = wake
        self._reader = ZmtpReader(peers, MAX_MESSAGE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._first = b""
        self._connecting: asyncio.Task[None] | None = None

    @property
    def is_made(self) -> bool:
        """Whether the handshake is complete."""
        return self._reader.is_made

    def open(self, endpoint: str, first: bytes) -> None:
        """Connect to `endpoint`, and send the message `first` after the handshake."""
        self._first = first
        self._connecting = asyncio.create_task(self._connect(endpoint))

    def take(self) -> list[bytes] | None:
        """Return a received message, or None without one that is whole. After a fault of the peer there is none."""
        if self.is_over and self.fault:
            return None
        frames: list[bytes] | None = None
        try:
            for _ in range(_FRAMES_AT_ONCE):
                if self._reader.wants_more:
                    break
                frames, answer = self._reader.take()
                self._answer(answer)
                if self._first and self._reader.is_made:  # libzmq ends a connection with a message before its handshake
                    self._answer(self._first)
                    self._first = b""
                if frames is not None:
                    break
        except ZmtpError as error:
            self.fault = str(error)
            self.close()
        self._resume()
        return frames

    @property
    def has_more(self) -> bool:
        """Whether another call of `take` may return a message."""
        return not self.fault and not self._reader.wants_more

    def close(self) -> None:
        """End the connection."""
        self.is_over = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    # --- from the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake with the publisher."""
        self._transport = connected = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        if self.is_over:
            connected.abort()
            return
        raw = connected.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            keep_alive(raw)
        connected.write(greeting() + ready(self._socket_type))

    def data_received(self, data: bytes) -> None:
        """Hold the data for `take`, and slow the peer down if it is much."""
        if self.fault:
            return
        self._reader.add(data)
        if not self._reader.wants_more and self._reader.num_held_bytes > _HELD_BYTES and not self._is_paused:
            self._is_paused = True
            assert self._transport is not None
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Implement `asyncio.Protocol`."""
        self.is_over = True
        self._wake()

    # --- inside

    async def _connect(self, endpoint: str) -> None:
        """Connect, and give up a handshake that takes too long."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_CONNECT_S):
                if endpoint.startswith(_IPC):
                    await loop.create_unix_connection(lambda: self, _unix_path(endpoint.removeprefix(_IPC)))
                else:
                    host, _, port = endpoint.removeprefix(_TCP).rpartition(":")
                    await loop.create_connection(lambda: self, host.strip("[]"), int(port))
            await asyncio.sleep(_CONNECT_S)
        if not self.is_made:
            self.close()
            self._wake()

    def _answer(self, answer: bytes) -> None:
        transport = self._transport
        if answer and transport is not None and transport.get_write_buffer_size() < _ANSWER_BYTES:
            transport.write(answer)

    def _resume(self) -> None:
        reader = self._reader
        if self._is_paused and not self.is_over and (reader.wants_more or reader.num_held_bytes <= _HELD_BYTES):
            self._is_paused = False
            assert self._transport is not None
            self._transport.resume_reading()


def _unix_path(path: str) -> str:
    """Return a path as the system takes it; libzmq writes an abstract one with a leading @."""
    return "\0" + path[1:] if path.startswith("@") else path


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.0  # between connection attempts
_LOOK_S = 1.0  # polling interval for changes without a wake-up
_ASK_S = 0.2  # between two replays, so that a publisher whose numbers jump causes few connections
_MESSAGES_A_TURN = 64  # limit per connection before control returns to the event loop
_UNITS_A_TURN = 1024  # limit of the feed's work in a turn, about 3 ms
_TURN_S = 0.003
_REST = 3.0  # pause after a full turn, by its duration: one engine's events take a quarter of the event loop at most

_PUBLISHERS = frozenset({b"PUB", b"XPUB"})
_REPLAYERS = frozenset({b"ROUTER", b"REP"})


class KvSubscription:
    """Passes one publisher's messages to a feed until it is cancelled.

    What a publisher can make the router hold is bounded: by a message and a few received bytes a connection, by what
    the stream holds back, and by the blocks that the feed follows. What it can make the router do in a turn of the
    event loop is bounded too. Messages beyond that stay in the publisher's own queue.

    Args:
        source: endpoints of the publisher.
        feed: receiver of the messages.
        num_forgotten: returns how often the router has discarded the engine's blocks. After each time they are
            reported again.
        log: destination of log lines.

    Attributes:
        lag_s: delay of the newest live batch from its time stamp to its arrival, seconds, across two machines' clocks.
    """

    def __init__(self, source: KvSource, feed: KvFeed, num_forgotten: Callable[[], int], log: LogLimit) -> None:
        self.lag_s = 0.0
        self.feed = feed
        self._source = source
        self._num_forgotten = num_forgotten
        self._log = log
        self._num_forgotten_before = num_forgotten()

    async def run(self) -> None:
        """Connect, listen and reconnect until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            with contextlib.closing(_Connection(self._source)) as connection:
                await self._listen(connection)
                events = connection.events
                if connection.is_reported:
                    self.feed.stream.disconnected(time.monotonic_ns())
                if events.fault:
                    self.feed.stream.give_up(events.fault, time.monotonic_ns())
                elif events.is_made:
                    pause_s = _FIRST_PAUSE_S
                    self._log.info("ended", f"the connection to KV events at {self._source.events} ended; reconnecting")
            await self._sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - routers must not reconnect all at once
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _listen(self, connection: _Connection) -> None:
        """Process messages and deadlines until the connection ends."""
        feed = self.feed
        while True:
            connection.wake.clear()
            now_ns = time.monotonic_ns()
            if self._turn(connection, now_ns):
                await asyncio.sleep(_REST * (time.monotonic_ns() - now_ns) / 1e9)
                continue
            if connection.events.is_over:
                return
            feed.stream.tick(now_ns)
            self._ask(connection)
            self._remind()
            if not feed.is_behind:
                deadline_ns = feed.stream.deadline_ns
                left_s = _LOOK_S if deadline_ns is None else max(0.0, (deadline_ns - now_ns) / 1e9)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(_LOOK_S, left_s)):
                        await connection.wake.wait()

    def _turn(self, connection: _Connection, now_ns: int) -> bool:
        """Process received messages up to one turn's limits, and return whether more may be waiting."""
        feed, num_live = self.feed, 0
        left = feed.work(now_ns, _UNITS_A_TURN)
        for _ in range(_MESSAGES_A_TURN):
            if left <= 0:
                break
            self._ask(connection)
            if frames := connection.replayed():
                if feed.replayed(frames, now_ns):
                    connection.hang_up_replay()
            elif frames := self._live(connection, now_ns):
                num_live += 1
                feed.live(frames, now_ns)
            elif not connection.has_more:
                break
            left = feed.work(now_ns, left - 1)
        if num_live:
            self.lag_s = time.time() - feed.counts.newest_ts_s
        return feed.is_behind or connection.has_more

    def _live(self, connection: _Connection, now_ns: int) -> list[bytes] | None:
        """Return a published message, or None without a waiting one. The stream learns first of a new connection."""
        frames = connection.events.take()
        if connection.events.is_made and not connection.is_reported:
            connection.is_reported = True
            self.feed.stream.connected(now_ns)
        return frames

    def _ask(self, connection: _Connection) -> None:
        """Request the replay that the stream needs, and end one that it does not await any more."""
        stream = self.feed.stream
        start = stream.request()
        if start is not None:
            connection.ask(start)
        elif not stream.awaits_replay:
            connection.hang_up_replay()
        elif fault := connection.replay_fault:
            connection.hang_up_replay()
            stream.give_up(f"its replay: {fault}", time.monotonic_ns())

    def _remind(self) -> None:
        """Report all blocks to the router again after it discarded them, once the stream is certain."""
        num_forgotten = self._num_forgotten()
        if num_forgotten != self._num_forgotten_before and self.feed.stream.is_certain:
            self._num_forgotten_before = num_forgotten
            self.feed.tell_again()

    async def _sleep(self, seconds: float) -> None:
        """Wait between two connections, while the stream's deadlines and the feed's work keep running."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            self.feed.stream.tick(time.monotonic_ns())
            self.feed.work(time.monotonic_ns(), _UNITS_A_TURN)
            await asyncio.sleep(min(_REST * _TURN_S if self.feed.is_behind else _LOOK_S, left_s))


class _Connection:
    """The connection to a publisher's events, and that to its current replay.

    Attributes:
        events: connection to the events.
        is_reported: whether the stream knows that it was made.
        wake: event that is set when a message may have arrived.
    """

    def __init__(self, source: KvSource) -> None:
        self.is_reported = False
        self.wake = asyncio.Event()
        self._source = source
        self._replay: ZmtpConnection | None = None
        self._asking: asyncio.TimerHandle | None = None
        self._may_ask_s = 0.0
        self.events = ZmtpConnection(b"SUB", _PUBLISHERS, self.wake.set)
        self.events.open(source.events, message(SUBSCRIBE_TO_ALL))

    @property
    def has_more(self) -> bool:
        """Whether a message may be waiting."""
        return self.events.has_more or (self._replay is not None and self._replay.has_more)

    @property
    def replay_fault(self) -> str:
        """How the replay's publisher broke the protocol or a bound; empty means that it did not."""
        return "" if self._replay is None else self._replay.fault

    def ask(self, start: int) -> None:
        """Request a replay of all batches from number `start` on, and abandon a previous replay."""
        self.hang_up_replay()
        if self._source.replay is None:
            return
        # A new connection, so that a late reply to an earlier request is not taken for one to this request.
        replay = self._replay = ZmtpConnection(b"DEALER", _REPLAYERS, self.wake.set)
        loop = asyncio.get_running_loop()
        at_s = max(loop.time(), self._may_ask_s)
        self._may_ask_s = at_s + _ASK_S
        request = message((b"", start.to_bytes(8, "big")))
        self._asking = loop.call_at(at_s, replay.open, self._source.replay, request)

    def replayed(self) -> list[bytes] | None:
        """Return a message of the replay, or None without a waiting message."""
        return None if self._replay is None else self._replay.take()

    def hang_up_replay(self) -> None:
        """Close the replay's connection, if any."""
        if self._asking is not None:
            self._asking.cancel()
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    def close(self) -> None:
        """Close all connections."""
        self.hang_up_replay()
        self.events.close()


_WATCH_S = 0.5
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
            await asyncio.sleep(_WATCH_S)
        return names[0]
