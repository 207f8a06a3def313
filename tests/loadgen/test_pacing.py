"""When requests are sent, and how the client tells that it was late itself."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import uvloop

from moestro.loadgen.load import BEAT_NS, heartbeat, send_bounded, send_open

MS = 1_000_000


def test_no_request_is_sent_before_its_time_and_a_blocked_client_is_late():
    late_ns = []

    async def send(row, arrival_ns, turn_ns):
        assert arrival_ns == turn_ns
        late_ns.append(time.monotonic_ns() - turn_ns)
        if row == 2:
            time.sleep(0.05)  # noqa: ASYNC251 a stall is what is tested

    uvloop.run(send_open(np.arange(1, 6, dtype=np.int64) * 10 * MS, send))
    assert len(late_ns) == 5
    assert min(late_ns) >= 0
    assert late_ns[3] >= 39 * MS, "due 10 ms into the 50 that the third one took"
    assert late_ns[4] >= 29 * MS


def test_a_stall_counts_every_beat_that_it_swallowed():
    async def stall():
        async with heartbeat() as late_ns:
            await asyncio.sleep(0.05)
            time.sleep(0.2)  # noqa: ASYNC251
            await asyncio.sleep(0.05)
        return late_ns.tolist()

    late_ns = uvloop.run(stall())
    assert min(late_ns) >= 0
    assert sum(late > 5 * MS for late in late_ns) >= 9, "ten beats fell into the stall"
    assert max(late_ns) >= 200 * MS - BEAT_NS - 1


def test_bounded_load_takes_requests_in_order_and_never_exceeds_its_bound():
    order, running = [], []

    async def send(row, arrival_ns, turn_ns):
        order.append(row)
        running.append(row)
        assert len(running) <= 3
        await asyncio.sleep(0.001)
        running.remove(row)

    uvloop.run(send_bounded(20, 3, None, send))
    assert order == list(range(20))
