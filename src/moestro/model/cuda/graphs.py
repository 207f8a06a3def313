"""CUDA graphs of whole steps: all launches of a step are recorded once for some numbers of rows, and replayed.

A step with fewer rows than its graph is padded: padded rows write nothing, because every kernel reads the number of
rows that are there from the device. What a step uploads is one copy into the graph's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro.core.work import LOGITS_LAST, Units
from moestro.model.check import paged_units
from moestro.model.cuda.exchange import CudaExchange
from moestro.model.cuda.functions import CudaKernels
from moestro.model.cuda.tiles import SPLIT, WIDE_QUERIES, assemble, columns_of, launching_ahead
from moestro.model.experts.routed import in_place_of
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep
from moestro.model.tensors import pack, pack_places, view

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


logger = logging.getLogger(__name__)

# One step for each kind of tile that graphs do not have.
_LONGER_STEPS = (200, 400, 800, 1600)
_OTHER_BYTES = 1 << 30  # partial results of attention, experts' answers, and what the driver keeps of all launches


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """Which graphs a network gets.

    Attributes:
        shapes: their shapes.
        max_model_len: tokens of the longest sequence.
        num_bytes: memory that they will take.
    """

    shapes: tuple[GraphShape, ...]
    max_model_len: int
    num_bytes: int

    def record(self, network: Network, pools: KVPools) -> StepGraphs | None:
        """Record the graphs. None means that a step of this network cannot be recorded."""
        assert isinstance(network.exchange, CudaExchange)
        graphs = StepGraphs(network, network.exchange.kernels, pools, self)
        try:
            graphs.record()
        except RuntimeError as error:  # torch's, of whatever a network may do that a graph cannot
            logger.warning("CUDA graphs: none, because a step of this network cannot be recorded: %s", error)
            return None
        return graphs


def plan_graphs(
    network: Network, max_rows: int, max_model_len: int, block_size: int, *, max_tokens: int
) -> GraphPlan | None:
    """Plan the graphs of a network.

    Args:
        network: The network.
        max_rows: Sequences of a step.
        max_model_len: Tokens of the longest sequence.
        block_size: Tokens of a block.
        max_tokens: Tokens of a step.

    Returns:
        None for a network whose experts are not on own kernels: those of padded rows would be computed.
    """
    exchange = network.exchange
    if not isinstance(exchange, CudaExchange) or any(in_place_of(experts) is None for _, experts in network.experts):
        return None
    shapes = graph_shapes(max_rows, max_tokens)
    logits = max(shape.num_logits for shape in shapes) * network.config.vocab_size * (4 + network.dtype.itemsize)
    num_bytes = logits + table_bytes(shapes, max_model_len, block_size) + _OTHER_BYTES
    return GraphPlan(shapes=tuple(shapes), max_model_len=max_model_len, num_bytes=num_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """A graph, and where its inputs and outputs are.

    Attributes:
        graph: replays all launches.
        memory: what a step uploads.
        counts: int64[layers, experts] of the replayed step; None for a dense network.
        choices: int64[rows, k] of each layer with experts.
    """

    graph: Any
    memory: StepMemory
    counts: Tensor | None
    choices: list[Tensor]


class StepGraphs:
    """The graphs of one network.

    Args:
        network: The network, on own kernels alone.
        kernels: Its kernels.
        pools: Its KV cache.
        plan: Which graphs to record.
    """

    def __init__(self, network: Network, kernels: CudaKernels, pools: KVPools, plan: GraphPlan) -> None:
        self._network, self._kernels, self._pools, self._plan = network, kernels, pools, plan
        self._graphs: dict[GraphShape, _Recorded] = {}
        self._logits: Tensor | None = None

    @torch.inference_mode()
    def record(self) -> None:
        """Record all graphs, the largest first, so that smaller ones fit in its memory.

        Longer steps run once, so that no request waits while a kernel is compiled for them.
        """
        most, device = max(shape.num_logits for shape in self._plan.shapes), self._network.device
        self._logits = torch.empty(most, self._network.config.vocab_size, dtype=torch.float32, device=device)
        pool = torch.cuda.graph_pool_handle()
        for shape in sorted(self._plan.shapes, reverse=True):
            self._graphs[shape] = self._record(shape, pool)
        room = min(self._pools.num_blocks * self._pools.block_size, self._plan.max_model_len)
        for num_tokens in _LONGER_STEPS:
            if num_tokens <= room:
                self._network.logits(PagedStep(_one_prompt(num_tokens, self._pools.block_size), self._pools, device))

    @torch.inference_mode()
    def logits(self, step: PagedStep) -> Tensor | None:
        """Compute the result of `Network.logits`, if a graph fits the step.

        The result is overwritten by the next step.
        """
        num_rows = len(step.positions)
        recorded = find_shape(step, self._graphs)
        if recorded is None or self._network.override is not None or not recorded.memory.load(step):
            return None
        recorded.graph.replay()
        if self._network.routing is not None:
            assert recorded.counts is not None
            self._network.routing.resume(recorded.counts, recorded.choices, num_rows)
        assert self._logits is not None
        return self._logits[: len(step.logit_rows)]

    def _record(self, shape: GraphShape, pool: Any) -> _Recorded:
        memory, routing = StepMemory(shape, self._kernels, self._pools, self._plan.max_model_len), self._network.routing
        if routing is not None:
            routing.keeps_all = True
        try:
            with memory.assumed():
                self._run(memory)  # kernels are compiled, and libraries make what they need
                graph: Any = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._run(memory)
        finally:
            if routing is not None:
                routing.keeps_all = False
        counts, choices = (None, []) if routing is None else (routing.counts, routing.kept())
        return _Recorded(graph, memory, counts, choices)

    def _run(self, memory: StepMemory) -> None:
        assert self._logits is not None
        self._logits[: memory.shape.num_logits].copy_(self._network.stored_logits(memory.step))


def _one_prompt(num_tokens: int, block_size: int) -> Units:
    """A prompt in the first blocks, whose last logits are wanted."""
    table = np.arange(-(-num_tokens // block_size), dtype=np.int32)
    units = paged_units([(0, np.zeros(num_tokens, np.int32))], table[None])
    return msgspec.structs.replace(units, logits=np.full(1, LOGITS_LAST, np.uint8))
