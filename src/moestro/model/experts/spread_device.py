"""The torch device of a worker whose group shares the experts of one network, in mode `ep`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it unmarked

from moestro.core.experts.expert_table import ExpertTable
from moestro.core.experts.layer_moves import LayerPlan, SettledLayer, with_layer
from moestro.core.experts.move_agreement import MoveAction, MoveAgreement
from moestro.core.experts.table_message import ExpertLayers, TableMessage
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
        is_moving: whether experts move, so that the group opens the next step even without tokens.
        on_moved: called after each step in which experts move, with the version of the plan and the bytes of weights
            that went from one worker to another so far.
        on_settled: called when the moves of a layer end, with what became of them.
    """

    def __init__(self, network: Network, pools: KVPools, exchange: GroupExchange, table: ExpertTable) -> None:
        super().__init__(network, pools)
        self._exchange, self._table = exchange, table
        self._spread = SpreadExperts(network, exchange, table)
        self._agreement = MoveAgreement(table.version)
        self._mover: LayerMover | None = None
        self.is_moving = False
        self.on_moved: Callable[[int, int], None] = lambda _version, _num_bytes: None
        self.on_settled: Callable[[SettledLayer], None] = lambda _: None

    @property
    def placed(self) -> TableMessage:
        """The placement by which the group computes now."""
        layers = [layer for layer, _ in self.network.experts]
        table, shares = self._table, self._table.shares
        own = ExpertTable(
            table.version,
            table.logical_of[:, layers],
            table.num_experts,
            table.is_alive,
            None if shares is None else shares[:, layers],
        )
        num_layers = table.logical_of.shape[1]
        experts = ExpertLayers(num_layers=num_layers, layers=tuple(layers), num_experts=table.num_experts)
        return TableMessage.of_table(experts, own)

    def open_step(self, units: Units | None) -> NDArray[np.int64]:
        """Implement `LockStepDevice.open_step`. Experts move here, between two steps.

        Raises:
            GroupLostError: another worker has ended.
            InvariantError: the workers would exchange tokens by different tables.
        """
        num_tokens = 0 if units is None else int(units.num_tokens.sum())
        gathered = self._exchange.gather(np.array([num_tokens, *self._agreement.numbers()], np.int64))
        self._move(self._agreement.decide(gathered[:, 1:]))
        return gathered[:, 0]

    def move_layer(self, plan: LayerPlan) -> None:
        """Implement `LockStepDevice.move_layer`."""
        self._agreement.take(plan)

    def drop_layer(self, version: int) -> None:
        """Implement `LockStepDevice.drop_layer`."""
        self._agreement.cancel(version)

    def _move(self, action: MoveAction) -> None:
        """Do the group's part of a step that concerns moving experts."""
        self.is_moving = action in {MoveAction.WAIT, MoveAction.MOVE}
        plan = self._agreement.plan
        if action is MoveAction.MOVE:
            assert plan is not None, "all workers know the plan"
            if self._mover is None:
                module = dict(self.network.experts)[plan.layer]
                move = layer_move_of(module, self._table.logical_of[:, plan.layer], plan)
                self._mover = LayerMover(move, self._exchange)
            if not self._mover.is_done:
                self._mover.step()
                self.on_moved(plan.version, self._mover.num_bytes)
            self._agreement.is_prepared = self._mover.is_done
        elif action in {MoveAction.COMMIT, MoveAction.DROP}:
            self._settle(plan, is_committed=action is MoveAction.COMMIT)

    def _settle(self, plan: LayerPlan | None, *, is_committed: bool) -> None:
        """End the moves of a layer. `plan`: None where this worker never learnt of the plan that is dropped."""
        mover, self._mover = self._mover, None
        if mover is not None and is_committed:
            mover.commit()
        elif mover is not None:
            mover.drop()
        if plan is not None and is_committed:
            rows, parts = plan.rows(), plan.part_rows()
            self._table = with_layer(self._table, plan.version, plan.layer, rows, parts)
            self._spread.use_layer(plan.layer, rows, parts)
            self._spread.version = plan.version
        self._agreement.settled()
        num_bytes = 0 if mover is None else mover.num_bytes
        self.on_settled(SettledLayer(version=self._agreement.over, is_committed=is_committed, num_bytes=num_bytes))

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
