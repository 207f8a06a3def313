"""The file of engines: read at the start, and again whenever it has changed and is no longer being written."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from moestro.errors import ConfigError
from moestro.gateway.discovery.discovery import ListListener
from moestro.gateway.discovery.entries import MAX_FILE_BYTES, EngineEntry, parse_file, selected
from moestro.web.ports.watched_files import WatchedFiles

_LOOK_S = 0.5
_MAX_LOOKS = 10  # A file that changes at every look is read nevertheless.


class EngineFile:
    """EngineSource that follows a file.

    A change counts once the file has been the same at two looks, so that a list that is being written in place is not
    taken for a short one. A missing file, before the first list, means that there are no engines yet.

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
        watched = self._watched()
        watched.have_changed()
        await self._report(listener)
        num_looks = 0  # Since the first change that has not been read; 0 without one.
        while True:
            await asyncio.sleep(_LOOK_S)
            has_changed = watched.have_changed()
            num_looks += 1 if has_changed or num_looks else 0
            if num_looks and (not has_changed or num_looks >= _MAX_LOOKS):
                num_looks = 0
                await self._report(listener)
                watched = self._watched()
                watched.have_changed()

    def _watched(self) -> WatchedFiles:
        files: dict[str, Path | None] = {str(path): path for path in (self._path, *self._key_files)}
        return WatchedFiles(files)

    async def _report(self, listener: ListListener) -> None:
        try:
            entries = await asyncio.to_thread(self.read)  # YAML takes a second for a few thousand engines.
        except ConfigError as error:
            listener.report(None, str(error))
        else:
            listener.report(entries)
