"""Placement of an `async` group on the nodes of a Ray cluster: policies see two levels of distance."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from server.test_coordinator import LAYERS, Group
from support.expert_loads import PRICES

pytest.importorskip("ray")

from server.test_ray_launcher import FakeCluster, launcher_on

from moestro.core.experts.expert_load import ExpertLoad
from moestro.placement.contract import PLACE_POLICIES, PlaceLimits
from moestro.placement.live.plan import GroupView, MachineOf, PlacementPlan, PlanRequest, ask_policy
from moestro.server.experts.expert_signals import async_group

HOMES, HOLDERS = (0, 1), (2, 3)
NUM_LAYERS = len(LAYERS.layers)


async def machines_of(num_processes: int, nodes: set[str]) -> MachineOf:
    """Start processes on a fake Ray cluster, and return what names the machine of each."""
    cluster = FakeCluster(room=num_processes)
    cluster.alive = nodes
    launcher = launcher_on(cluster, num_processes)
    await launcher.open()
    processes = [await launcher.spawn(("worker", str(number))) for number in range(num_processes)]
    return lambda worker: processes[worker].place


def serving_group() -> Group:
    group = Group(attention=len(HOMES), experts=len(HOLDERS), num_redundant=4)
    group.serve(*HOMES, *HOLDERS)
    return group


def load_of(far_experts: dict[int, range]) -> ExpertLoad:
    """Load of engines that send nearly all their tokens to some experts."""
    tokens = np.ones((len(HOMES), NUM_LAYERS, LAYERS.num_experts))
    for home, experts in far_experts.items():
        tokens[home, :, experts] = 1000
    return ExpertLoad(tokens, np.zeros(tokens.shape[1:]), np.ones(tokens.shape[1:]), 100.0)


def plan_on(group: Group, machine_of: MachineOf, load: ExpertLoad) -> PlacementPlan:
    view = GroupView(async_group(group.coordinator, machine_of), PRICES, PlaceLimits(horizon_steps=1e6))
    request = PlanRequest(view, load, group.coordinator.migration.table)
    return ask_policy("moestro", PLACE_POLICIES.make("moestro"), request)


@pytest.mark.parametrize(("nodes", "moves"), [({"id-0", "id-1"}, True), ({"id-0"}, False)])
def test_experts_move_to_the_machine_whose_engine_sends_them_tokens(nodes, moves):
    async def inside() -> None:
        machine_of, group = await machines_of(4, nodes), serving_group()
        places = async_group(group.coordinator, machine_of).places()
        assert len(set(places.holder_machines.tolist())) == len(nodes)
        near = [machine_of(HOMES[0]) == machine_of(holder) for holder in HOLDERS]
        first, last = range(LAYERS.num_experts // 2), range(LAYERS.num_experts // 2, LAYERS.num_experts)
        # Holder 0 starts with the first experts; each engine wants those of the other machine.
        own, other = (first, last) if near[0] else (last, first)
        plan = plan_on(group, machine_of, load_of({HOMES[0]: other, HOMES[1]: own}))
        assert bool(len(plan.moves)) is moves
        if moves:
            assert plan.change.before.far_share > 0.9
            assert plan.change.after.far_share < 0.1

    asyncio.run(inside())


def test_a_worker_that_restarts_on_another_machine_is_there_from_then_on():
    async def inside() -> None:
        places_of, group = {0: "a", 1: "b", 2: "a", 3: "b"}, serving_group()
        placeable = async_group(group.coordinator, places_of.__getitem__)
        assert placeable.places().holder_machines.tolist() == placeable.places().source_machines.tolist()
        places_of[3] = "a"
        found = placeable.places()
        assert found.holders.tolist() == [0, 1]
        assert len(set(found.holder_machines.tolist())) == 1
        assert len(set(found.source_machines.tolist())) == 2

    asyncio.run(inside())
