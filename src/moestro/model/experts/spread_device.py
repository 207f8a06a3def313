"""The torch device of a worker whose group shares the experts of one network, in mode `ep`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it unmarked

from moestro.core.experts.expert_table import ExpertTable
from moestro.core.experts.layer_moves import LayerPlan
from moestro.core.experts.move_agreement import MovingTable
from moestro.core.experts.table_message import TableMessage
from moestro.core.model_info import ModelInfo
from moestro.core.work import Units
from moestro.model.device import TorchDevice, open_device
from moestro.model.experts.expert_exchange import GroupExchange, GroupPlace
from moestro.model.experts.layer_mover import LayerMover, layer_move_of
from moestro.model.experts.spread_experts import SpreadExperts
from moestro.model.experts.worker_share import WorkerShare
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.settings import LocalRank, ModelSettings


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
    meet: Callable[[], Store],
    on_phase: Callable[[str], None] = lambda _: None,
    local: LocalRank | None = None,
) -> tuple[SpreadDevice, ModelInfo]:
    """Load a network, keep one worker's share of its experts, allocate its KV cache, and join the group.

    Args:
        make_table: function of (layers, experts of a layer) that returns the placement of the experts.
        meet: function that waits for the other workers and returns their common store.
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
