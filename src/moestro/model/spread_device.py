"""The torch device of a worker whose group shares the experts of one network, in mode `ep`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it unmarked

from moestro.core.expert_table import ExpertTable, spread_evenly
from moestro.core.model_info import ModelInfo
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

    def open_step(self, num_tokens: int) -> NDArray[np.int64]:
        """Implement `LockStepDevice.open_step`.

        Raises:
            GroupLostError: another worker has ended.
            InvariantError: the workers would exchange tokens by different tables.
        """
        gathered = self._exchange.gather(np.array([num_tokens, self._table_version], np.int64))
        if (gathered[:, 1] != self._table_version).any():
            raise InvariantError(f"the engines of a group have tables {gathered[:, 1].tolist()} of their experts")
        return gathered[:, 0]

    def take_part(self, now_ns: int) -> None:
        """Implement `LockStepDevice.take_part`."""
        self._spread.take_part()


def open_spread_device(
    settings: ModelSettings,
    place: GroupPlace,
    meet: Callable[[], Store],
    on_phase: Callable[[str], None] = lambda _: None,
) -> tuple[SpreadDevice, ModelInfo]:
    """Load a network, keep one worker's share of its experts, allocate its KV cache, and join the group.

    Args:
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
    tables: list[ExpertTable] = []

    def make_table(num_layers: int, num_experts: int) -> ExpertTable:
        tables.append(_spread(num_layers, num_experts, place.num_workers))
        return tables[0]

    def on_load(phase: str) -> None:
        on_phase("join the group" if phase == "ready" else phase)

    share = WorkerShare(worker=place.worker, make_table=make_table)
    alone, info = open_device(settings, on_load, place.worker, share)
    exchange = GroupExchange(place, meet(), device)
    on_phase("ready")
    return SpreadDevice(alone.network, alone.pools, exchange, tables[0]), info


def _spread(num_layers: int, num_experts: int, num_workers: int) -> ExpertTable:
    """Give each worker consecutive experts.

    Raises:
        ConfigError: a worker would have none.
    """
    if num_experts == 0:
        raise ConfigError("--mode ep spreads experts over engines, and this model has none: leave --mode out")
    if num_experts < num_workers:
        raise ConfigError(
            f"--mode ep needs an expert for each engine: the model has {num_experts} experts a layer, so give"
            f" --engines {num_experts} or less"
        )
    return spread_evenly(num_layers, num_experts, list(range(num_workers)), num_workers)
