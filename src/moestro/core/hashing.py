"""Hashes of KV blocks: one keyed hash chain for engine, router index and traces; and a tree of prompts by blocks.

A block's hash covers its tokens and, through its parent's hash, all tokens before it. The key separates models,
adapters and salts, so that a tenant with its own salt can neither hit nor probe another tenant's blocks.

The tree has runs of blocks that prompts share, and the number of prompts of each holder in each run. A prompt is the
list of its blocks' hashes, the first of which finds a run, in any prompt. Runs are cut only where prompts differ: a
prompt of a thousand blocks is a few runs. To add, drop or find it costs a few dictionary look-ups and memory
comparisons, not a thousand.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16
ROOT = bytes(HASH_BYTES)  # parent of a prompt's first block
_TOKEN = np.dtype("<i4")
_ANY = "surrogatepass"  # a client's JSON may have half of a surrogate pair, which UTF-8 has not


def hash_key(model: str, adapter: str | None = None, salt: str | None = None) -> bytes:
    """Make the key under which a request's blocks are hashed.

    Args:
        model: name of the served model; two models never share blocks.
        adapter: name of a LoRA adapter, if any.
        salt: the request's `cache_salt`, if any.

    Returns:
        HASH_BYTES bytes.
    """
    digest = blake2b(digest_size=HASH_BYTES)
    for part in (model, adapter, salt):
        # The length comes first, and None differs from "", so that no two triples have the same encoding.
        encoded = b"" if part is None else part.encode(errors=_ANY)
        digest.update(f"{-1 if part is None else len(encoded)}:".encode() + encoded)
    return digest.digest()


def name_key(name: str | None) -> int:
    """A number that identifies `name`, the same in every process; 0 for None."""
    return (
        0
        if name is None
        else int.from_bytes(blake2b(name.encode(errors=_ANY), digest_size=8).digest(), "little", signed=True)
    )


def block_hash(key: bytes, parent: bytes, token_ids: NDArray[np.int32]) -> bytes:
    """Hash one full block to HASH_BYTES bytes.

    Args:
        key: from `hash_key`.
        parent: hash of the block before it, or `ROOT`.
        token_ids: int32[block_size].
    """
    if token_ids.dtype != _TOKEN:  # a comparison takes an eighth of a conversion to the same type
        token_ids = token_ids.astype(_TOKEN)
    hasher = _hasher(key).copy()
    hasher.update(parent)
    hasher.update(token_ids.tobytes())
    return hasher.digest()


@lru_cache(maxsize=64)  # a copy takes less time than a new one; a server with many salts has as many keys
def _hasher(key: bytes) -> blake2b:
    """Hasher of blocks under `key`, for copies."""
    return blake2b(digest_size=HASH_BYTES, key=key)


def hash_blocks(key: bytes, token_ids: NDArray[np.int32], block_size: int) -> bytes:
    """Hash the full blocks of `token_ids`, packed, HASH_BYTES each. A partial last block has no hash."""
    hashes, parent = [], ROOT
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(key, parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return b"".join(hashes)


def keyed_names(secret: bytes, packed: bytes) -> bytes:
    """Replace packed hashes by keyed hashes of them: equal ones stay equal, and no guess can be tested without the key.

    Args:
        secret: key, up to 64 bytes.
    """
    return b"".join([_keyed_name(secret, name) for name in split_hashes(packed)])


@lru_cache(maxsize=1 << 16)  # a block is recorded with its request, its answer and its storage, and with later turns
def _keyed_name(secret: bytes, name: bytes) -> bytes:
    return blake2b(name, digest_size=HASH_BYTES, key=secret).digest()


def split_hashes(packed: bytes) -> list[bytes]:
    """Split packed hashes into one `bytes` object per block."""
    # Four times as fast as slicing, which counts in a routing decision.
    return list(_unpacker(len(packed) // HASH_BYTES)(packed))


@lru_cache(maxsize=1024)  # prompts have many lengths, and the cache of `struct.unpack` is emptied at a hundred
def _unpacker(num_hashes: int) -> Callable[[bytes], tuple[bytes, ...]]:
    return struct.Struct(f"{HASH_BYTES}s" * num_hashes).unpack


def hash_text(key: bytes, text: bytes, block_bytes: int) -> bytes:
    """Hash the full blocks of a prompt whose tokens are not known, packed, HASH_BYTES each.

    As with token blocks, a hash covers everything before its block, under `key`. One hash runs over the whole text and
    is read at each block border, which costs a third of hashing each block with its parent. Hashes of token blocks and
    of text blocks never match.

    Args:
        key: from `hash_key`.
        text: the prompt, in UTF-8.
        block_bytes: bytes of one block.
    """
    running = blake2b(key=key, digest_size=HASH_BYTES)
    add, name = running.update, running.digest
    whole = memoryview(text)[: len(text) // block_bytes * block_bytes]
    # The reader of a struct cuts the blocks faster than slices do. Each is added (`add` returns None), then read.
    return b"".join([name() for (block,) in struct.iter_unpack(f"{block_bytes}s", whole) if add(block) is None])


class BlockRun:
    """Consecutive blocks of prompts: a prompt with one of them has all of them.

    Attributes:
        parent: the run before this one. None means that prompts begin with this run.
        blocks: packed names of the blocks.
        depth: number of blocks of a prompt up to the end of this run.
        counts: prompts that contain this run, by holder.
        holders: bit mask of the same holders.
    """

    __slots__ = ("blocks", "counts", "depth", "holders", "parent")

    def __init__(self, parent: BlockRun | None, blocks: bytes, counts: dict[int, int], holders: int) -> None:
        self.parent = parent
        self.blocks = blocks
        self.depth: int = (parent.depth if parent else 0) + len(blocks) // HASH_BYTES
        self.counts = counts
        self.holders = holders

    def hashes(self) -> bytes:
        """Packed names of all blocks of a prompt that ends with this run."""
        runs, run = [], self.parent
        while run is not None:
            runs.append(run.blocks)
            run = run.parent
        return b"".join(reversed(runs)) + self.blocks


class PrefixTree:
    """Prompts of several holders, which are small integers.

    The last run identifies an added prompt, and continues to do so when runs are cut.

    Attributes:
        num_blocks, num_runs: distinct blocks and runs in the prompts of each holder.
    """

    def __init__(self) -> None:
        self.num_blocks: defaultdict[int, int] = defaultdict(int)
        self.num_runs: defaultdict[int, int] = defaultdict(int)
        self._runs: dict[bytes, BlockRun] = {}
        self._sought: bytes | None = None  # prompt of the last `find`, while what it found holds
        self._found: tuple[BlockRun | None, int] = (None, 0)

    def __len__(self) -> int:
        """Runs."""
        return len(self._runs)

    def find(self, hashes: bytes) -> tuple[BlockRun | None, int]:
        """Find the longest prefix that a prompt shares with any prompt of the tree.

        Returns:
            The last run of the prefix, and the number of its blocks, which may end within that run. (None, 0) means
            that no prefix is shared.
        """
        if hashes is not self._sought:  # a prompt is sought before it is routed, and again when it is added
            self._found = self._find(hashes)
            self._sought = hashes
        return self._found

    def _find(self, hashes: bytes) -> tuple[BlockRun | None, int]:
        get, last, at, end = self._runs.get, None, 0, len(hashes)
        while at < end:
            run = get(hashes[at : at + HASH_BYTES])
            # A name with another parent than before is no hash of `core.hashing`, and is treated as unknown.
            if run is None or run.parent is not last:
                break
            last = run
            if not hashes.startswith(run.blocks, at):
                return run, at // HASH_BYTES + num_common(run.blocks, hashes, at)
            at += len(run.blocks)
        return last, at // HASH_BYTES

    def add(self, holder: int, hashes: bytes) -> BlockRun | None:
        """Add a prompt of `holder`. Returns the last run; None means that the prompt has no block."""
        last, num_blocks = self.find(hashes)
        self._sought = None
        if last is not None and num_blocks < last.depth:
            last = self._cut(last, num_blocks)
        rest = hashes[num_blocks * HASH_BYTES :]
        if rest and rest[:HASH_BYTES] not in self._runs:
            last = self._runs[rest[:HASH_BYTES]] = BlockRun(last, rest, {}, 0)
        run, bit = last, 1 << holder
        while run is not None:
            counts = run.counts
            if holder in counts:
                counts[holder] += 1
            else:
                counts[holder] = 1
                run.holders |= bit
                self.num_blocks[holder] += len(run.blocks) // HASH_BYTES
                self.num_runs[holder] += 1
            run = run.parent
        return last

    def drop(self, holder: int, last: BlockRun) -> None:
        """Remove one prompt of `holder`, whose last run is `last`."""
        run: BlockRun | None = last
        while run is not None:
            counts = run.counts
            if counts[holder] > 1:
                counts[holder] -= 1
            else:
                del counts[holder]
                self.num_blocks[holder] -= len(run.blocks) // HASH_BYTES
                self.num_runs[holder] -= 1
                if counts:
                    run.holders ^= 1 << holder
                else:
                    del self._runs[run.blocks[:HASH_BYTES]]
                    if run is self._found[0]:  # runs before it go after it, and no other run matters to what was found
                        self._sought = None
            run = run.parent

    def _cut(self, run: BlockRun, depth: int) -> BlockRun:
        """Cut a run in two at `depth`, and return the first part, which is a new object.

        The second part stays the same object, so that prompts and later runs keep their references.
        """
        at = len(run.blocks) - (run.depth - depth) * HASH_BYTES
        head = BlockRun(run.parent, run.blocks[:at], run.counts.copy(), run.holders)
        run.parent, run.blocks = head, run.blocks[at:]
        self._runs[head.blocks[:HASH_BYTES]] = head
        self._runs[run.blocks[:HASH_BYTES]] = run
        for holder in run.counts:
            self.num_runs[holder] += 1
        return head


class _LastCommon:
    """The prompt of the last comparison, and its number of blocks before it left what it was compared with."""

    prompt = b""
    depth = 0


def num_common(blocks: bytes, hashes: bytes, at: int) -> int:
    """Return how many leading blocks of `blocks` stand in `hashes` at byte `at`; not all of them do.

    A prompt is compared with several trees, and mostly leaves all of them at the block at which it is new. So the
    search begins where the last one for the same prompt ended.
    """
    same, more = 0, min(len(blocks), len(hashes) - at) // HASH_BYTES
    middle = _LastCommon.depth - at // HASH_BYTES
    if hashes is _LastCommon.prompt and 0 < middle < more and hashes.startswith(blocks[: middle * HASH_BYTES], at):
        same = middle
        if not hashes.startswith(blocks[: (middle + 1) * HASH_BYTES], at):
            return same
    while same < more:  # `same` blocks match, and more than `more` do not
        middle = (same + more + 1) // 2
        if hashes.startswith(blocks[: middle * HASH_BYTES], at):
            same = middle
        else:
            more = middle - 1
    _LastCommon.prompt, _LastCommon.depth = hashes, at // HASH_BYTES + same
    return same
