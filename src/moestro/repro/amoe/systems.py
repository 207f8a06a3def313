"""The systems that are compared: groups of workers on virtual time, and the bound on the throughput of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable, spread_evenly
from moestro.core.views import QueueTable, Run, StepFunction, StepPolicy, Wait
from moestro.cost.drawn_step import Deployment
from moestro.cost.gate import PopularityGate
from moestro.cost.gpus import Gpu, check_experts_fit, gpu_named, kv_blocks, worker_kv_blocks
from moestro.cost.links import (
    ANNOUNCE_REMOTELY_NS,
    EFA_P4D,
    NVSWITCH_A100,
    Machines,
    all_reduce,
    all_to_all_of,
    two_phase,
    with_both_kinds,
)
from moestro.cost.model import AMOE_RATE, Batch, PopularityForm, StageCostModel
from moestro.cost.networks import NetworkShape, network_named, network_share
from moestro.cost.priced_device import HostOverhead
from moestro.cost.roofline import VLLM_HOST, HostCost, Kernels, Roofline, RooflineSettings
from moestro.cost.tables import AMOE, StagedEngine, amoe
from moestro.engine.settings import SchedulerSettings
from moestro.errors import ConfigError
from moestro.flow.registry import make_step_policy
from moestro.sim.groups.group import Ranks
from moestro.sim.groups.group_builder import StageJitter, item_factors
from moestro.sim.groups.group_figures import drawn_visits, least_times, least_work_ns, throughput_bound
from moestro.sim.groups.lock_step_group import (
    LOCK_STEP,
    PING_PONG,
    TWO_BATCH_OVERLAP,
    LockStepGroup,
    StepPricing,
    plain_replica,
    with_stalls,
)
from moestro.sim.groups.worker_group import GroupLayout, WorkerGroup

# AMoE's testbeds: a network, GPUs on machines, a popularity of experts, and the prices of stages.

Popularity = Literal["uniform", "same", "permuted"]
Prices = Literal["prototype", "kernels"]

BLOCK_SIZE = 16
# Host time of an item beside the roofline's kernels: the budgets of our own engine, not yet measured on a GPU.
OUR_HOST = HostOverhead(attention_ns=250_000, expert_ns=100_000)
NO_STEP_HOST = HostCost(step_ns=0, sequence_ns=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """One testbed.

    Attributes:
        network, gpu: names of the network and the GPU.
        num_gpus: number of GPUs.
        gpus_per_machine: GPUs of one machine.
        popularity: load of experts: `uniform`; `same`, exponential with the same hot experts in all layers; `permuted`,
            exponential with hot experts shuffled in each layer.
        prices: `prototype`, the times of AMoE's prototype, which include its host; `kernels`, a roofline's kernels with
            the host of our engine, or of vLLM in lock-step.
    """

    network: str = "mixtral-8x7b-mqa-top1"
    gpu: str = "a100-80g"
    num_gpus: int = 8
    gpus_per_machine: int = 8
    popularity: Popularity = "same"
    prices: Prices = "prototype"

    @property
    def shape(self) -> NetworkShape:
        """The network."""
        return network_named(self.network)

    @property
    def device(self) -> Gpu:
        """The GPU."""
        return gpu_named(self.gpu)

    def gate(self, seed: int) -> PopularityGate:
        """The gate, equal for every system under a seed."""
        experts = self.shape.experts
        assert experts is not None, "AMoE runs Mixture-of-Experts networks"
        form = PopularityForm(
            family="uniform" if self.popularity == "uniform" else "exponential",
            skew=AMOE_RATE,
            hot_ids="permuted" if self.popularity == "permuted" else "same",
            seed=seed,
        )
        return PopularityGate(form.by_layer(self.shape.num_layers, experts.num_experts), experts.top_k, seed)

    def cost(self, num_tp_gpus: int = 1) -> StageCostModel:
        """The prices of one GPU's stages.

        Args:
            num_tp_gpus: GPUs that share every product. The prototype's attention is not divided, because its time is
                mostly page tables and post-processing, which every GPU does.
        """
        share = self.shape if num_tp_gpus == 1 else network_share(self.shape, num_tp_gpus)
        if self.prices == "kernels":
            return Roofline(RooflineSettings(network=share, gpu=self.device, host=NO_STEP_HOST))
        if num_tp_gpus == 1:
            return amoe(share, self.device)
        times = replace(
            AMOE,
            expert_row_ns=AMOE.expert_row_ns / num_tp_gpus,
            expert_read_ns=Kernels(share, self.device, num_ep_ranks=1).one_expert_ns(1),
        )
        return StagedEngine(times, share, self.device)

    def table(self, holders: Sequence[int], num_workers: int, seed: int) -> ExpertTable:
        """Place the experts on the workers `holders`, evenly whatever the seed of the gate."""
        del seed
        network = self.shape
        assert network.experts is not None, "AMoE runs Mixture-of-Experts networks"
        return spread_evenly(network.num_layers, network.experts.num_experts, list(holders), num_workers)

    @property
    def slowdown(self) -> NDArray[np.float64] | None:
        """float64[num_gpus], factor on the times of each GPU. None means 1 for all."""
        return None

    def jitter(self, *seed: int) -> StageJitter | None:
        """Draws of factors on stage times. None means that stages of a size take equally long."""
        return None

    @property
    def item_host(self) -> HostOverhead:
        """Host time of an item in `async`; the prototype's prices contain it."""
        return OUR_HOST if self.prices == "kernels" else HostOverhead()

    @property
    def step_host(self) -> HostCost:
        """Host time of a step in lock-step."""
        return VLLM_HOST if self.prices == "kernels" else NO_STEP_HOST

    def machines(self, *, announces: bool) -> Machines:
        """The machines and their links.

        Args:
            announces: whether messages have AMoE's two phases, as between its workers, or one, as in a collective.
        """
        within, across = NVSWITCH_A100, EFA_P4D
        if announces:
            within, across = two_phase(within), two_phase(across, ANNOUNCE_REMOTELY_NS)
        machine_of = tuple(gpu // self.gpus_per_machine for gpu in range(self.num_gpus))
        return Machines(machine_of=machine_of, within=within, across=across)


class ItemTally:
    """Counts items and their tokens over any number of workers, without the samplers'.

    Attributes:
        num_items: items that policies chose while counting.
        num_tokens: tokens in them.
        is_counting: whether choices are counted.
    """

    def __init__(self) -> None:
        self.num_items = self.num_tokens = 0
        self.is_counting = False

    def watched(self, policy: StepPolicy) -> StepPolicy:
        """Return a policy that chooses as `policy`, and counts."""

        def choose(view: QueueTable, now_ns: int) -> Run | Wait:
            answer = policy(view, now_ns)
            if self.is_counting and isinstance(answer, Run) and answer.layer < view.n.shape[1] - 1:  # no sampler
                waiting = sum(int(view.n[each, answer.layer, answer.group]) for each in answer.classes)
                self.num_items += 1
                self.num_tokens += min(waiting, answer.max_rows)
            return answer

        return StepFunction(choose, policy.overlaps_prefill)


Int64s = NDArray[np.int64]

ASYNC, PAIRED, COLOCATED, EP, EP_STALLS = "async", "async_paired", "async_colocated", "ep", "ep_stalls"
OVERLAP, PING_PONG_NAME, REPLICAS = "ep_overlap", "ping_pong", "replicas"
BASELINES = (EP, EP_STALLS, OVERLAP, PING_PONG_NAME, REPLICAS)
ABOUT = {
    ASYNC: "AMoE: half of the GPUs attention, half experts; async:POLICY names the step policy, async:2+6 the workers",
    PAIRED: "async with a hot and a cold expert on each GPU, which helps where the same are hot in all layers",
    COLOCATED: "async with attention and experts on every GPU",
    EP: "ideal lock-step expert parallelism on all GPUs, with the same prices of stages",
    EP_STALLS: "ep whose GPUs stall for 70 % of the time, as AMoE publishes for SGLang",
    OVERLAP: "ep with two-batch overlap, where it is faster",
    PING_PONG_NAME: "attention and experts on separate GPUs in lock-step, with the best of 1 to 3 micro-batches",
    REPLICAS: "replicas without expert parallelism, each on as few GPUs as hold the network, with tensor parallelism",
}
# SGLang's largest default for --max-running-requests (ModelRunner.init_memory_pool). AMoE has no limit but KV memory.
MAX_NUM_SEQS = 4096
_NO_LIMIT = 1 << 30
_DEFRAG = "defrag"  # Algorithm 1 with the constants of AMoE's code


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """One system, ready to serve.

    Attributes:
        groups: its ranks.
        num_seats: ranks that take requests.
        most_requests: requests that fit at once, by the limit on sequences and by KV memory.
        busy_ns: returns the time for which each worker has computed so far, int64[workers].
        tallies: items of attention workers and of expert workers; none in lock-step.
        bound: returns the output tokens a second that no scheduler exceeds on these workers.
    """

    groups: list[Ranks]
    num_seats: int
    most_requests: int
    busy_ns: Callable[[], Int64s]
    tallies: tuple[ItemTally, ItemTally] | None
    bound: Callable[[], float]


def build(system: str, bed: Bed, lengths: tuple[float, int], seed: int) -> Built:
    """Build a system on a testbed.

    Args:
        system: a name of `ABOUT`.
        lengths: mean context of a decoding request, and most tokens that a request may ask for.
        seed: seed of the gate.

    Raises:
        ConfigError: the name is unknown, or the network does not fit.
    """
    kind, _, form = system.partition(":")
    if kind not in ABOUT or (form and kind not in {ASYNC, PAIRED, COLOCATED}):
        raise ConfigError(f"no system {kind!r}; known: {', '.join(ABOUT)}")
    site = _Site(bed, lengths[0], lengths[1], seed)
    if kind in {ASYNC, PAIRED, COLOCATED}:
        return _workers(kind, form, site)
    return _replicas(site) if kind == REPLICAS else _lock_step(kind, site)


@dataclass(frozen=True, slots=True, eq=False)
class _Site:
    """A testbed, the mean context, the longest request, and the seed."""

    bed: Bed
    mean_context: float
    longest: int
    seed: int

    def settings(self, num_blocks: int) -> SchedulerSettings:
        return SchedulerSettings(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=min(self.longest, num_blocks * BLOCK_SIZE),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_SEQS,  # requests arrive with the KV of their prompts
            max_num_queued_reqs=_NO_LIMIT,
            enable_prefix_caching=False,
        )

    def most_requests(self, num_blocks: int) -> int:
        return min(MAX_NUM_SEQS, int(num_blocks * BLOCK_SIZE // self.mean_context))

    def bound(self, cost: StageCostModel, table: ExpertTable, num_ranks: int) -> float:
        start = np.full(MAX_NUM_SEQS, round(self.mean_context), np.int64)
        times = least_times(cost, Batch(start, np.ones_like(start)), 2 * MAX_NUM_SEQS)
        visits = drawn_visits(self.bed.gate(self.seed), cost.network.num_layers)
        slowdown = self.bed.slowdown if len(table.logical_of) == self.bed.num_gpus else None
        return throughput_bound(least_work_ns(visits, times, table, range(num_ranks), slowdown))


# --- async ------------------------------------------------------------------------------------------------------------


def _workers(kind: str, form: str, site: _Site) -> Built:
    bed, network = site.bed, site.bed.shape
    policy, (num_homes, num_expert_workers) = _workers_of(form, bed.num_gpus)
    if kind == COLOCATED:
        num_homes, num_expert_workers = bed.num_gpus, 0
    table = _table(site, num_homes, is_paired=kind == PAIRED)
    num_slots = table.logical_of.shape[2]
    check_experts_fit(network, bed.device, num_slots)
    num_blocks = worker_kv_blocks(network, bed.device, BLOCK_SIZE, num_slots=0 if num_expert_workers else num_slots)
    tallies = (ItemTally(), ItemTally())

    def policy_of(worker: int) -> StepPolicy:
        return tallies[int(worker >= num_homes)].watched(make_step_policy(policy, float("inf")))

    cost, machines = bed.cost(), bed.machines(announces=True)
    if num_expert_workers:
        machines = with_both_kinds(machines, num_homes, num_expert_workers)

    def factor_of(worker: int) -> Callable[[], float] | None:
        slowdown = 1.0 if bed.slowdown is None else float(bed.slowdown[worker])
        return item_factors(slowdown, bed.jitter(site.seed, worker))

    layout = GroupLayout(
        num_homes=num_homes,
        table=table,
        machines=machines,
        gate=bed.gate(site.seed),
        policy_of=policy_of,
        host=bed.item_host,
        launch_ahead=2 if bed.prices == "kernels" else 1,  # AMoE's prototype prepares an item after the one before
        factor_of=factor_of,
    )
    group = WorkerGroup(site.settings(num_blocks), layout, lambda _: cost)
    return Built(
        [group], num_homes, num_homes * site.most_requests(num_blocks),
        lambda: np.array([device.busy_ns for device in group.devices], np.int64), tallies,
        lambda: site.bound(cost, table, num_homes),
    )  # fmt: skip


def _workers_of(form: str, num_gpus: int) -> tuple[str, tuple[int, int]]:
    """The step policy and the numbers of attention and expert workers that the text after `async:` names."""
    homes, plus, experts = form.partition("+")
    if plus and homes.isdigit() and experts.isdigit():
        if int(homes) + int(experts) != num_gpus:
            raise ConfigError(f"async:{form} has other than {num_gpus} workers")
        return _DEFRAG, (int(homes), int(experts))
    return form or _DEFRAG, (num_gpus // 2, num_gpus - num_gpus // 2)


def _table(site: _Site, num_homes: int, *, is_paired: bool) -> ExpertTable:
    bed = site.bed
    holders = list(range(num_homes % bed.num_gpus, bed.num_gpus))
    table = bed.table(holders, bed.num_gpus, site.seed)
    if is_paired:
        num_experts, logical_of = table.num_experts, table.logical_of.copy()
        assert num_experts == 2 * len(holders), "pairs need two experts for each worker"
        logical_of[holders, :, 0] = np.arange(len(holders), dtype=np.int32)[:, None]
        logical_of[holders, :, 1] = np.arange(num_experts - 1, len(holders) - 1, -1, dtype=np.int32)[:, None]
        table = ExpertTable(0, logical_of, num_experts, table.is_alive)
    return table


# --- lock-step --------------------------------------------------------------------------------------------------------

_PRICINGS: dict[str, StepPricing] = {
    EP: LOCK_STEP, EP_STALLS: with_stalls(), OVERLAP: TWO_BATCH_OVERLAP, PING_PONG_NAME: PING_PONG,
}  # fmt: skip


def _lock_step(kind: str, site: _Site) -> Built:
    bed, network, cost = site.bed, site.bed.shape, site.bed.cost()
    is_apart = kind == PING_PONG_NAME
    num_ranks = bed.num_gpus // 2 if is_apart else bed.num_gpus
    machines = bed.machines(announces=False)
    if is_apart:
        machines = with_both_kinds(machines, num_ranks, bed.num_gpus - num_ranks)
    deployment = Deployment(
        cost=cost,
        gate=bed.gate(site.seed),
        table=bed.table(range(num_ranks if is_apart else 0, bed.num_gpus), bed.num_gpus, site.seed),
        num_ranks=num_ranks,
        exchange=all_to_all_of(machines, network),
        host=bed.step_host,
        slowdown=bed.slowdown,
        jitter=bed.jitter(site.seed),
    )
    num_slots = deployment.table.logical_of.shape[2]
    check_experts_fit(network, bed.device, num_slots)
    num_blocks = worker_kv_blocks(network, bed.device, BLOCK_SIZE, num_slots=0 if is_apart else num_slots)
    group = LockStepGroup(site.settings(num_blocks), deployment, _PRICINGS[kind])
    return Built(
        [group], num_ranks, num_ranks * site.most_requests(num_blocks), group.busy_ns.copy, None,
        lambda: site.bound(cost, deployment.table, num_ranks),
    )  # fmt: skip


def _replicas(site: _Site) -> Built:
    bed, network = site.bed, site.bed.shape
    num_gpus, num_blocks = _smallest_replica(bed)
    cost = bed.cost(num_gpus)
    exchange = all_reduce(bed.machines(announces=False).within, network, num_gpus)
    deployment = replace(plain_replica(cost, bed.gate(site.seed), exchange), host=bed.step_host)
    num_replicas = bed.num_gpus // num_gpus
    slowest = np.ones(num_replicas) if bed.slowdown is None else bed.slowdown.reshape(num_replicas, -1).max(axis=1)
    groups = [
        LockStepGroup(
            site.settings(num_blocks),
            replace(deployment, jitter=bed.jitter(site.seed, replica), slowdown=slowest[replica : replica + 1]),
        )
        for replica in range(num_replicas)
    ]
    return Built(
        list(groups), num_replicas, num_replicas * site.most_requests(num_blocks),
        lambda: np.concatenate([group.busy_ns for group in groups]), None,
        lambda: float((1 / slowest).sum()) * site.bound(cost, deployment.table, 1),
    )  # fmt: skip


def _smallest_replica(bed: Bed) -> tuple[int, int]:
    """GPUs of the smallest replica that holds the network, and the KV blocks of each."""
    num_gpus = 1
    while num_gpus <= bed.num_gpus:
        share = bed.shape if num_gpus == 1 else network_share(bed.shape, num_gpus)
        try:
            return num_gpus, kv_blocks(share, bed.device, BLOCK_SIZE)
        except ConfigError:
            num_gpus *= 2
    raise ConfigError(f"{bed.network} does not fit {bed.num_gpus} {bed.gpu}")
