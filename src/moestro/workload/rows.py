"""A workload as columns: how long each request's prompt and answer are, who asks, and what prompts share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from moestro.errors import ConfigError

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """Texts that only ever grow, as a forest: each begins as its parent does, and leaves it after `start` tokens.

    A conversation is a stream: each of its prompts, and each prompt with its answer, is a beginning of it. A system
    prompt that many conversations share is their parent.

    Attributes:
        parent: int64[s], the stream that it begins as; -1: none.
        start: int64[s], its first token of its own; 0 without a parent, and not below its parent's.
    """

    parent: Int64s
    start: Int64s

    def segments(self, stream: int) -> list[tuple[int, int]]:
        """What the text of `stream` is made of: (the stream whose own tokens they are, the first of them), in order."""
        found: list[tuple[int, int]] = []
        while stream >= 0:
            found.append((stream, int(self.start[stream])))
            stream = int(self.parent[stream])
        return found[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """n requests. What prompts share is said by `hash_ids` or by `stream`; with neither they share nothing.

    Attributes:
        num_prompt_tokens: int64[n]; 0 where the prompt is a text, whose tokens only the server counts.
        num_output_tokens: int64[n], the answer's length: a trace's hidden future, no policy sees it.
        timestamp_ns: int64[n], not decreasing, or None where nothing was recorded.
        hash_ids: one int64[blocks] a request. An id names a block and all that lies before it.
        block_size: tokens of one hashed block.
        streams: the texts that prompts are beginnings of.
        stream: int64[n], which of them each prompt is; its answer continues it.
        texts: the prompts themselves, where the file holds them.
        user, session: int64[n], who asks, and in which conversation; None: nobody knows.
        is_ls: bool[n], latency-sensitive rather than best-effort; None: all are.
        is_generated: made by a generator, not recorded. Every result made from such rows says so.
        num_left_out: requests of the file that are not among the rows because they had failed.
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
    is_ls: Bools | None = None
    is_generated: bool = False
    num_left_out: int = 0

    def __len__(self) -> int:
        return len(self.num_output_tokens)

    def select(self, which: Int64s) -> Rows:
        """The requests `which`, int64[m], in that order."""
        chosen: dict[str, object] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            if isinstance(column, np.ndarray):
                chosen[field.name] = column[which]
            elif isinstance(column, tuple):
                chosen[field.name] = tuple(column[i] for i in which)
        return replace(self, **chosen)  # type: ignore[arg-type]


def labelled(rows: Rows, ls_share: float, seed: int) -> Rows:
    """The same requests, each latency-sensitive with the chance `ls_share` and best-effort otherwise (QLLM, section 5).

    Raises:
        ConfigError: the share is not within 0 .. 1.
    """
    if not 0 <= ls_share <= 1:
        raise ConfigError(f"the share of latency-sensitive requests must be within 0 .. 1, got {ls_share:g}")
    return replace(rows, is_ls=np.random.default_rng([seed, len(rows)]).random(len(rows)) < ls_share)


def equal_rows(num_requests: int, num_prompt_tokens: int, num_output_tokens: int, num_shared_tokens: int = 0) -> Rows:
    """Requests of equal lengths: prompts of `num_shared_tokens` in common, then `num_prompt_tokens` of their own."""
    shared = num_shared_tokens > 0
    return Rows(
        num_prompt_tokens=np.full(num_requests, num_shared_tokens + num_prompt_tokens, np.int64),
        num_output_tokens=np.full(num_requests, num_output_tokens, np.int64),
        streams=_one_beginning(num_requests, num_shared_tokens) if shared else None,
        stream=np.arange(1, num_requests + 1) if shared else None,
        is_generated=True,
    )


def _one_beginning(num_streams: int, num_shared_tokens: int) -> Streams:
    """Stream 0 is what the streams 1 .. `num_streams` have in common."""
    parent, start = np.zeros(num_streams + 1, np.int64), np.full(num_streams + 1, num_shared_tokens, np.int64)
    parent[0], start[0] = -1, 0
    return Streams(parent, start)
