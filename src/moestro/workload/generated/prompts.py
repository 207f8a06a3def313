"""Prompts as token ids or words, made from lengths and block hashes. The same key gives the same prompt everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.rng import mix64, uniform
from moestro.workload.rows import Rows

Int32s = NDArray[np.int32]

# Frequent words; most tokenizers encode each as one token after a space.
WORDS = (  # noqa: SIM905 as a list it would fill a page
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which"
    " one you were all her she there would their we him been has when who will no more if out so said what up its"
    " about into than them can only other time new some could these two may then do first any my now such like our"
    " over man me even most made after also did many off before must well back through years where much your way"
    " down should because long each just state those people too still good own world very here both life day small"
    " under great last while house never come work part place high right since water set name form line next"
).split()


@dataclass(frozen=True, slots=True)
class PromptKey:
    """Selects a set of prompts. Different runs of one seed share no block, so no run warms the next one's cache.

    Attributes:
        seed: the operator's seed.
        run: 0 for warm-up, then 1, 2, ….
    """

    seed: int
    run: int

    def stream(self, number: int) -> NDArray[np.uint64]:
        """uint64[1], the seed of one independent stream of draws."""
        state = np.array([self.seed % 2**64], np.uint64)
        for part in (self.run, number):
            state = mix64(state + np.array([part + 1], np.uint64))  # an array wraps silently; a scalar would warn
        return state


_BLOCKS, _STREAMS = range(2)


def token_ids(rows: Rows, index: int, vocab_size: int, key: PromptKey) -> Int32s:
    """int32[num_prompt_tokens], the prompt of request `index`, with ids from 0 to `vocab_size` - 1.

    Equal hash ids give equal blocks. A partial last block is the beginning of its block. Prompts of one stream begin
    alike. All other tokens are unique to the request.
    """
    num_tokens = int(rows.num_prompt_tokens[index])
    if rows.hash_ids is not None:
        starts = rows.hash_ids[index] * rows.block_size
        counters = (starts[:, None] + np.arange(rows.block_size)).reshape(-1)[:num_tokens]
        head = _draw(key, _BLOCKS, counters, vocab_size)
        own = (index << 32) + np.arange(len(head), num_tokens)
        return np.concatenate([head, _draw(key, _STREAMS, own, vocab_size)])
    counters = np.arange(num_tokens)
    if rows.streams is None or rows.stream is None:
        return _draw(key, _STREAMS, counters + (index << 32), vocab_size)
    segments = rows.streams.segments(int(rows.stream[index]))
    for i, (owner, start) in enumerate(segments):
        end = segments[i + 1][1] if i + 1 < len(segments) else num_tokens
        counters[start:end] += owner << 32
    return _draw(key, _STREAMS, counters, vocab_size)


def text(rows: Rows, index: int, key: PromptKey) -> str:
    """The prompt of request `index` as text: the file's own text, or one common word for each token."""
    if rows.texts is not None:
        return rows.texts[index]
    return " ".join(WORDS[i] for i in token_ids(rows, index, len(WORDS), key).tolist())


def _draw(key: PromptKey, stream: int, counters: NDArray[np.int64], vocab_size: int) -> Int32s:
    return (uniform(key.stream(stream), counters.astype(np.uint64)) * vocab_size).astype(np.int32)
