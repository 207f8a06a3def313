"""Builds groups of workers: `ep`, `ep-overlap`, `afd` and `async` on the same machines, with the same drawn experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable
from moestro.cost.capacity import check_experts_fit, worker_kv_blocks
from moestro.cost.collectives import FREE, all_to_all_of
from moestro.cost.drawn_step import Deployment
from moestro.cost.gate import PopularityGate
from moestro.cost.gpus import gpu_named
from moestro.cost.links import ANNOUNCE_REMOTELY_NS, FREE_LINK, Machines, link_named, two_phase, with_both_kinds
from moestro.cost.model import StageCostModel
from moestro.cost.networks import ExpertShape, NetworkShape
from moestro.cost.popularity import PopularityForm
from moestro.cost.priced_stages import HostOverhead
from moestro.cost.roofline import HostCost
from moestro.cost.staged_engines import in_4_bits
from moestro.engine.settings import SchedulerSettings
from moestro.errors import ConfigError
from moestro.flow.registry import make_step_policy
from moestro.placement.contract import PlaceLimits, even_devices, place_prices
from moestro.placement.settings import LivePlacementSettings
from moestro.sim.engine_prices import default_popularity, stage_cost
from moestro.sim.groups.baselines import (
    LOCK_STEP,
    PING_PONG,
    TWO_BATCH_OVERLAP,
    StepPricing,
    disaggregated,
    expert_parallel,
    with_stalls,
)
from moestro.sim.groups.group_settings import GroupSettings
from moestro.sim.groups.live_placement import (
    UNBOUNDED_BYTES,
    PlacementSite,
    SimPlacement,
    SimPlacementSettings,
    with_spare_slots,
)
from moestro.sim.groups.lock_step_group import LockStepGroup
from moestro.sim.groups.offline_routing import start_placement
from moestro.sim.groups.uneven_devices import StageJitter, item_factors
from moestro.sim.groups.worker_group import GroupLayout, WorkerGroup
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings

SimGroup = WorkerGroup | LockStepGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupSetup:
    """What the groups of all policies have in common.

    Attributes:
        group: workers and links.
        engines: limits of the schedulers, GPU, and host times.
        cost: prices of the stages.
        popularity: popularity of the experts.
        seed: seed of the experts that tokens visit, and of jitter.
    """

    group: GroupSettings
    engines: SimEngineSettings
    cost: StageCostModel
    popularity: PopularityForm
    seed: int

    @property
    def experts(self) -> ExpertShape:
        """Experts of the network."""
        experts = self.cost.network.experts
        assert experts is not None, "checked by make_group_setup"
        return experts

    def gate(self, popularity: PopularityForm | None = None) -> PopularityGate:
        """Make the gate that draws each token's experts, of this or another popularity."""
        form, network = popularity or self.popularity, self.cost.network
        by_layer = form.by_layer(network.num_layers, self.experts.num_experts)
        return PopularityGate(by_layer, self.experts.top_k, self.seed)

    @property
    def slowdown(self) -> NDArray[np.float64]:
        """float64[workers], factor on the stage times of each worker."""
        given = self.group.slowdown
        return np.array([*given, *[1.0] * (self.group.num_workers - len(given))])


def make_group_setup(settings: SimSettings) -> GroupSetup | None:
    """Prepare the groups of a simulation. None means that no policy needs groups.

    Raises:
        ConfigError: the network has no experts, or a name is unknown.
    """
    if settings.group is None or not any(policy.has_group for policy in settings.policies):
        return None
    cost = stage_cost(settings.engines, settings.popularity)
    if cost.network.experts is None:
        raise ConfigError(f"[group] spreads experts over workers, and {cost.network.name} has none")
    return GroupSetup(
        group=settings.group,
        engines=settings.engines,
        cost=cost,
        popularity=settings.popularity or default_popularity(settings.engines),
        seed=settings.seed,
    )


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
