"""The directory of the ranks' socket: for this user alone, and removed even if its server was killed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "moestro-"
_LOCK = "lock"  # locked for as long as the server lives: the kernel unlocks it, however the process ends
_NEW_LOCK = "lock.new"


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A directory that only this user can enter, removed afterwards. Those of dead servers are removed first."""
    _sweep(Path(tempfile.gettempdir()))
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))  # made with mode 0700
    lock = _lock(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _lock(directory: Path) -> int:
    """Lock `directory`; returns the descriptor that holds the lock.

    The file gets its name when it is locked: one that is found unlocked belongs to a dead server, never to one that
    starts at this moment.
    """
    lock = os.open(directory / _NEW_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody removes the directory but we
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (directory / _NEW_LOCK).rename(directory / _LOCK)
    return lock


def _sweep(parent: Path) -> None:
    """Remove what dead servers of this user have left in `parent`. A failure is logged: it keeps no server from it."""
    try:
        found = [path for path in parent.iterdir() if path.name.startswith(_PREFIX)]
    except OSError as error:
        logger.warning("cannot look for directories of earlier servers in %s: %s", parent, error)
        return
    for directory in found:
        with contextlib.suppress(OSError):  # no lock in it, not ours, gone meanwhile, or a living server holds the lock
            _remove_if_dead(directory)


def _remove_if_dead(directory: Path) -> None:
    """Raises OSError unless `directory` belongs to a dead server of this user."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(opened)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return
        lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW, dir_fd=opened)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
            logger.info("removed %s, the directory of a killed server", directory)
        finally:
            os.close(lock)
    finally:
        os.close(opened)
