"""Queue that serves clients in turn, so that none waits behind all that another one has sent."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items that wait, first come first served within a client, and clients in turn.

    A full queue has a place for each client before any has another one: the client with most items loses its newest.

    Args:
        max_waiting: Most items; None means no limit.
    """

    def __init__(self, max_waiting: int | None = None) -> None:
        self._max_waiting = max_waiting
        self._of_client: OrderedDict[Hashable, deque[T]] = OrderedDict()  # The client whose turn is next comes first.
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, client: Hashable, item: T) -> T | None:
        """Add an item of `client`.

        Returns:
            The item that lost its place, which may be the new one; None if the queue had room.
        """
        own = self._of_client.setdefault(client, deque())
        own.append(item)
        self._num_waiting += 1
        if self._max_waiting is None or self._num_waiting <= self._max_waiting:
            return None
        longest = max(self._of_client, key=lambda each: len(self._of_client[each]))
        if len(own) == len(self._of_client[longest]):
            longest = client
        return self._removed(longest, self._of_client[longest].pop())

    def pop(self) -> T:
        """Remove and return the next item of the client whose turn it is; IndexError if none waits."""
        if not self._of_client:
            raise IndexError("no item waits")
        client, waiting = next(iter(self._of_client.items()))
        item = self._removed(client, waiting.popleft())
        if waiting:
            self._of_client.move_to_end(client)
        return item

    def discard(self, client: Hashable, item: T) -> None:
        """Remove an item of `client`. An item that does not wait is ignored."""
        with contextlib.suppress(KeyError, ValueError):
            self._of_client[client].remove(item)
            self._removed(client, item)

    def _removed(self, client: Hashable, item: T) -> T:
        self._num_waiting -= 1
        if not self._of_client[client]:
            del self._of_client[client]
        return item
