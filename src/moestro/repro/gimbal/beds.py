"""Testbeds of expert-parallel ranks whose placement is planned anew while they serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import spread_evenly
from moestro.cost.ahead_gate import AheadGate
from moestro.cost.capacity import worker_kv_blocks
from moestro.cost.collectives import Collective, MachinesAllToAll, all_to_all, pplx_all_to_all
from moestro.cost.drawn_step import Deployment
from moestro.cost.gate import Gate, PopularityGate, RecordedGate
from moestro.cost.gpus import Gpu, gpu_named
from moestro.cost.hf_config import network_named
from moestro.cost.links import INFINIBAND_HDR, NVSWITCH_A100
from moestro.cost.networks import NetworkShape
from moestro.cost.popularity import PopularityForm
from moestro.cost.roofline import VLLM_HOST, HostCost, Roofline, RooflineSettings
from moestro.engine.settings import SchedulerSettings
from moestro.placement.devices import PlaceLimits, even_devices
from moestro.placement.live.loop import CHECK_NS
from moestro.placement.live_settings import LivePlacementSettings
from moestro.placement.prices import place_prices
from moestro.repro.gimbal.systems import System
from moestro.sim.groups.baselines import LOCK_STEP, slowed
from moestro.sim.groups.live_placement import (
    UNBOUNDED_BYTES,
    PlacementSite,
    SimPlacement,
    SimPlacementSettings,
    with_spare_slots,
)
from moestro.sim.groups.lock_step_group import LockStepGroup
from moestro.sim.groups.offline_routing import start_placement
from moestro.workload.experts.expert_traces import RoutingTrace
from moestro.workload.rows import Rows

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
