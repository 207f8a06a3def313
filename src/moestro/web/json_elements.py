"""Counts the elements of a JSON text before it is decoded, so that decoding never takes long."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import msgspec

# List items and map entries that a body may hold besides a prompt in token ids. Decoding so many takes 40 ms at most.
MAX_ELEMENTS = 1 << 16
# Scanned at a time: bounds the memory of a scan, and the time for which it holds the interpreter's lock.
SCAN_BYTES = 1 << 20
MAX_DIGITS = 40  # of a number in a long body; 2**64 has 20, and a float that is spelt in full 25
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))


def count_elements(data: bytes | memoryview | msgspec.Raw, enough: int, marks: bytes = b",[{") -> int:
    """Count `marks` outside of strings: commas and opening brackets, of which no JSON text has fewer than elements.

    Args:
        data: JSON text. A text that is not JSON has some count too.
        enough: Stop the count once it has reached this number.
        marks: What is counted; `b":"` counts map entries alone, of which token ids have none.

    Returns:
        The count, or some number of at least `enough`. Takes about 2 ms for each MiB.
    """
    count = 0
    for outside in _outside_strings(data, 4 * (enough + 1)):
        if outside is None:
            return enough  # An element has two strings at most. Splitting at so many quotes would take long.
        count += sum(outside.count(mark) for mark in marks)
        if count >= enough:
            break
    return count


def has_long_number(data: bytes | memoryview | msgspec.Raw) -> bool:
    """Whether a number outside of strings has more than `MAX_DIGITS` digits: the time to read one is quadratic."""
    return any(outside is not None and _LONG_NUMBER.search(outside) for outside in _outside_strings(data))


def _outside_strings(data: bytes | memoryview | msgspec.Raw, max_quotes: int = sys.maxsize) -> Iterator[bytes | None]:
    """What of `data` is outside of strings, block by block; None and the end where it has more than `max_quotes`."""
    view = memoryview(data)
    num_quotes, start = 0, 0
    while start < len(view):
        block = bytes(view[start : start + SCAN_BYTES])
        num_slashes = len(block) - len(block.rstrip(b"\\"))
        if num_slashes % 2 and start + len(block) < len(view):
            block = block[:-1]  # begins an escape that ends in the next block
        start += len(block)
        if b"\\" in block:
            block = block.replace(b"\\\\", b"").replace(b'\\"', b"")
        in_string = num_quotes % 2
        num_quotes += block.count(b'"')
        if num_quotes > max_quotes:
            yield None
            return
        yield b"".join(block.split(b'"')[in_string::2])


def has_many_elements(data: bytes | msgspec.Raw) -> bool:
    """Whether a JSON text has more than `MAX_ELEMENTS` elements. Looks only at texts long enough to have so many."""
    return len(memoryview(data)) > MAX_ELEMENTS and count_elements(data, MAX_ELEMENTS + 1) > MAX_ELEMENTS
