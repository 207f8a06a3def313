"""Sizes of tiles: how much of a product or of an attention one program computes.

They change no bit: the order of a sum depends on SPLIT and on `num_segments` alone, which know neither rows nor tiles.
The sizes were measured with Qwen3-30B-A3B on an H100 (docs/gpu_kernels.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SPLIT = 256  # keys that are reduced by themselves
NARROW_ROWS, WIDE_ROWS = 16, 64  # rows (queries times heads) of a tile of attention: of decodes, and of chunks
WIDE_QUERIES = 16  # new tokens from which a unit is a chunk
MOST_PARTS_ROWS = 128  # rows up to which the segments of a product have programs of their own

_SEGMENT_PROGRAMS = 132  # one for each multiprocessor of an H100
_LEAST_SEGMENT = 128  # numbers of k


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of a product: rows, outputs, and numbers of k that are loaded at once, on so many warps and stages."""

    tokens: int
    outs: int
    depth: int
    num_warps: int
    num_stages: int

    @property
    def launch_options(self) -> dict[str, int]:
        """Options of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


_DENSE = (
    (16, Tile(16, 64, 128, 4, 5)),
    (32, Tile(32, 64, 128, 4, 4)),
    (64, Tile(64, 64, 64, 4, 4)),
    (256, Tile(128, 64, 64, 8, 4)),
    (0, Tile(128, 128, 64, 8, 4)),
)
_EXPERTS = (
    (16, Tile(16, 64, 128, 4, 4)),
    (32, Tile(32, 64, 64, 4, 5)),
    (64, Tile(64, 64, 64, 4, 3)),
    (0, Tile(128, 128, 64, 8, 3)),
)
_FEW_QUERIES = 8  # of a step: the programs of attention do not fill the device, and each should be fast


def dense_tile(num_rows: int, dtype: torch.dtype) -> Tile:
    """Tile of a dense product of so many rows."""
    return _choose(_DENSE, num_rows, dtype)


def expert_tile(rows_of_expert: float, dtype: torch.dtype) -> Tile:
    """Tile of experts that have so many rows each on average."""
    return _choose(_EXPERTS, rows_of_expert, dtype)


def _choose(tiles: tuple[tuple[int, Tile], ...], num_rows: float, dtype: torch.dtype) -> Tile:
    tile = next(tile for most, tile in tiles if num_rows <= most or not most)
    if dtype.itemsize <= 2:
        return tile
    # Wider numbers have no matrix instruction that keeps their bits, and fill the shared memory sooner.
    return Tile(min(tile.tokens, 32), 64, 32, 4, 2)


def attention_keys(key_size: int, dtype: torch.dtype) -> int:
    """Keys of a tile of attention. They are part of the order of a sum: the shape of the heads alone decides."""
    if dtype.itemsize > 2 or key_size > 256:
        return 32
    return 64


def attention_options(num_rows: int, num_queries: int, key_size: int, dtype: torch.dtype) -> dict[str, int]:
    """Options of a launch with tiles of so many rows, in a step of so many queries."""
    if num_rows == NARROW_ROWS and dtype.itemsize <= 2 and key_size <= 128:
        return {"num_warps": 4 if num_queries <= _FEW_QUERIES else 2, "num_stages": 3}
    return {"num_warps": 4, "num_stages": 2}


def num_segments(num_out: int, num_in: int) -> int:
    """Segments into which the sum over k is cut: so many that a decode has enough programs. The shape alone decides."""
    blocks, found = -(-num_out // 64), 1
    while (
        blocks * found * 2 <= _SEGMENT_PROGRAMS
        and num_in % (found * 2 * 16) == 0
        and num_in // (found * 2) >= _LEAST_SEGMENT
    ):
        found *= 2
    return found
