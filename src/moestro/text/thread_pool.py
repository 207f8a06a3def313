"""Threads for prompts: tokenizing one takes milliseconds to seconds, in which the event loop must serve the others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moestro.errors import BusyError

T = TypeVar("T")

MAX_PREPARING = 256  # more could not be told from a server that hangs


class PrepareThreads:
    """Runs work beside the event loop, a bounded number of pieces at a time."""

    def __init__(self, max_preparing: int = MAX_PREPARING) -> None:
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="prepare")
        self._max_preparing = max_preparing
        self.num_preparing = 0

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns.

        Raises:
            BusyError: as much as can be borne waits already; the caller hears at once.
        """
        if self.num_preparing >= self._max_preparing:
            raise BusyError(self.num_preparing)
        self.num_preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self.num_preparing -= 1

    def close(self) -> None:
        """End the threads; what has not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
