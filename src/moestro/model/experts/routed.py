"""Routed experts of a layer, registered with transformers' experts interface.

Each (token, chosen expert) is computed once. A token's contributions are added in ascending expert id and in at least
float32, in whatever order the gate names them. The sum is therefore bit-identical wherever each expert is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

from moestro.model.kernels.packing import PackedSlots
from moestro.model.step import ExpertVisitCounter
from moestro.model.tensors import BLOCK, SCALES, Float8Weight

EXPERTS = "moestro"  # name in the registry
_TAG = "moestro_layer"


class PackedExperts(Protocol):
    """The common interface of transformers' experts modules.

    Weights are `gate_up_proj` or `up_proj` [experts, inner, hidden] and `down_proj` [experts, hidden, inner], the last
    two dimensions swapped where `is_transposed`; with `has_bias`, each has a `*_bias`.
    """

    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    down_proj: Tensor

    def act_fn(self, rows: Tensor) -> Tensor:
        """The activation of ungated experts."""
        ...

    def _apply_gate(self, rows: Tensor) -> Tensor:
        """The gated activation: half as many columns."""
        ...


class ExpertWeights(NamedTuple):
    """Weights of one expert in the layout of its module, not packed; or of all experts, with a dimension before.

    Attributes:
        up: [inner, hidden size], or [hidden size, inner] where the module is transposed.
        up_bias: [inner], or None.
        down: [hidden size, inner], or [inner, hidden size] where the module is transposed; `inner` may differ from that
            of `up`, whose activation joins two halves.
        down_bias: [hidden size], or None.
        up_scales, down_scales: float32[row blocks, column blocks] of weights in float8, or None. Gates have blocks of
            their own, before those of ups.
    """

    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    up_scales: Tensor | None = None
    down_scales: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> ExpertWeights:
        """The same with every tensor changed."""
        return ExpertWeights(*(None if each is None else change(each) for each in self))  # type: ignore[arg-type]


class ExpertsInPlace(Protocol):
    """Computes experts whole from a module's own weights, which stay where they are."""

    def weighted_sum(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, counts: Tensor, stream: Tensor | None = None
    ) -> Tensor:
        """Compute the sums of `routed_experts`, added to `stream` where there is one; arguments as there.

        Args:
            counts: int64[experts or more], to which the tokens of each expert are added.
        """
        ...

    def answers(self, batches: Sequence[tuple[int, int]], inputs: Tensor, out: Tensor, start: int = 0) -> int:
        """Write what some experts answer, not weighted; arguments and result as `run_batches`."""
        ...

    def chosen_answers(self, hidden: Tensor, topk_ids: Tensor) -> Tensor:
        """[tokens * k, hidden size], what each token's experts answer, not weighted."""
        ...


_MAX_SAMPLED_TOKENS = 32  # of a step whose choices are kept; their pairs cost time in proportion


class Routing:
    """State that the experts of one network share in a step: counts and choices, and an override of the gate.

    Args:
        num_layers: layers of the network, dense ones included.
        num_experts: experts of the layer that has most.
        device: device of the counts.

    Attributes:
        counts: int64[num_layers, num_experts], tokens that each expert computed since `begin`.
        sample_interval: one step in so many keeps choices; 0 means none.
        keeps_all: whether each step keeps the choices of all its tokens.
        stand_in: function called in place of all experts, with their arguments; None means that the experts compute.
            An override of the gate is already applied.
        visits: counts the workers of each unit's experts, which `stand_in` tells it. None means that nothing does.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self._shape, self._device = (num_layers, num_experts), device
        self.stand_in: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor] | None = None
        self.visits: ExpertVisitCounter | None = None
        self.sample_interval = self._num_steps = 0
        self.keeps_all = False
        self._choices: list[Tensor] | None = None
        self.begin(None)

    def begin(self, chosen: Tensor | None) -> None:
        """Reset the counts at the start of a step.

        Args:
            chosen: int64[layers with experts, tokens, k], experts that replace the gate's choice, or None.
        """
        self.counts = torch.zeros(self._shape, dtype=torch.int64, device=self._device)
        self.chosen = chosen
        self._num_steps += 1
        is_sampled = self.sample_interval and self._num_steps % self.sample_interval == 0
        self._choices = [] if is_sampled or self.keeps_all else None

    def resume(self, counts: Tensor, choices: list[Tensor], num_tokens: int) -> None:
        """Take over what a step has computed that was recorded with `keeps_all`, and had so many tokens this time."""
        self.begin(None)
        self.counts = counts
        if self._choices is not None:
            for each in choices:
                self.keep(each[:num_tokens])

    def kept(self) -> list[Tensor]:
        """Choices of all tokens in each layer, in a step with `keeps_all`."""
        return self._choices or []

    def keep(self, top_k_index: Tensor) -> None:
        """Keep the experts of some tokens of a layer, evenly spread, if the step is sampled. Layers come in order."""
        if self._choices is not None:
            stride = 1 if self.keeps_all else -(-len(top_k_index) // _MAX_SAMPLED_TOKENS)
            self._choices.append(top_k_index[:: max(stride, 1)])

    def choices(self) -> Tensor | None:
        """int32[layers with experts, sampled tokens, k], choices of the step; None if it is not sampled."""
        return torch.stack(self._choices).to(torch.int32) if self._choices else None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLayer:
    """Context of an experts module that the module itself does not know.

    Attributes:
        layer: its layer in the network.
        place: its place among the layers with experts.
        routing: state shared by the network's experts.
        hidden_size, dtype: hidden size and dtype of the experts' inputs and answers.
        layout: shape and dtype of each of one expert's `ExpertWeights`, not packed; None where there are none.
        logical_of: int32[slots], logical expert in each slot; EMPTY means none. None means that the module has all
            experts, each in the slot of its number.
        packed: packed weights of the slots; None if the weights are not packed.
        in_place: computes the experts whole from the module's own weights; None means that nothing does.
    """

    layer: int
    place: int
    routing: Routing
    hidden_size: int
    dtype: torch.dtype
    layout: tuple[tuple[torch.Size, torch.dtype] | None, ...]
    logical_of: NDArray[np.int32] | None = None
    packed: PackedSlots | None = None
    in_place: ExpertsInPlace | None = None


def tag_experts(modules: list[tuple[int, nn.Module]], routing: Routing, dtype: torch.dtype) -> None:
    """Attach its context to each experts module.

    Args:
        modules: (layer, experts module), ascending.
        routing: state that they share.
        dtype: dtype of the inputs of experts in float8; others have inputs of the dtype of their weights.
    """
    for place, (layer, module) in enumerate(modules):
        experts = cast(PackedExperts, module)
        weights = weights_of(experts)
        up = weights.up
        hidden_size = up.shape[1] if experts.is_transposed else up.shape[2]
        dtype = up.dtype if weights.up_scales is None else dtype
        layout = tuple(None if each is None else (each.shape[1:], each.dtype) for each in weights)
        setattr(module, _TAG, ExpertLayer(layer, place, routing, hidden_size, dtype, layout))


def tag_of(module: nn.Module) -> ExpertLayer:
    """Context of a tagged experts module."""
    tag = getattr(module, _TAG)
    assert isinstance(tag, ExpertLayer)
    return tag


def retag(module: nn.Module, **changes: Any) -> None:
    """Replace fields of a tagged module's `ExpertLayer`."""
    setattr(module, _TAG, replace(tag_of(module), **changes))


def is_experts(module: nn.Module) -> bool:
    """Whether transformers routes `module` through its experts interface."""
    return hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")


def routed_experts(
    module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, stream: Tensor | None = None
) -> Tensor:
    """Compute the weighted sum of each token's experts, and count the tokens of each expert.

    Args:
        module: an experts module that `tag_experts` has tagged.
        hidden: [tokens, hidden size].
        top_k_index: int64[tokens, k], distinct in a row, in any order.
        top_k_weights: [tokens, k].
        stream: [tokens, hidden size], to which the sums are added; None means that they are returned alone.

    Returns:
        [tokens, hidden size], with the dtype of `hidden`.
    """
    tag = tag_of(module)
    if tag.routing.chosen is not None:
        top_k_index = tag.routing.chosen[tag.place]
    tag.routing.keep(top_k_index)
    if tag.routing.stand_in is not None:
        total = tag.routing.stand_in(module, hidden, top_k_index, top_k_weights)
    elif tag.in_place is not None and tag.logical_of is None:
        counts = tag.routing.counts[tag.layer]
        return tag.in_place.weighted_sum(hidden, top_k_index, top_k_weights, counts, stream)
    else:
        total = sum_experts(module, hidden, top_k_index, top_k_weights, tag.routing.counts[tag.layer])
    return total if stream is None else stream + total


def sum_experts(module: nn.Module, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, counts: Tensor) -> Tensor:
    """[tokens, hidden size], `routed_experts` of a module that has all experts, without a replacement of any part.

    Args:
        module, hidden, topk_ids, topk_weights: as for `routed_experts`.
        counts: int64[experts or more], to which the tokens of each expert are added.
    """
    tag = tag_of(module)
    assert tag.logical_of is None, "some experts of this module are elsewhere"
    if tag.in_place is not None:
        return tag.in_place.weighted_sum(hidden, topk_ids, topk_weights, counts)
    if tag.packed is not None and tag.packed.whole is not None:
        return tag.packed.whole.weighted_sum(hidden, topk_ids, topk_weights, counts)
    by_expert, rows, own_counts = sort_by_expert(module, hidden, topk_ids)
    counts[: len(own_counts)] += own_counts
    return combine(run_slots(module, rows, own_counts), by_expert, topk_weights).to(hidden.dtype)


def sort_by_expert(module: nn.Module, hidden: Tensor, topk_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Order (token, choice) pairs by expert, and those of an expert by token.

    Returns:
        The pairs int64[tokens * k] as token * k + choice; their rows [tokens * k, hidden size] of `hidden`; the rows of
        each expert int64[experts].
    """
    flat = topk_ids.reshape(-1)
    by_expert = flat.argsort(stable=True)
    rows = hidden.index_select(0, by_expert // topk_ids.shape[1])
    counts = torch.zeros(cast(PackedExperts, module).num_experts, dtype=torch.int64, device=hidden.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return by_expert, rows, counts


def run_slots(module: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
    """[rows, hidden size], answers of the experts in a tagged module's slots, not weighted.

    Args:
        rows: [rows, hidden size], those of slot 0 first.
        counts: int64[slots], rows of each.
    """
    experts = cast(PackedExperts, module)
    in_place = tag_of(module).in_place
    if in_place is not None:
        return in_place.chosen_answers(rows, _expert_of_row(counts, len(rows))[:, None])
    if rows.is_cuda and can_group(experts, rows):
        return run_grouped(experts, rows, counts)
    return run_each(experts, rows, counts, tag_of(module).packed)


def run_each(experts: PackedExperts, rows: Tensor, counts: Tensor, packed: PackedSlots | None = None) -> Tensor:
    """[rows, hidden size], one expert after the other: the plain twin, and with packed weights the fast path on a CPU.

    The host reads the counts, so an accelerator is waited for here.

    Args:
        rows: [rows, hidden size], those of expert 0 first.
        counts: int64[experts], rows of each.
        packed: as `ExpertLayer.packed`.
    """
    out = torch.empty_like(rows)
    batches = [(expert, count) for expert, count in enumerate(counts.tolist()) if count]
    run_batches(experts, batches, rows, out, packed=packed)
    return out


def run_batches(
    experts: PackedExperts,
    batches: Sequence[tuple[int, int]],
    rows: Tensor,
    out: Tensor,
    *,
    start: int = 0,
    packed: PackedSlots | None = None,
) -> int:
    """Write what some experts answer, not weighted, one after the other.

    Args:
        batches: (expert, its rows), which lie end to end in `rows` from row `start` on.
        rows, out: [rows, hidden size].
        packed: as `ExpertLayer.packed`.

    Returns:
        The row behind the last.
    """
    whole = in_place_of(experts) or (None if packed is None else packed.whole)
    if whole is not None:
        return whole.answers(batches, rows, out, start)
    plain = torch.matmul if experts.is_transposed else functional.linear
    multiply = plain if packed is None else packed.packing.linear
    weights = weights_of(experts)  # once: a module finds its parameters slowly
    for expert, count in batches:
        first, second = _plain_weights(experts, weights, expert, rows.dtype) if packed is None else packed.slots[expert]
        inner = multiply(rows[start : start + count], first)
        if weights.up_bias is not None:
            inner += weights.up_bias[expert]
        outer = multiply(_activate(experts, inner), second)
        if weights.down_bias is not None:
            outer += weights.down_bias[expert]
        out[start : start + count] = _normalize(experts, outer)
        start += count
    return start


def _plain_weights(
    experts: PackedExperts, weights: ExpertWeights, expert: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Up and down weights of one expert, those in float8 in another dtype."""
    up, down = weights.up[expert], weights.down[expert]
    if weights.up_scales is None or weights.down_scales is None:
        return up, down
    block, num_halves = getattr(experts, BLOCK), 2 if experts.has_gate else 1
    halves = zip(up.chunk(num_halves), weights.up_scales[expert].chunk(num_halves), strict=True)
    first = [Float8Weight(numbers, scales, block).dequantised(dtype) for numbers, scales in halves]
    return torch.cat(first), Float8Weight(down, weights.down_scales[expert], block).dequantised(dtype)


def add_contributions(contributions: Tensor, weights: Tensor) -> Tensor:
    """[tokens, hidden size] in at least float32: what `routed_experts` makes of them, bit for bit.

    Args:
        contributions: [tokens, k, hidden size], of each token in ascending expert id.
        weights: [tokens, k], in the same order.
    """
    precision = torch.promote_types(contributions.dtype, torch.float32)
    weights = weights.to(precision)
    total = contributions[:, 0].to(precision) * weights[:, :1]
    for k in range(1, weights.shape[1]):
        total += contributions[:, k].to(precision) * weights[:, k : k + 1]
    return total


def run_grouped(experts: PackedExperts, rows: Tensor, counts: Tensor) -> Tensor:
    """Compute the result of `run_each` in two grouped products. No count reaches the host: no accelerator waits."""
    ends = counts.cumsum(0).to(torch.int32)
    up, up_bias, down, down_bias, *_ = weights_of(experts)
    if up_bias is not None:
        of_row = _expert_of_row(counts, len(rows))
    if not experts.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    inner = functional.grouped_mm(rows, up, offs=ends)
    if up_bias is not None:
        inner = inner + up_bias[of_row]
    outer = functional.grouped_mm(_activate(experts, inner), down, offs=ends)
    if down_bias is not None:
        outer = outer + down_bias[of_row]
    return _normalize(experts, outer)


def _expert_of_row(counts: Tensor, num_rows: int) -> Tensor:
    """int64[rows], expert of each row, of which each expert has so many, those of expert 0 first."""
    rows = torch.arange(num_rows, device=counts.device)
    return torch.searchsorted(counts.cumsum(0), rows, right=True)


def in_place_of(experts: Any) -> ExpertsInPlace | None:
    """Return the object that computes a module's experts whole from its own weights; None if there is none."""
    tag = getattr(experts, _TAG, None)
    return tag.in_place if isinstance(tag, ExpertLayer) else None


def register_experts() -> None:
    """Register the function with transformers. A second call is harmless."""
    ExpertsInterface.register(EXPERTS, routed_experts)


def combine(rows: Tensor, by_expert: Tensor, weights: Tensor) -> Tensor:
    """[tokens, hidden size], weighted sums in at least float32.

    Args:
        rows: [tokens * k, hidden size], in ascending expert id.
        by_expert: int64[tokens * k], (token, choice) of each row as token * k + choice.
        weights: [tokens, k].
    """
    precision = torch.promote_types(rows.dtype, torch.float32)
    place = torch.empty_like(by_expert)
    place[by_expert] = torch.arange(len(by_expert), device=rows.device)
    # Rows are in order of expert id, so a token's places in ascending order are its experts in ascending order.
    place, choice = place.view(weights.shape).sort(dim=1)
    weights = weights.gather(1, choice).to(precision)
    total = rows.index_select(0, place[:, 0]).to(precision) * weights[:, :1]
    for k in range(1, weights.shape[1]):
        total += rows.index_select(0, place[:, k]).to(precision) * weights[:, k : k + 1]
    return total


def weights_of(experts: PackedExperts) -> ExpertWeights:
    """Weights of all experts."""
    up, down = weight_names(experts)
    biases = [getattr(experts, f"{name}_bias") if experts.has_bias else None for name in (up, down)]
    scales = [getattr(experts, f"{name}{SCALES}", None) for name in (up, down)]
    return ExpertWeights(getattr(experts, up), biases[0], getattr(experts, down), biases[1], *scales)


def weight_names(experts: PackedExperts) -> tuple[str, str]:
    """Names of a module's up and down weights."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _activate(experts: PackedExperts, inner: Tensor) -> Tensor:
    return experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)


def _normalize(experts: PackedExperts, outer: Tensor) -> Tensor:
    # transformers 5.17 does not know the attribute.
    if getattr(experts, "has_post_expert_norm", False):
        outer = cast(Any, experts).post_expert_norm(outer)
    return outer


def can_group(experts: PackedExperts, rows: Tensor) -> bool:
    """Whether this torch has the grouped kernels, which need bfloat16 and rows of whole 16-byte words."""
    weights = weights_of(experts)
    if weights.up_scales is not None:
        return False
    sizes = (*weights.up.shape[1:], *weights.down.shape[1:])
    return hasattr(functional, "grouped_mm") and rows.dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes)
