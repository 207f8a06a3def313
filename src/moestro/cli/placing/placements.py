"""Files of placements: ours, SGLang's and TensorRT-LLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from numpy.typing import NDArray

from moestro.core.expert_table import EMPTY, ExpertTable
from moestro.errors import ConfigError
from moestro.placement.devices import Devices

Ints = NDArray[np.int32]


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


def first_table(devices: Devices, num_layers: int, num_experts: int) -> ExpertTable:
    """Make the placement with which engines start: expert p % experts in slot p, counted over all devices."""
    slot_of_all = np.arange(int(devices.num_slots.sum())) % num_experts
    rows = np.broadcast_to(slot_of_all, (num_layers, len(slot_of_all)))
    return table_of_slots(rows, devices, num_experts)


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
    logical_of = np.full((devices.num_devices, num_layers, width), EMPTY, np.int32)
    copies = np.zeros((num_layers, num_experts))
    weight = np.zeros(logical_of.shape)
    first = 0
    for device, num_slots in enumerate(devices.num_slots.tolist()):
        for layer in range(num_layers):
            held, count = np.unique(rows[layer, first : first + num_slots], return_counts=True)
            held, count = held[held != EMPTY], count[held != EMPTY]
            logical_of[device, layer, : len(held)] = held
            weight[device, layer, : len(held)] = count
            copies[layer, held] += count
        first += num_slots
    layer_of = np.arange(num_layers)[:, None]
    shares = weight / np.maximum(copies, 1)[layer_of, np.maximum(logical_of, 0)]
    has_second = bool((weight > 1).any())
    alive = np.ones(devices.num_devices, np.bool_)
    return ExpertTable(0, logical_of, num_experts, alive, shares if has_second else None)


def write_json(flag: str, path: Path, contents: object) -> None:
    """Write `contents` as JSON.

    Raises:
        ConfigError: The file cannot be written.
    """
    _write(flag, path, msgspec.json.encode(contents) + b"\n")


def write_tensorrt_llm(path: Path, rows: Ints, layers: tuple[int, ...]) -> None:
    """Write the YAML of TensorRT-LLM's static load balancer.

    Args:
        path: The file.
        rows: int32[layers, slots], expert in each slot, device by device.
        layers: Number of each layer in the network.
    """
    assignments = {layer: row.tolist() for layer, row in zip(layers, rows, strict=True)}
    contents = {
        "num_slots": int(rows.shape[1]),
        "initial_global_assignments": assignments,
        "layer_updates_per_iter": 0,  # a static placement
    }
    _write("--tensorrt-llm", path, yaml.safe_dump(contents, default_flow_style=None, sort_keys=False).encode())


def _write(flag: str, path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error}") from error


def filled_slots(table: ExpertTable, devices: Devices, total: NDArray[np.float64]) -> Ints:
    """Return the slots of all live devices end to end, without empty ones, for engines that have none.

    An empty slot gets the expert with the most tokens per copy among those that its device lacks.

    Args:
        table: The placement.
        devices: Its devices.
        total: float64[layers, experts], tokens of each expert.

    Returns:
        int32[layers, slots].

    Raises:
        ConfigError: Live devices have different numbers of slots, which these engines cannot have.
    """
    live = np.flatnonzero(devices.is_alive)
    sizes = sorted(set(devices.num_slots[live].tolist()))
    if len(sizes) > 1:
        raise ConfigError(
            f"--sglang and --tensorrt-llm need equally many slots on each live device; these have {sizes[0]} to"
            f" {sizes[-1]}"
        )
    found = np.swapaxes(table.logical_of[live, :, : sizes[0]], 0, 1).copy()  # [layers, devices, slots]
    for layer, held in enumerate(found):
        copies = np.bincount(held[held != EMPTY], minlength=table.num_experts)
        for device, slot in np.argwhere(held == EMPTY).tolist():
            wanted = total[layer] / np.maximum(copies, 1)
            lacks = np.ones(table.num_experts, np.bool_)
            lacks[held[device][held[device] != EMPTY]] = False
            # A device with more slots than there are experts has each of them already.
            expert = int(np.argmax(np.where(lacks | ~lacks.any(), wanted, -1.0)))
            held[device, slot] = expert
            copies[expert] += 1
    return found.reshape(len(found), -1)


def all_model_layers(rows: Ints, layers: tuple[int, ...], num_model_layers: int, num_experts: int) -> list[list[int]]:
    """Return a row for every layer of the network; dense layers get experts in order, which SGLang does not use."""
    in_order = (np.arange(rows.shape[1]) % num_experts).tolist()
    row_of = dict(zip(layers, rows.tolist(), strict=True))
    return [row_of.get(layer, in_order) for layer in range(num_model_layers)]


def read_current(path: Path, contents: Any, devices: Devices, layers: tuple[int, ...], num_experts: int) -> ExpertTable:
    """Make the present placement of a file's contents.

    Args:
        path: The file, for messages.
        contents: Its JSON object, or the fields of a SGLang dump.
        devices: Devices of which the placement is.
        layers: Number of each layer with experts in the network.
        num_experts: Logical experts of a layer.

    Raises:
        ConfigError: The file is no placement, or not of these devices, layers and experts.
    """
    try:
        if isinstance(contents, dict) and "moestro_placement" in contents:
            return _of_ours(contents, devices, len(layers), num_experts)
        for name in ("physical_to_logical_map", "last_physical_to_logical_map"):
            if isinstance(contents, dict) and name in contents:
                return _of_map(np.array(contents[name], np.int64), devices, layers, num_experts)
    except (ValueError, TypeError, OverflowError, msgspec.ValidationError) as error:
        raise ConfigError(f"--current {path} does not fit: {error}") from None
    raise ConfigError(f"--current {path} is no placement: it has neither moestro_placement nor physical_to_logical_map")


def _of_ours(contents: Any, devices: Devices, num_layers: int, num_experts: int) -> ExpertTable:
    found = msgspec.convert(contents, _PresentPlacement)
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
