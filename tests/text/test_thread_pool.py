"""Threads that prepare requests: none waits behind a much larger one."""

from __future__ import annotations

import asyncio
import threading

from moestro.text.thread_pool import LANE_BYTES, PrepareThreads

PATIENCE_S = 20.0
SIZES = (0, LANE_BYTES[0], LANE_BYTES[0] + 1, LANE_BYTES[1], LANE_BYTES[1] + 1, 1 << 25)


def test_no_request_waits_behind_larger_ones_whatever_their_number():
    async def test() -> None:
        threads, gate = PrepareThreads(), threading.Event()
        for lane in (2, 1):
            stuck = [asyncio.create_task(threads.run(gate.wait, SIZES[2 * lane])) for _ in range(50)]
            await asyncio.sleep(0)
            try:
                for size in SIZES[: 2 * lane]:
                    assert await asyncio.wait_for(threads.run(lambda: "done", size), PATIENCE_S) == "done"
                assert threads.num_preparing == 50
            finally:
                gate.set()
            assert await asyncio.gather(*stuck) == [True] * 50
            gate.clear()
        threads.close()

    asyncio.run(test())


def test_threads_of_a_lane_are_as_many_as_wanted():
    async def test() -> None:
        threads, running, most = PrepareThreads(num_threads=1), 0, 0

        def work() -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            threading.Event().wait(0.001)
            running -= 1

        await asyncio.gather(*(threads.run(work) for _ in range(20)))
        assert most == 1
        threads.close()

    asyncio.run(test())
