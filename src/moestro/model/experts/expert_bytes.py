"""The weights of one expert as a row of bytes, bit for bit."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moestro.model.experts.routed import ExpertWeights, tag_of


def num_expert_bytes(module: nn.Module) -> int:
    """Return the bytes of one expert of a tagged module, not packed."""
    return sum(_sizes(module))


def to_bytes(weights: ExpertWeights) -> Tensor:
    """Return uint8[bytes], the weights one after the other."""
    return torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in weights if each is not None])


def from_bytes(module: nn.Module, row: Tensor) -> ExpertWeights:
    """Return the weights of an expert of a tagged module; they share the memory of `row`.

    Args:
        row: uint8[bytes], from `to_bytes` on a worker with the same network; its memory begins at a multiple of 8.
    """
    parts = iter(torch.split(row, [size for size in _sizes(module) if size]))
    layout = tag_of(module).layout
    weights = [None if each is None else next(parts).view(each[1]).view(each[0]) for each in layout]
    return ExpertWeights(*weights)  # type: ignore[arg-type]


def _sizes(module: nn.Module) -> list[int]:
    return [0 if each is None else math.prod(each[0]) * each[1].itemsize for each in tag_of(module).layout]
