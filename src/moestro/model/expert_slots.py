"""Weights of a layer's routed experts by slot: those that a worker keeps, one at a time in and out, and packing."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from torch import Tensor, nn

from moestro.core.expert_table import EMPTY
from moestro.core.work import Int32s
from moestro.model.experts import PackedExperts, retag, tag_of, weights_of
from moestro.model.packing import pack


class ExpertWeights(NamedTuple):
    """Weights of one expert, in the layout of its module and not packed.

    Attributes:
        up: [inner, hidden size], or [hidden size, inner] where the module is transposed.
        up_bias: [inner], or None.
        down: [hidden size, inner], or [inner, hidden size] where the module is transposed; `inner` may differ from that
            of `up`, whose activation joins two halves.
        down_bias: [hidden size], or None.
    """

    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def keep_experts(module: nn.Module, logical_of: Int32s) -> None:
    """Drop all experts of a tagged module that is not packed, except those of some slots.

    Args:
        module: a module that has all experts.
        logical_of: int32[slots], logical expert in each slot; EMPTY means none.
    """
    tag = tag_of(module)
    assert tag.logical_of is None, "experts are kept by logical id, which a cut module no longer has"
    assert not tag.packed, "experts are packed after they are cut"
    for tensor in weights_of(cast(PackedExperts, module)):
        if tensor is not None:
            kept = tensor.data.new_zeros(len(logical_of), *tensor.shape[1:])
            for slot in np.flatnonzero(logical_of != EMPTY).tolist():
                kept[slot] = tensor.data[logical_of[slot]]
            tensor.data = kept
    retag(module, logical_of=logical_of.copy())


def pack_experts(module: nn.Module) -> None:
    """Pack the weights of a tagged experts module for `run_each` and drop the unpacked ones."""
    tag, experts = tag_of(module), cast(PackedExperts, module)
    up, _, down, _ = weights_of(experts)
    is_empty = np.zeros(len(up), np.bool_) if tag.logical_of is None else tag.logical_of == EMPTY
    none = (up.new_empty(0), down.new_empty(0))
    packed = [
        none if empty else (_pack(experts, up.data[slot]), _pack(experts, down.data[slot]))
        for slot, empty in enumerate(is_empty.tolist())
    ]
    retag(module, packed=packed)
    for weight in (up, down):
        weight.data = weight.data.new_empty(0)


def read_expert(module: nn.Module, slot: int) -> ExpertWeights:
    """Copy the weights in a slot that is not empty, bit for bit as the checkpoint has them."""
    experts, packed = cast(PackedExperts, module), tag_of(module).packed
    up, up_bias, down, down_bias = weights_of(experts)
    if packed:
        first, second = (weight.to_dense() for weight in packed[slot])
        first, second = (first.T, second.T) if experts.is_transposed else (first, second)
    else:
        first, second = up.data[slot], down.data[slot]
    biases = [None if bias is None else bias.data[slot].clone() for bias in (up_bias, down_bias)]
    return ExpertWeights(first.clone(), biases[0], second.clone(), biases[1])


def pick_expert(module: nn.Module, expert: int) -> ExpertWeights:
    """Copy the weights of an expert of a module that is neither tagged nor packed."""
    weights = weights_of(cast(PackedExperts, module))
    up, up_bias, down, down_bias = (None if each is None else each.data[expert].clone() for each in weights)
    assert up is not None
    assert down is not None
    return ExpertWeights(up, up_bias, down, down_bias)


def write_expert(module: nn.Module, slot: int, logical: int, weights: ExpertWeights) -> None:
    """Replace the expert in a slot of a cut module. No item in flight may use the slot.

    Args:
        module: a module after `keep_experts`.
        slot: the slot.
        logical: logical expert that the slot holds from now on.
        weights: its weights, on any device.
    """
    tag, experts = tag_of(module), cast(PackedExperts, module)
    assert tag.logical_of is not None, "a module with all experts has no slots to rewrite"
    up, up_bias, down, down_bias = weights_of(experts)
    if tag.packed:
        packed = (_pack(experts, weights.up.to(up.device)), _pack(experts, weights.down.to(down.device)))
        retag(module, packed=[*tag.packed[:slot], packed, *tag.packed[slot + 1 :]])
    else:
        up.data[slot] = weights.up
        down.data[slot] = weights.down
    for mine, given in ((up_bias, weights.up_bias), (down_bias, weights.down_bias)):
        if mine is not None and given is not None:
            mine.data[slot] = given
    tag.logical_of[slot] = logical


def _pack(experts: PackedExperts, weight: Tensor) -> Tensor:
    return pack(weight.T if experts.is_transposed else weight)
