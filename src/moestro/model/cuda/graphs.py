"""CUDA graphs of whole steps: all launches of a step are recorded once for some numbers of rows, and replayed.

A step with fewer rows than its graph is padded: padded rows write nothing, because every kernel reads the number of
rows that are there from the device. What a step uploads is one copy into the graph's memory.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from moestro.core.work import LOGITS_LAST, Units
from moestro.model.check import paged_units
from moestro.model.cuda.exchange import CudaExchange
from moestro.model.cuda.functions import CudaKernels
from moestro.model.cuda.step_memory import GraphShape, StepMemory, find_shape, graph_shapes, table_bytes
from moestro.model.experts.routed import in_place_of
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep

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
