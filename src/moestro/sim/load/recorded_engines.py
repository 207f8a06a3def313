"""The engines of a record and the cost of their steps, as settings of a simulation."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import msgspec

from moestro.core.load_figures import FIGURES, ROUTED_FIGURES
from moestro.core.setting_checks import CheckedSettings
from moestro.engine.settings import SchedulerLimits, SchedulerPolicies
from moestro.errors import ConfigError
from moestro.files.text_files import read_text
from moestro.flow.settings import SteppingSettings
from moestro.routing.registry import ROUTE_POLICIES
from moestro.sim.groups.group_settings import GROUP_MODES
from moestro.sim.settings import PolicySettings, SimEngineSettings, refuse_unknown
from moestro.sim.signals import ChannelSettings, ReportChannel, SignalSettings
from moestro.workload.traces.request_record import ROUTER, Header, RequestRecord

_POLL_MS = 1000.0  # --metrics-interval of `moestro route`


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfSettings:
    """What a replay simulates of a record.

    Attributes:
        policies: routing policies under which it is simulated.
        cost: GPU/NETWORK, qllm/NETWORK, or a table of `moestro calibrate`. None means the device of the record.
        engines: keys of `SimEngineSettings` that replace those of the record.
        is_closed_loop: whether a session's next turn arrives as long after the simulated end of the turn before as
            after the recorded one; otherwise arrivals are as recorded.
    """

    policies: tuple[str, ...] = ()
    cost: str | None = None
    engines: Mapping[str, object] = field(default_factory=dict)
    is_closed_loop: bool = False


def read_engines(path: Path, flag: str = "--engines") -> dict[str, object]:
    """Read the table [engines] of a TOML file; other tables are ignored.

    Args:
        path: the file.
        flag: what names the file, for messages.

    Raises:
        ConfigError: the file cannot be read, has no such table, or the table has an unknown key.
    """
    try:
        table = tomllib.loads(read_text(path)).get("engines")
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{flag} {path} has no table [engines]")
    refuse_unknown(table, SimEngineSettings, "engines")
    if "table" in table:
        table["table"] = str((path.parent / str(table["table"])).absolute())
    return table


def recorded_engines(record: RequestRecord, settings: WhatIfSettings, num_engines: int) -> SimEngineSettings:
    """Return the engines as far as the record describes them, with the cost of their steps.

    Args:
        num_engines: number of engines to simulate.

    Raises:
        ConfigError: step durations are unknown, a setting is not allowed, or the engines formed a group.
    """
    header = record.header
    if header.stepping.get("mode") in GROUP_MODES:
        raise ConfigError(
            f"the record comes from engines in mode {header.stepping['mode']!r}, and a replay simulates engines that"
            " compute alone: simulate the group by a file with a table [group], see docs/simulator.md"
        )
    recorded: dict[str, object] = {
        "count": num_engines,
        "block_size": header.block_size,
        "num_blocks": header.num_blocks or None,
        "kv_offloading_size": header.kv_offloading_size,
        "max_model_len": header.max_model_len or None,
        **_recorded(header.limits, SchedulerLimits),
        **_in_recorded_blocks(header, settings.engines),
    }
    if settings.cost is not None or not {"gpu", "network", "engine", "table"} & recorded.keys():
        recorded |= _cost(header, settings.cost)
    if recorded["kv_offloading_size"] and "table" in recorded:
        raise ConfigError(
            "this server kept KV of preempted requests in host memory, and a table does not price these copies:"
            " give --cost GPU/NETWORK"
        )
    return _converted(recorded)


def _in_recorded_blocks(header: Header, engines: Mapping[str, object]) -> dict[str, object]:
    """Return the operator's settings with the KV cache in blocks of the record.

    A router's record names blocks of its own size, which may be estimated from texts.
    """
    size, num_blocks = engines.get("block_size"), engines.get("num_blocks")
    if header.device != ROUTER or not isinstance(size, int) or size == header.block_size:
        return dict(engines)
    found = {**engines, "block_size": header.block_size}
    if isinstance(num_blocks, int):
        found["num_blocks"] = max(1, num_blocks * size // header.block_size)
    return found


def _converted(recorded: dict[str, object]) -> SimEngineSettings:
    try:
        return msgspec.convert(recorded, SimEngineSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--engines: {error}") from None


def recorded_signals(header: Header) -> SignalSettings:
    """Return how load figures reach the router: with each step in a server, by polls of `/metrics` behind a router."""
    figures = tuple(name for name in ROUTED_FIGURES if FIGURES[name].is_from_rank)
    channel = ReportChannel.POLLED if header.device == ROUTER else ReportChannel.PIGGYBACKED
    return SignalSettings(channels=(ChannelSettings(figures=figures, channel=channel, period_ms=_POLL_MS),))


def assumed_engines_note(header: Header, engines: SimEngineSettings, num_blocks: int) -> str | None:
    """Say what is assumed of engines that a router's record does not describe; None for a server's record."""
    if header.device != ROUTER:
        return None
    return (
        f"A router's record has no settings of its engines. Simulated: {engines.count} with {num_blocks:,} blocks of"
        f" {engines.block_size} tokens, max_num_seqs {engines.max_num_seqs}, max_num_batched_tokens"
        f" {engines.max_num_batched_tokens:,}. Give --engines FILE with a table [engines] to change them"
    )


def _cost(header: Header, cost: str | None) -> dict[str, str]:
    if cost is None and header.device.startswith("paced:"):
        source = header.device.removeprefix("paced:")
        cost = source if source.endswith(".json") else f"{source}/{header.model}"
    if cost is None:
        whose = "a router" if header.device == ROUTER else f"a server on {header.device}"
        raise ConfigError(
            f"the record comes from {whose} and holds no step durations: give --cost with the table that"
            " `moestro calibrate` writes on that machine, or --cost GPU/NETWORK, for instance h20/qwen3-30b-a3b"
        )
    if cost.endswith(".json"):
        return {"table": str(Path(cost).absolute())}
    gpu, separator, network = cost.partition("/")
    if not separator:
        raise ConfigError(f"--cost {cost!r} is neither GPU/NETWORK nor a table, FILE.json")
    return {"engine": "qllm", "network": network} if gpu == "qllm" else {"gpu": gpu, "network": network}


def recorded_policy(record: RequestRecord, route: str, title: str) -> PolicySettings:
    """Return the policies of the recorded engines with a routing policy, and the recorded number of routers.

    Args:
        route: name of a routing policy, with settings if any, or the expression of a recorded `--route-score`.
    """
    header = record.header
    recorded = _recorded(header.limits, SchedulerPolicies) | _recorded(header.stepping, SteppingSettings)
    if recorded.get("max_be_wait", 0.0) is None:
        recorded["max_be_wait"] = math.inf  # JSON has no inf
    name = route.partition(":")[0]
    is_score = route == header.route_policy and name not in ROUTE_POLICIES.names() and not name.endswith(".py")
    which = "route_score" if is_score else "route"
    routers = {"routers": record.num_routers, "router_delay_ms": record.router_delay_ms}
    return msgspec.convert({"name": title, which: route, **recorded, **routers}, PolicySettings)


def _recorded(values: Mapping[str, object], kind: type[CheckedSettings]) -> dict[str, object]:
    """Return the values that a header holds for the fields of `kind`."""
    return {each.name: values[each.name] for each in fields(kind) if each.name in values}
