"""State of clients: a value for each client that was seen lately, in bounded memory.

A client is what `web.access.Access.client_of` returns: the key where several keys tell clients apart, else the address.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_CLIENTS = 4096  # Most remembered clients, about 1 MB a table.


class ClientTable(Generic[T]):
    """Remembers a value for each client, and forgets the client that was least recently used.

    Args:
        make: Makes the value of a client that is not remembered.
        max_clients: Most remembered clients.
    """

    def __init__(self, make: Callable[[], T], max_clients: int = MAX_CLIENTS) -> None:
        self._make = make
        self._max_clients = max_clients
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, client: Hashable) -> T:
        """Return the value of `client`, which now is the most recently used one."""
        value = self._values.get(client)
        if value is None:
            return self._add(client, self._make())
        self._values.move_to_end(client)
        return value

    def __setitem__(self, client: Hashable, value: T) -> None:
        """Replace the value of `client`, which now is the most recently used one."""
        self._add(client, value)

    def get(self, client: Hashable) -> T | None:
        """Return the value of `client`, None if it is not remembered. The order of use stays as it is."""
        return self._values.get(client)

    def clear(self) -> None:
        """Forget all clients."""
        self._values.clear()

    def _add(self, client: Hashable, value: T) -> T:
        self._values[client] = value
        self._values.move_to_end(client)
        if len(self._values) > self._max_clients:
            self._values.popitem(last=False)
        return value
