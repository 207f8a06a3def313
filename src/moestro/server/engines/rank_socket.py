"""The API server's socket for all ranks, read on the event loop."""

from __future__ import annotations

import logging
from collections.abc import Callable

from moestro.core.curve_keys import CurveKeys
from moestro.errors import NoEngineError
from moestro.server.engines.rank_listeners import Listener, LocalListener, ZmqListener
from moestro.web.ports.faults import LogLimit
from moestro.wire.messages import FromRank, ToRank, decode_from_rank, encode, identity_of

logger = logging.getLogger(__name__)

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
