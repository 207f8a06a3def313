"""The file behind `--record` of `moestro serve` and `moestro route`: one JSON object a line, appended."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import os
import secrets
import stat
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from moestro.core.clock import ClockPair
from moestro.errors import ConfigError, MoestroError

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
_MAX_PENDING = 200_000  # Most entries that wait for the disk.
_ENTRIES_AT_ONCE = 256  # Entries that are encoded before other threads may run.
_OWN = 0o600  # Mode of the file: it tells who sent which requests.
_OTHERS = 0o077

T = TypeVar("T")


class RecordFile(Generic[T]):
    """Appends entries to a file once a second, off the event loop.

    `write` never fails and never waits. When the disk fails or cannot keep up, entries are lost until there is room
    again: a gap. The log says when a gap begins, and how many lines it has when it ends. A line is in the file as a
    whole or not at all, wherever the file can be cut back. The next start appends to the same file.

    Only the owner may read the file. A file that others may read is narrowed, with a line in the log.

    Args:
        path: File to append to.
        finish: Makes the form in which an entry is written, in a thread.
        resume: Makes the entries that follow a gap, from the number of lost ones.
        max_bytes: Size of the file that it does not exceed. None means no limit.

    Attributes:
        num_lost: Number of entries that were not written.

    Raises:
        ConfigError: The file cannot be opened for writing.
    """

    def __init__(
        self,
        path: Path,
        finish: Callable[[T], T],
        resume: Callable[[int], Sequence[T]],
        max_bytes: int | None = None,
    ) -> None:
        self._path = path
        self._finish = finish
        self._resume = resume
        self._max_bytes = max_bytes
        self._pending: list[T] = []
        self._num_refused = 0  # Entries after the pending ones, which had no place among them.
        self._num_in_gap = 0  # Entries lost since the last written line.
        self._is_torn = False  # The file may end in the middle of a line that could not be cut off.
        self._writing: asyncio.Task[None] | None = None
        self.num_lost = 0
        try:
            self._file = _opened(path)
        except OSError as error:
            raise ConfigError(f"--record {path} cannot be written: {error.strerror}") from None

    def write(self, entry: T) -> None:
        """Append `entry` within about `FLUSH_S`."""
        if len(self._pending) < _MAX_PENDING and not self._num_refused:
            self._pending.append(entry)
            return
        if not self._num_refused and not self._num_in_gap:
            self._log_begin("the disk does not keep up")
        self._num_refused += 1
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
        if self._num_in_gap or self._num_refused:
            lost = self._num_in_gap + self._num_refused
            logger.error("--record %s ends in a gap; lines lost in it: %s", self._path, f"{lost:,}")
        with contextlib.suppress(OSError):
            os.close(self._file)

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
        num_refused, self._num_refused = self._num_refused, 0
        try:
            if entries:
                await asyncio.to_thread(self._append, entries)
        except Exception as error:
            if not self._num_in_gap:
                self._log_begin(str(error))
            self._num_in_gap += len(entries)
            self.num_lost += len(entries)
        else:
            if entries and self._num_in_gap:
                logger.warning("--record %s goes on; lines lost in the gap: %s", self._path, f"{self._num_in_gap:,}")
                self._num_in_gap = 0
        finally:
            self._num_in_gap += num_refused
            self._writing = None

    def _append(self, entries: list[T]) -> None:
        size = os.fstat(self._file).st_size
        if self._max_bytes is not None and size >= self._max_bytes:
            raise MoestroError(self._too_large())
        pieces = [b"\n"] if self._is_torn else []
        encode = msgspec.json.Encoder().encode_lines
        if self._num_in_gap:
            pieces.append(encode([self._finish(entry) for entry in self._resume(self._num_in_gap)]))
        for at in range(0, len(entries), _ENTRIES_AT_ONCE):
            pieces.append(encode([self._finish(entry) for entry in entries[at : at + _ENTRIES_AT_ONCE]]))
            time.sleep(0)  # Lets the event loop's thread go on.
        lines = b"".join(pieces)
        if self._max_bytes is not None and size + len(lines) > self._max_bytes:
            raise MoestroError(self._too_large())
        self._append_whole(lines, size)
        self._is_torn = False

    def _append_whole(self, lines: bytes, size: int) -> None:
        """Append `lines` to a file of `size` bytes, or nothing of them."""
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            if len(rest) < len(lines):
                self._is_torn = True
                os.ftruncate(self._file, size)
                self._is_torn = False
            raise

    def _too_large(self) -> str:
        return f"it would be larger than {(self._max_bytes or 0) / 2**30:g} GiB"

    def _log_begin(self, why: str) -> None:
        logger.error("--record %s: %s; lines are lost until they can be written again", self._path, why)


def _opened(path: Path) -> int:
    """Open a file for appending, which its owner alone may read."""
    # Without O_NONBLOCK a named pipe without a reader would hold the start for ever.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, _OWN)
    try:
        os.set_blocking(file, True)
        status = os.fstat(file)
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISREG(status.st_mode) and mode & _OTHERS:
            with contextlib.suppress(PermissionError):
                os.fchmod(file, mode & ~_OTHERS)
            narrowed = stat.S_IMODE(os.fstat(file).st_mode)
            logger.warning(
                "--record %s was open to other users (mode %04o); its mode is now %04o", path, mode, narrowed
            )
        if status.st_size:
            os.write(file, b"\n")  # The last writer may have ended in the middle of a line.
    except OSError:
        os.close(file)
        raise
    return file


def read_clocks() -> ClockPair:
    """Return the present time of the wall clock and the monotonic clock."""
    return ClockPair(time.time_ns(), time.monotonic_ns())


# The key of the block hashes in a record. It is kept apart from the record, and no reader of records needs it.
#
# The names of blocks follow from the model, the salt and the tokens alone, so that engines and routers agree on them.
# A reader of such names can test guesses of a prompt. A record therefore has keyed hashes of the names, and the
# fingerprint of the key, so that parts and records under one key can be joined.

KEY_BYTES = 32
_LEAST_BYTES = 16  # of a given secret; 128 bits, if they are random
_MAX_BYTES = 4096
_ID_BYTES = 8
_FILE = "record.key"


@dataclass(frozen=True, slots=True)
class RecordKey:
    """A key of block hashes.

    Attributes:
        secret: KEY_BYTES bytes.
    """

    secret: bytes = field(repr=False)

    @property
    def key_id(self) -> str:
        """Fingerprint of the key, which does not reveal it."""
        return blake2b(b"id of a record key", key=self.secret, digest_size=_ID_BYTES).hexdigest()


def record_key(given: Path | None) -> RecordKey:
    """Return the key in `given`, which is made if it does not exist, or else the key of this user on this machine.

    Raises:
        ConfigError: the given file cannot be read or made, or holds no key.
    """
    if given is not None:
        try:
            return _kept(given)
        except OSError as error:
            raise ConfigError(f"--record-key-file {given} cannot be used: {error.strerror}") from None
    path = default_path()
    try:
        return _kept(path)
    except (OSError, ConfigError) as error:
        logger.warning(
            "the key of the record cannot be kept in %s (%s), so this part of the record cannot be joined with others:"
            " give --record-key-file", path, error,
        )  # fmt: skip
        return RecordKey(secrets.token_bytes(KEY_BYTES))


def default_path() -> Path:
    """Return the place of the user's key: a state directory, away from the records, of which copies are given away."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path("~/.local/state").expanduser()
    return base / "moestro" / _FILE


def _kept(path: Path) -> RecordKey:
    """Read a key, and make it first if there is none."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make(path)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe holds nothing up
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"the record's key {path} is no regular file: give another --record-key-file")
        text = os.read(file, _MAX_BYTES + 1).removeprefix(codecs.BOM_UTF8).strip()
    finally:
        os.close(file)
    if not _LEAST_BYTES <= len(text) <= _MAX_BYTES:
        raise ConfigError(
            f"the record's key {path} has {len(text)} bytes: {_LEAST_BYTES} to {_MAX_BYTES} random bytes are needed;"
            " a file that does not exist is made"
        )
    if status.st_mode & _OTHERS:
        logger.warning("the record's key %s is open to other users: chmod 600 it", path)
    return RecordKey(blake2b(text, digest_size=KEY_BYTES, person=b"moestro record").digest())


def _make(path: Path) -> None:
    """Make a key file. Of several processes that start at once, one makes it, and all read the same."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWN)
    try:
        os.write(file, secrets.token_hex(KEY_BYTES).encode() + b"\n")
        os.fsync(file)
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        os.close(file)
        partial.unlink()
