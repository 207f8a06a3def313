"""A step in the memory of a graph: where each replay finds its units, and how they get there in one copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from moestro.core.work import Units
from moestro.model.check import paged_units
from moestro.model.cuda.functions import CudaKernels
from moestro.model.cuda.launch import launching_ahead
from moestro.model.cuda.tiles import SPLIT, WIDE_QUERIES
from moestro.model.cuda.units import assemble, columns_of
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep
from moestro.model.upload import pack, pack_places, view

_MOST_ROWS = 256  # of a graph of decodes
_DENSE_UP_TO, _STRIDE = 8, 16  # graphs for 1, 2, 4 and 8 decodes, then for every multiple
# Rows of graphs of steps with chunks, whose attention has wide tiles. Launches of more rows hide behind the device; a
# padded row costs nothing but programs that end at once, so that many rows need few sizes.
_CHUNK_ROWS = (64, 128, 192, 256, 320, 384, 448, 512, 768, 1024, 1536, 2048)
_CHUNK_LOGITS = 64  # rows of such a step whose logits are wanted
_MOST_ITEMS = 4096  # of an attention in a graph, whose partial results take memory


class GraphShape(NamedTuple):
    """Rows of a graph, and whether its steps have chunks of WIDE_QUERIES tokens or more."""

    num_rows: int
    has_chunks: bool = False

    @property
    def num_logits(self) -> int:
        """Rows whose logits a step may want."""
        return min(self.num_rows, _CHUNK_LOGITS) if self.has_chunks else self.num_rows


def graph_shapes(max_rows: int, max_tokens: int) -> list[GraphShape]:
    """Shapes of the graphs for steps of so many sequences and tokens, each kind by ascending rows."""
    few = [1 << power for power in range(_DENSE_UP_TO.bit_length())]
    decodes = _up_to([*few, *range(_STRIDE, _MOST_ROWS + 1, _STRIDE)], max_rows)
    return [*map(GraphShape, decodes), *(GraphShape(size, has_chunks=True) for size in _up_to(_CHUNK_ROWS, max_tokens))]


def _up_to(sizes: Sequence[int], most: int) -> list[int]:
    """Sizes up to the first that holds `most`."""
    return [size for before, size in zip([0, *sizes], sizes, strict=False) if before < most]


def table_bytes(shapes: Sequence[GraphShape], max_model_len: int, block_size: int) -> int:
    """Bytes of the block tables in the memory of graphs of these shapes."""
    return sum(shape.num_rows for shape in shapes) * -(-max_model_len // block_size) * 4


_T = TypeVar("_T")


def find_shape(step: PagedStep, known: Mapping[GraphShape, _T]) -> _T | None:
    """What is known of the smallest shape that a step fits; None if it fits none."""
    has_chunks = bool((step.num_tokens_of >= WIDE_QUERIES).any())
    fitting = (shape for shape in known if shape.has_chunks == has_chunks and shape.num_rows >= len(step.positions))
    shape = min(fitting, default=None)
    return None if shape is None else known[shape]


class StepMemory:
    """Units of the steps of one graph, or of several that are replayed in turn.

    Args:
        shape: Shape of the graph; steps with fewer rows are padded.
        kernels: The kernels.
        pools: The KV cache.
        max_model_len: Tokens of the longest sequence.

    Attributes:
        shape: As above.
        step: A step of so many rows, whose tensors are in the memory.
    """

    def __init__(self, shape: GraphShape, kernels: CudaKernels, pools: KVPools, max_model_len: int) -> None:
        self.shape, self._kernels = shape, kernels
        shapes = list(_column_shapes(shape, kernels, max_model_len, pools.block_size))
        self._begins, num_bytes = pack_places([int(np.prod(sizes)) * dtype.itemsize for sizes, dtype in shapes])
        self._rooms = [int(np.prod(sizes)) for sizes, _ in shapes]
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=kernels.device)
        columns = [view(self._memory, begin, *each) for begin, each in zip(self._begins, shapes, strict=True)]
        columns[2].fill_(pools.scratch_slot)  # what is recorded without a step must not write to a block
        self._ids = columns[0]
        units = assemble(kernels.walks, iter(columns[4:]), max_model_len)
        self._num_rows = units.num_rows
        self.step = PagedStep(_some_units(shape.num_rows), pools, kernels.device)
        self.step.place(columns[:4], units)

    def load(self, step: PagedStep) -> bool:
        """Put a step in the memory, if it has room. Returns whether it has."""
        if len(step.logit_rows) > self.shape.num_logits:
            return False
        columns: list[NDArray[Any]] = list(_pad(step, self.shape))
        columns += columns_of(step, self._kernels.walks)
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
        """Let kernels read the number of rows from the memory, and start ahead of those before them."""
        self._kernels.assume_rows(self._num_rows, self.shape.num_rows)
        try:
            with launching_ahead():
                yield
        finally:
            self._kernels.assume_rows(None)


def _column_shapes(
    shape: GraphShape, kernels: CudaKernels, max_model_len: int, block_size: int
) -> Iterator[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and type of each column, in the order of `StepMemory.load`."""
    rows, units, size = np.dtype(np.int64), np.dtype(np.int32), shape.num_rows
    yield from [((size,), rows)] * 3
    yield (shape.num_logits,), rows
    yield from [((1,), units), ((size + 1,), units), ((size,), units)]
    splits_of_unit = -(-max_model_len // SPLIT)
    num_items = min(size * splits_of_unit, max(_MOST_ITEMS, size))
    for walk in kernels.walks:
        # Full tiles, and one that is not full for each chunk.
        num_wide = size // walk.queries_of(walk.widest) + size // WIDE_QUERIES if shape.has_chunks else 0
        yield from [((2,), units), ((num_items, 4), units), ((num_wide, 4), units)]
    yield (size * -(-max_model_len // block_size),), units


def _pad(step: PagedStep, shape: GraphShape) -> list[NDArray[np.int64]]:
    """`row_columns` of a step with as many rows as a graph: those that are not there have the scratch slot."""
    fills = ((0, shape.num_rows), (0, shape.num_rows), (step.pools.scratch_slot, shape.num_rows), (0, shape.num_logits))
    return [
        np.concatenate([column, np.full(size - len(column), fill, np.int64)])
        for column, (fill, size) in zip(step.row_columns(), fills, strict=True)
    ]


def _some_units(size: int) -> Units:
    """One-token units, of which only the number counts: a graph's step is in the graph's memory."""
    return paged_units([(0, np.zeros(1, np.int32))] * size, np.zeros((size, 1), np.int32))
