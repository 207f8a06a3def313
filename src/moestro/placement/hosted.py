"""Places experts in other engines, as their load balancers ask for it: filled slots, in NumPy.

vLLM and SGLang know no empty slot, and give all copies of an expert equal parts of its tokens. Both report the load of
all ranks together. Each rank runs the planner by itself, so that equal questions need equal answers: nothing here draws
or reads a clock.

Its settings are environment variables, which the engines pass on to their workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.cost.gpus import gpu_named
from moestro.cost.links import link_named
from moestro.cost.settings import read_network
from moestro.errors import ConfigError
from moestro.placement.contract import (
    PLACE_POLICIES,
    PlaceLimits,
    PlacePolicy,
    PlacePrices,
    PlaceView,
    even_devices,
    place_prices,
)
from moestro.placement.eplb import keep_slots
from moestro.placement.payback import cheapest_rows, peer_tables
from moestro.placement.placement_file import table_of_slots
from moestro.placement.search.filling import PresentCopies, fill_empty

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class HostLoad:
    """Load of all ranks of another engine over a window of steps.

    Attributes:
        tokens: float64[layers, experts], mean tokens per step.
        variance: float64[layers, experts], variance of the tokens over steps.
        activated: float64[layers, experts], fraction of steps in which the expert got any token.
        num_steps: Steps of the window.
    """

    tokens: Float64s
    variance: Float64s
    activated: Float64s
    num_steps: int

    @classmethod
    def of_sum(cls, total: NDArray[np.number], num_steps: int) -> HostLoad:
        """Make the load from sums alone.

        Tokens are taken to come independently of each other. A sum of independent arrivals has the variance of its
        mean, and an expert is activated in a step with probability 1 - exp(-tokens of the step).

        Args:
            total: [layers, experts], tokens of the whole window.
            num_steps: Steps that the sums cover.
        """
        tokens = np.asarray(total, np.float64) / num_steps
        return cls(tokens, tokens, -np.expm1(-tokens), num_steps)

    @classmethod
    def of_steps(cls, counts: NDArray[np.number]) -> HostLoad:
        """Make the load from the counts of each step; steps without any token count for nothing.

        Args:
            counts: [steps, layers, experts], tokens of each step.
        """
        steps = np.asarray(counts, np.float64)
        steps = steps[steps.any(axis=(1, 2))]
        if not len(steps):
            return cls.of_sum(np.zeros(counts.shape[1:]), 1)
        return cls(steps.mean(axis=0), steps.var(axis=0), (steps > 0).mean(axis=0), len(steps))


@dataclass(frozen=True, slots=True)
class HostSizes:
    """Sizes that an engine names in its question.

    Attributes:
        num_slots: Slots of a layer on all ranks (`num_replicas`), a multiple of `num_ranks`.
        num_groups: Groups of experts.
        num_nodes: Machines.
        num_ranks: Ranks, a multiple of `num_nodes`.

    Raises:
        ValueError: The numbers do not divide each other.
    """

    num_slots: int
    num_groups: int
    num_nodes: int
    num_ranks: int

    def __post_init__(self) -> None:
        if min(self.num_slots, self.num_groups, self.num_nodes, self.num_ranks) < 1:
            raise ValueError(f"a number is below 1: {self}")
        if self.num_slots % self.num_ranks or self.num_ranks % self.num_nodes:
            raise ValueError(f"the numbers do not divide each other: {self}")


class RecordedProfile(Protocol):
    """Attributes of an expert profile in a file that a planner reads."""

    @property
    def load(self) -> ExpertLoad:
        """Load of the layers with experts, with the pairs that tokens visit."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of each of these layers in the network."""

    @property
    def num_model_layers(self) -> int:
        """Layers of the network."""


@dataclass(frozen=True, slots=True, eq=False)
class HostPairs:
    """Pairs of experts from a recording, because the engines count none.

    Attributes:
        pairs: Pairs, by the layers of the recording.
        layers: Number of each of these layers in the network.
        num_experts: Logical experts of a layer.
        num_model_layers: Layers of the network.
    """

    pairs: LayerPairs
    layers: tuple[int, ...]
    num_experts: int
    num_model_layers: int

    def of_layers(self, num_layers: int, num_experts: int) -> LayerPairs:
        """Return the pairs by the layers of the engine: those with experts, or all of the network.

        Raises:
            ValueError: The recording is of another network.
        """
        if num_experts == self.num_experts and num_layers == len(self.layers):
            return self.pairs
        if num_experts == self.num_experts and num_layers == self.num_model_layers:
            return replace(self.pairs, layer=np.array(self.layers, np.int32)[self.pairs.layer])
        raise ValueError(
            f"the profile has {self.num_experts} experts in {len(self.layers)} of {self.num_model_layers} layers, and"
            f" the engine {num_experts} experts in {num_layers} layers"
        )


@dataclass(frozen=True, slots=True)
class Planner:
    """Asks a placement policy in the place of an engine's own.

    Each rank is taken to send an equal part of the tokens, because the engines report sums over ranks. Shares of copies
    in the policy's answer are ignored, because the engines give all copies equal parts.

    Attributes:
        policy: Placement policy.
        prices: What work and moves cost.
        pairs: Pairs for a policy that ranks them; None means that it ranks none.
    """

    policy: PlacePolicy
    prices: PlacePrices
    pairs: HostPairs | None = None

    def place(self, load: HostLoad, sizes: HostSizes, old: NDArray[np.integer] | None, horizon_steps: int) -> Int64s:
        """Return int64[layers, slots], the expert in each slot; no slot is empty.

        A layer without any token keeps its slots, if these hold all experts.

        Args:
            load: Tokens of the window.
            sizes: Sizes.
            old: int[layers, slots], the expert in each slot now, negative for none; None where there is no placement.
                More slots than `sizes` has are the ones of ranks that go.
            horizon_steps: Steps until the next placement.

        Raises:
            ValueError: The load is negative or not finite, or the experts do not fit into the slots.
        """
        num_layers, num_experts = load.tokens.shape
        if num_experts > sizes.num_slots:
            raise ValueError(f"{num_experts} experts do not fit into {sizes.num_slots} slots")
        known = _fitted(old, num_layers, sizes)
        before = _covering(known, load.tokens, sizes.num_ranks)
        view = self._view(load, sizes, before, horizon_steps)

        def fill(table: ExpertTable) -> Int64s:
            wanted = np.concatenate(list(table.logical_of), axis=1).astype(np.int64)
            by_rank = (num_layers, sizes.num_ranks, -1)
            filled = fill_empty(wanted.reshape(by_rank), load.tokens, PresentCopies(known.reshape(by_rank)))
            return keep_slots(filled.reshape(num_layers, -1), known, sizes.num_ranks)

        peers = peer_tables(self.policy, view)
        found = [fill(table) for table in (self.policy(view), *peers.values())]
        kept = None
        if peers:
            stays = np.array([np.array_equal(np.unique(row), np.arange(num_experts)) for row in known])
            stays &= ~_is_second(known, sizes.num_ranks).any(axis=1)
            kept = np.where(stays[:, None], known, fill(view.table))
            found.append(kept)
        best = cheapest_rows(view, found, lambda rows: table_of_slots(rows, view.devices, num_experts), kept)
        placed = best.astype(np.int64)
        for layer in np.flatnonzero(~load.tokens.any(axis=1)).tolist():
            if np.array_equal(np.unique(known[layer]), np.arange(num_experts)):
                placed[layer] = known[layer]
        return placed

    def _view(self, load: HostLoad, sizes: HostSizes, before: Int64s, horizon_steps: int) -> PlaceView:
        num_layers, num_experts = load.tokens.shape
        num_local = sizes.num_slots // sizes.num_ranks
        sources = (sizes.num_ranks, num_layers, num_experts)
        tokens = np.broadcast_to(load.tokens / sizes.num_ranks, sources).copy()
        pairs = None if self.pairs is None else self.pairs.of_layers(num_layers, num_experts)
        loads = ExpertLoad(tokens, load.variance, load.activated, float(load.num_steps), pairs)
        logical_of = before.reshape(num_layers, sizes.num_ranks, num_local).swapaxes(0, 1)
        table = ExpertTable(0, logical_of.astype(np.int32), num_experts, np.ones(sizes.num_ranks, np.bool_))
        limits = PlaceLimits(horizon_steps=float(horizon_steps))
        devices = even_devices(sizes.num_ranks, num_local, sizes.num_nodes)
        return PlaceView(loads, table, devices, self.prices, limits, sizes.num_groups)


def or_else(plan: Callable[[], Int64s], otherwise: Callable[[], Int64s]) -> Int64s:
    """Return the placement of `plan`, or that of `otherwise` where `plan` raises.

    An exception would end the engine, or its balancer for good. All ranks ask the same question, so all of them get an
    exception or none does.
    """
    try:
        return plan()
    except Exception:
        _logger.exception("Moestro found no placement; the engine's own policy places the experts this time")
        return otherwise()


def rows_with_experts(rows: Int64s, num_layers: int, expert_layers: tuple[int, ...], num_model_layers: int) -> Int64s:
    """Return the rows of a start file that belong to layers with experts.

    Args:
        rows: int64[layers of the file, slots].
        num_layers: Layers with experts that the engine has.
        expert_layers: Numbers of the layers with experts in the network.
        num_model_layers: Layers of the network.

    Raises:
        ValueError: The file has rows neither for these layers nor for all layers of the network.
    """
    if len(rows) == num_layers:
        return rows
    if len(expert_layers) == num_layers and len(rows) == num_model_layers:
        return rows[list(expert_layers)]
    raise ValueError(f"the file has {len(rows)} layers, and the engine has {num_layers} layers with experts")


def _fitted(old: NDArray[np.integer] | None, num_layers: int, sizes: HostSizes) -> Int64s:
    """int64[layers, slots], `old` on the ranks that stay and EMPTY on those that come."""
    fitted = np.full((num_layers, sizes.num_slots), EMPTY, np.int64)
    if old is not None:
        num_known = min(old.shape[1], sizes.num_slots)
        fitted[:, :num_known] = np.where(old[:, :num_known] < 0, EMPTY, old[:, :num_known])
    return fitted


def _covering(known: Int64s, load: Float64s, num_ranks: int) -> Int64s:
    """Return a placement near `known` that a policy accepts: all experts, and no two copies of one on a rank.

    An engine's own placements have two copies on a rank, and lack experts while ranks come or go.
    """
    covering = known.copy()
    covering[_is_second(covering, num_ranks)] = EMPTY
    for layer, slots in enumerate(covering):
        counts = np.bincount(slots[slots != EMPTY], minlength=load.shape[1])
        missing = np.flatnonzero(counts == 0)
        if not len(missing):
            continue
        free = np.flatnonzero(slots == EMPTY)
        # Experts without a slot take the place of copies that others have too, the least loaded first.
        for slot in sorted(np.flatnonzero(slots != EMPTY), key=lambda slot: load[layer, slots[slot]]):
            if len(free) >= len(missing):
                break
            if counts[slots[slot]] > 1:
                counts[slots[slot]] -= 1
                free = np.append(free, slot)
        slots[free[: len(missing)]] = missing
    return covering


def _is_second(placed: Int64s, num_ranks: int) -> NDArray[np.bool_]:
    """bool[layers, slots], whether an earlier slot of the same rank has the expert too."""
    local = placed.reshape(len(placed), num_ranks, -1)
    is_same = (local[..., :, None] == local[..., None, :]) & (local != EMPTY)[..., None]
    found: NDArray[np.bool_] = np.tril(is_same, k=-1).any(axis=-1).reshape(placed.shape)
    return found


# Suffixes of the variables, with their defaults.
PRICE_DEFAULTS = {
    "NETWORK": "deepseek-v3",
    "GPU": "h100",
    "LINK_WITHIN": "nvswitch-h100",
    "LINK_ACROSS": "infiniband-ndr",
}
# The engines give copies equal parts of the tokens, so a policy that can plan with that must.
_EQUAL_PARTS = {"moestro": "weighted=0"}


@dataclass(frozen=True, slots=True)
class HostVariables:
    """Environment variables of one engine's plug-in, which share a prefix (`MOESTRO_VLLM_`).

    Attributes:
        prefix: What all names begin with.
        values: All variables of the process.
    """

    prefix: str
    values: Mapping[str, str]

    def get(self, suffix: str, default: str = "") -> str:
        """Return the value of a variable; an empty one counts as unset."""
        return self.values.get(self.prefix + suffix) or default

    def whole(self, suffix: str, default: int, least: int = 1) -> int:
        """Return the value of a variable that is a whole number.

        Raises:
            ConfigError: It is none, or below `least`.
        """
        text = self.get(suffix, str(default))
        if not text.isdecimal() or int(text) < least:
            raise ConfigError(f"{self.prefix}{suffix} must be a whole number, {least} or more, got {text!r}")
        return int(text)


def planner_from(text: str, variables: HostVariables, read_profile: Callable[[Path], RecordedProfile]) -> Planner:
    """Make the planner that the environment asks for.

    Args:
        text: Placement policy, `NAME` or `NAME:SETTING=VALUE,...`.
        variables: The plug-in's variables; PRICE_DEFAULTS and PROFILE are read.
        read_profile: Reads an expert profile of Moestro.

    Raises:
        ConfigError: A variable has a value that is not known or out of range; the text names it.
    """
    prefix = variables.prefix
    given = {suffix: variables.get(suffix, default) for suffix, default in PRICE_DEFAULTS.items()}
    try:
        policy = PLACE_POLICIES.make(policy_text(text))
    except ConfigError as error:
        raise ConfigError(f"{prefix}PLACEMENT={text}: {error}") from None
    if getattr(policy, "reads_clock", False):
        raise ConfigError(
            f"{prefix}PLACEMENT={text}: it gives up after a time, so ranks that plan by themselves could differ: use"
            " another policy"
        )
    try:
        prices = place_prices(
            read_network(given["NETWORK"]),
            gpu_named(given["GPU"]),
            link_named(given["LINK_WITHIN"]),
            link_named(given["LINK_ACROSS"]),
        )
    except ConfigError as error:
        raise ConfigError(f"{prefix}NETWORK, _GPU, _LINK_WITHIN or _LINK_ACROSS: {error}") from None
    # The engines leave no slot empty, so all ranks read equally many experts, whatever the placement.
    pairs = _host_pairs(text, variables, read_profile) if getattr(policy, "needs_pairs", False) else None
    return Planner(policy, replace(prices, expert_s=0.0), pairs)


def _host_pairs(text: str, variables: HostVariables, read_profile: Callable[[Path], RecordedProfile]) -> HostPairs:
    """Read the pairs of the profile that PROFILE names.

    Raises:
        ConfigError: No file is named, or the file has no pairs.
    """
    prefix, name = variables.prefix, variables.get("PROFILE")
    remedy = "name a file of `moestro place --save-profile` from the experts of each token"
    if not name:
        raise ConfigError(
            f"{prefix}PLACEMENT={text} ranks pairs of experts, which engines do not count: set {prefix}PROFILE, and"
            f" {remedy}"
        )
    try:
        profile = read_profile(Path(name))
    except ConfigError as error:
        raise ConfigError(f"{prefix}PROFILE: {error}") from None
    if profile.load.pairs is None:
        raise ConfigError(f"{prefix}PROFILE={name} has no pairs of experts: {remedy}")
    num_experts = profile.load.tokens.shape[2]
    return HostPairs(profile.load.pairs, profile.layers, num_experts, profile.num_model_layers)


def policy_text(text: str) -> str:
    """Add the settings that fit the engines' equal parts to a policy's name, unless `text` has them."""
    name, _, settings = text.partition(":")
    fitting = _EQUAL_PARTS.get(name)
    if fitting is None or fitting.partition("=")[0] in settings:
        return text
    return f"{name}:{','.join(filter(None, (settings, fitting)))}"
