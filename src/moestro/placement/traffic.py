"""Where tokens come from: the load summed by the device and by the node of its sources.

A row's price depends only on whether its source is the device itself, in its node, or elsewhere. So sums by device and
by node price every placement, without a product of sources and devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad
from moestro.placement.devices import Devices

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenOrigins:
    """Tokens per step by origin.

    Attributes:
        total: float64[layers, experts], tokens of all sources.
        by_node: float64[nodes, layers, experts], tokens of the sources in each node; nodes in ascending order.
        by_device: float64[devices, layers, experts], tokens of the sources on each device.
        by_source: float64[sources, layers], tokens of each source.
        node_at: int64[devices], index into `by_node` of each device.
    """

    total: Floats
    by_node: Floats
    by_device: Floats
    by_source: Floats
    node_at: NDArray[np.int64]

    def of_layers(self, layers: NDArray[np.integer]) -> TokenOrigins:
        """Return the tokens of some layers; one that is named twice comes twice."""
        return TokenOrigins(
            self.total[layers],
            self.by_node[:, layers],
            self.by_device[:, layers],
            self.by_source[:, layers],
            self.node_at,
        )


def origins_of(load: ExpertLoad, devices: Devices) -> TokenOrigins:
    """Sum a load by the places of its sources."""
    nodes, node_at = np.unique(devices.node_of, return_inverse=True)
    if np.array_equal(devices.source_on, np.arange(devices.num_devices)):
        by_device = load.tokens
    else:
        by_device = _summed(load.tokens, devices.source_on, devices.num_devices)
    by_node = _summed(load.tokens, node_at[devices.source_on], len(nodes))
    return TokenOrigins(by_node.sum(axis=0), by_node, by_device, load.tokens.sum(axis=2), node_at)


def _summed(tokens: Floats, place: NDArray[np.integer], num_places: int) -> Floats:
    """Return float64[places, layers, experts]."""
    sums = np.zeros((num_places, *tokens.shape[1:]))
    for source, at in enumerate(place.tolist()):
        sums[at] += tokens[source]
    return sums
