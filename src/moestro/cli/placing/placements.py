"""Files of placements: ours, SGLang's and TensorRT-LLM's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.errors import ConfigError
from moestro.placement.devices import Devices
from moestro.placement.placement_file import table_of_contents, table_of_slots
from moestro.placement.registry import PlaceView
from moestro.placement.search.filling import PresentCopies, fill_empty

Ints = NDArray[np.int32]


def first_table(devices: Devices, num_layers: int, num_experts: int) -> ExpertTable:
    """Make the placement with which engines start: expert p % experts in slot p, counted over all devices."""
    slot_of_all = np.arange(int(devices.num_slots.sum())) % num_experts
    rows = np.broadcast_to(slot_of_all, (num_layers, len(slot_of_all)))
    return table_of_slots(rows, devices, num_experts)


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


def present_copies(view: PlaceView) -> PresentCopies:
    """Return the copies that live devices have now, with the limits on moves.

    Raises:
        ConfigError: Live devices have different numbers of slots, which engines without empty slots cannot have.
    """
    return PresentCopies(_by_layer(view.table, view.devices), view.limits, view.prices.expert_bytes)


def filled_slots(
    table: ExpertTable, devices: Devices, total: NDArray[np.float64], present: PresentCopies | None = None
) -> Ints:
    """Return the slots of all live devices end to end, without empty ones, for engines that have none.

    Args:
        table: The placement.
        devices: Its devices.
        total: float64[layers, experts], tokens of each expert.
        present: What is in the slots now, as for `fill_empty`.

    Returns:
        int32[layers, slots].

    Raises:
        ConfigError: Live devices have different numbers of slots, which these engines cannot have.
    """
    filled = fill_empty(_by_layer(table, devices), total, present)
    return filled.reshape(len(filled), -1).astype(np.int32)


def _by_layer(table: ExpertTable, devices: Devices) -> NDArray[np.int64]:
    """Return int64[layers, live devices, slots], expert in each slot."""
    live = np.flatnonzero(devices.is_alive)
    sizes = sorted(set(devices.num_slots[live].tolist()))
    if len(sizes) > 1:
        raise ConfigError(
            f"--sglang and --tensorrt-llm need equally many slots on each live device; these have {sizes[0]} to"
            f" {sizes[-1]}"
        )
    return np.swapaxes(table.logical_of[live, :, : sizes[0]], 0, 1).astype(np.int64)


def table_of_rows(rows: Ints, table: ExpertTable, devices: Devices) -> ExpertTable:
    """Return the placement that an engine has after it loads `rows`: it divides tokens evenly among all copies.

    Args:
        rows: int32[layers, slots], experts in the slots of all live devices end to end.
        table: Placement of the policy, of which the version stays.
        devices: The devices.
    """
    of_all = np.full((len(rows), int(devices.num_slots.sum())), EMPTY, np.int32)
    of_all[:, np.repeat(devices.is_alive, devices.num_slots)] = rows
    found = table_of_slots(of_all, devices, table.num_experts)
    return replace(found, version=table.version, is_alive=devices.is_alive)


def all_model_layers(rows: Ints, layers: tuple[int, ...], num_model_layers: int, num_experts: int) -> list[list[int]]:
    """Return a row for every layer of the network; dense layers get experts in order, which SGLang does not use."""
    in_order = (np.arange(rows.shape[1]) % num_experts).tolist()
    row_of = dict(zip(layers, rows.tolist(), strict=True))
    return [row_of.get(layer, in_order) for layer in range(num_model_layers)]


def read_current(flag: str, contents: Any, devices: Devices, layers: tuple[int, ...], num_experts: int) -> ExpertTable:
    """Make the present placement of contents, as `table_of_contents` does; `flag` says whence, for messages.

    Raises:
        ConfigError: They are no placement, or not of these devices, layers and experts.
    """
    try:
        return table_of_contents(contents, devices, layers, num_experts)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
