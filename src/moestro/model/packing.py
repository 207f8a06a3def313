"""Weights in the layout that a CPU's matrix kernels want, made once at load instead of at every product.

That takes about a third off a decode step of a 640M network in bfloat16 (`bench/micro/packing.py`) and changes no bit
of a product. The unpacked weights are dropped, so memory stays what it was.
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
    """[out, in] in a layout of the kernels' own; only `packed_linear` can read it."""
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()))


def packed_linear(rows: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear` with a packed weight. `rows`: [..., in], of the weight's dtype."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], ""))


class PackedLinear(nn.Module):
    """Takes the place of a linear layer.

    Attributes:
        weight: shape and dtype of the layer's weight, without memory: networks ask for them.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.empty_like(linear.weight.data, device="meta")
        self.bias = linear.bias
        self._packed = pack(linear.weight.data)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return packed_linear(rows, self._packed, self.bias)


def pack_linears(model: nn.Module) -> None:
    """Replace every linear layer of `model`. A weight that an embedding shares stays there as it is."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
