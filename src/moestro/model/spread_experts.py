"""Experts that are spread over the workers of a group: the function in place of a network's experts in mode `ep`.

A worker sorts its tokens by worker and slot, and exchanges counts and rows. It then computes its own slots for all
workers, and sends the answers back unweighted. The home adds them in ascending logical expert id in at least float32,
so the sum is bit-identical wherever each expert is computed.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moestro.core.expert_table import EMPTY, ExpertTable
from moestro.model.expert_exchange import ExpertExchange
from moestro.model.experts import add_contributions, run_slots, tag_of
from moestro.model.network import Network


class SpreadExperts:
    """Computes routed experts wherever they are. All workers call it for the same layers in the same order.

    Args:
        network: a network with experts that holds the slots of this worker. Its routing gets the new function.
        exchange: exchange between the workers.
        table: placement of the experts; equal on all workers of the group.
    """

    def __init__(self, network: Network, exchange: ExpertExchange, table: ExpertTable) -> None:
        assert network.routing is not None, "a dense network has no experts to spread"
        self._exchange, self._device = exchange, network.device
        self._modules = [module for _, module in network.experts]
        self.use(table)
        network.routing.stand_in = self

    def use(self, table: ExpertTable) -> None:
        """Send tokens by another table from the next step on; all workers change between the same two steps."""
        self._num_slots, self._version = table.logical_of.shape[2], table.version
        slot_of = _choose_slots(table, self._exchange.worker)
        self._slot_of = torch.from_numpy(slot_of).to(self._device)

    def __call__(self, module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute what `model.experts.routed_experts` computes, and count the tokens of this worker by expert."""
        tag, num_chosen = tag_of(module), top_k_index.shape[1]
        ids, order = top_k_index.sort(dim=1)
        flat = ids.reshape(-1)
        tag.routing.counts[tag.layer].scatter_add_(0, flat, torch.ones_like(flat))
        slots = self._slot_of[tag.layer][flat]
        if tag.routing.visits is not None:
            tag.routing.visits.add(tag.layer, slots // self._num_slots, self._version)
        by_slot = slots.argsort(stable=True)
        answers = hidden.new_empty(len(flat), hidden.shape[1])
        answers[by_slot] = self._compute(module, hidden.index_select(0, by_slot // num_chosen), slots)
        total = add_contributions(answers.view(len(hidden), num_chosen, -1), top_k_weights.gather(1, order))
        return total.to(hidden.dtype)

    @torch.inference_mode()
    def take_part(self) -> None:
        """Compute a step's experts for the other workers. For a worker without tokens, this replaces the step."""
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        for module in self._modules:
            tag = tag_of(module)
            self._compute(module, torch.empty(0, tag.hidden_size, dtype=tag.dtype, device=self._device), none)

    def _compute(self, module: nn.Module, rows: Tensor, slots: Tensor) -> Tensor:
        """[rows, hidden size], unweighted answers to this worker's rows.

        Args:
            rows: [rows, hidden size], ordered by worker and slot.
            slots: int64[rows], worker * slots + slot of each row, in any order.
        """
        exchange = self._exchange
        counts = slots.bincount(minlength=exchange.num_workers * self._num_slots)
        counts = counts.view(exchange.num_workers, self._num_slots)
        received = exchange.exchange_counts(counts)
        num_sent, num_received = counts.sum(1).tolist(), received.sum(1).tolist()
        guests = exchange.exchange_rows(rows, num_sent, num_received)
        own_slots = torch.arange(self._num_slots, device=self._device).repeat(exchange.num_workers)
        by_slot = own_slots.repeat_interleave(received.reshape(-1)).argsort(stable=True)
        answers = torch.empty_like(guests)
        answers[by_slot] = run_slots(module, guests.index_select(0, by_slot), received.sum(0))
        return exchange.exchange_rows(answers, num_received, num_sent)


def _choose_slots(table: ExpertTable, worker: int) -> NDArray[np.int64]:
    """int64[layers, experts], worker * slots + slot of the copy that a worker's tokens visit.

    A worker visits its own copy of an expert. Workers without one take the copies in turn.
    """
    _, num_layers, num_slots = table.logical_of.shape
    slot_of = np.empty((num_layers, table.num_experts), np.int64)
    for layer in range(num_layers):
        holders, slots = np.nonzero((table.logical_of[:, layer] != EMPTY) & table.is_alive[:, None])
        experts = table.logical_of[holders, layer, slots]
        for expert in range(table.num_experts):
            copies = np.flatnonzero(experts == expert)
            own = copies[holders[copies] == worker]
            copy = own[0] if len(own) else copies[worker % len(copies)]
            slot_of[layer, expert] = holders[copy] * num_slots + slots[copy]
    return slot_of
