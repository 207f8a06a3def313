"""The traffic model: what a placement costs per step, and what it costs to get there. It prices every policy alike.

Attention is data-parallel: a token leaves its source for each of its experts, one row a choice, and each answer comes
back to the source, one row a choice. So neighbouring layers cause no traffic between each other, whatever their
affinity.

Linear algebra runs on one core, because the threads of a BLAS library wait for each other by spinning.

Beside busy engines, a plan for 144 devices took 22 to 31 s of processor time with two threads of OpenBLAS, and 0.15 s
with one; on idle cores two threads save nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, OTHER_NODE, SAME_DEVICE, ExpertTable
from moestro.placement.contract import Devices, PlacePrices, TokenOrigins, origins_of


def idle_parts(idle: NDArray[np.float64], share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the fractions of steps in which copies get no token: `idle ** share`.

    Most copies are their expert's only one, or never idle. Their powers are known, and NumPy's powers of 0 are slow.

    Args:
        idle: Fractions of steps without a token of the expert.
        share: Parts of its tokens that the copies get, of the same shape; above 0 where the result is used.
    """
    parts = idle.copy()
    np.power(idle, share, out=parts, where=(idle > 0) & (share < 1))
    return parts


P = ParamSpec("P")
T = TypeVar("T")


@cache
def _libraries() -> ThreadpoolController:
    """Find the libraries that are loaded: NumPy's, which computes plans; one that is loaded later is not limited."""
    return ThreadpoolController()


def on_one_core(function: Callable[P, T]) -> Callable[P, T]:
    """Let the BLAS libraries of this process use one thread while `function` runs."""

    @wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> T:
        with _libraries().limit(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return limited


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


def score(
    load: ExpertLoad,
    table: ExpertTable,
    devices: Devices,
    prices: PlacePrices,
    origin: TokenOrigins | None = None,
) -> PlaceScore:
    """Price a placement.

    Balance counts live devices only. A copy is activated by each step in which one of its tokens comes: an expert that
    is idle in a fraction p of the steps leaves a copy with a share s of its tokens idle in a fraction p**s.

    Args:
        origin: Sums of the load by `origins_of`, for callers that price several placements; None means that they are
            made here.
    """
    if origin is None:
        origin = origins_of(load, devices)
    return score_slots(load, (table.logical_of, table.slot_parts), devices, prices, origin)


@on_one_core
def score_slots(
    load: ExpertLoad,
    slots: tuple[NDArray[np.integer], Floats],
    devices: Devices,
    prices: PlacePrices,
    origin: TokenOrigins,
) -> PlaceScore:
    """Price a placement as `score` does, without the checks of a table.

    Args:
        slots: int[devices, layers, slots], expert in each slot; and float64 of the same shape, part of its tokens that
            the slot gets, 0 for EMPTY.
        origin: Sums of the load by `origins_of`.
    """
    expert, parts = np.maximum(slots[0], 0), slots[1]
    num_layers, num_experts = origin.total.shape
    flat = np.arange(num_layers)[:, None] * num_experts + expert  # of the slot's expert in [layers, experts]
    tokens = (origin.total.reshape(-1).take(flat) * parts).sum(axis=-1)  # [devices, layers]
    idle = (1 - np.minimum(load.activated, 1.0)).reshape(-1).take(flat)
    activated = ((1 - idle_parts(idle, parts)) * (parts > 0)).sum(axis=-1)
    live = devices.is_alive
    work_s = (prices.token_s * tokens + prices.expert_s * activated)[live].T / devices.speed[live]
    arriving = _arriving_rows(origin, flat, parts, tokens)
    is_own = origin.by_device is load.tokens  # the tokens of each device come from itself
    answers = _answer_rows(load, devices, origin, (flat, parts), arriving[0] if is_own else None)
    row_s = np.array(prices.row_s)
    received_s = np.tensordot(row_s, arriving, 1)
    np.add.at(received_s, devices.source_on, np.tensordot(row_s, answers, 1))
    return PlaceScore(
        tokens=tokens[live].T,
        activated=activated[live].T,
        compute_s=work_s.max(axis=1),
        exchange_s=received_s.max(axis=0),
        rows=2 * arriving.sum(axis=(1, 2)),
    )


def _arriving_rows(origin: TokenOrigins, flat: NDArray[np.intp], parts: Floats, tokens: Floats) -> Floats:
    """Return float64[3, devices, layers], rows that each device receives from itself, its node, and other nodes."""
    own = (_taken(origin.by_device, np.arange(len(parts)), flat) * parts).sum(axis=-1)
    in_node = tokens
    if len(origin.by_node) > 1:
        in_node = (_taken(origin.by_node, origin.node_at, flat) * parts).sum(axis=-1)
    return np.stack([own, in_node - own, tokens - in_node])


def _answer_rows(
    load: ExpertLoad,
    devices: Devices,
    origin: TokenOrigins,
    slots: tuple[NDArray[np.intp], Floats],
    own: Floats | None,
) -> Floats:
    """Return float64[3, sources, layers], answers that each source receives from its device, its node, and others.

    Args:
        slots: Experts of slots and their parts, as in `_arriving_rows`.
        own: Answers from the own device. None means that they are looked up.
    """
    device, (flat, parts) = devices.source_on, slots
    if own is None:
        own = (_taken(load.tokens, np.arange(len(device)), flat[device]) * parts[device]).sum(axis=-1)
    # All shares of an expert sum to 1, so each source gets as many answers as it sent tokens.
    in_node = origin.by_source
    if len(origin.by_node) > 1:
        index = flat + origin.node_at[:, None, None] * origin.total.size
        in_nodes = np.bincount(index.ravel(), parts.ravel(), origin.by_node.size).reshape(origin.by_node.shape)
        in_node = origin.by_source.copy()
        for node, held in enumerate(in_nodes):
            here = np.flatnonzero(origin.node_at[device] == node)
            is_run = len(here) > 0 and int(here[-1] - here[0]) + 1 == len(here)
            # A run gives a view, where an index would copy all tokens.
            sources = slice(int(here[0]), int(here[-1]) + 1) if is_run else here
            in_node[sources] = np.einsum("sle,le->sl", load.tokens[sources], held)
    return np.stack([own, in_node - own, origin.by_source - in_node])


def _taken(tokens: Floats, row: NDArray[np.integer], flat: NDArray[np.intp]) -> Floats:
    """Return the tokens of float64[rows, layers, experts] of the experts of slots, from a row for each device."""
    taken: Floats = tokens.reshape(-1).take(flat + row[:, None, None] * (tokens.size // len(tokens)))
    return taken


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


def each_move_s(moves: Moves, devices: Devices, prices: PlacePrices) -> Floats:
    """Return float64[moves], seconds in which each copy arrives; a loaded one comes at the speed between nodes."""
    way = np.where(
        moves.source == NOT_HELD, OTHER_NODE, devices.distance[np.maximum(moves.source, SAME_DEVICE), moves.target]
    )
    seconds: Floats = prices.expert_bytes / np.array(prices.move_bytes_per_s)[way]
    return seconds


def move_s(moves: Moves, devices: Devices, prices: PlacePrices) -> float:
    """Seconds in which the busiest device receives its copies."""
    seconds = each_move_s(moves, devices, prices)
    return float(np.bincount(moves.target, seconds, devices.num_devices).max(initial=0.0))
