"""Hashes of KV blocks: one keyed hash chain for engine, router index and traces.

A block's hash covers its tokens and, through its parent's hash, all tokens before it. The key separates models,
adapters and salts, so that a tenant with its own salt can neither hit nor probe another tenant's blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16
ROOT = bytes(HASH_BYTES)  # parent of a prompt's first block
_TOKEN = np.dtype("<i4")


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
        encoded = b"" if part is None else part.encode()
        digest.update(f"{-1 if part is None else len(encoded)}:".encode() + encoded)
    return digest.digest()


def name_key(name: str | None) -> int:
    """A number that identifies `name`, the same in every process; 0 for None."""
    return 0 if name is None else int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


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
    add, name, names = running.update, running.digest, []
    for start in range(0, len(text) - block_bytes + 1, block_bytes):
        add(text[start : start + block_bytes])
        names.append(name())
    return b"".join(names)
