"""CUDA graphs of whole steps: all launches of a step are recorded once for some numbers of rows, and replayed.

A step with fewer rows than its graph is padded: padded rows write nothing, because every kernel reads the number of
rows that are there from the device. What a step uploads is one copy into the graph's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro.core.work import LOGITS_LAST, Units
from moestro.model.check import paged_units
from moestro.model.cuda.exchange import CudaExchange
from moestro.model.cuda.functions import CudaKernels
from moestro.model.cuda.launch import launching_ahead
from moestro.model.cuda.tiles import NARROW_ROWS, SPLIT
from moestro.model.cuda.units import assemble, columns_of
from moestro.model.experts import in_place_of
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep
from moestro.model.upload import pack, pack_places, view

logger = logging.getLogger(__name__)

_MOST_ROWS = 256  # of a graph: a step with more is long enough to hide its launches
_DENSE_UP_TO, _STRIDE = 8, 16  # graphs for 1, 2, 4 and 8 rows, then for every multiple
_MOST_ITEMS = 4096  # of an attention in a graph, whose partial results take memory
# Keys that chunks may read in a graph, counted once for each tile of NARROW_ROWS rows. More are faster in wide tiles,
# outside of a graph.
_MOST_CHUNK_KEYS = 1 << 17
# One step for each kind of tile that graphs do not have.
_LONGER_STEPS = (200, 400, 800, 1600)
_OTHER_BYTES = 1 << 30  # partial results of attention, experts' answers, and what the driver keeps of all launches


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of rows for which graphs are recorded, ascending, up to the first that holds `max_rows`."""
    few = [1 << power for power in range(_DENSE_UP_TO.bit_length())]
    sizes = [*few, *range(_STRIDE, _MOST_ROWS + 1, _STRIDE)]
    most = min(max_rows, _MOST_ROWS)
    return [size for before, size in zip([0, *sizes], sizes, strict=False) if before < most]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """Which graphs a network gets.

    Attributes:
        sizes: numbers of rows, ascending.
        max_model_len: tokens of the longest sequence.
        num_bytes: memory that they will take.
    """

    sizes: tuple[int, ...]
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


def plan_graphs(network: Network, max_rows: int, max_model_len: int, block_size: int) -> GraphPlan | None:
    """Plan the graphs of a network.

    Args:
        network: The network.
        max_rows: Sequences of a step.
        max_model_len: Tokens of the longest sequence.
        block_size: Tokens of a block.

    Returns:
        None for a network whose experts are not on own kernels: those of padded rows would be computed.
    """
    exchange = network.exchange
    if not isinstance(exchange, CudaExchange) or any(in_place_of(experts) is None for _, experts in network.experts):
        return None
    sizes = graph_sizes(max_rows)
    logits = sizes[-1] * network.config.vocab_size * (4 + network.dtype.itemsize)
    tables = sum(sizes) * -(-max_model_len // block_size) * 4
    return GraphPlan(sizes=tuple(sizes), max_model_len=max_model_len, num_bytes=logits + tables + _OTHER_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """A graph, and where its inputs and outputs are.

    Attributes:
        graph: replays all launches.
        memory: uint8, what a step uploads.
        ids: int64[rows], the token ids among it.
        begins: where each column begins there.
        sizes: entries for which each column has room.
        counts: int64[layers, experts] of the replayed step; None for a dense network.
        choices: int64[rows, k] of each layer with experts.
    """

    graph: Any
    memory: Tensor
    ids: Tensor
    begins: list[int]
    sizes: list[int]
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
        self._network, self._kernels, self._pools = network, kernels, pools
        self._sizes = plan.sizes
        self._table_width = -(-plan.max_model_len // pools.block_size)
        self._splits_of_unit = -(-plan.max_model_len // SPLIT)
        self._graphs: dict[int, _Recorded] = {}
        self._logits: Tensor | None = None

    @torch.inference_mode()
    def record(self) -> None:
        """Record all graphs, the largest first, so that smaller ones fit in its memory.

        Longer steps run once, so that no request waits while a kernel is compiled for them.
        """
        shape, device = (self._sizes[-1], self._network.config.vocab_size), self._network.device
        self._logits = torch.empty(shape, dtype=torch.float32, device=device)
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            self._graphs[size] = self._record(size, pool)
        room = min(self._pools.num_blocks * self._pools.block_size, self._table_width * self._pools.block_size)
        for num_tokens in _LONGER_STEPS:
            if num_tokens <= room:
                self._network.logits(PagedStep(_one_prompt(num_tokens, self._pools.block_size), self._pools, device))

    @torch.inference_mode()
    def logits(self, step: PagedStep) -> Tensor | None:
        """Compute the result of `Network.logits`, if a graph fits the step.

        The result is overwritten by the next step.
        """
        num_rows = len(step.positions)
        size = next((each for each in self._sizes if each >= num_rows), None)
        if size is None or self._network.override is not None or not self._fits(step):
            return None
        graph = self._graphs[size]
        columns: list[NDArray[Any]] = list(_pad(step, size))
        columns += columns_of(step, self._kernels.walks, can_be_wide=False)
        if any(column.size > room for column, room in zip(columns, graph.sizes, strict=True)):
            return None
        end = graph.begins[-1] + columns[-1].nbytes
        packed = torch.empty(end, dtype=torch.uint8, pin_memory=self._network.device.type != "cpu")
        pack(columns, graph.begins, packed.numpy())
        graph.memory[:end].copy_(packed, non_blocking=True)
        step.write_tokens(graph.ids)
        graph.graph.replay()
        if self._network.routing is not None:
            assert graph.counts is not None
            self._network.routing.resume(graph.counts, graph.choices, num_rows)
        assert self._logits is not None
        return self._logits[: len(step.logit_rows)]

    def _fits(self, step: PagedStep) -> bool:
        is_chunk = step.num_tokens_of > 1
        if not is_chunk.any():
            return True
        most_shared = max((walk.num_shared for walk in self._kernels.walks), default=1)
        tiles = step.num_tokens_of[is_chunk] * most_shared // NARROW_ROWS + 1
        return int((tiles * step.length_of[is_chunk]).sum()) <= _MOST_CHUNK_KEYS

    def _record(self, size: int, pool: Any) -> _Recorded:
        shapes = list(self._shapes(size))
        begins, num_bytes = pack_places([int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes])
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._network.device)
        columns = [view(memory, begin, *shape) for begin, shape in zip(begins, shapes, strict=True)]
        units = assemble(self._kernels.walks, iter(columns[4:]))
        step = PagedStep(_some_units(size), self._pools, self._network.device)
        step.place(columns[:4], units)
        routing = self._network.routing
        with self._padded(units.num_rows, size):
            self._run(step, size)  # kernels are compiled, and libraries make what they need
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._run(step, size)
        counts, choices = (None, []) if routing is None else (routing.counts, routing.kept())
        sizes = [int(np.prod(shape)) for shape, _ in shapes]
        return _Recorded(graph, memory, columns[0], begins, sizes, counts, choices)

    def _run(self, step: PagedStep, size: int) -> None:
        assert self._logits is not None
        self._logits[:size].copy_(self._network.stored_logits(step))

    @contextmanager
    def _padded(self, num_rows: Tensor, size: int) -> Iterator[None]:
        """Let kernels read the number of rows from the device, and experts keep all choices."""
        routing = self._network.routing
        self._kernels.assume_rows(num_rows, size)
        if routing is not None:
            routing.keeps_all = True
        try:
            with launching_ahead():
                yield
        finally:
            self._kernels.assume_rows(None)
            if routing is not None:
                routing.keeps_all = False

    def _shapes(self, size: int) -> Iterator[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and type of each column of a graph, in the order of `logits`."""
        rows, units = np.dtype(np.int64), np.dtype(np.int32)
        yield from [((size,), rows)] * 4
        yield from [((1,), units), ((size + 1,), units), ((size,), units)]
        num_items = min(size * self._splits_of_unit, max(_MOST_ITEMS, size))
        num_merges = size if self._splits_of_unit > 1 else 0
        for _ in self._kernels.walks:
            yield from [((3,), units), ((num_items, 4), units), ((0, 4), units), ((num_merges, 3), units)]
        yield (size * self._table_width,), units


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


def _one_prompt(num_tokens: int, block_size: int) -> Units:
    """A prompt in the first blocks, whose last logits are wanted."""
    table = np.arange(-(-num_tokens // block_size), dtype=np.int32)
    units = paged_units([(0, np.zeros(num_tokens, np.int32))], table[None])
    return msgspec.structs.replace(units, logits=np.full(1, LOGITS_LAST, np.uint8))
