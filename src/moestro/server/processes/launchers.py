"""Starts, monitors and ends worker processes: the protocols of launchers, and the launcher of this machine.

On this machine, two processes on standby have loaded a worker's libraries and fork workers (`worker.standby`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from moestro.config.cores import thread_environment
from moestro.config.launch_spec import STANDBY, LaunchSpec, write_launch_spec
from moestro.config.linux_process import adopt_orphans, is_stopped
from moestro.core.processes import CurveKeys, Worker, WorkerKind

logger = logging.getLogger(__name__)


WORKER = (sys.executable, "-m", "moestro.worker.worker")
PACED_WORKER = (sys.executable, "-m", "moestro.worker.paced_worker")


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended.

    Attributes:
        how: One line for the log.
        was_killed: Whether it had no time for last messages.
    """

    how: str
    was_killed: bool

    @classmethod
    def of(cls, code: int) -> ProcessEnd:
        """Describe the exit code of a process as `subprocess` has it: a negative one is a signal."""
        if code >= 0:
            return cls(f"its process ended with status {code}; its output is above", was_killed=False)
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return cls(f"its process was killed by {name}{hint}", was_killed=True)


class StartedProcess(Protocol):
    """A worker process, on this machine or another.

    Attributes:
        place: Where it runs, for the log; "" means this machine.
        peer_address: ZeroMQ address at which it may listen to other workers.
        listen_fd: Number that the socket which it inherits has there; None means none.
    """

    place: str
    peer_address: str
    listen_fd: int | None

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or its machine does not answer."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it for certain; False where that is not known."""
        ...

    async def write(self, data: bytes) -> None:
        """Write to its stdin, which stays open: its end tells the process that the API server is gone."""
        ...

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended. SIGKILL also ends what does not answer. Any thread may call this."""
        ...

    async def wait(self) -> ProcessEnd:
        """Wait for its end."""
        ...


class Launcher(Protocol):
    """Starts processes of workers.

    Attributes:
        server_address: ZeroMQ address at which the API server listens to its workers.
        keys: Keys of all sockets. None means that all sockets are on this machine, in a private directory.
    """

    server_address: str
    keys: CurveKeys | None

    async def open(self) -> None:
        """Prepare the machines.

        Raises:
            ConfigError: The machines lack something that the operator can give them.
            EngineDiedError: They do not answer in time.
        """
        ...

    async def spawn(self, name: Sequence[str], listen_fd: int | None = None) -> StartedProcess:
        """Start a process, which reads its launch spec from stdin.

        Args:
            name: Arguments that say in `ps` what it is; the launch spec says so to the process.
            listen_fd: Socket that it inherits.

        Raises:
            OSError: The process cannot be started now.
        """
        ...

    async def prepare_standby(self) -> None:
        """Have a process with loaded libraries ready for the next worker, where this takes no room of a worker."""
        ...

    async def close(self) -> None:
        """Give everything back after all processes have ended."""
        ...

    def kill_all(self) -> None:
        """End everything now. Any thread may call this method."""
        ...


@contextlib.asynccontextmanager
async def opened(launcher: Launcher) -> AsyncIterator[None]:
    """Open `launcher`, and close it with the block."""
    try:
        await launcher.open()
        yield
    finally:
        await launcher.close()


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


class LocalLauncher:
    """Starts child processes of the API server; implements `Launcher`.

    Args:
        directory: Directory for sockets, which only this user can enter.
        num_ranks: Number of processes that share the machine.
        command: Command to run; its process reads a `LaunchSpec` from stdin.
        has_standby: Whether one process loads the libraries and forks the others.
    """

    keys: CurveKeys | None = None

    def __init__(
        self, directory: Path, num_ranks: int, command: Sequence[str] = WORKER, *, has_standby: bool = False
    ) -> None:
        self.server_address = f"ipc://{directory / 'ranks'}"
        self._directory, self._command = directory, command
        self._environment = os.environ | thread_environment(num_ranks)
        self._standby = Standby(command, self._environment) if has_standby else None
        self._num_spawned = 0

    async def open(self) -> None:
        """Implement `Launcher.open`."""

    async def spawn(self, name: Sequence[str], listen_fd: int | None = None) -> StartedProcess:
        """Implement `Launcher.spawn`."""
        self._num_spawned += 1
        peer_address = f"ipc://{self._directory / f'worker-{self._num_spawned}'}"
        if self._standby is not None:
            forked = await self._standby.fork(" ".join(name), peer_address, listen_fd)
            if forked is not None:
                return forked
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *name,
            stdin=asyncio.subprocess.PIPE,
            env=self._environment,
            pass_fds=() if listen_fd is None else (listen_fd,),
            start_new_session=True,  # Ctrl-C reaches only the API server, which decides what follows.
        )
        return LocalProcess(process, peer_address, listen_fd)

    async def prepare_standby(self) -> None:
        """Implement `Launcher.prepare_standby`: two processes are on standby from the first worker on."""

    async def close(self) -> None:
        """Implement `Launcher.close`."""
        if self._standby is not None:
            await self._standby.end()

    def kill_all(self) -> None:
        """Implement `Launcher.kill_all`. `WorkerProcesses` kills the workers."""
        if self._standby is not None:
            self._standby.kill()


_LAST_WORDS_S = 0.2  # Time for the messages that an engine sent just before it ended to arrive.
_KILL_AFTER_S = 5.0  # Time between the request to exit and the kill.


class WorkerProcesses:
    """Worker processes of ranks numbered from 0, at most one per rank.

    Args:
        launcher: Starts processes, on this machine or others.
        on_exit: Callback with (rank, how it ended), called once for each process that `stop` did not end.
    """

    def __init__(self, launcher: Launcher, on_exit: Callable[[int, str], None]) -> None:
        self._launcher = launcher
        self._on_exit = on_exit
        self._processes: dict[int, StartedProcess] = {}
        self._names: dict[int, Worker] = {}
        self._watchers: dict[int, asyncio.Task[None]] = {}

    async def start(self, spec: LaunchSpec) -> None:
        """Start the process of a rank that has none.

        A new process inherits the socket that its launch spec names, and every process learns where it may listen.

        Raises:
            OSError: The process cannot be started now.
        """
        listen_fd = None if spec.lock_step is None else spec.lock_step.listen_fd
        process = await self._launcher.spawn((spec.name.kind, str(spec.name.number)), listen_fd)
        if process.place:
            logger.info("%s runs on %s", spec.name, process.place)
        self._processes[spec.rank], self._names[spec.rank] = process, spec.name
        self._watchers[spec.rank] = asyncio.create_task(self._watch(spec, process))
        spec = msgspec.structs.replace(spec, peer_address=process.peer_address)
        if spec.lock_step is not None:
            lock_step = msgspec.structs.replace(spec.lock_step, listen_fd=process.listen_fd)
            spec = msgspec.structs.replace(spec, lock_step=lock_step)
        await process.write(write_launch_spec(spec))

    async def stop(self, ask: Callable[[int], None], grace_s: float = _KILL_AFTER_S) -> None:
        """End every process: call `ask` with each rank, then kill the processes that run longer than `grace_s`."""
        for watcher in self._watchers.values():
            watcher.cancel()
        for rank, process in self._processes.items():
            if not process.has_ended:
                ask(rank)
        deadline = time.monotonic() + grace_s
        for rank, process in self._processes.items():
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await process.wait()
            except TimeoutError:
                logger.warning("%s did not exit within %g s: killed", self._names[rank], grace_s)
                process.signal(signal.SIGKILL)
                await process.wait()

    def kill_all(self) -> None:
        """Kill every process now."""
        for rank in self._processes:
            self.signal(rank, signal.SIGKILL)
        self._launcher.kill_all()

    def is_running(self, rank: int) -> bool:
        """Return whether `rank` has a process that has not ended."""
        process = self._processes.get(rank)
        return process is not None and not process.has_ended

    def place(self, rank: int) -> str:
        """Return the machine of a rank's last process, as the launcher names it; "" means this machine."""
        process = self._processes.get(rank)
        return "" if process is None else process.place

    def is_stopped(self, rank: int) -> bool:
        """Return whether a signal has stopped the process of `rank`, as far as is known."""
        process = self._processes.get(rank)
        return process is not None and process.is_stopped

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the process of `rank`, if it has one."""
        process = self._processes.get(rank)
        if process is not None:
            process.signal(number)

    async def _watch(self, spec: LaunchSpec, process: StartedProcess) -> None:
        end = await process.wait()
        has_successor = spec.name.kind is WorkerKind.EXPERTS and end.was_killed  # Requests wait for it.
        if not has_successor:
            await asyncio.sleep(_LAST_WORDS_S)
        self._on_exit(spec.rank, end.how)


def now_ns() -> int:
    """Return the monotonic time in nanoseconds, from the clock that the API server gives to the ranks."""
    return time.monotonic_ns()
