"""Starts worker processes on this machine."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from moestro.config.cores import thread_environment
from moestro.core.curve_keys import CurveKeys
from moestro.server.processes.launcher import WORKER, StartedProcess
from moestro.server.processes.local_process import LocalProcess
from moestro.server.processes.standby import Standby


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
        self._directory, self._command, self._environment = directory, command, _environment(num_ranks)
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


def _environment(num_ranks: int) -> Mapping[str, str]:
    """Return the environment of a rank: threads and network of this machine, unless the operator has chosen others."""
    # Without an interface, gloo listens on the one that the host's name belongs to: other machines could reach it.
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {"GLOO_SOCKET_IFNAME": loopback} | os.environ | thread_environment(num_ranks)
