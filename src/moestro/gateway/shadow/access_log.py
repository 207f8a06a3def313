"""Access logs of routers: lines of JSON, and a reader that follows a file while it grows and is rotated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

_MAX_LINE_BYTES = 64 << 10
_MAX_READ_BYTES = 1 << 20  # of one read, so that a long file does not stop the router
_EVENT_STREAM = "text/event-stream"


class _LogLine(msgspec.Struct):
    """Fields of a line. Numbers may be texts, and times seconds (nginx) or milliseconds (Envoy)."""

    request_id: str
    upstream: str | None = None
    status: int | str = 0
    bytes: int | str = 0
    seconds: float | str | None = None
    milliseconds: float | str | None = None
    first_seconds: float | str | None = None
    first_milliseconds: float | str | None = None
    content_type: str | None = None


class LoggedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the router in use, as its access log has it.

    Attributes:
        upstream: Address or name of the engine that answered; empty if the router itself did.
        status: Status of the answer.
        seconds: Time from the request's arrival to the end of the answer, seconds.
        first_s: Time to the first byte of the answer's body, seconds. None means that the log does not say.
        num_bytes: Bytes of the answer's body.
        is_stream: Whether the answer was a stream of events.
    """

    request_id: str
    upstream: str
    status: int
    seconds: float
    first_s: float | None
    num_bytes: int
    is_stream: bool


_decode = msgspec.json.Decoder(_LogLine).decode


def read_line(line: bytes) -> LoggedAnswer | None:
    """Return the answer that a line describes; None for a line of another form."""
    try:
        found = _decode(line)
        seconds = _seconds(found.seconds, found.milliseconds)
        if seconds is None or not found.request_id:
            return None
        return LoggedAnswer(
            request_id=found.request_id,
            upstream=_last_of(found.upstream or ""),
            status=int(found.status),
            seconds=seconds,
            first_s=_seconds(found.first_seconds, found.first_milliseconds),
            num_bytes=max(int(found.bytes), 0),
            is_stream=(found.content_type or "").startswith(_EVENT_STREAM),
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
        return None


def _seconds(seconds: float | str | None, milliseconds: float | str | None) -> float | None:
    """Return a time in seconds; None where the router writes nothing or a dash."""
    for value, unit in ((seconds, 1.0), (milliseconds, 1e-3)):
        if value not in (None, "", "-"):
            return max(float(value or 0) * unit, 0.0)
    return None


def _last_of(upstream: str) -> str:
    """Return the engine that answered: nginx lists all that it tried, with commas and colons between them."""
    last = upstream.replace(" : ", ", ").rpartition(", ")[2].strip()
    return "" if last == "-" else last


class LogFollower:
    """Reads the lines that are appended to a file, also after it was replaced or emptied.

    What the file has at the start is passed over, because no copy of its requests came. The file may appear later.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""
        self._open(at_end=True)

    def answers(self) -> Iterator[LoggedAnswer | None]:
        """Yield what was appended since the last call; None for a line that cannot be read."""
        yield from self._read()
        if self._was_replaced():
            yield from self._read()
            self.close()
            self._open(at_end=False)
            yield from self._read()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    def _open(self, *, at_end: bool) -> None:
        try:
            self._file = self._path.open("rb")
        except OSError:
            return
        if at_end:
            self._file.seek(0, os.SEEK_END)

    def _read(self) -> Iterator[LoggedAnswer | None]:
        if self._file is None:
            return
        while data := self._file.read(_MAX_READ_BYTES):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if line.strip():
                    yield read_line(line)
            if len(self._rest) > _MAX_LINE_BYTES:
                self._rest = b""  # No router writes such a line; its end will not be read either.
                yield None

    def _was_replaced(self) -> bool:
        try:
            found = self._path.stat()
        except OSError:
            return False  # Its writer will make it again.
        if self._file is None:
            return True
        is_other = found.st_ino != os.fstat(self._file.fileno()).st_ino
        return is_other or found.st_size < self._file.tell()
