"""Writes a line for each request that was answered: `moestro serve --record FILE`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from moestro.errors import ConfigError
from moestro.workload.request_record import Header, RecordedRequest


class Recorder:
    """A record of requests, begun anew.

    Lines reach the file when they fill a page and at the end, so that a request costs a few microseconds.

    Args:
        path: where; what it held is gone.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--record {path} cannot be written: {error.strerror}") from error
        self._encode = msgspec.json.Encoder().encode

    def begin(self, header: Header) -> None:
        """The first line."""
        self._file.write(self._encode(header) + b"\n")

    def write(self, request: RecordedRequest) -> None:
        """One more line."""
        self._file.write(self._encode(request) + b"\n")

    def close(self) -> None:
        """All lines are in the file."""
        self._file.close()
