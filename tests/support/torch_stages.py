"""Runs single stage items on the torch device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moestro.core.stages import Merges, StageItem, StageResult, StageShape
from moestro.model.network import Network
from moestro.model.staged.staged_device import StagedTorchDevice
from moestro.model.staged.staged_network import StagedNetwork

NO_MERGES = Merges(np.empty(0, np.int32), np.empty(0, np.int32))


def make_staged_device(network: Network, block_size: int, num_blocks: int, **sizes: int) -> StagedTorchDevice:
    """A device of one-byte pieces, so that it can stop between any two experts. `sizes`: of its `StageShape`."""
    probe, num_chosen = network.probe(block_size)
    staged = StagedNetwork(network)
    shape = StageShape(is_sparse=staged.is_sparse, num_experts=network.num_experts, num_chosen=num_chosen, **sizes)
    return StagedTorchDevice(staged, probe.allocate(num_blocks), shape, piece_bytes=1)


def make_merges(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Merges:
    """Merges of all (rows, places)."""
    if not parts:
        return NO_MERGES
    return Merges(np.concatenate([rows for rows, _ in parts]), np.concatenate([places for _, places in parts]))


def finish(device: StagedTorchDevice, item: StageItem, patience: int | None = None) -> StageResult:
    """The item's result. It is withdrawn after `patience` polls; None means that it is not."""
    device.launch(item, 0)
    for number in range(10_000):
        if number == patience:
            device.withdraw(0)
        if done := device.poll(0):
            (result,) = done
            return result
    raise AssertionError("an item has no end")
