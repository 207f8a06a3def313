"""The key of the block hashes in a record. It is kept apart from the record, and no reader of records needs it.

The names of blocks follow from the model, the salt and the tokens alone, so that engines and routers agree on them.
A reader of such names can test guesses of a prompt. A record therefore has keyed hashes of the names, and the
fingerprint of the key, so that parts and records under one key can be joined.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import secrets
import stat
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from moestro.errors import ConfigError

logger = logging.getLogger(__name__)

KEY_BYTES = 32
_LEAST_BYTES = 16  # of a given secret; 128 bits, if they are random
_MAX_BYTES = 4096
_ID_BYTES = 8
_OWN = 0o600
_OTHERS = 0o077
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
