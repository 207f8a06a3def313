"""What the known forms of traces look like, and how their entries become columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from moestro.core.clock import NS_PER_S
from moestro.errors import ConfigError
from moestro.workload.rows import Int64s, Rows

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
# The sizes that traces are hashed in, the likeliest first; a trace fits several only where its prompts are tiny.
_BLOCK_SIZES = (512, 16, 32, 64, 128, 256, 1024)


class Entry(msgspec.Struct, kw_only=True):
    """One request in our own words, as far as its form tells."""

    timestamp_ns: int | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int | None = None
    hash_ids: list[int] | None = None
    prompt: str | None = None


class Lengths(Entry, kw_only=True):
    """A request of which both lengths are known."""

    num_prompt_tokens: Count
    num_output_tokens: Count


class Timed(Lengths, kw_only=True):
    """A request whose time is known too."""

    timestamp_ns: int


class Hashed(Timed, kw_only=True):
    """A request whose blocks are known too."""

    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**48)]]


class Text(Entry, kw_only=True):
    """A request with its prompt."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    num_output_tokens: Count | None = None


def _number_ns(unit_ns: int) -> Callable[[Any], int]:
    """From a number of units; an integer stays exact."""

    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"expected a number as the time, got {value!r}")
        return round(value * unit_ns)

    return convert


def _date_ns(value: Any) -> int:
    """Azure's stamps carry seven digits, one more than `datetime` keeps."""
    whole, _, digits = str(value).partition(".")
    seconds = (datetime.fromisoformat(whole) - datetime(1970, 1, 1)).total_seconds()
    return int(seconds) * NS_PER_S + int(digits[:9].ljust(9, "0"))


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of trace.

    Attributes:
        needs: the fields that tell it.
        expected: the same for people.
        entry: what a row must be in our words.
        names: our words by the form's.
        time_ns: how its time becomes `timestamp_ns`, where it has one.
    """

    name: str
    needs: frozenset[str]
    expected: str
    entry: type[Entry]
    names: dict[str, str]
    time_ns: Callable[[Any], int] | None = None

    def read(self, fields: dict[str, Any]) -> Entry:
        """One row; a field that is missing or null is missing.

        Raises:
            ValueError: it is not of this form; the text uses the form's words.
        """
        ours = {our: fields[name] for name, our in self.names.items() if fields.get(name) is not None}
        if self.time_ns is not None and "timestamp_ns" in ours:
            ours["timestamp_ns"] = self.time_ns(ours["timestamp_ns"])
        try:
            return msgspec.convert(ours, self.entry, strict=False)
        except msgspec.ValidationError as error:
            text = str(error)
            for name, our in self.names.items():
                text = text.replace(our, name)
            raise ValueError(text.replace("$.", "")) from None


FORMS = (
    Form(
        "Mooncake",
        frozenset({"timestamp", "input_length", "output_length", "hash_ids"}),
        "timestamp (milliseconds), input_length, output_length (at least 1), hash_ids (whole numbers)",
        Hashed,
        {
            "timestamp": "timestamp_ns",
            "input_length": "num_prompt_tokens",
            "output_length": "num_output_tokens",
            "hash_ids": "hash_ids",
        },
        _number_ns(1_000_000),
    ),
    Form(
        "LLMServingSim",
        frozenset({"arrival_time", "input_toks", "output_toks"}),
        "arrival_time (seconds), input_toks, output_toks (at least 1)",
        Timed,
        {"arrival_time": "timestamp_ns", "input_toks": "num_prompt_tokens", "output_toks": "num_output_tokens"},
        _number_ns(NS_PER_S),
    ),
    Form(
        "custom",
        frozenset({"prompt"}),
        "prompt (a text), output_tokens (at least 1; may be missing)",
        Text,
        {"prompt": "prompt", "output_tokens": "num_output_tokens"},
    ),
    Form(
        "Azure",
        frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
        "TIMESTAMP (date and time), ContextTokens, GeneratedTokens (at least 1)",
        Timed,
        {"TIMESTAMP": "timestamp_ns", "ContextTokens": "num_prompt_tokens", "GeneratedTokens": "num_output_tokens"},
        _date_ns,
    ),
    Form(
        "lengths",
        frozenset({"input_length", "output_length"}),
        "input_length, output_length (at least 1)",
        Lengths,
        {"input_length": "num_prompt_tokens", "output_length": "num_output_tokens"},
    ),
)


def rows_of(path: Path, entries: Sequence[Entry], form: Form, default_output_tokens: int) -> Rows:
    """Entries as columns, in order of time where there are times (stable: ties keep the file's order)."""
    rows = Rows(
        num_prompt_tokens=np.array([entry.num_prompt_tokens for entry in entries], np.int64),
        num_output_tokens=np.array([entry.num_output_tokens or default_output_tokens for entry in entries], np.int64),
        timestamp_ns=_times(entries) if issubclass(form.entry, Timed) else None,
        hash_ids=_chained([entry.hash_ids or [] for entry in entries]) if form.entry is Hashed else None,
        block_size=_block_size(path, entries) if form.entry is Hashed else 0,
        texts=tuple(entry.prompt or "" for entry in entries) if form.entry is Text else None,
    )
    return rows if rows.timestamp_ns is None else rows.select(np.argsort(rows.timestamp_ns, kind="stable"))


def _times(entries: Sequence[Entry]) -> Int64s:
    return np.array([entry.timestamp_ns for entry in entries], np.int64)


def _chained(hash_ids: Sequence[list[int]]) -> tuple[Int64s, ...]:
    """Ids that name a block and all before it: the trace's own where they do, otherwise numbered anew."""
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


def _block_size(path: Path, entries: Sequence[Entry]) -> int:
    """The size of which each prompt has as many blocks as it has hash ids, a partial last one with or without an id."""
    lengths = np.array([entry.num_prompt_tokens for entry in entries], np.int64)
    counts = np.array([len(entry.hash_ids or ()) for entry in entries], np.int64)
    for size in _BLOCK_SIZES:
        if ((counts == -(-lengths // size)) | (counts == lengths // size)).all():
            return size
    sizes = ", ".join(map(str, sorted(_BLOCK_SIZES)))
    raise ConfigError(f"{path}: the numbers of hash_ids fit input_length for no block size of {sizes}")
