"""The control of placement on virtual time: counted loads, a plan by a production policy, and moves between steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs
from moestro.core.experts.expert_pressure import expert_pressures
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.experts.source_load import merge_sources
from moestro.placement.devices import Devices, PlaceLimits, PlacePrices
from moestro.placement.load_window import LoadWindow
from moestro.placement.registry import PlacePolicy, PlaceView
from moestro.placement.score import Moves, move_s, moves_between, score

Int64s = NDArray[np.int64]

_NS = 1e9
# Steps between two computations of expert pressure. The window changes by 1 - 2**(-32 / 1000) = 2 % meanwhile.
_PRESSURE_INTERVAL = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanSettings:
    """When a group plans its placement anew, and how weights move.

    Attributes:
        interval_steps: steps between two plans (tau). vLLM, SGLang and Gimbal have 3000.
        first_steps: steps before the first plan. None means `interval_steps`; vLLM plans first after a quarter of it.
        half_life_steps: steps after which a counted step counts half in the window. vLLM's window has 1000 steps.
        bytes_per_step: bytes of weights that a device receives between two steps. None means that one step waits for
            the whole migration, as with vLLM's synchronous EPLB.
    """

    interval_steps: int = 3000
    first_steps: int | None = None
    half_life_steps: float = 1000.0
    bytes_per_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementSite:
    """The devices of a group, and what work and moves cost there.

    Attributes:
        devices: devices; each slot of the group's table is theirs.
        prices: prices that the policy sees, and those of moves.
        limits: bounds on one change. Its horizon should be the interval between two plans.
        offline_pairs: pairs of experts of an offline run, for policies that need them (Gimbal v1). None means none.
    """

    devices: Devices
    prices: PlacePrices
    limits: PlaceLimits
    offline_pairs: LayerPairs | None = None


@dataclass(frozen=True, slots=True)
class SimPlan:
    """One plan.

    Attributes:
        step: steps of the group before it.
        num_moves: copies that devices receive.
        moved_bytes: weights of these copies.
        move_s: seconds in which the busiest device receives them.
        balance_found: mean over largest load of the window, under the placement that served it (vLLM's definition).
        balance_planned: the same under the new placement.
        saved_s: seconds a step that the plan expects to save, by the traffic model.
    """

    step: int
    num_moves: int
    moved_bytes: int
    move_s: float
    balance_found: float
    balance_planned: float
    saved_s: float


class SimPlacement:
    """Counts loads by source, asks the policy every tau steps, and moves weights layer by layer between steps.

    A layer gets its new table once all its weights have arrived; until then the old copies serve. The policy's own
    time is not priced: it runs on the host beside the steps.

    Args:
        policy: production policy. It sees the load of the past window only.
        table: placement of the first step; slots beyond a device's share are EMPTY.
        site: devices and prices.
        settings: interval, window and budget.

    Attributes:
        table: placement of the next step.
        plans: all plans so far, those without moves included.
        stall_ns: time for which steps have waited for weights.
        expert_pressure: float64[sources], as `core.expert_pressure` defines it, of the visits in each source's window.
    """

    def __init__(self, policy: PlacePolicy, table: ExpertTable, site: PlacementSite, settings: ReplanSettings) -> None:
        self._policy, self._site, self._settings = policy, site, settings
        self.table = table
        num_sources, num_layers = len(site.devices.source_on), table.logical_of.shape[1]
        self._windows = [
            LoadWindow(num_layers, table.num_experts, settings.half_life_steps) for _ in range(num_sources)
        ]
        self.plans: list[SimPlan] = []
        self.stall_ns = self._num_steps = 0
        self.expert_pressure = np.ones(num_sources)
        self._pending: deque[_Change] = deque()
        self._due = settings.interval_steps if settings.first_steps is None else settings.first_steps

    def begin_step(self) -> int:
        """Plan if it is time, move what the budget allows, and return the time for which the step waits, ns."""
        if self._num_steps >= self._due and not self._pending:
            self._due += self._settings.interval_steps
            self._plan()
        if not self._pending:
            return 0
        stall_ns = round(self._move() * _NS)
        self.stall_ns += stall_ns
        return stall_ns

    def observe(self, counts: Int64s) -> None:
        """Take in a step's tokens, int64[sources, layers, experts]."""
        for window, own in zip(self._windows, counts, strict=True):
            window.observe(own)
        if self._num_steps % _PRESSURE_INTERVAL == 0:
            self._measure_pressure()
        self._num_steps += 1

    def _measure_pressure(self) -> None:
        loads = [window.load() for window in self._windows]
        visits = np.stack([load.mean * load.weight for load in loads])
        self.expert_pressure = expert_pressures(visits, self.table.parts)

    def _plan(self) -> None:
        merged = merge_sources([window.load() for window in self._windows])
        if merged is None or not len(merged[1]):
            return  # no token came yet
        load, layers = merged
        site = self._site
        load = replace(load, pairs=site.offline_pairs)
        present = _layers_of(self.table, layers)
        new = self._policy(PlaceView(load, present, site.devices, site.prices, site.limits))
        moves = moves_between(present, new, site.devices)
        self.plans.append(self._record(load, present, new, moves))
        if new is not present:
            self._pending.extend(_changes(moves, new, layers, site, at_once=self._settings.bytes_per_step is None))

    def _move(self) -> float:
        """Move the weights of one step, commit the layers that are complete, and return the seconds."""
        budget, seconds, committed = self._settings.bytes_per_step, 0.0, []
        left = float("inf") if budget is None else float(budget)
        while self._pending and left > 0:
            change = self._pending[0]
            part = min(1.0, left / change.left_bytes) if change.left_bytes else 1.0
            seconds += part * change.left_s
            left -= part * change.left_bytes
            change.left_bytes, change.left_s = (1 - part) * change.left_bytes, (1 - part) * change.left_s
            if part < 1.0:
                break
            committed.append(self._pending.popleft())
        if committed:
            self._commit(committed)
        return seconds

    def _commit(self, changes: list[_Change]) -> None:
        table = self.table
        logical_of, parts = table.logical_of.copy(), table.slot_parts.copy()
        for change in changes:
            logical_of[:, change.layers], parts[:, change.layers] = change.logical_of, change.parts
        self.table = ExpertTable(table.version + 1, logical_of, table.num_experts, table.is_alive, parts)

    def _record(self, load: ExpertLoad, present: ExpertTable, new: ExpertTable, moves: Moves) -> SimPlan:
        site = self._site
        before, after = (score(load, table, site.devices, site.prices) for table in (present, new))
        return SimPlan(
            step=self._num_steps,
            num_moves=len(moves),
            moved_bytes=len(moves) * site.prices.expert_bytes,
            move_s=move_s(moves, site.devices, site.prices),
            balance_found=before.balance_of_sums,
            balance_planned=after.balance_of_sums,
            saved_s=before.step_s - after.step_s,
        )


@dataclass(slots=True, eq=False)
class _Change:
    """Layers that get their new slots together.

    Attributes:
        layers: int64[n], layers of the network.
        logical_of, parts: [workers, n, slots], their slots, and the part of its expert's tokens that each gets.
        left_bytes, left_s: weights that the busiest device has yet to receive, and their time.
    """

    layers: Int64s
    logical_of: NDArray[np.int32]
    parts: NDArray[np.float64]
    left_bytes: float
    left_s: float


def _changes(moves: Moves, new: ExpertTable, layers: Int64s, site: PlacementSite, *, at_once: bool) -> list[_Change]:
    """Divide a plan into changes: one of all layers, in which devices receive at once, or one for each layer."""
    parts = new.slot_parts
    groups = [np.arange(len(layers))] if at_once else list(np.arange(len(layers))[:, None])
    changes = []
    for group in groups:
        is_here = np.isin(moves.layer, group)
        own = Moves(moves.layer[is_here], moves.expert[is_here], moves.source[is_here], moves.target[is_here])
        most = int(np.bincount(own.target).max(initial=0))
        changes.append(
            _Change(
                layers=layers[group],
                logical_of=new.logical_of[:, group],
                parts=parts[:, group],
                left_bytes=float(most * site.prices.expert_bytes),
                left_s=move_s(own, site.devices, site.prices),
            )
        )
    return changes


def _layers_of(table: ExpertTable, layers: Int64s) -> ExpertTable:
    """Return the placement of some layers; without shares where all copies have equal ones."""
    logical_of = table.logical_of[:, layers]
    even = ExpertTable(table.version, logical_of, table.num_experts, table.is_alive)
    if table.shares is None or np.allclose(table.slot_parts[:, layers], even.slot_parts):
        return even
    return ExpertTable(table.version, logical_of, table.num_experts, table.is_alive, table.slot_parts[:, layers])


def with_spare_slots(table: ExpertTable, num_spares: int) -> ExpertTable:
    """Return a table with further slots on each worker, which are EMPTY."""
    spare = np.full((*table.logical_of.shape[:2], num_spares), EMPTY, np.int32)
    return ExpertTable(
        table.version, np.concatenate([table.logical_of, spare], axis=2), table.num_experts, table.is_alive
    )
