"""The file of engines: read at the start, and again whenever it has changed and is no longer being written."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from moestro.errors import ConfigError
from moestro.gateway.discovery.discovery import ListListener
from moestro.gateway.discovery.entries import MAX_FILE_BYTES, EngineEntry, parse_file, selected
from moestro.web.ports.tls import WatchedFiles

_LOOK_S = 0.5


class EngineFile:
    """EngineSource that follows a file.

    A change counts when it is complete (`WatchedFiles`), so that a list that is being written in place is not taken for
    a short one. A missing file, before the first list, means that there are no engines yet.

    Args:
        labels: Labels of the lines that count.
    """

    name = "file"

    def __init__(self, path: Path, labels: Mapping[str, str]) -> None:
        self._path = path
        self._labels = labels
        self._key_files: tuple[Path, ...] = ()
        self.what = f"--engine-file {path}"

    def read(self) -> Sequence[EngineEntry]:
        """Return the engines of the file.

        Raises:
            ConfigError: The file cannot be read, or is no list of engines.
        """
        try:
            with self._path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(error.strerror or str(error)) from None
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"it has more than {MAX_FILE_BYTES} bytes")
        found = parse_file(text, self._path.parent)
        self._key_files = found.key_files
        return selected(found.entries, self._labels)

    def check(self) -> None:
        """Read the file at the start, when a wrong one is an error. It may also appear later.

        Raises:
            ConfigError: The file is no list of engines.
        """
        if not self._path.exists():
            return
        try:
            self.read()
        except ConfigError as error:
            raise ConfigError(f"{self.what}: {error}") from None

    async def follow(self, listener: ListListener) -> None:
        """Implement `EngineSource.follow`."""
        while True:
            paths = (self._path, *self._key_files)
            watched = WatchedFiles(paths)
            await self._report(listener)
            if paths != (self._path, *self._key_files):
                continue  # The list names other keys now: read it once more, with them watched.
            while not watched.are_to_be_read():  # noqa: ASYNC110 - no event tells of a change on every file system
                await asyncio.sleep(_LOOK_S)

    async def _report(self, listener: ListListener) -> None:
        try:
            entries = await asyncio.to_thread(self.read)  # YAML takes a second for a few thousand engines.
        except ConfigError as error:
            listener.report(None, str(error))
        else:
            listener.report(entries)
