"""Keeps two processes on standby, which have loaded a worker's libraries and fork workers (`worker.standby`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

from moestro.config.launch_spec import STANDBY
from moestro.config.linux_process import adopt_orphans
from moestro.server.processes.launcher import StartedProcess
from moestro.server.processes.local_process import ForkedProcess, LocalProcess

logger = logging.getLogger(__name__)

_LOAD_S = 60.0  # Time in which it must load the libraries and fork its first process.
_FORK_S = 2.0  # Time for each later process; one takes some hundredths of a second.
_KEPT = 2  # Processes on standby, so that one that dies together with a worker delays no other worker.


class _Template:
    """A process with loaded libraries, which forks others.

    Args:
        control: Socket to it.
        is_loaded: Whether its libraries are loaded. Otherwise its first fork waits for them.
    """

    def __init__(self, process: StartedProcess, control: socket.socket, *, is_loaded: bool) -> None:
        self.process, self.is_loaded = process, is_loaded
        self._control = control

    async def fork(self, name: str, descriptors: Sequence[int]) -> tuple[int, int | None]:
        """Fork a process.

        Args:
            name: Name for `ps`.
            descriptors: Its stdin, and a socket that it inherits, if any.

        Returns:
            Its process id, and the number that the second of `descriptors` has there.

        Raises:
            OSError: The template has ended, or does not answer in time.
        """
        async with asyncio.timeout(_FORK_S if self.is_loaded else _LOAD_S):
            socket.send_fds(self._control, [name.encode()], descriptors)
            answer = await self._answer()
        if not answer:
            raise ConnectionResetError("it has ended")
        self.is_loaded = True
        pid, *inherited = map(int, answer.split())
        return pid, inherited[0] if inherited else None

    async def _answer(self) -> bytes:
        """Return its next message; b"" means that it has ended. Its workers hold its end of the socket open."""
        answer = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(self._control, 64))
        end = asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait((answer, end), return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else b""
        finally:
            answer.cancel()
            end.cancel()

    def kill(self) -> None:
        """Kill the process. Those that it has forked live on."""
        self.process.signal(signal.SIGKILL)

    async def end(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        await self.process.wait()
        self._control.close()


class Standby:
    """Starts workers within some hundredths of a second, because their libraries are loaded already.

    A first process loads the libraries, and forks a second one like itself. Whenever one ends or is stopped, the other
    one forks the next worker, and its own replacement.

    Args:
        command: Command of a worker.
        environment: Environment of a worker.

    Attributes:
        num_started: Number of processes on standby that had to load the libraries.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = command, environment
        self.num_started = 0
        self._templates: list[_Template] = []
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_possible = adopt_orphans()

    async def fork(self, name: str, peer_address: str, listen_fd: int | None = None) -> ForkedProcess | None:
        """Start a worker. The first one waits until the libraries are loaded, and so does one that finds all lost.

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
                template = await self._usable()
                try:
                    worker = await self._fork_worker(template, name, peer_address, listen_fd)
                except OSError as error:  # TimeoutError is one.
                    logger.warning("a process on standby forks no worker: %s", str(error) or "it does not answer")
                    await self._drop(template)
                    if not template.is_loaded:  # Another one would end the same way.
                        self._is_possible = False
                        return None
                else:
                    if len(self._templates) < _KEPT:
                        self._begin_refill()
                    return worker

    async def _fork_worker(
        self, template: _Template, name: str, peer_address: str, listen_fd: int | None
    ) -> ForkedProcess:
        read, write = os.pipe()
        try:
            pid, inherited = await template.fork(name, (read,) if listen_fd is None else (read, listen_fd))
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
        return ForkedProcess(pid, write, peer_address, inherited)

    # --- processes on standby

    async def _usable(self) -> _Template:
        """Return a template that runs, and start one if there is none."""
        for template in list(self._templates):
            if template.process.has_ended or template.process.is_stopped:
                await self._drop(template)
        if not self._templates:
            with _control_pair() as (control, theirs):
                process = await asyncio.create_subprocess_exec(
                    *self._command, *STANDBY, stdin=theirs.fileno(), env=self._environment, start_new_session=True
                )
            self.num_started += 1
            self._add(_Template(LocalProcess(process, "", None), control, is_loaded=False))
        return self._templates[0]

    def _add(self, template: _Template) -> None:
        self._templates.append(template)
        self._begin(self._watch(template))

    async def _drop(self, template: _Template) -> None:
        if template in self._templates:
            self._templates.remove(template)
        await template.end()

    async def _watch(self, template: _Template) -> None:
        """Replace a template that ends, so that the next worker need not wait for its successor."""
        await template.process.wait()
        if template.is_loaded:
            self._begin_refill()

    def _begin_refill(self) -> None:
        self._begin(self._refill())

    async def _refill(self) -> None:
        """Fork templates until there are enough. A failure is left to the next worker, which needs one for certain."""
        async with self._turn:
            with contextlib.suppress(OSError):
                template = await self._usable()
                while len(self._templates) < _KEPT:
                    with _control_pair() as (control, theirs):
                        pid, _ = await template.fork(STANDBY[-1], (theirs.fileno(),))
                    process = ForkedProcess(pid, os.dup(control.fileno()), "", None)
                    self._add(_Template(process, control, is_loaded=True))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def kill(self) -> None:
        """Kill the processes on standby. Workers that they have forked live on."""
        for template in self._templates:
            template.kill()

    async def end(self) -> None:
        """Kill the processes on standby, and wait for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for template in list(self._templates):
            await self._drop(template)


@contextlib.contextmanager
def _control_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give the sockets of this process and of a template that is started, between which messages keep their borders.

    The template's socket is closed at the end here, and this process's if the template does not start.
    """
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.settimeout(0)  # The event loop waits for it.
    try:
        with theirs:
            yield control, theirs
    except BaseException:
        control.close()
        raise
