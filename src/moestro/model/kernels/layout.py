"""The layout of weights that the own kernels read."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.model.kernels.library import KernelLibrary

_BLOCK = 64  # outputs of a block, as in `source/linear.h`


class KernelPacking:
    """The kernels' layout; implements `model.packing.WeightPacking`.

    A packed weight is a tensor of the weight's shape. Its entries are in another order, and its memory is filled up to
    a whole block.

    Args:
        library: The kernels.
    """

    def __init__(self, library: KernelLibrary) -> None:
        self.linear = library.linear
        self._pack, self._unpack = library.function["pack"], library.function["unpack"]

    def fits(self, weight: Tensor) -> bool:
        """Implement `WeightPacking.fits`."""
        return weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % 2 == 0

    def pack(self, weight: Tensor) -> Tensor:
        """Implement `WeightPacking.pack`."""
        num_out, num_in = weight.shape
        weight = weight.contiguous()
        memory = weight.new_empty(-(-num_out // _BLOCK) * _BLOCK * num_in)
        self._pack(weight.data_ptr(), memory.data_ptr(), num_out, num_in)
        return memory[: num_out * num_in].view(num_out, num_in)

    def pack_heads(self, weights: Tensor) -> Tensor:
        """Convert the weights [heads, out, in] of `KernelLibrary.linear_heads` to [heads, out in whole blocks, in]."""
        num_heads, num_out, num_in = weights.shape
        memory = weights.new_empty(num_heads, -(-num_out // _BLOCK) * _BLOCK, num_in)
        for weight, packed in zip(weights, memory, strict=True):
            dense = weight.contiguous()
            self._pack(dense.data_ptr(), packed.data_ptr(), num_out, num_in)
        return memory

    def unpack(self, packed: Tensor) -> Tensor:
        """Implement `WeightPacking.unpack`."""
        weight = torch.empty_like(packed)
        self._unpack(packed.data_ptr(), weight.data_ptr(), *packed.shape)
        return weight
