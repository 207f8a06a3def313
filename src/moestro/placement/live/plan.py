"""One plan of a placement: asks a policy, prices its answer, and judges whether it pays. Functions without effects."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import ExpertTable
from moestro.errors import MoestroError
from moestro.placement.live.group_view import GroupPlaces, GroupView, part_of, whole_of
from moestro.placement.payback import Payback, payback
from moestro.placement.registry import PlacementError, PlacePolicy, check_answer
from moestro.placement.score import Moves, PlaceScore, move_s, moves_between, score


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
