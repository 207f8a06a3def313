"""Memory of an accelerator: what its weights and its largest step take, and what is left for the KV cache."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import numpy as np
import torch

from moestro.core.model_info import CardMemory
from moestro.core.views import LS
from moestro.core.work import LOGITS_LAST, LOGITS_PROMPT, SAMPLING_ROW, Units
from moestro.errors import ConfigError
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.results import compute_result
from moestro.model.settings import LocalRank, ModelSettings
from moestro.model.step import PagedStep

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
