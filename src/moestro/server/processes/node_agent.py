"""The actor of Ray's that starts worker processes on its node, one at a time, as children."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from moestro import __version__
from moestro.config.cores import thread_environment


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself.

    Attributes:
        version: Moestro's version.
        absent: Those of the requested paths that it lacks.
    """

    version: str
    absent: tuple[str, ...]


class NodeAgent:
    """Starts a worker process, keeps its stdin open, and passes on signals and its end.

    The process ends with this actor, because its stdin ends. Its output goes where the actor's goes: through Ray's log
    to the API server's.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def describe(self, paths: Sequence[str]) -> NodeFacts:
        """Return what the API server checks before it starts a worker here."""
        return NodeFacts(version=__version__, absent=tuple(path for path in paths if not Path(path).exists()))

    def start(self, arguments: Sequence[str], num_threads: int) -> None:
        """Start the interpreter of this node with `arguments`, after the end of the process before."""
        # Ray sets the number of threads to the actor's cores, but not in every version.
        environment = os.environ | thread_environment(1) | {"OMP_NUM_THREADS": str(num_threads)}
        self._process = subprocess.Popen(  # noqa: S603 - the arguments are Moestro's own
            [sys.executable, *arguments], stdin=subprocess.PIPE, env=environment, start_new_session=True
        )

    def write(self, data: bytes) -> None:
        """Write to the process's stdin. A process that has ended reads nothing."""
        stdin = self._started.stdin
        assert stdin is not None, "it was started with a pipe"
        try:
            stdin.write(data)
            stdin.flush()
        except BrokenPipeError:
            return

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        self._started.send_signal(number)

    def wait(self) -> int:
        """Wait for the end of the process, and return its code as `subprocess` has it."""
        return self._started.wait()

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "called after `start`"
        return self._process
