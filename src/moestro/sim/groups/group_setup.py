"""Prices of engines, and what the groups of all policies of a simulation have in common.

Cost models are those that the settings of engines name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moestro.cost.gate import PopularityGate
from moestro.cost.gpus import gpu_named
from moestro.cost.links import all_reduce
from moestro.cost.model import AMOE_RATE, PopularityForm, StageCostModel, even_gating
from moestro.cost.networks import ExpertShape, NetworkShape, network_share
from moestro.cost.roofline import VLLM_HOST, HostCost, Roofline, RooflineSettings
from moestro.cost.settings import link_within, read_network
from moestro.cost.tables import QLLM, MeasuredCost, OtherGpuCost, StagedEngine, Table, amoe, load_table
from moestro.errors import ConfigError
from moestro.sim.groups.group import Barrier, OneRank, Prices
from moestro.sim.settings import GroupSettings, SimEngineSettings, SimSettings


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
    return OtherGpuCost(measured, _plain_roofline(engines, engines.table_gpu), _plain_roofline(engines, engines.gpu))


def _plain_roofline(engines: SimEngineSettings, name: str) -> Roofline:
    """Return the roofline of the engines' network on their number of GPUs of a kind."""
    gpu, network, reduced = gpu_named(name), network_of(engines), None
    if engines.tensor_parallel_size > 1:
        link = engines.link_within if name == engines.gpu else None
        reduced = all_reduce(link_within(link, gpu), network, engines.tensor_parallel_size)
    return Roofline(RooflineSettings(network=network, gpu=gpu, all_reduce=reduced))


def default_popularity(engines: SimEngineSettings) -> PopularityForm:
    """Return the popularity of the experts that a group's prices imply: AMoE's fit, or the roofline's."""
    if engines.engine == "amoe":
        return PopularityForm(family="exponential", skew=AMOE_RATE)
    return PopularityForm()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupSetup:
    """Properties of the groups of workers that all policies share.

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
