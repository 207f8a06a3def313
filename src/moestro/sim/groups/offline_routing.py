"""The run on random tokens that Gimbal v1 makes before it serves, and the control of placement that begins with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs
from moestro.core.experts.expert_table import ExpertTable
from moestro.core.token_keys import request_key, token_keys
from moestro.cost.gate import Gate
from moestro.placement.contract import PLACE_POLICIES, PlaceView
from moestro.placement.load_window import PairWindow
from moestro.placement.policies.gimbal import GimbalV1Placement
from moestro.sim.groups.live_placement import PlacementSite, SimPlacement, SimPlacementSettings

_NUM_TOKENS = 512
_REQUEST = 1 << 31  # whose tokens they are; no request of a load has this number


@dataclass(frozen=True, slots=True, eq=False)
class OfflineRouting:
    """Experts of random tokens.

    Attributes:
        choices: int32[layers, tokens, chosen], experts of each token.
        num_experts: experts of a layer.
    """

    choices: NDArray[np.int32]
    num_experts: int

    @classmethod
    def drawn(cls, gate: Gate, num_layers: int, num_experts: int) -> OfflineRouting:
        """Draw the experts of random tokens from the gate of the load."""
        one = np.ones(1, np.int32)
        keys = token_keys(np.array([request_key(_REQUEST)], np.uint64), 0 * one, _NUM_TOKENS * one)
        return cls(gate.choose_layers(keys, range(num_layers)).swapaxes(0, 1), num_experts)

    def pairs(self) -> LayerPairs | None:
        """Count the pairs of experts of consecutive layers; None with a single layer."""
        window = PairWindow(self.num_experts)
        window.add(self.choices, self.choices.shape[1], 1.0)
        return window.most_frequent(1.0)

    def load(self, num_sources: int) -> ExpertLoad:
        """Count the tokens of each expert, as one step whose sources are alike."""
        num_experts = self.num_experts
        counts = np.array([np.bincount(layer.ravel(), minlength=num_experts) for layer in self.choices], np.float64)
        tokens = np.repeat(counts[None] / num_sources, num_sources, axis=0)
        return ExpertLoad(tokens, np.zeros_like(counts), (counts > 0).astype(np.float64), 1.0, self.pairs())


def start_placement(
    gate: Gate,
    table: ExpertTable,
    layers: tuple[int, ...],
    site: PlacementSite,
    settings: SimPlacementSettings,
) -> SimPlacement:
    """Make the live placement of a group.

    Gimbal v1 gets the pairs of an offline run, and places the experts by it before the first step.

    Args:
        gate: draws the experts of the load.
        table: experts in order, with EMPTY spare slots.
        layers: layers with experts; Gimbal v1 needs that all of them have.
        site: devices and prices.
        settings: policy, interval, window and budget.

    Raises:
        ConfigError: no policy has the name, or a setting is wrong.
    """
    policy = PLACE_POLICIES.make(settings.live.placement_policy)
    if isinstance(policy, GimbalV1Placement):
        offline = OfflineRouting.drawn(gate, table.logical_of.shape[1], table.num_experts)
        site = replace(site, offline_pairs=offline.pairs())
        load = offline.load(len(site.devices.source_on))
        table = policy(PlaceView(load, table, site.devices, site.prices, site.limits))
    return SimPlacement(table, layers, site, settings)
