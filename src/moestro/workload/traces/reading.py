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
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec
import numpy as np

from moestro.core.clock import FOREVER_NS, NS_PER_MS, NS_PER_S
from moestro.errors import ConfigError
from moestro.files.text_files import open_lines, read_jsonl
from moestro.workload.rows import Int64s, Rows

# The known trace formats, and the conversion of their entries to columns.

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
# Block sizes in use, the likeliest first. A trace fits several only where its prompts are tiny.
_BLOCK_SIZES = (512, 16, 32, 64, 128, 256, 1024)


class TraceEntry(msgspec.Struct, kw_only=True):
    """One request in Moestro's field names, as far as its file tells."""

    timestamp_ns: int | None = None
    num_prompt_tokens: Count | None = None
    num_output_tokens: Count | None = None
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**48)]] | None = None
    prompt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    session: str | None = None
    chat: int | None = None
    parent: int | None = None


_DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")


def _number_ns(unit_ns: int) -> Callable[[Any], int]:
    """Make a converter from a number of units, or its text, to nanoseconds; an integer stays exact."""

    def convert(value: Any) -> int:
        try:
            if isinstance(value, str):
                value = int(value) if value.isdigit() else float(value)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return round(value * unit_ns)
        except (TypeError, ValueError, OverflowError):
            pass
        raise ValueError(f"expected a number as the time, got {value!r}")

    return convert


_FROM_S, _FROM_MS = _number_ns(NS_PER_S), _number_ns(NS_PER_MS)


def _date_ns(value: Any) -> int:
    """Parse Azure's timestamps. 2023 has seven decimals, one more than `datetime` keeps; 2024 has a zone."""
    found = _DATE.fullmatch(str(value))
    if found is None:
        raise ValueError(f"expected a date and time such as 2023-11-16 18:17:03.9799600, got {value!r}")
    whole, digits, zone = found.groups()
    when = datetime.fromisoformat(whole + (zone or "+00:00").replace("Z", "+00:00"))
    return int((when - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()) * NS_PER_S + int(
        (digits or "0").ljust(9, "0")
    )


@dataclass(frozen=True, slots=True)
class Form:
    """A trace format.

    Attributes:
        needs: fields that identify the format.
        expected: all fields, described for people.
        names: Moestro's field names by the format's.
        time_ns: conversion of its time to `timestamp_ns`, where it has one.
        sparse: fields that a row may lack. A file has any other field in all rows, or in none.
        failed: field that is 0 where a request failed. Such rows are counted and left out.
    """

    name: str
    needs: frozenset[str]
    expected: str
    names: dict[str, str]
    time_ns: Callable[[Any], int] | None = None
    sparse: frozenset[str] = frozenset()
    failed: str | None = None

    def columns_of(self, fields: dict[str, Any]) -> frozenset[str]:
        """Return the fields of a file whose first row is `fields`; each of its rows has them all."""
        return frozenset(name for name in self.names.keys() - self.sparse if fields.get(name) is not None) | self.needs

    def has_failed(self, fields: dict[str, Any]) -> bool:
        """Whether the row is a failed request."""
        return self.failed is not None and str(fields.get(self.failed)) in {"0", "0.0"}

    def read(self, fields: dict[str, Any], columns: frozenset[str]) -> TraceEntry:
        """Convert one row; a null field counts as missing.

        Args:
            fields: the row.
            columns: fields of the file's first row.

        Raises:
            ValueError: the row does not fit the format or the first row; the text uses the format's field names.
        """
        given = {name for name in self.names if fields.get(name) is not None}
        if missing := columns - given:
            raise ValueError(f"missing required field `{min(missing)}`")
        if added := given - columns - self.sparse:
            raise ValueError(f"field `{min(added)}`, which the first request lacks: give it in each line, or in none")
        ours = {our: fields[name] for name, our in self.names.items() if name in given}
        if self.time_ns is not None and "timestamp_ns" in ours:
            given_time = ours["timestamp_ns"]
            ours["timestamp_ns"] = self.time_ns(given_time)
            if abs(ours["timestamp_ns"]) >= FOREVER_NS:
                raise ValueError(f"the time {given_time!r} is too large: is it in a smaller unit?")
        try:
            return msgspec.convert(ours, TraceEntry, strict=False)
        except msgspec.ValidationError as error:
            text = str(error).replace(" | null", "")
            for name, our in self.names.items():
                text = text.replace(our, name)
            raise ValueError(text.replace("$.", "")) from None


_LENGTHS = {"input_length": "num_prompt_tokens", "output_length": "num_output_tokens"}
_HASHED = {"timestamp": "timestamp_ns", **_LENGTHS, "hash_ids": "hash_ids"}
_EXPECTED = "input_length, output_length (at least 1), hash_ids (whole numbers)"
_EITHER = "each in all lines or in none"
FORMS = (
    Form(
        "Bailian",
        frozenset({*_LENGTHS, "chat_id", "parent_chat_id"}),
        f"chat_id, parent_chat_id (-1: none), timestamp (seconds), {_EXPECTED}; timestamp and hash_ids {_EITHER}",
        _HASHED | {"chat_id": "chat", "parent_chat_id": "parent"},
        _FROM_S,
    ),
    Form(
        "Mooncake",
        frozenset({*_LENGTHS, "hash_ids"}),
        f"timestamp (milliseconds; {_EITHER.removeprefix('each ')}), {_EXPECTED}",
        _HASHED,
        _FROM_MS,
    ),
    Form(
        "BurstGPT",
        frozenset({"Timestamp", "Request tokens", "Response tokens"}),
        "Timestamp (seconds), Request tokens, Response tokens (0: it failed), Session ID (may be missing)",
        {
            "Timestamp": "timestamp_ns",
            "Request tokens": "num_prompt_tokens",
            "Response tokens": "num_output_tokens",
            "Session ID": "session",
        },
        _FROM_S,
        sparse=frozenset({"Session ID"}),
        failed="Response tokens",
    ),
    Form(
        "LLMServingSim",
        frozenset({"arrival_time", "input_toks", "output_toks"}),
        "arrival_time (seconds), input_toks, output_toks (at least 1)",
        {"arrival_time": "timestamp_ns", "input_toks": "num_prompt_tokens", "output_toks": "num_output_tokens"},
        _FROM_S,
    ),
    Form(
        "custom",
        frozenset({"prompt"}),
        "prompt (a text), output_tokens or output_length (at least 1; may be missing), timestamp (milliseconds; in all"
        " lines or in none)",
        {
            "prompt": "prompt",
            "timestamp": "timestamp_ns",
            "output_length": "num_output_tokens",
            "output_tokens": "num_output_tokens",
        },
        _FROM_MS,
        sparse=frozenset({"output_length", "output_tokens"}),
    ),
    Form(
        "Azure",
        frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
        "TIMESTAMP (date and time), ContextTokens, GeneratedTokens (at least 1)",
        {"TIMESTAMP": "timestamp_ns", "ContextTokens": "num_prompt_tokens", "GeneratedTokens": "num_output_tokens"},
        _date_ns,
    ),
    Form(
        "lengths",
        frozenset(_LENGTHS),
        "input_length, output_length (at least 1), timestamp (milliseconds; in all lines or in none)",
        {"timestamp": "timestamp_ns", **_LENGTHS},
        _FROM_MS,
    ),
)
KNOWN_FIELDS = frozenset[str]().union(*(form.names for form in FORMS))


def rows_of(
    path: Path, entries: Sequence[TraceEntry], form: Form, columns: frozenset[str], default_output_tokens: int
) -> Rows:
    """Convert entries to columns, in order of time where there are times (stable: ties keep the file's order).

    Args:
        path: the file, for messages.
        columns: fields that each row of the file has.
        default_output_tokens: answer length where a row names none.
    """
    found = {form.names[name] for name in columns}
    is_hashed, is_timed = "hash_ids" in found, "timestamp_ns" in found
    if is_timed:  # before conversations are put together: a turn names the one before it
        entries = sorted(entries, key=lambda entry: entry.timestamp_ns or 0)
    return Rows(
        num_prompt_tokens=np.array([entry.num_prompt_tokens or 0 for entry in entries], np.int64),
        num_output_tokens=np.array([entry.num_output_tokens or default_output_tokens for entry in entries], np.int64),
        timestamp_ns=_times(entries) if is_timed else None,
        hash_ids=_chained([entry.hash_ids or [] for entry in entries]) if is_hashed else None,
        block_size=_block_size(path, entries) if is_hashed else 0,
        texts=tuple(entry.prompt or "" for entry in entries) if "prompt" in found else None,
        session=_sessions(entries),
    )


def _times(entries: Sequence[TraceEntry]) -> Int64s:
    return np.array([entry.timestamp_ns for entry in entries], np.int64)


def _sessions(entries: Sequence[TraceEntry]) -> Int64s | None:
    """Number conversations from 0 by their first request; a request that names no conversation is one of its own."""
    if all(entry.session is None and entry.chat is None for entry in entries):
        return None
    first_of: dict[int, int] = {}
    number: dict[tuple[str, int | str], int] = {}
    found = []
    for i, entry in enumerate(entries):
        name: tuple[str, int | str] = ("row", i)
        if entry.session:
            name = ("session", entry.session)
        elif entry.chat is not None and entry.parent is not None:
            first_of[entry.chat] = entry.chat if entry.parent < 0 else first_of.get(entry.parent, entry.parent)
            name = ("chat", first_of[entry.chat])
        found.append(number.setdefault(name, len(number)))
    return np.array(found, np.int64)


def _chained(hash_ids: Sequence[list[int]]) -> tuple[Int64s, ...]:
    """Ids that name a block and all blocks before it: the trace's own where they do, otherwise renumbered."""
    before: dict[int, int] = {}
    for ids in hash_ids:
        if any(before.setdefault(own, parent) != parent for parent, own in zip([-1, *ids], ids, strict=False)):
            return _renumbered(hash_ids)
    return tuple(np.array(ids, np.int64) for ids in hash_ids)


def _renumbered(hash_ids: Sequence[list[int]]) -> tuple[Int64s, ...]:
    number: dict[tuple[int, int], int] = {}
    found = []
    for ids in hash_ids:
        chain, parent = [], -1
        for own in ids:
            parent = number.setdefault((parent, own), len(number))
            chain.append(parent)
        found.append(np.array(chain, np.int64))
    return tuple(found)


def _block_size(path: Path, entries: Sequence[TraceEntry]) -> int:
    """The block size at which each prompt has as many blocks as hash ids, with or without an id for a partial block."""
    lengths = np.array([entry.num_prompt_tokens for entry in entries], np.int64)
    counts = np.array([len(entry.hash_ids or ()) for entry in entries], np.int64)
    for size in _BLOCK_SIZES:
        if ((counts == -(-lengths // size)) | (counts == lengths // size)).all():
            return size
    sizes = ", ".join(map(str, sorted(_BLOCK_SIZES)))
    raise ConfigError(f"{path}: the numbers of hash_ids fit input_length for none of the block sizes {sizes}")


_DENSE_RATE = 100.0  # requests a second above which times with decimals are doubted to be milliseconds
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
    return replace(
        rows,
        num_left_out=found.num_failed,
        ignored_fields=frozenset(found.ignored),
        about_times=_doubt_about(rows.timestamp_ns, found.form),
    )


def _doubt_about(timestamp_ns: Int64s | None, form: Form) -> str:
    """Return a sentence where times in milliseconds look like seconds: they have decimals, and requests are dense."""
    if timestamp_ns is None or form.time_ns is not _FROM_MS or not (timestamp_ns % NS_PER_MS).any():
        return ""
    seconds = int(timestamp_ns[-1] - timestamp_ns[0]) / NS_PER_S
    if not 0 < seconds * _DENSE_RATE < len(timestamp_ns):
        return ""
    return (
        f"its times are read as milliseconds, so that {len(timestamp_ns):,} requests come within {seconds:.3g} s:"
        " multiply them by 1,000 if they are seconds"
    )


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
