"""Checks on numbers: whether a module computes what another does, and whether the batch changes its bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Largest difference of an entry relative to its size and the root mean square of all. Both sides round to bfloat16
# (2^-9 each) once or twice; a module of another kind differs by far more.
TOLERANCE = 1 / 48

NUM_CHECK_ROWS = 5  # rows on which a module and its kernel are compared
MISFITS = (TypeError, ValueError, AttributeError, RuntimeError)  # of a module that has another interface
_NUM_BATCH_ROWS = 64
# Each row alone, and some batches, the odd ones of which end a vector early.
_PARTS = (*((row, row + 1) for row in range(_NUM_BATCH_ROWS)), (3, 5), (8, 15), (0, 16), (20, 51), (31, 63))
_SHORT_OF_A_VECTOR = 31  # numbers


def random_rows(*shape: int, seed: int = 0) -> Tensor:
    """Draw bfloat16 rows of deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def is_close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results agree up to rounding, in shape and dtype too."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    mine, wanted = ours.to(torch.float32), theirs.to(torch.float32)
    scale = wanted.abs() + wanted.square().mean().sqrt()
    return bool(((mine - wanted).abs() <= TOLERANCE * scale).all())


def is_rowwise(function: Callable[[Tensor], Tensor | Sequence[Tensor]], size: int) -> bool:
    """Whether a function of bfloat16 rows [rows, size] gives each row the same bits in any batch."""
    rows = random_rows(_NUM_BATCH_ROWS, size)
    whole = _tensors(function(rows))
    for first, end in _PARTS:
        part = _tensors(function(rows[first:end]))
        if not all(torch.equal(one, all_rows[first:end]) for one, all_rows in zip(part, whole, strict=True)):
            return False
    return True


def is_elementwise(function: Callable[[Tensor], Tensor]) -> bool:
    """Whether a function of bfloat16 gives every finite number the same bits at any place of any tensor.

    torch computes the end of a vector, and tensors with gaps such as halves of rows, by another formula for some
    functions.
    """
    numbers = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()]
    parts = torch.cat([function(part.clone()) for part in torch.split(numbers, _SHORT_OF_A_VECTOR)])
    with_gaps = function(torch.stack((numbers, numbers), dim=1)[:, 0])
    whole = function(numbers.clone())
    return torch.equal(parts, whole) and torch.equal(with_gaps, whole)


def _tensors(result: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return (result,) if isinstance(result, Tensor) else result
