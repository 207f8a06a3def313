"""One run: sends and records every request of a load."""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import uvloop
from numpy.typing import NDArray

from moestro.loadgen.client import BenchClient, Endpoint
from moestro.loadgen.settings import EndpointSettings
from moestro.workload.run_records import RecordBook, Records

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BenchLoad:
    """The requests of a run, their times, and their limit.

    Attributes:
        bodies: one for each request, ready to send, so that nothing is computed while the clock runs.
        num_requested_tokens: int64[n], requested lengths of the answers.
        offsets_ns: int64[n], arrivals after the start, or None: a request then arrives when its turn comes.
        limit: most requests at the server at once; None means no limit.
        name: name of the run, to find its requests in the server's log.
    """

    bodies: Sequence[bytes]
    num_requested_tokens: NDArray[np.int64]
    offsets_ns: NDArray[np.int64] | None
    limit: int | None
    name: str


def run_load(
    settings: EndpointSettings, endpoint: Endpoint, load: BenchLoad, on_end: Callable[[], None] = lambda: None
) -> Records:
    """Send all of `load` and return the records; `on_end` is called once a request."""
    # Freeze existing objects: repeated collections of them would stall the loop.
    gc.collect()
    gc.freeze()
    try:
        return uvloop.run(_run(settings, endpoint, load, on_end))
    finally:
        gc.unfreeze()


async def _run(settings: EndpointSettings, endpoint: Endpoint, load: BenchLoad, on_end: Callable[[], None]) -> Records:
    book, count = RecordBook(load.num_requested_tokens), len(load.bodies)
    async with BenchClient(settings) as client, heartbeat() as stall_ns:

        async def send(row: int, arrival_ns: int, turn_ns: int) -> None:
            book.sent(row, arrival_ns, time.monotonic_ns() - turn_ns)
            outcome = await client.ask(endpoint.url, load.bodies[row], _headers(load.name, row))
            book.ended(row, time.monotonic_ns(), outcome)
            on_end()

        if load.offsets_ns is None or load.limit is not None:
            await send_bounded(count, load.limit or count, load.offsets_ns, send)
        else:
            await send_open(load.offsets_ns, send)
        return book.freeze(stall_ns)


def _headers(name: str, row: int) -> Mapping[str, str]:
    return {"x-request-id": f"{name}-{row}"}
