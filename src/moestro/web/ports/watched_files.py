"""Files that are read again when they change: certificates, keys, lists of engines."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

Stamp = tuple[tuple[int, int, int], ...]

_SETTLED_S = 1.0  # Age from which a change counts as complete.
_MAX_LOOKS = 10  # A file that changes at every look is read nevertheless.


class WatchedFiles:
    """Notices that one of some files has changed, in place or by another file of its name, once they are complete.

    A file that is written in place is short for a while. So a change counts once it is a second old, or once two looks
    find the same.

    Args:
        paths: The files. One may be missing, and may appear later.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._read = self._seen = self._stamp()
        self._num_looks = 0  # Since the first change that has not been read.

    def are_to_be_read(self) -> bool:
        """Return whether the files have to be read again. That one has vanished is such a change too."""
        stamp = self._stamp()
        is_same, self._seen = stamp == self._seen, stamp
        if stamp == self._read:
            self._num_looks = 0
            return False
        self._num_looks += 1
        newest_ns = max((changed_ns for changed_ns, _, _ in stamp), default=0)
        is_settled = time.time_ns() - newest_ns >= _SETTLED_S * 1e9
        if not is_settled and not (is_same and self._num_looks > 1) and self._num_looks < _MAX_LOOKS:
            return False
        self._read, self._num_looks = stamp, 0
        return True

    def _stamp(self) -> Stamp:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_ino, found.st_size
