"""Starts servers and routers as forks of processes that have loaded their libraries (`forker_process.py`).

A server that loads torch and transformers for itself takes ten CPU seconds to start; a fork takes one. The ranks of a
forked server are forks too, by way of the product's own processes on standby. What computes nothing is a fork of a
second, small process, because a fork takes longer the more memory it shares. All test processes of a session use the
forker of the first one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.cpu_seconds import PROGRAMS, Program
from support.forker_process import has_networks

from moestro.config.launch_spec import STANDBY

ADDRESS = "MOESTRO_TEST_FORKER"  # variable of the environment: name of the forker's socket


class ForkedProgram:
    """A program that the forker runs in a fork; has the methods of `subprocess.Popen` that tests use.

    Args:
        streams: Descriptors of its stdin, stdout and stderr.

    Raises:
        OSError: The program has to run in a process of its own, because there is no forker or it runs no such program.
    """

    def __init__(self, command: Sequence[str], streams: Sequence[int], environment: Mapping[str, str]) -> None:
        self.args = tuple(command)
        self.returncode: int | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(address_of(computes=has_networks(self.args)))
        request = {"command": self.args, "environment": dict(environment), "directory": str(Path.cwd())}
        socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
        answer = self._socket.recv(1000).decode()
        if not answer.isdigit():
            raise OSError(f"the forker does not run this program: {answer}")
        self.pid = int(answer)
        self._used = Program(self.pid)
        PROGRAMS.append(self._used)

    def __del__(self) -> None:
        self._socket.close()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._socket.settimeout(timeout)
            try:
                status, used_s = self._socket.recv(64).split()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self.returncode = int(status)
            self._used.end(float(used_s))
            self._socket.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            if number == signal.SIGKILL:
                self._used.look()  # nothing waits for its descendants
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forker:
    """The forker's processes, which load libraries when a program first wants them.

    Attributes:
        pids: Numbers of the processes.
    """

    def __init__(self) -> None:
        os.environ[ADDRESS] = f"moestro-forker-{os.getpid()}"
        self._processes = [_start(address_of(computes=computes)) for computes in (False, True)]
        self.pids = tuple(process.pid for process in self._processes)

    def end(self) -> None:
        """End the processes, and with them all that they have started."""
        del os.environ[ADDRESS]
        for process in self._processes:
            process.kill()
            process.wait()


def _start(address: str) -> subprocess.Popen[bytes]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        program = Path(__file__).with_name("forker_process.py")
        # The last arguments give room for the names of ranks in `ps`, as in the product's process on standby; one more
        # tells the forker from such a process.
        return subprocess.Popen([sys.executable, program, *STANDBY, "of-tests"], stdin=listener.fileno())


def address_of(*, computes: bool) -> str:
    """A name outside the file system; without a forker, one that cannot be connected to."""
    return f"\0{os.environ.get(ADDRESS, 'no forker')}{' of networks' if computes else ''}"
