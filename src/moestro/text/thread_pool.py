"""Threads for prompts: tokenizing takes milliseconds to seconds, while the event loop must serve other requests."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from moestro.core.clients import FairQueue
from moestro.errors import BusyError

T = TypeVar("T")

# Largest bodies of all lanes but the last, in bytes. A prompt of 16 KiB is tokenized in about 10 ms, one of 512 KiB in
# a third of a second, and one of 32 MiB in half a minute.
LANE_BYTES = (16 << 10, 512 << 10)


class PrepareThreads:
    """Runs work beside the event loop, in lanes by size: no request waits for threads behind a much larger one.

    Clients take turns in each lane, so that none waits behind all that another one has sent.

    Args:
        max_waiting: most pieces of work that wait in each lane. None means no limit: what the work holds, such as the
            bytes of bodies and places in queues, is bounded elsewhere.
        num_threads: threads of each lane. None means one for each core, up to 4, for the smallest work, and half as
            many for each lane above it. Work that holds the interpreter's lock needs one: more threads would take
            turns with the event loop more often.

    Attributes:
        num_preparing: pieces of work that run or wait.
    """

    def __init__(self, max_waiting: int | None = None, num_threads: int | None = None) -> None:
        most = min(4, os.cpu_count() or 1)
        self._lanes = [
            _Lane(lane, num_threads or max(1, most >> lane), max_waiting) for lane in range(len(LANE_BYTES) + 1)
        ]
        self.num_preparing = 0

    async def run(self, work: Callable[[], T], num_bytes: int = 0, client: Hashable = None) -> T:
        """Return the result of `work`.

        Args:
            num_bytes: size of what the work reads, which chooses its lane.
            client: name of the client for whom it is done.

        Raises:
            BusyError: too much work waits, and no client has more waiting work than this one.
        """
        lane = self._lanes[bisect.bisect_left(LANE_BYTES, num_bytes)]
        self.num_preparing += 1
        try:
            await lane.enter(client)
            return await asyncio.wrap_future(lane.submit(work))
        finally:
            self.num_preparing -= 1

    def close(self) -> None:
        """End the threads, and drop work that has not begun."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """Threads for work of similar size."""

    def __init__(self, number: int, num_threads: int, max_waiting: int | None) -> None:
        self._threads = ThreadPoolExecutor(num_threads, f"prepare-{number}")  # Threads start at first use.
        self._num_free = num_threads
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue(max_waiting)

    async def enter(self, client: Hashable) -> None:
        """Wait for a free thread, which is taken; `submit` must follow. BusyError as for `PrepareThreads.run`."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        loser = self._waiting.push(client, turn)
        if loser is not None:
            loser.set_exception(BusyError(len(self._waiting)))
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.discard(client, turn)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # The turn came at the same time.
            raise

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Start `work` on the thread that was taken, which is free again when the work has ended."""
        loop = asyncio.get_running_loop()
        running = self._threads.submit(work)
        # The work of a client that has left goes on, and so its thread is not free.
        running.add_done_callback(lambda _: self._notify(loop))
        return running

    def close(self) -> None:
        """End the threads, and cancel what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._waiting:
            self._waiting.pop().cancel()

    def _notify(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        """Pass a free thread on to the client whose turn it is."""
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
