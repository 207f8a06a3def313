"""Paged K and V: one pool of slots per layer and kind, in the shape that the layer's attention writes.

A layer whose values are the first entries of its keys has one pool: its V is a view into K.

Slot `block * block_size + i` holds the i-th token of a block. Two slots that no block owns follow the blocks: a scratch
slot for K and V that must not be kept, and a slot that stays zero (see `step`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moestro.core.work import BlockMoves
from moestro.errors import ConfigError, CopyError, UnsupportedModelError
from moestro.model.host_pools import HostPools, make_host_pools, measure_copy
from moestro.model.settings import LocalRank, ModelSettings

_MEASURED_BLOCKS = 64  # copied to measure the time of a copy


class KVPools:
    """K and V of all layers. A layer's pool is made at its first write, so any number of heads and head size works.

    Pools start at zero: attention multiplies masked values by zero, and zero times an old NaN would be NaN.

    Args:
        num_blocks, block_size: number of blocks of each pool, and tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._by_layer: dict[int, tuple[Tensor, Tensor]] = {}
        self._joint: set[int] = set()  # layers whose values lie in their keys
        self._host: HostPools | None = None

    @property
    def scratch_slot(self) -> int:
        """Slot for K and V that must not be kept; never read."""
        return self.num_blocks * self.block_size

    @property
    def zero_slot(self) -> int:
        """Slot that is never written: K and V of a sink."""
        return self.scratch_slot + 1

    @property
    def layers(self) -> list[int]:
        """Layers that have written, ascending."""
        return sorted(self._by_layer)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block's K and V in all layers that have written."""
        return sum(pool[: self.block_size].numel() * pool.element_size() for pool in self._stored())

    def write(
        self, layer: int, slots: Tensor, key: Tensor, value: Tensor, *, values_in_keys: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Store one step's K and V and return the layer's pools.

        Args:
            slots: int64[tokens].
            key, value: [tokens, heads, head size]; the sizes of K and V may differ.
            values_in_keys: as for `of_layer`.

        Returns:
            K and V, each [slots, heads, head size].
        """
        keys, values = self.of_layer(layer, key, value, values_in_keys=values_in_keys)
        keys.index_copy_(0, slots, key)
        if layer not in self._joint:
            values.index_copy_(0, slots, value)
        return keys, values

    def find(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """K and V of a layer, [slots, heads, head size]; None before its first write."""
        return self._by_layer.get(layer)

    def of_layer(
        self, layer: int, key: Tensor, value: Tensor, *, values_in_keys: bool = False
    ) -> tuple[Tensor, Tensor]:
        """K and V of a layer, which a first call allocates.

        Args:
            layer: the layer.
            key, value: [tokens, heads, head size], whose shapes new pools get.
            values_in_keys: whether a value is the first entries of its key. The layer then has one new pool, and V is a
                view into it.
        """
        if layer not in self._by_layer:
            keys = self._empty(key)
            self._by_layer[layer] = (keys, keys[..., : value.shape[-1]] if values_in_keys else self._empty(value))
            if values_in_keys:
                self._joint.add(layer)
        return self._by_layer[layer]

    def allocate(self, num_blocks: int) -> KVPools:
        """Allocate new zeroed pools with the shapes of these.

        Raises:
            ConfigError: the memory does not suffice.
        """
        larger = KVPools(num_blocks, self.block_size)
        try:
            for layer, pair in self._by_layer.items():
                larger.of_layer(layer, *pair, values_in_keys=layer in self._joint)
        except RuntimeError as error:  # torch raises this on either kind of device
            raise ConfigError(
                f"A KV cache of {num_blocks} blocks ({num_blocks * self.bytes_per_block} bytes) cannot be allocated:"
                f" lower --kv-cache-memory-bytes or --gpu-memory-utilization. ({error})"
            ) from error
        return larger

    def allocate_host(self, num_blocks: int) -> int:
        """Allocate host memory beside these pools, with room for `num_blocks` blocks. No step has run yet.

        Returns:
            The time of the copy of a block to the device, in nanoseconds, as measured.

        Raises:
            ConfigError: the memory does not suffice.
        """
        try:
            self._host = make_host_pools(list(self.blocks()), num_blocks)
            return measure_copy(self._host, min(num_blocks, self.num_blocks, _MEASURED_BLOCKS))
        except RuntimeError as error:
            raise ConfigError(
                f"Host memory for {num_blocks} KV blocks ({num_blocks * self.bytes_per_block} bytes) cannot be"
                f" allocated: lower --kv-offloading-size. ({error})"
            ) from error

    def move_blocks(self, moves: BlockMoves) -> None:
        """Copy between these pools and host memory, after earlier launches and before later ones. No host waits.

        Raises:
            CopyError: the copies failed.
        """
        assert self._host is not None, "moves without host memory"
        try:
            self._host.move(moves)
        except RuntimeError as error:
            raise CopyError(f"{moves.num_blocks} KV blocks could not be copied: {error}") from error

    def blocks(self) -> Iterator[Tensor]:
        """Yield views [num_blocks, block_size, heads, head size] of each pool of each layer that has written."""
        for pool in self._stored():
            yield pool[: self.scratch_slot].view(self.num_blocks, self.block_size, *pool.shape[1:])

    def _stored(self) -> Iterator[Tensor]:
        """Yield the pools that own memory."""
        for layer, (keys, values) in self._by_layer.items():
            yield keys
            if layer not in self._joint:
                yield values

    def _empty(self, like: Tensor) -> Tensor:
        return torch.zeros(self.zero_slot + 1, *like.shape[1:], dtype=like.dtype, device=like.device)


def choose_num_host_blocks(settings: ModelSettings, bytes_per_block: int, local: LocalRank) -> int:
    """Number of blocks that `kv_offloading_size` holds.

    Raises:
        ConfigError: the size is above 0 and holds no block, or the host has less memory.
    """
    free = None if local.free_host_bytes is None else local.free_host_bytes / local.num_ranks / (1 << 30)
    if free is not None and settings.kv_offloading_size > free:
        each = f" for each of {local.num_ranks} engines" if local.num_ranks > 1 else ""
        raise ConfigError(
            f"--kv-offloading-size {settings.kv_offloading_size:g} GiB{each} is more than this host has free:"
            f" {free:.2f} GiB{each} fit. Give less, or 0 to compute evicted KV again."
        )
    num_blocks = int(settings.kv_offloading_size * (1 << 30)) // bytes_per_block
    if settings.kv_offloading_size and not num_blocks:
        raise ConfigError(
            f"--kv-offloading-size {settings.kv_offloading_size:g} GiB holds no KV block, which takes"
            f" {bytes_per_block} bytes: give more, or 0."
        )
    return num_blocks


def choose_num_blocks(settings: ModelSettings, kv_bytes: int, bytes_per_block: int) -> int:
    """Number of blocks that the memory holds, or the operator's override. `kv_bytes`: memory of the KV cache."""
    return settings.num_gpu_blocks_override or kv_bytes // bytes_per_block


def choose_max_model_len(settings: ModelSettings, config_len: int | None) -> int:
    """Tokens of the longest sequence before the KV cache is known: the operator's choice or the network's own limit.

    Args:
        config_len: positions that the network was made for; None if its config names none.

    Raises:
        ConfigError: the operator's choice exceeds the network's limit, or neither exists.
    """
    requested = settings.max_model_len
    if config_len is None and requested is None:
        raise UnsupportedModelError("config.json names no max_position_embeddings: set --max-model-len.")
    if config_len is not None and requested is not None and requested > config_len:
        raise ConfigError(
            f"--max-model-len {requested} exceeds this model's max_position_embeddings of {config_len}:"
            f" the network was never trained beyond it. Give at most {config_len}."
        )
    chosen = requested or config_len
    assert chosen is not None
    return chosen


def fit_max_model_len(
    settings: ModelSettings, wanted: int, num_blocks: int, bytes_per_block: int, *, is_measured: bool = False
) -> int:
    """Lower `wanted` to the tokens that the KV cache holds, unless the operator named a length.

    Args:
        is_measured: whether the KV cache is what a share of a card's memory leaves.

    Raises:
        ConfigError: the cache holds no block, or less than the operator's length.
    """
    size = settings.block_size
    if num_blocks * size >= wanted:
        return wanted
    if num_blocks and settings.max_model_len is None:
        return num_blocks * size
    needed = -(-wanted // size) if settings.max_model_len is not None else 1
    remedy = f"set --kv-cache-memory-bytes to at least {needed * bytes_per_block}"
    if is_measured:
        remedy = "raise --gpu-memory-utilization, lower --max-num-batched-tokens"
    raise ConfigError(
        f"The KV cache holds {num_blocks} blocks of {size} tokens ({bytes_per_block} bytes a block), but {needed} are"
        f" needed for {min(wanted, needed * size)} tokens: {remedy}, or lower --max-model-len."
    )
