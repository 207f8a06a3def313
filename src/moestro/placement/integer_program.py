"""Placement as a mixed-integer linear program: its rows, its linear costs, and its optimum as an oracle for tests.

HiGHS solves it, and scipy is loaded when one is solved.

With equal shares and r copies, an expert's copy gets 1/r of its tokens. `score` and `move_s` give the same sums for
whole tables; searches and the exact solver need the terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import OTHER_NODE, ExpertTable
from moestro.errors import ConfigError
from moestro.placement.contract import PlaceView, table_with
from moestro.placement.score import move_s, moves_between, score

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True, eq=False)
class IntegerProgram:
    """Minimises a linear cost of variables under linear constraints.

    Attributes:
        purpose: who needs the solver, for messages.
    """

    purpose: str
    _costs: list[Floats] = field(default_factory=list)
    _uppers: list[Floats] = field(default_factory=list)
    _is_integer: list[NDArray[np.int64]] = field(default_factory=list)
    _entries: list[tuple[Ids, Ids, Floats]] = field(default_factory=list)  # row, variable, factor
    _bounds: list[tuple[Floats, Floats]] = field(default_factory=list)  # lower, upper
    _num_variables: int = 0
    _num_rows: int = 0

    def binaries(self, *shape: int, cost: float = 0.0) -> Ids:
        """Add variables that are 0 or 1; returns their ids in this shape."""
        return self._add(shape, 1.0, cost, 1)

    def continuous(self, *shape: int, upper: float = np.inf, cost: float = 0.0) -> Ids:
        """Add variables from 0 to `upper`; returns their ids in this shape."""
        return self._add(shape, upper, cost, 0)

    def constrain(self, ids: Ids, factors: Floats | float, lower: Floats | float, upper: Floats | float) -> None:
        """Add one row for each entry of the leading axis: lower <= sum of factors * variables <= upper.

        Args:
            ids: int64[rows, terms].
            factors: what `ids` are multiplied with; broadcast to their shape.
            lower, upper: float64[rows], or one for all.
        """
        rows = np.repeat(np.arange(len(ids)) + self._num_rows, ids.shape[1])
        self._entries.append((rows, ids.ravel(), np.broadcast_to(factors, ids.shape).astype(np.float64).ravel()))
        self._bounds.append((_row_bounds(lower, len(ids)), _row_bounds(upper, len(ids))))
        self._num_rows += len(ids)

    def solve(self, time_limit_s: float) -> Floats:
        """Return the value of each variable at the optimum.

        Raises:
            ConfigError: scipy is not installed.
            ValueError: The constraints contradict each other, or the time ended before an optimum was proven.
        """
        try:
            optimize, sparse = import_module("scipy.optimize"), import_module("scipy.sparse")
        except ImportError:
            raise ConfigError(f"{self.purpose} needs scipy: pip install 'moestro[exact]'") from None
        rows, ids, factors = (np.concatenate(column) for column in zip(*self._entries, strict=True))
        matrix = sparse.coo_array((factors, (rows, ids)), shape=(self._num_rows, self._num_variables)).tocsr()
        lower, upper = (np.concatenate(column) for column in zip(*self._bounds, strict=True))
        found = optimize.milp(
            np.concatenate(self._costs),
            integrality=np.concatenate(self._is_integer),
            bounds=optimize.Bounds(0.0, np.concatenate(self._uppers)),
            constraints=optimize.LinearConstraint(matrix, lower, upper),
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )
        if found.status != 0:
            raise ValueError(f"{self.purpose} found no optimum within {time_limit_s:g} s: {found.message}")
        values: Floats = found.x
        return values

    def _add(self, shape: tuple[int, ...], upper: float, cost: float, is_integer: int) -> Ids:
        count = int(np.prod(shape))
        ids = np.arange(self._num_variables, self._num_variables + count, dtype=np.int64)
        self._costs.append(np.full(count, cost))
        self._uppers.append(np.full(count, upper))
        self._is_integer.append(np.full(count, is_integer, np.int64))
        self._num_variables += count
        return ids.reshape(shape)


def _row_bounds(bound: Floats | float, num_rows: int) -> Floats:
    return np.broadcast_to(np.asarray(bound, np.float64), num_rows)


TERMS = COMPUTE, ROWS, WEIGHTS = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class LinearCosts:
    """What copies of experts cost in one layer.

    Attributes:
        tokens: float64[experts], tokens per step.
        idle: float64[experts], fraction of steps without a token.
        token_s: float64[devices], seconds of one token.
        expert_s: float64[devices], seconds of one activated copy.
        owned: float64[experts, devices], tokens per step of the sources that each device has.
        row_s: float64[devices, devices], seconds of one row from the first device to the second.
        arriving_s: float64[experts, devices], seconds in which the device receives an expert's tokens if it computes
            all of them.
        receive_s: float64[experts, devices], seconds in which the device receives the expert's weights, divided by the
            steps of the horizon; 0 where it has them.
    """

    tokens: Floats
    idle: Floats
    token_s: Floats
    expert_s: Floats
    owned: Floats
    row_s: Floats
    arriving_s: Floats
    receive_s: Floats

    def seconds(self, expert: NDArray[np.int64], holders: Floats, copies: Floats) -> Floats:
        """Return what some experts' copies add to each term of the objective on each device.

        Args:
            expert: int64[rows].
            holders: float64[rows, devices], 1 where a copy counts and 0 elsewhere.
            copies: float64[rows], number of the expert's copies in the whole layer, among which its tokens are shared.

        Returns:
            float64[rows, TERMS, devices]: seconds per step that the device computes, receives rows (answers included),
            and receives weights.
        """
        shared = copies[:, None]
        tokens, idle = self.tokens[expert, None], self.idle[expert, None]
        work_s = self.token_s * tokens / shared + self.expert_s * (1.0 - idle ** (1.0 / shared))
        answers_s = self.owned[expert] * (holders @ self.row_s.T)
        arriving_s = holders * self.arriving_s[expert]
        return np.stack([holders * work_s, (answers_s + arriving_s) / shared, holders * self.receive_s[expert]], axis=1)

    def slopes(self, slope: Floats, copies: Floats) -> Floats:
        """Return each possible copy's `seconds` times a factor for each term and device.

        Args:
            slope: float64[TERMS, devices], the factors.
            copies: float64[experts], copies among which each expert's tokens are shared.

        Returns:
            float64[experts, devices].
        """
        shared = copies[:, None]
        activated = 1.0 - self.idle[:, None] ** (1.0 / shared)
        work_s = self.token_s * self.tokens[:, None] / shared + self.expert_s * activated
        answers = (self.owned * slope[ROWS]) @ self.row_s
        rows = (answers + slope[ROWS] * self.arriving_s) / shared
        found: Floats = slope[COMPUTE] * work_s + rows + slope[WEIGHTS] * self.receive_s
        return found


def costs_of_layer(view: PlaceView, layer: int) -> LinearCosts:
    """Return the costs of copies in one layer."""
    load, devices, prices = view.load, view.devices, view.prices
    owned = np.zeros((devices.num_devices, view.table.num_experts))
    np.add.at(owned, devices.source_on, load.tokens[:, layer])
    row_s = np.array(prices.row_s)[devices.distance]
    return LinearCosts(
        tokens=load.total[layer],
        idle=1.0 - np.minimum(load.activated[layer], 1.0),
        token_s=prices.token_s / devices.speed,
        expert_s=prices.expert_s / devices.speed,
        owned=owned.T,
        row_s=row_s,
        arriving_s=owned.T @ row_s,
        receive_s=_receive_s(view, layer) / view.limits.horizon_steps,
    )


def _receive_s(view: PlaceView, layer: int) -> Floats:
    """float64[experts, devices], seconds in which the device gets the expert from the nearest live holder."""
    devices = view.devices
    has = view.table.num_copies[:, layer].T > 0  # [experts, devices]
    seconds = view.prices.expert_bytes / np.array(view.prices.move_bytes_per_s)
    is_near = has & devices.is_alive
    way = np.full(has.shape, OTHER_NODE)
    for kind in range(OTHER_NODE):
        closer = (is_near[:, :, None] & (devices.distance == kind)).any(axis=1)
        way = np.where(closer, np.minimum(way, kind), way)
    return np.where(has, 0.0, seconds[way])


def objective_s(view: PlaceView, table: ExpertTable) -> float:
    """Return seconds per step of a placement, with the moves that it needs spread over the horizon."""
    moves = moves_between(view.table, table, view.devices)
    step_s = score(view.load, table, view.devices, view.prices).step_s
    return step_s + move_s(moves, view.devices, view.prices) / view.limits.horizon_steps


def exact_placement(
    view: PlaceView, copies: NDArray[np.int64] | None = None, time_limit_s: float = 60.0
) -> ExpertTable:
    """Return the placement with the least `objective_s` among those with these numbers of copies and equal shares.

    Args:
        copies: int64[layers, experts], at least 1; None means as many as the present table has on live devices.
        time_limit_s: time after which the search gives up, seconds.

    Raises:
        ConfigError: scipy is not installed.
        ValueError: The copies do not fit, or no optimum is proven within the time.
    """
    live = np.flatnonzero(view.devices.is_alive)
    held = view.table.num_copies
    if copies is None:
        copies = held[live].sum(axis=0)
    seconds = _seconds_of_copies(view, copies)
    solver = IntegerProgram("exact_placement")
    x = solver.binaries(*copies.shape, len(live))
    totals = solver.continuous(len(copies), len(TERMS), cost=1.0)  # the maxima over devices of each layer's terms
    solver.constrain(
        x.reshape(-1, len(live)), 1.0, copies.ravel().astype(np.float64), copies.ravel().astype(np.float64)
    )
    for layer, each in enumerate(x):
        solver.constrain(each.T, 1.0, 0.0, view.devices.num_slots[live].astype(np.float64))
        for term in (COMPUTE, ROWS):
            _bound_maximum(solver, each, seconds[layer, :, :, term], totals[layer, term])
    _bound_maximum(solver, x, seconds[:, :, :, WEIGHTS], totals[0, WEIGHTS])  # one maximum for all layers
    values = solver.solve(time_limit_s)
    holders = np.zeros(held.shape, np.bool_)
    holders[live] = np.moveaxis(values[x] > 0.5, 2, 0)
    return table_with(view, holders)


def _seconds_of_copies(view: PlaceView, copies: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return float64[layers, experts, live devices, TERMS, devices]: what each possible copy adds to each term.

    The largest entry is 1, because the solver's tolerances are absolute.
    """
    live = np.flatnonzero(view.devices.is_alive)
    num_layers, num_experts = copies.shape
    expert = np.repeat(np.arange(num_experts), len(live))
    holders = np.tile(np.eye(view.devices.num_devices)[live], (num_experts, 1))
    seconds = np.stack(
        [
            costs_of_layer(view, layer).seconds(expert, holders, copies[layer, expert] + 0.0)
            for layer in range(num_layers)
        ]
    ).reshape(num_layers, num_experts, len(live), len(TERMS), -1)
    largest = float(seconds.max(initial=0.0))
    return seconds / largest if largest else seconds


def _bound_maximum(solver: IntegerProgram, x: Ids, seconds: NDArray[np.float64], maximum: np.int64) -> None:
    """Require that `maximum` is at least what each device adds up: seconds[..., device] times the copies `x`."""
    per_device = np.moveaxis(seconds, -1, 0).reshape(seconds.shape[-1], -1)
    ids = np.tile(np.append(x, maximum), (len(per_device), 1))
    solver.constrain(ids, np.hstack([per_device, np.full((len(per_device), 1), -1.0)]), -np.inf, 0.0)
