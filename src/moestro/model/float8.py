"""Weights in float8 with a float32 scale for each block, as published FP8 checkpoints store them.

A number of the weight is its float8 number times the scale of its block, rounded once to the dtype of the activations.
Each product with the weight rounds so, so that results have the bits of a weight that was dequantised at load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

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
