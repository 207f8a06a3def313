"""A rank's end of the connection to the API server: one thread owns the socket, so the main loop never waits for it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

import zmq

from moestro.core.clock import NS_PER_MS
from moestro.core.curve_keys import CurveKeys
from moestro.wire.curve import allow_ipv6, secure_client
from moestro.wire.messages import (
    MAX_MESSAGE_BYTES,
    MAX_QUEUED_MESSAGES,
    FromRank,
    Heartbeat,
    ToRank,
    decode_to_rank,
    encode,
)
from moestro.wire.readable import is_readable

logger = logging.getLogger(__name__)

_LINGER_MS = 2000
_RETRY_MS = 20  # until the next try while the API server does not keep up
ORPHANED = 3  # exit status of a rank whose parent, or the connection to it, is gone
_DEAF = 4  # exit status of a rank whose channel thread failed, so that no message could reach it


class Beats:
    """Decides when a rank sends a heartbeat: seldom while it has nothing to do, because each costs the API server time.

    Args:
        beat_ms: time between heartbeats.
        idle_beat_ms: the same while nothing is owed and no step is made.
    """

    def __init__(self, beat_ms: int = 500, idle_beat_ms: int = 500) -> None:
        self.beat_ms = beat_ms
        self._idle_ns = max(beat_ms, idle_beat_ms) * NS_PER_MS
        self._look_at_ns = self._idle_until_ns = 0
        self._num_steps = -1

    def next(self, num_steps: int, now_ns: int, *, owes: bool) -> Heartbeat | None:
        """Return the heartbeat to send now; None means none."""
        if now_ns < self._look_at_ns:
            return None
        self._look_at_ns = now_ns + self.beat_ms * NS_PER_MS
        is_idle = not owes and num_steps == self._num_steps
        if is_idle and now_ns < self._idle_until_ns:
            return None
        self._num_steps = num_steps
        self._idle_until_ns = now_ns + self._idle_ns if is_idle else 0
        return Heartbeat(num_steps, owes, is_idle)


class Channel:
    """Receives for the main loop and sends for it.

    The thread ends the whole process when `parent_fd` reaches its end. A rank therefore never outlives its API server,
    even if that was killed while the main loop is inside a kernel. The thread also sends heartbeats. When the thread
    fails, for instance on a message that does not decode, the process ends too: the API server notices, and every
    request gets an end.

    Args:
        address: address on which the API server listens.
        identity: name under which the API server expects this process.
        parent_fd: a pipe whose other end only the parent holds.
        beats: heartbeats to send.
        keys: keys of the sockets; None means an API server on this machine.

    Attributes:
        num_steps, owes: set by the main loop, sent with every heartbeat.
        now_ns: reads the API server's clock; another machine replaces it, see `worker.server_clock`.
        inbox_fd: readable after a message came, for main loops that wait for something else too.
    """

    def __init__(
        self, address: str, identity: bytes, parent_fd: int, beats: Beats | None = None, keys: CurveKeys | None = None
    ) -> None:
        self.num_steps = 0
        self.owes = True
        self.now_ns: Callable[[], int] = time.monotonic_ns
        self._beats, self._keys = beats or Beats(), keys
        self.inbox_fd, self._inbox_write = _wake_pipe()
        self._inbox: SimpleQueue[ToRank] = SimpleQueue()
        self._outbox: deque[FromRank] = deque()
        self._parent_fd = parent_fd
        self._wake_read, self._wake_write = _wake_pipe()
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(address, identity), name="channel", daemon=True)
        self._thread.start()

    def receive(self, wait_s: float | None) -> list[ToRank]:
        """Return all received messages. Waits up to `wait_s` for the first (None means no limit); with 0 under 1 µs."""
        messages = []
        if wait_s != 0:
            with contextlib.suppress(Empty):
                messages.append(self._inbox.get(timeout=wait_s))
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def clear_inbox_fd(self) -> None:
        """Make `inbox_fd` unreadable until the next message; call it before `receive`."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.inbox_fd, 4096)

    def has_messages(self) -> bool:
        """Whether `receive` would return a message now; well under 1 µs."""
        return not self._inbox.empty()

    def send(self, message: FromRank) -> None:
        """Queue `message` for the thread to send."""
        self._outbox.append(message)
        self._wake()

    def close(self) -> None:
        """Send queued messages (for at most `_LINGER_MS`) and disconnect."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        _write_to_wake(self._wake_write)

    # --- the thread

    def _run(self, address: str, identity: bytes) -> None:
        try:
            self._exchange(address, identity)
        except BaseException:
            logger.exception("the channel to the API server failed")
            os._exit(_DEAF)

    def _exchange(self, address: str, identity: bytes) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IDENTITY, identity),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.SNDHWM, MAX_QUEUED_MESSAGES),
            (zmq.RCVHWM, MAX_QUEUED_MESSAGES),
            (zmq.LINGER, _LINGER_MS),
        ):
            socket.setsockopt(option, value)
        secure_client(socket, self._keys)
        losses = None if self._keys is None else socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        allow_ipv6(socket, address)
        socket.connect(address)
        poller = zmq.Poller()
        for readable in (socket, self._wake_read, self._parent_fd, *(() if losses is None else (losses,))):
            poller.register(readable, zmq.POLLIN)
        while not (self._closing and not self._outbox):
            ready = {fd for fd, _ in poller.poll(_RETRY_MS if self._outbox else self._beats.beat_ms)}
            if self._parent_fd in ready and not os.read(self._parent_fd, 4096):
                os._exit(ORPHANED)
            if losses in ready:  # messages may be lost, so that requests would never end: the next process has none
                logger.error("the connection to the API server broke")
                os._exit(ORPHANED)
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            self._send_all(socket)
            if (beat := self._beats.next(self.num_steps, time.monotonic_ns(), owes=self.owes)) is not None:
                with contextlib.suppress(zmq.Again):  # the API server does not keep up; its unread messages are a sign
                    socket.send(encode(beat), zmq.NOBLOCK)
            if socket in ready:
                self._receive_all(socket)
        if losses is not None:
            socket.disable_monitor()
            losses.close(linger=0)
        socket.close()
        context.term()

    def _send_all(self, socket: zmq.Socket[bytes]) -> None:
        while self._outbox:
            try:
                socket.send(encode(self._outbox[0]), zmq.NOBLOCK)
            except zmq.Again:
                return
            self._outbox.popleft()

    def _receive_all(self, socket: zmq.Socket[bytes]) -> None:
        while is_readable(socket):
            self._inbox.put(decode_to_rank(socket.recv(zmq.NOBLOCK)))
            _write_to_wake(self._inbox_write)


def _wake_pipe() -> tuple[int, int]:
    """Return a pipe's ends for reading and writing, neither of which blocks."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


def _write_to_wake(end: int) -> None:
    with contextlib.suppress(BlockingIOError):  # the pipe is full of earlier calls, so the reader is awake already
        os.write(end, b"\0")
