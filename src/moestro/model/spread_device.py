"""The torch device of a worker whose group shares the experts of one network, in mode `ep`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it unmarked

from moestro.core.expert_table import ExpertTable
from moestro.core.model_info import ModelInfo
from moestro.core.work import Units
from moestro.errors import ConfigError, InvariantError
from moestro.model.device import TorchDevice, open_device
from moestro.model.expert_exchange import GroupExchange, GroupPlace
from moestro.model.load import choose_device
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.settings import ModelSettings
from moestro.model.spread_experts import SpreadExperts
from moestro.model.worker_share import WorkerShare


class SpreadDevice(TorchDevice):
    """Computes `Forward` items together with the other workers of a group; implements `engine.LockStepDevice`.

    Args:
        network: network with the experts of this worker alone.
        pools: KV cache of this worker.
        exchange: exchange with the other workers.
        table: placement of the experts.
    """

    def __init__(self, network: Network, pools: KVPools, exchange: GroupExchange, table: ExpertTable) -> None:
        super().__init__(network, pools)
        self._exchange, self._table_version = exchange, table.version
        self._spread = SpreadExperts(network, exchange, table)

    def open_step(self, units: Units | None) -> NDArray[np.int64]:
        """Implement `LockStepDevice.open_step`.

        Raises:
            GroupLostError: another worker has ended.
            InvariantError: the workers would exchange tokens by different tables.
        """
        num_tokens = 0 if units is None else int(units.num_tokens.sum())
        gathered = self._exchange.gather(np.array([num_tokens, self._table_version], np.int64))
        if (gathered[:, 1] != self._table_version).any():
            raise InvariantError(f"the engines of a group have tables {gathered[:, 1].tolist()} of their experts")
        return gathered[:, 0]

    def take_part(self, now_ns: int) -> None:
        """Implement `LockStepDevice.take_part`."""
        self._spread.take_part()
        if self.network.device.type == "cuda":
            torch.cuda.current_stream(self.network.device).synchronize()


def open_spread_device(
    settings: ModelSettings,
    place: GroupPlace,
    make_table: Callable[[int, int], ExpertTable],
    meet: Callable[[], Store],
    on_phase: Callable[[str], None] = lambda _: None,
) -> tuple[SpreadDevice, ModelInfo]:
    """Load a network, keep one worker's share of its experts, allocate its KV cache, and join the group.

    Args:
        make_table: function of (layers, experts of a layer) that returns the placement of the experts.
        meet: function that waits for the other workers and returns their common store.
        on_phase: as in `open_device`.

    Raises:
        ConfigError: the settings are impossible, or the network has too few experts; the text says what to do.
        UnsupportedModelError: this checkpoint cannot run here; the text says why.
        GroupLostError: another worker did not join in time.
    """
    device = choose_device(settings, place.worker)
    if device.type == "cuda" and torch.cuda.device_count() < place.num_workers:
        raise ConfigError(
            f"--mode ep needs one accelerator for each engine: --engines {place.num_workers}, and torch finds"
            f" {torch.cuda.device_count()}"
        )

    def on_load(phase: str) -> None:
        on_phase("join the group" if phase == "ready" else phase)

    share = WorkerShare(worker=place.worker, make_table=make_table)
    alone, info = open_device(settings, on_load, place.worker, share)
    table = make_table(info.num_layers, info.num_experts)
    exchange = GroupExchange(place, meet(), device)
    on_phase("ready")
    return SpreadDevice(alone.network, alone.pools, exchange, table), info
