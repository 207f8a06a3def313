"""What servers keep of their clients: state in bounded memory, a queue that serves them in turn, and limits of texts.

A client is what `web.access.Access.client_of` returns: the key where several keys tell clients apart, else the address.
Its JSON texts are measured before they are decoded, so that decoding takes neither long nor all of the stack.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

import msgspec
import numpy as np

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


# Most list items and map entries of a body, without the token ids of a prompt. Decoding so many takes at most 40 ms.
MAX_ELEMENTS = 1 << 16
# Block size of a scan. It limits the memory of a scan, and the time for which it holds the interpreter's lock.
SCAN_BYTES = 1 << 20
_COUNTED_BYTES = 1 << 16  # at once, so that what is counted stays in the cache
MAX_DIGITS = 40  # Most digits of a number in a long body; 2**64 has 20, a float in full precision has 25.
# Most brackets of a text that are open at once. Schemas of tools have some tens. Decoders and encoders stop at Python's
# limit of 1,000 frames, which includes those of their callers: what one of them bears, the next may not.
MAX_DEPTH = 256
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))


def count_elements(data: bytes | memoryview | msgspec.Raw, enough: int, marks: bytes = b",[{") -> int:
    """Count `marks` outside of strings. By default, a JSON text has at least as many marks as elements.

    Args:
        data: JSON text. A text that is not JSON has some count too.
        enough: Count at which the scan stops.
        marks: Characters to count: commas and opening brackets, or `b":"` for map entries alone.

    Returns:
        The count, or some number of at least `enough`. A scan takes about 2 ms for each MiB.
    """
    count = 0
    for outside in _outside_strings(data, 4 * (enough + 1)):
        if outside is None:
            return enough  # An element has at most two strings. A split at so many quotes would take long.
        count += sum(outside.count(mark) for mark in marks)
        if count >= enough:
            break
    return count


def has_long_number(data: bytes | memoryview | msgspec.Raw) -> bool:
    """Return whether a number outside of strings has more than `MAX_DIGITS` digits, which take quadratic time."""
    return any(outside is not None and _LONG_NUMBER.search(outside) for outside in _outside_strings(data))


def is_too_deep(data: bytes | memoryview | msgspec.Raw) -> bool:
    """Return whether a JSON text nests deeper than `MAX_DEPTH`. Texts with few brackets are not scanned."""
    text = bytes(data)
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for outside in _outside_strings(text):
        brackets = np.frombuffer((outside or b"").translate(None, _NOT_BRACKETS), np.uint8)
        if len(brackets):
            depths = depth + np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1).cumsum()
            if depths.max() > MAX_DEPTH:
                return True
            depth = int(depths[-1])
    return False


def _outside_strings(data: bytes | memoryview | msgspec.Raw, max_quotes: int = sys.maxsize) -> Iterator[bytes | None]:
    """Yield the parts of `data` outside of strings, block by block; None ends data with more than `max_quotes`."""
    view = memoryview(data)
    num_quotes, start = 0, 0
    while start < len(view):
        block = bytes(view[start : start + SCAN_BYTES])
        num_slashes = len(block) - len(block.rstrip(b"\\"))
        if num_slashes % 2 and start + len(block) < len(view):
            block = block[:-1]  # The last byte begins an escape that ends in the next block.
        start += len(block)
        if b"\\" in block:
            block = block.replace(b"\\\\", b"").replace(b'\\"', b"")
        in_string = num_quotes % 2
        num_quotes += block.count(b'"')
        if num_quotes > max_quotes:
            yield None
            return
        yield b"".join(block.split(b'"')[in_string::2])


def may_have_many_elements(data: bytes) -> bool:
    """Return whether a JSON text has more than `MAX_ELEMENTS` commas and opening brackets, also inside of strings.

    Where it has not, it has no more elements either, which is known in a third of the time of `has_many_elements`.
    """
    if len(data) <= MAX_ELEMENTS:
        return False
    count = 0
    for start in range(0, len(data), _COUNTED_BYTES):
        block = np.frombuffer(data, np.uint8, min(_COUNTED_BYTES, len(data) - start), start)
        count += sum(int(np.count_nonzero(block == mark)) for mark in b",[{")
        if count > MAX_ELEMENTS:
            return True
    return False


def has_many_elements(data: bytes | msgspec.Raw) -> bool:
    """Return whether a JSON text has more than `MAX_ELEMENTS` elements. Short texts are not scanned."""
    return len(memoryview(data)) > MAX_ELEMENTS and count_elements(data, MAX_ELEMENTS + 1) > MAX_ELEMENTS
