"""Future of a replayed request. No policy sees it."""

from __future__ import annotations

import msgspec

from moestro.core.hashing import HASH_BYTES


class Script(msgspec.Struct, frozen=True, gc=False):
    """Answer of a traced request: its length, and the hashes of the blocks that it completes.

    Attributes:
        num_output_tokens: tokens after which the request ends, at least 1; `max_tokens` may end it earlier.
        block_hashes: packed, HASH_BYTES for each block that the answer completes, in order. The first is the block of
            the prompt's last tokens, if it is partial. The list ends early where the trace knows no more.
        request_key: key of the request (`core.token_keys`), which decides the experts that its tokens visit. None
            means a key from its serial number, which differs between engines.
    """

    num_output_tokens: int
    block_hashes: bytes = b""
    request_key: int | None = None

    def __post_init__(self) -> None:
        if self.num_output_tokens < 1:
            raise ValueError(f"num_output_tokens must be at least 1, got {self.num_output_tokens}")
        if len(self.block_hashes) % HASH_BYTES:
            raise ValueError(f"block_hashes holds {len(self.block_hashes)} bytes, not a multiple of {HASH_BYTES}")
