"""The record of `moestro route`: the router's calls as they come, to be replayed, and stories, to be told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import msgspec

from moestro.cluster.record import Entry
from moestro.cluster.story import Story
from moestro.errors import ConfigError

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
_MAX_PENDING = 200_000  # entries that a disk may be behind


class RecordFile:
    """Appends entries to a file, a JSON object a line, once a second and off the event loop.

    A record with a gap cannot be replayed. When the disk cannot keep up, or refuses, the log says so, and from there on
    there are stories alone, as many as can be written; the next start begins anew in the same file.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[Entry] = []
        self._has_gap = False
        self._writing: asyncio.Task[None] | None = None
        try:
            self._file = path.open("ab")
            if self._file.tell():
                self._file.write(b"\n")  # whoever wrote last may have died in the middle of a line
        except OSError as error:
            raise ConfigError(f"--record {path} cannot be written: {error.strerror}") from None

    def write(self, entry: Entry) -> None:
        """Soon."""
        if len(self._pending) >= _MAX_PENDING:
            self._gap("the disk does not keep up")
        elif not self._has_gap or isinstance(entry, Story):
            self._pending.append(entry)

    async def flush_forever(self) -> None:
        """Once a second, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self._flush()

    async def _flush(self) -> None:
        """Write what there is, after what is being written: a thread goes on with that, be its waiter cancelled."""
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
            # What has come in the meantime is behind the gap too.
            self._pending = [entry for entry in self._pending if isinstance(entry, Story)]
        finally:
            self._writing = None

    def _append(self, entries: list[Entry]) -> None:
        lines = msgspec.json.Encoder().encode_lines(entries)
        self._file.write(b"\n" + lines if self._has_gap else lines)  # the gap may be in the middle of a line
        self._file.flush()

    def _gap(self, why: str) -> None:
        if not self._has_gap:
            self._has_gap = True
            logger.error("--record %s: %s; it replays up to here, and has stories alone from now on", self._path, why)

    async def close(self) -> None:
        """Write what is left."""
        await self._flush()
        with contextlib.suppress(OSError):
            self._file.close()
