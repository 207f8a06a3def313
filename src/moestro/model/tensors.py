"""Tensors: a process's device, copies of columns to it, weights in float8, and tensors in other systems' files.

A float8 weight has a float32 scale for each block, as in published FP8 checkpoints. A number of the weight is its
float8 number times the scale of its block, rounded once to the dtype of the activations. Each product with the weight
rounds so, and its results have the bits of a weight that was dequantised at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from moestro.errors import ConfigError
from moestro.model.settings import ModelSettings

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


def choose_device(settings: ModelSettings, rank: int = 0) -> torch.device:
    """Choose the device that the settings name; of several accelerators, the rank's own.

    Args:
        rank: number of the rank. Ranks take the accelerators in turn; with more ranks than accelerators they share.

    Raises:
        ConfigError: the settings name `cuda`, and torch finds no CUDA device.
    """
    present = torch.cuda.is_available()
    if settings.device == "cuda" and not present:
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} finds no CUDA device: give --device cpu, or check the GPU's"
            " driver and install a torch that is built for CUDA"
        )
    if not present or settings.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def open_device_of(settings: ModelSettings, rank: int = 0) -> torch.device:
    """Choose the device as `choose_device` does, and prepare this process for it. Arguments and errors are the same."""
    device = choose_device(settings, rank)
    prepare(device)
    return device


def prepare(device: torch.device) -> None:
    """Make an accelerator the current one of this thread, and let torch's attention there do without cuDNN.

    A CPU needs nothing.
    """
    if device.type == "cpu":
        return
    # Pinned memory, events and Triton's launches belong to the current device, whatever the device of their tensors.
    torch.cuda.set_device(device)
    # cuDNN builds a plan, which takes tens of milliseconds, for each new shape of masked attention; torch would choose
    # it first. Shapes of steps hardly ever repeat.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)


FLOAT8 = torch.float8_e4m3fn
SCALES = "_scale_inv"  # behind the name of a weight: the name of its scales
BLOCK = "float8_block"  # attribute of an experts module whose weights are in float8
_STRIP_NUMBERS = 1 << 24  # numbers that are widened at once, so that a large weight takes little memory beside it


class ScaleBlock(NamedTuple):
    """Outputs and inputs that share a scale. The last blocks of a weight may be smaller."""

    height: int
    width: int

    def grid(self, num_out: int, num_in: int) -> tuple[int, int]:
        """Blocks of a weight [out, in]."""
        return -(-num_out // self.height), -(-num_in // self.width)


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight:
    """A weight [out, in].

    Attributes:
        numbers: float8[out, in].
        scales: float32[row blocks, column blocks].
        block: size of a block.
    """

    numbers: Tensor
    scales: Tensor
    block: ScaleBlock

    @property
    def shape(self) -> torch.Size:
        """(out, in)."""
        return self.numbers.shape

    def __len__(self) -> int:
        return len(self.numbers)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """[out, in] in another dtype."""
        num_out, num_in = self.shape
        height, width = self.block
        out = torch.empty(num_out, num_in, dtype=dtype, device=self.numbers.device)
        step = max(_STRIP_NUMBERS // (height * num_in), 1)
        for first in range(0, len(self.scales), step):
            rows = slice(first * height, min((first + step) * height, num_out))
            scales = self.scales[first : first + step].repeat_interleave(width, 1)[:, :num_in]
            scales = scales.repeat_interleave(height, 0)[: rows.stop - rows.start]
            out[rows] = (self.numbers[rows].to(torch.float32) * scales).to(dtype)
        return out


class Float8Linear(nn.Module):
    """A linear layer whose weight stays in float8. torch dequantises it in every call; a kernel replaces `forward`.

    Args:
        linear: the layer, of which the shape and the bias are taken.
        block: size of a block.

    Attributes:
        weight, weight_scale_inv: numbers and scales, as in `Float8Weight`.
        bias: [out], or None.
        block: as above.
    """

    def __init__(self, linear: nn.Linear, block: ScaleBlock) -> None:
        super().__init__()
        device, (num_out, num_in) = linear.weight.device, linear.weight.shape
        self.in_features, self.out_features, self.block, self.bias = num_in, num_out, block, linear.bias
        self.weight = empty_parameter(num_out, num_in, dtype=FLOAT8, device=device)
        self.weight_scale_inv = empty_parameter(*block.grid(num_out, num_in), dtype=torch.float32, device=device)

    @property
    def stored(self) -> Float8Weight:
        """The weight."""
        return Float8Weight(self.weight, self.weight_scale_inv, self.block)

    def forward(self, rows: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return functional.linear(rows, self.stored.dequantised(rows.dtype), self.bias)

    def dequantised(self, dtype: torch.dtype) -> nn.Linear:
        """The layer with a weight of another dtype."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight = nn.Parameter(self.stored.dequantised(dtype), requires_grad=False)
        linear.bias = self.bias
        return linear


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter whose numbers will be read from a checkpoint."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def read_tensor_file(path: Path) -> Any:
    """Read a `.pt` file of tensors, numbers, texts, lists and dictionaries; no code of the file runs.

    Returns:
        The object in the file, with a NumPy array in place of each tensor.

    Raises:
        ConfigError: The file cannot be read, or contains other objects.
    """
    try:
        return _as_arrays(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises errors of its unpickler, its zip reader and its archive, which vary
        first = (str(error).splitlines() or [type(error).__name__])[0]
        if type(error).__name__ == "UnpicklingError":  # torch's own text advises to let the file's code run
            first = "it is damaged, or holds other objects than tensors, numbers, texts, lists and dictionaries"
        raise ConfigError(f"{path} cannot be read as a file of tensors: {first}") from error


def _as_arrays(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return found.numpy()
    if isinstance(found, dict):
        return {key: _as_arrays(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_as_arrays(value) for value in found]
    return found
