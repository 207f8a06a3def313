"""Weights of routed experts by slot, and their moves between a group's workers.

Layers move some experts in each step, while the old placement serves. All workers of a group make the same calls in the
same order. A worker without tokens makes them with no rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moestro.core.experts.expert_table import EMPTY
from moestro.core.experts.layer_moves import ExpertMoves, LayerPlan, moves_between, rounds_of
from moestro.core.work import Int32s
from moestro.model.experts.exchange import ExpertExchange
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


def num_expert_bytes(module: nn.Module) -> int:
    """Return the bytes of one expert of a tagged module, not packed."""
    return sum(_sizes(module))


def to_bytes(weights: ExpertWeights) -> Tensor:
    """Return uint8[bytes], the weights one after the other."""
    return torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in weights if each is not None])


def from_bytes(module: nn.Module, row: Tensor) -> ExpertWeights:
    """Return the weights of an expert of a tagged module; they share the memory of `row`.

    Args:
        row: uint8[bytes], from `to_bytes` on a worker with the same network; its memory begins at a multiple of 8.
    """
    parts = iter(torch.split(row, [size for size in _sizes(module) if size]))
    layout = tag_of(module).layout
    weights = [None if each is None else next(parts).view(each[1]).view(each[0]) for each in layout]
    return ExpertWeights(*weights)  # type: ignore[arg-type]


def _sizes(module: nn.Module) -> list[int]:
    return [0 if each is None else math.prod(each[0]) * each[1].itemsize for each in tag_of(module).layout]


class LayerMove(NamedTuple):
    """A layer whose experts move.

    Attributes:
        module: its experts module, cut to the slots of this worker.
        old, new: int32[workers, slots], logical expert in each slot before and after.
        moves: copies that lead from one to the other.
        rounds: moves of each step, in order.
    """

    module: nn.Module
    old: NDArray[np.int32]
    new: NDArray[np.int32]
    moves: ExpertMoves
    rounds: list[NDArray[np.int64]]


def layer_move_of(module: nn.Module, old: NDArray[np.int32], plan: LayerPlan) -> LayerMove:
    """Plan the rounds of a layer; the same on all workers.

    Args:
        old: int32[workers, slots], logical expert in each slot by now.
    """
    num_experts = cast(PackedExperts, module).num_experts
    # A table has the experts of the layer that has most, and this one may have fewer.
    old, new = (np.where(rows < num_experts, rows, EMPTY) for rows in (old, plan.rows()))
    moves = moves_between(old, new)
    per_round = max(plan.max_bytes_per_step // num_expert_bytes(module), 1)
    return LayerMove(module, old, new, moves, rounds_of(moves, len(old), per_round))


class LayerMover:
    """One worker's part of a layer's moves.

    A slot that the old placement leaves empty takes its new expert when it arrives. The new expert of any other slot
    waits beside it for the commit, because tokens visit the old one until then. So memory beyond the slots is taken
    for the time of one layer's moves only.

    Args:
        move: the layer, as all workers plan it.
        exchange: exchange between the workers.

    Attributes:
        num_bytes: bytes of weights that went from one worker to another, of all workers.
    """

    def __init__(self, move: LayerMove, exchange: ExpertExchange) -> None:
        self._move, self._exchange = move, exchange
        self._num_done = 0
        self._waiting: dict[int, PreparedExpert] = {}
        self._filled: list[int] = []
        self.num_bytes = 0

    @property
    def is_done(self) -> bool:
        """Whether all experts have arrived."""
        return self._num_done == len(self._move.rounds)

    def step(self) -> None:
        """Move the experts of the next round. All workers make this call in the same step."""
        moves, here = self._move.moves, self._exchange.worker
        this_round = self._move.rounds[self._num_done]
        for at in this_round[(moves.source[this_round] == here) & ~moves.crosses[this_round]].tolist():
            weights = read_expert(self._move.module, int(moves.source_slot[at]))
            self._put(int(moves.slot[at]), prepare_expert(self._move.module, weights))
        crossing = this_round[moves.crosses[this_round]]
        if len(crossing):
            self._exchange_experts(crossing)
        self._num_done += 1

    def commit(self) -> None:
        """Make the new placement that of the slots. No item in flight may use the layer."""
        module, here = self._move.module, self._exchange.worker
        old, new = self._move.old[here], self._move.new[here]
        for slot, prepared in self._waiting.items():
            install_expert(module, slot, int(new[slot]), prepared)
        for slot in np.flatnonzero((new == EMPTY) & (old != EMPTY)).tolist():
            empty_slot(module, slot)

    def drop(self) -> None:
        """Forget what has arrived; the old placement stays."""
        for slot in self._filled:
            empty_slot(self._move.module, slot)

    def _exchange_experts(self, crossing: NDArray[np.int64]) -> None:
        """Send and take in experts; every worker lists them by the other worker, then in the order of the moves."""
        moves, module, exchange = self._move.moves, self._move.module, self._exchange
        sent = crossing[moves.source[crossing] == exchange.worker]
        sent = sent[np.argsort(moves.worker[sent], kind="stable")]
        taken = crossing[moves.worker[crossing] == exchange.worker]
        taken = taken[np.argsort(moves.source[taken], kind="stable")]
        rows = [to_bytes(read_expert(module, int(moves.source_slot[at]))) for at in sent]
        size = num_expert_bytes(module)
        device = cast(PackedExperts, module).down_proj.device
        outgoing = torch.stack(rows) if rows else torch.empty(0, size, dtype=torch.uint8, device=device)
        counts = [
            np.bincount(column, minlength=exchange.num_workers).tolist()
            for column in (moves.worker[sent], moves.source[taken])
        ]
        incoming = exchange.exchange_rows(outgoing, *counts)
        for at, row in zip(taken.tolist(), incoming, strict=True):
            self._put(int(moves.slot[at]), prepare_expert(module, from_bytes(module, row.clone())))
        self.num_bytes += len(crossing) * size

    def _put(self, slot: int, prepared: PreparedExpert) -> None:
        """Keep an expert that has arrived, in its slot or beside it."""
        here = self._exchange.worker
        if self._move.old[here, slot] == EMPTY:
            install_expert(self._move.module, slot, int(self._move.new[here, slot]), prepared)
            self._filled.append(slot)
        else:
            self._waiting[slot] = prepared
