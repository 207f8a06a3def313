"""A workload as columns: prompt and answer lengths, users, sessions, and the shared parts of prompts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from moestro.errors import ConfigError

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """Texts that only grow, as a forest: each begins like its parent and departs from it after `start` tokens.

    A conversation is a stream: each of its prompts, with or without its answer, is a beginning of that stream. A system
    prompt that many conversations share is their parent.

    Attributes:
        parent: int64[s], parent stream; -1 means none.
        start: int64[s], index of the stream's first own token; 0 without a parent, and at least the parent's `start`.
    """

    parent: Int64s
    start: Int64s

    def segments(self, stream: int) -> list[tuple[int, int]]:
        """The parts of `stream`'s text in order: (stream that owns the tokens, index of the first of them)."""
        found: list[tuple[int, int]] = []
        while stream >= 0:
            found.append((stream, int(self.start[stream])))
            stream = int(self.parent[stream])
        return found[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """n requests. `hash_ids` or `stream` say what prompts share; without either they share nothing.

    Attributes:
        num_prompt_tokens: int64[n]; 0 where the prompt is a text, whose tokens only the server counts.
        num_output_tokens: int64[n], answer lengths: the trace's hidden future, which no policy sees.
        timestamp_ns: int64[n], not decreasing, or None where no times were recorded.
        hash_ids: one int64[blocks] for each request. An id names a block and all blocks before it.
        block_size: tokens of one hashed block.
        streams: the texts that prompts are beginnings of.
        stream: int64[n], stream of each prompt; the answer continues it.
        texts: the prompts themselves, where the file holds them.
        user, session: int64[n], who sends the request and in which conversation; None means unknown.
        domain: int64[n], source domain of each request, which decides the popularity of experts where a simulation has
            several; None means that all come from domain 0.
        is_ls: bool[n], latency-sensitive (true) or best-effort; None means that all are latency-sensitive.
        is_generated: whether a generator made the rows. Every result made from such rows says so.
        num_left_out: requests of the file that are not among the rows because they had failed.
        ignored_fields: fields of the file that other forms of traces have, and that this one does not use.
    """

    num_prompt_tokens: Int64s
    num_output_tokens: Int64s
    timestamp_ns: Int64s | None = None
    hash_ids: tuple[Int64s, ...] | None = None
    block_size: int = 0
    streams: Streams | None = None
    stream: Int64s | None = None
    texts: tuple[str, ...] | None = None
    user: Int64s | None = None
    session: Int64s | None = None
    domain: Int64s | None = None
    is_ls: Bools | None = None
    is_generated: bool = False
    num_left_out: int = 0
    ignored_fields: frozenset[str] = frozenset()

    @property
    def notes(self) -> list[str]:
        """What of the file is not in the rows, in sentences."""
        notes = []
        if self.num_left_out:
            notes.append(f"entries of the file without an answered request, which are left out: {self.num_left_out:,}")
        if self.ignored_fields:
            names = ", ".join(sorted(self.ignored_fields))
            notes.append(f"fields of the file that have no effect beside its other fields: {names}")
        return notes

    def __len__(self) -> int:
        return len(self.num_output_tokens)

    def select(self, which: Int64s) -> Rows:
        """Select the requests `which`, int64[m], in that order."""
        chosen: dict[str, object] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            if isinstance(column, np.ndarray):
                chosen[field.name] = column[which]
            elif isinstance(column, tuple):
                chosen[field.name] = tuple(column[i] for i in which)
        return replace(self, **chosen)  # type: ignore[arg-type]


def labelled(rows: Rows, ls_share: float, seed: int) -> Rows:
    """Label each request latency-sensitive with probability `ls_share`, else best-effort (QLLM, section 5).

    Raises:
        ConfigError: the share is outside 0 .. 1.
    """
    if not 0 <= ls_share <= 1:
        raise ConfigError(f"the share of latency-sensitive requests must be within 0 .. 1, got {ls_share:g}")
    return replace(rows, is_ls=np.random.default_rng([seed, len(rows)]).random(len(rows)) < ls_share)


def equal_rows(num_requests: int, num_prompt_tokens: int, num_output_tokens: int, num_shared_tokens: int = 0) -> Rows:
    """Requests of equal lengths: `num_shared_tokens` that all prompts share, then `num_prompt_tokens` of their own."""
    shared = num_shared_tokens > 0
    return Rows(
        num_prompt_tokens=np.full(num_requests, num_shared_tokens + num_prompt_tokens, np.int64),
        num_output_tokens=np.full(num_requests, num_output_tokens, np.int64),
        streams=_one_beginning(num_requests, num_shared_tokens) if shared else None,
        stream=np.arange(1, num_requests + 1) if shared else None,
        is_generated=True,
    )


def _one_beginning(num_streams: int, num_shared_tokens: int) -> Streams:
    """Build streams 1 .. `num_streams`, which share stream 0 as their beginning."""
    parent, start = np.zeros(num_streams + 1, np.int64), np.full(num_streams + 1, num_shared_tokens, np.int64)
    parent[0], start[0] = -1, 0
    return Streams(parent, start)
