"""The torch device: runs whole forward passes, samples, and measures the memory that is left for the KV cache."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from moestro.core.request import CardMemory, ModelInfo, SamplingDefaults
from moestro.core.views import LS
from moestro.core.work import LOGITS_LAST, LOGITS_PROMPT, SAMPLING_ROW, BlockMoves, Forward, StepResult, Units
from moestro.errors import ConfigError
from moestro.files.checkpoint import read_json_object
from moestro.model.check import TESTED_FAMILIES, check_network
from moestro.model.experts.gate_override import make_override
from moestro.model.kernels.kernel_choice import begin_search, choose_kernels
from moestro.model.load import load_network, positions_in, read_config
from moestro.model.network import Network, WorkerShare
from moestro.model.pools import (
    KVPools,
    choose_max_model_len,
    choose_num_blocks,
    choose_num_host_blocks,
    fit_max_model_len,
    staging_bytes,
)
from moestro.model.settings import (
    ALONE,
    LocalRank,
    ModelSettings,
    eos_token_ids,
    read_generation_config,
    sampling_defaults,
    tokenizer_end,
)
from moestro.model.step import PagedStep, PendingResult, SampledTokens, compute_result

# Processes that share a card cannot tell their contexts apart from each other's memory. An estimate: the kernels and
# libraries of torch, cuBLAS and CUDA itself.
_CONTEXT_BYTES = 640 << 20
_POOL_ROUNDING = 2 << 20  # torch rounds the size of a large tensor up to whole pages of the card
# The trial's units: a short chunk reads the longest context, whose K and V torch's attention copies whole; the rows of
# decodes read a short one, because their copies are bounded whatever their number.
_CHUNK_TOKENS, _DECODE_CONTEXT = 16, 256
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """Memory that a card has and that is in use, without a KV cache.

    Attributes:
        total_bytes: memory of the card.
        num_sharing: processes of the server that use the card, and divide the allowed share of it evenly.
        weight_bytes: weights of this process.
        other_bytes: everything else in use: libraries, and other programs.
        step_bytes: the most that a step takes while it runs.
        graph_bytes: what recorded steps will take.
    """

    total_bytes: int
    num_sharing: int = 1
    weight_bytes: int
    other_bytes: int
    step_bytes: int
    graph_bytes: int = 0

    def kv_bytes(self, utilization: float, bytes_per_block: int, num_pools: int) -> int:
        """Compute the bytes that are left for the KV cache.

        Args:
            utilization: share of the card's memory that all processes together may take.
            bytes_per_block: bytes of a block in all pools.
            num_pools: tensors of the KV cache.

        Raises:
            ConfigError: no block fits; the text says what takes the memory and what to do.
        """
        allowed = int(utilization * self.total_bytes) // self.num_sharing
        used = self.weight_bytes + self.other_bytes + self.step_bytes + self.graph_bytes
        left = allowed - used - num_pools * _POOL_ROUNDING
        if left >= bytes_per_block:
            return left
        shared = f", shared by {self.num_sharing} processes," if self.num_sharing > 1 else ""
        parts = (("weights", self.weight_bytes), ("a step", self.step_bytes), ("graphs", self.graph_bytes))
        taken = ", ".join(f"{_gib(size)} by {name}" for name, size in parts if size)
        raise ConfigError(
            f"--gpu-memory-utilization {utilization:g} of {_gib(self.total_bytes)} GiB{shared} allows {_gib(allowed)}"
            f" GiB, which leave no KV block of {bytes_per_block} bytes: {taken} and {_gib(self.other_bytes)} by what"
            f" else is on the card. Raise it, lower --max-num-batched-tokens, or {self._remedy()}"
        )

    def _remedy(self) -> str:
        if self.num_sharing > 1:
            return "let fewer processes share the card."
        return "end other programs there, or spread the experts over more cards (--mode ep or async)."

    def described(self, kv_bytes: int) -> CardMemory:
        """Describe the card for the operator, with a KV cache of so many bytes."""
        return CardMemory(
            total_bytes=self.total_bytes,
            num_sharing=self.num_sharing,
            weight_bytes=self.weight_bytes,
            other_bytes=self.other_bytes,
            step_bytes=self.step_bytes,
            graph_bytes=self.graph_bytes,
            kv_bytes=kv_bytes,
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f}"


def read_card(network: Network, local: LocalRank, step_bytes: int, staging_bytes: int) -> CardUse | None:
    """Read what the network's card holds, before its KV cache is allocated; None on a CPU.

    Args:
        step_bytes: the result of `measure_step`.
        staging_bytes: memory that host pools will take on the card.
    """
    device = network.device
    if device.type == "cpu":
        return None
    _let_go()
    free, total = torch.cuda.mem_get_info(device)
    weights, num_sharing = torch.cuda.memory_reserved(device), local.num_sharing(torch.cuda.device_count())
    return CardUse(
        total_bytes=total,
        num_sharing=num_sharing,
        weight_bytes=weights,
        other_bytes=staging_bytes + (total - free - weights if num_sharing == 1 else _CONTEXT_BYTES),
        step_bytes=step_bytes,
        graph_bytes=network.graph_bytes,
    )


def measure_step(network: Network, probe: KVPools, local: LocalRank, max_model_len: int) -> int:
    """Run the largest step on an accelerator, and return the most memory that it took; 0 on a CPU.

    Args:
        network: the whole network.
        probe: pools of one block, which all units of the trial read and write.
        max_model_len: tokens of the longest sequence, if the card holds so many.

    Raises:
        ConfigError: the step does not fit beside the weights.
    """
    device = network.device
    if device.type == "cpu":
        return 0
    _let_go()
    torch.cuda.reset_peak_memory_stats(device)
    before, free = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0]
    longest = min(max_model_len, max(free // max(probe.bytes_per_block // probe.block_size, 1), 1))
    try:
        _run(network, probe, trial_units(local, longest, probe.block_size, network.config.vocab_size))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"A step of {local.max_tokens} tokens does not fit the {_gib(free)} GiB that weights of {_gib(before)} GiB"
            f" leave: lower --max-num-batched-tokens, or spread the experts over more cards (--mode ep or async)."
        ) from error
    peak = torch.cuda.max_memory_reserved(device) - before
    _let_go()
    return peak


@torch.inference_mode()
def _run(network: Network, probe: KVPools, units: Units) -> None:
    step = PagedStep(units, probe, network.device)
    logits = network.logits(step)
    counts = None if network.routing is None else network.routing.counts
    result = compute_result(step, logits, counts)
    result.done.synchronize()


def trial_units(local: LocalRank, max_model_len: int, block_size: int, vocab_size: int) -> Units:
    """Make units of as many tokens and sequences as a step can have, that ask for all that takes memory.

    All lie in block 0. Tokens are drawn, and log probabilities measured, for as many rows as requests may ask for.
    """
    count = min(local.max_seqs, local.max_tokens)
    num_tokens = np.ones(count, np.int32)
    left = local.max_tokens - count
    for unit, most in enumerate([_CHUNK_TOKENS, *[max_model_len] * (count - 1)][:count]):
        added = min(left, min(most, max_model_len) - 1)
        num_tokens[unit] += added
        left -= added
    start = np.where(num_tokens > 1, 0, min(_DECODE_CONTEXT, max_model_len) - 1).astype(np.int32)
    start[0] = max_model_len - num_tokens[0]
    sampling = np.zeros(count, SAMPLING_ROW)
    sampling["temperature"], sampling["top_p"], sampling["top_k"], sampling["repetition_penalty"] = 1, 0.9, 50, 1
    sampling["num_logprobs"] = sampling["num_prompt_logprobs"] = 1
    logits = np.where(num_tokens > 1, LOGITS_LAST | LOGITS_PROMPT, LOGITS_LAST).astype(np.uint8)
    return Units(
        slot=np.arange(count, dtype=np.int64),
        serial=np.arange(count),
        service_class=np.full(count, LS, np.uint8),
        start=start,
        num_tokens=num_tokens,
        write_start=start,
        logits=logits,
        block_tables=np.zeros((count, -(-max_model_len // block_size)), np.int32),
        sampling=sampling,
        token_ids=np.linspace(0, vocab_size - 1, int(num_tokens.sum())).astype(np.int32),
        next_token_ids=np.zeros(int(num_tokens[num_tokens > 1].sum()), np.int32),
    )


def _let_go() -> None:
    """Return memory that torch keeps for later to the card, so that it counts as free."""
    gc.collect()
    torch.cuda.empty_cache()


def is_share_of_card(settings: ModelSettings) -> bool:
    """Whether the KV cache gets what its share of a card leaves, because the settings name no size."""
    return settings.kv_cache_memory_bytes is None and settings.num_gpu_blocks_override is None


def choose_kv_bytes(settings: ModelSettings, use: CardUse | None, probe: KVPools) -> int:
    """Choose the bytes of the KV cache: those that the settings name, or what they leave of the card.

    Args:
        use: what the card holds; None on a CPU, where the default is a constant.

    Raises:
        ConfigError: as `CardUse.kv_bytes`.
    """
    if use is None or not is_share_of_card(settings):
        return settings.kv_cache_bytes
    return use.kv_bytes(settings.gpu_memory_utilization, probe.bytes_per_block, sum(1 for _ in probe.blocks()))


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
        num_host_blocks = choose_num_host_blocks(settings, probe.bytes_per_block, self.local)
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
        host_block_ns = pools.allocate_host(num_host_blocks) if num_host_blocks else None
        return pools, msgspec.structs.replace(
            self.facts.describe(settings, self.network, self.num_chosen),
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_bytes=probe.bytes_per_block,
            host_block_ns=host_block_ns,
            notes=notes,
            card=card and card.described(num_blocks * probe.bytes_per_block),
        )


def read_facts(settings: ModelSettings) -> CheckpointFacts:
    """Read a checkpoint's configuration files, after every refusal that needs no weights. Errors as `open_device`."""
    config = read_config(settings)
    wanted_len = choose_max_model_len(settings, positions_in(config.get_text_config()))
    recommended = read_generation_config(Path(settings.model))
    fields = read_json_object(Path(settings.model) / "config.json")
    ends = {*eos_token_ids(recommended, fields, config)}
    if (end := tokenizer_end(settings.tokenizer_directory, config.get_text_config().vocab_size)) is not None:
        ends.add(end)
    defaults = sampling_defaults(recommended if settings.generation_config == "auto" else {})
    return CheckpointFacts(
        config=config,
        max_model_len=wanted_len,
        eos_token_ids=tuple(sorted(ends)),
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
