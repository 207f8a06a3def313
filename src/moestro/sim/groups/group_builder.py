"""Builds groups of workers: `ep`, `ep-overlap`, `afd` and `async` on the same machines, with the same drawn experts.

Factors on the times of stages make devices slower than others, or vary from stage to stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable
from moestro.cost.drawn_step import Deployment
from moestro.cost.gpus import check_experts_fit, gpu_named, worker_kv_blocks
from moestro.cost.links import (
    ANNOUNCE_REMOTELY_NS,
    FREE,
    FREE_LINK,
    Machines,
    all_to_all_of,
    link_named,
    two_phase,
    with_both_kinds,
)
from moestro.cost.networks import NetworkShape
from moestro.cost.priced_device import HostOverhead
from moestro.cost.roofline import HostCost
from moestro.cost.tables import in_4_bits
from moestro.engine.settings import SchedulerSettings
from moestro.flow.registry import make_step_policy
from moestro.placement.contract import PlaceLimits, even_devices, place_prices
from moestro.placement.settings import LivePlacementSettings
from moestro.sim.groups.group_setup import GroupSetup
from moestro.sim.groups.live_placement import (
    UNBOUNDED_BYTES,
    PlacementSite,
    SimPlacement,
    SimPlacementSettings,
    start_placement,
    with_spare_slots,
)
from moestro.sim.groups.lock_step_group import (
    LOCK_STEP,
    PING_PONG,
    TWO_BATCH_OVERLAP,
    LockStepGroup,
    StepPricing,
    disaggregated,
    expert_parallel,
    with_stalls,
)
from moestro.sim.groups.worker_group import GroupLayout, WorkerGroup
from moestro.sim.settings import PolicySettings, SimEngineSettings

Floats = NDArray[np.float64]

_DRAWS_AT_ONCE = 1024


class StageJitter:
    """Draws factors with mean 1 from a log-normal distribution, which is skewed to the right as kernel times are.

    Args:
        variation: standard deviation of a factor.
        seed: seeds of the draws.
    """

    def __init__(self, variation: float, *seed: int) -> None:
        self._sigma = math.sqrt(math.log1p(variation**2))
        self._rng = np.random.default_rng(seed)

    def __call__(self, shape: tuple[int, ...]) -> Floats:
        """Draw factors, float64[shape]."""
        return self._rng.lognormal(-(self._sigma**2) / 2, self._sigma, shape)

    def one_by_one(self) -> Iterator[float]:
        """Draw factors without end."""
        while True:
            yield from self((_DRAWS_AT_ONCE,)).tolist()


def item_factors(slowdown: float, jitter: StageJitter | None) -> Callable[[], float] | None:
    """Return a source of factors on the items of one worker. None means that all factors are 1.

    Args:
        slowdown: mean factor of the worker.
        jitter: draws that the worker shares with no other. None means no variation.
    """
    if jitter is not None:
        draws = jitter.one_by_one()
        return lambda: slowdown * next(draws)
    return None if slowdown == 1.0 else lambda: slowdown


SimGroup = WorkerGroup | LockStepGroup


def group_kv_blocks(setup: GroupSetup, policy: PolicySettings) -> int:
    """Compute the KV blocks of each attention worker under a policy's division of the workers.

    Raises:
        ConfigError: the weights of a worker do not fit its GPU.
    """
    engines, table = setup.engines, deployment_of(setup, policy).table
    network: NetworkShape = setup.cost.network
    if engines.engine == "qllm":
        network = in_4_bits(network)
    gpu, utilization = gpu_named(engines.gpu), engines.gpu_memory_utilization
    num_slots = table.num_copies.sum(axis=2).max(axis=1) + policy.num_spare_slots
    num_ranks = policy.num_attention_workers(setup.group)
    if engines.num_blocks is not None:
        return engines.num_blocks
    check_experts_fit(network, gpu, int(num_slots.max()), gpu_memory_utilization=utilization)
    return worker_kv_blocks(
        network,
        gpu,
        engines.block_size,
        num_slots=int(num_slots[:num_ranks].max()),
        gpu_memory_utilization=utilization,
    )


def make_group(setup: GroupSetup, policy: PolicySettings, bounds: SchedulerSettings, number: int) -> SimGroup:
    """Build one group.

    Args:
        setup: what all groups have in common.
        policy: mode, and division of the workers.
        bounds: scheduler settings of each attention worker.
        number: number of the group, which seeds its jitter.
    """
    deployment = deployment_of(setup, policy)
    if policy.mode == "async":
        return WorkerGroup(bounds, _layout(setup, policy, deployment.table, number), lambda _: setup.cost)
    jitter = setup.group.jitter
    uneven = replace(
        deployment,
        slowdown=setup.slowdown,
        jitter=StageJitter(jitter, setup.seed, number) if jitter else None,
        host=_host(setup.engines),
    )
    if not policy.plans_placement:
        return LockStepGroup(bounds, uneven, pricing_of(policy))
    placement = _placement(setup, policy, deployment.table)
    return LockStepGroup(bounds, replace(uneven, table=placement.table), pricing_of(policy), placement)


def _placement(setup: GroupSetup, policy: PolicySettings, table: ExpertTable) -> SimPlacement:
    """Make the live placement of a group whose workers all have attention and experts."""
    gpu, machines = gpu_named(setup.engines.gpu), _machines(setup, policy)
    devices = even_devices(len(table.logical_of), table.logical_of.shape[2] + policy.num_spare_slots)
    devices = replace(devices, node_of=np.array(machines.machine_of, np.int32), speed=1 / setup.slowdown)
    site = PlacementSite(
        devices=devices,
        prices=place_prices(setup.cost.network, gpu, machines.within, machines.across),
        limits=PlaceLimits(horizon_steps=policy.place_interval_steps),
    )
    settings = SimPlacementSettings(
        live=LivePlacementSettings(
            placement_policy=policy.place,
            placement_interval=policy.place_interval_steps,
            placement_drift=policy.place_drift,
            placement_payback_horizon=policy.payback_horizon_steps,
            placement_max_bytes_per_step=policy.place_bytes_per_step or UNBOUNDED_BYTES,
        ),
        first_steps=policy.place_interval_steps // 4,
        is_synchronous=policy.place_bytes_per_step is None,
    )
    table = with_spare_slots(table, policy.num_spare_slots)
    return start_placement(setup.gate(), table, setup.cost.network.expert_layers, site, settings)


def deployment_of(setup: GroupSetup, policy: PolicySettings) -> Deployment:
    """Spread attention and experts over the workers of a group as `policy` has it, without host and unevenness."""
    cost, num_ranks = setup.cost, policy.num_attention_workers(setup.group)
    exchange = FREE if policy.free_links else all_to_all_of(_machines(setup, policy), cost.network)
    if policy.num_expert_workers:
        return disaggregated(cost, setup.gate(), num_ranks, policy.num_expert_workers, exchange)
    return expert_parallel(cost, setup.gate(), num_ranks, exchange)


def _machines(setup: GroupSetup, policy: PolicySettings) -> Machines:
    group = setup.group
    within, across = link_named(group.link_within), link_named(group.link_across)
    if policy.mode == "async" and group.two_phase:
        within, across = two_phase(within), two_phase(across, ANNOUNCE_REMOTELY_NS)
    if policy.free_links:
        within = across = FREE_LINK
    machines = Machines(machine_of=group.machine_of, within=within, across=across)
    if not policy.num_expert_workers:
        return machines
    return with_both_kinds(machines, policy.num_attention_workers(group), policy.num_expert_workers)


def _layout(setup: GroupSetup, policy: PolicySettings, table: ExpertTable, number: int) -> GroupLayout:
    num_homes, slowdown, group = policy.num_attention_workers(setup.group), setup.slowdown, setup.group
    engines = setup.engines

    def factor_of(worker: int) -> Callable[[], float] | None:
        jitter = StageJitter(group.jitter, setup.seed, number, worker) if group.jitter else None
        return item_factors(float(slowdown[worker]), jitter)

    return GroupLayout(
        num_homes=num_homes,
        table=table,
        machines=_machines(setup, policy),
        gate=setup.gate(),
        policy_of=lambda worker: make_step_policy(
            policy.attention_step_policy if worker < num_homes else policy.expert_step_policy, policy.max_be_wait
        ),
        host=HostOverhead(
            attention_ns=round(engines.host_attention_us * 1e3), expert_ns=round(engines.host_expert_us * 1e3)
        ),
        launch_ahead=policy.launch_ahead,
        num_credits=policy.num_credits,
        factor_of=factor_of,
    )


def _host(engines: SimEngineSettings) -> HostCost:
    return HostCost(step_ns=(engines.host_step_us or 0) * 1e3, sequence_ns=(engines.host_sequence_us or 0) * 1e3)


def pricing_of(policy: PolicySettings) -> StepPricing:
    """Return the baseline of a mode in lock-step."""
    if policy.mode == "afd":
        return PING_PONG
    if policy.mode == "ep-overlap":
        return TWO_BATCH_OVERLAP
    return LOCK_STEP if policy.stall_share is None else with_stalls(policy.stall_share)
