"""Threads for prompts: tokenizing takes milliseconds to seconds, while the event loop must serve other requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moestro.errors import BusyError

T = TypeVar("T")


class PrepareThreads:
    """Runs work beside the event loop.

    Args:
        max_preparing: most pieces of work that run or wait. None means no limit: what the work holds, such as the bytes
            of bodies and places in queues, is bounded elsewhere.

    Attributes:
        num_preparing: pieces of work that run or wait.
    """

    def __init__(self, max_preparing: int | None = None) -> None:
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="prepare")
        self._max_preparing = max_preparing
        self.num_preparing = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`.

        Raises:
            BusyError: there is no room for more work; the caller learns of it at once.
        """
        if self._max_preparing is not None and self.num_preparing >= self._max_preparing:
            raise BusyError(self.num_preparing)
        self.num_preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self.num_preparing -= 1

    def close(self) -> None:
        """End the threads, and drop work that has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)
