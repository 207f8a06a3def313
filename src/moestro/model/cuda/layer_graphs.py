"""CUDA graphs of single layers: between any two of them the host decides what runs next.

One layer of each form is recorded for some numbers of rows. Its kernels find the weights and the pools of any layer of
that form by addresses, which one copy changes before the replay. So the number of graphs does not depend on that of
layers: 48 layers at 20 numbers of rows are 20 graphs of 13 launches, and not 960.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moestro.model.cuda.exchange import CudaExchange
from moestro.model.cuda.functions import CudaKernels
from moestro.model.cuda.layer_forms import FoundArguments, LayerForm, find_forms
from moestro.model.cuda.step_memory import GraphShape, StepMemory, find_shape, graph_shapes, table_bytes
from moestro.model.experts.routed import in_place_of, tag_of
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.staged.fragments import Fragment
from moestro.model.staged.layer_stages import Attended
from moestro.model.staged.staged_network import StagedNetwork

logger = logging.getLogger(__name__)

_OTHER_BYTES = 1 << 29  # partial results of attention, experts' answers, and what the driver keeps of all launches


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraphPlan:
    """Which graphs the layers of a network get.

    Attributes:
        shapes: their shapes.
        max_model_len: tokens of the longest sequence.
        has_whole: whether layers are recorded whole, besides up to their gates.
        num_bytes: memory that they will take.
    """

    shapes: tuple[GraphShape, ...]
    max_model_len: int
    has_whole: bool
    num_bytes: int

    def record(self, staged: StagedNetwork, pools: KVPools) -> LayerGraphs | None:
        """Record the graphs. None means that no layer of this network can be recorded."""
        graphs = LayerGraphs(staged, pools, self)
        try:
            graphs.record()
        except RuntimeError as error:  # torch's, of whatever a layer may do that a graph cannot
            logger.warning("CUDA graphs: none, because a layer of this network cannot be recorded: %s", error)
            return None
        return graphs if graphs.num_graphs else None


def plan_layer_graphs(
    network: Network, max_rows: int, max_model_len: int, block_size: int, *, max_tokens: int
) -> LayerGraphPlan | None:
    """Plan the graphs of a network's layers.

    Args:
        network: The network, packed, with all experts or with those of a worker.
        max_rows: Sequences of a step.
        max_model_len: Tokens of the longest sequence.
        block_size: Tokens of a block.
        max_tokens: Tokens of a step.

    Returns:
        None for a network without own kernels, or one whose gates are overridden.
    """
    if not isinstance(network.exchange, CudaExchange) or network.override is not None:
        return None
    shapes = graph_shapes(max_rows, max_tokens)
    rows = (
        3 * sum(shape.num_rows for shape in shapes) * network.config.hidden_size * network.dtype.itemsize
    )  # before a layer, and at its gate
    return LayerGraphPlan(
        shapes=tuple(shapes),
        max_model_len=max_model_len,
        has_whole=all(_is_whole(experts) for _, experts in network.experts),
        num_bytes=rows + table_bytes(shapes, max_model_len, block_size) + _OTHER_BYTES,
    )


def _is_whole(experts: Any) -> bool:
    return in_place_of(experts) is not None and tag_of(experts).logical_of is None


class _RowMemory:
    """Memory of some rows between the layers of one size.

    Args:
        staged: The network.
        memory: Memory of their units.

    Attributes:
        memory: As above.
        hidden: [rows, hidden size], input of the next layer.
        columns: [rows, *sizes] of each column of the layers' arguments.
        loaded: Fragment whose units and columns are there.
    """

    def __init__(self, staged: StagedNetwork, memory: StepMemory) -> None:
        network, size = staged.network, memory.shape.num_rows
        self.memory = memory
        self.loaded: Fragment | None = None
        self.hidden = torch.zeros(size, network.config.hidden_size, dtype=network.dtype, device=network.device)
        self.columns = [
            torch.zeros(size, *column.sizes, dtype=column.dtype, device=network.device)
            for column in staged.arguments.columns
        ]
        self._arguments = [
            staged.arguments.fill(kind, self.columns.__getitem__, memory.step)
            for kind in range(1 + max(staged.arguments.kind_of))
        ]
        self._kind_of = staged.arguments.kind_of

    def arguments(self, layer: int) -> dict[str, Any]:
        """Keyword arguments of a layer."""
        return self._arguments[self._kind_of[layer]]

    def load(self, fragment: Fragment) -> bool:
        """Put the units of a fragment here. Returns whether they fit."""
        if self.loaded is not fragment:
            self.loaded = None
            if not self.memory.load(fragment.step):
                return False
            for number, column in enumerate(self.columns):
                column[: fragment.num_tokens].copy_(fragment.column(number))
            self.loaded = fragment
        return True

    def take(self, hidden: Tensor) -> None:
        """Let the next layer read `hidden`, [tokens, hidden size]."""
        mine = self.hidden[: len(hidden)]
        if mine.data_ptr() != hidden.data_ptr():
            mine.copy_(hidden)


@dataclass(frozen=True, slots=True, eq=False)
class _RecordedForm:
    """A graph of the layers of one form.

    Attributes:
        graph: replays the launches.
        result: what they compute.
        addresses: memory that each layer's row of `rows` is copied to before; None where the layers have one row.
        rows: as in `LayerForm`.
    """

    graph: Any
    result: Any
    addresses: Tensor | None
    rows: dict[int, Tensor]


class LayerGraphs:
    """The graphs of a network's layers; implements `stage_pieces.RecordedLayers`.

    Args:
        staged: The network.
        pools: Its KV cache.
        plan: Which graphs to record.

    Attributes:
        counts: int64[layers, experts], to which layers that are replayed whole add the tokens of each expert.
        num_graphs: Graphs in all.
    """

    def __init__(self, staged: StagedNetwork, pools: KVPools, plan: LayerGraphPlan) -> None:
        network = staged.network
        assert isinstance(network.exchange, CudaExchange)
        self._staged, self._pools, self._plan = staged, pools, plan
        self._kernels: CudaKernels = network.exchange.kernels
        shape = (network.num_layers, max(network.num_experts, 1))
        self.counts = torch.zeros(shape, dtype=torch.int64, device=network.device)
        self.num_graphs = 0
        self._seats: dict[GraphShape, _RowMemory] = {}
        self._recorded: dict[
            tuple[int, GraphShape, bool], _RecordedForm
        ] = {}  # by layer, shape, and whether it is whole

    @torch.inference_mode()
    def record(self) -> None:
        """Record all graphs, the largest first, so that smaller ones fit in its memory."""
        network, plan = self._staged.network, self._plan
        if network.routing is not None:
            network.routing.begin(None)
            network.routing.counts = self.counts
        self._seats = {
            shape: _RowMemory(self._staged, StepMemory(shape, self._kernels, self._pools, plan.max_model_len))
            for shape in sorted(plan.shapes)
        }
        kinds = (False, True) if plan.has_whole else (False,)
        forms = [(is_whole, form) for is_whole in kinds for form in self._forms(is_whole=is_whole)]
        found = FoundArguments(max((len(form.places) for _, form in forms), default=0), network.device)
        pool = torch.cuda.graph_pool_handle()
        for seat in reversed(self._seats.values()):
            for is_whole, form in forms:
                recorded = self._record(seat, form, found, pool, is_whole=is_whole)
                self._recorded |= {(layer, seat.memory.shape, is_whole): recorded for layer in form.layers}
        self.counts.zero_()

    def open(self, fragment: Fragment) -> ReplayedFragment | None:
        """Make a fragment's units those that the next replays compute. None means that no graph fits them."""
        seat = find_shape(fragment.step, self._seats)
        if seat is None or not seat.load(fragment):
            return None
        return ReplayedFragment(self, seat, fragment.num_tokens)

    def replay(self, seat: _RowMemory, layer: int, hidden: Tensor, *, is_whole: bool) -> Any:
        """Replay a layer, whole or up to its gate, on all rows of a seat. None means that it is not recorded."""
        recorded = self._recorded.get((layer, seat.memory.shape, is_whole))
        if recorded is None:
            return None
        seat.take(hidden)
        if recorded.addresses is not None:
            recorded.addresses.copy_(recorded.rows[layer])
        recorded.graph.replay()
        return recorded.result

    def _forms(self, *, is_whole: bool) -> list[LayerForm]:
        seat, num_layers = self._seats[min(self._seats)], self._staged.network.num_layers
        with seat.memory.assumed():
            runs = [partial(self._run, seat, layer, is_whole=is_whole) for layer in range(num_layers)]
            return find_forms(runs, self._staged.network.device)

    def _record(
        self, seat: _RowMemory, form: LayerForm, found: FoundArguments, pool: Any, *, is_whole: bool
    ) -> _RecordedForm:
        first = form.layers[0]
        addresses = found.memory[: len(form.places)] if form.places else None
        if addresses is not None:
            addresses.copy_(form.rows[first])
        graph: Any = torch.cuda.CUDAGraph()
        with seat.memory.assumed():
            with found.by_address(form):
                self._run(seat, first, is_whole=is_whole)  # kernels are compiled, and libraries make what they need
            # Within, so that what is recorded are the launches by address.
            with torch.cuda.graph(graph, pool=pool), found.by_address(form):
                result = self._run(seat, first, is_whole=is_whole)
        self.num_graphs += 1
        return _RecordedForm(graph, result, addresses, form.rows)

    def _run(self, seat: _RowMemory, layer: int, *, is_whole: bool) -> Any:
        arguments = seat.arguments(layer)
        if is_whole:
            return seat.hidden.copy_(self._staged.whole(layer, seat.hidden, arguments))
        return self._staged.attend(layer, seat.hidden, arguments)


class ReplayedFragment:
    """A fragment whose layers are replayed; implements `stage_pieces.ReplayedUnits`.

    Args:
        graphs: The graphs.
        seat: Memory of the fragment's rows.
        num_rows: Number of these.
    """

    def __init__(self, graphs: LayerGraphs, seat: _RowMemory, num_rows: int) -> None:
        self._graphs, self._seat, self._num_rows = graphs, seat, num_rows

    def attend(self, layer: int, hidden: Tensor) -> Attended | None:
        """Implement `ReplayedUnits`."""
        attended: Attended | None = self._graphs.replay(self._seat, layer, hidden, is_whole=False)
        return None if attended is None else attended.first(self._num_rows)

    def whole(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Implement `ReplayedUnits`."""
        done: Tensor | None = self._graphs.replay(self._seat, layer, hidden, is_whole=True)
        return None if done is None else done[: self._num_rows]
