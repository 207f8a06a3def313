"""A rank's end of the connection to the API server. Its thread receives, so that the main loop never waits for it.

While a step computes on the only core of an engine, the thread waits for that core. Between steps the main loop
therefore also takes in what has arrived; else a request would often wait for one more step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from queue import Empty, SimpleQueue
from typing import NoReturn, Protocol

import zmq

from moestro.core.clock import NS_PER_MS
from moestro.core.processes import CurveKeys
from moestro.wire.messages import (
    MAX_MESSAGE_BYTES,
    MAX_QUEUED_MESSAGES,
    FromRank,
    Heartbeat,
    ToRank,
    decode_to_rank,
    encode,
)
from moestro.wire.sockets import LocalStream, allow_ipv6, is_readable, local_path, secure_client

# A pipe that wakes a thread which waits for descriptors.


class WakePipe:
    """Wakes the thread that waits for `fd`. No method blocks.

    Attributes:
        fd: readable from a `wake` until the next `clear`.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        for end in (self.fd, self._write_fd):
            os.set_blocking(end, False)

    def wake(self) -> None:
        """Make `fd` readable; any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of earlier calls, so the reader is awake already
            os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        """Make `fd` unreadable; call it before a look at what `wake` announces."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Close both ends; no thread may use them any more."""
        for end in (self.fd, self._write_fd):
            os.close(end)


LINGER_MS = 2000  # for the last messages, if the API server does not keep up
_RETRY_MS = 20  # until the next try while the API server does not keep up


class LostLinkError(Exception):
    """The connection broke, so that messages may be lost."""


class ChannelLink(Protocol):
    """Connection to the API server. The main loop calls `send` and `has_arrivals`, the channel's thread all others.

    After `has_arrivals` the main loop may also call `receive`, if the thread does not at the same time.
    """

    def open(self) -> None:
        """Connect."""
        ...

    def send(self, message: bytes) -> bool:
        """Send or queue `message`. Returns whether the thread is to call `flush`."""
        ...

    def offer(self, message: bytes) -> None:
        """Send `message` unless the API server does not keep up; what it has not read is sign enough of life."""
        ...

    def flush(self) -> bool:
        """Send what is queued, as far as that is possible now. Returns whether nothing is left."""
        ...

    def wait(self, fds: Collection[int], timeout_ms: int) -> set[int]:
        """Wait for one of `fds`, a message, or room for what is queued. Returns those of `fds` that are readable."""
        ...

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived.

        Raises:
            LostLinkError: The connection broke.
        """
        ...

    def has_arrivals(self) -> bool:
        """Whether the main loop can read something now; False where only the thread may read."""
        ...

    def close(self) -> None:
        """Disconnect. Sent messages may take `LINGER_MS` to leave."""
        ...


class LocalLink:
    """Connection on one machine; implements `ChannelLink`. A message leaves within `send`, without another thread."""

    def __init__(self, path: str, identity: bytes) -> None:
        self._path, self._identity = path, identity
        self._lock = threading.Lock()  # held by the thread that sends
        self._stream: LocalStream | None = None
        self._arrivals = select.poll()  # of the main loop
        self._early: list[bytes] = []  # sent before the connection is open

    def open(self) -> None:
        """Implement `ChannelLink.open`."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._path)
        except OSError as error:
            raise LostLinkError(f"cannot connect to {self._path}: {error}") from error
        self._arrivals.register(connection, select.POLLIN)
        with self._lock:
            self._stream = LocalStream(connection)
            for message in (self._identity, *self._early):
                self._put(self._stream, message)

    def send(self, message: bytes) -> bool:
        """Implement `ChannelLink.send`."""
        with self._lock:
            if self._stream is None:
                self._early.append(message)
                return False
            return self._put(self._stream, message)

    def offer(self, message: bytes) -> None:
        """Implement `ChannelLink.offer`."""
        with self._lock:
            if not self._opened.num_queued:
                self._put(self._opened, message)

    def flush(self) -> bool:
        """Implement `ChannelLink.flush`."""
        with self._lock:
            try:
                self._opened.flush()
            except OSError:
                return True  # The connection is gone, so the rest is dropped.
            return not self._opened.num_queued

    def wait(self, fds: Collection[int], timeout_ms: int) -> set[int]:
        """Implement `ChannelLink.wait`."""
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        poll.register(self._opened, select.POLLIN | (select.POLLOUT if self._opened.num_queued else 0))
        return {fd for fd, _ in poll.poll(timeout_ms)}.intersection(fds)

    def receive(self) -> list[bytes]:
        """Implement `ChannelLink.receive`."""
        messages = self._opened.receive()
        if messages is None:
            raise LostLinkError("the connection to the API server broke")
        return messages

    def has_arrivals(self) -> bool:
        """Implement `ChannelLink.has_arrivals`. An empty read would cost an exception."""
        return self._stream is not None and bool(self._arrivals.poll(0))

    def close(self) -> None:
        """Implement `ChannelLink.close`."""
        self._opened.close()

    @property
    def _opened(self) -> LocalStream:
        assert self._stream is not None, "`open` comes first"
        return self._stream

    @staticmethod
    def _put(stream: LocalStream, message: bytes) -> bool:
        """Return whether the thread is to call `flush`."""
        try:
            return not stream.send(message)
        except OSError:
            return False  # The thread reads the end of the connection, and ends the process.


class ZmqLink:
    """Connection to another machine; implements `ChannelLink`."""

    def __init__(self, address: str, identity: bytes, keys: CurveKeys) -> None:
        self._address, self._identity, self._keys = address, identity, keys
        self._outbox: deque[bytes] = deque()

    def open(self) -> None:
        """Implement `ChannelLink.open`."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IDENTITY, self._identity),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.SNDHWM, MAX_QUEUED_MESSAGES),
            (zmq.RCVHWM, MAX_QUEUED_MESSAGES),
            (zmq.LINGER, LINGER_MS),
        ):
            self._socket.setsockopt(option, value)
        secure_client(self._socket, self._keys)
        self._losses = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        allow_ipv6(self._socket, self._address)
        self._socket.connect(self._address)

    def send(self, message: bytes) -> bool:
        """Implement `ChannelLink.send`: only one thread may use a socket of ZeroMQ."""
        self._outbox.append(message)
        return True

    def offer(self, message: bytes) -> None:
        """Implement `ChannelLink.offer`."""
        self._try(message)

    def flush(self) -> bool:
        """Implement `ChannelLink.flush`."""
        while self._outbox:
            if not self._try(self._outbox[0]):
                return False
            self._outbox.popleft()
        return True

    def _try(self, message: bytes) -> bool:
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def wait(self, fds: Collection[int], timeout_ms: int) -> set[int]:
        """Implement `ChannelLink.wait`."""
        poller = zmq.Poller()
        for readable in (self._socket, self._losses, *fds):
            poller.register(readable, zmq.POLLIN)
        ready = {fd for fd, _ in poller.poll(_RETRY_MS if self._outbox else timeout_ms)}
        return {fd for fd in fds if fd in ready}

    def receive(self) -> list[bytes]:
        """Implement `ChannelLink.receive`."""
        if is_readable(self._losses):
            raise LostLinkError("the connection to the API server broke")
        messages = []
        while is_readable(self._socket):
            messages.append(self._socket.recv(zmq.NOBLOCK))
        return messages

    def has_arrivals(self) -> bool:
        """Implement `ChannelLink.has_arrivals`: only one thread may use a socket of ZeroMQ."""
        return False

    def close(self) -> None:
        """Implement `ChannelLink.close`."""
        self._socket.disable_monitor()
        self._losses.close(linger=0)
        self._socket.close()
        self._context.term()


logger = logging.getLogger(__name__)

ORPHANED = 3  # exit status of a rank whose parent, or the connection to it, is gone
_DEAF = 4  # exit status of a rank that could not read a message, or whose channel thread failed


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
    fails, or either thread reads a message that does not decode, the process ends too: the API server notices, and
    every request gets an end.

    Args:
        address: address on which the API server listens.
        identity: name under which the API server expects this process.
        parent_fd: a pipe whose other end only the parent holds.
        beats: heartbeats to send.
        keys: keys of the sockets; None means an API server on this machine.

    Attributes:
        num_steps, owes: set by the main loop, sent with every heartbeat.
        now_ns: reads the API server's clock; another machine replaces it, see `worker.server_clock`.
        arrival: woken after a message came, for main loops that wait for something else too.
    """

    def __init__(
        self, address: str, identity: bytes, parent_fd: int, beats: Beats | None = None, keys: CurveKeys | None = None
    ) -> None:
        self.num_steps = 0
        self.owes = True
        self.now_ns: Callable[[], int] = time.monotonic_ns
        self._beats = beats or Beats()
        self._link: ChannelLink = (
            LocalLink(local_path(address), identity) if keys is None else ZmqLink(address, identity, keys)
        )
        self.arrival = WakePipe()
        self._inbox: SimpleQueue[ToRank] = SimpleQueue()
        self._receiving = threading.Lock()  # held from reading to `_inbox`, so that messages keep their order
        self._parent_fd = parent_fd
        self._to_send = WakePipe()
        self._close_by_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()

    def receive(self, wait_s: float | None) -> list[ToRank]:
        """Return all received messages. Waits up to `wait_s` for the first (None means no limit); 0 takes a few µs."""
        messages = []
        self._take_in()
        if wait_s != 0 and self._inbox.empty():
            with contextlib.suppress(Empty):
                messages.append(self._inbox.get(timeout=wait_s))
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def has_messages(self) -> bool:
        """Whether `receive` would return a message now; a few µs."""
        if self._inbox.empty():
            self._take_in()
        return not self._inbox.empty()

    def _take_in(self) -> None:
        """Read what has arrived, if the main loop may."""
        if not self._link.has_arrivals():
            return
        try:
            with self._receiving, contextlib.suppress(LostLinkError):  # the channel's thread ends the process
                for message in self._link.receive():
                    self._inbox.put(decode_to_rank(message))
        except Exception:  # whichever thread reads the message, the process ends in the same way
            _end_deaf()

    def send(self, message: FromRank) -> None:
        """Send `message`, or queue it for the thread to send."""
        if self._link.send(encode(message)):
            self._to_send.wake()

    def close(self) -> None:
        """Send queued messages (for at most `LINGER_MS`) and disconnect."""
        self._close_by_s = time.monotonic() + LINGER_MS / 1e3
        self._to_send.wake()
        self._thread.join()

    # --- the thread

    def _run(self) -> None:
        try:
            self._link.open()
            self._exchange(self._link)
        except LostLinkError as error:  # Requests whose messages are lost would never end; the next process has none.
            logger.error("%s", error)
            os._exit(ORPHANED)
        except BaseException:
            _end_deaf()

    def _exchange(self, link: ChannelLink) -> None:
        is_all_sent = link.flush()
        while self._close_by_s is None or not (is_all_sent or time.monotonic() > self._close_by_s):
            ready = link.wait((self._to_send.fd, self._parent_fd), self._beats.beat_ms)
            if self._parent_fd in ready and not os.read(self._parent_fd, 4096):
                os._exit(ORPHANED)
            if self._to_send.fd in ready:
                self._to_send.clear()
            is_all_sent = link.flush()
            if (beat := self._beats.next(self.num_steps, time.monotonic_ns(), owes=self.owes)) is not None:
                link.offer(encode(beat))
            with self._receiving:
                for message in link.receive():
                    self._inbox.put(decode_to_rank(message))
                    self.arrival.wake()
        link.close()


def _end_deaf() -> NoReturn:
    """End the process with the current exception in its log."""
    logger.exception("the channel to the API server failed")
    os._exit(_DEAF)
