"""Answers vLLM's load balancer in NumPy: a start file first, then one of Moestro's placement policies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from moestro.cost.settings import read_network
from moestro.errors import ConfigError
from moestro.placement.hosted import (
    PRICE_DEFAULTS,
    HostLoad,
    HostSizes,
    HostVariables,
    Int64s,
    Planner,
    or_else,
    planner_from,
    rows_with_experts,
)
from moestro.workload.experts.expert_profile import read_profile_file
from moestro_vllm.plugin import START_FILE
from moestro_vllm.stall_alarm import StallAlarm

PREFIX = "MOESTRO_VLLM_"
# vLLM's own defaults of `--eplb-config`, which it does not pass to a policy.
WINDOW_SIZE, STEP_INTERVAL, STALL_S = 1000, 3000, 30


_logger = logging.getLogger(f"vllm.{__name__}")  # vLLM's handlers print the loggers below "vllm"


class _Map(msgspec.Struct):
    physical_to_logical_map: list[list[int]]


@dataclass(slots=True, eq=False)
class StartFile:
    """A placement from a file, which vLLM gets at its start or at its first rearrangement.

    vLLM loads weights by one row of slots for all layers. A file whose layers differ is therefore installed by the
    first rearrangement that has seen tokens.

    Attributes:
        name: Name of the file.
        rows: int64[layers of the file, slots], expert in each slot.
        expert_layers: Numbers of the layers with experts in the network.
        num_model_layers: Layers of the network.
        network: Its name, for messages.
        is_due: Whether the first rearrangement is still to come.
    """

    name: str
    rows: Int64s
    expert_layers: tuple[int, ...]
    num_model_layers: int
    network: str
    is_due: bool = field(default=True)

    def shared_row(self, num_experts: int, num_redundant: int) -> list[int] | None:
        """Return the row that all layers with experts have; None where they differ.

        Args:
            num_experts: Logical experts of a layer.
            num_redundant: Slots beyond one for each expert.

        Raises:
            ConfigError: The file does not fit these sizes.
        """
        if self.rows.shape[1] != num_experts + num_redundant:
            raise ConfigError(
                f"{START_FILE}={self.name} has {self.rows.shape[1]} slots; the server has {num_experts} experts and"
                f" num_redundant_experts {num_redundant}: give --eplb-config the file's"
                f" {self.rows.shape[1] - num_experts}"
            )
        found = np.sort(self.rows, axis=1)
        if any(not np.array_equal(np.unique(row), np.arange(num_experts)) for row in found):
            raise ConfigError(f"{START_FILE}={self.name}: a layer lacks one of {num_experts} experts, or has others")
        has_dense = len(self.rows) == self.num_model_layers
        rows = self.rows[list(self.expert_layers)] if has_dense else self.rows
        return rows[0].tolist() if (rows == rows[0]).all() else None

    def take(self, num_layers: int) -> Int64s | None:
        """Return the rows of the layers with experts, once; None where the file has other layers, which is logged."""
        self.is_due = False
        try:
            return rows_with_experts(self.rows, num_layers, self.expert_layers, self.num_model_layers)
        except ValueError as error:
            _logger.error(
                "%s=%s is not installed: %s; %s is %s, and must name the network of both",
                START_FILE, self.name, error, f"{PREFIX}NETWORK", self.network,
            )  # fmt: skip
            return None


@dataclass(frozen=True, slots=True, eq=False)
class Rebalancing:
    """Places experts for vLLM's balancer.

    Attributes:
        planner: Asks a placement policy; None leaves the placement to vLLM.
        start: Start file; None means that there is none.
        alarm: Reports a plan that takes long.
        window_size: Steps that vLLM's sums cover.
        step_interval: Steps until the next placement.
    """

    planner: Planner | None
    start: StartFile | None
    alarm: StallAlarm
    window_size: int
    step_interval: int

    def place(self, load: HostLoad, sizes: HostSizes, old: Int64s | None, own: Callable[[], Int64s]) -> Int64s:
        """Return int64[layers, slots], the expert in each slot; that of `own` where Moestro has none.

        Args:
            load: Tokens of the window. A load without tokens is one of vLLM's trial runs.
            sizes: Sizes.
            old: int[layers, slots], the expert in each slot now.
            own: vLLM's own placement.
        """
        return or_else(lambda: self._place(load, sizes, old, own), own)

    def _place(self, load: HostLoad, sizes: HostSizes, old: Int64s | None, own: Callable[[], Int64s]) -> Int64s:
        if self.start is not None and self.start.is_due and load.tokens.any():
            rows = self.start.take(len(load.tokens))
            if rows is not None and rows.shape[1] == sizes.num_slots:
                return rows
        if self.planner is None:
            return own()
        with self.alarm.during("planning the placement of experts"):
            return self.planner.place(load, sizes, old, self.step_interval)


def rebalancing_from(environment: Mapping[str, str]) -> Rebalancing:
    """Read the variables of the placement.

    Raises:
        ConfigError: A variable has a value that is not known or out of range; the text names it.
    """
    variables = HostVariables(PREFIX, environment)
    policy, file = variables.get("PLACEMENT"), variables.get("START_FILE")
    return Rebalancing(
        planner=planner_from(policy, variables, read_profile_file) if policy else None,
        start=_start_file(Path(file), variables) if file else None,
        alarm=StallAlarm(float(variables.whole("STALL_S", STALL_S))),
        window_size=variables.whole("WINDOW_SIZE", WINDOW_SIZE),
        step_interval=variables.whole("STEP_INTERVAL", STEP_INTERVAL),
    )


def _start_file(path: Path, variables: HostVariables) -> StartFile:
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=_Map).physical_to_logical_map
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{START_FILE}={path}: {error}; `moestro place --sglang {path}` writes such a file") from None
    if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
        raise ConfigError(f"{START_FILE}={path}: physical_to_logical_map must have equally long rows, one a layer")
    network = read_network(variables.get("NETWORK", PRICE_DEFAULTS["NETWORK"]))
    return StartFile(str(path), np.array(rows, np.int64), network.expert_layers, network.num_layers, network.name)
