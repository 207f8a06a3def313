"""The devices of `moestro place`: from its flags or a topology file, with the profile's sources among them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from moestro.cli.placing.settings import MOST_DEVICES, MOST_SLOTS, DeviceSettings
from moestro.core.experts.expert_load import ExpertLoad
from moestro.errors import ConfigError
from moestro.files.text_files import read_text
from moestro.placement.devices import Devices, even_devices


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
