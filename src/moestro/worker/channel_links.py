"""Connections from a rank to the API server: a stream socket on one machine, ZeroMQ between machines."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Collection
from typing import Protocol

import zmq

from moestro.core.curve_keys import CurveKeys
from moestro.wire.curve import allow_ipv6, secure_client
from moestro.wire.local_stream import LocalStream
from moestro.wire.messages import MAX_MESSAGE_BYTES, MAX_QUEUED_MESSAGES
from moestro.wire.readable import is_readable

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
