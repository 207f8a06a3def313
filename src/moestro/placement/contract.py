"""The contract of a placement policy: devices, their prices and slots, where tokens come from, and the registry.

A row's price depends only on whether its source is the device itself, in its node, or elsewhere. So sums by device and
by node price every placement, without a product of sources and devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs
from moestro.core.experts.expert_table import EMPTY, OTHER_NODE, SAME_DEVICE, SAME_NODE, ExpertTable
from moestro.core.policy_registry import PolicyKind
from moestro.cost.gpus import Gpu
from moestro.cost.links import Link
from moestro.cost.networks import NetworkShape
from moestro.errors import ConfigError, MoestroError


@dataclass(frozen=True, slots=True, eq=False)
class Devices:
    """The devices of a group.

    Attributes:
        node_of: int32[devices], machine of each device.
        num_slots: int32[devices], expert copies that each device has room for in each layer.
        is_alive: bool[devices].
        speed: float64[devices], work per time, relative to the device that was priced.
        source_on: int32[sources], device of each source of tokens (attention DP rank).

    Raises:
        ValueError: Lengths differ, or a figure is out of range.
    """

    node_of: NDArray[np.int32]
    num_slots: NDArray[np.int32]
    is_alive: NDArray[np.bool_]
    speed: NDArray[np.float64]
    source_on: NDArray[np.int32]

    def __post_init__(self) -> None:
        lengths = {len(self.node_of), len(self.num_slots), len(self.is_alive), len(self.speed)}
        if len(lengths) > 1:
            raise ValueError(f"node_of, num_slots, is_alive and speed have {sorted(lengths)} devices")
        if (self.num_slots < 0).any() or not (self.speed > 0).all():
            raise ValueError("num_slots must not be negative, and speed must be above 0")
        if len(self.source_on) and not (0 <= self.source_on.min() <= self.source_on.max() < self.num_devices):
            raise ValueError(f"source_on must name devices below {self.num_devices}")

    @property
    def num_devices(self) -> int:
        """Number of devices, dead ones included."""
        return len(self.node_of)

    @property
    def distance(self) -> NDArray[np.int8]:
        """int8[devices, devices]: SAME_DEVICE, SAME_NODE or OTHER_NODE."""
        is_far = self.node_of[:, None] != self.node_of
        found: NDArray[np.int8] = np.where(is_far, OTHER_NODE, SAME_NODE).astype(np.int8)
        np.fill_diagonal(found, SAME_DEVICE)
        return found


def even_devices(num_devices: int, num_slots: int, num_nodes: int = 1) -> Devices:
    """Make equal devices, spread evenly over nodes in order; each one is the source of its own tokens.

    Raises:
        ValueError: The nodes cannot have equally many devices.
    """
    if num_devices % num_nodes:
        raise ValueError(f"{num_devices} devices cannot be spread evenly over {num_nodes} nodes")
    every = np.arange(num_devices, dtype=np.int32)
    return Devices(
        node_of=every // (num_devices // num_nodes),
        num_slots=np.full(num_devices, num_slots, np.int32),
        is_alive=np.ones(num_devices, np.bool_),
        speed=np.ones(num_devices),
        source_on=every,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacePrices:
    """Seconds that a placement's work takes.

    Attributes:
        token_s: Experts' work for one token at one expert.
        expert_s: Reading the weights of one activated expert.
        row_s: One row (a token for one expert, or its answer) that goes no way, within a node, and between nodes.
        expert_bytes: Weights of one expert in one layer.
        move_bytes_per_s: Bandwidth at which a device receives weights from itself, its node, and another node.
    """

    token_s: float
    expert_s: float
    row_s: tuple[float, float, float]
    expert_bytes: int
    move_bytes_per_s: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLimits:
    """Bounds on what one change of placement may move. None means no limit.

    Attributes:
        max_bytes: Bytes of all weights that move.
        max_receives: Experts that one device receives.
        max_layers: Layers that change.
        horizon_steps: Steps for which the new placement will stay, within which a move must pay for itself.
    """

    max_bytes: int | None = None
    max_receives: int | None = None
    max_layers: int | None = None
    horizon_steps: float = 10_000.0


@dataclass(frozen=True, slots=True, eq=False)
class PlaceView:
    """What a placement policy sees.

    Attributes:
        load: Load of the last window.
        table: Present placement. Its slots are padded to the device with the most of them.
        devices: The devices, dead ones included.
        prices: What work, rows and moves cost.
        limits: Bounds on what may move. Policies of peers know none, and ignore them.
        num_groups: Groups of experts that a token's gate chooses first (DeepSeek-V3: 8); 1 means none.
        fills_slots: Whether the engine has an expert in every slot, and divides tokens evenly among copies.
        measured_step_s: Seconds of a whole step as measured, with what prices leave out; None means not measured.

    Raises:
        ValueError: The load, the table and the devices do not fit each other.
    """

    load: ExpertLoad
    table: ExpertTable
    devices: Devices
    prices: PlacePrices
    limits: PlaceLimits
    num_groups: int = 1
    fills_slots: bool = False
    measured_step_s: float | None = None

    def __post_init__(self) -> None:
        num_workers, num_layers, num_slots = self.table.logical_of.shape
        facts = {
            "sources": (self.load.tokens.shape[0], len(self.devices.source_on)),
            "layers": (self.load.tokens.shape[1], num_layers),
            "experts": (self.load.tokens.shape[2], self.table.num_experts),
            "devices": (self.devices.num_devices, num_workers),
            "slots of the largest device": (int(self.devices.num_slots.max(initial=0)), num_slots),
        }
        for what, (first, second) in facts.items():
            if first != second:
                raise ValueError(f"the number of {what} differs: {first} and {second}")


class PlacementError(MoestroError):
    """A policy found no placement, or one that the devices cannot have."""


# A policy returns the next placement; one that leaves all as it is returns `view.table` itself. The new table's version
# is the present one's plus 1.
PlacePolicy = Callable[[PlaceView], ExpertTable]


def check_answer(view: PlaceView, table: object) -> ExpertTable:
    """Return the answer of a policy if it is a table that the devices can have.

    Raises:
        TypeError: It is no table.
        ValueError: Its shape differs, or a device has too few slots.
    """
    if not isinstance(table, ExpertTable):
        raise TypeError(f"it returned {table!r} in place of an ExpertTable")
    if table.logical_of.shape != view.table.logical_of.shape:
        raise ValueError(f"its table has the shape {table.logical_of.shape}, not {view.table.logical_of.shape}")
    used = (table.logical_of != EMPTY).sum(axis=2)
    over = np.argwhere(used > view.devices.num_slots[:, None])
    if len(over):
        device, layer = over[0].tolist()
        raise ValueError(
            f"device {device} has {view.devices.num_slots[device]} slots and gets {used[device, layer]} experts in"
            f" layer {layer}"
        )
    return table


def _try_once(policy: PlacePolicy) -> None:
    """Place four experts of each of two layers on two devices.

    Raises:
        ConfigError: The policy returned no placement.
    """
    devices = even_devices(2, 2)
    table = ExpertTable(0, np.array([[[0, 1]] * 2, [[2, 3]] * 2], np.int32), 4, np.ones(2, np.bool_))
    tokens = np.array([[[4.0, 3.0, 1.0, 0.0]] * 2] * 2)
    earlier, expert, partner = np.array([[0, 0], [0, 1], [2, 3]], np.int32)
    pairs = LayerPairs(earlier, expert, partner, np.array([3.0, 2.0]))
    load = ExpertLoad(tokens, np.zeros((2, 4)), np.array([[1.0, 1.0, 0.5, 0.0]] * 2), 100.0, pairs)
    prices = PlacePrices(
        token_s=1e-6, expert_s=1e-5, row_s=(0.0, 1e-7, 1e-6), expert_bytes=1 << 20, move_bytes_per_s=(1e12, 1e11, 1e10)
    )
    answer = policy(PlaceView(load, table, devices, prices, PlaceLimits()))
    if not isinstance(answer, ExpertTable):
        raise ConfigError(f"it returned {answer!r} in place of an ExpertTable")


PLACE_POLICIES: PolicyKind[PlacePolicy] = PolicyKind(
    "place policy",
    "--policy",
    "moestro.placement.policies",
    try_once=_try_once,
    adapt=lambda found, _text: found,
)


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenOrigins:
    """Tokens per step by origin.

    Attributes:
        total: float64[layers, experts], tokens of all sources.
        by_node: float64[nodes, layers, experts], tokens of the sources in each node; nodes in ascending order.
        by_device: float64[devices, layers, experts], tokens of the sources on each device.
        by_source: float64[sources, layers], tokens of each source.
        least, most: float64[layers, experts], tokens of the live device with the fewest and with the most.
        node_at: int64[devices], index into `by_node` of each device.
    """

    total: Floats
    by_node: Floats
    by_device: Floats
    by_source: Floats
    least: Floats
    most: Floats
    node_at: NDArray[np.int64]

    def of_layers(self, layers: NDArray[np.integer]) -> TokenOrigins:
        """Return the tokens of some layers; one that is named twice comes twice."""
        # `[:, layers]` would leave layers outermost in memory, so each flat view of the result would copy it.
        return TokenOrigins(
            self.total[layers],
            self.by_node.take(layers, axis=1),
            self.by_device.take(layers, axis=1),
            self.by_source.take(layers, axis=1),
            self.least[layers],
            self.most[layers],
            self.node_at,
        )


def origins_of(load: ExpertLoad, devices: Devices) -> TokenOrigins:
    """Sum a load by the places of its sources."""
    nodes, node_at = np.unique(devices.node_of, return_inverse=True)
    sources, shape = devices.source_on.tolist(), load.tokens.shape[1:]
    is_own = sources == list(range(devices.num_devices))
    by_device = load.tokens if is_own else np.zeros((devices.num_devices, *shape))
    by_node, by_source = np.zeros((len(nodes), *shape)), np.empty(load.tokens.shape[:2])
    least, most = np.full(shape, np.inf), np.zeros(shape)
    # All sums of a source at once, because reading the tokens of all of them takes most of the time.
    for source, device in enumerate(sources):
        tokens = load.tokens[source]
        by_node[node_at[device]] += tokens
        by_source[source] = tokens.sum(axis=1)
        if not is_own:
            by_device[device] += tokens
        elif devices.is_alive[device]:
            np.minimum(least, tokens, out=least)
            np.maximum(most, tokens, out=most)
    if not is_own and devices.is_alive.any():
        least, most = by_device[devices.is_alive].min(axis=0), by_device[devices.is_alive].max(axis=0)
    return TokenOrigins(by_node.sum(axis=0), by_node, by_device, by_source, least, most, node_at)


def devices_last(tokens: Floats, devices: NDArray[np.integer]) -> Floats:
    """Return float64[layers, experts, devices], tokens of some devices of float64[all devices, layers, experts].

    One layer after the other fits into caches, where a transposed copy of all reads each line of memory eight times.
    """
    turned = np.empty((*tokens.shape[1:], len(devices)))
    for layer, of_layer in enumerate(turned):
        of_layer[:] = tokens[devices, layer].T
    return turned


_ACTIVATION_BYTES = 2


def place_prices(network: NetworkShape, gpu: Gpu, within: Link, across: Link) -> PlacePrices:
    """Price the work of a network's experts, as `cost.roofline` does for many tokens.

    A token takes the time of its arithmetic and an expert that of reading its weights, each at the efficiency that
    fused experts reach on this GPU. A row is one hidden state of 2 bytes an element. Fixed delays are left out, because
    they are the same under every placement.

    Raises:
        ConfigError: The network has no experts.
    """
    if network.experts is None:
        raise ConfigError(f"{network.name} has no experts to place")
    flops_per_s = gpu.fp8_flops_per_s if network.is_fp8 and gpu.fp8_flops_per_s else gpu.bf16_flops_per_s
    flops = 6.0 * network.hidden_size * network.experts.intermediate_size
    row_bytes = _ACTIVATION_BYTES * network.hidden_size
    return PlacePrices(
        token_s=flops / (flops_per_s * gpu.expert_compute),
        expert_s=network.expert_bytes / (gpu.memory_bytes_per_s * gpu.expert_memory),
        row_s=(0.0, row_bytes / within.bytes_per_s, row_bytes / across.bytes_per_s),
        expert_bytes=round(network.expert_bytes),
        move_bytes_per_s=(gpu.memory_bytes_per_s, within.bytes_per_s, across.bytes_per_s),
    )


Holders = NDArray[np.bool_]  # [devices, layers, experts], whether the device has a copy


def table_with(view: PlaceView, holders: Holders) -> ExpertTable:
    """Make the next table, with equal shares; a copy that stays on its device keeps its slot.

    Args:
        view: what the policy saw.
        holders: bool[devices, layers, experts]; a dead device has none, and no device has more than it has slots.

    Returns:
        `view.table` itself if it has these copies, equal shares and the same live devices.
    """
    old, devices = view.table, view.devices
    is_same = (old.num_copies == holders).all() and (old.is_alive == devices.is_alive).all()
    if is_same and old.shares is None:
        return old
    num_slots = old.logical_of.shape[2]
    is_filled = old.logical_of != EMPTY
    stays = is_filled & np.take_along_axis(holders, np.where(is_filled, old.logical_of, 0), axis=2)
    stays &= np.arange(num_slots) < devices.num_slots[:, None, None]
    logical_of = np.where(stays, old.logical_of, EMPTY)
    new = holders.copy()
    device, layer, slot = np.nonzero(stays)
    new[device, layer, logical_of[device, layer, slot]] = False
    device, layer, expert = np.nonzero(new)
    free_slots = np.argsort(stays, axis=2, kind="stable")  # free ones first, in order
    nth = np.cumsum(new, axis=2)[device, layer, expert] - 1
    logical_of[device, layer, free_slots[device, layer, nth]] = expert
    return ExpertTable(old.version + 1, logical_of, old.num_experts, devices.is_alive.copy())


def in_slots_of(old: ExpertTable, new: ExpertTable) -> ExpertTable:
    """Return a placement whose copies keep the slots that they have in the present one.

    Args:
        old: Present placement.
        new: Placement of the same shape, with its copies in any order.
    """
    shares = new.slot_parts
    logical_of, moved = new.logical_of.copy(), shares.copy()
    differs = np.argwhere((old.logical_of != new.logical_of).any(axis=2))
    for device, layer in differs.tolist():
        before, after = old.logical_of[device, layer], new.logical_of[device, layer]
        slot_of = {expert: slot for slot, expert in enumerate(after.tolist()) if expert != EMPTY}
        order = np.array([slot_of.pop(expert, EMPTY) for expert in before.tolist()])
        order[np.flatnonzero(order == EMPTY)[: len(slot_of)]] = list(slot_of.values())
        is_used = order != EMPTY
        logical_of[device, layer] = np.where(is_used, after[order], EMPTY)
        moved[device, layer] = np.where(is_used, shares[device, layer][order], 0.0)
    return replace(new, logical_of=logical_of, shares=None if new.shares is None else moved)


def even_sizes(devices: Devices, num_experts: int) -> NDArray[np.int64]:
    """Return how many experts of a layer each device holds when each expert has one copy.

    Live devices get equally many as far as their slots allow; the first ones get one more where that leaves some over.

    Returns:
        int64[devices].

    Raises:
        ValueError: The live devices have fewer slots than there are experts.
    """
    sizes = np.zeros(devices.num_devices, np.int64)
    while (left := num_experts - int(sizes.sum())) > 0:
        has_room = np.flatnonzero(devices.is_alive & (sizes < devices.num_slots))
        if not len(has_room):
            raise ValueError(f"{num_experts} experts do not fit: live devices have {int(sizes.sum())} slots a layer")
        sizes[has_room[:left]] += 1
    return sizes
