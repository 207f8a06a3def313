"""Child processes that compute what strangers wrote: bounds on their memory, and messages over their pipes."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path

_LENGTH_BYTES = 4  # before each message, big-endian


def limit_memory(num_bytes: int) -> None:
    """Let the kernel refuse this process more address space than it has and `num_bytes`, and write no core file."""
    statm = Path("/proc/self/statm")
    present = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
    resource.setrlimit(resource.RLIMIT_AS, (present + num_bytes, present + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def read_message(file: int) -> bytes | None:
    """Read the next encoded message from a pipe; None if the other side is gone."""
    head = _read(file, _LENGTH_BYTES)
    return None if head is None else _read(file, int.from_bytes(head, "big"))


def write_message(file: int, body: bytes) -> None:
    """Write an encoded message to a pipe.

    Raises:
        BrokenPipeError: the process at its other end is gone.
    """
    rest = memoryview(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
    while rest:
        rest = rest[os.write(file, rest) :]


def _read(file: int, size: int) -> bytes | None:
    """Read exactly `size` bytes; None if the pipe ends before."""
    parts = []
    while size:
        part = os.read(file, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class MessageProcess:
    """A started process; messages pass through its standard input and output.

    Args:
        command: a constant command line.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - the command is a constant
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches only the server, which decides how to end
        )

    @property
    def is_alive(self) -> bool:
        """Whether the process can answer."""
        return self._process.poll() is None

    def exchange(self, message: bytes) -> bytes | int:
        """Return the answer to `message`, or the status of the process if it died of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            write_message(self._process.stdin.fileno(), message)
            answer = read_message(self._process.stdout.fileno())
        except BrokenPipeError:
            answer = None
        return self._process.wait() if answer is None else answer

    def kill(self) -> None:
        """End the process, even while it works on a message."""
        self._process.kill()

    def close(self) -> None:
        """End the process and close its pipes. Call it while no thread exchanges with it."""
        with self._process:  # leaving the block waits for its end
            self.kill()
