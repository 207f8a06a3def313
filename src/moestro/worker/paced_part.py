"""The paced device of a worker of a group: its share of the stages, at a cost model's prices. No torch here."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec.structs import replace

from moestro.config.launch_spec import LaunchSpec
from moestro.core.clock import NS_PER_S
from moestro.core.load_figures import PaceCounts
from moestro.core.model_info import ModelInfo
from moestro.core.token_keys import Keys
from moestro.core.work import Forward, StepResult, Units
from moestro.cost.capacity import check_experts_fit, worker_kv_blocks
from moestro.cost.gpus import A100, Gpu, gpu_named
from moestro.cost.hf_config import network_named
from moestro.cost.links import Link, link_named, two_phase
from moestro.cost.networks import NetworkShape
from moestro.cost.priced_stages import PricedStages, StageSetup, worker_shape
from moestro.cost.settings import PACED_QLLM, PacedSettings
from moestro.cost.staged_engines import in_4_bits
from moestro.errors import ConfigError
from moestro.worker.group_process import WorkerPart, WorkerSizes
from moestro.worker.paced import Answers, dilated, pace_of_stages, paced_gate, stage_cost_of
from moestro.worker.paced_links import LinkPace, StampFrames
from moestro.worker.request_keys import RequestKeys


def num_part_blocks(spec: LaunchSpec, paced: PacedSettings) -> int:
    """Compute the KV blocks of the modelled device of a worker with attention.

    Raises:
        ConfigError: the worker's weights do not fit the GPU, or the network has no experts.
    """
    network, model = network_named(paced.network), spec.model
    num_slots = _num_slots(spec, paced)
    if model.num_gpu_blocks_override is not None:
        return model.num_gpu_blocks_override
    if model.kv_cache_memory_bytes is not None:
        return model.kv_cache_memory_bytes // (network.kv_bytes_per_token * model.block_size)
    network, gpu = _modelled(paced)
    return worker_kv_blocks(
        network, gpu, model.block_size, num_slots=num_slots, gpu_memory_utilization=model.gpu_memory_utilization
    )


def load_paced_part(
    spec: LaunchSpec, sizes: WorkerSizes, answers: Answers | None, info: ModelInfo | None
) -> WorkerPart:
    """Make the paced device of a worker of a group.

    Args:
        answers: supplier of the results of units at the sampler; None without attention.
        info: the network and its KV cache; None without attention.

    Raises:
        ConfigError: the network has no experts.
    """
    assert spec.group is not None
    assert spec.paced is not None, "loaded for a paced device"
    cost, num_slots = stage_cost_of(spec.paced), _num_slots(spec, spec.paced)
    if not spec.group.is_home:
        utilization = spec.model.gpu_memory_utilization
        check_experts_fit(*_modelled(spec.paced), num_slots, gpu_memory_utilization=utilization)
    shape = worker_shape(
        cost.network,
        num_rows=sizes.num_rows,
        num_places=sizes.num_rows,
        num_slots=num_slots,
        num_guests=sizes.num_guests,
    )
    gate = paced_gate(cost, spec.paced, spec.model.seed) if sizes.num_rows else None
    setup = StageSetup(shape=shape, block_size=spec.model.block_size, gate=gate)

    def answer(units: Units, now_ns: int) -> StepResult:
        assert answers is not None, "a worker without attention cannot sample"
        return answers.of(Forward(units), now_ns)

    experts = cost.network.experts
    assert experts is not None, "checked by _num_slots"
    keys: list[RequestKeys] = []  # of the home, which is made after the device

    def keys_of(units: Units) -> Keys:
        return keys[0].of(units)

    paced = spec.paced
    device = PricedStages(cost, dilated(setup, paced), answer, keys_of)
    link_pace = LinkPace(two_phase(link_named(paced.paced_link)), cost.network, paced.pace_dilation)

    def pace_counts() -> PaceCounts:
        counts = pace_of_stages(device, paced)
        return replace(counts, num_messages=link_pace.num_messages, message_late_ns=link_pace.late_ns)

    return WorkerPart(
        device=device,
        num_experts=experts.num_experts,
        info=info,
        tensors=StampFrames(),
        memory=PacedSlots(cost.network, link_named(paced.paced_link), paced.pace_dilation) if num_slots else None,
        link_pace=link_pace,
        pace_counts=pace_counts,
        on_home=lambda rank: keys.append(RequestKeys(rank.scheduler.table)),
    )


class PacedSlots:
    """Slots of a modelled device; implements `worker.expert_loader.SlotMemory`.

    Args:
        network: network whose experts would come.
        link: link that would bring them, each worker's alone.
        dilation: factor on its times.
    """

    def __init__(self, network: NetworkShape, link: Link, dilation: float) -> None:
        self.expert_bytes = round(network.expert_bytes)
        self._expert_s = dilation * (link.latency_ns / NS_PER_S + network.expert_bytes / link.bytes_per_s)

    def read(self, layer: int, experts: Sequence[int]) -> Sequence[None]:
        """Wait for as long as the link would take."""
        time.sleep(self._expert_s * len(experts))
        return [None] * len(experts)

    def write(self, layer: int, slot: int, expert: int, weights: None) -> None:
        """Do nothing: all slots of a modelled device cost the same."""


def _modelled(paced: PacedSettings) -> tuple[NetworkShape, Gpu]:
    network = network_named(paced.network)
    return (in_4_bits(network), A100) if paced.device == PACED_QLLM else (network, gpu_named(paced.gpu))


def _num_slots(spec: LaunchSpec, paced: PacedSettings) -> int:
    """Slots for experts of each layer that the worker has."""
    assert spec.group is not None, "a part belongs to a group"
    experts = network_named(paced.network).experts
    if experts is None:
        raise ConfigError(f"--mode async spreads experts over workers, and {paced.network} has none")
    if experts.num_experts < spec.group.num_shares:
        raise ConfigError(
            f"{paced.network} has {experts.num_experts} experts a layer, too few for {spec.group.num_shares} workers:"
            " lower --experts"
        )
    if not spec.group.has_experts:
        return 0
    return int(spec.group.expert_table(1, experts.num_experts).logical_of.shape[2])
