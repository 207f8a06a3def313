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


def test_clients_take_turns_in_a_lane():
    async def test() -> None:
        threads, gate, done = PrepareThreads(num_threads=1), threading.Event(), list[str]()
        first = asyncio.create_task(threads.run(gate.wait, client="a"))
        await asyncio.sleep(0)
        clients = ["a"] * 20 + ["b"] * 3 + ["c"]
        tasks = [asyncio.create_task(threads.run(lambda each=each: done.append(each), client=each)) for each in clients]
        await asyncio.sleep(0)
        tasks[1].cancel()
        gate.set()
        await asyncio.gather(first, *tasks, return_exceptions=True)
        assert "".join(done) == "abcabab" + "a" * 16
        assert threads.num_preparing == 0
        threads.close()

    asyncio.run(test())


def test_the_thread_of_a_client_that_has_left_is_not_free_before_its_work_ends():
    async def test() -> None:
        threads, gate = PrepareThreads(num_threads=1), threading.Event()
        left = asyncio.create_task(threads.run(gate.wait))
        await asyncio.sleep(0.01)
        left.cancel()
        following = [asyncio.create_task(threads.run(lambda: 7)) for _ in range(3)]
        await asyncio.sleep(0.01)
        following[0].cancel()
        gate.set()
        assert await asyncio.wait_for(asyncio.gather(*following[1:]), PATIENCE_S) == [7, 7]
        threads.close()

    asyncio.run(test())


def test_closing_cancels_what_waits():
    async def test() -> None:
        threads, gate = PrepareThreads(num_threads=1), threading.Event()
        tasks = [asyncio.create_task(threads.run(gate.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        threads.close()
        gate.set()
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
        assert [type(end) for end in ends] == [bool, asyncio.CancelledError, asyncio.CancelledError]

    asyncio.run(test())
