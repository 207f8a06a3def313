"""The torch device: runs whole forward passes and samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from moestro.core.model_info import ModelInfo
from moestro.core.request import SamplingDefaults
from moestro.core.work import BlockMoves, Forward, StepResult
from moestro.errors import ConfigError
from moestro.model.card_memory import choose_kv_bytes, is_share_of_card, measure_step, read_card
from moestro.model.check import check_network
from moestro.model.experts.gate_override import make_override
from moestro.model.experts.worker_share import WorkerShare
from moestro.model.host_pools import staging_bytes
from moestro.model.kernels.kernel_choice import begin_search, choose_kernels
from moestro.model.loading.generation_config import eos_token_ids, read_generation_config, sampling_defaults
from moestro.model.loading.load import load_network, read_config
from moestro.model.loading.refuse import TESTED_FAMILIES
from moestro.model.network import Network
from moestro.model.pools import (
    KVPools,
    choose_max_model_len,
    choose_num_blocks,
    choose_num_host_blocks,
    fit_max_model_len,
)
from moestro.model.results import PendingResult, compute_result
from moestro.model.settings import ALONE, LocalRank, ModelSettings
from moestro.model.step import PagedStep, SampledTokens


class RecordedSteps(Protocol):
    """Steps that were recorded and are replayed."""

    def logits(self, step: PagedStep) -> Tensor | None:
        """Compute the result of `Network.logits`, which the next step overwrites; None if no record fits the step."""
        ...


class TorchDevice:
    """Computes `Forward` items.

    On a CPU `poll` does the work, so that the caller of `launch` can first deliver the results of the previous step. On
    an accelerator `launch` queues the work and never waits, with two exceptions. Without grouped kernels for experts
    (any dtype but bfloat16, or sizes that are no multiples of 8; see `experts`) it waits for every layer's expert
    counts. With rope type `longrope`, transformers' own forward reads the largest position.

    Args:
        network: the loaded network.
        pools: its KV cache.
    """

    def __init__(self, network: Network, pools: KVPools) -> None:
        self.network = network
        self.pools = pools
        self._graphs: RecordedSteps | None = None
        self._launched: deque[Forward] = deque()
        self._running: deque[PendingResult] = deque()
        self._sampled: SampledTokens | None = None  # by the step launched last

    def replay(self, steps: RecordedSteps | None) -> None:
        """Replay recorded steps from now on, wherever one fits."""
        self._graphs = steps

    @property
    def works_when_polled(self) -> bool:
        """Whether polling does the work: true on a CPU."""
        return self.network.device.type == "cpu"

    @property
    def runs_ahead(self) -> bool:
        """Whether a step gains from a launch before the host has the tokens of the step before (FROM_STEP_BEFORE).

        On a CPU it would not. A gate override chooses experts by token ids on the host.
        """
        return not self.works_when_polled and self.network.override is None

    def launch(self, item: Forward, now_ns: int) -> None:
        """Start `item`. Items that touch the same blocks run in launch order."""
        self._launched.append(item)
        if not self.works_when_polled:
            self._compute()

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """Implement `Device.move_blocks`."""
        self._compute()
        self.pools.move_blocks(moves)

    @torch.inference_mode()
    def _compute(self) -> None:
        while self._launched:
            self.network.adopt_kernels()
            step = PagedStep(self._launched.popleft().units, self.pools, self.network.device)
            if self._sampled is not None:
                step.fill_tokens(self._sampled)
            logits = None if self._graphs is None else self._graphs.logits(step)
            if logits is None:
                logits = self.network.logits(step)
            routing = self.network.routing
            counts, choices = (None, None) if routing is None else (routing.counts, routing.choices())
            visits = None if routing is None or routing.visits is None else routing.visits.read()
            result = compute_result(step, logits, counts, choices, visits)
            self._sampled = result.on_device
            self._running.append(result)

    def poll(self, now_ns: int) -> list[StepResult]:
        """Return results that are ready, in launch order: all of them on a CPU. On an accelerator it never blocks."""
        self._compute()
        ready = []
        while self._running and self._running[0].ready:
            ready.append(self._running.popleft().read())
        return ready

    def ready_at_ns(self) -> int | None:
        """Return None, because only the hardware knows."""
        return None


# With torch's kernels rounding depends on the shape of a batch. In these types it changes a token only where two
# candidates are within about 1e-5 of each other, and an undisturbed answer could have either; in half precision it
# changes many tokens. With own kernels it depends on nothing but the request.
_EXACT_DTYPES = ("float32", "float64")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointFacts:
    """Facts of a checkpoint that are known before its weights are read.

    Attributes:
        config: transformers' config.
        max_model_len: desired limit, before the KV cache is known.
        eos_token_ids, sampling_defaults: as in `ModelInfo`.
    """

    config: Any
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults

    def describe(self, settings: ModelSettings, network: Network, num_chosen: int) -> ModelInfo:
        """Properties of a network on a device without KV cache. `num_chosen`: experts that a token visits."""
        dtype = str(network.dtype).removeprefix("torch.")
        return ModelInfo(
            model_id=settings.model,
            model_type=self.config.model_type,
            dtype=dtype,
            device=network.device.type,
            max_model_len=self.max_model_len,
            vocab_size=network.config.vocab_size,
            eos_token_ids=self.eos_token_ids,
            sampling_defaults=self.sampling_defaults,
            num_blocks=0,
            block_size=settings.block_size,
            num_layers=network.num_layers,
            num_experts=network.num_experts,
            num_experts_per_token=num_chosen,
            num_parameters=network.num_parameters,
            is_exact=dtype in _EXACT_DTYPES or network.is_batch_invariant,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckedNetwork:
    """A loaded and checked network, before it is cut and packed and the memory left for its KV cache is known.

    Attributes:
        facts: what the checkpoint says about itself.
        network: the network.
        probe: pools of one block, in the shapes of its K and V.
        num_chosen: experts that a token visits; 0 for a dense network.
        notes: sentences for the operator.
        local: place of the process among those of its machine.
        step_bytes: the most memory that a step takes on an accelerator.
    """

    facts: CheckpointFacts
    network: Network
    probe: KVPools
    num_chosen: int
    notes: tuple[str, ...]
    local: LocalRank
    step_bytes: int

    def allocate(self, settings: ModelSettings, parked_bytes: int = 0) -> tuple[KVPools, ModelInfo]:
        """Allocate the KV cache that `settings` allow, and host memory if they name any.

        Args:
            parked_bytes: memory of the KV cache that tokens inside the network take.

        Raises:
            ConfigError: the settings are impossible.
        """
        staging = staging_bytes(self.probe.bytes_per_block) if settings.kv_offloading_size else 0
        card = read_card(self.network, self.local, self.step_bytes, staging)
        kv_bytes = choose_kv_bytes(settings, card, self.probe)
        if parked_bytes >= kv_bytes and settings.num_gpu_blocks_override is None:
            raise ConfigError(
                f"Tokens inside the network take {parked_bytes} bytes, as much as the KV cache of {kv_bytes} bytes:"
                " raise --kv-cache-memory-bytes or --gpu-memory-utilization, or lower --max-num-batched-tokens."
            )
        probe, notes, wanted_len = self.probe, self.notes, self.facts.max_model_len
        if self.network.exchange is not None:
            notes += (self.network.exchange.note,)
        num_blocks = choose_num_blocks(settings, kv_bytes - parked_bytes, probe.bytes_per_block)
        num_host_blocks = choose_num_host_blocks(settings, probe.bytes_per_block)
        is_measured = card is not None and is_share_of_card(settings)
        max_model_len = fit_max_model_len(
            settings, wanted_len, num_blocks, probe.bytes_per_block, is_measured=is_measured
        )
        if max_model_len < wanted_len:
            held = f"the {max_model_len} tokens that the KV cache holds"
            notes += (f"max_model_len is lowered from {wanted_len} to {held}.",)
        name = self.facts.config.model_type
        if name not in TESTED_FAMILIES:
            notes += (f"model_type {name!r} is not a tested family; it passed a comparison with transformers.",)
        pools = probe.allocate(num_blocks)
        if num_host_blocks:
            pools.allocate_host(num_host_blocks)
        return pools, msgspec.structs.replace(
            self.facts.describe(settings, self.network, self.num_chosen),
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            notes=notes,
            card=card and card.described(num_blocks * probe.bytes_per_block),
        )


def read_facts(settings: ModelSettings) -> CheckpointFacts:
    """Read a checkpoint's configuration files, after every refusal that needs no weights. Errors as `open_device`."""
    config = read_config(settings)
    wanted_len = choose_max_model_len(settings, getattr(config.get_text_config(), "max_position_embeddings", None))
    recommended = read_generation_config(Path(settings.model))
    defaults = sampling_defaults(recommended if settings.generation_config == "auto" else {})
    return CheckpointFacts(
        config=config,
        max_model_len=wanted_len,
        eos_token_ids=eos_token_ids(recommended, config),
        sampling_defaults=defaults,
    )


def use_threads(settings: ModelSettings) -> None:
    """Let torch and the kernels that are loaded later compute with as many threads as `settings` say."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)


def open_network(
    settings: ModelSettings, on_phase: Callable[[str], None] = lambda _: None, local: LocalRank = ALONE
) -> CheckedNetwork:
    """Load a network and check it. Arguments and errors as `open_device`."""
    use_threads(settings)
    kernels = begin_search(settings)
    on_phase("read config")
    facts = read_facts(settings)
    on_phase("load weights")
    network, notes = load_network(settings, facts.config, local.rank)
    on_phase("check")
    probe, num_chosen = check_network(network, facts.max_model_len, settings.block_size)
    step_bytes = measure_step(network, probe, local, facts.max_model_len)
    notes += choose_kernels(network, kernels, settings)
    if settings.gate_override is not None:
        network.override = make_override(settings.gate_override, network.gate_shape(num_chosen), settings.seed)
    return CheckedNetwork(
        facts=facts,
        network=network,
        probe=probe,
        num_chosen=num_chosen,
        notes=notes,
        local=local,
        step_bytes=step_bytes,
    )


def open_device(
    settings: ModelSettings,
    on_phase: Callable[[str], None] = lambda _: None,
    local: LocalRank = ALONE,
    share: WorkerShare | None = None,
) -> tuple[TorchDevice, ModelInfo]:
    """Load a network and allocate its whole KV cache.

    Args:
        on_phase: called with a phase's name when the phase begins, and with `ready` at the end.
        local: place among the processes of the machine, which selects the accelerator, and the largest step.
        share: part of the network to keep. None means all of it.

    Raises:
        ConfigError: the settings are impossible; the text says what to do.
        UnsupportedModelError: this checkpoint cannot run here; the text says why.
    """
    checked = open_network(settings, on_phase, local)
    if share is not None:
        on_phase("cut weights")
        share.cut(checked.network)
    on_phase("pack weights")
    network = checked.network
    network.pack()
    on_phase("allocate KV cache")
    graphs = _plan_graphs(checked) if local.records_steps and not settings.enforce_eager else None
    network.graph_bytes = 0 if graphs is None else graphs.num_bytes
    pools, info = checked.allocate(settings)
    device = TorchDevice(network, pools)
    if graphs is not None:
        on_phase("record graphs")
        device.replay(graphs.record(network, pools))
    on_phase("ready")
    return device, info


def _plan_graphs(checked: CheckedNetwork) -> Any:
    """Plan the graphs of a network whose steps can be recorded; None for others, among them all on a CPU."""
    if checked.network.device.type == "cpu" or checked.network.exchange is None:
        return None
    from moestro.model.cuda.graphs import plan_graphs  # noqa: PLC0415 - it imports Triton

    local, max_model_len, block_size = checked.local, checked.facts.max_model_len, checked.probe.block_size
    return plan_graphs(checked.network, local.max_seqs, max_model_len, block_size, max_tokens=local.max_tokens)
