"""The traffic model: what a placement costs per step, and what it costs to get there. It prices every policy alike.

Attention is data-parallel: a token leaves its source for each of its experts, one row a choice, and each answer comes
back to the source, one row a choice. So neighbouring layers cause no traffic between each other, whatever their
affinity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.expert_load import ExpertLoad
from moestro.core.expert_table import EMPTY, ExpertTable
from moestro.placement.devices import OTHER_NODE, SAME_DEVICE, Devices, PlacePrices

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class PlaceScore:
    """What a placement costs per step.

    Attributes:
        tokens: float64[layers, devices], tokens that each device computes.
        activated: float64[layers, devices], experts of which each device reads the weights.
        compute_s: float64[layers], time of the slowest device.
        exchange_s: float64[layers], time in which the busiest device receives its rows and answers.
        rows: float64[3], rows that stay, go within a node, and go between nodes, answers included.
    """

    tokens: Floats
    activated: Floats
    compute_s: Floats
    exchange_s: Floats
    rows: Floats

    @property
    def step_s(self) -> float:
        """Seconds that all layers take."""
        return float(self.compute_s.sum() + self.exchange_s.sum())

    @property
    def balance_of_sums(self) -> float:
        """Mean load over largest load, both summed over layers: vLLM's `balancedness`, at most 1."""
        largest = float(self.tokens.max(axis=1).sum())
        return float(self.tokens.mean(axis=1).sum()) / largest if largest else 1.0

    @property
    def mean_balance(self) -> float:
        """Mean over layers of mean load over largest load: SGLang's `balancedness`, at most 1."""
        largest = self.tokens.max(axis=1)
        used = largest > 0
        return float((self.tokens.mean(axis=1)[used] / largest[used]).mean()) if used.any() else 1.0

    @property
    def far_share(self) -> float:
        """Share of all rows that go between nodes."""
        return float(self.rows[OTHER_NODE] / self.rows.sum()) if self.rows.sum() else 0.0


def score(load: ExpertLoad, table: ExpertTable, devices: Devices, prices: PlacePrices) -> PlaceScore:
    """Price a placement.

    Balance counts live devices only. A copy is activated by each step in which one of its tokens comes: an expert that
    is idle in a fraction p of the steps leaves a copy with a share s of its tokens idle in a fraction p**s.
    """
    parts = np.swapaxes(table.parts, 0, 1)  # [layers, devices, experts]
    tokens = np.einsum("le,lde->ld", load.total, parts)
    activated = (1 - (1 - np.minimum(load.activated, 1.0))[:, None, :] ** parts).sum(axis=-1)
    live = devices.is_alive
    work_s = (prices.token_s * tokens + prices.expert_s * activated)[:, live] / devices.speed[live]
    rows = np.einsum("sle,lde->lsd", load.tokens, parts)
    way = devices.distance[devices.source_on]  # [sources, devices]
    row_s = np.array(prices.row_s)[way]
    arriving_s = (rows * row_s).sum(axis=1)  # [layers, devices], what each device receives of others
    returning_s = (rows * row_s).sum(axis=2)  # [layers, sources], the answers
    received_s = arriving_s.copy()
    np.add.at(received_s.T, devices.source_on, returning_s.T)
    totals = np.array([2 * rows[:, way == kind].sum() for kind in range(3)])
    return PlaceScore(
        tokens=tokens[:, live],
        activated=activated[:, live],
        compute_s=work_s.max(axis=1),
        exchange_s=received_s.max(axis=1),
        rows=totals,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Copies of experts that devices must receive, ordered by layer.

    Attributes:
        layer, expert: int32[moves], what moves.
        source, target: int32[moves], devices; a source of -1 means that no live device has it, so it is loaded.
    """

    layer: NDArray[np.int32]
    expert: NDArray[np.int32]
    source: NDArray[np.int32]
    target: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.layer)


NOT_HELD = -1


def moves_between(old: ExpertTable, new: ExpertTable, devices: Devices) -> Moves:
    """Return what devices must receive so that `new` holds after `old`.

    Each copy comes from the nearest live holder; among equally near ones, from the one that sends the fewest so far.
    """
    had, has = old.num_copies > 0, new.num_copies > 0
    can_send = had & devices.is_alive[:, None, None]
    target, layer, expert = np.nonzero(has & ~had & devices.is_alive[:, None, None])
    order = np.lexsort((target, expert, layer))
    target, layer, expert = target[order], layer[order], expert[order]
    source = np.full(len(target), NOT_HELD, np.int32)
    num_sent = np.zeros(devices.num_devices)
    distance = devices.distance
    for i, (to, at, what) in enumerate(zip(target.tolist(), layer.tolist(), expert.tolist(), strict=True)):
        holders = np.flatnonzero(can_send[:, at, what])
        if len(holders):
            best = holders[np.lexsort((num_sent[holders], distance[to, holders]))[0]]
            source[i] = best
            num_sent[best] += 1
    return Moves(layer.astype(np.int32), expert.astype(np.int32), source, target.astype(np.int32))


def share_moved(moves: Moves, table: ExpertTable) -> float:
    """Return moves per filled slot."""
    return len(moves) / max(1, int((table.logical_of != EMPTY).sum()))


def move_s(moves: Moves, devices: Devices, prices: PlacePrices) -> float:
    """Seconds in which the busiest device receives its copies; one that is loaded comes at the speed between nodes."""
    way = np.where(
        moves.source == NOT_HELD, OTHER_NODE, devices.distance[np.maximum(moves.source, SAME_DEVICE), moves.target]
    )
    seconds = prices.expert_bytes / np.array(prices.move_bytes_per_s)[way]
    return float(np.bincount(moves.target, seconds, devices.num_devices).max(initial=0.0))
