"""Starts, monitors and ends the worker processes of ranks. A launcher knows on which machines they run."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

import msgspec

from moestro.config.launch_spec import LaunchSpec, write_launch_spec
from moestro.core.worker_names import Worker, WorkerKind
from moestro.server.processes.launcher import Launcher, StartedProcess

logger = logging.getLogger(__name__)

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
