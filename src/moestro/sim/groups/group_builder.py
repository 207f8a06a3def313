"""Builds groups of workers: `ep`, `ep-overlap`, `afd` and `async` on the same machines, with the same drawn experts.

Cost models are those that the settings of engines name. Factors on the times of stages make devices slower than others,
or vary from stage to stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable
from moestro.cost.drawn_step import Deployment
from moestro.cost.gate import PopularityGate
from moestro.cost.gpus import check_experts_fit, gpu_named, worker_kv_blocks
from moestro.cost.links import (
    ANNOUNCE_REMOTELY_NS,
    FREE,
    FREE_LINK,
    Machines,
    all_reduce,
    all_to_all_of,
    link_named,
    two_phase,
    with_both_kinds,
)
from moestro.cost.model import AMOE_RATE, PopularityForm, StageCostModel, even_gating
from moestro.cost.networks import ExpertShape, NetworkShape, network_share
from moestro.cost.priced_device import HostOverhead
from moestro.cost.roofline import VLLM_HOST, HostCost, Roofline, RooflineSettings
from moestro.cost.settings import link_within, read_network
from moestro.cost.tables import QLLM, MeasuredCost, OtherGpuCost, StagedEngine, Table, amoe, in_4_bits, load_table
from moestro.engine.settings import SchedulerSettings
from moestro.errors import ConfigError
from moestro.flow.registry import make_step_policy
from moestro.placement.contract import PlaceLimits, even_devices, place_prices
from moestro.placement.settings import LivePlacementSettings
from moestro.sim.groups.group import Barrier, OneRank, Prices
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
from moestro.sim.settings import GroupSettings, PolicySettings, SimEngineSettings, SimSettings

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


def make_prices(
    engines: SimEngineSettings, directory: Path = Path(), popularity: PopularityForm | None = None
) -> Prices:
    """Choose the prices of the steps of engines in `fused` mode: a table, a staged engine, or a roofline.

    Args:
        engines: settings of the engines.
        directory: directory of relative paths.
        popularity: popularity of the experts. None means that of the cost model.
    """
    if engines.table is not None:
        table = load_table(directory / engines.table)
        return OneRank(_table_cost(engines, table), copies_beside=table.device != "cpu")
    cost = stage_cost(engines, popularity)
    return Barrier(cost) if isinstance(cost, Roofline) and engines.ep_ranks > 1 else OneRank(cost)


def kv_token_bytes(engines: SimEngineSettings, directory: Path = Path()) -> float:
    """Return the bytes of a token's KV in the engines' memory.

    Raises:
        ConfigError: the engines have host memory, and their table does not say what a copy costs.
    """
    if engines.table is None:
        return network_of(engines).kv_bytes_per_token
    if not engines.kv_offloading_size:
        return 0.0
    copies = load_table(directory / engines.table).copies
    if copies is None:
        raise ConfigError(
            f"[engines] kv_offloading_size = {engines.kv_offloading_size:g} needs the price of a copy, which table"
            f" {engines.table} lacks: measure it again with moestro calibrate, which adds it, or drop the size"
        )
    return copies.token_bytes


def stage_cost(engines: SimEngineSettings, popularity: PopularityForm | None = None) -> Roofline | StagedEngine:
    """Return the prices of stages: a staged engine, or a roofline.

    Raises:
        ConfigError: a staged engine is to run a network without experts, or a name is unknown.
    """
    network = network_of(engines)
    by_rank = None if popularity is None or not network.experts else popularity.by_rank(network.experts.num_experts)
    if engines.engine is not None and network.experts is None:
        raise ConfigError(
            f"[engines] engine = {engines.engine!r} runs networks with experts, and {network.name} has none"
        )
    if engines.engine == "amoe":
        return amoe(network, gpu_named(engines.gpu))
    if engines.engine == "qllm":
        return StagedEngine(QLLM, network, popularity=by_rank)
    host = HostCost(
        step_ns=VLLM_HOST.step_ns if engines.host_step_us is None else engines.host_step_us * 1e3,
        sequence_ns=VLLM_HOST.sequence_ns if engines.host_sequence_us is None else engines.host_sequence_us * 1e3,
    )
    gating = None
    if by_rank is not None and network.experts is not None:
        gating = even_gating(by_rank, network.experts.top_k, engines.ep_ranks)
    gpu, reduced = gpu_named(engines.gpu), None
    if engines.tensor_parallel_size > 1:
        reduced = all_reduce(link_within(engines.link_within, gpu), network, engines.tensor_parallel_size)
    return Roofline(
        RooflineSettings(
            network=network, gpu=gpu, host=host, num_ep_ranks=engines.ep_ranks, gating=gating, all_reduce=reduced
        )
    )


def network_of(engines: SimEngineSettings) -> NetworkShape:
    """Return the network as one GPU of a rank computes and holds it, beside experts that are spread over ranks.

    Raises:
        ConfigError: the network is unknown, or a size of it is not divisible by the GPUs.
    """
    network = read_network(engines.network)
    return network if engines.tensor_parallel_size == 1 else network_share(network, engines.tensor_parallel_size)


def _table_cost(engines: SimEngineSettings, table: Table) -> MeasuredCost | OtherGpuCost:
    measured = MeasuredCost(table)
    if engines.table_gpu is None or gpu_named(engines.table_gpu) is gpu_named(engines.gpu):
        return measured
    here, there = (
        Roofline(RooflineSettings(network=read_network(engines.network), gpu=gpu_named(name)))
        for name in (engines.table_gpu, engines.gpu)
    )
    return OtherGpuCost(measured, here, there)


def default_popularity(engines: SimEngineSettings) -> PopularityForm:
    """Return the popularity of the experts that a group's prices imply: AMoE's fit, or the roofline's."""
    if engines.engine == "amoe":
        return PopularityForm(family="exponential", skew=AMOE_RATE)
    return PopularityForm()


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
