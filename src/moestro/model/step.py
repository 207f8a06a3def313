"""A step's units as the tensors that all layers share. NumPy builds everything, without a Python object per token.

Units lie end to end in one row of tokens. The slots that each token's K and V go to, and the slots that each query
reads, depend only on the block tables. They are computed once a step (once per window, where layers differ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro.core.work import FROM_STEP_BEFORE, LOGITS_LAST, LOGITS_PROMPT, Units
from moestro.model.pools import KVPools
from moestro.model.upload import upload, upload_all

Int64s = NDArray[np.int64]
_T = TypeVar("_T", bound=np.generic)

# A long chunk is attended in pieces of at most so many queries and query-key pairs: masks stay small, and keys behind a
# whole piece are not touched.
_MAX_PIECE_QUERIES, _MIN_PIECE_QUERIES, _MAX_PIECE_PAIRS = 512, 16, 1 << 20
# One-token units are attended in groups whose K and V are copied out of the pools, padded to the longest. This bounds a
# group's copies (8 KV heads of 128 in bfloat16: 256 MiB); a unit that reads more is a separate group. A CPU is up to
# four times faster on copies of a few MiB than on large ones; on an accelerator many small calls cost launches.
_MAX_GROUP_SLOTS, _MAX_GROUP_SLOTS_ON_CPU = 1 << 16, 1 << 12


@dataclass(frozen=True, slots=True)
class Reach:
    """Keys that a layer's queries attend to besides their own.

    Attributes:
        window: tokens, the query's own included; None means everything before it.
        has_sink: whether one extra key, of zeros, follows the others.
    """

    window: int | None
    has_sink: bool


@dataclass(frozen=True, slots=True, eq=False)
class DecodeView:
    """Reads of a group of one-token units, padded to the longest.

    Attributes:
        rows: int64[units], their rows in the step, or None where the group is the whole step.
        slots: int64[units, width]; padding repeats a slot of the same sequence; a sink has the last column.
        allowed: bool[units, 1, 1, width], keys that the query may attend to.
    """

    rows: Tensor | None
    slots: Tensor
    allowed: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PieceView:
    """Reads of consecutive queries of one longer unit.

    Attributes:
        first_row, end_row: range of their rows in the step.
        slots: int64[width]; a sink has the last one.
        allowed: bool[1, 1, queries, width].
    """

    first_row: int
    end_row: int
    slots: Tensor
    allowed: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepView:
    """All reads of a step under one reach."""

    decode: tuple[DecodeView, ...]
    pieces: tuple[PieceView, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """Tokens of a launched step, on its device.

    Attributes:
        slots: int64[n], slots of the units that sampled them.
        tokens: int64[n], negative where there is none.
    """

    slots: Int64s
    tokens: Tensor

    def of(self, slots: Int64s, device: torch.device) -> Tensor:
        """Return the tokens of `slots`, int64[m], without waiting on the host. Where there is none, any token id."""
        if not np.array_equal(slots, self.slots):  # else these are all in order, as in most steps
            in_order = self.slots.argsort()
            rows = in_order[self.slots.searchsorted(slots, sorter=in_order)]
            return self.tokens[upload(rows, device)].clamp_(min=0)
        return self.tokens.clamp(min=0)


class StepLayout:
    """A step's units as kernels read them. All arrays are contiguous.

    Attributes:
        tables: int32[units, blocks], block tables.
        rows: int64[units + 1], first row of each unit, and the number of rows.
        lengths: int64[units], tokens of each unit's sequence, those of the step included.
        addresses: addresses of the three.
    """

    def __init__(self, units: Units, end_row_of: Int64s, length_of: Int64s) -> None:
        self.tables = np.ascontiguousarray(units.block_tables, np.int32)
        self.rows = np.concatenate([np.zeros(1, np.int64), end_row_of])
        self.lengths = length_of.astype(np.int64)
        self.addresses = (self.tables.ctypes.data, self.rows.ctypes.data, self.lengths.ctypes.data)


class PagedStep:
    """One step over some units.

    Args:
        units: units with token ids; `block_tables` must cover every position that they read or write.
        pools: their KV cache.
        device: device of the tensors.

    Attributes:
        positions: int64[tokens], as `position_ids`, on the host.
        token_ids: int32[tokens], as `input_ids`, on the host.
        kernel_units: what a kernel keeps of the step while layers share it.
    """

    def __init__(self, units: Units, pools: KVPools, device: torch.device) -> None:
        assert units.token_ids is not None, "a network cannot run a trace that carries no token ids"
        self.units = units
        self.pools = pools
        self._device = device
        self.num_tokens_of = units.num_tokens.astype(np.int64)
        self.length_of = units.start + self.num_tokens_of
        self.token_ids = units.token_ids
        self._is_decode = len(self.token_ids) == len(units)  # one token of each unit, as in most steps
        if self._is_decode:
            row_ends = np.arange(len(units) + 1)
            self.first_row_of, self.end_row_of = row_ends[:-1], row_ends[1:]
            self.positions = units.start.astype(np.int64)
        else:
            self.end_row_of = self.num_tokens_of.cumsum()
            self.first_row_of = self.end_row_of - self.num_tokens_of
            first_positions = np.repeat(units.start - self.first_row_of, self.num_tokens_of)
            self.positions = np.arange(self.end_row_of[-1]) + first_positions
        self.kernel_units: Any = None
        self._uploaded: list[Tensor] | None = None
        self._from_before: tuple[Int64s, Int64s, Tensor] | None = None  # rows, their units, and the tokens
        self._views: dict[Reach, StepView] = {}

    def fill_tokens(self, before: SampledTokens) -> None:
        """Take FROM_STEP_BEFORE among the token ids from the step launched before, without waiting on the host."""
        rows = np.flatnonzero(self.token_ids == FROM_STEP_BEFORE)
        if not len(rows):
            return
        unit = rows if self._is_decode else np.searchsorted(self.end_row_of, rows, side="right")
        self._from_before = rows, unit, before.of(self.units.slot[unit], self._device)

    def write_tokens(self, ids: Tensor) -> None:
        """Write the tokens of `fill_tokens` to their places in `ids`, int64[tokens or more]."""
        if self._from_before is None:
            return
        rows, _, tokens = self._from_before
        if len(rows) == len(self.token_ids):
            ids[: len(rows)].copy_(tokens)
        else:
            ids.index_copy_(0, self.upload(rows), tokens)

    def tokens_before(self, units: Int64s) -> Tensor | None:
        """The token that each of `units` has from the step before; None where no unit of the step has one.

        Args:
            units: int64[n], ascending, all units whose logits are wanted.

        Returns:
            int64[n], -1 for a unit whose tokens the host had.
        """
        if self._from_before is None:
            return None
        _, own, tokens = self._from_before
        if len(own) == len(units):
            return tokens
        found = torch.full((len(units),), -1, dtype=torch.int64, device=self._device)
        return found.index_copy_(0, self.upload(np.searchsorted(units, own)), tokens)

    # Cached properties: the front part alone reads the ids, and the sampler's stage needs no slots.
    @cached_property
    def input_ids(self) -> Tensor:
        """int64[1, tokens]."""
        ids = self._find(0, lambda: self.token_ids.astype(np.int64))
        self.write_tokens(ids)
        return ids[None]

    @cached_property
    def position_ids(self) -> Tensor:
        """int64[1, tokens]."""
        return self._find(1, lambda: self.positions)[None]

    @cached_property
    def write_slots(self) -> Tensor:
        """int64[tokens], destination of each token's K and V."""
        return self._find(2, self._slots_to_write)

    @cached_property
    def logit_row_ids(self) -> Tensor:
        """int64[rows], `logit_rows` on the device."""
        return self._find(3, lambda: self.logit_rows)

    def place(self, columns: list[Tensor], kernel_units: Any) -> None:
        """Let `row_columns` and what the kernels keep of the step be in memory that is already on the device."""
        self._uploaded, self.kernel_units = columns, kernel_units

    def row_columns(self) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Token ids, positions, slots to write and rows with requested logits, on the host."""
        return self.token_ids.astype(np.int64), self.positions, self._slots_to_write(), self.logit_rows

    def _find(self, place: int, make: Callable[[], Int64s]) -> Tensor:
        """Upload one of `row_columns`: on a CPU by itself, to an accelerator with all others in one copy."""
        if self._uploaded is None:
            if self._device.type == "cpu":
                return self.upload(make())
            self._uploaded = upload_all(self.row_columns(), self._device)
        return self._uploaded[place]

    @cached_property
    def layout(self) -> StepLayout:
        """Units on the host, for kernels."""
        return StepLayout(self.units, self.end_row_of, self.length_of)

    @cached_property
    def logit_rows(self) -> Int64s:
        """Rows with requested logits, ascending."""
        if self._is_decode:
            return np.flatnonzero(self.units.logits)
        wanted = np.repeat(self.units.logits & LOGITS_PROMPT != 0, self.num_tokens_of)
        wanted[self.end_row_of[self.units.logits & LOGITS_LAST != 0] - 1] = True
        return np.flatnonzero(wanted)

    @property
    def windows(self) -> set[int | None]:
        """Windows that some layer has requested."""
        return {reach.window for reach in self._views}

    def view(self, reach: Reach) -> StepView:
        """Reads of each query under `reach`."""
        if reach not in self._views:
            self._views[reach] = StepView(tuple(self._decode_views(reach)), tuple(self._piece_views(reach)))
        return self._views[reach]

    def upload(self, array: NDArray[np.generic]) -> Tensor:
        """Copy `array` to the step's device, without waiting on the host."""
        return upload(array, self._device)

    def _slots_to_write(self) -> Int64s:
        unit = self.first_row_of if self._is_decode else np.repeat(np.arange(len(self.units)), self.num_tokens_of)
        block, offset = np.divmod(self.positions, self.pools.block_size)
        slots: Int64s = self.units.block_tables[unit, block].astype(np.int64) * self.pools.block_size + offset
        slots[self.positions < self.units.write_start[unit]] = self.pools.scratch_slot
        return slots

    def _decode_views(self, reach: Reach) -> Iterator[DecodeView]:
        units, size = np.flatnonzero(self.num_tokens_of == 1), self.pools.block_size
        end = self.length_of[units]
        begin = np.maximum(end - (reach.window or end), 0)
        most = _MAX_GROUP_SLOTS_ON_CPU if self._device.type == "cpu" else _MAX_GROUP_SLOTS
        for group in _group(-(-end // size) - begin // size, most // size):
            yield self._decode_view(reach, units[group], begin[group], end[group])

    def _decode_view(self, reach: Reach, units: Int64s, begin: Int64s, end: Int64s) -> DecodeView:
        positions, slots = self._slots_to_read(units, begin, end)
        allowed = (positions >= begin[:, None]) & (positions < end[:, None])
        # Padding reads the unit's own newest slot, so that another sequence's leftovers (such as a NaN) cannot enter.
        newest = slots[np.arange(len(units)), end - 1 - positions[:, 0]]
        slots = np.where(allowed, slots, newest[:, None])
        rows = None if len(units) == len(self.units) else self.upload(self.first_row_of[units])
        slots, allowed = self._add_sink(reach, slots, allowed)
        return DecodeView(rows, self.upload(slots), self.upload(allowed)[:, None, None])

    def _piece_views(self, reach: Reach) -> Iterator[PieceView]:
        for unit in np.flatnonzero(self.num_tokens_of > 1).tolist():
            end = int(self.length_of[unit])
            num_queries = min(max(_MAX_PIECE_PAIRS // end, _MIN_PIECE_QUERIES), _MAX_PIECE_QUERIES)
            for begin in range(int(self.units.start[unit]), end, num_queries):
                yield self._piece_view(reach, unit, np.arange(begin, min(begin + num_queries, end)))

    def _piece_view(self, reach: Reach, unit: int, queries: Int64s) -> PieceView:
        end = int(queries[-1]) + 1
        begin = max(int(queries[0]) + 1 - (reach.window or end), 0)
        positions, slots = self._slots_to_read(np.array([unit]), np.array([begin]), np.array([end]))
        inside = (positions[0] >= begin) & (positions[0] < end)
        keys, slots = positions[0, inside], slots[0, inside]
        allowed = (keys <= queries[:, None]) & (keys > queries[:, None] - (reach.window or end))
        slots, allowed = self._add_sink(reach, slots, allowed)
        first_row = int(self.first_row_of[unit] + queries[0] - self.units.start[unit])
        return PieceView(first_row, first_row + len(queries), self.upload(slots), self.upload(allowed)[None, None])

    def _add_sink(self, reach: Reach, slots: Int64s, allowed: NDArray[np.bool_]) -> tuple[Int64s, NDArray[np.bool_]]:
        if not reach.has_sink:
            return slots, allowed
        return _append(slots, self.pools.zero_slot), _append(allowed, fill=True)

    def _slots_to_read(self, units: Int64s, begin: Int64s, end: Int64s) -> tuple[Int64s, Int64s]:
        """Positions and slots, int64[units, width], of the whole blocks that cover begin .. end - 1 of each unit."""
        size = self.pools.block_size
        first_block = begin // size
        blocks = first_block[:, None] + np.arange((-(-end // size) - first_block).max())
        # Columns past a shorter unit's last block are ignored, but must exist.
        known = self.units.block_tables
        tables = known[units[:, None], np.minimum(blocks, known.shape[1] - 1)].astype(np.int64)
        within = np.arange(size)
        positions = (blocks[:, :, None] * size + within).reshape(len(units), -1)
        return positions, (tables[:, :, None] * size + within).reshape(len(units), -1)


def _group(num_blocks: Int64s, most: int) -> Iterator[Int64s]:
    """Group indices of `num_blocks` by similar size, so that one long unit does not make all others as expensive.

    A group, padded to its longest, at most doubles in size and holds at most `most` blocks or one unit.
    """
    power = np.ceil(np.log2(num_blocks))
    for each in np.unique(power):
        alike = np.flatnonzero(power == each)
        count = max(most // int(num_blocks[alike].max()), 1)
        yield from (alike[first : first + count] for first in range(0, len(alike), count))


def _append(array: NDArray[_T], fill: int) -> NDArray[_T]:
    """Append one column to `array`."""
    return np.concatenate([array, np.full((*array.shape[:-1], 1), fill, array.dtype)], axis=-1)
