"""Measures a JSON text before it is decoded: decoding a foreign text takes neither long nor all of the stack."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import msgspec
import numpy as np

# Most list items and map entries of a body, without the token ids of a prompt. Decoding so many takes at most 40 ms.
MAX_ELEMENTS = 1 << 16
# Block size of a scan. It limits the memory of a scan, and the time for which it holds the interpreter's lock.
SCAN_BYTES = 1 << 20
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


def has_many_elements(data: bytes | msgspec.Raw) -> bool:
    """Return whether a JSON text has more than `MAX_ELEMENTS` elements. Short texts are not scanned."""
    return len(memoryview(data)) > MAX_ELEMENTS and count_elements(data, MAX_ELEMENTS + 1) > MAX_ELEMENTS
