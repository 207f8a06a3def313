"""Paged K and V: one pool of slots per layer and kind, in the shape that the layer's attention writes, and host pools.

A layer whose values are the first entries of its keys has one pool: its V is a view into K.

Slot `block * block_size + i` holds the i-th token of a block. Two slots that no block owns follow the blocks: a scratch
slot for K and V that must not be kept, and a slot that stays zero (see `step`).

In host memory, all layers' K and V of a block lie end to end, so that a block is one copy, as large as a bus likes.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro.core.work import BlockMoves
from moestro.errors import ConfigError, CopyError, UnsupportedModelError
from moestro.model.settings import LocalRank, ModelSettings
from moestro.model.tensors import upload

_WORD = torch.int16  # in which blocks are copied, whatever their dtype
# Blocks of one staging buffer of an accelerator. Two buffers take turns, so that one is on the bus while the other is
# filled or read.
_STAGING_BYTES, _NUM_STAGING = 64 << 20, 2
_COPIED_AT_ONCE = 8  # blocks of one measured copy
_SLAB_BYTES = 1 << 30  # of pinned memory, which torch rounds up to a power of two


class HostPools(Protocol):
    """Blocks of host memory."""

    def move(self, moves: BlockMoves) -> None:
        """Copy blocks between the device and host memory, after all earlier steps and before all later ones."""
        ...

    def wait(self) -> None:
        """Wait until all copies are done."""
        ...


def make_host_pools(of_device: Sequence[Tensor], num_blocks: int) -> HostPools:
    """Allocate host memory beside the pools of a device.

    Args:
        of_device: pools [blocks, ...], whose first dimension is copied by.
        num_blocks: number of blocks to allocate.

    Raises:
        RuntimeError: the memory does not suffice.
    """
    kind = PlainHostPools if of_device[0].device.type == "cpu" else PinnedHostPools
    return kind(_BlockForm(of_device), num_blocks)


def measure_copy(pools: HostPools, num_blocks: int) -> int:
    """Time of the copy of a block to the device, in nanoseconds: the median of copies of a few blocks, as steps make.

    `num_blocks` blocks are copied to the host and back, before anything else is there. Each is read after the others
    were written, since a block that a step needs lies in no cache of the processor either.
    """
    if not num_blocks:
        return 0
    none, all_blocks = np.zeros((2, 0), np.int64), np.stack([np.arange(num_blocks)] * 2)
    few = [all_blocks[:, first : first + _COPIED_AT_ONCE] for first in range(0, num_blocks, _COPIED_AT_ONCE)]
    for pairs in few:
        pools.move(BlockMoves(pairs, none))
    pools.wait()
    block_ns: list[float] = []
    for pairs in few:
        begun_ns = time.perf_counter_ns()
        pools.move(BlockMoves(none, pairs))
        pools.wait()
        block_ns.append((time.perf_counter_ns() - begun_ns) / pairs.shape[1])
    return round(statistics.median(block_ns))


def staging_bytes(bytes_per_block: int) -> int:
    """Bytes of an accelerator's memory that `PinnedHostPools` take. `bytes_per_block`: of all layers' K and V."""
    return _NUM_STAGING * max(_STAGING_BYTES // bytes_per_block, 1) * bytes_per_block


class _BlockForm:
    """Layout of a block of all pools as one row of words.

    Args:
        of_device: pools [blocks, ...].

    Attributes:
        words: the pools as words, [blocks, words of a block].
        width: words of a block in all pools.
    """

    def __init__(self, of_device: Sequence[Tensor]) -> None:
        self.words = [pool.flatten(1).view(_WORD) for pool in of_device]
        self._ends = [0, *accumulate(words.shape[1] for words in self.words)]
        self.width = self._ends[-1]

    def parts(self, rows: Tensor) -> list[Tensor]:
        """Split `rows`, [n, width], into views [n, words of a block] for the pools."""
        return [rows[:, begin:end] for begin, end in pairwise(self._ends)]


class PlainHostPools:
    """Host memory beside a CPU's pools; implements `HostPools`. Arguments as for `PinnedHostPools`."""

    def __init__(self, form: _BlockForm, num_blocks: int) -> None:
        self._form = form
        self._parts = form.parts(torch.zeros(num_blocks, form.width, dtype=_WORD))

    def move(self, moves: BlockMoves) -> None:
        """Implement `HostPools.move`."""
        (from_device, to_host), (from_host, to_device) = map(torch.from_numpy, (moves.kept, moves.restored))
        for words, part in zip(self._form.words, self._parts, strict=True):
            part.index_copy_(0, to_host, words.index_select(0, from_device))
            words.index_copy_(0, to_device, part.index_select(0, from_host))

    def wait(self) -> None:
        """Implement `HostPools.wait`; a CPU copies at once."""


class _Staging:
    """Memory of an accelerator for blocks on their way.

    Args:
        form: layout of the blocks.
        num_blocks: blocks that it holds.
        device: the accelerator.

    Attributes:
        rows: [blocks, width].
        is_free: event that passes when nothing reads or writes the rows.
    """

    def __init__(self, form: _BlockForm, num_blocks: int, device: torch.device) -> None:
        self.rows = torch.empty(num_blocks, form.width, dtype=_WORD, device=device)
        self.is_free = cast(Any, torch.cuda.Event)()
        self.is_free.record(torch.cuda.current_stream(device))


class PinnedHostPools:
    """Pinned host memory beside an accelerator's pools; implements `HostPools`. The host never waits.

    Steps and the pools belong to the current stream. It gathers blocks into a staging buffer, and a side stream copies
    them to the host while later steps run and overwrite their slots. Blocks come back in the opposite order, and later
    steps wait for them. Events order the two streams at each buffer; the side stream alone orders copies of one block
    of host memory.

    Args:
        form: layout of the blocks.
        num_blocks: number of blocks to allocate.
    """

    def __init__(self, form: _BlockForm, num_blocks: int) -> None:
        self._form, self._device = form, form.words[0].device
        block_bytes = form.width * _WORD.itemsize
        per_slab = max(_SLAB_BYTES // block_bytes, 1)
        sizes = (min(per_slab, num_blocks - first) for first in range(0, num_blocks, per_slab))
        slabs = [torch.zeros(size, form.width, dtype=_WORD, pin_memory=True) for size in sizes]
        self._blocks = [slab[block] for slab in slabs for block in range(len(slab))]
        self._stream = cast(Any, torch.cuda.Stream)(self._device)
        self._num_staged = min(max(_STAGING_BYTES // block_bytes, 1), num_blocks)
        self._staging = deque(_Staging(form, self._num_staged, self._device) for _ in range(_NUM_STAGING))

    def move(self, moves: BlockMoves) -> None:
        """Implement `HostPools.move`."""
        for from_device, to_host in self._chunks(moves.kept):
            self._keep(from_device, to_host)
        for from_host, to_device in self._chunks(moves.restored):
            self._restore(from_host, to_device)

    def wait(self) -> None:
        """Implement `HostPools.wait`."""
        done = cast(Any, torch.cuda.Event)()
        done.record(torch.cuda.current_stream(self._device))
        done.synchronize()

    def _chunks(self, pairs: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Split pairs int64[2, n] into as many as a staging buffer holds."""
        return (pairs[:, first : first + self._num_staged] for first in range(0, pairs.shape[1], self._num_staged))

    def _keep(self, from_device: NDArray[np.int64], to_host: NDArray[np.int64]) -> None:
        main, staging = torch.cuda.current_stream(self._device), self._next()
        main.wait_event(staging.is_free)
        index, rows = upload(from_device, self._device), staging.rows[: len(to_host)]
        for words, part in zip(self._form.words, self._form.parts(rows), strict=True):
            torch.index_select(words, 0, index, out=part)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            for row, block in enumerate(to_host.tolist()):
                self._blocks[block].copy_(rows[row], non_blocking=True)
        staging.is_free.record(self._stream)

    def _restore(self, from_host: NDArray[np.int64], to_device: NDArray[np.int64]) -> None:
        main, staging = torch.cuda.current_stream(self._device), self._next()
        self._stream.wait_event(staging.is_free)
        rows = staging.rows[: len(from_host)]
        with torch.cuda.stream(self._stream):
            for row, block in enumerate(from_host.tolist()):
                rows[row].copy_(self._blocks[block], non_blocking=True)
        main.wait_stream(self._stream)
        index = upload(to_device, self._device)
        for words, part in zip(self._form.words, self._form.parts(rows), strict=True):
            words.index_copy_(0, index, part)
        staging.is_free.record(main)

    def _next(self) -> _Staging:
        """The staging buffer that has been free the longest."""
        self._staging.rotate()
        return self._staging[0]


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
            f"--max-model-len {requested} exceeds this model's {config_len} positions (max_position_embeddings, or what"
            f" YaRN adds): the network was never trained beyond them. Give at most {config_len}."
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
