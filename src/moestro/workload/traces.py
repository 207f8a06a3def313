"""Traces from files: `.jsonl` and `.csv`, also with `.zst` behind. The form is told from the first line's fields.

| form | fields | what it gives |
|---|---|---|
| Mooncake | timestamp (ms), input_length, output_length, hash_ids | times, lengths, shared blocks |
| LLMServingSim | arrival_time (s), input_toks, output_toks | times, lengths |
| custom (vLLM bench) | prompt, output_tokens (may be missing) | texts |
| Azure | TIMESTAMP (date and time), ContextTokens, GeneratedTokens | times, lengths |
| lengths | input_length, output_length | lengths |
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import msgspec
import zstandard

from moestro.errors import ConfigError
from moestro.workload.rows import Rows
from moestro.workload.trace_forms import FORMS, Entry, Form, rows_of

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def read_trace(path: Path, limit: int | None = None, default_output_tokens: int = 64) -> Rows:
    """The first `limit` requests of a trace (None: all), in order of time.

    Args:
        default_output_tokens: the answer's length where a row of texts names none.

    Raises:
        ConfigError: not a trace; the text names the file, the line and what is expected there.
    """
    try:
        with _lines_of(path) as lines:
            reader = _csv if path.name.removesuffix(".zst").endswith(".csv") else _jsonl
            entries, form = _entries(path, reader(path, lines), limit)
    except (OSError, UnicodeDecodeError, zstandard.ZstdError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return rows_of(path, entries, form, default_output_tokens)


@contextmanager
def _lines_of(path: Path) -> Iterator[TextIO]:
    if path.suffix != ".zst":
        with path.open(encoding="utf-8", newline="") as lines:
            yield lines
        return
    with path.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as unpacked:
        yield io.TextIOWrapper(unpacked, encoding="utf-8", newline="")


def _entries(path: Path, numbered: Iterator[tuple[int, dict[str, Any]]], limit: int | None) -> tuple[list[Entry], Form]:
    form: Form | None = None
    entries: list[Entry] = []
    for number, fields in islice(numbered, limit):
        form = form or _form_of(path, number, fields)
        try:
            entries.append(form.read(fields))
        except ValueError as error:
            text = f"{path}, line {number}: {error}; expected {form.name}'s fields: {form.expected}"
            raise ConfigError(text) from None
    if form is None:
        raise ConfigError(f"{path} holds no requests")
    return entries, form


def _form_of(path: Path, number: int, fields: dict[str, Any]) -> Form:
    for form in FORMS:
        if form.needs <= fields.keys():
            return form
    known = "; ".join(f"{form.name}: {form.expected}" for form in FORMS)
    raise ConfigError(f"{path}, line {number}: its fields are {', '.join(fields)}; expected one of {known}")


def _jsonl(path: Path, lines: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.isspace():
            try:
                yield number, _decode(line)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: expected one JSON object a line: {error}") from None


def _csv(path: Path, lines: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(lines)
    for fields in reader:
        if None in fields or None in fields.values():
            raise ConfigError(f"{path}, line {reader.line_num}: expected as many fields as the header has")
        yield reader.line_num, fields
