"""Moves the experts of one layer between the workers of a group, some in each step, while the old placement serves."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moestro.core.experts.expert_table import EMPTY
from moestro.core.experts.layer_moves import ExpertMoves, LayerPlan, moves_between, rounds_of
from moestro.model.experts.expert_exchange import ExpertExchange
from moestro.model.experts.expert_slots import PreparedExpert, empty_slot, install_expert, prepare_expert, read_expert
from moestro.model.experts.routed import ExpertWeights, PackedExperts, tag_of


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
