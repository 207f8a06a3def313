"""Files of placements: ours, SGLang's and TensorRT-LLM's."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from numpy.typing import NDArray

from moestro.cli.admin_port import ask_admin
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.errors import ConfigError
from moestro.placement.contract import Devices, PlacementError, PlaceView
from moestro.placement.placement_file import PlacementFile, table_of_contents, table_of_slots
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


# Reads the placement of a running server of ours, and sends it another one.

_ANSWER_S = 30.0


class _Refusal(msgspec.Struct):
    message: str


class _ApplyAnswer(msgspec.Struct):
    """Fields of the server's answer that are shown.

    Attributes:
        num_moves, num_layers: Copies that move from the server's present placement, and layers of them.
        error: Why the placement stays; None means that it does not.
    """

    num_moves: int = 0
    num_layers: int = 0
    error: _Refusal | None = None


def apply_placement(url: str, key: str | None, placement: PlacementFile) -> str:
    """Let a server move its experts towards a placement, and return what it answered in words.

    Args:
        url: Address of the server's operators' port.
        key: Its --admin-api-key; None means that it needs none.
        placement: The placement.

    Raises:
        PlacementError: The server cannot be reached, or refuses the placement; the text says why.
    """
    status, body = _ask(url, key, "/admin/placement/apply", msgspec.json.encode(placement))
    answer = msgspec.json.decode(body, type=_ApplyAnswer)
    if status != 202:
        return f"{url} has this placement already"
    return f"{url} moves {answer.num_moves:,} copies of experts in {answer.num_layers} layers"


def served_placement(url: str, key: str | None) -> Any:
    """Return what a server answers to `GET /admin/placement?arrays=true`, as `table_of_contents` takes it.

    Args:
        url, key: As for `apply_placement`.

    Raises:
        PlacementError: The server cannot be reached, or has no placement; the text says why.
    """
    _, body = _ask(url, key, "/admin/placement?arrays=true")
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise PlacementError(f"--apply {url}: it is no server of Moestro: {error}") from None


def _ask(url: str, key: str | None, path: str, contents: bytes | None = None) -> tuple[int, bytes]:
    """Return the status and the body of the server's answer to a GET, or to a POST of `contents`."""
    if not url.startswith(("http://", "https://")):
        raise PlacementError(
            f"--apply {url}: give the address of a server's --admin-port, such as http://localhost:8100"
        )
    try:
        status, body = ask_admin(f"{url.rstrip('/')}{path}", key, _ANSWER_S, contents)
    except (OSError, HTTPException, ValueError) as error:
        raise PlacementError(f"--apply {url}: the server cannot be reached: {error}") from None
    if status >= HTTPStatus.BAD_REQUEST:
        raise PlacementError(f"--apply {url}: the server refused: {_reason(status, body)}")
    return status, body


def _reason(status: int, body: bytes) -> str:
    try:
        found = msgspec.json.decode(body, type=_ApplyAnswer).error
    except msgspec.MsgspecError:
        found = None
    return f"status {status}" if found is None else found.message
