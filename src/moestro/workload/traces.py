"""Reads traces: `.jsonl` and `.csv`, also with `.zst` appended. The first line's fields identify the format.

| form | fields | what it gives |
|---|---|---|
| Mooncake | timestamp (ms), input_length, output_length, hash_ids | times, lengths, shared blocks |
| Bailian (Qwen) | the same with timestamp in s, chat_id, parent_chat_id | times, lengths, shared blocks, sessions |
| BurstGPT | Timestamp (s), Request tokens, Response tokens, Session ID (may be missing) | times, lengths, sessions |
| LLMServingSim | arrival_time (s), input_toks, output_toks | times, lengths |
| custom (vLLM bench) | prompt, output_tokens (may be missing) | texts |
| Azure | TIMESTAMP (date and time), ContextTokens, GeneratedTokens | times, lengths |
| lengths | input_length, output_length | lengths |
| ShareGPT (`.json`) | conversations of from, value | texts: what each conversation begins with |
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from moestro.errors import ConfigError
from moestro.workload.files import open_lines, read_jsonl
from moestro.workload.rows import Rows
from moestro.workload.sharegpt import first_turns
from moestro.workload.trace_forms import FORMS, Form, TraceEntry, rows_of


def read_trace(path: Path, limit: int | None = None, default_output_tokens: int = 64) -> Rows:
    """Read the first `limit` requests of a trace (None means all), in order of time.

    Args:
        default_output_tokens: answer length where a row of text names none.

    Raises:
        ConfigError: the file is no trace; the text names the file, the line and the expected fields.
    """
    kind = path.name.removesuffix(".zst")
    with open_lines(path) as lines:
        if kind.endswith(".json"):
            return first_turns(path, lines.read(), limit)
        entries, form, num_failed = _entries(path, (_csv if kind.endswith(".csv") else read_jsonl)(path, lines), limit)
    return replace(rows_of(path, entries, form, default_output_tokens), num_left_out=num_failed)


def _entries(
    path: Path, numbered: Iterator[tuple[int, dict[str, Any]]], limit: int | None
) -> tuple[list[TraceEntry], Form, int]:
    form: Form | None = None
    entries: list[TraceEntry] = []
    num_failed = 0
    for number, fields in numbered:
        form = form or _form_of(path, number, fields)
        if form.has_failed(fields):
            num_failed += 1
            continue
        try:
            entries.append(form.read(fields))
        except ValueError as error:
            text = f"{path}, line {number}: {error}; expected {form.name}'s fields: {form.expected}"
            raise ConfigError(text) from None
        if len(entries) == limit:
            break
    if form is None or not entries:
        raise ConfigError(f"{path} holds no requests")
    return entries, form, num_failed


def _form_of(path: Path, number: int, fields: dict[str, Any]) -> Form:
    for form in FORMS:
        if form.needs <= fields.keys():
            return form
    known = "; ".join(f"{form.name}: {form.expected}" for form in FORMS)
    raise ConfigError(f"{path}, line {number}: its fields are {', '.join(fields)}; expected one of {known}")


def _csv(path: Path, lines: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(lines)
    for fields in reader:
        if None in fields or None in fields.values():
            raise ConfigError(f"{path}, line {reader.line_num}: expected as many fields as the header has")
        yield reader.line_num, fields
