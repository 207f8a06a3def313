"""One plan of a placement: views a running group, asks a policy, prices its answer, and judges whether it pays.

Functions without effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.errors import MoestroError
from moestro.placement.contract import (
    Devices,
    PlaceLimits,
    PlacementError,
    PlacePolicy,
    PlacePrices,
    PlaceView,
    check_answer,
    in_slots_of,
)
from moestro.placement.live.ep_migration import Migration
from moestro.placement.payback import Payback, payback
from moestro.placement.placement_file import table_of_contents
from moestro.placement.score import Moves, PlaceScore, move_s, moves_between, score

MachineOf = Callable[[int], str]  # Name of the machine of a rank's process.


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlaces:
    """Where a group has room for experts, and where its tokens come from.

    Attributes:
        holders: int64[holders], workers with slots for experts, as indices into tables, in ascending order.
        sources: Worker of each engine.
        holder_machines: int32[holders], machine of each holder.
        source_machines: int32[engines], machine of each engine.
        speeds: float64[holders], work per time of each holder, relative to the GPU of the prices. None means 1 for all.
    """

    holders: NDArray[np.int64]
    sources: tuple[int, ...]
    holder_machines: NDArray[np.int32]
    source_machines: NDArray[np.int32]
    speeds: NDArray[np.float64] | None = None

    @property
    def sources_hold(self) -> bool:
        """Whether each engine's worker holds experts too."""
        return bool(np.isin(self.sources, self.holders).all())


def machine_numbers(names: Sequence[str]) -> NDArray[np.int32]:
    """Return int32[names], a number from 0 for each machine: the same for the same name."""
    _, numbers = np.unique(np.array(names), return_inverse=True)
    return numbers.astype(np.int32)


def group_places(
    holders: Sequence[int], sources: Sequence[int], machines: tuple[Sequence[str], Sequence[str]] | None = None
) -> GroupPlaces:
    """Return the places of a group whose workers are given by their numbers.

    Args:
        holders: Workers with slots for experts.
        sources: Worker of each engine.
        machines: Names of the machines of the holders, and of the engines. None means one machine.
    """
    of_holders, of_sources = machines or ([""] * len(holders), [""] * len(sources))
    numbers = machine_numbers([*of_holders, *of_sources])
    order = np.argsort(np.array(holders, np.int64))
    held = numbers[: len(holders)]
    return GroupPlaces(np.array(holders, np.int64)[order], tuple(sources), held[order], numbers[len(holders) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceableGroup:
    """A group whose experts can move.

    Attributes:
        migration: The group's table, and moves towards another one.
        places: Callable that returns where the group has room for experts now.
        layers: Callable that returns the number in the network of each layer of the table.
        is_complete: Callable that returns whether all workers of the group serve.
        has_shares: Whether the group divides an expert's tokens by the shares of a table; else by its own means.
    """

    migration: Migration
    places: Callable[[], GroupPlaces]
    layers: Callable[[], tuple[int, ...]]
    is_complete: Callable[[], bool]
    has_shares: bool


def part_of(table: ExpertTable, places: GroupPlaces) -> ExpertTable:
    """Return the rows of the workers that hold experts."""
    shares = None if table.shares is None else table.shares[places.holders]
    held = places.holders
    return ExpertTable(table.version, table.logical_of[held], table.num_experts, table.is_alive[held], shares)


def whole_of(part: ExpertTable, table: ExpertTable, places: GroupPlaces) -> ExpertTable:
    """Return a table of all workers with the rows of `part`.

    Args:
        part: Placement of the workers that hold experts. A copy that stays on its worker keeps its slot.
        table: Present table of all workers.
        places: Where the rows of `part` belong.
    """
    part = in_slots_of(part_of(table, places), part)
    logical_of = np.full(table.logical_of.shape, EMPTY, np.int32)
    logical_of[places.holders] = part.logical_of
    shares: NDArray[np.float64] | None = None
    if part.shares is not None:
        shares = np.zeros(logical_of.shape)
        shares[places.holders] = part.shares
    return ExpertTable(table.version + 1, logical_of, table.num_experts, table.is_alive, shares)


class GroupView:
    """Makes what policies see of a running group.

    Args:
        group: The group.
        prices: Prices of the work and of moves.
        limits: Bounds on what may move.
    """

    def __init__(self, group: PlaceableGroup, prices: PlacePrices, limits: PlaceLimits) -> None:
        self.group = group
        self._prices, self._limits = prices, limits

    def view(self, load: ExpertLoad, table: ExpertTable, places: GroupPlaces) -> PlaceView:
        """Return the view of the workers that hold experts.

        Where engines have no experts, every row travels. The tokens of an engine then count as spread over the workers
        with experts on its machine, or over all of them where its machine has none; a row within a machine costs the
        same whether it stays on the worker or not.

        Raises:
            PlacementError: The load has other layers or experts than the table.
        """
        counted, placed = load.tokens.shape[1:], (table.logical_of.shape[1], table.num_experts)
        if counted != placed:
            raise PlacementError(
                f"the engines counted {counted[1]} experts in {counted[0]} layers, and the group has {placed[1]} in"
                f" {placed[0]}"
            )
        part, prices = part_of(table, places), self._prices
        num_holders = len(places.holders)
        if places.sources_hold:
            source_on = np.searchsorted(places.holders, places.sources).astype(np.int32)
        else:
            source_on = np.arange(num_holders, dtype=np.int32)
            load = replace(load, tokens=_spread(load.tokens, places))
            prices = replace(prices, row_s=(prices.row_s[1], *prices.row_s[1:]))
        return PlaceView(load, part, _devices(part, source_on, places), prices, self._limits)

    def table_of(self, contents: object, table: ExpertTable) -> ExpertTable:
        """Return the table of all workers that a file's contents describe.

        Args:
            contents: JSON object of `moestro place --out`, or SGLang's map of slots.
            table: Present table.

        Raises:
            ValueError: The contents are no placement, or do not fit the group; the text says why.
        """
        places = self.group.places()
        part = part_of(table, places)
        devices = _devices(part, np.arange(len(places.holders), dtype=np.int32), places)
        found = table_of_contents(contents, devices, self.group.layers(), table.num_experts)
        shares = found.shares if self.group.has_shares else None
        live = replace(
            found, is_alive=part.is_alive, shares=shares
        )  # Raises where only a dead worker would have an expert.
        return whole_of(live, table, places)


def _spread(tokens: NDArray[np.float64], places: GroupPlaces) -> NDArray[np.float64]:
    """Return float64[holders, layers, experts]: the tokens of each engine, divided among the holders on its machine."""
    is_near = places.holder_machines[:, None] == places.source_machines
    divided = (is_near | ~is_near.any(axis=0)).astype(np.float64)
    spread: NDArray[np.float64] = np.einsum("hs,sle->hle", divided / divided.sum(axis=0), tokens)
    return spread


def _devices(part: ExpertTable, source_on: NDArray[np.int32], places: GroupPlaces) -> Devices:
    """Return the devices of the holders, each with all slots of the table."""
    num_workers, _, num_slots = part.logical_of.shape
    return Devices(
        node_of=places.holder_machines,
        num_slots=np.full(num_workers, num_slots, np.int32),
        is_alive=part.is_alive,
        speed=np.ones(num_workers) if places.speeds is None else places.speeds,
        source_on=source_on,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementPlan:
    """A placement that a policy or an operator wants.

    Attributes:
        policy: The policy as the operator wrote it, or where a table came from.
        base: Table of the group from which the plan starts.
        target: Table of the group to which it leads.
        places: Workers that hold experts; layers and workers of `moves` are counted among them.
        moves: Copies that workers receive.
        move_s: Seconds in which the busiest worker receives its copies.
        change: Costs before and after by the traffic model; None means that no load was known.
        expert_bytes: Weights of one expert in one layer.
        reason: Why the policy leaves the table or changes it, in its words; "" means that it does not say.
    """

    policy: str
    base: ExpertTable
    target: ExpertTable
    places: GroupPlaces
    moves: Moves
    move_s: float
    change: Payback | None
    expert_bytes: int
    reason: str = ""

    @property
    def changes_anything(self) -> bool:
        """Whether the target differs from the base."""
        before, after = self.base, self.target
        return bool((before.logical_of != after.logical_of).any()) or not np.allclose(
            before.slot_parts, after.slot_parts
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that workers receive."""
        return len(self.moves) * self.expert_bytes

    def why_not(self, horizon_steps: float) -> str:
        """Return why the plan does not pay within a number of steps; "" means that it does. 0 steps means no gate."""
        change = self.change
        if not horizon_steps or change is None:
            return ""
        if change.steps is None:
            return f"it never pays: a step would take {-change.saved_s * 1e6:.3g} µs longer"
        if change.steps > horizon_steps:
            return f"it pays after {change.steps:,.0f} steps, and the horizon is {horizon_steps:,.0f}"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class PlanRequest:
    """What a plan is made of.

    Attributes:
        view: Makes what the policy sees.
        load: Load of the experts; None means that nothing was counted.
        table: Present table of the group.
        step_s: Seconds of a step as measured; None means not measured.
    """

    view: GroupView
    load: ExpertLoad | None
    table: ExpertTable
    step_s: float | None = None


def ask_policy(policy: str, decide: PlacePolicy, request: PlanRequest) -> PlacementPlan:
    """Ask a policy for the next placement, which may take a second in a large network.

    Args:
        policy: The policy as the operator wrote it.
        decide: The policy.
        request: Load and present placement.

    Raises:
        PlacementError: No load was counted, the policy failed, or its answer does not fit the group.
    """
    if request.load is None:
        raise PlacementError("no engine has counted any token yet")
    places = request.view.group.places()
    view = replace(request.view.view(request.load, request.table, places), measured_step_s=request.step_s)
    try:
        part = check_answer(view, decide(view))
        if part.shares is not None and not request.view.group.has_shares:
            part = replace(part, shares=None)
        target = request.table if part is view.table else whole_of(part, request.table, places)
        return replace(_priced(policy, request, target, places), reason=str(getattr(decide, "reason", "")))
    except MoestroError:
        raise
    except Exception as error:  # a policy of a user's file may raise anything
        raise PlacementError(f"policy {policy} found no placement: {type(error).__name__}: {error}") from error


def plan_of_table(origin: str, target: ExpertTable, request: PlanRequest) -> PlacementPlan:
    """Return the plan that leads to a given table of the group; it is priced if a load is known."""
    return _priced(origin, request, target, request.view.group.places())


def _priced(policy: str, request: PlanRequest, target: ExpertTable, places: GroupPlaces) -> PlacementPlan:
    group, table = request.view, request.table
    # Any load will do where only the moves are wanted.
    shape = (1, table.logical_of.shape[1], table.num_experts)
    none = ExpertLoad(np.zeros((len(places.sources), *shape[1:])), np.zeros(shape[1:]), np.zeros(shape[1:]), 0.0)
    view = group.view(request.load or none, table, places)
    part = part_of(target, places)
    change = None if request.load is None else payback(view, part)
    moves = moves_between(view.table, part, view.devices) if change is None else change.moves
    return PlacementPlan(
        policy=policy,
        base=table,
        target=target,
        places=places,
        moves=moves,
        move_s=move_s(moves, view.devices, view.prices),
        change=change,
        expert_bytes=view.prices.expert_bytes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """The placement that a group serves, under the load that its engines counted last.

    Attributes:
        score: Cost of the present placement.
        found_s: Seconds per step that the last completed plan saves under this load; None means that there is none.
    """

    score: PlaceScore
    found_s: float | None


def measure(request: PlanRequest, applied: PlacementPlan | None) -> Measured | None:
    """Price what the group serves now, and what the last completed plan is worth by now.

    Args:
        request: Load and present placement.
        applied: Plan whose migration was completed last.

    Returns:
        None where no load was counted.

    Raises:
        PlacementError: The load does not fit the group.
    """
    if request.load is None:
        return None
    places = request.view.group.places()
    view = request.view.view(request.load, request.table, places)
    found_s: float | None = None
    # Of a group whose workers have changed since, the tables of the plan mean nothing any more.
    if applied is not None and np.array_equal(applied.places.holders, places.holders):
        tables = (applied.base, applied.target)
        is_alive = request.table.is_alive
        if all((table.is_alive == is_alive).all() for table in tables):
            before, after = (score(view.load, part_of(each, places), view.devices, view.prices) for each in tables)
            found_s = before.step_s - after.step_s
    return Measured(score(view.load, view.table, view.devices, view.prices), found_s)
