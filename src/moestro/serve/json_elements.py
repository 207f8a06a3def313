"""Counts the elements of a JSON text before it is decoded, so that decoding never takes long."""

from __future__ import annotations

import msgspec

# List items and map entries that a body may hold besides a prompt in token ids. Decoding so many takes 40 ms at most.
MAX_ELEMENTS = 1 << 16
# Scanned at a time: bounds the memory of a scan, and the time for which it holds the interpreter's lock.
SCAN_BYTES = 1 << 20


def count_elements(data: bytes | memoryview | msgspec.Raw, enough: int) -> int:
    """Count the commas and opening brackets outside of strings; no JSON text has more elements than that.

    Args:
        data: JSON text. A text that is not JSON has some count too.
        enough: Stop the count once it has reached this number.

    Returns:
        The count, or some number of at least `enough`. Takes about 2 ms for each MiB.
    """
    view = memoryview(data)
    count, num_quotes, start = 0, 0, 0
    while start < len(view) and count < enough:
        block = bytes(view[start : start + SCAN_BYTES])
        num_slashes = len(block) - len(block.rstrip(b"\\"))
        if num_slashes % 2 and start + len(block) < len(view):
            block = block[:-1]  # begins an escape that ends in the next block
        start += len(block)
        if b"\\" in block:
            block = block.replace(b"\\\\", b"").replace(b'\\"', b"")
        in_string = num_quotes % 2
        num_quotes += block.count(b'"')
        if num_quotes > 4 * (enough + 1):
            return enough  # An element has two strings at most. Splitting at so many quotes would take long.
        outside = b"".join(block.split(b'"')[in_string::2])
        count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
    return count


def has_many_elements(data: bytes | msgspec.Raw) -> bool:
    """Whether a JSON text has more than `MAX_ELEMENTS` elements. Looks only at texts long enough to have so many."""
    return len(memoryview(data)) > MAX_ELEMENTS and count_elements(data, MAX_ELEMENTS + 1) > MAX_ELEMENTS
