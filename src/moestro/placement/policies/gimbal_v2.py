"""Gimbal's second paper, known by its abstract only: a reconstruction."""

from __future__ import annotations

from dataclasses import replace

from moestro.core.experts.expert_table import ExpertTable
from moestro.placement.devices import PlaceLimits
from moestro.placement.policies.moestro import MoestroPlacement
from moestro.placement.registry import PLACE_POLICIES, PlaceView
from moestro.placement.search.linear_costs import objective_s

# The objective has equal shares and mean loads, and a move needs to pay just once.
_SEARCH = MoestroPlacement(weighted=0, risk=0.0, hysteresis=0.0)


@PLACE_POLICIES.register_function(
    "gimbal_v2",
    "lowers the seconds of load, source-aware rows and moves, with equal shares, and without other limits than the"
    " horizon",
    source="our reconstruction of Gimbal v2 (arXiv 2606.15177, abstract only); docs/placement_objective.md",
)
def gimbal_v2(view: PlaceView) -> ExpertTable:
    """Return the placement with the least `objective_s` that the search of `moestro` finds, or the present one.

    Raises:
        ValueError: The experts do not fit the live devices.
    """
    found = _SEARCH(replace(view, limits=PlaceLimits(horizon_steps=view.limits.horizon_steps)))
    all_run = bool((view.table.is_alive == view.devices.is_alive).all())
    if all_run and objective_s(view, found) >= objective_s(view, view.table):
        return view.table
    return found
