"""Threads for prompts: tokenizing takes milliseconds to seconds, while the event loop must serve other requests."""

from __future__ import annotations

import asyncio
import bisect
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moestro.errors import BusyError

T = TypeVar("T")

# Largest bodies of all lanes but the last, in bytes. A prompt of 16 KiB is tokenized in about 10 ms, one of 512 KiB in
# a third of a second, and one of 32 MiB in half a minute.
LANE_BYTES = (16 << 10, 512 << 10)


class PrepareThreads:
    """Runs work beside the event loop, in lanes by size: no request waits for threads behind a much larger one.

    Args:
        max_preparing: most pieces of work that run or wait. None means no limit: what the work holds, such as the bytes
            of bodies and places in queues, is bounded elsewhere.
        num_threads: threads of each lane. None means one for each core, up to 4, for the smallest work, and half as
            many for each lane above it. Work that holds the interpreter's lock needs one: more threads would take
            turns with the event loop more often.

    Attributes:
        num_preparing: pieces of work that run or wait.
    """

    def __init__(self, max_preparing: int | None = None, num_threads: int | None = None) -> None:
        most = min(4, os.cpu_count() or 1)
        self._lanes = [  # Threads start at first use.
            ThreadPoolExecutor(num_threads or max(1, most >> lane), thread_name_prefix=f"prepare-{lane}")
            for lane in range(len(LANE_BYTES) + 1)
        ]
        self._max_preparing = max_preparing
        self.num_preparing = 0

    async def run(self, work: Callable[[], T], num_bytes: int = 0) -> T:
        """Return the result of `work`.

        Args:
            num_bytes: size of what the work reads, which chooses its lane.

        Raises:
            BusyError: there is no room for more work; the caller learns of it at once.
        """
        if self._max_preparing is not None and self.num_preparing >= self._max_preparing:
            raise BusyError(self.num_preparing)
        lane = self._lanes[bisect.bisect_left(LANE_BYTES, num_bytes)]
        self.num_preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(lane, work)
        finally:
            self.num_preparing -= 1

    def close(self) -> None:
        """End the threads, and drop work that has not begun."""
        for lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)
