"""The hidden future of a replayed request. Priced and paced devices hold it; no scheduler and no policy sees it."""

from __future__ import annotations

from dataclasses import dataclass

from moestro.core.hashing import HASH_BYTES


@dataclass(frozen=True, slots=True)
class Script:
    """What a request of a trace will turn out to be.

    Attributes:
        num_output_tokens: tokens after which it ends, at least 1 (its `max_tokens` may end it earlier).
        block_hashes: HASH_BYTES for each block that its answer completes, packed, in order, beginning with the one that
            holds the prompt's last tokens if that one is not full; may end early, where the trace knows no more.
    """

    num_output_tokens: int
    block_hashes: bytes = b""

    def __post_init__(self) -> None:
        if self.num_output_tokens < 1:
            raise ValueError(f"num_output_tokens must be at least 1, got {self.num_output_tokens}")
        if len(self.block_hashes) % HASH_BYTES:
            raise ValueError(f"block_hashes holds {len(self.block_hashes)} bytes, not a multiple of {HASH_BYTES}")
