"""Private directory for the ranks' socket. A later server removes the directory of a killed one."""

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
_LOCK = "lock"  # Locked while the server lives; the kernel releases the lock, however the process ends.
_NEW_LOCK = "lock.new"


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Yield a directory that only this user can enter, and remove it afterwards. First remove those of dead servers."""
    _sweep(Path(tempfile.gettempdir()))
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))  # Created with mode 0700.
    lock = _lock(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _lock(directory: Path) -> int:
    """Lock `directory`, and return the descriptor that holds the lock.

    The lock file gets its final name only once it is locked. An unlocked file thus belongs to a dead server, never to
    one that is just starting.
    """
    lock = os.open(directory / _NEW_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(OSError):  # On a file system without locks, no other server removes the directory.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (directory / _NEW_LOCK).rename(directory / _LOCK)
    return lock


def _sweep(parent: Path) -> None:
    """Remove the directories of this user's dead servers from `parent`. A failure is logged and does not raise."""
    try:
        found = [path for path in parent.iterdir() if path.name.startswith(_PREFIX)]
    except OSError as error:
        logger.warning("cannot look for directories of earlier servers in %s: %s", parent, error)
        return
    for directory in found:
        with contextlib.suppress(OSError):  # No lock file, no access, already removed, or locked by a live server.
            _remove_if_dead(directory)


def _remove_if_dead(directory: Path) -> None:
    """Remove `directory` if it belongs to a dead server of this user; OSError if it has no lock or is locked."""
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
