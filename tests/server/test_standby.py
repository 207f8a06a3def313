"""The process on standby: it forks workers that are children of the server, and fails without harm."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import psutil
import pytest
from support.running import has_ended

from moestro.server.standby import Standby

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere each worker loads its libraries"
)

WORKER = """
import sys
from moestro.worker.standby import fork_workers, is_standby
assert is_standby()
if fork_workers():
    text = sys.stdin.buffer.read(5)
    sys.exit(7 if text == b"hello" and not sys.stdin.buffer.read() else 1)
"""


def run(test, script: str = WORKER) -> None:
    async def inside():
        standby = Standby((sys.executable, "-c", script), dict(os.environ))
        try:
            await test(standby)
        finally:
            await standby.end()

    asyncio.run(inside())


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if not has_ended(each)]


def test_workers_are_children_of_the_server_with_their_own_name_stdin_and_end():
    async def test(standby):
        workers = [await standby.fork(f"experts {number}", "") for number in range(3)]
        for each in workers:
            await each.write(b"hello")
        found = [each for each in children() if each.cmdline()[-2:-1] == ["experts"]]
        assert sorted(each.cmdline()[-1] for each in found) == ["0", "1", "2"]
        assert {os.getsid(each.pid) for each in found} == {each.pid for each in found}
        workers[1].signal(signal.SIGKILL)
        assert "SIGKILL" in (await workers[1].wait()).how
        assert [each.has_ended for each in workers] == [False, True, False]
        workers[1].signal(signal.SIGKILL)  # has ended: its id may belong to another process
        await standby.end()
        assert await standby.fork("experts 3", "") is not None
        assert [each.has_ended for each in workers] == [False, True, False]
        for each in workers[::2]:
            os.close(each._stdin)
            each._stdin = os.open(os.devnull, os.O_RDONLY)
            assert "status 7" in (await each.wait()).how

    run(test)


def test_a_standby_that_cannot_start_is_not_tried_again():
    async def test(standby):
        assert await standby.fork("experts 0", "") is None
        process = standby._process
        assert await standby.fork("experts 0", "") is None
        assert standby._process is process

    run(test, "raise SystemExit(3)")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_that_is_lost_is_replaced_by_the_next_fork(number):
    """Its workers hold its end of the socket open, so that no end of file tells of its death."""

    async def test(standby):
        first, lost = await standby.fork("experts 0", ""), standby._process
        lost.send_signal(number)
        second = await standby.fork("experts 1", "")
        assert standby._process is not lost
        for each in (first, second):
            each.signal(signal.SIGKILL)
            assert (await each.wait()).was_killed

    run(test)
