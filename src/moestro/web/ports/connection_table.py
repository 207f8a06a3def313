"""Connections of a port by client address, and which of them gives way when the port is full. Has no sockets."""

from __future__ import annotations

from typing import Protocol

# Addresses and connections that are looked at for one that gives way: a full port must not slow down what it serves.
_MAX_LOOKS = 64


class Transport(Protocol):
    """What the table needs of an asyncio transport."""

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the client has not taken yet."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class ConnectionSlot:
    """Place of one connection at its port. The connection's protocol calls its methods.

    Attributes:
        transport: Transport of the connection; None until it is open.
    """

    __slots__ = ("_address", "_is_answering", "_table", "transport")

    def __init__(self, table: ConnectionTable, address: _Address) -> None:
        self._table: ConnectionTable | None = table
        self._address = address
        self._is_answering = False
        self.transport: Transport | None = None

    def opened(self, transport: Transport) -> None:
        """Record that the connection is open. From now on it may give way."""
        self.transport = transport
        if self._table is not None and not self._is_answering:
            self._address.idle[self] = None

    def begins(self) -> None:
        """Record a complete request: the connection gives way to none until `ends`. May be called several times."""
        self._is_answering = True
        self._address.idle.pop(self, None)

    def ends(self) -> None:
        """Record that the request has been answered."""
        self._is_answering = False
        if self._table is not None and self.transport is not None:
            self._address.idle[self] = None

    def release(self) -> None:
        """Give the place back. A second call has no effect."""
        table, self._table = self._table, None
        if table is not None:
            self._address.idle.pop(self, None)
            table.left(self._address)

    def displace(self) -> None:
        """Close the connection, and give its place back at once."""
        self.release()
        if self.transport is not None:
            self.transport.abort()


class _Address:
    """Connections of one client address.

    Attributes:
        num_open: Open connections.
        idle: Connections without a complete request. The one that has had none for the longest time comes first.
    """

    __slots__ = ("idle", "name", "num_open")

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_open = 0
        self.idle: dict[ConnectionSlot, None] = {}


class ConnectionTable:
    """Open connections of one port.

    Attributes:
        num_open: Open connections.
    """

    def __init__(self) -> None:
        self.num_open = 0
        self._by_name: dict[str, _Address] = {}
        self._by_count: dict[int, dict[_Address, None]] = {}  # Addresses by their number of connections.

    def num_of(self, address: str) -> int:
        """Return the number of open connections of an address."""
        found = self._by_name.get(address)
        return 0 if found is None else found.num_open

    def enter(self, address: str) -> ConnectionSlot:
        """Add a connection of an address."""
        found = self._by_name.get(address)
        if found is None:
            found = self._by_name[address] = _Address(address)
        self._count(found, 1)
        return ConnectionSlot(self, found)

    def left(self, address: _Address) -> None:
        """Remove a connection of an address; `ConnectionSlot.release` calls it."""
        self._count(address, -1)
        if not address.num_open:
            del self._by_name[address.name]

    def giving_way_to(self, address: str) -> ConnectionSlot | None:
        """Return the connection that gives way to a new one of `address`; None means that none does.

        It has no complete request, and is the oldest such connection of the address that has most. An address that has
        no more connections than `address` gives way to it only where it is the same.
        """
        num_own, num_looks = self.num_of(address), 0
        for count in sorted((count for count in self._by_count if count > num_own), reverse=True):
            for found in self._by_count[count]:
                if (slot := _oldest_idle(found)) is not None:
                    return slot
                num_looks += 1
                if num_looks == _MAX_LOOKS:
                    return None
        own = self._by_name.get(address)
        return None if own is None else _oldest_idle(own)

    def _count(self, address: _Address, change: int) -> None:
        before = address.num_open
        address.num_open = after = before + change
        self.num_open += change
        if before:
            group = self._by_count[before]
            del group[address]
            if not group:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, {})[address] = None


def _oldest_idle(address: _Address) -> ConnectionSlot | None:
    """Return the oldest connection without a complete request and without bytes of an answer for its client."""
    for _, slot in zip(range(_MAX_LOOKS), address.idle, strict=False):
        if slot.transport is None or not slot.transport.get_write_buffer_size():
            return slot
    return None
