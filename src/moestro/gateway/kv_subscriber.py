"""The sockets of KV events: one subscription an engine, its replays, and a new connection when one has ended."""

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

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.0  # between connections
_CONNECT_S = 5.0
_LOOK_S = 1.0  # at what nobody tells
_MESSAGES_A_TURN = 64  # then the event loop gets its turn
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_QUEUED_MESSAGES = 100_000  # vLLM's own bound

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
    (zmq.HEARTBEAT_IVL, 5000),  # a machine that is gone says no word of it
    (zmq.HEARTBEAT_TIMEOUT, 10_000),
)


class KvSubscription:
    """Feeds one publisher's events, from now until it is cancelled.

    Args:
        context: of the sockets.
        source: where the publisher is.
        feed: takes the messages.
        num_forgotten: how often the router has forgotten what the engine holds; then it is told again.
        log: Destination of log lines.

    Attributes:
        lag_s: from a batch's time stamp to its arrival, of the newest that came live; the clocks are two.
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
        """Until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            with contextlib.closing(_Connection(self._context, self._source)) as connection:
                await self._listen(connection)
                if connection.is_made:
                    pause_s = _FIRST_PAUSE_S
                    self._log.info("ended", f"KV events from {self._source.events} have ended; connecting again")
                    self.feed.stream.disconnected(time.monotonic_ns())
            await self._sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - so that routers do not come all at once
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _listen(self, connection: _Connection) -> None:
        """Until the connection ends."""
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
        """What has come, as much as one turn allows. Returns whether there may be more."""
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
        """Tell the router what it has forgotten, as soon as it is sure to hold."""
        num_forgotten = self._num_forgotten()
        if num_forgotten != self._num_told and self.feed.stream.is_certain:
            self._num_told = num_forgotten
            self.feed.tell_again(now_ns)

    async def _sleep(self, seconds: float) -> None:
        """Between two connections, when time goes on for the stream too."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            self.feed.stream.tick(time.monotonic_ns())
            await asyncio.sleep(min(_LOOK_S, left_s))


class _Connection:
    """One connection to a publisher, and the replays asked for while it lasts.

    Attributes:
        is_made: it stands, or stood.
        wake: set when something may have come.
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
        # One socket is one connection, and so one process: zmq must not make another behind our back.
        self._sub.setsockopt(zmq.RECONNECT_IVL, -1)
        self._sub.subscribe(b"")
        self._monitor = self._sub.get_monitor_socket(_MADE | _ENDED)
        self._watch(self._monitor)
        self._watch(self._sub)
        self._sub.connect(source.events)

    def has_ended(self) -> bool:
        """Look at what became of the connection."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                if event & _ENDED:
                    return True
                self.is_made |= bool(event & _MADE)
        return not self.is_made and time.monotonic() > self._give_up_s

    def live(self) -> list[bytes] | None:
        """A published message; None: there is none now."""
        return _received(self._sub)

    def ask(self, start: int) -> None:
        """Ask for all batches from number `start` on; an answer that is still on its way is not waited for."""
        self.hang_up_replay()
        if self._source.replay is None:
            return
        # A socket of its own, so that no late answer is taken for one to this question.
        self._replay = self._socket(zmq.DEALER)
        self._watch(self._replay)
        self._replay.connect(self._source.replay)
        with contextlib.suppress(zmq.Again):  # it is not answered, then
            self._replay.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        self.wake.set()  # sending may have used up the sign that there is something to read

    def replayed(self) -> list[bytes] | None:
        """A message of the replay; None: there is none now."""
        return None if self._replay is None else _received(self._replay)

    def hang_up_replay(self) -> None:
        """No more of it is wanted."""
        if self._replay is not None:
            self._drop(self._replay)
            self._replay = None

    def close(self) -> None:
        """Hang up."""
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
