"""Memory that a process of tests has freed goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys

import psutil

GROWTH_BYTES = 256 << 20


class FreedMemory:
    """Gives freed memory back when the process has grown by `GROWTH_BYTES` since the last time.

    glibc keeps what lies below a block in use: after simulations with large arrays, an unused gigabyte.
    """

    def __init__(self) -> None:
        self._most_bytes = 0

    def give_back(self) -> None:
        """Give freed memory back, which takes a tenth of a second, if the process has grown enough for it."""
        process = psutil.Process()
        if sys.platform.startswith("linux") and process.memory_info().rss > self._most_bytes:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            self._most_bytes = process.memory_info().rss + GROWTH_BYTES
