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

from moestro.core.experts.expert_table import ExpertTable
from moestro.model.experts.copy_choice import CopyChoice
from moestro.model.experts.expert_exchange import ExpertExchange
from moestro.model.experts.routed import add_contributions, run_slots, tag_of
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
        self._num_experts, self._num_slots = table.num_experts, table.logical_of.shape[2]
        self.version = table.version
        parts = table.slot_parts
        self._copies = {
            layer: self._choice(table.logical_of[:, layer], parts[:, layer]) for layer, _ in network.experts
        }
        network.routing.stand_in = self

    def use_layer(self, layer: int, rows: NDArray[np.int32], parts: NDArray[np.float64]) -> None:
        """Send a layer's tokens by another placement; all workers change between the same two steps.

        Args:
            layer: the network's layer.
            rows: int32[workers, slots], logical expert in each slot.
            parts: float64[workers, slots], part of its expert's tokens that each slot gets.
        """
        self._copies[layer] = self._choice(rows, parts)

    def _choice(self, rows: NDArray[np.int32], parts: NDArray[np.float64]) -> CopyChoice:
        return CopyChoice(rows, parts, self._num_experts, self._exchange.worker, self._device)

    def __call__(self, module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute what `model.experts.routed_experts` computes, and count the tokens of this worker by expert."""
        tag, num_chosen = tag_of(module), top_k_index.shape[1]
        ids, order = top_k_index.sort(dim=1)
        flat = ids.reshape(-1)
        tag.routing.counts[tag.layer].scatter_add_(0, flat, torch.ones_like(flat))
        slots = self._copies[tag.layer].slots_for(flat)
        if tag.routing.visits is not None:
            tag.routing.visits.add(tag.layer, slots // self._num_slots, self.version)
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
