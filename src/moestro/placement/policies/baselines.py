"""Placement policies to compare with: one that never moves an expert, and DeepSeek's load balancer of experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.contract import PLACE_POLICIES, Devices, PlaceView
from moestro.placement.eplb import keep_slots, rebalance_experts


@PLACE_POLICIES.register_function(
    "static", "leaves every expert where it is", source="vLLM and SGLang without load balancing"
)
def static(view: PlaceView) -> ExpertTable:
    """Return the present placement."""
    return view.table


HIERARCHIES = ("auto", "always", "never")


@PLACE_POLICIES.register(
    "eplb",
    "gives redundant slots to the experts with the most load per copy and packs copies by load, whatever has to move;"
    " `hierarchy=always` keeps groups of experts on a node, `never` ignores nodes, `auto` depends on the numbers",
    source="DeepSeek EPLB (d52c72d), the default of vLLM 0.33",
)
class Eplb:
    """Places copies with `rebalance_experts`.

    EPLB may put two copies of an expert on one device. Their second slot stays empty, and the first one gets the shares
    of both. Where every slot has to have an expert, the second copy changes places with one of another device instead,
    so that each expert keeps the number of copies that EPLB gave it. An expert that stays on its device stays in its
    slot, as in vLLM. Dead devices are left out, as SGLang's `elasticity_aware` does.

    Args:
        hierarchy: `auto`, `always` or `never`.

    Raises:
        ValueError: `hierarchy` is another word.
    """

    def __init__(self, hierarchy: str = "auto") -> None:
        if hierarchy not in HIERARCHIES:
            raise ValueError(f"hierarchy must be one of {', '.join(HIERARCHIES)}, got {hierarchy!r}")
        self._hierarchy = hierarchy

    def __call__(self, view: PlaceView) -> ExpertTable:
        """Return the next placement.

        Raises:
            ValueError: EPLB cannot place on these devices.
        """
        holders = _holders(view.devices)
        num_slots = int(view.devices.num_slots[holders[0]])
        num_groups, num_nodes = self._groups_and_nodes(view, holders)
        physical, _, count = rebalance_experts(
            view.load.total, len(holders) * num_slots, num_groups, num_nodes, len(holders)
        )
        old = view.table.logical_of[holders]  # [holders, layers, slots]
        by_device = physical.reshape(len(physical), -1, num_slots)
        if view.fills_slots:
            by_device = by_device.copy()
            for layer, slots in enumerate(by_device):
                _part_doubles(slots, view.load.total[layer] / np.maximum(count[layer], 1))
        wanted = by_device.swapaxes(0, 1)
        is_same = wanted[:, :, :, None] == wanted[:, :, None, :]
        is_second = np.tril(is_same, k=-1).any(axis=-1)
        logical_of = np.full_like(view.table.logical_of, EMPTY)
        logical_of[holders] = _kept_in_place(np.where(is_second, EMPTY, wanted), old)
        shares = None
        if is_second.any():
            held = logical_of[holders]
            num_here = (held[:, :, :, None] == wanted[:, :, None, :]).sum(axis=-1)
            shares = np.zeros(logical_of.shape)
            shares[holders] = num_here / count[np.arange(len(count))[:, None], np.where(held == EMPTY, 0, held)]
        table = ExpertTable(view.table.version + 1, logical_of, view.table.num_experts, view.devices.is_alive, shares)
        return view.table if _are_equal(table, view.table) else table

    def _groups_and_nodes(self, view: PlaceView, holders: NDArray[np.int64]) -> tuple[int, int]:
        """Groups and nodes that EPLB gets; (1, 1) makes it ignore them."""
        sizes = np.unique(view.devices.node_of[holders], return_counts=True)[1].tolist()
        num_nodes = len(sizes)
        divides = view.num_groups % num_nodes == 0 and len(set(sizes)) == 1
        if self._hierarchy == "always" and not divides:
            raise ValueError(
                f"{view.num_groups} groups of experts cannot be kept on {num_nodes} nodes with {sizes} devices: use"
                " hierarchy=auto or never"
            )
        return (view.num_groups, num_nodes) if divides and self._hierarchy != "never" else (1, 1)


def _holders(devices: Devices) -> NDArray[np.int64]:
    """Live devices that have slots, node by node.

    Raises:
        ValueError: They have none, or not equally many.
    """
    holders = np.flatnonzero(devices.is_alive & (devices.num_slots > 0))
    if not len(holders):
        raise ValueError("no live device has slots for experts")
    sizes = sorted(set(devices.num_slots[holders].tolist()))
    if len(sizes) > 1:
        raise ValueError(
            f"eplb needs equally many slots on each device, got {sizes}: use {sizes[0]}, or another policy"
        )
    return holders[np.argsort(devices.node_of[holders], kind="stable")]


def _part_doubles(slots: NDArray[np.int64], work: NDArray[np.float64]) -> None:
    """Exchange second copies of experts on a device for copies on others, so that devices stay level, in place.

    One that finds no device without its expert stays.

    Args:
        slots: int64[devices, slots], experts of one layer.
        work: float64[experts], tokens of each copy.
    """
    num_experts = len(work)
    held = np.zeros((len(slots), num_experts), np.int64)
    np.add.at(held, (np.arange(len(slots))[:, None], slots), 1)
    load = held @ work
    for device, slot in np.argwhere(np.tril(slots[:, :, None] == slots[:, None, :], k=-1).any(axis=-1)).tolist():
        expert = slots[device, slot]
        if held[device, expert] < 2:
            continue
        # The larger load of the two devices after each exchange.
        change = work[expert] - work[slots]
        key = np.maximum(load[device] - change, load[:, None] + change)
        key[held[:, expert] > 0] = np.inf
        key[held[device, slots] > 0] = np.inf
        to, nth = np.unravel_index(key.argmin(), key.shape)
        if not np.isfinite(key[to, nth]):
            continue
        other = slots[to, nth]
        slots[device, slot], slots[to, nth] = other, expert
        held[[device, device, to, to], [expert, other, other, expert]] += [-1, 1, -1, 1]
        load[device] -= change[to, nth]
        load[to] += change[to, nth]


def _kept_in_place(new: NDArray[np.int64], old: NDArray[np.int32]) -> NDArray[np.int64]:
    """`new` with the slots of each device reordered to those of `old`, int[devices, layers, slots] both."""
    num_devices, num_layers, _ = new.shape
    rows = keep_slots(new.reshape(num_devices * num_layers, -1), old.reshape(num_devices * num_layers, -1), 1)
    return rows.reshape(new.shape)


def _are_equal(new: ExpertTable, old: ExpertTable) -> bool:
    if not (np.array_equal(new.logical_of, old.logical_of) and np.array_equal(new.is_alive, old.is_alive)):
        return False
    return np.allclose(new.parts, old.parts)
