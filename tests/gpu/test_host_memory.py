"""KV in host memory beside an accelerator: copies of a plain oracle, no wait of the host, and no race of streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_device import copy_blocks

from moestro.core.work import BlockMoves
from moestro.errors import ConfigError
from moestro.model.pools import KVPools

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE, NUM_LAYERS = 12, 17, 3, 2
KEYS, VALUES = (2, 8), (2, 6)  # heads and sizes of K and V


def _pools(device: torch.device, dtype: torch.dtype) -> KVPools:
    probe = KVPools(1, BLOCK_SIZE)
    for layer in range(NUM_LAYERS):
        key, value = (torch.zeros(1, *shape, dtype=dtype, device=device) for shape in (KEYS, VALUES))
        probe.write(layer, torch.zeros(1, dtype=torch.int64).to(device), key, value)
    return probe.allocate(NUM_BLOCKS)


def _random_moves(rng: np.random.Generator) -> BlockMoves:
    def pairs(first: int, second: int) -> np.ndarray:
        count = rng.integers(0, min(first, second) + 1)
        return np.stack([rng.permutation(first)[:count], rng.permutation(second)[:count]]).astype(np.int64)

    return BlockMoves(pairs(NUM_BLOCKS, NUM_HOST_BLOCKS), pairs(NUM_HOST_BLOCKS, NUM_BLOCKS))


def _check_history(seed: int, pools: KVPools, dtype: torch.dtype, forbid_waits: Callable[[], Any]) -> None:
    """Compare random moves and steps, which overwrite copied blocks at once, with copies of a plain oracle."""
    rng = np.random.default_rng(seed)
    pools.allocate_host(NUM_HOST_BLOCKS)
    (device,) = {pool.device for pool in pools.blocks()}
    # The oracle: one number a block, pool and place, on the host.
    of_device = [np.zeros((NUM_BLOCKS, *each.shape[1:])) for each in pools.blocks()]
    of_host = [np.zeros((NUM_HOST_BLOCKS, *each.shape[1:])) for each in of_device]
    for _ in range(25):
        numbers = [rng.integers(-100, 100, each.shape) for each in of_device]
        there = [torch.from_numpy(each).to(device, dtype) for each in numbers]
        moves = _random_moves(rng)
        with torch.inference_mode(), forbid_waits():
            pools.move_blocks(moves)
            written = rng.permutation(NUM_BLOCKS)[: rng.integers(1, NUM_BLOCKS)].tolist()
            for pool, new in zip(pools.blocks(), there, strict=True):
                for block in written:
                    pool[block].copy_(new[block])
        for far, near, new in zip(of_device, of_host, numbers, strict=True):
            copy_blocks(moves, far, near)
            far[written] = new[written]
    everything = BlockMoves(np.zeros((2, 0), np.int64), np.stack([np.arange(NUM_BLOCKS), np.arange(NUM_BLOCKS)]))
    for pool, expected in zip(pools.blocks(), of_device, strict=True):
        assert torch.equal(pool.cpu().double(), torch.from_numpy(expected))
    pools.move_blocks(everything)
    for pool, expected in zip(pools.blocks(), of_host, strict=True):
        assert torch.equal(pool.cpu().double(), torch.from_numpy(expected[:NUM_BLOCKS]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_staged", [1, 3, 100])
@pytest.mark.parametrize("seed", range(3))
def test_random_moves_and_steps_leave_what_a_plain_copy_leaves(seed, num_staged, dtype, accelerator, monkeypatch):
    """The imitated accelerator fails where no event orders the streams."""
    pools = _pools(accelerator.device, dtype)
    monkeypatch.setattr("moestro.model.pools._STAGING_BYTES", num_staged * pools.bytes_per_block)
    monkeypatch.setattr("moestro.model.pools._SLAB_BYTES", 5 * pools.bytes_per_block)
    _check_history(seed, pools, dtype, accelerator.forbid_waits)


@pytest.mark.parametrize("seed", range(3))
def test_a_cpu_does_the_same(seed):
    _check_history(seed, _pools(torch.device("cpu"), torch.bfloat16), torch.bfloat16, nullcontext)


def test_host_memory_that_cannot_be_pinned_says_what_to_lower(accelerator, monkeypatch):
    pools = _pools(accelerator.device, torch.float32)

    def zeros(*_, **options):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(ConfigError, match="cannot be allocated: lower --kv-offloading-size"):
        pools.allocate_host(NUM_HOST_BLOCKS)


def test_no_blocks_of_host_memory_take_nothing(accelerator):
    pools = _pools(accelerator.device, torch.float32)
    before = torch.cuda.memory_allocated()
    pools.allocate_host(0)
    assert torch.cuda.memory_allocated() == before
