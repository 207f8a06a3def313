"""A pipe that wakes a thread which waits for descriptors."""

from __future__ import annotations

import contextlib
import os


class WakePipe:
    """Wakes the thread that waits for `fd`. No method blocks.

    Attributes:
        fd: readable from a `wake` until the next `clear`.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        for end in (self.fd, self._write_fd):
            os.set_blocking(end, False)

    def wake(self) -> None:
        """Make `fd` readable; any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of earlier calls, so the reader is awake already
            os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        """Make `fd` unreadable; call it before a look at what `wake` announces."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Close both ends; no thread may use them any more."""
        for end in (self.fd, self._write_fd):
            os.close(end)
