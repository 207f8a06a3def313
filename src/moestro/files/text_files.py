"""Text files as people's programs write them: UTF-8 or UTF-16, with or without a byte order mark, lines of any system.

Editors of Windows begin a file with a byte order mark and end lines with CRLF; its PowerShell writes UTF-16.

Traces and records are read line by line, compressed or not.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import msgspec
import zstandard

from moestro.errors import ConfigError

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def encoding_of(start: bytes) -> str:
    """Return the encoding of a text whose first bytes are `start`; the decoder drops a byte order mark."""
    return "utf-16" if start.startswith(UTF16_MARKS) else "utf-8-sig"


def text_of(raw: bytes) -> str:
    r"""Decode the contents of a text file, without byte order mark and with lines that end in \n.

    Raises:
        UnicodeDecodeError: the bytes are no text.
    """
    return raw.decode(encoding_of(raw[:2])).replace("\r\n", "\n").replace("\r", "\n")


def read_text(path: Path) -> str:
    """Read a text file as `text_of` decodes it.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: it is no text.
    """
    return text_of(path.read_bytes())


def decoded(file: io.RawIOBase | BinaryIO) -> TextIO:
    r"""Return the text of a stream of bytes, decoded while it is read; its lines end in \n."""
    buffered = io.BufferedReader(file)  # type: ignore[type-var]
    return io.TextIOWrapper(buffered, encoding=encoding_of(buffered.peek(2)[:2]))


@contextmanager
def open_utf8(path: Path) -> Iterator[BinaryIO]:
    """Open a text file as UTF-8 bytes without byte order mark, for readers that decode each line by itself.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: it begins as UTF-16 and is not.
    """
    with path.open("rb") as file:
        start = file.peek(len(codecs.BOM_UTF8))
        if start.startswith(UTF16_MARKS):
            yield io.BytesIO(text_of(file.read()).encode("utf-8", "surrogatepass"))
            return
        if start.startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        yield file


# Lines of traces and records.

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_OTHER_PACKERS = {".gz", ".bz2", ".xz", ".zip"}


@contextmanager
def open_lines(path: Path) -> Iterator[TextIO]:
    """Open the text of `path`, decompressed if its name ends in .zst.

    Raises:
        ConfigError: the file cannot be read, now or while its lines are read.
    """
    if path.suffix in _OTHER_PACKERS:
        raise ConfigError(f"{path} cannot be read: unpack it, or pack it with zstd (.zst)")
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
