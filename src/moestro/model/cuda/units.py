"""A step's units as the kernels of attention read them: what each program computes is planned once, for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moestro.model.attention import AttentionForm
from moestro.model.cuda.tiles import NARROW_ROWS, SPLIT, WIDE_QUERIES, WIDE_ROWS
from moestro.model.step import Int64s, PagedStep

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
