"""CUDA graphs of single layers: between any two of them the host decides what runs next.

One layer of each form is recorded for some numbers of rows. Its kernels find the weights and the pools of any layer of
that form by addresses, which one copy changes before the replay. So the number of graphs does not depend on that of
layers: 48 layers at 20 numbers of rows are 20 graphs of 12 launches, and not 960.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moestro.model.cuda.exchange import CudaExchange
from moestro.model.cuda.functions import KERNEL_DTYPES, CudaKernels
from moestro.model.cuda.graphs import GraphShape, StepMemory, find_shape, graph_shapes, table_bytes
from moestro.model.cuda.source.launches import FOUND
from moestro.model.cuda.tiles import Grid, Launcher, replace_launcher
from moestro.model.experts.routed import in_place_of, tag_of
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.staged.layer_stages import Attended
from moestro.model.staged.staged_network import Fragment, StagedNetwork

_ALIGNMENT = 16  # bytes, which `find` promises
_TYPES = {kind: dtype for dtype, kind in KERNEL_DTYPES.items()}
_SPACING = 2  # addresses in 16 bytes, so that all are aligned alike
MOST_FORMS = 4


@dataclass(frozen=True, slots=True, eq=False)
class LayerForm:
    """Layers of one form.

    Attributes:
        layers: The layers, ascending. The first one is recorded for all.
        places: By address of a tensor of the first layer, the number of the tensor among those that differ by layer.
        rows: int64[tensors, 2] of each layer: first the address of its tensor.
    """

    layers: tuple[int, ...]
    places: dict[int, int]
    rows: dict[int, Tensor]


class FoundArguments:
    """Memory of the addresses that launches of a recorded layer read, and the launches that read them.

    Args:
        num_places: Most tensors of a form.
        device: The device.

    Attributes:
        memory: int64[num_places, 2], the addresses for the layer that runs next.
    """

    def __init__(self, num_places: int, device: torch.device) -> None:
        self.memory = torch.zeros(max(num_places, 1), _SPACING, dtype=torch.int64, device=device)
        self._places = [self.memory[place, :1].view(torch.uint64) for place in range(num_places)]

    @contextmanager
    def by_address(self, form: LayerForm) -> Iterator[None]:
        """Let kernels find what differs between the layers of a form by its address."""

        def launcher(kernel: Any, grid: Grid, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            found = list(args)
            for at, each in _found(kernel, args, options):
                place = form.places.get(each.data_ptr())
                if place is not None:
                    found[at] = self._places[place]
            before(kernel, grid, tuple(found), options)

        before = replace_launcher(launcher)
        try:
            yield
        finally:
            replace_launcher(before)


def find_forms(runs: Sequence[Callable[[], object]], device: torch.device) -> list[LayerForm]:
    """Find the forms of layers, those of most layers first.

    Args:
        runs: A run of each layer.
        device: Device of the addresses.

    Returns:
        At most MOST_FORMS forms. Layers of others are not worth a graph.
    """
    by_list: dict[Hashable, list[tuple[int, list[int]]]] = {}
    for layer, run in enumerate(runs):
        run()  # what is made once is made here
        listing = _Listing()
        listing.list(run)
        by_list.setdefault(tuple(listing.entries), []).append((layer, listing.addresses))
    groups = sorted(by_list.values(), key=len, reverse=True)
    if len(groups) > MOST_FORMS:
        groups = [group for group in groups[:MOST_FORMS] if len(group) > 1]
    return [_form(group, device) for group in groups]


def _form(group: list[tuple[int, list[int]]], device: torch.device) -> LayerForm:
    table = torch.tensor([addresses for _, addresses in group], dtype=torch.int64)
    table = table.reshape(len(group), -1)
    differs = (table != table[:1]).any(0)
    table = table[:, differs]
    rows = torch.zeros(*table.shape, _SPACING, dtype=torch.int64)
    rows[..., 0] = table
    layers = tuple(layer for layer, _ in group)
    places = {address: place for place, address in enumerate(table[0].tolist())}
    return LayerForm(layers, places, dict(zip(layers, rows.to(device), strict=True)))


class _Listing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists what a run does.

    Attributes:
        entries: Operations and launches, without the addresses that kernels may find.
        addresses: These, each once, in the order of their first use.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Hashable] = []
        self.addresses: list[int] = []
        # Tensors that the run has made live until it is over, so that no two have one address.
        self._made: dict[int, tuple[int, Tensor]] = {}
        self._launcher: Launcher | None = None
        self._is_launching = False  # what a launcher does is not the layer's

    def list(self, run: Callable[[], object]) -> None:
        """List a run."""
        self._launcher = replace_launcher(self._launch)
        try:
            with self:
                run()
        finally:
            replace_launcher(self._launcher)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self._is_launching:
            return found
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and _storage(each) not in given:
                self._made.setdefault(_storage(each), (len(self._made), each))
        if not func.is_view:
            self.entries.append((str(func), self._describe(args), self._describe(sorted(kwargs.items()))))
        return found

    def _launch(self, kernel: Any, grid: Grid, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        places = {
            at: self._place(each) for at, each in _found(kernel, args, options) if _storage(each) not in self._made
        }
        described = tuple(places.get(at) or self._describe(each) for at, each in enumerate(args))
        self.entries.append((kernel.fn.__name__, grid, described, self._describe(sorted(options.items()))))
        assert self._launcher is not None
        self._is_launching = True
        self._launcher(kernel, grid, args, options)
        self._is_launching = False

    def _place(self, tensor: Tensor) -> Hashable:
        address = tensor.data_ptr()
        if address not in self.addresses:
            self.addresses.append(address)
        return ("found", self.addresses.index(address), *_shape(tensor))

    def _describe(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            made = self._made.get(_storage(value))
            where = ("at", value.data_ptr()) if made is None else ("made", made[0], value.storage_offset())
            return (*where, *_shape(value))
        if isinstance(value, list | tuple):
            return tuple(map(self._describe, value))
        return value if isinstance(value, Hashable) else repr(value)


def _found(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[tuple[int, Tensor]]:
    """(place, tensor) of the arguments that a kernel may find by their addresses."""
    names = kernel.arg_names
    types = {name: str(each.dtype) for name, each in zip(names, args, strict=False) if isinstance(each, Tensor)}
    types |= {name: str(_TYPES[kind]) for name, kind in options.items() if name == "KIND"}
    types["STORED"] = str(torch.float8_e4m3fn) if options.get("WIDTH") else types.get("rows", "")
    found = []
    for name, like in FOUND.get(kernel.fn.__name__, {}).items():
        at = names.index(name)
        tensor: Tensor = args[at]
        is_aligned = tensor.numel() > 0 and tensor.data_ptr() % _ALIGNMENT == 0
        if is_aligned and str(tensor.dtype) == types.get(like, f"torch.{like}"):
            found.append((at, tensor))
    return found


def _shape(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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
