"""Reads traces: `.jsonl` and `.csv`, also with `.zst` appended. The first line's fields identify the format.

| form | fields | what it gives |
|---|---|---|
| Mooncake | timestamp (ms; may be missing), input_length, output_length, hash_ids | times, lengths, shared blocks |
| Bailian (Qwen) | chat_id, parent_chat_id, and Mooncake's with timestamp in s | times, lengths, blocks, sessions |
| BurstGPT | Timestamp (s), Request tokens, Response tokens, Session ID (may be missing) | times, lengths, sessions |
| LLMServingSim | arrival_time (s), input_toks, output_toks | times, lengths |
| custom (vLLM bench) | prompt, output_tokens and timestamp (ms; may be missing) | times, texts |
| Azure | TIMESTAMP (date and time), ContextTokens, GeneratedTokens | times, lengths |
| lengths | input_length, output_length, timestamp (ms; may be missing) | times, lengths |
| ShareGPT (`.json`) | conversations of from, value | texts: what each conversation begins with |

A field that may be missing is in all lines or in none. Fields of one form in a file of another are named in the notes.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np

from moestro.errors import ConfigError
from moestro.workload.files import open_lines, read_jsonl
from moestro.workload.rows import Rows
from moestro.workload.traces.trace_forms import FORMS, KNOWN_FIELDS, Form, TraceEntry, rows_of

_USERS = {"human", "user"}
_ANSWERS = {"gpt", "chatgpt", "bing", "bard", "assistant"}
_CHARACTERS = 4  # characters of English text in a token, roughly


class _Message(msgspec.Struct):
    who: str = msgspec.field(name="from")
    text: str = msgspec.field(name="value")


class _Conversation(msgspec.Struct):
    conversations: list[_Message]


def estimated_tokens(text: str) -> int:
    """Estimate the tokens of `text` without a tokenizer: one for four characters."""
    return max(1, -(-len(text) // _CHARACTERS))


def first_turns(path: Path, document: str, limit: int | None = None) -> Rows:
    """First message of each conversation as a prompt; conversations that do not begin with a user are left out.

    The answer's length is estimated from its text. `vllm bench` uses the same two messages of each conversation.

    Raises:
        ConfigError: the file has another form, or holds no answered question.
    """
    prompts: list[str] = []
    lengths: list[int] = []
    num_left_out = 0
    for messages in _conversations(path, document):
        roles = [message.who for message in messages[:2]]
        if len(roles) < 2 or roles[0] not in _USERS or roles[1] not in _ANSWERS or not messages[0].text:
            num_left_out += 1
            continue
        prompts.append(messages[0].text)
        lengths.append(estimated_tokens(messages[1].text))
        if len(prompts) == limit:
            break
    if not prompts:
        raise ConfigError(f"{path} holds no conversation that begins with a question and its answer")
    return Rows(
        num_prompt_tokens=np.zeros(len(prompts), np.int64),
        num_output_tokens=np.array(lengths, np.int64),
        texts=tuple(prompts),
        num_left_out=num_left_out,
    )


def _conversations(path: Path, document: str) -> Iterator[list[_Message]]:
    try:
        for each in msgspec.json.decode(document, type=list[_Conversation]):
            yield each.conversations
    except msgspec.DecodeError as error:
        raise ConfigError(
            f'{path}: expected a JSON array of {{"conversations": [{{"from": "human", "value": "..."}}]}}: {error}'
        ) from None


def read_trace(path: Path, limit: int | None = None, default_output_tokens: int = 64) -> Rows:
    """Read the first `limit` requests of a trace (None means all), in order of time.

    Args:
        default_output_tokens: answer length where a row of text names none.

    Raises:
        ConfigError: the file is no trace; the text names the file, the line and the expected fields.
    """
    kind = path.name.removesuffix(".zst")
    if kind.endswith(".json"):
        return read_sharegpt(path, limit)
    with open_lines(path) as lines:
        found = _entries(path, (_csv if kind.endswith(".csv") else read_jsonl)(path, lines), limit)
    rows = rows_of(path, found.entries, found.form, found.columns, default_output_tokens)
    return replace(rows, num_left_out=found.num_failed, ignored_fields=frozenset(found.ignored))


def read_sharegpt(path: Path, limit: int | None = None) -> Rows:
    """Read the first questions of ShareGPT's conversations, whatever the file's name.

    Raises:
        ConfigError: the file has another form.
    """
    with open_lines(path) as lines:
        return first_turns(path, lines.read(), limit)


@dataclass(slots=True)
class _Found:
    """What a file holds.

    Attributes:
        form, columns: format, and fields that each row has.
        ignored: fields of other formats, which this one does not use.
        num_failed: number of rows that are left out.
    """

    form: Form
    columns: frozenset[str]
    entries: list[TraceEntry] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    num_failed: int = 0


def _entries(path: Path, numbered: Iterator[tuple[int, dict[str, Any]]], limit: int | None) -> _Found:
    found: _Found | None = None
    for number, fields in numbered:
        if found is None:
            form = _form_of(path, number, fields)
            found = _Found(form, form.columns_of(fields))
        form = found.form
        found.ignored |= (fields.keys() & KNOWN_FIELDS) - form.names.keys()
        if form.has_failed(fields):
            found.num_failed += 1
            continue
        try:
            found.entries.append(form.read(fields, found.columns))
        except ValueError as error:
            text = f"{path}, line {number}: {error}; expected {form.name}'s fields: {form.expected}"
            raise ConfigError(text) from None
        if len(found.entries) == limit:
            break
    if found is None or not found.entries:
        raise ConfigError(f"{path} holds no requests")
    return found


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
