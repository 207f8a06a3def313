"""Subscriptions to KV events: the connections to one engine's events and replays, made again when they end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

from moestro.gateway.kv.kv_sources import KvSource
from moestro.gateway.kv.zmtp_connection import ZmtpConnection
from moestro.routing.kv.kv_events import KvFeed
from moestro.web.ports.faults import LogLimit
from moestro.wire.zmtp import SUBSCRIBE_TO_ALL, message

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
