"""Weights in the layout of a CPU's matrix kernels, converted once at load instead of in every product.

This shortens a decode step of a 640M network in bfloat16 by about a third (`bench/micro/packing.py`) and changes no bit
of a product. The unpacked weights are dropped, so memory use stays the same.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch and this machine have the packed kernels."""
    if device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def pack(weight: Tensor) -> Tensor:
    """Convert [out, in] to the kernels' own layout, which only `packed_linear` can read."""
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()))


def packed_linear(rows: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `functional.linear` with a packed weight. `rows`: [..., in], with the weight's dtype."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], ""))


class PackedLinear(nn.Module):
    """Replaces a linear layer.

    Attributes:
        weight: shape and dtype of the layer's weight, without memory, because networks read them.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.empty_like(linear.weight.data, device="meta")
        self.bias = linear.bias
        self._packed = pack(linear.weight.data)

    def forward(self, rows: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return packed_linear(rows, self._packed, self.bias)


def pack_linears(model: nn.Module) -> None:
    """Replace every linear layer of `model`. A weight that an embedding shares stays unpacked there."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
