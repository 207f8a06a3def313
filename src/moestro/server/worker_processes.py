"""Starts, monitors and ends the worker processes of ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from moestro.config.launch_spec import LaunchSpec, write_launch_spec
from moestro.core.worker_names import Worker, WorkerKind
from moestro.server.standby import ChildProcess, Standby

logger = logging.getLogger(__name__)

WORKER = (sys.executable, "-m", "moestro.worker.worker")
PACED_WORKER = (sys.executable, "-m", "moestro.worker.paced_worker")
_LAST_WORDS_S = 0.2  # Time for the messages that an engine sent just before it ended to arrive.
_KILL_AFTER_S = 5.0  # Time between the request to exit and the kill.


class WorkerProcesses:
    """Worker processes of ranks numbered from 0, at most one per rank.

    Args:
        num_ranks: Number of ranks that share the machine.
        on_exit: Callback with (rank, how it ended), called once for each process that `stop` did not end.
        command: Command to run; its process reads a `LaunchSpec` from stdin.
        has_standby: Whether one process loads the libraries and forks the others. Such ranks inherit no sockets.
    """

    def __init__(
        self,
        num_ranks: int,
        on_exit: Callable[[int, str], None],
        command: Sequence[str] = WORKER,
        *,
        has_standby: bool = False,
    ) -> None:
        self._on_exit = on_exit
        self._command = command
        self._environment = _environment(num_ranks)
        self._standby = Standby(command, self._environment) if has_standby else None
        self._processes: dict[int, ChildProcess] = {}
        self._names: dict[int, Worker] = {}
        self._watchers: dict[int, asyncio.Task[None]] = {}

    async def start(self, spec: LaunchSpec) -> None:
        """Start the process of a rank that has none.

        Raises:
            OSError: The system cannot start a process.
        """
        process: ChildProcess | None = None
        if self._standby is not None:
            process = await self._standby.fork(f"{spec.name.kind} {spec.name.number}", write_launch_spec(spec))
        if process is None:
            process = await self._spawn(spec)
        self._processes[spec.rank], self._names[spec.rank] = process, spec.name
        self._watchers[spec.rank] = asyncio.create_task(self._watch(spec, process))

    async def _spawn(self, spec: LaunchSpec) -> ChildProcess:
        """Start a process, which inherits the socket that its launch spec names."""
        listen_fd = None if spec.lock_step is None else spec.lock_step.listen_fd
        process = await asyncio.create_subprocess_exec(
            *self._command,
            spec.name.kind,  # This and the number are for `ps` alone.
            str(spec.name.number),
            stdin=asyncio.subprocess.PIPE,
            env=self._environment,
            pass_fds=() if listen_fd is None else (listen_fd,),
            start_new_session=True,  # Ctrl-C reaches only the API server, which decides what follows.
        )
        assert process.stdin is not None
        process.stdin.write(write_launch_spec(spec))  # Stdin stays open: its end means that the API server is gone.
        return process

    async def stop(self, ask: Callable[[int], None], grace_s: float = _KILL_AFTER_S) -> None:
        """End every process: call `ask` with each rank, then kill the processes that run longer than `grace_s`."""
        for watcher in self._watchers.values():
            watcher.cancel()
        if self._standby is not None:
            await self._standby.end()
        for rank, process in self._processes.items():
            if process.returncode is None:
                ask(rank)
        deadline = time.monotonic() + grace_s
        for rank, process in self._processes.items():
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await process.wait()
            except TimeoutError:
                logger.warning("%s did not exit within %g s: killed", self._names[rank], grace_s)
                process.kill()
                await process.wait()

    def kill_all(self) -> None:
        """Kill every process now."""
        for rank in self._processes:
            self.signal(rank, signal.SIGKILL)
        if self._standby is not None:
            self._standby.kill()

    def is_running(self, rank: int) -> bool:
        """Return whether `rank` has a process that has not ended."""
        process = self._processes.get(rank)
        return process is not None and process.returncode is None

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the process of `rank`, if it has one."""
        process = self._processes.get(rank)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _watch(self, spec: LaunchSpec, process: ChildProcess) -> None:
        code = await process.wait()
        if spec.name.kind is not WorkerKind.EXPERTS or code >= 0:  # Requests wait for the successor of a killed one.
            await asyncio.sleep(_LAST_WORDS_S)
        self._on_exit(spec.rank, _how(code))


def now_ns() -> int:
    """Return the monotonic time in nanoseconds, from the clock that the API server and the ranks share."""
    return time.monotonic_ns()


def _environment(num_ranks: int) -> Mapping[str, str]:
    """Return the environment of a rank: cores and network of this machine, unless the operator has chosen others."""
    share = max(1, (os.cpu_count() or 1) // num_ranks)
    # Without an interface, gloo listens on the one that the host's name belongs to: other machines could reach it.
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {"OMP_NUM_THREADS": str(share), "GLOO_SOCKET_IFNAME": loopback} | dict(os.environ)


def _how(code: int) -> str:
    if code >= 0:
        return f"its process ended with status {code}; its output is above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{hint}"
