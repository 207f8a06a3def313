"""What starts worker processes: the seam between the supervisor and the machines on which workers run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moestro.core.curve_keys import CurveKeys

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
    """

    place: str
    peer_address: str

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or its machine does not answer."""
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

    async def spawn_standby(self) -> StartedProcess:
        """Start a process that waits for a worker's launch spec, where this takes no room that a worker may need.

        Raises:
            OSError: There is no such room now.
        """
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


class LocalProcess:
    """A child process; implements `StartedProcess`."""

    place = ""

    def __init__(self, process: asyncio.subprocess.Process, peer_address: str) -> None:
        self._process = process
        self.peer_address = peer_address

    @property
    def has_ended(self) -> bool:
        """Implement `StartedProcess.has_ended`."""
        return self._process.returncode is not None

    async def write(self, data: bytes) -> None:
        """Implement `StartedProcess.write`."""
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.write(data)

    def signal(self, number: int) -> None:
        """Implement `StartedProcess.signal`."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def wait(self) -> ProcessEnd:
        """Implement `StartedProcess.wait`."""
        return ProcessEnd.of(await self._process.wait())


class LocalLauncher:
    """Starts child processes of the API server; implements `Launcher`.

    Args:
        directory: Directory for sockets, which only this user can enter.
        num_ranks: Number of processes that share the machine.
        command: Command to run; its process reads a `LaunchSpec` from stdin.
    """

    keys: CurveKeys | None = None

    def __init__(self, directory: Path, num_ranks: int, command: Sequence[str] = WORKER) -> None:
        self.server_address = f"ipc://{directory / 'ranks'}"
        self._directory, self._num_ranks, self._command = directory, num_ranks, command
        self._num_spawned = 0

    async def open(self) -> None:
        """Implement `Launcher.open`."""

    async def spawn(self, name: Sequence[str], listen_fd: int | None = None) -> StartedProcess:
        """Implement `Launcher.spawn`."""
        self._num_spawned += 1
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *name,
            stdin=asyncio.subprocess.PIPE,
            env=_environment(self._num_ranks),
            pass_fds=() if listen_fd is None else (listen_fd,),
            start_new_session=True,  # Ctrl-C reaches only the API server, which decides what follows.
        )
        return LocalProcess(process, f"ipc://{self._directory / f'worker-{self._num_spawned}'}")

    async def spawn_standby(self) -> StartedProcess:
        """Implement `Launcher.spawn_standby`."""
        return await self.spawn(("standby",))

    async def close(self) -> None:
        """Implement `Launcher.close`."""

    def kill_all(self) -> None:
        """Implement `Launcher.kill_all`. `WorkerProcesses` kills the processes."""


def _environment(num_ranks: int) -> Mapping[str, str]:
    """Return the environment of a rank: cores and network of this machine, unless the operator has chosen others."""
    share = max(1, (os.cpu_count() or 1) // num_ranks)
    # Without an interface, gloo listens on the one that the host's name belongs to: other machines could reach it.
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {"OMP_NUM_THREADS": str(share), "GLOO_SOCKET_IFNAME": loopback} | dict(os.environ)
