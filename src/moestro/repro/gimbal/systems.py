"""The systems that are compared: a policy for each level, and how weights move."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import spread_evenly
from moestro.cost.drawn_step import Deployment
from moestro.cost.gate import AheadGate, Gate, PopularityGate, RecordedGate
from moestro.cost.gpus import Gpu, gpu_named, worker_kv_blocks
from moestro.cost.links import INFINIBAND_HDR, NVSWITCH_A100, Collective, MachinesAllToAll, all_to_all, pplx_all_to_all
from moestro.cost.model import PopularityForm
from moestro.cost.networks import NetworkShape, network_named
from moestro.cost.roofline import VLLM_HOST, HostCost, Roofline, RooflineSettings
from moestro.engine.settings import SchedulerSettings
from moestro.placement.contract import PlaceLimits, even_devices, place_prices
from moestro.placement.live.control import CHECK_NS
from moestro.placement.settings import LivePlacementSettings
from moestro.sim.groups.live_placement import (
    UNBOUNDED_BYTES,
    PlacementSite,
    SimPlacement,
    SimPlacementSettings,
    start_placement,
    with_spare_slots,
)
from moestro.sim.groups.lock_step_group import LOCK_STEP, LockStepGroup, slowed
from moestro.workload.experts.expert_profile import RoutingTrace
from moestro.workload.rows import Rows

# A step of two ranks takes 10 to 100 ms. 64 MiB cross NVLink in 0.5 ms, so moving lengthens a step by 5 % at most.
BUDGET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A policy for each level.

    Attributes:
        about: the system in a line.
        route: routing policy (level 1).
        order: order of each rank's queue (level 2).
        place: placement policy (level 4).
        bytes_per_step: weights that a device receives between two steps. None means that one step waits for all.
        has_payback_gate: whether a plan that does not pay within the interval is dropped, as `moestro serve` does; vLLM
            and Gimbal have no such gate.
        knows_users: whether requests name their users.
    """

    about: str
    route: str = "round_robin"
    order: str = "fcfs"
    place: str = "static"
    bytes_per_step: int | None = None
    has_payback_gate: bool = False
    knows_users: bool = True


VLLM, VLLM_LEAST, VLLM_EPLB = "vllm", "vllm_least", "vllm_eplb"
DPLB, SJFS, EDR = "dplb", "sjfs", "edr"
GIMBAL_V1, GIMBAL_V2, MOESTRO = "gimbal_v1", "gimbal_v2", "moestro"
V1_NO_USERS = "gimbal_v1_no_users"
ROUTE, ORDER, PLACE = "moestro_route", "moestro_order", "moestro_place"

SYSTEMS: dict[str, System] = {
    VLLM: System(about="vLLM as the paper describes it: round robin, first come first served, experts in order"),
    VLLM_LEAST: System(about="vLLM as its code has it: its own balancer of waiting and running", route="vllm-0.26"),
    VLLM_EPLB: System(about="vllm_least with EPLB, all layers at once", route="vllm-0.26", place="eplb"),
    DPLB: System(about="vLLM with Algorithm 1 of Gimbal v1", route="gimbal-v1"),
    SJFS: System(about="vLLM with Algorithm 2 of Gimbal v1", order="sjf"),
    EDR: System(about="vLLM with Algorithm 3 of Gimbal v1", place="gimbal_v1"),
    GIMBAL_V1: System(about="Gimbal v1: Algorithms 1 to 3", route="gimbal-v1", order="sjf", place="gimbal_v1"),
    GIMBAL_V2: System(
        about="Gimbal v2, our reconstruction from its abstract",
        route="gimbal-v2", order="prefill_aware", place="gimbal_v2",
    ),
    MOESTRO: System(
        about="Moestro: its own routing and placement, least uncached prefill first, weights in small parts",
        route="moestro", order="prefill_aware", place="moestro", bytes_per_step=BUDGET_BYTES, has_payback_gate=True,
    ),
    ROUTE: System(about="vllm_eplb with Moestro's routing alone", route="moestro", place="eplb"),
    ORDER: System(about="vllm_eplb with Moestro's order alone", route="vllm-0.26", order="prefill_aware", place="eplb"),
    PLACE: System(
        about="vllm_eplb with Moestro's placement alone, weights in small parts",
        route="vllm-0.26", place="moestro", bytes_per_step=BUDGET_BYTES, has_payback_gate=True,
    ),
}  # fmt: skip
SYSTEMS[V1_NO_USERS] = replace(
    SYSTEMS[GIMBAL_V1], about="Gimbal v1 without user affinity: requests name no users", knows_users=False
)
_LOADS = ("static", "eplb", "gimbal_v1", "gimbal_v2", "moestro")
# Placement alone, under the router of the part: `place:POLICY`.
for _name in _LOADS:
    SYSTEMS[f"place:{_name}"] = System(
        about=f"users stay on their rank; placement by {_name}",
        route="user_affinity",
        place=_name,
        bytes_per_step=BUDGET_BYTES if _name == "moestro" else None,
        has_payback_gate=_name == "moestro",
    )

TABLE = (VLLM, VLLM_LEAST, DPLB, SJFS, EDR, GIMBAL_V1, GIMBAL_V2, MOESTRO)  # of the latency tables
PLACEMENTS = tuple(f"place:{name}" for name in _LOADS)
STACK = (VLLM_EPLB, ROUTE, ORDER, PLACE, MOESTRO)


# Testbeds of expert-parallel ranks whose placement is planned anew while they serve.

BLOCK_SIZE = 16
_NO_STEP_HOST = HostCost(step_ns=0, sequence_ns=0)  # the host is priced once for a step of all ranks
Routing = Literal["drawn", "recorded", "shifted"]
_PERMUTED = PopularityForm(hot_ids="permuted")  # Zipf with exponent 0.6, other hot experts in each layer


@dataclass(frozen=True, slots=True, kw_only=True)
class EpBed:
    """Ranks in lock-step that share the experts, each with attention over its own requests.

    Attributes:
        network, gpu: names of the network and the GPU.
        num_ranks: ranks, one GPU each.
        num_machines: machines among which they are spread evenly.
        popularity: popularity of the experts where they are drawn. The form is an assumption, which the part `skew`
            varies. Two snapshots of one layer of Qwen3-30B-A3B are public, of 1,024 and of 64 tokens: their hottest
            experts have 12.7 and 10.5 times the mean (stanford-ppl/step_artifact).
        routing: `recorded` takes the choices of a recording, `shifted` takes each layer's from other tokens, so that
            layers have no affinity, and `drawn` draws by popularity.
        num_spares: slots of each GPU and layer beyond its share of the experts.
        num_blocks: KV blocks of a rank. None means as many as fit beside the weights.
        max_num_seqs, max_num_batched_tokens: vLLM's defaults for an A100; the paper keeps the defaults.
        has_cache: whether prefixes are cached.
        interval_steps: steps between two plans (tau). The first plan comes after a quarter of them, as in vLLM.
        slowdown: factor on the time of every step. The paper's latencies do not fit the A100's kernels and vLLM's host,
            which bear ten times its rates; with a factor its rates load the engine as the paper's figures imply.
        check_ns: time between two readings of the load, after which a plan may be due.
    """

    network: str = "qwen3-30b-a3b"
    gpu: str = "a100-80g"
    num_ranks: int = 2
    num_machines: int = 1
    popularity: PopularityForm = _PERMUTED
    routing: Routing = "drawn"
    num_spares: int = 0
    num_blocks: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    has_cache: bool = False
    interval_steps: int = 3000
    slowdown: float = 1.0
    check_ns: int = CHECK_NS

    @property
    def shape(self) -> NetworkShape:
        """The network."""
        return network_named(self.network)

    @property
    def device(self) -> Gpu:
        """The GPU."""
        return gpu_named(self.gpu)

    @property
    def num_slots(self) -> int:
        """Slots of each GPU in a layer."""
        experts = self.shape.experts
        assert experts is not None, "the network has experts"
        return -(-experts.num_experts // self.num_ranks) + self.num_spares

    @property
    def kv_blocks(self) -> int:
        """KV blocks of a rank."""
        return self.num_blocks or worker_kv_blocks(self.shape, self.device, BLOCK_SIZE, num_slots=self.num_slots)

    def exchange(self) -> Collective:
        """Price an all-to-all: pplx-kernels in a machine, and InfiniBand between machines."""
        within = pplx_all_to_all(self.device.link_bytes_per_s, self.shape)
        if self.num_machines == 1:
            return within
        across = all_to_all(INFINIBAND_HDR, self.shape)
        return MachinesAllToAll(within=within, across=across, machine_of=self.machine_of)

    @property
    def machine_of(self) -> tuple[int, ...]:
        """Machine of each rank."""
        return tuple(rank * self.num_machines // self.num_ranks for rank in range(self.num_ranks))

    def scheduler(self, rows: Rows, order: str) -> SchedulerSettings:
        """Return the settings of each rank's scheduler. Every request of `rows` fits.

        Args:
            order: order policy.
        """
        longest = int(rows.num_prompt_tokens.max() + rows.num_output_tokens.max())
        return SchedulerSettings(
            num_blocks=self.kv_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=min(self.kv_blocks * BLOCK_SIZE, longest),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_queued_reqs=1 << 30,  # the paper refuses no request
            enable_prefix_caching=self.has_cache,
            scheduling_policy=order,
        )

    def build(self, system: System, rows: Rows, gate: Gate) -> tuple[LockStepGroup, SimPlacement]:
        """Build the ranks of a system, and their live placement.

        Args:
            gate: `gate`, equal for all systems.
        """
        shape, experts = self.shape, self.shape.experts
        assert experts is not None, "the network has experts"
        table = spread_evenly(shape.num_layers, experts.num_experts, list(range(self.num_ranks)), self.num_ranks)
        table = with_spare_slots(table, self.num_spares)
        cost = Roofline(RooflineSettings(network=shape, gpu=self.device, host=_NO_STEP_HOST))
        site = PlacementSite(
            devices=even_devices(self.num_ranks, self.num_slots, self.num_machines),
            prices=place_prices(shape, self.device, NVSWITCH_A100, INFINIBAND_HDR),
            limits=PlaceLimits(horizon_steps=self.interval_steps),
        )
        settings = SimPlacementSettings(
            live=LivePlacementSettings(
                placement_policy=system.place,
                placement_interval=self.interval_steps,
                placement_payback_horizon=self.interval_steps if system.has_payback_gate else 0,
                placement_max_bytes_per_step=system.bytes_per_step or UNBOUNDED_BYTES,
            ),
            first_steps=self.interval_steps // 4,
            is_synchronous=system.bytes_per_step is None,
            check_ns=self.check_ns,
        )
        placement = start_placement(gate, table, shape.expert_layers, site, settings)
        deployment = Deployment(
            cost=cost,
            gate=AheadGate(gate, shape.num_layers, experts.num_experts),
            table=placement.table,
            num_ranks=self.num_ranks,
            exchange=self.exchange(),
            host=VLLM_HOST,
            grouped_experts_ns=cost.grouped_experts_ns,
        )
        pricing = LOCK_STEP if self.slowdown == 1.0 else slowed(self.slowdown)
        return LockStepGroup(self.scheduler(rows, system.order), deployment, pricing, placement), placement

    def gate(self, seed: int, recording: RoutingTrace | None = None) -> Gate:
        """Make the gate that chooses the experts of tokens.

        Args:
            seed: seed of the popularity, and of the experts or recorded answers that requests get.
            recording: recorded choices of the network. None means that the bed draws.
        """
        shape, experts = self.shape, self.shape.experts
        assert experts is not None, "the network has experts"
        if self.routing != "drawn":
            assert recording is not None, "a part with recorded routing runs only where there is a recording"
            return RecordedGate(
                recording.experts, answers_by_domain(recording, self.popularity.num_domains), experts.num_experts,
                shift_layers=self.routing == "shifted", seed=seed,
            )  # fmt: skip
        form = PopularityForm(
            family=self.popularity.family,
            skew=self.popularity.skew,
            hot_ids=self.popularity.hot_ids,
            num_domains=self.popularity.num_domains,
            seed=seed,
        )
        return PopularityGate(form.by_layer(shape.num_layers, experts.num_experts), experts.top_k, seed)


def answers_by_domain(recording: RoutingTrace, num_domains: int) -> list[NDArray[np.int64]]:
    """Offsets and lengths of recorded answers, int64[answers, 2] for each domain: of all, or of a data set.

    Args:
        num_domains: 1, or a number of data sets, of which those with most answers are taken.
    """
    by_set: dict[str, list[tuple[int, int]]] = {}
    for answer in recording.generations:
        name = answer.dataset if num_domains > 1 else ""
        by_set.setdefault(name, []).append((answer.offset, answer.num_tokens))
    largest = sorted(by_set, key=lambda name: -len(by_set[name]))[:num_domains]
    return [np.array(by_set[name], np.int64) for name in largest]
