"""One run: sends and records every request of a load."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import uvloop
from numpy.typing import NDArray

from moestro.loadgen.client import BenchClient, Endpoint
from moestro.loadgen.pacing import heartbeat, send_bounded, send_open
from moestro.loadgen.settings import EndpointSettings
from moestro.workload.runs.records import RecordBook, Records


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
