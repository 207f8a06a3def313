"""Copies NumPy columns to a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes; what vector loads of kernels need
_TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy `array` to `device` without waiting on the host. On a CPU the tensor may share the array's memory."""
    return upload_tensor(torch.from_numpy(np.ascontiguousarray(array)), device)


def upload_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to `device` as `upload` does; a tensor that is there already stays what it is."""
    return tensor if tensor.device.type == device.type else tensor.pin_memory().to(device, non_blocking=True)


def upload_all(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Copy arrays of int32 or int64 to `device` in one piece, as `upload` does each."""
    if device.type == "cpu":
        return [upload(array, device) for array in arrays]
    begins, num_bytes = pack_places([array.nbytes for array in arrays])
    packed = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    pack(arrays, begins, packed.numpy())
    there = packed.to(device, non_blocking=True)
    return [view(there, begin, array.shape, array.dtype) for begin, array in zip(begins, arrays, strict=True)]


def pack_places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """(where each of some arrays begins in one piece of memory, the size of the piece), in bytes."""
    begins, end = [], 0
    for size in sizes:
        begins.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return begins, end


def pack(arrays: Sequence[NDArray[np.generic]], begins: Sequence[int], memory: NDArray[np.uint8]) -> None:
    """Write arrays to their places in `memory`."""
    for begin, array in zip(begins, arrays, strict=True):
        memory[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def view(memory: Tensor, begin: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Tensor:
    """The array at a place in uint8 memory."""
    size = int(np.prod(shape)) * dtype.itemsize
    return memory[begin : begin + size].view(_TORCH[dtype]).view(shape)
