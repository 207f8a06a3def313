"""Protocols of a launcher, which starts worker processes on this machine or on others, and of its processes."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
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
