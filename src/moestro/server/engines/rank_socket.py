"""The API server's socket for all ranks: a stream socket on one machine, ZeroMQ between machines.

Both are read on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Protocol

import zmq

from moestro.core.processes import CurveKeys
from moestro.errors import ConfigError, NoEngineError
from moestro.web.ports.faults import LogLimit
from moestro.wire.messages import (
    MAX_MESSAGE_BYTES,
    MAX_QUEUED_MESSAGES,
    FromRank,
    ToRank,
    decode_from_rank,
    encode,
    identity_of,
)
from moestro.wire.sockets import Doorkeeper, FrameError, LocalStream, allow_ipv6, is_readable, local_path

logger = logging.getLogger(__name__)

_MESSAGES_A_TURN = 256  # Messages of ZeroMQ that are read before the event loop runs other tasks.
_NUM_CONNECTING = 128  # Connections that wait until they are accepted; further ones wait in `connect`.

Take = Callable[[bytes, bytes], None]  # Takes the identity of a process, and its message.


class Listener(Protocol):
    """Socket for the connections of all ranks.

    Attributes:
        address: Address at which it listens, with its port.
    """

    address: str

    @property
    def num_refused(self) -> int:
        """Connections of strangers, who did not prove the keys."""
        ...

    def begin(self, take: Take) -> None:
        """Call `take` with each message from now on."""
        ...

    def send(self, identity: bytes, message: bytes) -> None:
        """Queue a message for the process with this identity.

        Raises:
            OSError: The process is not connected, or has stopped reading.
        """
        ...

    def close(self) -> None:
        """Close all connections. The last messages sent may be lost."""
        ...


class LocalListener:
    """Stream socket in a directory that only this user can enter; implements `Listener`.

    The first message of a connection is the identity of its process.
    """

    num_refused = 0

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(0)
        self._identities: dict[LocalStream, bytes | None] = {}  # None until the connection's first message.
        self._streams: dict[bytes, LocalStream] = {}
        self._loop = asyncio.get_running_loop()
        try:
            self._socket.bind(local_path(address))
        except OSError as error:
            self._socket.close()
            remedy = "set TMPDIR to a short writable path"
            raise ConfigError(f"cannot listen on {address} ({error}): {remedy}") from error
        self._socket.listen(_NUM_CONNECTING)

    def begin(self, take: Take) -> None:
        """Implement `Listener.begin`."""
        self._take = take
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def send(self, identity: bytes, message: bytes) -> None:
        """Implement `Listener.send`."""
        stream = self._streams.get(identity)
        if stream is None:
            raise ConnectionError("it is not connected")
        if stream.num_queued >= MAX_QUEUED_MESSAGES:
            raise BlockingIOError("it does not read its messages")
        stream.send(message)
        if stream.num_queued == 1:
            self._loop.add_writer(stream.fileno(), self._flush, stream)

    def close(self) -> None:
        """Implement `Listener.close`."""
        if self._socket.fileno() == -1:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for stream in list(self._identities):
            self._drop(stream)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # The process has ended meanwhile.
            connection, _ = self._socket.accept()
            stream = LocalStream(connection)
            self._identities[stream] = None
            self._loop.add_reader(stream.fileno(), self._read, stream)

    def _read(self, stream: LocalStream) -> None:
        identity = self._identities[stream]
        try:
            messages = stream.receive()
        except FrameError as error:
            logger.error("closed the connection of %s, which sends %s", identity or "an unknown process", error)
            messages = None
        if messages and identity is None:
            identity, *messages = messages
            if identity in self._streams:
                messages = None
            else:
                self._identities[stream], self._streams[identity] = identity, stream
        if messages is None:
            self._drop(stream)
            return
        for message in messages:
            assert identity is not None, "a connection without identity has had no message"
            self._take(identity, message)

    def _flush(self, stream: LocalStream) -> None:
        with contextlib.suppress(OSError):  # `_read` sees the end of the connection.
            stream.flush()
            if stream.num_queued:
                return
        self._loop.remove_writer(stream.fileno())

    def _drop(self, stream: LocalStream) -> None:
        self._loop.remove_reader(stream.fileno())
        self._loop.remove_writer(stream.fileno())
        stream.close()
        identity = self._identities.pop(stream)
        if identity is not None and self._streams.get(identity) is stream:
            del self._streams[identity]


class ZmqListener:
    """ROUTER socket for ranks on any machine that prove their keys; implements `Listener`."""

    def __init__(self, address: str, keys: CurveKeys) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),  # An unreachable rank is an error, not a silent loss.
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.SNDHWM, MAX_QUEUED_MESSAGES),
            (zmq.RCVHWM, MAX_QUEUED_MESSAGES),
            (zmq.LINGER, 0),
        ):
            self._socket.setsockopt(option, value)
        self._doorkeeper = Doorkeeper(self._socket, keys)
        allow_ipv6(self._socket, address)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._context.term()
            raise ConfigError(f"cannot listen on {address} ({error}): it must be an address of this machine") from error
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._loop = asyncio.get_running_loop()

    @property
    def num_refused(self) -> int:
        """Implement `Listener.num_refused`."""
        return self._doorkeeper.num_refused

    def begin(self, take: Take) -> None:
        """Implement `Listener.begin`."""
        self._take = take
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.call_soon(self._drain)

    def send(self, identity: bytes, message: bytes) -> None:
        """Implement `Listener.send`."""
        try:
            self._socket.send_multipart((identity, message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise ConnectionError(error) from error
        # The descriptor is edge-triggered, and sending may have consumed an edge: read again.
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Implement `Listener.close`."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=0)
            self._context.term()

    def _drain(self) -> None:
        for _ in range(_MESSAGES_A_TURN):
            if self._socket.closed:
                return
            if not is_readable(self._socket):
                return
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            self._take(frames[0], frames[1] if len(frames) == 2 else b"")  # b"" is no message either.
        self._loop.call_soon(self._drain)


_RETIRED = -1


class RankSocket:
    """Sends messages to ranks by number, and delivers the messages of ranks.

    Messages that cannot be decoded, or come from unknown processes, are counted. A message that cannot be decoded means
    a broken rank, because a request may wait for it: later messages of that process are ignored. An error in processing
    a message says nothing about the rank; `deliver` handles it. Messages of a replaced process are stale and ignored.

    Args:
        address: Address ipc://... in a directory that only this user can enter, or tcp://... with the port *.
        num_ranks: Number of ranks; ranks are numbered from 0.
        keys: Keys that members of a tcp address prove; None means an ipc address.

    Attributes:
        num_dropped: Messages that could not be read, or came from unknown processes.
    """

    def __init__(self, address: str, num_ranks: int, keys: CurveKeys | None = None) -> None:
        self._identities = [identity_of(rank, 0) for rank in range(num_ranks)]
        self._ranks = {identity: rank for rank, identity in enumerate(self._identities)}
        self._deliver: Callable[[int, FromRank], None] | None = None
        self._on_broken: Callable[[int], None] | None = None
        self.num_dropped = 0
        self._log = LogLimit(logger)
        self._listener: Listener = LocalListener(address) if keys is None else ZmqListener(address, keys)

    @property
    def address(self) -> str:
        """Address at which it listens, with its port."""
        return self._listener.address

    @property
    def num_refused(self) -> int:
        """Connections of strangers, who did not prove the keys."""
        return self._listener.num_refused

    def listen(
        self, deliver: Callable[[int, FromRank], None], on_broken: Callable[[int], None], name: Callable[[int], str]
    ) -> None:
        """Call `deliver` on the event loop with (rank, message), and `on_broken` with the rank of an invalid message.

        `name` returns a rank's name for the log.

        `deliver` must not raise: the messages behind the failed one would wait until the next one arrives.
        """
        self._deliver = deliver
        self._on_broken = on_broken
        self._name = name
        self._listener.begin(self._take)

    def expect(self, rank: int, launch: int) -> None:
        """Accept messages for `rank` only from the process of this launch."""
        self._ranks[self._identities[rank]] = _RETIRED
        self._identities[rank] = identity_of(rank, launch)
        self._ranks[self._identities[rank]] = rank

    def send(self, rank: int, message: ToRank) -> None:
        """Queue `message` for `rank`.

        Raises:
            NoEngineError: The rank is not connected, or has stopped reading.
        """
        try:
            self._listener.send(self._identities[rank], encode(message))
        except OSError as error:
            logger.warning("%s cannot be reached: %s", self._name(rank), error)
            raise NoEngineError from error

    def close(self) -> None:
        """Close the socket. The last messages sent may be lost."""
        self._listener.close()

    def _take(self, identity: bytes, data: bytes) -> None:
        rank = self._ranks.get(identity)
        if rank == _RETIRED:
            return
        if rank is None:
            self.num_dropped += 1
            self._log.warning(
                "stranger", f"dropped a message of an unknown process ({self.num_dropped} dropped so far)"
            )
            return
        assert self._deliver is not None
        assert self._on_broken is not None
        try:
            message: FromRank = decode_from_rank(data)
        except Exception as error:  # Text that is not UTF-8 raises an exception of its own.
            self.num_dropped += 1
            logger.error(
                "a message of %s cannot be read: %s (%d dropped so far)", self._name(rank), error, self.num_dropped
            )
            self._ranks[identity] = _RETIRED
            self._on_broken(rank)
            return
        self._deliver(rank, message)
