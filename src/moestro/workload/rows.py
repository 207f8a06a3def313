"""A workload as columns: how long each request's prompt and answer are, and what prompts share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """n requests.

    Attributes:
        num_prompt_tokens: int64[n]; 0 where the prompt is a text, whose tokens only the server counts.
        num_output_tokens: int64[n], the answer's length: a trace's hidden future, no policy sees it.
        timestamp_ns: int64[n], not decreasing, or None where nothing was recorded.
        hash_ids: one int64[blocks] a request; equal ids are equal blocks after equal beginnings. None: prompts share
            nothing but their first `num_shared_tokens`.
        block_size: tokens of one hashed block.
        num_shared_tokens: the beginning that all prompts have in common.
        texts: the prompts themselves, where the file holds them.
    """

    num_prompt_tokens: Int64s
    num_output_tokens: Int64s
    timestamp_ns: Int64s | None = None
    hash_ids: tuple[Int64s, ...] | None = None
    block_size: int = 0
    num_shared_tokens: int = 0
    texts: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.num_output_tokens)

    def select(self, which: Int64s) -> Rows:
        """The requests `which`, int64[m], in that order."""
        return replace(
            self,
            num_prompt_tokens=self.num_prompt_tokens[which],
            num_output_tokens=self.num_output_tokens[which],
            timestamp_ns=None if self.timestamp_ns is None else self.timestamp_ns[which],
            hash_ids=None if self.hash_ids is None else tuple(self.hash_ids[i] for i in which),
            texts=None if self.texts is None else tuple(self.texts[i] for i in which),
        )


def equal_rows(num_requests: int, num_prompt_tokens: int, num_output_tokens: int, num_shared_tokens: int = 0) -> Rows:
    """Requests of equal lengths: prompts of `num_shared_tokens` in common, then `num_prompt_tokens` of their own."""
    return Rows(
        num_prompt_tokens=np.full(num_requests, num_shared_tokens + num_prompt_tokens, np.int64),
        num_output_tokens=np.full(num_requests, num_output_tokens, np.int64),
        num_shared_tokens=num_shared_tokens,
    )
