"""Threads for prompts: tokenizing takes milliseconds to seconds, while the event loop must serve other requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moestro.errors import BusyError

T = TypeVar("T")

MAX_PREPARING = 256  # with more, a client could not tell the server from one that hangs


class PrepareThreads:
    """Runs work beside the event loop, with a bounded queue."""

    def __init__(self, max_preparing: int = MAX_PREPARING) -> None:
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="prepare")
        self._max_preparing = max_preparing
        self.num_preparing = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`.

        Raises:
            BusyError: the queue is full; the caller learns of it at once.
        """
        if self.num_preparing >= self._max_preparing:
            raise BusyError(self.num_preparing)
        self.num_preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self.num_preparing -= 1

    def close(self) -> None:
        """End the threads, and drop work that has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)
