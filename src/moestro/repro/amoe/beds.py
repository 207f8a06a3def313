"""AMoE's testbeds: a network, GPUs on machines, a popularity of experts, and the prices of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable, spread_evenly
from moestro.cost.gate import PopularityGate
from moestro.cost.gpus import Gpu, gpu_named
from moestro.cost.hf_config import network_named
from moestro.cost.kernels import Kernels
from moestro.cost.links import ANNOUNCE_REMOTELY_NS, EFA_P4D, NVSWITCH_A100, Machines, two_phase
from moestro.cost.model import StageCostModel
from moestro.cost.networks import NetworkShape
from moestro.cost.popularity import AMOE_RATE, PopularityForm
from moestro.cost.priced_stages import HostOverhead
from moestro.cost.roofline import VLLM_HOST, HostCost, Roofline, RooflineSettings
from moestro.cost.staged_engines import AMOE, StagedEngine, amoe
from moestro.cost.tensor_parallel import network_share
from moestro.sim.groups.uneven_devices import StageJitter

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
