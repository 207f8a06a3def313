"""Keeps a process on standby, which has loaded a worker's libraries and forks workers (`worker.standby`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence

from moestro.config.launch_spec import STANDBY
from moestro.config.linux_process import adopt_orphans, is_stopped
from moestro.server.launcher import ProcessEnd

logger = logging.getLogger(__name__)

_LOAD_S = 60.0  # Time in which it must load the libraries and fork its first worker.
_FORK_S = 2.0  # Time for each later worker; one takes some hundredths of a second.


class ForkedWorker:
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
        os.close(self._pidfd)
        os.close(self._stdin)
        self._end.set_result(ProcessEnd.of(os.waitstatus_to_exitcode(status)))

    @property
    def has_ended(self) -> bool:
        """Implement `StartedProcess.has_ended`."""
        return self._end.done()

    @property
    def is_stopped(self) -> bool:
        """Implement `StartedProcess.is_stopped`."""
        return not self.has_ended and is_stopped(self._pid)

    async def write(self, data: bytes) -> None:
        """Implement `StartedProcess.write`. A launch spec is far smaller than a pipe's buffer of 64 KiB."""
        if not self.has_ended:
            with contextlib.suppress(BrokenPipeError):  # It has just ended.
                os.write(self._stdin, data)

    def signal(self, number: int) -> None:
        """Implement `StartedProcess.signal`. The process id is not used again before `_ended`."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    async def wait(self) -> ProcessEnd:
        """Implement `StartedProcess.wait`."""
        return await asyncio.shield(self._end)


class Standby:
    """Starts workers within some hundredths of a second, because their libraries are loaded already.

    Args:
        command: Command of a worker.
        environment: Environment of a worker.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = command, environment
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._has_forked = False
        self._turn = asyncio.Lock()
        self._is_possible = adopt_orphans()

    async def fork(self, name: str, peer_address: str, listen_fd: int | None = None) -> ForkedWorker | None:
        """Start a worker. The first one waits until the libraries are loaded, and so does one that finds it lost.

        Args:
            name: Name for `ps`.
            peer_address: Address at which the worker may listen to others.
            listen_fd: Socket that it inherits.

        Returns:
            The worker; None means that it has to be started in another way.
        """
        if not self._is_possible:
            return None
        async with self._turn:
            while True:
                if self._process is None or self._process.returncode is not None:
                    await self._start()
                was_used = self._has_forked
                try:
                    return await self._fork(name, peer_address, listen_fd)
                except OSError as error:  # TimeoutError is one.
                    logger.warning("the process on standby forks no worker: %s", str(error) or "it does not answer")
                    await self.end()
                    if not was_used:  # Another one would end the same way.
                        self._is_possible = False
                        return None

    async def _fork(self, name: str, peer_address: str, listen_fd: int | None) -> ForkedWorker:
        read, write = os.pipe()
        try:
            pid, inherited = await self._ask(name, (read,) if listen_fd is None else (read, listen_fd))
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
        return ForkedWorker(pid, write, peer_address, inherited)

    async def _start(self) -> None:
        await self.end()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(0)  # the event loop waits for it
        self._has_forked = False
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, *STANDBY, stdin=theirs.fileno(), env=self._environment, start_new_session=True
            )

    async def _ask(self, name: str, descriptors: Sequence[int]) -> tuple[int, int | None]:
        """Return a worker's process id, and the number that the second of `descriptors` has there."""
        assert self._control is not None, "called after _start"
        async with asyncio.timeout(_FORK_S if self._has_forked else _LOAD_S):
            socket.send_fds(self._control, [name.encode()], descriptors)
            answer = await self._answer()
        if not answer:
            raise ConnectionResetError("it has ended")
        self._has_forked = True
        pid, *inherited = map(int, answer.split())
        return pid, inherited[0] if inherited else None

    async def _answer(self) -> bytes:
        """Return its next message; b"" means that it has ended. Its workers hold its end of the socket open."""
        assert self._control is not None, "called after _start"
        assert self._process is not None, "called after _start"
        answer = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(self._control, 64))
        end = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait((answer, end), return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else b""
        finally:
            answer.cancel()
            end.cancel()

    def kill(self) -> None:
        """Kill the process. Workers that it has forked live on."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def end(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        if self._process is not None:
            await self._process.wait()
        if self._control is not None:
            self._control.close()
            self._control = None
