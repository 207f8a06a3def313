"""Placements in files: ours, which `moestro place` writes, a server's answer, and SGLang's map of slots."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.contract import Devices
from moestro.placement.score import PlaceScore


class PlacementFile(msgspec.Struct, kw_only=True):
    """Our file of a placement.

    Attributes:
        moestro_placement: Version of the form.
        policy, created_by: What decided, and which program wrote the file.
        model: Name of the network.
        num_experts: Logical experts of a layer.
        layers: Number of each layer in the network.
        num_model_layers: Layers of the network.
        devices: Node, slots, speed and life of each device.
        table: [layers][devices][slots], logical expert; -1 means empty.
        shares: [layers][devices][slots], part of its expert's tokens that each slot gets; None means equal parts.
        moves: layer (of the network), expert, source and target device of each copy that moves; source -1: loaded.
        before, after: Figures of the traffic model.
        move_s, payback_steps: Seconds of the moves, and steps until they have paid; None means never.
    """

    moestro_placement: int
    policy: str
    created_by: str
    model: str
    num_experts: int
    layers: list[int]
    num_model_layers: int
    devices: list[dict[str, float | bool]]
    table: list[list[list[int]]]
    shares: list[list[list[float]]] | None
    moves: list[tuple[int, int, int, int]]
    before: dict[str, float]
    after: dict[str, float]
    move_s: float
    payback_steps: float | None


VERSION = 1


class _PresentPlacement(msgspec.Struct):
    """Fields of our file that a present placement needs."""

    moestro_placement: int
    num_experts: int
    table: list[list[list[int]]]
    shares: list[list[list[float]]] | None = None


class _ServedPlacement(msgspec.Struct):
    """Fields of the answer of a server's `GET /admin/placement` that a present placement needs."""

    num_experts: int
    workers: list[int]
    table: list[list[list[int]]] | None = None
    shares: list[list[list[float]]] | None = None

    def of_holders(self) -> _PresentPlacement:
        """Return the placement of the workers that hold experts.

        Raises:
            ValueError: The answer has no slots.
        """
        if self.table is None:
            raise ValueError("it has no slots: ask for /admin/placement?arrays=true")
        table = [[layer[worker] for worker in self.workers] for layer in self.table]
        shares = self.shares and [[layer[worker] for worker in self.workers] for layer in self.shares]
        return _PresentPlacement(VERSION, self.num_experts, table, shares)


def table_of_slots(rows: NDArray[Any], devices: Devices, num_experts: int) -> ExpertTable:
    """Make a table of the slots of all devices end to end.

    A second copy of an expert on one device is left out, because it computes nothing that the first one could not;
    the first one gets the share of both.

    Args:
        rows: int[layers, slots], logical expert in each slot, device by device.
        devices: Devices of which the slots are.
        num_experts: Logical experts of a layer.

    Raises:
        ValueError: An expert has no copy, or no such number.
    """
    if rows.size and not (rows.min() >= EMPTY and rows.max() < num_experts):
        raise ValueError(f"its experts must have numbers below {num_experts}")
    width, num_layers = int(devices.num_slots.max()), len(rows)
    shape, none = (devices.num_devices, num_layers, width), num_experts  # which sorts after all experts
    slots = np.full(shape, none, np.int64)
    is_slot = np.broadcast_to((np.arange(width) < devices.num_slots[:, None])[:, None], shape)
    by_device = np.split(rows, np.cumsum(devices.num_slots)[:-1], axis=1)
    slots[is_slot] = np.concatenate([part.ravel() for part in by_device])
    ordered = np.sort(np.where(slots == EMPTY, none, slots), axis=2).reshape(-1, width)
    is_first = np.ones(ordered.shape, np.bool_)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    starts = np.flatnonzero(is_first)
    expert, count = ordered.ravel()[starts], np.diff(starts, append=ordered.size)
    held = expert != none
    starts, expert, count = starts[held], expert[held], count[held]
    row, nth = starts // width, (np.cumsum(is_first, axis=1) - 1).ravel()[starts]
    logical_of, weight = np.full(shape, EMPTY, np.int32), np.zeros(shape)
    logical_of.reshape(-1, width)[row, nth], weight.reshape(-1, width)[row, nth] = expert, count
    index = row % num_layers * num_experts + expert
    copies = np.bincount(index, count, num_layers * num_experts).reshape(num_layers, num_experts)
    layer_of = np.arange(num_layers)[:, None]
    shares = weight / np.maximum(copies, 1)[layer_of, np.maximum(logical_of, 0)]
    has_second = bool((weight > 1).any())
    alive = np.ones(devices.num_devices, np.bool_)
    return ExpertTable(0, logical_of, num_experts, alive, shares if has_second else None)


def table_of_contents(contents: Any, devices: Devices, layers: tuple[int, ...], num_experts: int) -> ExpertTable:
    """Make the placement of a file's contents.

    Args:
        contents: JSON object of our file, of SGLang's or of a server's GET /admin/placement?arrays=true, or the fields
            of a SGLang dump.
        devices: Devices of which the placement is.
        layers: Number of each layer with experts in the network.
        num_experts: Logical experts of a layer.

    Raises:
        ValueError: The contents are no placement, or not of these devices, layers and experts.
    """
    try:
        if isinstance(contents, dict) and "moestro_placement" in contents:
            return _of_ours(msgspec.convert(contents, _PresentPlacement), devices, len(layers), num_experts)
        if isinstance(contents, dict) and "table_version" in contents:
            served = msgspec.convert(contents, _ServedPlacement).of_holders()
            return _of_ours(served, devices, len(layers), num_experts)
        for name in ("physical_to_logical_map", "last_physical_to_logical_map"):
            if isinstance(contents, dict) and name in contents:
                return _of_map(np.array(contents[name], np.int64), devices, layers, num_experts)
    except (ValueError, TypeError, IndexError, OverflowError, msgspec.ValidationError) as error:
        raise ValueError(f"it does not fit: {error}") from None
    raise ValueError("it is no placement: it has neither moestro_placement, physical_to_logical_map nor table_version")


def _of_ours(found: _PresentPlacement, devices: Devices, num_layers: int, num_experts: int) -> ExpertTable:
    if found.moestro_placement != VERSION:
        raise ValueError(f"it has version {found.moestro_placement}; this Moestro reads version {VERSION}")
    table = np.swapaxes(np.array(found.table, np.int32), 0, 1)
    width = int(devices.num_slots.max())
    facts = {
        "devices": (table.shape[0], devices.num_devices),
        "layers": (table.shape[1], num_layers),
        "experts": (found.num_experts, num_experts),
    }
    for what, (has, wanted) in facts.items():
        if has != wanted:
            raise ValueError(f"it has {has} {what}, and {wanted} are placed")
    filled = (table != EMPTY).sum(axis=2).max(axis=1)
    if (filled > devices.num_slots).any():
        raise ValueError("a device holds more experts than it has slots now")
    shares = None if found.shares is None else np.swapaxes(np.array(found.shares, np.float64), 0, 1)
    order = np.argsort(table == EMPTY, axis=2, kind="stable")[:, :, :width]  # filled slots first
    missing = ((0, 0), (0, 0), (0, width - order.shape[2]))
    logical_of = np.pad(np.take_along_axis(table, order, axis=2), missing, constant_values=EMPTY)
    if logical_of.min() < EMPTY or logical_of.max() >= num_experts:
        raise ValueError(f"its experts must have numbers below {num_experts}")
    if shares is not None:
        shares = np.pad(np.take_along_axis(shares, order, axis=2), missing)
    return ExpertTable(0, logical_of, num_experts, np.ones(len(table), np.bool_), shares)


def _of_map(rows: NDArray[np.int64], devices: Devices, layers: tuple[int, ...], num_experts: int) -> ExpertTable:
    if rows.ndim != 2 or (len(rows) != len(layers) and len(rows) <= layers[-1]):
        raise ValueError(f"its map has the shape {list(rows.shape)}; expected a row for each of {len(layers)} layers")
    if len(rows) != len(layers):
        rows = rows[list(layers)]
    room = devices.num_slots
    each, left = divmod(rows.shape[1], len(room))
    if rows.shape[1] == int(room.sum()):
        return table_of_slots(rows, devices, num_experts)
    if left or each > room.min():
        raise ValueError(f"its {rows.shape[1]} slots are not those of {len(room)} devices with {room.max()} slots each")
    apart = np.full((len(rows), int(room.sum())), EMPTY, np.int64)
    starts = np.cumsum(room) - room
    for device, start in enumerate(starts.tolist()):
        apart[:, start : start + each] = rows[:, device * each : (device + 1) * each]
    return table_of_slots(apart, devices, num_experts)


def figures(score: PlaceScore) -> dict[str, float]:
    """Return the figures of a cost by name."""
    rows = (score.rows / max(float(score.rows.sum()), 1e-300)).tolist()
    return {
        "balance_of_sums": score.balance_of_sums,
        "mean_balance": score.mean_balance,
        "step_s": score.step_s,
        "compute_s": float(score.compute_s.sum()),
        "exchange_s": float(score.exchange_s.sum()),
        "same_device_rows": rows[0],
        "same_node_rows": rows[1],
        "other_node_rows": rows[2],
    }
