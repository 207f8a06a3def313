"""Names of a replayed request's KV blocks, derived from what its trace says is shared, not from tokens.

Under one key, equal text after equal beginnings has equal names, and other text has other names. These names differ
from those of `core.hashing.hash_blocks` for prompts that `workload.prompts` writes out.
A name costs a few nanoseconds: a number that is unique within the workload is mixed into two words by one bijection
each, so two blocks of one workload and key cannot collide.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import HASH_BYTES
from moestro.core.rng import mix64
from moestro.errors import ConfigError
from moestro.workload.rows import Rows

UInt64s = NDArray[np.uint64]

_POSITION_BITS = 24  # low bits: the block's position in its stream; high bits: the stream's number
_UNNAMED = np.uint64(1 << 63)  # marks blocks whose content the trace does not tell: they belong to one request alone


def block_numbers(rows: Rows, index: int, num_tokens: int, block_size: int) -> UInt64s:
    """uint64[num_tokens // block_size], a number for each full block of the first `num_tokens` of request `index`.

    Equal numbers mean equal blocks after equal beginnings. Blocks beyond the trace's information are unique.

    Args:
        num_tokens: tokens of the prompt, or of prompt and answer where the request is part of a stream.
        block_size: tokens of an engine's block. The trace's blocks are split or joined to fit.
    """
    num_blocks = num_tokens // block_size
    if rows.hash_ids is None:
        return _of_stream(rows, index, num_blocks, block_size)
    known = _of_ids(rows.hash_ids[index].astype(np.uint64), rows.block_size, block_size)[:num_blocks]
    if len(known) == num_blocks:
        return known
    own = np.arange(len(known), num_blocks, dtype=np.uint64) + (np.uint64(index << _POSITION_BITS) | _UNNAMED)
    return np.concatenate([known, own])


def block_names(key: bytes, numbers: UInt64s) -> bytes:
    """Pack block numbers into names of HASH_BYTES each.

    Args:
        key: HASH_BYTES bytes, or empty; a different key gives different names.
    """
    low, high = np.frombuffer(key or bytes(HASH_BYTES), "<u8")
    names = np.empty((len(numbers), 2), "<u8")
    np.bitwise_xor(numbers, low, out=names[:, 0])
    np.bitwise_xor(~numbers, high, out=names[:, 1])
    return mix64(names).tobytes()


def check_block_size(rows: Rows, block_size: int) -> None:
    """Refuse an engine's block size that the trace's blocks cannot be split or joined to.

    Raises:
        ConfigError: neither block size is a multiple of the other.
    """
    if rows.hash_ids is None or rows.block_size % block_size == 0 or block_size % rows.block_size == 0:
        return
    raise ConfigError(
        f"the trace is hashed in blocks of {rows.block_size} tokens, which do not fit an engine's blocks of"
        f" {block_size}: give a block size that divides {rows.block_size}, or a multiple of it"
    )


def _of_ids(ids: UInt64s, traced: int, wanted: int) -> UInt64s:
    if wanted >= traced:
        step = wanted // traced
        return ids[step - 1 :: step]  # the last id of a joined block names all of it
    parts = traced // wanted
    cut: UInt64s = np.add.outer(ids * np.uint64(parts), np.arange(parts, dtype=np.uint64)).reshape(-1)
    return cut


def _of_stream(rows: Rows, index: int, num_blocks: int, block_size: int) -> UInt64s:
    """Number a stream's blocks. A block belongs to the last stream that has a token of its own in it."""
    if rows.streams is None or rows.stream is None:
        first = index << _POSITION_BITS
        return np.arange(first, first + num_blocks, dtype=np.uint64)
    numbers = np.arange(num_blocks, dtype=np.uint64)
    segments = rows.streams.segments(int(rows.stream[index]))
    for i, (owner, start) in enumerate(segments):
        end = segments[i + 1][1] // block_size if i + 1 < len(segments) else num_blocks
        numbers[start // block_size : end] += np.uint64(owner << _POSITION_BITS)
    return numbers
