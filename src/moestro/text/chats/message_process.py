"""A child process that answers one message at a time, and that a message may end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from moestro.text.chats.render_job import read_message, write_message


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
