"""Weights of a layer's routed experts by slot: those that a worker keeps, one at a time in and out, and packing."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from torch import Tensor, nn

from moestro.core.experts.expert_table import EMPTY
from moestro.core.work import Int32s
from moestro.model.experts.routed import ExpertWeights, PackedExperts, retag, tag_of, weights_of
from moestro.model.kernels.packing import TORCH_PACKING, PackedSlots, WeightPacking


def keep_experts(module: nn.Module, logical_of: Int32s) -> None:
    """Drop all experts of a tagged module that is not packed, except those of some slots.

    Args:
        module: a module that has all experts.
        logical_of: int32[slots], logical expert in each slot; EMPTY means none.
    """
    tag = tag_of(module)
    assert tag.logical_of is None, "experts are kept by logical id, which a cut module no longer has"
    assert tag.packed is None, "experts are packed after they are cut"
    for tensor in weights_of(cast(PackedExperts, module)):
        if tensor is not None:
            kept = tensor.data.new_zeros(len(logical_of), *tensor.shape[1:])
            for slot in np.flatnonzero(logical_of != EMPTY).tolist():
                kept[slot] = tensor.data[logical_of[slot]]
            tensor.data = kept
    retag(module, logical_of=logical_of.copy())


def pack_experts(module: nn.Module, packing: WeightPacking = TORCH_PACKING) -> None:
    """Pack the weights of a tagged experts module and drop the unpacked ones, or change the layout of packed ones."""
    tag, experts = tag_of(module), cast(PackedExperts, module)
    up, _, down, *_ = weights_of(experts)
    if tag.packed is not None:
        retag(module, packed=_repack(tag.packed, packing))
        return
    is_empty = np.zeros(len(up), np.bool_) if tag.logical_of is None else tag.logical_of == EMPTY
    none = (up.new_empty(0), down.new_empty(0))
    slots = tuple(
        none if empty else (_pack(experts, up.data[slot], packing), _pack(experts, down.data[slot], packing))
        for slot, empty in enumerate(is_empty.tolist())
    )
    retag(module, packed=PackedSlots(packing, slots))
    for weight in (up, down):
        weight.data = weight.data.new_empty(0)


def _repack(packed: PackedSlots, packing: WeightPacking) -> PackedSlots:
    def change(weight: Tensor) -> Tensor:
        return packing.pack(packed.packing.unpack(weight)) if weight.numel() else weight

    return PackedSlots(packing, tuple((change(up), change(down)) for up, down in packed.slots))


def read_expert(module: nn.Module, slot: int) -> ExpertWeights:
    """Copy the weights in a slot that is not empty, bit for bit as the checkpoint has them."""
    experts, packed = cast(PackedExperts, module), tag_of(module).packed
    weights = weights_of(experts)
    if packed is None:
        return weights.map(lambda each: each.data[slot].clone())
    first, second = (packed.packing.unpack(weight) for weight in packed.slots[slot])
    first, second = (first.T, second.T) if experts.is_transposed else (first, second)
    biases = [None if bias is None else bias.data[slot].clone() for bias in (weights.up_bias, weights.down_bias)]
    return ExpertWeights(first.clone(), biases[0], second.clone(), biases[1])


def pick_expert(module: nn.Module, expert: int) -> ExpertWeights:
    """Copy the weights of an expert of a module that is neither tagged nor packed."""
    return weights_of(cast(PackedExperts, module)).map(lambda each: each.data[expert].clone())


class PreparedExpert(NamedTuple):
    """Weights of one expert in the form in which a module computes with them.

    Attributes:
        weights: weights, those of `up` and `down` packed where the module's are.
        packing: layout of the weights; None if they are not packed.
    """

    weights: ExpertWeights
    packing: WeightPacking | None


def prepare_expert(module: nn.Module, weights: ExpertWeights) -> PreparedExpert:
    """Bring weights, on any device, into the form of a cut module, so that `install_expert` has little left to do."""
    experts = cast(PackedExperts, module)
    device, packed = weights_of(experts).up.device, tag_of(module).packed
    weights = weights.map(lambda each: each.to(device))
    if packed is None:
        return PreparedExpert(weights, None)
    up, down = (_pack(experts, each, packed.packing) for each in (weights.up, weights.down))
    return PreparedExpert(weights._replace(up=up, down=down), packed.packing)


def install_expert(module: nn.Module, slot: int, logical: int, prepared: PreparedExpert) -> None:
    """Replace the expert in a slot of a cut module. No item in flight may use the slot.

    Args:
        module: a module after `keep_experts`.
        slot: the slot.
        logical: logical expert that the slot holds from now on.
        prepared: its weights.
    """
    tag = tag_of(module)
    assert tag.logical_of is not None, "a module with all experts has no slots to rewrite"
    held, given = weights_of(cast(PackedExperts, module)), prepared.weights
    if tag.packed is not None:
        retag(module, packed=tag.packed.with_slot(slot, *_in_layout(prepared, tag.packed.packing)))
        held, given = held._replace(up=None, down=None), given._replace(up=None, down=None)  # type: ignore[arg-type]
    for mine, new in zip(held, given, strict=True):
        if mine is not None and new is not None:
            mine.data[slot] = new
    tag.logical_of[slot] = logical


def write_expert(module: nn.Module, slot: int, logical: int, weights: ExpertWeights) -> None:
    """Write the weights of an expert into a slot of a cut module, which then holds it."""
    install_expert(module, slot, logical, prepare_expert(module, weights))


def empty_slot(module: nn.Module, slot: int) -> None:
    """Note that a slot of a cut module holds no expert, and free the memory of packed weights.

    No item in flight may use the slot.
    """
    tag = tag_of(module)
    assert tag.logical_of is not None, "a module with all experts has no slots to empty"
    if tag.packed is not None:
        up, _, down, *_ = weights_of(cast(PackedExperts, module))
        retag(module, packed=tag.packed.with_slot(slot, up.new_empty(0), down.new_empty(0)))
    tag.logical_of[slot] = EMPTY


def _pack(experts: PackedExperts, weight: Tensor, packing: WeightPacking) -> Tensor:
    return packing.pack(weight.T if experts.is_transposed else weight)


def _in_layout(prepared: PreparedExpert, packing: WeightPacking) -> tuple[Tensor, Tensor]:
    """Up and down weights in a layout, to which the module may have changed since they were prepared."""
    if prepared.packing is packing:
        return prepared.weights.up, prepared.weights.down
    assert prepared.packing is not None, "weights are packed before experts move"
    up, down = (packing.pack(prepared.packing.unpack(each)) for each in (prepared.weights.up, prepared.weights.down))
    return up, down
