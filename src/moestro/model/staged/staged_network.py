"""A network in stages: the part before the first layer, each layer in two stages, and the part after the last.

The network's own forward runs with stand-ins for its layers: at layer 0, to embed tokens and record the arguments of
each layer, and for the end, where calling its last norm and its head directly gives another result.

A *fragment* is a set of units computed together, with the inputs of layers other than hidden states. Units
enter the network at layer 0, and those that stay together use the arguments of their entry. Another fragment of them,
or a mixture with others, reads the arguments in the arena by row and builds only its paged attention. The arena gets
them when the first such fragment is made, so units that are never parted cost no copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moestro.core.rng import uniform
from moestro.core.work import Int32s, Units
from moestro.errors import UnsupportedModelError
from moestro.model.attention import STEP_ARGUMENT
from moestro.model.check import paged_units
from moestro.model.experts.routed import Routing, add_contributions, run_batches, tag_of
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.staged.arena import Arena, ColumnForm, Index, LayerArguments, Recording, TokenForm
from moestro.model.staged.layer_stages import (
    Attended,
    LayerStages,
    ReplayedLayer,
    WholeLayer,
    direct_plans,
    run_whole,
)
from moestro.model.step import PagedStep

# Largest difference between a layer whole and in stages, relative to the value and the spread of all values. The same
# kernels run on the same rows, so a wrong way differs by far more.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.05}
_BLOCK_SIZE = 4
_PROBES = ((7, 1), (4, 1))  # lengths of two sequences, for two steps with different numbers of tokens


@dataclass(frozen=True, slots=True, eq=False)
class Entered:
    """Tokens after the part before the layers.

    Attributes:
        hidden: [tokens, hidden size], input of layer 0.
        columns: [tokens, *sizes] of each column of the network's `TokenForm`.
    """

    hidden: Tensor
    columns: list[Tensor]


class _LastLayer(Exception):  # noqa: N818 - no error: the way out of a forward that must not go on
    """Carries the hidden states out of a network's forward."""


class _Stubs(nn.ModuleList):
    """Stand-ins for all layers. Networks take a slice of their layers in each step, and a whole slice is the list."""

    def __getitem__(self, index: Any) -> Any:
        is_whole = isinstance(index, slice) and range(len(self))[index] == range(len(self))
        return self if is_whole else super().__getitem__(index)


class _Stub(nn.Module):
    """Replaces a layer: stores the keyword arguments of its call, and returns the result of `answer`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not registered as a child, so that its weights are not listed twice
        self.__dict__["arguments"] = {}
        self.__dict__["answer"] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden: Tensor, **arguments: Any) -> Any:
        self.__dict__["arguments"] = arguments
        answer: Callable[[Tensor], Any] | None = self.__dict__["answer"]
        return hidden if answer is None else answer(hidden)


class StagedNetwork:
    """Runs the stages of a network.

    Args:
        network: a loaded network with all experts, its linear layers packed if they are to be packed. Its experts may
            be packed, and cut to those of a worker, afterwards.

    Raises:
        UnsupportedModelError: its layers cannot run in stages.

    Attributes:
        network: the network.
        is_sparse: for each layer, whether it has routed experts.
        arguments: arguments of the layers' calls.
        num_direct: number of layers that run directly.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._decoder: Any = network.model.get_decoder()
        layers = list(self._decoder.layers)[: network.num_layers]
        if len(layers) != network.num_layers:
            raise UnsupportedModelError(_refusal(network, "its layers are not in one list"))
        self._layers, self._stubs = layers, _Stubs(_Stub(layer) for layer in layers)
        self._num_called = len(layers)  # layers whose arguments a run of the front needs
        self._place_of = {layer: place for place, (layer, _) in enumerate(network.experts)}
        self.is_sparse = tuple(layer in self._place_of for layer in range(network.num_layers))
        with torch.inference_mode():
            probe, other = (_make_probe(network, lengths) for lengths in _PROBES)
            hidden, recording = self.run_front(probe)
            num_tokens = (sum(_PROBES[0]), sum(_PROBES[1]))
            try:
                self.arguments = LayerArguments(recording, self.run_front(other)[1], num_tokens)
            except ValueError as error:
                raise UnsupportedModelError(_refusal(network, str(error))) from error
            kinds = self.arguments.kind_of
            self._num_called = 1 + max(kinds.index(kind) for kind in kinds)
            self._stages, self._ends_directly = _Check(self, layers, probe, recording).choose(hidden)

    @property
    def num_direct(self) -> int:
        """Number of layers with experts that are not replayed."""
        return sum(
            not stages.keeps_mixed for stages, sparse in zip(self._stages, self.is_sparse, strict=True) if sparse
        )

    def token_form(self, num_chosen: int) -> TokenForm:
        """State that the network keeps of a token. `num_chosen`: experts that a token visits in a layer."""
        columns = list(self.arguments.columns)
        if self.network.override is not None:
            columns.append(ColumnForm((len(self._place_of), num_chosen), torch.int64))
        return TokenForm(
            hidden_size=self.network.config.hidden_size,
            num_chosen=num_chosen,
            dtype=self.network.dtype,
            keeps_mixed=any(map(self.is_replayed, range(len(self._stages)))),
            columns=tuple(columns),
        )

    @property
    def chosen_column(self) -> int | None:
        """Number of the column that replaces the gates' choices; None means that the gates choose."""
        return None if self.network.override is None else len(self.arguments.columns)

    def is_replayed(self, layer: int) -> bool:
        """Whether completing a layer needs its attention's output and its arguments again."""
        return self._stages[layer].keeps_mixed

    def run_front(self, step: PagedStep) -> tuple[Tensor, Recording]:
        """Run the part before the layers.

        Returns:
            The input of layer 0 [tokens, hidden size], and the arguments of each layer up to the first of the last
            kind.
        """
        last = self._stubs[self._num_called - 1]
        last.__dict__["answer"] = _raise_last
        try:
            with self._stubbed():
                self._decoder(
                    input_ids=step.input_ids,
                    position_ids=step.position_ids,
                    use_cache=False,
                    **{STEP_ARGUMENT: step},
                )
        except _LastLayer as reached:
            called = islice(self._stubs, self._num_called)
            return reached.args[0][0], tuple(stub.__dict__["arguments"] for stub in called)
        finally:
            last.__dict__["answer"] = None
        raise UnsupportedModelError(_refusal(self.network, "its layers were not called"))

    def enter(self, step: PagedStep) -> Entered:
        """Embed the step's tokens, and compute what the layers take of them besides hidden states."""
        hidden, recording = self.run_front(step)
        columns = self.arguments.split(recording)
        chosen = self.network.choose_experts(step)
        if chosen is not None:
            columns.append(chosen.transpose(0, 1))
        return Entered(hidden, columns)

    def attend(self, layer: int, hidden: Tensor, arguments: dict[str, Any], chosen: Tensor | None = None) -> Attended:
        """Run a layer up to its gate.

        Args:
            layer: the layer.
            hidden: [tokens, hidden size].
            arguments: keyword arguments of the layer.
            chosen: int64[tokens, layers with experts, k], replacement of the gates' choices; None means that the gates
                choose.
        """
        attended = self._stages[layer].attend(hidden, arguments)
        if chosen is None or attended.topk_ids is None:
            return attended
        return replace(attended, topk_ids=chosen[:, self._place_of[layer]])

    def complete(self, layer: int, attended: Attended, total: Tensor, arguments: dict[str, Any]) -> Tensor:
        """[tokens, hidden size], output of the layer.

        Args:
            layer: the layer.
            attended: state of the layer at its gate.
            total: [tokens, hidden size], weighted sum of the routed experts, in at least float32.
            arguments: as for `attend`; read only where `is_replayed`.
        """
        assert attended.inputs is not None
        if total.dtype != attended.inputs.dtype:
            total = total.to(attended.inputs.dtype)
        return self._stages[layer].complete(attended, total, arguments)

    def whole(self, layer: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """[tokens, hidden size], output of a layer that runs whole, and counts its experts in the network's `Routing`.

        Args:
            layer: the layer, with all its experts.
            hidden, arguments: as for `attend`.
        """
        return run_whole(self._layers[layer], hidden, arguments)

    def logits(self, hidden: Tensor, step: PagedStep) -> Tensor:
        """[tokens, vocabulary] in at least float32. `hidden`: [tokens, hidden size], output of the last layer."""
        if self._ends_directly:
            direct = self.logits_direct(hidden)
            assert direct is not None
            logits = direct
        else:
            logits = self.logits_replayed(hidden, step)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def logits_replayed(self, hidden: Tensor, step: PagedStep) -> Tensor:
        """[tokens, vocabulary], logits of the network's own forward around stand-ins. `step`: any step."""
        last = self._stubs[-1]
        last.__dict__["answer"] = lambda _: hidden[None]
        try:
            with self._stubbed():
                logits: Tensor = self.network.model(
                    input_ids=step.input_ids,
                    position_ids=step.position_ids,
                    use_cache=False,
                    **{STEP_ARGUMENT: step},
                ).logits[0]
        finally:
            last.__dict__["answer"] = None
        return logits

    def logits_direct(self, hidden: Tensor) -> Tensor | None:
        """[tokens, vocabulary], logits of the last norm and the head alone; None if the network has no such parts."""
        model = self.network.model
        if not (hasattr(model, "lm_head") and hasattr(self._decoder, "norm")):
            return None
        logits: Tensor = model.lm_head(self._decoder.norm(hidden))
        return logits

    @contextmanager
    def _stubbed(self) -> Iterator[None]:
        original = self._decoder._modules["layers"]
        self._decoder._modules["layers"] = self._stubs
        try:
            yield
        finally:
            self._decoder._modules["layers"] = original


def _raise_last(hidden: Tensor) -> Tensor:
    raise _LastLayer(hidden)


def _make_probe(network: Network, lengths: tuple[int, int]) -> PagedStep:
    """Make a step of two sequences of random tokens."""
    tokens = uniform(np.ones(1, np.uint64), np.arange(sum(lengths), dtype=np.uint64))
    first, second = np.split((tokens * network.config.vocab_size).astype(np.int32), lengths[:1])
    units = paged_units([(0, first), (0, second)], np.array([[0, 1], [2, 0]], np.int32))
    return PagedStep(units, KVPools(3, _BLOCK_SIZE), network.device)


class _Check:
    """Tries the ways to run each layer in stages on a step of two sequences, one of them a single token.

    Args:
        staged: the network.
        layers: its layers.
        step: the step.
        recording: arguments of the layers in this step.
    """

    def __init__(self, staged: StagedNetwork, layers: list[nn.Module], step: PagedStep, recording: Recording) -> None:
        self._staged, self._layers, self._network = staged, layers, staged.network
        self._experts = dict(staged.network.experts)
        self._step, self._recording = step, recording
        columns = staged.arguments.split(recording)
        self._arguments = [staged.arguments.fill(kind, columns.__getitem__, step) for kind in staged.arguments.kind_of]

    def choose(self, hidden: Tensor) -> tuple[list[LayerStages], bool]:
        """Choose the first way of each layer that matches the whole layer, and whether the end can run directly.

        Args:
            hidden: [tokens, hidden size], input of layer 0.
        """
        chosen = []
        if self._network.routing is not None:
            self._network.routing.begin(None)
        for layer, module in enumerate(self._layers):
            whole = run_whole(module, hidden, self._recording[layer])
            chosen.append(self._choose_layer(layer, module, hidden, whole))
            hidden = whole
        replayed = self._staged.logits_replayed(hidden, self._step)
        direct = self._staged.logits_direct(hidden)
        return chosen, direct is not None and self._is_close(direct, replayed)

    def _choose_layer(self, layer: int, module: nn.Module, hidden: Tensor, whole: Tensor) -> LayerStages:
        if not self._staged.is_sparse[layer]:
            return WholeLayer(module)
        for stages in self._ways(module):
            try:
                found = self._in_stages(layer, stages, hidden)
            except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError):
                continue  # the layer's parts have another interface
            if self._is_close(found, whole):
                return stages
        raise UnsupportedModelError(_refusal(self._network, f"layer {layer} in stages differs from the layer whole"))

    def _ways(self, module: nn.Module) -> Iterator[LayerStages]:
        yield from direct_plans(module)
        if "self_attn" in module._modules:
            yield ReplayedLayer(module, _routing_of(self._network))

    def _in_stages(self, layer: int, stages: LayerStages, hidden: Tensor) -> Tensor:
        attended = stages.attend(hidden, self._arguments[layer])
        assert attended.inputs is not None
        assert attended.topk_ids is not None
        assert attended.topk_weights is not None
        ids, order = attended.topk_ids.sort(dim=1)
        flat, k = ids.reshape(-1).tolist(), ids.shape[1]
        rows = attended.inputs.repeat_interleave(k, dim=0)
        done = torch.empty_like(rows)
        module = self._experts[layer]
        run_batches(module, [(expert, 1) for expert in flat], rows, done, packed=tag_of(module).packed)
        total = add_contributions(done.view(len(hidden), k, -1), attended.topk_weights.gather(1, order))
        return stages.complete(attended, total.to(hidden.dtype), self._arguments[layer])

    def _is_close(self, found: Tensor, wanted: Tensor) -> bool:
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return False
        scale = wanted.abs() + wanted.std()
        return bool(((found - wanted).abs() <= _TOLERANCE[self._network.dtype] * scale).all())


def _routing_of(network: Network) -> Routing:
    assert network.routing is not None
    return network.routing


def _refusal(network: Network, why: str) -> str:
    return f"{type(network.model).__name__} cannot run in stages: {why}. Use --mode fused."


_NUM_KNOWN = 8  # fragments that return in the next layer: one that runs, a few that are parked


class Fragment:
    """Some units inside the network.

    Args:
        step: the units' paged step.
        rows: rows of their tokens.
        staged: the network.
        arena: memory of these rows.

    Attributes:
        step, rows: as above.
        columns: [tokens, *sizes] of each column of the network's `TokenForm`, of units that have just entered. None
            means that the arena has them.
    """

    def __init__(self, step: PagedStep, rows: Index, staged: StagedNetwork, arena: Arena) -> None:
        self.step, self.rows = step, rows
        self.columns: list[Tensor] | None = None
        self._staged, self._arena = staged, arena
        self._by_kind: dict[int, dict[str, Any]] = {}
        self._chosen: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Number of the units' tokens."""
        return len(self.step.positions)

    def arguments(self, layer: int) -> dict[str, Any]:
        """Keyword arguments of a layer."""
        kind = self._staged.arguments.kind_of[layer]
        if kind not in self._by_kind:
            self._by_kind[kind] = self._staged.arguments.fill(kind, self.column, self.step)
        return self._by_kind[kind]

    @property
    def chosen(self) -> Tensor | None:
        """int64[tokens, layers with experts, k], in place of the gates' choices; None means that the gates choose."""
        column = self._staged.chosen_column
        if column is not None and self._chosen is None:
            self._chosen = self.column(column)
        return self._chosen

    def column(self, number: int) -> Tensor:
        """[tokens, *sizes], one of the columns of the network's `TokenForm`."""
        if self.columns is not None:
            return self.columns[number]
        return self._arena.read_column(number, self.rows)


class _Known(NamedTuple):
    units: Units
    rows: Int32s
    fragment: Fragment


class Fragments:
    """Makes fragments, and keeps the latest, because the same units return as the same object in the next layer.

    Args:
        staged: the network.
        pools: its KV cache.
        arena: memory of the tokens inside the network.
    """

    def __init__(self, staged: StagedNetwork, pools: KVPools, arena: Arena) -> None:
        self._staged, self._pools, self._arena = staged, pools, arena
        self._known: OrderedDict[int, _Known] = OrderedDict()  # by the id of `Units`, which are kept and so unique
        # Fragments whose arguments are not in the arena, in the order of their entry: rows of an earlier one that left
        # may be those of a later one.
        self._unwritten: list[Fragment] = []

    def enter(self, units: Units, rows: Int32s) -> tuple[Fragment, Tensor]:
        """Embed tokens, and keep their arguments.

        Returns:
            Their fragment, and the input of layer 0 [tokens, hidden size].
        """
        self.forget(units)
        fragment = self._make(units, rows)
        entered = self._staged.enter(fragment.step)
        fragment.columns = entered.columns
        self._unwritten.append(fragment)
        if len(self._unwritten) > _NUM_KNOWN:
            self._write()
        return fragment, entered.hidden

    def get(self, units: Units, rows: Int32s) -> Fragment:
        """Get the fragment of units that entered before, in whatever fragments."""
        known = self._known.get(id(units))
        if known is not None and (known.rows is rows or np.array_equal(known.rows, rows)):
            self._known.move_to_end(id(units))
            return known.fragment
        self._write()
        return self._make(units, rows)

    def _make(self, units: Units, rows: Int32s) -> Fragment:
        step = PagedStep(units, self._pools, self._staged.network.device)
        fragment = Fragment(step, self._arena.index(rows), self._staged, self._arena)
        self._known[id(units)] = _Known(units, rows, fragment)
        if len(self._known) > _NUM_KNOWN:
            self._known.popitem(last=False)
        return fragment

    def _write(self) -> None:
        """Store the arguments of all units in the arena."""
        for fragment in self._unwritten:
            assert fragment.columns is not None, "only what entered is unwritten"
            self._arena.write_columns(fragment.rows, fragment.columns)
        self._unwritten.clear()

    def arguments_at(self, layer: int, rows: Index) -> dict[str, Any]:
        """Keyword arguments of a layer whose attention is not run, for the tokens at `rows`."""
        self._write()
        arguments = self._staged.arguments
        return arguments.fill(arguments.kind_of[layer], lambda column: self._arena.read_column(column, rows), None)

    def forget(self, units: Units) -> None:
        """Forget the fragment of units that left the network."""
        known = self._known.pop(id(units), None)
        if known is not None and known.fragment in self._unwritten:
            self._unwritten.remove(known.fragment)
