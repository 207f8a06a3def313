"""The question of `moestro place`: all files read, all names looked up; and placements in the files of three systems.

Placements are in our form, SGLang's or TensorRT-LLM's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import yaml
from numpy.typing import NDArray

from moestro.cli.admin_port import ask_admin
from moestro.cli.app import is_installed
from moestro.cli.placing.settings import (
    DEFAULT_TOKENS_PER_STEP,
    MOST_DEVICES,
    MOST_SLOTS,
    DeviceSettings,
    PlaceSettings,
    PriceSettings,
)
from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.cost.gpus import gpu_named
from moestro.cost.links import link_named
from moestro.cost.networks import CONFIGS, NetworkShape, known_name, network_named
from moestro.cost.settings import link_within, read_network
from moestro.errors import ConfigError
from moestro.files.text_files import read_text, text_of
from moestro.placement.contract import Devices, PlacementError, PlacePrices, PlaceView, even_devices, place_prices
from moestro.placement.payback import Rows
from moestro.placement.placement_file import PlacementFile, table_of_contents, table_of_slots
from moestro.placement.search.filling import PresentCopies, fill_empty
from moestro.workload.experts.expert_profile import ExpertProfile
from moestro.workload.experts.profile_readers import ProfileReading, read_profile

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


def idle_layers(profile: ExpertProfile, network: NetworkShape) -> tuple[int, ...]:
    """Return layers that have experts in the network, and no load in the profile; none where both differ in size."""
    if profile.num_model_layers != network.num_layers or not _has_experts(network, profile.num_experts):
        return ()
    return tuple(sorted(set(network.expert_layers) - set(profile.layers)))


def write_tensorrt_llm(
    path: Path, rows: Ints, profile: ExpertProfile, num_mtp_layers: int, idle: tuple[int, ...] = ()
) -> None:
    """Write the YAML of TensorRT-LLM's static load balancer.

    Args:
        path: The file.
        rows: int32[layers, slots], expert in each slot, device by device.
        profile: Profile with the number of each layer in the network.
        num_mtp_layers: Layers for multi-token prediction, which TensorRT-LLM numbers after those of the network. No
            load of theirs is known, so they get experts in order.
        idle: Further layers of the network without a load, which get experts in order too.
    """
    num_layers = profile.num_model_layers + num_mtp_layers
    every = all_model_layers(rows, profile.layers, num_layers, profile.num_experts)
    with_experts = sorted((*profile.layers, *idle, *range(profile.num_model_layers, num_layers)))
    assignments = {layer: every[layer] for layer in with_experts}
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


def table_of_rows(rows: Rows, table: ExpertTable, devices: Devices) -> ExpertTable:
    """Return the placement that an engine has after it loads `rows`: it divides tokens evenly among all copies.

    Args:
        rows: int[layers, slots], experts in the slots of all live devices end to end.
        table: Placement of the policy, of which the version stays.
        devices: The devices.
    """
    of_all = np.full((len(rows), int(devices.num_slots.sum())), EMPTY, np.int32)
    of_all[:, np.repeat(devices.is_alive, devices.num_slots)] = rows
    found = table_of_slots(of_all, devices, table.num_experts)
    return replace(found, version=table.version, is_alive=devices.is_alive)


def all_model_layers(rows: Ints, layers: tuple[int, ...], num_model_layers: int, num_experts: int) -> list[list[int]]:
    """Return a row for every layer of the network; those without a recorded load get experts in order."""
    in_order = np.arange(rows.shape[1]) % num_experts
    row_of = dict(zip(layers, rows, strict=True))
    return [row_of.get(layer, in_order).tolist() for layer in range(num_model_layers)]


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


# The devices of `moestro place`: from its flags or a topology file, with the profile's sources among them.


class _TopologyDevice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    node: int | str = 0
    slots: Annotated[int, msgspec.Meta(ge=0, le=MOST_SLOTS)]
    speed: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    alive: bool = True
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_DEVICES)] = 1


class _Topology(msgspec.Struct, forbid_unknown_fields=True):
    devices: Annotated[list[_TopologyDevice], msgspec.Meta(min_length=1)]


def make_devices(settings: DeviceSettings, num_experts: int) -> Devices:
    """Make the devices; each one is the source of its own tokens.

    Raises:
        ConfigError: Flags contradict each other, a device has no such number, or the room does not suffice.
    """
    if settings.topology is not None:
        if (settings.devices, settings.slots_per_device, settings.nodes) != (None, None, 1):
            raise ConfigError("--topology has the devices, slots and nodes: leave out their flags")
        devices = _from_file(settings.topology)
        dead = _dead(settings.dead, devices.num_devices)
    elif settings.devices is None:
        raise ConfigError("give --devices, or --topology with a file of them")
    else:
        dead = _dead(settings.dead, settings.devices)
        num_slots = settings.slots_per_device or -(-num_experts // max(1, settings.devices - len(dead)))
        try:
            devices = even_devices(settings.devices, num_slots, settings.nodes)
        except ValueError as error:
            raise ConfigError(f"--devices and --nodes: {error}") from None
    is_alive = devices.is_alive.copy()
    is_alive[dead] = False
    if not is_alive.any():
        raise ConfigError(f"all {devices.num_devices} devices are dead: name fewer in --dead, or as alive: false")
    room = int(np.minimum(devices.num_slots, num_experts)[is_alive].sum())
    if room < num_experts:
        raise ConfigError(
            f"{int(is_alive.sum())} live devices have {room} slots in a layer, too few for {num_experts} experts:"
            " raise --slots-per-device"
        )
    return replace(devices, is_alive=is_alive)


def _dead(text: str | None, num_devices: int) -> list[int]:
    if text is None:
        return []
    try:
        found = sorted({int(each) for each in text.split(",")})
    except ValueError:
        raise ConfigError(f"--dead {text!r}: expected numbers of devices, such as 3,7") from None
    if found[0] < 0 or found[-1] >= num_devices:
        raise ConfigError(f"--dead {text}: devices have the numbers 0 to {num_devices - 1}")
    return found


def _from_file(path: Path) -> Devices:
    try:
        found = msgspec.yaml.decode(read_text(path), type=_Topology)
    except OSError as error:
        raise ConfigError(f"--topology {path} cannot be read: {error}") from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"--topology {path}: {error}") from None
    rows = [row for row in found.devices for _ in range(row.count)]
    if len(rows) > MOST_DEVICES:
        raise ConfigError(f"--topology {path} has {len(rows):,} devices: name at most {MOST_DEVICES:,}")
    if not all(math.isfinite(row.speed) for row in rows):
        raise ConfigError(f"--topology {path}: the speed of a device must be finite")
    nodes = list(dict.fromkeys(row.node for row in rows))
    return Devices(
        node_of=np.array([nodes.index(row.node) for row in rows], np.int32),
        num_slots=np.array([row.slots for row in rows], np.int32),
        is_alive=np.array([row.alive for row in rows], np.bool_),
        speed=np.array([row.speed for row in rows], np.float64),
        source_on=np.arange(len(rows), dtype=np.int32),
    )


def spread_sources(load: ExpertLoad, devices: Devices) -> ExpertLoad:
    """Give each device its part of the sources' tokens.

    Sources lie on the devices in order, each on equally many. A source that spans several devices sends the same from
    each of them. The live devices take over the tokens of the dead ones.
    """
    num_sources, num_devices = load.tokens.shape[0], devices.num_devices
    part = np.zeros((num_devices, num_sources))
    for source in range(num_sources):
        first = source * num_devices // num_sources
        own = np.arange(first, max(first + 1, (source + 1) * num_devices // num_sources))
        live = own[devices.is_alive[own]]
        # The requests of a source without a live device go to all others.
        part[live if len(live) else np.flatnonzero(devices.is_alive), source] = 1.0
    part /= part.sum(axis=0)
    return replace(load, tokens=np.einsum("ds,sle->dle", part, load.tokens))


_FALLBACK = "qwen3-30b-a3b"  # prices of a network that fits no known one; its experts are small, as most are now


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaceQuestion:
    """A profile, devices, prices and limits.

    Attributes:
        settings: Settings as given.
        profile: Profile as read, with the network's layer numbers.
        view: What a policy sees.
        network: Network whose prices hold.
        notes: What was assumed, a sentence each.
    """

    settings: PlaceSettings
    profile: ExpertProfile
    view: PlaceView
    network: NetworkShape
    notes: tuple[str, ...]


def make_question(settings: PlaceSettings) -> PlaceQuestion:
    """Read all files and look up all names.

    Raises:
        ConfigError: A name is unknown, a file cannot be read, or the parts do not fit each other.
    """
    named = None if settings.prices.model is None else read_network(settings.prices.model)
    if named is not None and named.experts is None:
        raise ConfigError(f"--model {named.name} has no experts to place")
    profile = read_profile(settings.paths, _reading(settings, named))
    network, why = named, ""
    if network is None:
        network, why = _known_network(profile)
    else:
        profile = replace(profile, model=network.name)
    profile = _numbered(profile, network)
    devices = make_devices(settings.devices, profile.num_experts)
    url = settings.output.apply
    served = None if url is None else served_placement(url, settings.output.admin_api_key)
    view = PlaceView(
        load=spread_sources(profile.load, devices),
        table=_current(settings, devices, profile, served),
        devices=devices,
        prices=with_served_bytes(_prices(settings.prices, network), served),
        limits=settings.policy.limits,
        num_groups=settings.policy.num_groups,
    )
    if profile.num_experts % settings.policy.num_groups:
        raise ConfigError(
            f"--num-groups {settings.policy.num_groups} does not divide {profile.num_experts} experts: give a divisor"
        )
    notes = [*profile.notes, *([why] if why else [])]
    if missing := missing_ranks(profile.ranks, devices.num_devices):
        notes.append(missing)
    if profile.num_sources not in (1, devices.num_devices):
        notes.append(f"the {profile.num_sources} sources are laid on the {devices.num_devices} devices in order")
    if settings.devices.current is None and url is not None:
        notes.append(f"the present placement is that of {url}")
    if isinstance(served, dict) and "prices" in served:
        notes.append(f"moves are priced with the experts and links of {url}")
    return PlaceQuestion(settings=settings, profile=profile, view=view, network=network, notes=tuple(notes))


def missing_ranks(ranks: tuple[int, ...], num_devices: int) -> str:
    """Return which ranks of a group have no file, in a sentence; "" means none.

    Args:
        ranks: Ranks whose files were read; empty means that there is one file for all.
        num_devices: Devices of the group, each of which is a rank of the recording.
    """
    lacking = sorted(set(range(max(num_devices, *ranks, 0))) - set(ranks)) if ranks else []
    if not lacking:
        return ""
    which = f"rank {lacking[0]} has" if len(lacking) == 1 else f"ranks {_runs(lacking)} have"
    return (
        f"{which} no file, and the load is that of {'rank' if len(ranks) == 1 else 'ranks'} {_runs(sorted(ranks))}"
        " alone: give all dumps of the recording, unless it had no other ranks or each rank saw all tokens"
    )


def _runs(numbers: list[int]) -> str:
    """Return numbers in words, with runs of three and more as first-last: 0, 2-5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(str(each) for each in run) for run in runs)


def load_to_check(question: PlaceQuestion, path: Path) -> ExpertLoad:
    """Read the load of another profile of the same network.

    Raises:
        ConfigError: It cannot be read, or has other layers or experts.
    """
    settings, profile = question.settings, question.profile
    reading = replace(
        _reading(settings, None), num_experts=profile.num_experts, index=None, datasets=(), needs_steps=False
    )
    other = read_profile([path], reading)
    if other.num_layers != profile.num_layers:
        raise ConfigError(
            f"--check {path} has {other.num_layers} layers with experts, and {profile.num_layers} are placed"
        )
    return spread_sources(other.load, question.view.devices)


def _reading(settings: PlaceSettings, named: NetworkShape | None) -> ProfileReading:
    experts = None if named is None else named.experts
    read_tensors = None
    if is_installed("serve"):

        def read_tensors(path: Path) -> Any:
            from moestro.model.tensors import (
                read_tensor_file,  # torch takes seconds, and few profiles need it
            )

            return read_tensor_file(path)

    return ProfileReading(
        num_experts=settings.profile.num_experts or (None if experts is None else experts.num_experts),
        top_k=8 if experts is None else experts.top_k,
        tokens_per_step=settings.profile.tokens_per_step or DEFAULT_TOKENS_PER_STEP,
        needs_steps=settings.profile.tokens_per_step is not None,
        experts_of=_experts_of,
        index=settings.profile.routing_index,
        datasets=settings.profile.dataset,
        read_tensors=read_tensors,
    )


def _experts_of(name: str, num_layers: int) -> int | None:
    """Return the experts of a layer of a known network, if a recording that names it can be of it."""
    named = known_name(name)
    network = None if named is None else network_named(named)
    if network is None or network.experts is None or num_layers not in (network.num_layers, network.num_moe_layers):
        return None
    return network.experts.num_experts


def _has_experts(network: NetworkShape, num_experts: int) -> bool:
    return network.experts is not None and network.experts.num_experts == num_experts


def _known_network(profile: ExpertProfile) -> tuple[NetworkShape, str]:
    """Return the network that the profile names, or the first known one with its experts and layers, and say why."""
    named = known_name(profile.model)
    if named is not None and _has_experts(network_named(named), profile.num_experts):
        return network_named(named), f"prices are those of {named}, which the profile names"
    for name in CONFIGS:
        network = network_named(name)
        if _has_experts(network, profile.num_experts) and profile.num_layers == network.num_moe_layers:
            return network, f"prices are those of {name}, whose experts and layers match (--model names another one)"
    return network_named(_FALLBACK), (
        f"no known network has {profile.num_experts} experts in {profile.num_layers} layers: prices are those of"
        f" {_FALLBACK} (--model names another one)"
    )


def _numbered(profile: ExpertProfile, network: NetworkShape) -> ExpertProfile:
    """Number the layers as in the network, where a profile has only those with experts, and as many as the network."""
    numbers = sorted(layer for group in network.groups if group.has_experts for layer in group.layers)
    if profile.num_model_layers == profile.num_layers == len(numbers) != network.num_layers:
        return replace(profile, layers=tuple(numbers), num_model_layers=network.num_layers)
    return profile


def _prices(settings: PriceSettings, network: NetworkShape) -> PlacePrices:
    gpu = gpu_named(settings.gpu)
    return place_prices(network, gpu, link_within(settings.link_within, gpu), link_named(settings.link_across))


def with_served_bytes(prices: PlacePrices, served: Any) -> PlacePrices:
    """Return prices with the bytes of an expert, and the seconds of its move, that a server itself plans with.

    Args:
        prices: Prices of the network that the profile is of.
        served: The server's answer to `GET /admin/placement`; None, and one without prices, change nothing.
    """
    try:
        own = msgspec.convert(served, _Served).prices
    except msgspec.ValidationError:
        return prices
    if own is None or min(own.expert_bytes, own.move_s, own.move_across_s) <= 0:
        return prices
    bytes_per_s = (prices.move_bytes_per_s[0], own.expert_bytes / own.move_s, own.expert_bytes / own.move_across_s)
    return replace(prices, expert_bytes=own.expert_bytes, move_bytes_per_s=bytes_per_s)


class _ServedPrices(msgspec.Struct):
    expert_bytes: int
    move_s: float
    move_across_s: float


class _Served(msgspec.Struct):
    prices: _ServedPrices | None = None


def _current(settings: PlaceSettings, devices: Devices, profile: ExpertProfile, served: Any) -> ExpertTable:
    path, url = settings.devices.current, settings.output.apply
    if path is None and url is not None:
        contents = served
        flag = f"--apply {url}: the server's placement"
        return read_current(flag, contents, devices, profile.layers, profile.num_experts)
    if path is None:
        try:
            return first_table(devices, profile.num_layers, profile.num_experts)
        except ValueError as error:
            raise ConfigError(f"experts in order do not fit the devices: {error}; give --current") from None
    try:
        data = path.read_bytes()
        is_tensors = data.startswith(b"PK")
        contents = None if is_tensors else msgspec.json.decode(text_of(data))
    except (OSError, UnicodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"--current {path} cannot be read: {error}") from error
    if is_tensors:
        read_tensors = _reading(settings, None).read_tensors
        if read_tensors is None:
            raise ConfigError(f"--current {path} is a file of tensors, which torch reads: pip install 'moestro[serve]'")
        contents = read_tensors(path)
    return read_current(f"--current {path}", contents, devices, profile.layers, profile.num_experts)
