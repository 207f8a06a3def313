"""Sizes of tiles: how much of a product or of an attention one program computes.

They change no bit: the order of a sum depends on SPLIT and on `num_segments` alone, which know neither rows nor tiles.
The sizes were the fastest of some that were tried with Qwen3-30B-A3B's shapes on an H100
(`bench/micro/gpu_tiles.py` compares others).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

SPLIT = 256  # keys that are reduced by themselves
NARROW_ROWS, WIDE_ROWS = 16, 64  # rows (queries times heads) of a tile of attention: of decodes, and of chunks
WIDE_QUERIES = 16  # new tokens from which a unit is a chunk
MOST_PARTS_ROWS = 128  # rows up to which the segments of a product have programs of their own

_SEGMENT_PROGRAMS = 132  # one for each multiprocessor of an H100
_LEAST_SEGMENT = 128  # numbers of k
_LEAST_DEPTH = 16  # of a matrix instruction
# Shared memory of a program by compute capability; GPUs of desks have the least.
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED_KIB = 99
_GROUP_PRODUCT_SHARED_KIB = 227  # of GPUs whose matrix instructions belong to a group of four warps


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of a product: rows, outputs, and numbers of k that are loaded at once, on so many warps and stages.

    `tail`: rows of the narrower tile that an expert's last rows get if they fit; 0 means no such tile.
    """

    tokens: int
    outs: int
    depth: int
    num_warps: int
    num_stages: int
    tail: int = 0

    @property
    def launch_options(self) -> dict[str, int]:
        """Options of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def depth_of(self, length: int) -> int:
        """Numbers of k that are loaded at once where the sum is over so many: at least two loads make the sum.

        The compiler joins a product of one load with the number that is added to it, in another order.
        """
        return min(self.depth, max(power_of_two(-(-length // 2)), _LEAST_DEPTH))

    def within(self, shared_bytes: int, num_weights: int) -> Tile:
        """Return the tile with as many stages as fit, each of which loads rows and so many weights of two bytes."""
        stage_bytes = self.depth * (self.tokens + num_weights * self.outs) * 2
        return replace(self, num_stages=max(min(self.num_stages, shared_bytes // stage_bytes), 1))


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
    (64, Tile(64, 64, 64, 4, 3, tail=16)),
    (0, Tile(128, 128, 64, 8, 3, tail=32)),
)
# Rows of the tiles of float8 weights: on an H100 some of the 2,048 rows of a test got other bits from a tile of 128.
MOST_FLOAT8_ROWS = 64
_MOST_STAGED_BYTES = 2048  # of a key, of which two tiles fit the shared memory
_FEW_QUERIES = 8  # of a step: the programs of attention do not fill the device, and each should be fast


def dense_tile(num_rows: int, dtype: torch.dtype, shared_bytes: int) -> Tile:
    """Tile of a dense product of so many rows, in a program that may have so much shared memory."""
    return _choose(_DENSE, num_rows, dtype).within(shared_bytes, 1)


def expert_tile(rows_of_expert: float, dtype: torch.dtype, shared_bytes: int) -> Tile:
    """Tile of experts that have so many rows each on average, in a program that may have so much shared memory."""
    return _choose(_EXPERTS, rows_of_expert, dtype).within(shared_bytes, 2)  # gate and up


def shared_bytes_of(device: torch.device) -> int:
    """Shared memory that a program on `device` may have, in bytes."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return _SHARED_KIB.get(capability, _LEAST_SHARED_KIB) << 10


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


def attention_options(
    num_rows: int, num_queries: int, key_size: int, dtype: torch.dtype, shared_bytes: int
) -> dict[str, int]:
    """Options of a launch with tiles of so many rows, in a step of so many queries; `shared_bytes` as in `dense_tile`.

    The fewest warps that hold a tile without spilling a register, as `tools/kernel_table.py` shows.
    """
    # Without products of whole warp groups, which read operands from shared memory, tiles take more registers.
    is_tight = shared_bytes < _GROUP_PRODUCT_SHARED_KIB << 10
    if num_rows == NARROW_ROWS and dtype.itemsize <= 2 and key_size <= 128:
        return {"num_warps": 4 if is_tight or num_queries <= _FEW_QUERIES else 2, "num_stages": 3}
    num_stages = 2 if key_size * dtype.itemsize <= _MOST_STAGED_BYTES else 1
    is_large = key_size > 128 or (is_tight and num_rows > NARROW_ROWS)  # four warps do not hold it
    return {"num_warps": 8 if is_large else 4, "num_stages": num_stages}


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
