"""Processes of workers on this machine: children that were started with a command, and forked ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from moestro.config.linux_process import is_stopped
from moestro.server.processes.launcher import ProcessEnd

_REAP_AGAIN_S = 0.1


def end_group(leader: int) -> None:
    """End the processes that a worker has started, after its end, and reap those that this process has adopted."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # there are none
        os.killpg(leader, signal.SIGKILL)
    try:
        while os.waitpid(-leader, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:  # all have ended, or init has adopted them
        return
    asyncio.get_running_loop().call_later(_REAP_AGAIN_S, end_group, leader)


class LocalProcess:
    """A child process; implements `StartedProcess`."""

    place = ""

    def __init__(self, process: asyncio.subprocess.Process, peer_address: str, listen_fd: int | None) -> None:
        self._process = process
        self.peer_address, self.listen_fd = peer_address, listen_fd

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.returncode is not None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process for certain."""
        return not self.has_ended and is_stopped(self._process.pid)

    async def write(self, data: bytes) -> None:
        """Write to the stdin of the process, which stays open."""
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.write(data)

    def signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def wait(self) -> ProcessEnd:
        """Wait for the end of the process."""
        status = await self._process.wait()
        end_group(self._process.pid)
        return ProcessEnd.of(status)


class ForkedProcess:
    """A child of this process that the process on standby has forked; implements `StartedProcess`.

    Args:
        pid: Its process id.
        stdin: Descriptor of the pipe to its stdin; closed when it ends.
        peer_address, listen_fd: As in `StartedProcess`.
    """

    place = ""

    def __init__(self, pid: int, stdin: int, peer_address: str, listen_fd: int | None) -> None:
        self._pid, self._stdin = pid, stdin
        self.peer_address, self.listen_fd = peer_address, listen_fd
        self._end: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        _, status = os.waitpid(self._pid, 0)
        end_group(self._pid)
        os.close(self._pidfd)
        os.close(self._stdin)
        self._end.set_result(ProcessEnd.of(os.waitstatus_to_exitcode(status)))

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._end.done()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process for certain."""
        return not self.has_ended and is_stopped(self._pid)

    async def write(self, data: bytes) -> None:
        """Write to the stdin of the process, which stays open."""
        # A launch spec is far smaller than the 64 KiB of a pipe's buffer, so the write does not block.
        if not self.has_ended:
            with contextlib.suppress(BrokenPipeError):  # It has just ended.
                os.write(self._stdin, data)

    def signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended. The process id is not used again before `_ended`."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    async def wait(self) -> ProcessEnd:
        """Wait for the end of the process."""
        return await asyncio.shield(self._end)
