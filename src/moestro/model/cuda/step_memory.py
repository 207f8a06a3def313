"""A step in the memory of a graph: where each replay finds its units, and how they get there in one copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moestro.core.work import Units
from moestro.model.check import paged_units
from moestro.model.cuda.functions import CudaKernels
from moestro.model.cuda.tiles import NARROW_ROWS, SPLIT
from moestro.model.cuda.units import assemble, columns_of
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep
from moestro.model.upload import pack, pack_places, view

_MOST_ROWS = 256  # of a graph: a step with more is long enough to hide its launches
_DENSE_UP_TO, _STRIDE = 8, 16  # graphs for 1, 2, 4 and 8 rows, then for every multiple
_MOST_ITEMS = 4096  # of an attention in a graph, whose partial results take memory
# Keys that chunks may read in a graph, counted once for each tile of NARROW_ROWS rows. More are faster in wide tiles,
# outside of a graph.
_MOST_CHUNK_KEYS = 1 << 17


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of rows for which graphs are recorded, ascending, up to the first that holds `max_rows`."""
    few = [1 << power for power in range(_DENSE_UP_TO.bit_length())]
    sizes = [*few, *range(_STRIDE, _MOST_ROWS + 1, _STRIDE)]
    most = min(max_rows, _MOST_ROWS)
    return [size for before, size in zip([0, *sizes], sizes, strict=False) if before < most]


def table_bytes(sizes: list[int], max_model_len: int, block_size: int) -> int:
    """Bytes of the block tables in the memory of graphs of these sizes."""
    return sum(sizes) * -(-max_model_len // block_size) * 4


class StepMemory:
    """Units of the steps of one graph, or of several that are replayed in turn.

    Args:
        size: Rows of the graph; steps with fewer are padded.
        kernels: The kernels.
        pools: The KV cache.
        max_model_len: Tokens of the longest sequence.

    Attributes:
        size: As above.
        step: A step of so many rows, whose tensors are in the memory.
    """

    def __init__(self, size: int, kernels: CudaKernels, pools: KVPools, max_model_len: int) -> None:
        self.size, self._kernels = size, kernels
        shapes = list(_shapes(size, kernels, max_model_len, pools.block_size))
        self._begins, num_bytes = pack_places([int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes])
        self._rooms = [int(np.prod(shape)) for shape, _ in shapes]
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=kernels.device)
        columns = [view(self._memory, begin, *shape) for begin, shape in zip(self._begins, shapes, strict=True)]
        self._ids = columns[0]
        units = assemble(kernels.walks, iter(columns[4:]))
        self._num_rows = units.num_rows
        self.step = PagedStep(_some_units(size), pools, kernels.device)
        self.step.place(columns[:4], units)

    def load(self, step: PagedStep) -> bool:
        """Put a step in the memory, if it has room. Returns whether it has."""
        if not self._reads_few_keys(step):
            return False
        columns: list[NDArray[Any]] = list(_pad(step, self.size))
        columns += columns_of(step, self._kernels.walks, can_be_wide=False)
        if any(column.size > room for column, room in zip(columns, self._rooms, strict=True)):
            return False
        end = self._begins[-1] + columns[-1].nbytes
        packed = torch.empty(end, dtype=torch.uint8, pin_memory=self._memory.device.type != "cpu")
        pack(columns, self._begins, packed.numpy())
        self._memory[:end].copy_(packed, non_blocking=True)
        step.write_tokens(self._ids)
        return True

    @contextmanager
    def assumed(self) -> Iterator[None]:
        """Let kernels read the number of rows from the memory."""
        self._kernels.assume_rows(self._num_rows, self.size)
        try:
            yield
        finally:
            self._kernels.assume_rows(None)

    def _reads_few_keys(self, step: PagedStep) -> bool:
        is_chunk = step.num_tokens_of > 1
        if not is_chunk.any():
            return True
        most_shared = max((walk.num_shared for walk in self._kernels.walks), default=1)
        tiles = step.num_tokens_of[is_chunk] * most_shared // NARROW_ROWS + 1
        return int((tiles * step.length_of[is_chunk]).sum()) <= _MOST_CHUNK_KEYS


def _shapes(
    size: int, kernels: CudaKernels, max_model_len: int, block_size: int
) -> Iterator[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and type of each column, in the order of `StepMemory.load`."""
    rows, units = np.dtype(np.int64), np.dtype(np.int32)
    yield from [((size,), rows)] * 4
    yield from [((1,), units), ((size + 1,), units), ((size,), units)]
    splits_of_unit = -(-max_model_len // SPLIT)
    num_items = min(size * splits_of_unit, max(_MOST_ITEMS, size))
    num_merges = size if splits_of_unit > 1 else 0
    for _ in kernels.walks:
        yield from [((3,), units), ((num_items, 4), units), ((0, 4), units), ((num_merges, 3), units)]
    yield (size * -(-max_model_len // block_size),), units


def _pad(step: PagedStep, size: int) -> list[NDArray[np.int64]]:
    """`row_columns` of a step with so many rows, of which those that are not there have the scratch slot."""
    fills = (0, 0, step.pools.scratch_slot, 0)
    return [
        np.concatenate([column, np.full(size - len(column), fill, np.int64)])
        for column, fill in zip(step.row_columns(), fills, strict=True)
    ]


def _some_units(size: int) -> Units:
    """One-token units, of which only the number counts: a graph's step is in the graph's memory."""
    return paged_units([(0, np.zeros(1, np.int32))] * size, np.zeros((size, 1), np.int32))
