"""The contract of a placement policy, and the registry of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.policy_registry import PolicyKind
from moestro.errors import ConfigError, MoestroError
from moestro.placement.devices import Devices, PlaceLimits, PlacePrices, even_devices


@dataclass(frozen=True, slots=True, eq=False)
class PlaceView:
    """What a placement policy sees.

    Attributes:
        load: Load of the last window.
        table: Present placement. Its slots are padded to the device with the most of them.
        devices: The devices, dead ones included.
        prices: What work, rows and moves cost.
        limits: Bounds on what may move. Policies of peers know none, and ignore them.
        num_groups: Groups of experts that a token's gate chooses first (DeepSeek-V3: 8); 1 means none.
        fills_slots: Whether the engine has an expert in every slot, and divides tokens evenly among copies.
        measured_step_s: Seconds of a whole step as measured, with what prices leave out; None means not measured.

    Raises:
        ValueError: The load, the table and the devices do not fit each other.
    """

    load: ExpertLoad
    table: ExpertTable
    devices: Devices
    prices: PlacePrices
    limits: PlaceLimits
    num_groups: int = 1
    fills_slots: bool = False
    measured_step_s: float | None = None

    def __post_init__(self) -> None:
        num_workers, num_layers, num_slots = self.table.logical_of.shape
        facts = {
            "sources": (self.load.tokens.shape[0], len(self.devices.source_on)),
            "layers": (self.load.tokens.shape[1], num_layers),
            "experts": (self.load.tokens.shape[2], self.table.num_experts),
            "devices": (self.devices.num_devices, num_workers),
            "slots of the largest device": (int(self.devices.num_slots.max(initial=0)), num_slots),
        }
        for what, (first, second) in facts.items():
            if first != second:
                raise ValueError(f"the number of {what} differs: {first} and {second}")


class PlacementError(MoestroError):
    """A policy found no placement, or one that the devices cannot have."""


# A policy returns the next placement; one that leaves all as it is returns `view.table` itself. The new table's version
# is the present one's plus 1.
PlacePolicy = Callable[[PlaceView], ExpertTable]


def check_answer(view: PlaceView, table: object) -> ExpertTable:
    """Return the answer of a policy if it is a table that the devices can have.

    Raises:
        TypeError: It is no table.
        ValueError: Its shape differs, or a device has too few slots.
    """
    if not isinstance(table, ExpertTable):
        raise TypeError(f"it returned {table!r} in place of an ExpertTable")
    if table.logical_of.shape != view.table.logical_of.shape:
        raise ValueError(f"its table has the shape {table.logical_of.shape}, not {view.table.logical_of.shape}")
    used = (table.logical_of != EMPTY).sum(axis=2)
    over = np.argwhere(used > view.devices.num_slots[:, None])
    if len(over):
        device, layer = over[0].tolist()
        raise ValueError(
            f"device {device} has {view.devices.num_slots[device]} slots and gets {used[device, layer]} experts in"
            f" layer {layer}"
        )
    return table


def _try_once(policy: PlacePolicy) -> None:
    """Place four experts of each of two layers on two devices.

    Raises:
        ConfigError: The policy returned no placement.
    """
    devices = even_devices(2, 2)
    table = ExpertTable(0, np.array([[[0, 1]] * 2, [[2, 3]] * 2], np.int32), 4, np.ones(2, np.bool_))
    tokens = np.array([[[4.0, 3.0, 1.0, 0.0]] * 2] * 2)
    earlier, expert, partner = np.array([[0, 0], [0, 1], [2, 3]], np.int32)
    pairs = LayerPairs(earlier, expert, partner, np.array([3.0, 2.0]))
    load = ExpertLoad(tokens, np.zeros((2, 4)), np.array([[1.0, 1.0, 0.5, 0.0]] * 2), 100.0, pairs)
    prices = PlacePrices(
        token_s=1e-6, expert_s=1e-5, row_s=(0.0, 1e-7, 1e-6), expert_bytes=1 << 20, move_bytes_per_s=(1e12, 1e11, 1e10)
    )
    answer = policy(PlaceView(load, table, devices, prices, PlaceLimits()))
    if not isinstance(answer, ExpertTable):
        raise ConfigError(f"it returned {answer!r} in place of an ExpertTable")


PLACE_POLICIES: PolicyKind[PlacePolicy] = PolicyKind(
    "place policy",
    "--policy",
    "moestro.placement.policies",
    try_once=_try_once,
    adapt=lambda found, _text: found,
)
