"""Connections of a publisher's listeners. What each can make the engine hold or do at once is bounded.

A listener is a position in the log of batches, which all share. So a slow one costs no memory: it is disconnected when
it is too far behind, connects again, and requests a replay.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections import deque
from enum import IntEnum
from selectors import EVENT_READ, EVENT_WRITE
from typing import ClassVar, NamedTuple

from moestro.errors import MoestroError
from moestro.wire.kv_events import END_OF_REPLAY
from moestro.wire.zmtp import CANCEL, SUBSCRIBE, ZmtpReader, greeting, message_head, ready

MAX_REQUEST_BYTES = 4096  # of a message: a subscription is a topic, and a request for a replay has eight bytes
READ_BYTES = 4096  # that one call reads
SEND_BYTES = 64 << 10  # of batches that one call sends, and the end of the last one; few calls fill a fast network
HANDSHAKE_S = 5.0  # for greeting and READY, which take two round trips
STALLED_S = 30.0  # for taking anything of what waits; a router reads within milliseconds
REPLAY_PAUSE_S = 0.5  # from a replay's end to the next on one connection, so that the network carries little else

_FRAMES_AT_ONCE = 16  # that one call handles
_BATCHES_AT_ONCE = 256  # that one call sends; two buffers each, and the system takes 1,024
_SEQ_BYTES = 8
_END = message_head((b"", END_OF_REPLAY), 0)


class Stay(IntEnum):
    """How firmly a connection holds its place; where places are few, the lowest gives way."""

    UNFINISHED = 0  # no handshake
    IDLE = 1  # nothing is lost by its end: ZeroMQ connects again before it sends the next request
    FIRM = 2


class ListenerError(MoestroError):
    """A listener has left, or cannot be served any longer."""


class KvBatch(NamedTuple):
    """A published batch.

    Attributes:
        live, replayed: beginnings of its messages to a subscriber and in a replay; `payload` is the last frame of both.
    """

    live: bytes
    replayed: bytes
    payload: bytes


class BatchLog:
    """The last published batches, by number.

    Args:
        topic: first frame of every live batch.
        max_batches: number of batches that are kept.
        max_behind: number of batches that a subscriber may be behind; 0 means all that are kept.

    Attributes:
        first, end: numbers of the oldest kept batch and of the next one.
    """

    def __init__(self, topic: bytes, max_batches: int, max_behind: int) -> None:
        self.topic = topic
        self.max_behind = min(max_behind or max_batches, max_batches)
        self.first = self.end = 0
        self._max_batches = max_batches
        self._batches: dict[int, KvBatch] = {}

    def append(self, payload: bytes) -> None:
        """Number and keep a batch. The oldest one gives way."""
        number = self.end.to_bytes(_SEQ_BYTES, "big")
        live, replayed = (message_head((first, number), len(payload)) for first in (self.topic, b""))
        self._batches[self.end] = KvBatch(live, replayed, payload)
        self.end += 1
        if len(self._batches) > self._max_batches:
            del self._batches[self.first]
            self.first += 1

    def __getitem__(self, number: int) -> KvBatch:
        return self._batches[number]


class KvListener(ABC):
    """One accepted connection to a port; `serve` does all its work in small pieces.

    Args:
        connection: accepted socket.
        network: name under which its address counts.
        log: batches to send.
        now_s: present time, of a clock that never goes back.

    Attributes:
        network: name under which its address counts.
        watched: events of the socket for which the server waits.
    """

    TYPE: ClassVar[bytes]  # socket type of this end
    PEERS: ClassVar[frozenset[bytes]]  # socket types that the other end may have

    def __init__(self, connection: socket.socket, network: str, log: BatchLog, now_s: float) -> None:
        connection.settimeout(0)
        self.network = network
        self.watched = 0
        self._connection = connection
        self._reader = ZmtpReader(self.PEERS, MAX_REQUEST_BYTES)
        self._log = log
        self._next = 0  # number of the next batch to send
        self._unsent: deque[bytes | memoryview] = deque([greeting() + ready(self.TYPE)])
        self._opened_s = self._moved_s = now_s  # when it was accepted, and when it last took something or all

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._connection.fileno()

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    @property
    def stay(self) -> Stay:
        """How firmly it holds its place."""
        return Stay.FIRM if self._reader.is_made else Stay.UNFINISHED

    @property
    def owes(self) -> bool:
        """Whether batches are to be sent to it."""
        return False

    def wanted(self, now_s: float) -> int:
        """Events of the socket after which `serve` can do something; 0 means none for the time being."""
        writes = EVENT_WRITE if self._unsent or self.owes else 0
        return writes | (EVENT_READ if self._may_read(now_s) else 0)

    def has_input(self, now_s: float) -> bool:
        """Whether `serve` can handle something that it has already read."""
        return self._may_read(now_s) and not self._reader.wants_more

    def serve(self, now_s: float) -> bool:
        """Send a piece and read a piece. Returns whether another call can do more at once.

        Raises:
            ListenerError: it has left, is too far behind, or has stopped reading.
            ZmtpError: it breaks the protocol or a bound.
            OSError: the connection broke.
        """
        goes_on = self._send(now_s)
        if self._may_read(now_s):
            self._receive(now_s)
        return goes_on or self.has_input(now_s)

    def check(self, now_s: float) -> None:
        """Raise ListenerError if its handshake or its next read takes too long."""
        if not self._reader.is_made and now_s - self._opened_s > HANDSHAKE_S:
            raise ListenerError("the handshake takes too long")
        if self._unsent and now_s - self._moved_s > STALLED_S:
            raise ListenerError("it has stopped reading")

    # --- what differs by port

    @abstractmethod
    def _take(self, frames: list[bytes]) -> None:
        """Handle a received message. Malformed ones are ignored."""

    @abstractmethod
    def _next_message(self, now_s: float) -> tuple[bytes, bytes]:
        """Return the beginning and the last frame of the next message that is owed, and pass on to the one after it."""

    def _may_read(self, now_s: float) -> bool:
        """Whether to read. What is not read fills the peer's own buffers, so that nothing is lost."""
        return not self._unsent

    # --- inside

    def _receive(self, now_s: float) -> None:
        if self._reader.wants_more:
            try:
                data = self._connection.recv(READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise ListenerError("it has left")
            self._reader.add(data)
        for _ in range(_FRAMES_AT_ONCE):
            if self._reader.wants_more or not self._may_read(now_s):
                return
            frames, answer = self._reader.take()
            if answer:
                self._unsent.append(answer)
            if frames is not None:
                self._take(frames)

    def _send(self, now_s: float) -> bool:
        """Send what the system takes of a piece. Returns whether it took all and more is owed."""
        if not self._unsent:
            self._moved_s = now_s
            self._fill(now_s)
        if not self._unsent:
            return False
        try:
            num_sent = self._connection.sendmsg(self._unsent)
        except BlockingIOError:
            return False
        self._moved_s = now_s
        while self._unsent and num_sent >= len(self._unsent[0]):
            num_sent -= len(self._unsent.popleft())
        if self._unsent:
            self._unsent[0] = memoryview(self._unsent[0])[num_sent:]
            return False
        return self.owes

    def _fill(self, now_s: float) -> None:
        """Line up the next messages, without copying the batches."""
        num_bytes = 0
        for _ in range(_BATCHES_AT_ONCE):
            if not self.owes or num_bytes >= SEND_BYTES:
                return
            for part in self._next_message(now_s):
                self._unsent.append(part)
                num_bytes += len(part)


class Subscriber(KvListener):
    """Receives batches from its subscription on. All batches have one topic, so it wants all of them or none."""

    TYPE = b"PUB"
    PEERS = frozenset({b"SUB", b"XSUB"})

    def __init__(self, connection: socket.socket, network: str, log: BatchLog, now_s: float) -> None:
        super().__init__(connection, network, log, now_s)
        self._num_of: dict[bytes, int] = {}  # subscriptions that match, by prefix; each is cancelled by itself

    @property
    def owes(self) -> bool:
        """Override."""
        return bool(self._num_of) and self._next < self._log.end

    def _take(self, frames: list[bytes]) -> None:
        kind, prefix = frames[0][:1], frames[0][1:]
        if len(frames) != 1 or kind not in (SUBSCRIBE, CANCEL) or not self._log.topic.startswith(prefix):
            return
        if not self._num_of:
            self._next = self._log.end
        num = self._num_of.pop(prefix, 0) + (1 if kind == SUBSCRIBE else -1)
        if num > 0:
            self._num_of[prefix] = num

    def _next_message(self, now_s: float) -> tuple[bytes, bytes]:
        if self._log.end - self._next > self._log.max_behind:
            raise ListenerError(f"it is more than {self._log.max_behind:,} batches behind")
        batch = self._log[self._next]
        self._next += 1
        return batch.live, batch.payload


class ReplayReader(KvListener):
    """Requests replays, which it gets one after the other. The next request is not read before a replay has ended."""

    TYPE = b"ROUTER"
    PEERS = frozenset({b"DEALER", b"REQ", b"ROUTER"})

    def __init__(self, connection: socket.socket, network: str, log: BatchLog, now_s: float) -> None:
        super().__init__(connection, network, log, now_s)
        self._until: int | None = None  # number at which the running replay ends
        self._may_ask_s = now_s

    @property
    def stay(self) -> Stay:
        """Override: between two replays it holds no place."""
        return Stay.IDLE if self._reader.is_made and not self.owes and not self._unsent else super().stay

    @property
    def owes(self) -> bool:
        """Override."""
        return self._until is not None

    def _may_read(self, now_s: float) -> bool:
        return super()._may_read(now_s) and not self.owes and now_s >= self._may_ask_s

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) == 2 and not frames[0] and len(frames[1]) == _SEQ_BYTES:
            self._next, self._until = int.from_bytes(frames[1], "big"), self._log.end

    def _next_message(self, now_s: float) -> tuple[bytes, bytes]:
        assert self._until is not None, "a request precedes a replay"
        self._next = max(self._next, self._log.first)  # batches that are not kept any more are left out
        if self._next >= self._until:
            self._until, self._may_ask_s = None, now_s + REPLAY_PAUSE_S
            return _END, b""
        batch = self._log[self._next]
        self._next += 1
        return batch.replayed, batch.payload
