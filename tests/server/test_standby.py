"""The process on standby: it forks workers that are children of the server, and fails without harm."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.running import PATIENCE_S, has_ended

from moestro.config.launch_spec import STANDBY
from moestro.config.linux_process import adopt_orphans
from moestro.server.processes.launchers import Standby

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere each worker loads its libraries"
)

WORKER = """
import sys
from moestro.worker.rank_process import fork_workers, is_standby
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


def is_standby(process: psutil.Process) -> bool:
    try:
        return tuple(process.cmdline()[-2:]) == STANDBY
    except psutil.NoSuchProcess:  # it has just ended
        return False


def standbys() -> list[psutil.Process]:
    return [each for each in children() if is_standby(each)]


async def until(condition) -> None:
    for _ in range(int(PATIENCE_S / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("waited in vain")


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
        assert standbys() == []
        assert await standby.fork("experts 0", "") is None
        assert standbys() == []

    run(test, "raise SystemExit(3)")


def test_a_server_that_ends_during_a_fork_leaves_no_traceback():
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert adopt_orphans()
    command = (sys.executable, "-c", WORKER, *STANDBY)
    standby = subprocess.Popen(command, stdin=theirs.fileno(), stderr=subprocess.PIPE)
    theirs.close()
    with Path(os.devnull).open("rb") as nothing:
        socket.send_fds(control, [b"experts 0"], [nothing.fileno()])
    control.close()
    assert standby.communicate(timeout=PATIENCE_S)[1] == b""
    assert standby.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("which", [0, 1])
def test_one_standby_forks_while_the_other_one_is_lost_and_then_replaced(which, number, caplog):
    """No library is loaded again: the process that the API server has started is never started twice."""

    async def test(standby):
        first = await standby.fork("experts 0", "")
        await until(lambda: len(standbys()) == 2)
        lost = sorted(standbys(), key=lambda each: each.create_time())[which]
        lost.send_signal(number)
        await until(lambda: has_ended(lost) or lost.status() == psutil.STATUS_STOPPED)  # A signal takes its time.
        workers = [first, *[await standby.fork(f"experts {n}", "") for n in (1, 2)]]
        await until(lambda: len(standbys()) == 2 and lost not in standbys())
        assert standby.num_started == 1
        assert number == signal.SIGKILL or "forks no worker" not in caplog.text, "a stopped one is not waited for"
        for each in workers:
            each.signal(signal.SIGKILL)
            assert (await each.wait()).was_killed

    run(test)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_both_standbys_that_are_lost_are_replaced(number):
    """Their workers hold their ends of the sockets open, so that no end of file tells of their death."""

    async def test(standby):
        first = await standby.fork("experts 0", "")
        await until(lambda: len(standbys()) == 2)
        lost = standbys()
        for each in lost:
            each.send_signal(number)
        second = await standby.fork("experts 1", "")
        await until(lambda: len(standbys()) == 2 and not set(lost) & set(standbys()))
        assert standby.num_started == 2
        for each in (first, second):
            each.signal(signal.SIGKILL)
            assert (await each.wait()).was_killed

    run(test)


@pytest.mark.parametrize("number", [signal.SIGKILL])
def test_a_standby_that_ends_is_replaced_before_a_worker_needs_it(number):
    async def test(standby):
        worker = await standby.fork("experts 0", "")
        await until(lambda: len(standbys()) == 2)
        for lost in standbys():
            lost.send_signal(number)
            await until(lambda lost=lost: lost not in standbys() and len(standbys()) == 2)
        assert standby.num_started == 1
        worker.signal(signal.SIGKILL)
        await worker.wait()

    run(test)
