"""Load of experts: what placement policies read, and what ranks count."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class LayerPairs:
    """How often a token that visited one expert visited another one in the next layer; only the most frequent pairs.

    Attributes:
        layer: int32[pairs], the earlier layer.
        expert: int32[pairs], expert of the earlier layer.
        next_expert: int32[pairs], expert of the layer after it.
        count: float64[pairs], tokens per step.
    """

    layer: NDArray[np.int32]
    expert: NDArray[np.int32]
    next_expert: NDArray[np.int32]
    count: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoad:
    """Load of all logical experts over a window of steps.

    A step is one forward pass of a whole group. Layers are those with experts, numbered from 0.

    Attributes:
        tokens: float64[sources, layers, experts], mean tokens per step that each source (attention DP rank) sends to
            each expert.
        variance: float64[layers, experts], variance over steps of the tokens of all sources.
        activated: float64[layers, experts], fraction of steps in which the expert got any token.
        num_steps: Steps that the figures stand for; with decay, their effective number.
        pairs: Pairs of experts in consecutive layers; None means that none were collected.

    Raises:
        ValueError: Shapes differ, or a figure is negative or not finite.
    """

    tokens: NDArray[np.float64]
    variance: NDArray[np.float64]
    activated: NDArray[np.float64]
    num_steps: float
    pairs: LayerPairs | None = None

    def __post_init__(self) -> None:
        shapes = {"variance": self.variance.shape, "activated": self.activated.shape}
        for name, shape in shapes.items():
            if self.tokens.ndim != 3 or shape != self.tokens.shape[1:]:
                raise ValueError(f"tokens has the shape {self.tokens.shape}, and {name} {shape}")
        for name in ("tokens", "variance", "activated"):
            figures = getattr(self, name)
            if not (np.isfinite(figures) & (figures >= 0)).all():
                raise ValueError(f"{name} has a figure that is negative or not finite")

    @property
    def total(self) -> NDArray[np.float64]:
        """float64[layers, experts], mean tokens per step of all sources."""
        total: NDArray[np.float64] = self.tokens.sum(axis=0)
        return total
