"""Subscriptions to KV events: the sockets of one engine's events and replays, reconnected when they end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from moestro.gateway.kv_sources import KvSource
from moestro.routing.kv_events import KvFeed
from moestro.web.log_limit import LogLimit

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.0  # between connection attempts
_CONNECT_S = 5.0
_LOOK_S = 1.0  # polling interval for changes without a wake-up
_MESSAGES_A_TURN = 64  # limit per socket before control returns to the event loop
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_QUEUED_MESSAGES = 100_000  # vLLM's own limit

_MADE = zmq.EVENT_HANDSHAKE_SUCCEEDED
_ENDED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_SOCKET_OPTIONS = (
    (zmq.LINGER, 0),
    (zmq.IPV6, 1),
    (zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES),
    (zmq.RCVHWM, _MAX_QUEUED_MESSAGES),
    (zmq.CONNECT_TIMEOUT, int(_CONNECT_S * 1000)),
    (zmq.HANDSHAKE_IVL, int(_CONNECT_S * 1000)),
    (zmq.HEARTBEAT_IVL, 5000),  # detects a machine that vanished without closing the connection
    (zmq.HEARTBEAT_TIMEOUT, 10_000),
)


class KvSubscription:
    """Passes one publisher's messages to a feed until it is cancelled.

    Args:
        context: zmq context of the sockets.
        source: endpoints of the publisher.
        feed: receiver of the messages.
        num_forgotten: returns how often the router has discarded the engine's blocks. After each time they are
            reported again.
        log: destination of log lines.

    Attributes:
        lag_s: delay of the newest live batch from its time stamp to its arrival, seconds, across two machines' clocks.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        source: KvSource,
        feed: KvFeed,
        num_forgotten: Callable[[], int],
        log: LogLimit,
    ) -> None:
        self.lag_s = 0.0
        self.feed = feed
        self._context = context
        self._source = source
        self._num_forgotten = num_forgotten
        self._log = log
        self._num_told = num_forgotten()

    async def run(self) -> None:
        """Connect, listen and reconnect until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            with contextlib.closing(_Connection(self._context, self._source)) as connection:
                await self._listen(connection)
                if connection.is_made:
                    pause_s = _FIRST_PAUSE_S
                    self._log.info("ended", f"the connection to KV events at {self._source.events} ended; reconnecting")
                    self.feed.stream.disconnected(time.monotonic_ns())
            await self._sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - routers must not reconnect all at once
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _listen(self, connection: _Connection) -> None:
        """Process messages and deadlines until the connection ends."""
        feed = self.feed
        while True:
            connection.wake.clear()
            was_made = connection.is_made
            if connection.has_ended():
                return
            now_ns = time.monotonic_ns()
            if connection.is_made and not was_made:
                feed.stream.connected(now_ns)
            is_busy = self._take(connection, now_ns)
            feed.stream.tick(now_ns)
            start = feed.stream.request()
            if start is not None:
                connection.ask(start)
            self._remind(now_ns)
            if is_busy:
                await asyncio.sleep(0)
                continue
            deadline_ns = feed.stream.deadline_ns
            left_s = _LOOK_S if deadline_ns is None else max(0.0, (deadline_ns - now_ns) / 1e9)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_LOOK_S, left_s)):
                    await connection.wake.wait()

    def _take(self, connection: _Connection, now_ns: int) -> bool:
        """Pass received messages to the feed, up to one turn's limit, and return whether more may be waiting."""
        if not connection.is_made:
            return False
        feed, num_taken = self.feed, 0
        while num_taken < _MESSAGES_A_TURN and (frames := connection.replayed()):
            num_taken += 1
            if feed.replayed(frames, now_ns):
                connection.hang_up_replay()
        num_live = 0
        while num_live < _MESSAGES_A_TURN and (frames := connection.live()):
            num_live += 1
            feed.live(frames, now_ns)
        if num_live:
            self.lag_s = time.time() - feed.counts.newest_ts_s
        return max(num_taken, num_live) == _MESSAGES_A_TURN

    def _remind(self, now_ns: int) -> None:
        """Report all blocks to the router again after it discarded them, once the stream is certain."""
        num_forgotten = self._num_forgotten()
        if num_forgotten != self._num_told and self.feed.stream.is_certain:
            self._num_told = num_forgotten
            self.feed.tell_again(now_ns)

    async def _sleep(self, seconds: float) -> None:
        """Wait between two connections, while the stream's deadlines keep running."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            self.feed.stream.tick(time.monotonic_ns())
            await asyncio.sleep(min(_LOOK_S, left_s))


class _Connection:
    """One connection to a publisher, and its replays.

    Attributes:
        is_made: whether the connection was ever established.
        wake: event that is set when a message may have arrived.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: KvSource) -> None:
        self.is_made = False
        self.wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._source = source
        self._give_up_s = time.monotonic() + 2 * _CONNECT_S
        self._replay: zmq.Socket[bytes] | None = None
        self._sub = self._socket(zmq.SUB)
        # One socket is one connection and thus one process, so zmq must not reconnect by itself.
        self._sub.setsockopt(zmq.RECONNECT_IVL, -1)
        self._sub.subscribe(b"")
        self._monitor = self._sub.get_monitor_socket(_MADE | _ENDED)
        self._watch(self._monitor)
        self._watch(self._sub)
        self._sub.connect(source.events)

    def has_ended(self) -> bool:
        """Read the socket's events, and return whether the connection has ended or was not made in time."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                if event & _ENDED:
                    return True
                self.is_made |= bool(event & _MADE)
        return not self.is_made and time.monotonic() > self._give_up_s

    def live(self) -> list[bytes] | None:
        """Return a published message, or None without a waiting message."""
        return _received(self._sub)

    def ask(self, start: int) -> None:
        """Request a replay of all batches from number `start` on, and abandon a previous replay."""
        self.hang_up_replay()
        if self._source.replay is None:
            return
        # A new socket, so that a late reply to an earlier request is not taken for one to this request.
        self._replay = self._socket(zmq.DEALER)
        self._watch(self._replay)
        self._replay.connect(self._source.replay)
        with contextlib.suppress(zmq.Again):  # an unsent request expires like an unanswered one
            self._replay.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        self.wake.set()  # sending may have consumed the notification of a received message

    def replayed(self) -> list[bytes] | None:
        """Return a message of the replay, or None without a waiting message."""
        return None if self._replay is None else _received(self._replay)

    def hang_up_replay(self) -> None:
        """Close the replay's socket, if any."""
        if self._replay is not None:
            self._drop(self._replay)
            self._replay = None

    def close(self) -> None:
        """Close all sockets."""
        self.hang_up_replay()
        self._sub.disable_monitor()
        self._drop(self._monitor)
        self._drop(self._sub)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option, value in _SOCKET_OPTIONS:
            socket.setsockopt(option, value)
        return socket

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        self._loop.add_reader(socket.fileno(), self.wake.set)

    def _drop(self, socket: zmq.Socket[bytes]) -> None:
        self._loop.remove_reader(socket.fileno())
        socket.close()


def _received(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
