"""KV blocks in host memory, beside the pools of a device.

All layers' K and V of a block lie end to end in host memory, so that a block is one copy, as large as a bus likes.
"""

from __future__ import annotations

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
from moestro.model.upload import upload

_WORD = torch.int16  # in which blocks are copied, whatever their dtype
# Blocks of one staging buffer of an accelerator. Two buffers take turns, so that one is on the bus while the other is
# filled or read.
_STAGING_BYTES, _NUM_STAGING = 64 << 20, 2
_NUM_TRIALS = 3  # of the copy that is measured
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
    """Time of the copy of a block to the device, in nanoseconds: the shortest of some trials of `num_blocks` blocks.

    Host block i is copied into block i of the device, before anything else is there.
    """
    if not num_blocks:
        return 0
    none, pairs = np.zeros((2, 0), np.int64), np.stack([np.arange(num_blocks)] * 2)
    best_ns = None
    for _ in range(_NUM_TRIALS):
        begun_ns = time.perf_counter_ns()
        pools.move(BlockMoves(none, pairs))
        pools.wait()
        taken_ns = time.perf_counter_ns() - begun_ns
        best_ns = taken_ns if best_ns is None else min(best_ns, taken_ns)
    assert best_ns is not None, "no trial"
    return best_ns // num_blocks


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
