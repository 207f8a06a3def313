"""The API server's ROUTER socket for all ranks, read on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq

from moestro.core.curve_keys import CurveKeys
from moestro.errors import ConfigError, NoEngineError
from moestro.web.log_limit import LogLimit
from moestro.wire.curve import Doorkeeper, allow_ipv6
from moestro.wire.messages import (
    MAX_MESSAGE_BYTES,
    MAX_QUEUED_MESSAGES,
    FromRank,
    ToRank,
    decode_from_rank,
    encode,
    identity_of,
)
from moestro.wire.readable import is_readable

logger = logging.getLogger(__name__)

_MESSAGES_A_TURN = 256  # Messages that are read before the event loop runs other tasks.
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
        address: Address at which it listens, with its port.
        num_dropped: Messages that could not be read, or came from unknown processes.
    """

    def __init__(self, address: str, num_ranks: int, keys: CurveKeys | None = None) -> None:
        self._identities = [identity_of(rank, 0) for rank in range(num_ranks)]
        self._ranks = {identity: rank for rank, identity in enumerate(self._identities)}
        self._deliver: Callable[[int, FromRank], None] | None = None
        self._on_broken: Callable[[int], None] | None = None
        self.num_dropped = 0
        self._log = LogLimit(logger)
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
        self._doorkeeper = None if keys is None else Doorkeeper(self._socket, keys)
        allow_ipv6(self._socket, address)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._context.term()
            remedy = "set TMPDIR to a short writable path" if keys is None else "it must be an address of this machine"
            raise ConfigError(f"cannot listen on {address} ({error}): {remedy}") from error
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._loop = asyncio.get_running_loop()

    @property
    def num_refused(self) -> int:
        """Connections of strangers, who did not prove the keys."""
        return 0 if self._doorkeeper is None else self._doorkeeper.num_refused

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
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.call_soon(self._drain)

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
            self._socket.send_multipart((self._identities[rank], encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("%s cannot be reached: %s", self._name(rank), error)
            raise NoEngineError from error
        # The descriptor is edge-triggered, and sending may have consumed an edge: read again.
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Close the socket. The last messages sent may be lost."""
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
            self._take(self._socket.recv_multipart(zmq.NOBLOCK))
        self._loop.call_soon(self._drain)

    def _take(self, frames: list[bytes]) -> None:
        rank = self._ranks.get(frames[0])
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
            message = _decoded(frames)
        except Exception as error:  # Text that is not UTF-8 raises an exception of its own.
            self.num_dropped += 1
            logger.error(
                "a message of %s cannot be read: %s (%d dropped so far)", self._name(rank), error, self.num_dropped
            )
            self._ranks[frames[0]] = _RETIRED
            self._on_broken(rank)
            return
        self._deliver(rank, message)


def _decoded(frames: list[bytes]) -> FromRank:
    if len(frames) != 2:
        raise msgspec.DecodeError(f"a message has 2 frames, got {len(frames)}")
    message: FromRank = decode_from_rank(frames[1])
    return message
