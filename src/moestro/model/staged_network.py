"""A network in stages: the part before the first layer, each layer in two stages, and the part after the last.

The network's own forward runs with stand-ins for its layers: once to record the arguments of each layer, and for the
end, where calling its last norm and its head directly gives another result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moestro.core.rng import uniform
from moestro.errors import UnsupportedModelError
from moestro.model.attention import STEP_ARGUMENT
from moestro.model.check import paged_units
from moestro.model.experts import Routing, add_contributions, packed_weights, run_batches
from moestro.model.layer_stages import (
    Attended,
    LayerStages,
    ReplayedLayer,
    WholeLayer,
    direct_plans,
    run_whole,
)
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep

# Largest difference between a layer whole and in stages, relative to the value and the spread of all values. The same
# kernels run on the same rows, so a wrong way differs by far more.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.05}
_BLOCK_SIZE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Entered:
    """A step after the part before the layers.

    Attributes:
        step: the step.
        hidden: [tokens, hidden size], input of layer 0.
        arguments: for each layer, the keyword arguments of its call.
        chosen: int64[layers with experts, tokens, k], replacement of the gates' choices; None means the gates choose.
    """

    step: PagedStep
    hidden: Tensor
    arguments: tuple[dict[str, Any], ...]
    chosen: Tensor | None


class _LastLayer(Exception):  # noqa: N818 - no error: the way out of a forward that must not go on
    """Carries the hidden states out of a network's forward."""


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
        network: a loaded network, packed if it is to be packed.

    Raises:
        UnsupportedModelError: its layers cannot run in stages.

    Attributes:
        network: the network.
        is_sparse: for each layer, whether it has routed experts.
        keeps_mixed: whether some layer needs its attention's output again.
        num_direct: number of layers that run directly.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._decoder: Any = network.model.get_decoder()
        layers = list(self._decoder.layers)[: network.num_layers]
        if len(layers) != network.num_layers:
            raise UnsupportedModelError(_refusal(network, "its layers are not in one list"))
        self._stubs = nn.ModuleList(_Stub(layer) for layer in layers)
        self._experts = dict(network.experts)
        self._place_of = {layer: place for place, layer in enumerate(self._experts)}
        self.is_sparse = tuple(layer in self._experts for layer in range(network.num_layers))
        with torch.inference_mode():
            self._stages, self._ends_directly = _Check(self, layers).choose()
        self.keeps_mixed = any(stages.keeps_mixed for stages in self._stages)

    @property
    def num_direct(self) -> int:
        """Number of layers with experts that are not replayed."""
        return sum(
            not stages.keeps_mixed for stages, sparse in zip(self._stages, self.is_sparse, strict=True) if sparse
        )

    def enter(self, step: PagedStep) -> Entered:
        """Run the part before the layers."""
        last = self._stubs[-1]
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
            arguments = tuple(stub.__dict__["arguments"] for stub in self._stubs)
            return Entered(step, reached.args[0][0], arguments, self.network.choose_experts(step))
        finally:
            last.__dict__["answer"] = None
        raise UnsupportedModelError(_refusal(self.network, "its layers were not called"))

    def attend(self, layer: int, hidden: Tensor, entered: Entered) -> Attended:
        """Run a layer up to its gate. `hidden`: [tokens, hidden size]."""
        attended = self._stages[layer].attend(hidden, entered.arguments[layer])
        if entered.chosen is None or attended.topk_ids is None:
            return attended
        chosen = entered.chosen[self._place_of[layer]]
        return Attended(attended.hidden, attended.inputs, chosen, attended.topk_weights, attended.mixed)

    def run_batches(
        self, layer: int, batches: Sequence[tuple[int, int]], rows: Tensor, out: Tensor, *, start: int = 0
    ) -> int:
        """Run experts as `model.experts.run_batches` does."""
        module = self._experts[layer]
        return run_batches(module, batches, rows, out, start=start, packed=packed_weights(module))

    def experts_of(self, layer: int) -> Any:
        """Experts module of a layer."""
        return self._experts[layer]

    def complete(self, layer: int, attended: Attended, total: Tensor) -> Tensor:
        """[tokens, hidden size], output of the layer.

        Args:
            attended: state of the layer at its gate.
            total: [tokens, hidden size], weighted sum of the routed experts, in at least float32.
        """
        inputs = attended.inputs
        assert inputs is not None
        return self._stages[layer].complete(attended.hidden, inputs, attended.mixed, total.to(inputs.dtype))

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


class _Check:
    """Tries the ways to run each layer in stages on two sequences, one of them a single token."""

    def __init__(self, staged: StagedNetwork, layers: list[nn.Module]) -> None:
        self._staged, self._layers, self._network = staged, layers, staged.network
        lengths = (7, 1)
        tokens = uniform(np.ones(1, np.uint64), np.arange(sum(lengths), dtype=np.uint64))
        ids = (tokens * self._network.config.vocab_size).astype(np.int32)
        units = paged_units([(0, ids[:7]), (0, ids[7:])], np.array([[0, 1], [2, 0]], np.int32))
        pools = KVPools(3, _BLOCK_SIZE)
        self._entered = staged.enter(PagedStep(units, pools, self._network.device))

    def choose(self) -> tuple[list[LayerStages], bool]:
        """Choose the first way of each layer that matches the whole layer, and whether the end can run directly."""
        hidden, chosen = self._entered.hidden, []
        if self._network.routing is not None:
            self._network.routing.begin(None)
        for layer, module in enumerate(self._layers):
            whole = run_whole(module, hidden, self._entered.arguments[layer])
            chosen.append(self._choose_layer(layer, module, hidden, whole))
            hidden = whole
        replayed = self._staged.logits_replayed(hidden, self._entered.step)
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
        attended = stages.attend(hidden, self._entered.arguments[layer])
        assert attended.inputs is not None
        assert attended.topk_ids is not None
        assert attended.topk_weights is not None
        ids, order = attended.topk_ids.sort(dim=1)
        flat, k = ids.reshape(-1).tolist(), ids.shape[1]
        rows = attended.inputs.repeat_interleave(k, dim=0)
        done = torch.empty_like(rows)
        self._staged.run_batches(layer, [(expert, 1) for expert in flat], rows, done)
        total = add_contributions(done.view(len(hidden), k, -1), attended.topk_weights.gather(1, order))
        return stages.complete(attended.hidden, attended.inputs, attended.mixed, total.to(hidden.dtype))

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
