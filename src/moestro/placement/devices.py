"""The devices among which experts are placed, and what work and moves cost on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.near_experts import OTHER_NODE, SAME_DEVICE, SAME_NODE


@dataclass(frozen=True, slots=True, eq=False)
class Devices:
    """The devices of a group.

    Attributes:
        node_of: int32[devices], machine of each device.
        num_slots: int32[devices], expert copies that each device has room for in each layer.
        is_alive: bool[devices].
        speed: float64[devices], work per time, relative to the device that was priced.
        source_on: int32[sources], device of each source of tokens (attention DP rank).

    Raises:
        ValueError: Lengths differ, or a figure is out of range.
    """

    node_of: NDArray[np.int32]
    num_slots: NDArray[np.int32]
    is_alive: NDArray[np.bool_]
    speed: NDArray[np.float64]
    source_on: NDArray[np.int32]

    def __post_init__(self) -> None:
        lengths = {len(self.node_of), len(self.num_slots), len(self.is_alive), len(self.speed)}
        if len(lengths) > 1:
            raise ValueError(f"node_of, num_slots, is_alive and speed have {sorted(lengths)} devices")
        if (self.num_slots < 0).any() or not (self.speed > 0).all():
            raise ValueError("num_slots must not be negative, and speed must be above 0")
        if len(self.source_on) and not (0 <= self.source_on.min() <= self.source_on.max() < self.num_devices):
            raise ValueError(f"source_on must name devices below {self.num_devices}")

    @property
    def num_devices(self) -> int:
        """Number of devices, dead ones included."""
        return len(self.node_of)

    @property
    def distance(self) -> NDArray[np.int8]:
        """int8[devices, devices]: SAME_DEVICE, SAME_NODE or OTHER_NODE."""
        is_far = self.node_of[:, None] != self.node_of
        found: NDArray[np.int8] = np.where(is_far, OTHER_NODE, SAME_NODE).astype(np.int8)
        np.fill_diagonal(found, SAME_DEVICE)
        return found


def even_devices(num_devices: int, num_slots: int, num_nodes: int = 1) -> Devices:
    """Make equal devices, spread evenly over nodes in order; each one is the source of its own tokens.

    Raises:
        ValueError: The nodes cannot have equally many devices.
    """
    if num_devices % num_nodes:
        raise ValueError(f"{num_devices} devices cannot be spread evenly over {num_nodes} nodes")
    every = np.arange(num_devices, dtype=np.int32)
    return Devices(
        node_of=every // (num_devices // num_nodes),
        num_slots=np.full(num_devices, num_slots, np.int32),
        is_alive=np.ones(num_devices, np.bool_),
        speed=np.ones(num_devices),
        source_on=every,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacePrices:
    """Seconds that a placement's work takes.

    Attributes:
        token_s: Experts' work for one token at one expert.
        expert_s: Reading the weights of one activated expert.
        row_s: One row (a token for one expert, or its answer) that goes no way, within a node, and between nodes.
        expert_bytes: Weights of one expert in one layer.
        move_bytes_per_s: Bandwidth at which a device receives weights from itself, its node, and another node.
    """

    token_s: float
    expert_s: float
    row_s: tuple[float, float, float]
    expert_bytes: int
    move_bytes_per_s: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLimits:
    """Bounds on what one change of placement may move. None means no limit.

    Attributes:
        max_bytes: Bytes of all weights that move.
        max_receives: Experts that one device receives.
        max_layers: Layers that change.
        horizon_steps: Steps for which the new placement will stay, within which a move must pay for itself.
    """

    max_bytes: int | None = None
    max_receives: int | None = None
    max_layers: int | None = None
    horizon_steps: float = 10_000.0
