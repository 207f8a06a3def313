"""The file behind `--record` of `moestro serve` and `moestro route`: one JSON object a line, appended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from moestro.core.clock import ClockPair
from moestro.errors import ConfigError, MoestroError

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
_MAX_PENDING = 200_000  # Most entries that wait for the disk.

T = TypeVar("T")


class RecordFile(Generic[T]):
    """Appends entries to a file once a second, off the event loop.

    `write` never fails and never waits. When the disk fails or cannot keep up, the log says so once. After such a gap,
    only entries of the types `after_gap` are written. The next start appends to the same file.

    Args:
        path: File to append to.
        after_gap: Types of entries that are useful even if entries before them are missing.
        consequence: Meaning of a gap for a reader of the record, for the log.
        max_bytes: Size of the file at which the record ends. None means no limit.

    Attributes:
        num_lost: Number of entries that were not written.

    Raises:
        ConfigError: The file cannot be opened for writing.
    """

    def __init__(
        self,
        path: Path,
        after_gap: tuple[type, ...] = (),
        consequence: str = "the record ends here",
        max_bytes: int | None = None,
    ) -> None:
        self._path = path
        self._after_gap = after_gap
        self._consequence = consequence
        self._max_bytes = max_bytes
        self._pending: list[T] = []
        self._has_gap = False
        self._writing: asyncio.Task[None] | None = None
        self.num_lost = 0
        try:
            self._file = path.open("ab")
            if self._file.tell():
                self._file.write(b"\n")  # The last writer may have ended in the middle of a line.
        except OSError as error:
            raise ConfigError(f"--record {path} cannot be written: {error.strerror}") from None

    def write(self, entry: T) -> None:
        """Append `entry` within about `FLUSH_S`."""
        if len(self._pending) >= _MAX_PENDING:
            self._gap("the disk does not keep up")
            self.num_lost += 1
        elif not self._has_gap or isinstance(entry, self._after_gap):
            self._pending.append(entry)
        else:
            self.num_lost += 1

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write entries as they come while the block lasts, and the remaining ones at its end."""
        flushing = asyncio.create_task(self._flush_forever())
        try:
            yield
        finally:
            flushing.cancel()
            await asyncio.gather(flushing, return_exceptions=True)
            await self.close()

    async def close(self) -> None:
        """Write the remaining entries, and close the file."""
        await self._flush()
        with contextlib.suppress(OSError):
            self._file.close()

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self._flush()

    async def _flush(self) -> None:
        """Write pending entries after the write in progress, whose thread continues even if its waiter is cancelled."""
        while self._writing is not None:
            await asyncio.shield(self._writing)
        self._writing = asyncio.create_task(self._write())
        await asyncio.shield(self._writing)

    async def _write(self) -> None:
        entries, self._pending = self._pending, []
        try:
            if entries:
                await asyncio.to_thread(self._append, entries)
        except Exception as error:
            self._gap(str(error))
            # Entries that arrived in the meantime are behind the gap too.
            kept = [entry for entry in self._pending if isinstance(entry, self._after_gap)]
            self.num_lost += len(entries) + len(self._pending) - len(kept)
            self._pending = kept
        finally:
            self._writing = None

    def _append(self, entries: list[T]) -> None:
        lines = msgspec.json.Encoder().encode_lines(entries)
        if self._max_bytes is not None and self._file.tell() + len(lines) > self._max_bytes:
            raise MoestroError(f"it would be larger than {self._max_bytes / 2**30:g} GiB")
        self._file.write(b"\n" + lines if self._has_gap else lines)  # The gap may be in the middle of a line.
        self._file.flush()

    def _gap(self, why: str) -> None:
        if not self._has_gap:
            self._has_gap = True
            logger.error("--record %s: %s; %s", self._path, why, self._consequence)


def read_clocks() -> ClockPair:
    """Return the present time of the wall clock and the monotonic clock."""
    return ClockPair(time.time_ns(), time.monotonic_ns())
