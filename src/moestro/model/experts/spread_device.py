"""The torch device of a worker whose group shares the experts of one network, in mode `ep`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moestro.core.experts.expert_table import EMPTY, ExpertTable, TableMessage
from moestro.core.experts.layer_moves import LayerPlan, MovingTable
from moestro.core.request import ModelInfo
from moestro.core.work import Units
from moestro.model.device import TorchDevice, open_device
from moestro.model.experts.exchange import ExpertExchange, GroupExchange, GroupPlace, Meeting
from moestro.model.experts.expert_slots import LayerMover, layer_move_of
from moestro.model.experts.routed import add_contributions, run_slots, tag_of
from moestro.model.network import Network, WorkerShare
from moestro.model.pools import KVPools
from moestro.model.settings import LocalRank, ModelSettings

# Visits after which an order begins again. Shares are rounded to its parts: 0.4 % is far less than loads of experts
# vary between two plans.
PERIOD = 256


def visit_orders(parts: NDArray[np.float64], first: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Make the orders in which the copies of some experts are visited.

    Args:
        parts: float64[experts, copies], part of the expert's visits that each copy gets; a row sums to 1. An expert
            with fewer copies than others has zeros.
        first: copy that comes first where two are due alike. Sources with different ones do not all begin with the
            same copy.

    Returns:
        order: int64[experts, PERIOD], copy of each visit.
        period: int64[experts], visits after which the order begins again. Equal parts are kept exactly.
    """
    num_experts, num_copies = parts.shape
    counts, period = _in_whole_visits(parts)
    # argmin takes the first of equal deadlines, so each row begins with the copy that is due first. It is counted among
    # the row's own copies: else all sources would turn the padding of an expert with few copies into its first one.
    rank = (counts > 0).cumsum(axis=1) - 1
    start = (rank == first % (rank[:, -1:] + 1)).argmax(axis=1)[:, None]
    turned = np.take_along_axis(counts, (np.arange(num_copies) + start) % num_copies, axis=1)
    done, order = np.zeros_like(turned), np.empty((num_experts, PERIOD), np.int64)
    rows = np.arange(num_experts)
    for visit in range(PERIOD):
        is_behind = done * period[:, None] < (visit + 1) * turned
        deadline = np.where(is_behind, (done + 1) / np.maximum(turned, 1), np.inf)
        chosen = deadline.argmin(axis=1)
        done[rows, chosen] += 1
        order[:, visit] = (chosen + start[:, 0]) % num_copies
    return order, period


def _in_whole_visits(parts: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Visits of each copy in a period, int64[experts, copies], and the periods, int64[experts]."""
    num_used = (parts > 0).sum(axis=1)
    is_even = np.isclose(parts.max(axis=1), 1 / num_used) & np.isclose(parts.sum(axis=1), 1.0)
    period = np.where(is_even, num_used, PERIOD)
    exact = parts * period[:, None]
    counts = np.where(is_even[:, None], np.rint(exact), np.floor(exact)).astype(np.int64)
    # What rounding down leaves goes to the copies with the largest remainders.
    left = period - counts.sum(axis=1)
    ranks = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1, kind="stable")
    counts += ranks < left[:, None]
    return counts, period


class _SharedExperts(NamedTuple):
    """Experts of a layer that have several copies with a share.

    Attributes:
        row_of: int64[experts], row of each expert here; -1 for one with a single copy.
        order: int64[rows, visits], worker * slots + slot of each visit.
        period: int64[rows], visits after which the order begins again.
        visits: int64[rows], visits so far, less whole periods.
    """

    row_of: Tensor
    order: Tensor
    period: Tensor
    visits: Tensor


class CopyChoice:
    """Copies of one layer's experts, for the tokens of one worker.

    A running count of the worker's visits to the expert decides which copy is next. So the tokens of a batch are
    divided, and so are those of many batches with one token each.

    Args:
        rows: int32[workers, slots], logical expert in each slot; EMPTY means none.
        parts: float64[workers, slots], part of its expert's tokens that each slot gets.
        num_experts: logical experts.
        worker: the worker whose tokens visit.
        device: device of the choices.
    """

    def __init__(
        self, rows: NDArray[np.int32], parts: NDArray[np.float64], num_experts: int, worker: int, device: torch.device
    ) -> None:
        flat_rows, flat_parts = rows.reshape(-1), parts.reshape(-1)
        used = np.flatnonzero((flat_rows != EMPTY) & (flat_parts > 0))
        used = used[np.argsort(flat_rows[used], kind="stable")]  # by expert, then by worker
        num_copies = np.bincount(flat_rows[used], minlength=num_experts)
        starts = num_copies.cumsum() - num_copies
        self._slot_of = torch.from_numpy(used[starts].astype(np.int64)).to(device)
        self._shared: _SharedExperts | None = None
        shared = np.flatnonzero(num_copies > 1)
        if not len(shared):
            return
        nth = np.arange(num_copies.max())
        has_copy = nth < num_copies[shared, None]
        slots = used[np.minimum(starts[shared, None] + nth, len(used) - 1)]
        order, period = visit_orders(np.where(has_copy, flat_parts[slots], 0.0), worker)
        row_of = np.full(num_experts, -1, np.int64)
        row_of[shared] = np.arange(len(shared))
        tensors = (row_of, np.take_along_axis(slots, order, axis=1), period, np.zeros_like(period))
        self._shared = _SharedExperts(*(torch.from_numpy(each).to(device) for each in tensors))

    def slots_for(self, experts: Tensor) -> Tensor:
        """Choose the copies for some visits, and count them.

        Args:
            experts: int64[visits], logical experts.

        Returns:
            int64[visits], worker * slots + slot.
        """
        slots, shared = self._slot_of[experts], self._shared
        if shared is None or not len(experts):
            return slots
        rows = shared.row_of[experts]
        at = (rows >= 0).nonzero().view(-1)
        rows = rows[at]
        by_row = rows.argsort(stable=True)
        counts = rows.bincount(minlength=len(shared.period))
        nth = torch.empty_like(rows)
        nth[by_row] = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows[by_row]]
        slots[at] = shared.order[rows, (shared.visits[rows] + nth) % shared.period[rows]]
        shared.visits.copy_((shared.visits + counts) % shared.period)
        return slots


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


class SpreadDevice(TorchDevice):
    """Computes `Forward` items together with the other workers of a group; implements `engine.LockStepDevice`.

    Args:
        network: network with the experts of this worker alone.
        pools: KV cache of this worker.
        exchange: exchange with the other workers.
        table: placement of the experts, over all layers of the network.

    Attributes:
        moves: its table of experts, and the moves that change it.
    """

    def __init__(self, network: Network, pools: KVPools, exchange: GroupExchange, table: ExpertTable) -> None:
        super().__init__(network, pools)
        self._exchange = exchange
        self._spread = SpreadExperts(network, exchange, table)
        self.moves = MovingTable(table, self._begin_layer)

    @property
    def is_moving(self) -> bool:
        """Whether experts move, so that the group opens the next step even without tokens."""
        return self.moves.is_moving

    @property
    def placed(self) -> TableMessage:
        """The placement by which the group computes now."""
        return self.moves.placed(tuple(layer for layer, _ in self.network.experts))

    def open_step(self, units: Units | None) -> NDArray[np.int64]:
        """Implement `LockStepDevice.open_step`. Experts move here, between two steps.

        Raises:
            GroupLostError: another worker has ended.
            InvariantError: the workers would exchange tokens by different tables.
        """
        num_tokens = 0 if units is None else int(units.num_tokens.sum())
        gathered = self._exchange.gather(np.array([num_tokens, *self.moves.numbers()], np.int64))
        plan = self.moves.open_step(gathered[:, 1:])
        if plan is not None:
            self._spread.use_layer(plan.layer, plan.rows(), plan.part_rows())
            self._spread.version = plan.version
        return gathered[:, 0]

    def move_layer(self, plan: LayerPlan) -> None:
        """Implement `LockStepDevice.move_layer`."""
        self.moves.take(plan)

    def drop_layer(self, version: int) -> None:
        """Implement `LockStepDevice.drop_layer`."""
        self.moves.cancel(version)

    def _begin_layer(self, table: ExpertTable, plan: LayerPlan) -> LayerMover:
        module = dict(self.network.experts)[plan.layer]
        return LayerMover(layer_move_of(module, table.logical_of[:, plan.layer], plan), self._exchange)

    def take_part(self, now_ns: int) -> None:
        """Implement `LockStepDevice.take_part`."""
        self.network.adopt_kernels()
        self._spread.take_part()
        if self.network.device.type == "cuda":
            torch.cuda.current_stream(self.network.device).synchronize()


def open_spread_device(
    settings: ModelSettings,
    place: GroupPlace,
    make_table: Callable[[int, int], ExpertTable],
    meet: Callable[[], Meeting],
    on_phase: Callable[[str], None] = lambda _: None,
    local: LocalRank | None = None,
) -> tuple[SpreadDevice, ModelInfo]:
    """Load a network, keep one worker's share of its experts, allocate its KV cache, and join the group.

    Args:
        make_table: function of (layers, experts of a layer) that returns the placement of the experts.
        meet: function that waits for the other workers and connects to them.
        on_phase: as in `open_device`.
        local: as in `open_device`. None means that of `place`.

    Raises:
        ConfigError: the settings are impossible, or the network has too few experts; the text says what to do.
        UnsupportedModelError: this checkpoint cannot run here; the text says why.
        GroupLostError: another worker did not join in time.
    """
    local = local or LocalRank(rank=place.worker, num_ranks=place.num_workers)

    def on_load(phase: str) -> None:
        on_phase("join the group" if phase == "ready" else phase)

    share = WorkerShare(worker=place.worker, make_table=make_table)
    alone, info = open_device(settings, on_load, local, share)
    table = make_table(info.num_layers, info.num_experts)
    exchange = GroupExchange(place, meet(), alone.network.device)
    on_phase("ready")
    device = SpreadDevice(alone.network, alone.pools, exchange, table)
    return device, msgspec.structs.replace(info, notes=(*info.notes, exchange.note) if exchange.note else info.notes)
