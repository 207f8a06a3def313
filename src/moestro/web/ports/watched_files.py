"""Files that are read again when they change: certificates, keys, lists of engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moestro.errors import ConfigError

Stamp = tuple[tuple[int, int, int], ...]


class WatchedFiles:
    """Notices that one of some files has changed, in place or by another file of its name.

    Args:
        files: Files by the flag, or other name, that an error begins with; None stands for no file.
    """

    def __init__(self, files: Mapping[str, Path | None]) -> None:
        self._files = {name: path for name, path in files.items() if path is not None}
        self._seen: Stamp | None = None

    def stamp(self) -> Stamp:
        """Return what changes when one of the files does.

        Raises:
            ConfigError: A file cannot be found.
        """
        return tuple(_stamp(name, path) for name, path in self._files.items())

    def have_changed(self) -> bool:
        """Return whether a file has changed since the last call, or is missing since then. The first call tells yes."""
        try:
            stamp = self.stamp()
        except ConfigError:
            stamp = ()
        has_changed = stamp != self._seen
        self._seen = stamp
        return has_changed


def _stamp(name: str, path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}") from error
    return found.st_mtime_ns, found.st_ino, found.st_size
