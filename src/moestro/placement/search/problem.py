"""A placement view as arrays for the search: live devices only, layers as a batch, all prices in seconds per step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.core.experts.near_experts import OTHER_NODE
from moestro.placement.devices import Devices, PlacePrices
from moestro.placement.registry import PlaceView
from moestro.placement.search.activation import idle_parts
from moestro.placement.traffic import Floats, TokenOrigins

Experts = NDArray[np.int64]
# Ways of rows are left out of the search if all experts at their nearest place saved less than this part of the work.
WORTH = 0.002
TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True, slots=True, eq=False)
class PlaceProblem:
    """What the search balances. Batches are layers; devices are the live ones.

    Attributes:
        token_s: float64[batches, experts], seconds in which a device of speed 1 receives the rows of all tokens of each
            expert and computes them; computes them alone where devices differ in speed.
        idle: float64[batches, experts], fraction of steps without a token of the expert.
        expert_s: Seconds in which a device of speed 1 reads the weights of one activated expert.
        speed: float64[devices].
        room: bool[devices, slots], slots that exist.
        row_s: float64[batches, experts + 1, devices], mean seconds over devices in which rows and answers of an expert
            travel, if the device had its only copy, weighted as `token_s` is; 0 for EMPTY. None means that all devices
            are equally far.
        moved: bool[batches, experts + 1, devices], whether a device would have to receive the expert.
        move_s: Seconds of one received copy, spread over devices and the horizon.
    """

    token_s: Floats
    idle: Floats
    expert_s: float
    speed: Floats
    room: NDArray[np.bool_]
    row_s: Floats | None
    moved: NDArray[np.bool_]
    move_s: float

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batches, experts, devices and slots of the largest device."""
        return (*self.token_s.shape, *self.room.shape)

    def of_layers(self, layers: NDArray[np.integer]) -> PlaceProblem:
        """Return the problem of some batches; one that is named twice comes twice."""
        if np.array_equal(layers, np.arange(len(self.token_s))):
            return self
        row_s = None if self.row_s is None else self.row_s[layers]
        return PlaceProblem(
            self.token_s[layers],
            self.idle[layers],
            self.expert_s,
            self.speed,
            self.room,
            row_s,
            self.moved[layers],
            self.move_s,
        )

    def only_work(self, layers: NDArray[np.integer]) -> PlaceProblem:
        """Return the problem of some batches without what rows and moves cost, which is much to copy."""
        none = np.zeros((len(layers), 1, 1), np.bool_)
        return PlaceProblem(
            self.token_s[layers], self.idle[layers], self.expert_s, self.speed, self.room, None, none, self.move_s
        )

    def work(self, expert: Experts, share: Floats) -> Floats:
        """Return float64[batches, devices, slots], seconds of each copy at speed 1; 0 for EMPTY."""
        work = self.seconds(np.arange(len(expert))[:, None, None], expert, share)
        work[expert == EMPTY] = 0.0
        return work

    def seconds(self, batch: NDArray[np.intp], expert: Experts, share: Floats) -> Floats:
        """Return float64, seconds of copies at speed 1; arguments broadcast."""
        work: Floats = self.token_s[batch, expert] * share
        if self.expert_s > 0:
            reads = self.expert_s * (1 - idle_parts(self.idle[batch, expert], share))
            work += np.where(share > 0, reads, 0.0)
        return work

    def load(self, work: Floats) -> Floats:
        """Return float64[batches, devices], seconds of each device."""
        load: Floats = work.sum(axis=-1) / self.speed
        return load

    def even_load(self, work: Floats) -> Floats:
        """Return float64[batches], seconds of each device if work were spread evenly."""
        even: Floats = work.sum(axis=(1, 2)) / self.speed.sum()
        return even


@dataclass(frozen=True, slots=True, eq=False)
class StepPrices:
    """What copies with equal shares cost in each layer. Devices are the live ones.

    Attributes:
        work_s: float64[layers, experts, copies + 1], seconds at speed 1 of each copy of an expert with so many copies.
        near_s: float64[layers, experts, devices], seconds in which a device receives the rows of an expert of which it
            has the only copy, less what it then receives sooner as a source on the device than as one on its node.
        sooner_s: float64[layers, experts, devices], seconds by which a device receives its own answers sooner from a
            copy on its node than from elsewhere.
        rest_s: float64[layers, devices], seconds of all answers if they came from other nodes.
        speed: float64[devices].
        node_at: int64[devices], number of the node of each device.
        room: bool[devices, slots], slots that exist.
        moved: bool[layers, experts + 1, devices], whether a device would have to receive the expert.
        move_s: Seconds of one received copy, spread over devices and the horizon.
        may_receive: Whether steps may have a device receive a copy.
    """

    work_s: Floats
    near_s: Floats
    sooner_s: Floats
    rest_s: Floats
    speed: Floats
    node_at: NDArray[np.int64]
    room: NDArray[np.bool_]
    moved: NDArray[np.bool_]
    move_s: float
    may_receive: bool


def problem_of(view: PlaceView, origin: TokenOrigins, risk: float, *, has_ways: bool = True) -> PlaceProblem:
    """State the view as a problem.

    Args:
        origin: Sums of the view's load.
        risk: Standard deviations of an expert's tokens that are added to their mean.
        has_ways: Whether the ways of rows count (`PlaceProblem.row_s`), which takes a quarter of a short plan's time.
    """
    load, devices, prices = view.load, view.devices, view.prices
    live = np.flatnonzero(devices.is_alive)
    num_layers, num_experts = load.variance.shape
    token_s = prices.token_s + _row_s(devices, prices)
    row_s = _ways_of_rows(view, origin, live) if has_ways else None
    if row_s is not None and prices.token_s > 0:
        row_s *= token_s / prices.token_s  # weighted as loads are, so that these do not outweigh nearness
    moved = np.ones((num_layers, num_experts + 1, len(live)), np.bool_)
    moved[:, -1] = False  # an empty slot receives nothing
    at, layer, slot = np.nonzero(view.table.logical_of[live] != EMPTY)
    moved[layer, view.table.logical_of[live[at], layer, slot], at] = False
    num_slots = np.minimum(devices.num_slots[live], num_experts)
    far_move_s = prices.expert_bytes / prices.move_bytes_per_s[OTHER_NODE]
    return PlaceProblem(
        token_s=token_s * _hedged(origin.total, load.variance, risk),
        idle=1 - np.minimum(load.activated, 1.0),
        expert_s=prices.expert_s,
        speed=devices.speed[live],
        room=np.arange(view.table.logical_of.shape[2]) < num_slots[:, None],
        row_s=row_s,
        moved=moved,
        move_s=far_move_s / (len(live) * max(view.limits.horizon_steps, 1.0)),
    )


def _row_s(devices: Devices, prices: PlacePrices) -> float:
    """Return the mean seconds in which a device receives a token's row, or 0 for devices of unequal speed.

    A device with more tokens receives more rows too, so that one load stands for both of a step's maxima. It cannot
    where devices compute at different speeds, but receive at the same one.
    """
    speed = devices.speed[devices.is_alive]
    if not len(speed) or not len(devices.source_on) or speed.min() != speed.max():
        return 0.0
    return float(np.array(prices.row_s)[devices.distance[devices.source_on][:, devices.is_alive]].mean())


def _ways_of_rows(view: PlaceView, origin: TokenOrigins, live: NDArray[np.intp]) -> Floats | None:
    """Return `PlaceProblem.row_s`."""
    prices = view.prices
    if len(live) < 2 or len(set(prices.row_s)) < 2:
        return None
    own_s, node_s, far_s = (2 * each / len(live) for each in prices.row_s)
    worth_s = WORTH * prices.token_s * origin.total.sum(axis=1) / view.devices.speed[live].sum()
    by_node = origin.by_node[np.unique(origin.node_at[live])]
    # What the mean is above the least cannot be more than this, which takes a fraction of the time.
    most_s = abs(far_s - node_s) * np.ptp(by_node, axis=0).sum(axis=1)
    most_s += abs(node_s - own_s) * np.ptp(origin.by_device[live], axis=0).sum(axis=1)
    if (most_s <= worth_s).all():
        return None
    row_s = np.zeros((origin.total.shape[0], origin.total.shape[1] + 1, len(live)))
    near = far_s * origin.total - (far_s - node_s) * origin.by_node  # [nodes, layers, experts]
    row_s[:, :-1] = near.transpose(1, 2, 0)[:, :, origin.node_at[live]]
    row_s[:, :-1] -= (node_s - own_s) * origin.by_device[live].transpose(1, 2, 0)
    saved_s = (row_s.mean(axis=2) - row_s.min(axis=2)).sum(axis=1)
    return None if (saved_s <= worth_s).all() else row_s


def _hedged(total: Floats, variance: Floats, risk: float) -> Floats:
    """Return float64[layers, experts], tokens with a part of their spread.

    Spread of independent tokens (Poisson) does not count: it is alike in all steps, and the mean has it already.
    """
    hedged: Floats = total + risk * np.sqrt(np.maximum(variance - total, 0.0))
    return hedged
