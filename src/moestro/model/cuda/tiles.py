"""What each program of a kernel computes: sizes of tiles, a step's units as attention reads them, and launches.

Sizes of tiles change no bit: the order of a sum depends on SPLIT and on `num_segments` alone, which know neither rows
nor tiles. The sizes were the fastest of some that were tried with Qwen3-30B-A3B's shapes on an H100
(`bench/micro/gpu_tiles.py` compares others).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro.model.attention import AttentionForm
from moestro.model.step import Int64s, PagedStep

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


Int32s = NDArray[np.int32]
_LONGEST_WIDE_VALUE = 256


@dataclass(frozen=True, slots=True)
class Walk:
    """How queries walk over their keys.

    Attributes:
        window: Tokens that a query attends to, itself included; None means all before it.
        num_shared: Query heads of a KV head.
        widest: Rows of the tiles of chunks.
    """

    window: int | None
    num_shared: int
    widest: int = WIDE_ROWS

    @classmethod
    def of(cls, form: AttentionForm) -> Walk:
        """Return the walk of an attention. Where values are long, a wide tile's sums would not fit the registers."""
        widest = WIDE_ROWS if form.value_size <= _LONGEST_WIDE_VALUE else NARROW_ROWS
        return cls(form.scoring.window, form.num_heads // form.num_kv_heads, widest)

    def heads_of(self, num_rows: int) -> int:
        """Query heads of a KV head that a tile of so many rows takes."""
        return min(self.num_shared, num_rows)

    def queries_of(self, num_rows: int) -> int:
        """Queries of a unit that such a tile takes."""
        return num_rows // self.heads_of(num_rows)


@dataclass(frozen=True, slots=True, eq=False)
class WalkPlan:
    """Work of the programs of one walk.

    Attributes:
        narrow, wide: int32[items, 4], as in `attend`: of tiles of NARROW_ROWS and `Walk.widest` rows.
    """

    narrow: Int32s
    wide: Int32s


def plan_walk(walk: Walk, num_new: Int64s, length: Int64s, table: Int64s) -> WalkPlan:
    """Plan a step.

    Args:
        walk: How queries walk.
        num_new: int64[units], tokens of the step.
        length: int64[units], tokens of the sequence, those of the step included.
        table: int64[units], where the unit's block table begins.
    """
    unit = np.arange(len(num_new))
    oldest = np.zeros_like(length) if walk.window is None else np.maximum(length - walk.window, 0)
    first_split, end_split = oldest // SPLIT, -(-length // SPLIT)
    is_wide = num_new >= WIDE_QUERIES
    is_split = (num_new == 1) & (end_split - first_split > 1)
    split_units = unit[is_split]
    num_splits = (end_split - first_split)[is_split]
    of_split, within = _spread(num_splits)
    splits = np.stack(
        [split_units[of_split], np.zeros_like(within), first_split[is_split][of_split] + within,
         table[is_split][of_split]], axis=1,
    )  # fmt: skip
    whole = _queries(unit[~is_split & ~is_wide], num_new, table, walk.queries_of(NARROW_ROWS))
    wide = _queries(unit[is_wide], num_new, table, walk.queries_of(walk.widest))
    narrow = np.concatenate([splits, whole])
    return WalkPlan(narrow.astype(np.int32), wide.astype(np.int32))


def _spread(counts: Int64s) -> tuple[Int64s, Int64s]:
    """(group, place within it) of each member of groups of so many."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (counts.cumsum() - counts)[group]


def _queries(units: Int64s, num_new: Int64s, table: Int64s, at_once: int) -> Int64s:
    """Items that walk all splits, those with most keys first, so that the last programs are short."""
    which, within = _spread(-(-num_new[units] // at_once))
    columns = (units[which], within * at_once, np.full(len(which), -1), table[units][which])
    items: Int64s = np.stack(columns, axis=1)[::-1]
    return items


@dataclass(frozen=True, slots=True, eq=False)
class WalkUnits:
    """A `WalkPlan` on the device.

    Attributes:
        narrow, wide: As in `WalkPlan`; of a graph with room for more. Nothing is launched for an empty one.
        counts: int32[2], the number of each that are there.
    """

    narrow: Tensor
    wide: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepUnits:
    """A step's units on the device, which all layers read.

    Attributes:
        num_rows: int32[1], rows of the step that are there.
        row_of, length_of, tables: As in `attend`.
        walks: Plans of all walks of the network.
        may_split: Whether a decode may have several splits.
    """

    num_rows: Tensor
    row_of: Tensor
    length_of: Tensor
    tables: Tensor
    walks: dict[Walk, WalkUnits]
    may_split: bool


def columns_of(step: PagedStep, walks: Sequence[Walk]) -> Iterator[Int32s]:
    """Yield the arrays of `StepUnits` in order: number of rows, rows, lengths, then those of each walk, and tables."""
    tables = step.units.block_tables
    table = np.arange(len(tables)) * tables.shape[1]
    yield np.array([len(step.positions)], np.int32)
    yield np.concatenate([np.zeros(1, np.int32), step.end_row_of.astype(np.int32)])
    yield step.length_of.astype(np.int32)
    for walk in walks:
        plan = plan_walk(walk, step.num_tokens_of, step.length_of, table)
        yield np.array([len(plan.narrow), len(plan.wide)], np.int32)
        yield from (plan.narrow, plan.wide)
    yield np.ascontiguousarray(tables, np.int32)


def assemble(walks: Sequence[Walk], columns: Iterator[Tensor], longest: int) -> StepUnits:
    """Make `StepUnits` of the columns on the device. `longest`: tokens that no sequence passes."""
    num_rows, row_of, length_of = (next(columns) for _ in range(3))
    found = {}
    for walk in walks:
        counts, narrow, wide = (next(columns) for _ in range(3))
        found[walk] = WalkUnits(narrow, wide, counts)
    return StepUnits(num_rows, row_of, length_of, next(columns), found, longest > SPLIT)


Grid = tuple[int, ...]

_FIRST_AHEAD = (9, 0)  # compute capability
_ahead = False


def launch(kernel: Any, grid: Grid, *args: Any, **options: Any) -> None:
    """Queue a kernel on the current stream of the current device.

    Products and sums stay separate instructions: a compiler would fuse them in one kernel and not in another, and a
    request's bits would depend on which kernel computed it.

    Args:
        kernel: A function of `triton.jit`.
        grid: Number of programs along each axis.
        args: Its arguments in order. Tensors stand for their addresses.
        options: Its compile-time arguments, and `num_warps` and `num_stages`.
    """
    _launcher(kernel, grid, args, {**options, "AHEAD": _ahead})


@contextmanager
def launching_ahead() -> Iterator[None]:
    """Let kernels start before those before them are done, as in `source.launches`, where the GPU can do this.

    All that is uploaded for them must have been there when the first of them was launched.
    """
    global _ahead  # noqa: PLW0603 the one state of the one place where kernels are launched
    before, _ahead = _ahead, _can_start_ahead()
    try:
        yield
    finally:
        _ahead = before


def _can_start_ahead() -> bool:
    is_compiled = os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available()
    return is_compiled and torch.cuda.get_device_capability() >= _FIRST_AHEAD


def launch_now(kernel: Any, grid: Grid, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Launch a kernel, as `launch` does unless another function replaces it."""
    kernel[grid](*args, enable_fp_fusion=False, **({"launch_pdl": True} if options["AHEAD"] else {}), **options)


Launcher = Callable[[Any, Grid, tuple[Any, ...], dict[str, Any]], None]
_launcher: Launcher = launch_now


def replace_launcher(launcher: Launcher | None) -> Launcher:
    """Let another function launch kernels, such as one that counts. Returns the one before; None restores the first."""
    global _launcher
    before, _launcher = _launcher, launcher or launch_now
    return before
