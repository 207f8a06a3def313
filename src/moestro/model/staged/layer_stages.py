"""One decoder layer in stages: up to the gate, and from the experts' sum on. Other work may run between them.

A layer runs in one of three ways, each checked at load against running the layer whole (`staged_network`):

    direct      the canonical layer (norm, attention, residual, norm, gate, experts, shared experts, residual), whose
                parts are called one by one: 34 families of transformers 5 have exactly this forward
    replayed    any other layer with routed experts: its own forward runs twice, with stand-ins for what must not run:
                up to the experts, and again with the attention's and the experts' results inserted
    whole       a layer without experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moestro.errors import UnsupportedModelError
from moestro.model.experts.routed import Routing


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """State of a layer at its gate.

    Attributes:
        hidden: [tokens, hidden size], the tokens' residual stream; after a layer without experts, its output.
        inputs: [tokens, hidden size], input of the experts; None for a layer without experts, which is then complete.
        topk_ids: int64[tokens, k], topk_weights: [tokens, k], the gate's choice.
        mixed: [tokens, hidden size], the attention's output, where completing the layer needs it.
    """

    hidden: Tensor
    inputs: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    mixed: Tensor | None = None

    def first(self, num_tokens: int) -> Attended:
        """Return the state of the first tokens."""
        parts = (self.hidden, self.inputs, self.topk_ids, self.topk_weights, self.mixed)
        return Attended(*(None if each is None else each[:num_tokens] for each in parts))  # type: ignore[arg-type]


class LayerStages(Protocol):
    """A way to run one layer in stages. `arguments`: the keyword arguments with which the network calls the layer.

    Attributes:
        keeps_mixed: whether `complete` needs the attention's output and the arguments again.
    """

    keeps_mixed: bool

    def attend(self, hidden: Tensor, arguments: dict[str, Any]) -> Attended:
        """Run the layer up to its gate. `hidden`: [tokens, hidden size], the layer's input."""
        ...

    def complete(self, attended: Attended, total: Tensor, arguments: dict[str, Any]) -> Tensor:
        """[tokens, hidden size], output of the layer.

        Args:
            attended: state at the gate; only `hidden`, `inputs` and `mixed` are read.
            total: [tokens, hidden size], weighted sum of the routed experts, in the dtype of the inputs.
            arguments: as for `attend`, of these tokens; read only where `keeps_mixed`.
        """
        ...


# Attribute of a layer, in its `__dict__`: a `LayerFront` that replaces the modules of its front.
LAYER_FRONT = "moestro_front"


class LayerFront(Protocol):
    """Computes a canonical layer up to its gate in one call."""

    def __call__(self, hidden: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Return the residual stream and the experts' input, each [tokens, hidden size].

        None means that the arguments are unknown to it, and that the layer's modules have to run.
        """
        ...


class WholeLayer:
    """A layer without routed experts."""

    keeps_mixed = False

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def attend(self, hidden: Tensor, arguments: dict[str, Any]) -> Attended:
        """Run the whole layer."""
        return Attended(run_whole(self._layer, hidden, arguments))

    def complete(self, attended: Attended, total: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Raise: a layer without experts is complete after `attend`."""
        raise AssertionError("a layer without experts is complete at once")


# (the layer's `mlp`, the experts' input, their sum) -> the output of `mlp`.
Finish = Callable[[Any, Tensor, Tensor], Tensor]


def _routed_alone(mlp: Any, inputs: Tensor, total: Tensor) -> Tensor:
    return total


def _with_shared_experts(mlp: Any, inputs: Tensor, total: Tensor) -> Tensor:
    return total + mlp.shared_experts(inputs)  # type: ignore[no-any-return]


def _with_gated_shared_expert(mlp: Any, inputs: Tensor, total: Tensor) -> Tensor:
    shared = mlp.shared_expert(inputs)
    return total + torch.sigmoid(mlp.shared_expert_gate(inputs)) * shared  # type: ignore[no-any-return]


class DirectLayer:
    """The canonical decoder layer.

    Args:
        layer: with `input_layernorm`, `self_attn`, `post_attention_layernorm`, and `mlp` with `gate` or `router`.
        finish: function of `mlp` after its routed experts.
        corrects: whether `mlp` keeps the gate's correction and passes it to the gate.

    Attributes:
        is_routed_alone: whether the routed experts' sum is the output of `mlp`.
    """

    keeps_mixed = False

    def __init__(self, layer: Any, finish: Finish, *, corrects: bool) -> None:
        # Modules look up their children slowly, and each step uses several of them in each layer: look them up once.
        self._mlp, self._finish = layer.mlp, finish
        self.is_routed_alone = finish is _routed_alone
        self._before, self._attention = layer.input_layernorm, layer.self_attn
        self._between = layer.post_attention_layernorm
        self._gate = layer.mlp.gate if hasattr(layer.mlp, "gate") else layer.mlp.router
        self._correction = (layer.mlp.e_score_correction_bias,) if corrects else ()
        self._attributes = layer.__dict__

    def attend(self, hidden: Tensor, arguments: dict[str, Any]) -> Attended:
        """Implement `LayerStages`."""
        front: LayerFront | None = self._attributes.get(LAYER_FRONT)
        done = None if front is None else front(hidden, arguments)
        if done is not None:
            return self.choose(*done)
        stream = hidden[None]
        mixed, _ = self._attention(hidden_states=self._before(stream), **arguments)
        stream = stream + mixed
        return self.choose(stream[0], self._between(stream)[0])

    def choose(self, stream: Tensor, inputs: Tensor) -> Attended:
        """Let the gate choose. `stream`, `inputs`: [tokens, hidden size], as in `Attended`."""
        _, weights, ids = self._gate(inputs, *self._correction)
        return Attended(stream, inputs, ids, weights)

    def complete(self, attended: Attended, total: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Implement `LayerStages`."""
        assert attended.inputs is not None
        return attended.hidden + self._finish(self._mlp, attended.inputs, total)


class _ExpertsReached(Exception):  # noqa: N818 - no error: the way out of a forward that must not go on
    """Carries the arguments of the experts out of a layer's forward."""


class ReplayedLayer:
    """Any layer with one attention and one set of routed experts, whose own forward runs twice.

    Args:
        layer: a layer with a child `self_attn`.
        routing: state of its experts.
    """

    keeps_mixed = True

    def __init__(self, layer: nn.Module, routing: Routing) -> None:
        self._layer, self._routing = layer, routing

    def attend(self, hidden: Tensor, arguments: dict[str, Any]) -> Attended:
        """Implement `LayerStages`."""
        attention = _Recorder(self._layer.get_submodule("self_attn"))
        try:
            with _replaced(self._layer, "self_attn", attention), self._experts(_leave):
                run_whole(self._layer, hidden, arguments)
        except _ExpertsReached as reached:
            inputs, ids, weights = reached.args
            return Attended(hidden, inputs, ids, weights, attention.output[0])
        raise UnsupportedModelError("A layer did not reach its experts.")

    def complete(self, attended: Attended, total: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Implement `LayerStages`."""
        assert attended.mixed is not None
        attention = _Answer(self._layer.get_submodule("self_attn"), attended.mixed[None])
        with _replaced(self._layer, "self_attn", attention), self._experts(lambda *_: total):
            return run_whole(self._layer, attended.hidden, arguments)

    @contextmanager
    def _experts(self, stand_in: Callable[..., Tensor]) -> Iterator[None]:
        self._routing.stand_in = stand_in
        try:
            yield
        finally:
            self._routing.stand_in = None


def direct_plans(layer: Any) -> Iterator[DirectLayer]:
    """Yield direct ways that the layer's parts suggest. A later check decides whether one is right."""
    mlp = getattr(layer, "mlp", None)
    parts = ("input_layernorm", "self_attn", "post_attention_layernorm")
    if mlp is None or not all(hasattr(layer, part) for part in parts):
        return
    if not any(hasattr(mlp, gate) for gate in ("gate", "router")):
        return
    finish = _routed_alone
    if getattr(mlp, "shared_experts", None) is not None:
        finish = _with_shared_experts
    elif getattr(mlp, "shared_expert_gate", None) is not None:
        finish = _with_gated_shared_expert
    yield DirectLayer(layer, finish, corrects=hasattr(mlp, "e_score_correction_bias"))


def run_whole(layer: nn.Module, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
    """[tokens, hidden size], output of a layer, in whatever form the layer returns it."""
    answer = layer(hidden[None], **arguments)
    stream: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return stream[0]


def _leave(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    raise _ExpertsReached(hidden, top_k_index, top_k_weights)


class _Double(nn.Module):
    """Replaces a module and passes attribute access on to the original."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original  # not registered as a child: it stays where it is

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)


class _Recorder(_Double):
    """Calls the original and stores its answer."""

    output: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        answer = self.__dict__["original"](*args, **kwargs)
        self.__dict__["output"] = answer[0] if isinstance(answer, tuple) else answer
        return answer


class _Answer(_Double):
    """Returns a fixed answer."""

    def __init__(self, original: nn.Module, output: Tensor) -> None:
        super().__init__(original)
        self.__dict__["output"] = output

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return self.__dict__["output"], None


@contextmanager
def _replaced(parent: nn.Module, name: str, double: nn.Module) -> Iterator[None]:
    original = parent._modules[name]
    parent._modules[name] = double
    try:
        yield
    finally:
        parent._modules[name] = original
