"""Text files, line by line, compressed or not."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import msgspec
import zstandard

from moestro.errors import ConfigError
from moestro.files.text_files import decoded

_decode = msgspec.json.Decoder(dict[str, Any]).decode


@contextmanager
def open_lines(path: Path) -> Iterator[TextIO]:
    """Open the text of `path`, decompressed if its name ends in .zst.

    Raises:
        ConfigError: the file cannot be read, now or while its lines are read.
    """
    try:
        if path.suffix != ".zst":
            with path.open("rb") as file:
                yield decoded(file)
            return
        with path.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as unpacked:
            yield decoded(unpacked)
    except (OSError, UnicodeError, zstandard.ZstdError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def read_jsonl(path: Path, lines: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, fields) for each line that is not blank.

    Raises:
        ConfigError: a line is not a JSON object.
    """
    for number, line in enumerate(lines, 1):
        if not line.isspace():
            try:
                yield number, _decode(line)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: expected one JSON object a line: {error}") from None
