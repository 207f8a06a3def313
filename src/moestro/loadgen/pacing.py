"""Sends requests when they are due, and measures how far behind the client itself falls."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

# (request, arrival, turn): the two times differ only where --max-concurrency held the request back.
Send = Callable[[int, int, int], Awaitable[None]]

BEAT_NS = 20_000_000


async def send_open(offsets_ns: NDArray[np.int64], send: Send) -> None:
    """Send each request at its offset from now, regardless of unanswered ones; return when all have ended."""
    start_ns = time.monotonic_ns()
    async with asyncio.TaskGroup() as tasks:
        for row, offset_ns in enumerate(offsets_ns.tolist()):
            due_ns = start_ns + offset_ns
            await _sleep_until(due_ns)
            tasks.create_task(_started(send, row, due_ns))


async def send_bounded(num_requests: int, limit: int, offsets_ns: NDArray[np.int64] | None, send: Send) -> None:
    """Send requests in order, at most `limit` at once; return when all have ended.

    Without offsets a request arrives when its turn comes; with them, when it is due, and its wait for a turn counts.
    """
    start_ns = time.monotonic_ns()
    rows = iter(range(num_requests))

    async def work() -> None:
        for row in rows:  # shared: each worker takes the next free row
            turn_ns = arrival_ns = time.monotonic_ns()
            if offsets_ns is not None:
                arrival_ns = start_ns + int(offsets_ns[row])
                await _sleep_until(arrival_ns)
                turn_ns = max(arrival_ns, turn_ns)
            await send(row, arrival_ns, turn_ns)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(limit, num_requests)):
            tasks.create_task(work())


@asynccontextmanager
async def heartbeat() -> AsyncIterator[array[int]]:
    """Watch the loop: collect how late each beat of BEAT_NS was, in nanoseconds, including beats that a stall lost.

    A client whose loop stalls timestamps answers late, and would report the delay as the server's latency.
    """
    late_ns: array[int] = array("q")
    task = asyncio.create_task(_beat(late_ns))
    try:
        yield late_ns
    finally:
        task.cancel()


async def _beat(late_ns: array[int]) -> None:
    due_ns = time.monotonic_ns() + BEAT_NS
    while True:
        await asyncio.sleep((due_ns - time.monotonic_ns()) / 1e9)
        now_ns = time.monotonic_ns()
        while due_ns <= now_ns:
            late_ns.append(now_ns - due_ns)
            due_ns += BEAT_NS


async def _sleep_until(due_ns: int) -> None:
    """Sleep until `due_ns`. The loop's timers count milliseconds and may fire early, hence the repetition."""
    while (left_ns := due_ns - time.monotonic_ns()) > 0:  # noqa: ASYNC110 the condition is time itself
        await asyncio.sleep(left_ns / 1e9)


async def _started(send: Send, row: int, due_ns: int) -> None:
    await send(row, due_ns, due_ns)
