"""A placement view as arrays for the search: copies in slots, limits on what moves, and prices by the traffic model.

There are live devices only, layers are a batch, and all prices are in seconds per step. The search changes copies in
place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, OTHER_NODE, ExpertTable
from moestro.placement.contract import (
    Devices,
    Floats,
    PlaceLimits,
    PlacePrices,
    PlaceView,
    TokenOrigins,
    devices_last,
)
from moestro.placement.score import idle_parts, score_slots

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

    def log_idle(self) -> Floats | None:
        """Return float64[batches, experts], logarithms of `idle`, 0 where that is 0; None if they are not needed."""
        is_idle = self.idle > 0
        if not (self.expert_s > 0 and is_idle.any()):
            return None
        return np.log(np.where(is_idle, self.idle, 1.0))

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
    most_s += abs(node_s - own_s) * (origin.most - origin.least).sum(axis=1)
    if (most_s <= worth_s).all():
        return None
    row_s = np.zeros((origin.total.shape[0], origin.total.shape[1] + 1, len(live)))
    near = far_s * origin.total - (far_s - node_s) * origin.by_node  # [nodes, layers, experts]
    row_s[:, :-1] = devices_last(near, origin.node_at[live])
    row_s[:, :-1] -= (node_s - own_s) * devices_last(origin.by_device, live)
    saved_s = (row_s.mean(axis=2) - row_s.min(axis=2)).sum(axis=1)
    return None if (saved_s <= worth_s).all() else row_s


def _hedged(total: Floats, variance: Floats, risk: float) -> Floats:
    """Return float64[layers, experts], tokens with a part of their spread.

    Spread of independent tokens (Poisson) does not count: it is alike in all steps, and the mean has it already.
    """
    hedged: Floats = total + risk * np.sqrt(np.maximum(variance - total, 0.0))
    return hedged


@dataclass(slots=True, eq=False)
class Packing:
    """Copies in slots, changed in place by exchanges.

    Attributes:
        expert: int64[batches, devices, slots].
        share: float64[batches, devices, slots].
        work: float64[batches, devices, slots], seconds of each copy at speed 1.
        held: bool[batches, experts + 1, devices], who holds what.
    """

    expert: Experts
    share: Floats
    work: Floats
    held: NDArray[np.bool_] = field(repr=False)

    def __post_init__(self) -> None:
        # Flat views change these arrays, and the compiled kernel takes their addresses.
        self.expert, self.share = np.ascontiguousarray(self.expert), np.ascontiguousarray(self.share)
        self.work, self.held = np.ascontiguousarray(self.work), np.ascontiguousarray(self.held)

    def of_layers(self, layers: NDArray[np.integer]) -> Packing:
        """Return a copy of some batches."""
        return Packing(self.expert[layers], self.share[layers], self.work[layers], self.held[layers])

    def put(self, layers: NDArray[np.integer], other: Packing) -> None:
        """Replace some batches."""
        self.expert[layers], self.share[layers] = other.expert, other.share
        self.work[layers], self.held[layers] = other.work, other.held


@dataclass(frozen=True, slots=True, eq=False)
class QueuedCopies:
    """Copies in the order in which they are placed.

    Attributes:
        items: int64[batches, copies], the expert of each; EMPTY pads.
        item_work: float64[batches, copies], seconds at speed 1.
        stay_s: float64[batches, copies], load that a device may have more to keep what it holds.
        far_s: float64[batches, experts + 1, devices], load that a copy may cost more where it is near, or None.
        adds: bool[batches, joined copies], of the first copies, whether each should take a device without any.
        joining_s: float64[batches, joined copies], load that a device of the other kind counts more.
        load: float64[batches, devices], loads at the beginning; changed.
    """

    items: Experts
    item_work: Floats
    stay_s: Floats
    far_s: Floats | None
    adds: NDArray[np.bool_]
    joining_s: Floats
    load: Floats


def packing_of(problem: PlaceProblem, expert: Experts, share: Floats) -> Packing:
    """Return the state that exchanges change."""
    return Packing(expert, share, problem.work(expert, share), held_by(expert, problem.shape[1]))


def live_counts(expert: Experts, num_experts: int) -> Experts:
    """Return int64[batches, experts], copies of each expert."""
    num_batches = len(expert)
    index = np.arange(num_batches)[:, None, None] * num_experts + expert
    counts = np.bincount(index[expert != EMPTY], minlength=num_batches * num_experts)
    return counts.reshape(num_batches, num_experts)


def even_shares(expert: Experts, num_experts: int) -> Floats:
    """Return float64[batches, devices, slots], equal parts for all copies of an expert; 0 for EMPTY."""
    counts = np.maximum(live_counts(expert, num_experts), 1)
    share: Floats = np.where(expert == EMPTY, 0.0, 1.0 / counts[np.arange(len(expert))[:, None, None], expert])
    return share


def held_by(expert: Experts, num_experts: int) -> NDArray[np.bool_]:
    """Return bool[batches, experts + 1, devices], who holds what; the last expert is EMPTY, which is never held."""
    num_batches, num_devices, _ = expert.shape
    num_rows = num_experts + 1
    held = np.zeros((num_batches, num_rows, num_devices), np.bool_)
    row = np.arange(num_batches)[:, None, None] * num_rows + expert % num_rows
    held.reshape(-1)[row * num_devices + np.arange(num_devices)[:, None]] = True
    held[:, -1] = False
    return held


def normal_shares(expert: Experts, share: Floats, num_experts: int) -> Floats:
    """Scale shares so that those of each expert sum to 1; copies that have none at all become equal."""
    batch = np.arange(len(expert))[:, None, None]
    index = np.where(expert == EMPTY, 0, batch * num_experts + expert)
    share = np.where(expert == EMPTY, 0.0, share)
    totals = np.bincount(index.ravel(), share.ravel(), len(expert) * num_experts)[index]
    scaled: Floats = share / np.where(totals > 0, totals, 1.0)
    if (totals > 0).all():
        return scaled
    return np.where(totals > 0, scaled, even_shares(expert, num_experts))


def in_old_slots(copies: tuple[Experts, Floats], old: Experts, num_experts: int) -> tuple[Experts, Floats]:
    """Order the slots of each device so that an expert which it held stays in its slot.

    Args:
        copies: int64[batches, devices, slots] and float64 of the same shape, experts and shares.
        old: int64[batches, devices, slots], experts before.
        num_experts: Experts of a batch.

    Returns:
        The copies in that order.
    """
    expert, share = copies
    num_batches, num_devices, num_slots = expert.shape
    num_rows = num_experts + 1  # EMPTY is the last one
    base = np.arange(num_batches * num_devices).reshape(num_batches, num_devices, 1)
    at = np.zeros(num_batches * num_devices * num_rows, np.int16)
    at[base * num_rows + old % num_rows] = np.arange(1, num_slots + 1)  # 0 stands for not held
    at[num_experts::num_rows] = 0
    slot = at.take(base * num_rows + expert % num_rows).astype(np.int64) - 1
    is_kept, is_taken = slot >= 0, np.zeros(expert.shape, np.bool_)
    to = (base * num_slots + slot)[is_kept]
    is_taken.reshape(-1)[to] = True
    # Slot from which each slot is filled: what is new takes free slots in order.
    source = np.empty(expert.shape, np.int64)
    source.reshape(-1)[to] = np.nonzero(is_kept)[2]
    source[~is_taken] = np.nonzero(~is_kept)[2]
    flat = base * num_slots + source
    return expert.reshape(-1).take(flat), share.reshape(-1).take(flat)


@dataclass(slots=True, eq=False)
class Allowance:
    """Copies that may still be received.

    Attributes:
        total: Copies of all devices; infinite without a limit.
        each: float64[devices], copies of each device.
    """

    total: float
    each: Floats

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return bool(np.isfinite(self.total) or np.isfinite(self.each).any())

    def admit(self, gain: Floats, devices: Experts, receives: Experts) -> NDArray[np.bool_]:
        """Admit exchanges, those with the largest gain per received copy first, and count what they receive.

        Args:
            gain: float64[exchanges], seconds per step.
            devices: int64[exchanges, 2], the two devices of each exchange.
            receives: int64[exchanges, 2], copies that each of them receives; negative where it gives back one that it
                had received.
        """
        order = np.argsort(-gain / np.maximum(receives.sum(axis=1), 1e-3), kind="stable")
        taken = np.zeros(len(gain), np.bool_)
        while len(order):
            due = np.zeros((len(order), len(self.each)))
            rows = np.arange(len(order))
            for side in range(2):
                due[rows, devices[order, side]] += np.maximum(receives[order, side], 0)
            running = due.cumsum(axis=0)
            fits = (running.sum(axis=1) <= self.total) & (running <= self.each).all(axis=1)
            num_first = len(order) if fits.all() else int(fits.argmin())
            first = order[:num_first]
            taken[first] = True
            for side in range(2):
                np.subtract.at(self.each, devices[first, side], receives[first, side])
            self.total -= float(receives[first].sum())
            # The exchange that did not fit is left out; later ones of other devices may fit.
            order = order[num_first + 1 :]
            order = order[(receives[order] <= 0).all(axis=1) | self._may_fit(devices[order], receives[order])]
        return taken

    def _may_fit(self, devices: Experts, receives: Experts) -> NDArray[np.bool_]:
        due = np.maximum(receives, 0)
        fits: NDArray[np.bool_] = np.less_equal(due, self.each[devices]).all(axis=1) & (due.sum(axis=1) <= self.total)
        return fits


def allowance_of(limits: PlaceLimits, expert_bytes: int, num_devices: int) -> Allowance:
    """Return what the limits allow before anything moved."""
    total = np.inf if limits.max_bytes is None else float(limits.max_bytes // max(expert_bytes, 1))
    each = np.inf if limits.max_receives is None else float(limits.max_receives)
    return Allowance(total, np.full(num_devices, each))


@dataclass(frozen=True, slots=True, eq=False)
class LayerOffers:
    """What changing each layer would save and cost.

    Attributes:
        saved_s: float64[layers], seconds per step.
        receives: int64[layers, devices], copies that each device would receive.
        receive_s: float64[layers, devices], seconds of these copies.
    """

    saved_s: Floats
    receives: Experts
    receive_s: Floats

    def with_layers(self, layers: NDArray[np.bool_], other: LayerOffers) -> LayerOffers:
        """Return these offers with some layers of others."""
        column = layers[:, None]
        return LayerOffers(
            np.where(layers, other.saved_s, self.saved_s),
            np.where(column, other.receives, self.receives),
            np.where(column, other.receive_s, self.receive_s),
        )


def layers_that_pay(
    offers: LayerOffers, allowance: Allowance, max_layers: int | None, horizon_steps: float, hysteresis: float
) -> tuple[NDArray[np.intp], float]:
    """Choose the layers to change, those that save the most per received copy first.

    Args:
        allowance: Copies that devices may receive.
        max_layers: Layers that may change. None means no limit.
        horizon_steps: Steps in which the savings must exceed the seconds of the move.
        hysteresis: Part by which they must exceed them.

    Returns:
        The layers, and the seconds that they gain over the horizon, net of the move; none and 0 if nothing pays.
    """
    num_received = offers.receives.sum(axis=1)
    order = np.argsort(-offers.saved_s / np.maximum(num_received, 1e-3), kind="stable")
    left = order[offers.saved_s[order] > 0]
    chosen, received = np.zeros(0, np.intp), np.zeros(len(allowance.each))
    while len(left) and (max_layers is None or len(chosen) < max_layers):
        running = received + offers.receives[left].cumsum(axis=0)
        fits = (running.sum(axis=1) <= allowance.total) & (running <= allowance.each).all(axis=1)
        num_first = len(left) if fits.all() else int(fits.argmin())
        chosen = np.append(chosen, left[:num_first])
        received = received + offers.receives[left[:num_first]].sum(axis=0)
        # The layer that did not fit is left out; later ones may fit.
        left = left[num_first + 1 :]
    chosen = chosen[:max_layers]
    busiest_s = offers.receive_s[chosen].cumsum(axis=0).max(axis=1, initial=0.0)
    net = horizon_steps * offers.saved_s[chosen].cumsum() - (1 + hysteresis) * busiest_s
    if not len(net) or net.max() <= 0:
        return chosen[:0], 0.0
    best = int(net.argmax())
    return chosen[: best + 1], float(net[best])


SAME_SHARE = 1e-9  # shares that differ by less are equal


@dataclass(frozen=True, slots=True, eq=False)
class LayerPrices:
    """What placements of one layer each cost.

    Attributes:
        compute_s: float64[placements], seconds per step of the slowest device.
        exchange_s: float64[placements], seconds per step in which the busiest device receives rows.
        receives: int64[placements, devices], copies that each live device receives.
        receive_s: float64[placements, devices], seconds of these copies.
    """

    compute_s: Floats
    exchange_s: Floats
    receives: Experts
    receive_s: Floats

    @property
    def step_s(self) -> Floats:
        """float64[placements], seconds per step."""
        return self.compute_s + self.exchange_s

    def with_layers(self, layers: NDArray[np.intp], other: LayerPrices) -> LayerPrices:
        """Return the same with those of `other`, which are of these layers alone."""
        changed = []
        for name in ("compute_s", "exchange_s", "receives", "receive_s"):
            figures = getattr(self, name).copy()
            figures[layers] = getattr(other, name)
            changed.append(figures)
        return LayerPrices(*changed)


@dataclass(frozen=True, slots=True, eq=False)
class Pricer:
    """Prices placements of the layers of a view, or of some of them.

    Attributes:
        view: What is placed.
        load, origin: Load of the layers, and its sums.
        moved: As in `PlaceProblem`.
        in_node: bool[live devices, layers, experts], whether a live device of the same node holds the expert.
    """

    view: PlaceView
    load: ExpertLoad
    origin: TokenOrigins
    moved: NDArray[np.bool_]
    in_node: NDArray[np.bool_]

    @classmethod
    def of(cls, view: PlaceView, problem: PlaceProblem, origin: TokenOrigins) -> Pricer:
        """Make the pricer of a view."""
        live = np.flatnonzero(view.devices.is_alive)
        nodes, node_at = np.unique(view.devices.node_of[live], return_inverse=True)
        in_node = np.zeros((len(nodes), *problem.shape[:2]), np.bool_)
        device, layer, slot = np.nonzero(view.table.logical_of[live] != EMPTY)
        in_node[node_at[device], layer, view.table.logical_of[live[device], layer, slot]] = True
        return cls(view, view.load, origin, problem.moved, in_node[node_at])

    def of_layers(self, layers: NDArray[np.intp]) -> Pricer:
        """Return the pricer of some layers; one that is named twice comes twice."""
        load, origin = self.load, self.origin.of_layers(layers)
        # Tokens of all sources are much to copy, and are often the same array.
        tokens = origin.by_device if self.origin.by_device is load.tokens else load.tokens.take(layers, axis=1)
        load = ExpertLoad(tokens, load.variance[layers], load.activated[layers], load.num_steps)
        return Pricer(self.view, load, origin, self.moved[layers], self.in_node.take(layers, axis=1))

    def price(self, packing: Packing) -> LayerPrices:
        """Price a placement of each layer."""
        view = self.view
        slots = _slots_of(view, packing.expert, packing.share)
        found = score_slots(self.load, slots, view.devices, view.prices, self.origin)
        # Indices into flat arrays: several times faster than indices by axis.
        num_layers, num_rows, num_devices = self.moved.shape  # the last row is that of EMPTY
        what = np.arange(num_layers)[:, None, None] * num_rows + packing.expert % num_rows
        is_moved = self.moved.reshape(-1).take(what * num_devices + np.arange(num_devices)[:, None])
        row, device, slot = np.nonzero(is_moved)
        expert = packing.expert[row, device, slot]
        is_near = self.in_node.reshape(-1).take((device * num_layers + row) * (num_rows - 1) + expert)
        _, node_s, far_s = (view.prices.expert_bytes / each for each in view.prices.move_bytes_per_s)
        index, shape = row * num_devices + device, (num_layers, num_devices)
        receives = np.bincount(index, minlength=num_layers * num_devices).reshape(shape)
        seconds = np.where(is_near, node_s, far_s)
        receive_s = np.bincount(index, seconds, num_layers * num_devices).astype(float).reshape(shape)
        return LayerPrices(found.compute_s, found.exchange_s, receives, receive_s)


def present_packing(view: PlaceView, problem: PlaceProblem) -> Packing:
    """Return the present placement on the live devices."""
    live = np.flatnonzero(view.devices.is_alive)
    num_experts = problem.shape[1]
    expert = view.table.logical_of[live].swapaxes(0, 1).astype(np.int64)
    expert[~np.broadcast_to(problem.room, expert.shape)] = EMPTY
    if view.table.shares is None:
        return packing_of(problem, expert, even_shares(expert, num_experts))
    share = normal_shares(expert, view.table.shares[live].swapaxes(0, 1), num_experts)
    return packing_of(problem, expert, share)


def table_of(view: PlaceView, expert: Experts, share: Floats) -> ExpertTable:
    """Return placements as a table with a layer each, and without shares where all copies have equal ones.

    Args:
        expert, share: [layers, devices, slots] each.
    """
    logical_of, parts = _slots_of(view, expert, share)
    is_even = np.abs(share - even_shares(expert, view.table.num_experts)).max(initial=0.0) <= SAME_SHARE
    shares = None if is_even else parts
    return ExpertTable(view.table.version + 1, logical_of, view.table.num_experts, view.devices.is_alive.copy(), shares)


def _slots_of(view: PlaceView, expert: Experts, share: Floats) -> tuple[NDArray[np.int32], Floats]:
    """Return int32[devices, layers, slots] and float64 of the same shape, experts and shares, EMPTY on dead devices."""
    live = view.devices.is_alive
    shape = (len(live), len(expert), expert.shape[2])
    logical_of, parts = np.full(shape, EMPTY, np.int32), np.zeros(shape)
    logical_of[live], parts[live] = expert.swapaxes(0, 1), share.swapaxes(0, 1)
    return logical_of, parts
