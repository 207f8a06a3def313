"""The roofline cost model of one step: host, kernels of every layer, and ranks that wait for their slowest.

A step of an expert-parallel group costs (`docs/costs.md` has the whole model, its constants and its checks):

    host + head + sum over layers of max over ranks of [dense + attention + small + 2 all-to-all + experts]

Each kernel is the longer of reading and computing, at efficiencies that are fitted to tables of single operations
(AIConfigurator's and Frontier's grids, InferSim's utilisations). Prices inside are integer picoseconds. Sums and maxima
of integers do not depend on the order of summation, so k decode steps priced at once equal k steps exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.views import column_sum
from moestro.cost.gpus import Gpu
from moestro.cost.links import AllReduce
from moestro.cost.model import Batch, Gating, Int64s, Ints, even_gating, zipf_popularity
from moestro.cost.networks import LayerGroup, NetworkShape

Chunks = list[tuple[int, int]]  # (cached tokens, tokens to compute) of each prefill chunk; a step has few chunks

_Number = TypeVar("_Number", float, NDArray[np.float64])

_NS = 1e9
# Decode attention takes 0.15 us for each sequence besides reading its KV, on an A100; faster memory takes less.
_DECODE_SEQUENCE_BYTES = 0.15e-6 * 2.039e12
# A token's hidden state crosses memory about eight times at 0.7 of peak: norms, rotary embedding, top-k, residuals.
_SMALL_PASSES, _SMALL_EFFICIENCY, _NUM_SMALL_KERNELS = 8, 0.7, 6
_ALL_TO_ALL_EFFICIENCY = 0.75
_ACTIVATION_BYTES = 2


class Kernels:
    """Prices of one network's kernels on one GPU, as floats in nanoseconds.

    Args:
        network, gpu: the network and the GPU that runs it.
        num_ep_ranks: ranks among which the experts are spread.
    """

    def __init__(self, network: NetworkShape, gpu: Gpu, num_ep_ranks: int) -> None:
        self._network, self._gpu, self._num_ep_ranks = network, gpu, num_ep_ranks
        fp8 = network.is_fp8 and gpu.fp8_flops_per_s > 0
        self._flops_per_s = gpu.fp8_flops_per_s if fp8 else gpu.bf16_flops_per_s
        attention = network.attention
        self.decode_sequence_ns = _NS * _DECODE_SEQUENCE_BYTES / gpu.memory_bytes_per_s
        # With many heads on one latent (MLA), arithmetic can dominate even decode.
        self.decode_token_ns = _NS * max(
            attention.kv_bytes_per_token / (gpu.memory_bytes_per_s * gpu.kv_read),
            attention.decode_flops / (gpu.bf16_flops_per_s * gpu.prefill_attention),
        )
        # Seconds of prefill attention for half a (query, key) pair, for reading a cached token, and for expanding it.
        self._prefill_s = (
            attention.prefill_flops / 2 / (gpu.bf16_flops_per_s * gpu.prefill_attention),
            attention.kv_bytes_per_token / (gpu.memory_bytes_per_s * gpu.kv_read),
            attention.expand_flops / (self._flops_per_s * gpu.gemm_compute),
        )

    def gemm_ns(self, rows: int, shape: tuple[int, int], bytes_per_weight: float) -> float:
        """Price a product of [rows, k] with the weights [n, k]; `shape` is (n, k)."""
        n, k = shape
        gpu, (flops, moved) = self._gpu, (2.0 * rows * n * k, n * k * bytes_per_weight)
        moved += _ACTIVATION_BYTES * rows * (n + k)
        compute_s = flops / (self._flops_per_s * gpu.gemm_compute)
        memory_s = moved / (gpu.memory_bytes_per_s * gpu.gemm_memory)
        return 0.6 * gpu.kernel_ns + _NS * max(compute_s, memory_s)

    def dense_ns(self, num_tokens: int, group: LayerGroup) -> float:
        """Price the dense part of a layer: everything except attention itself and routed experts."""
        network, per_weight = self._network, self._network.bytes_per_weight
        shapes = [(shape, per_weight) for shape in network.attention.projections]
        if group.has_experts and network.experts is not None:
            shapes.append(((network.experts.num_experts, network.hidden_size), 2.0))
        if group.dense_size:
            shapes.append(((2 * group.dense_size, network.hidden_size), per_weight))
            shapes.append(((network.hidden_size, group.dense_size), per_weight))
        return sum(self.gemm_ns(num_tokens, shape, size) for shape, size in shapes)

    def small_ns(self, num_tokens: int) -> float:
        """Price a layer's norms, rotary embedding, top-k, permutation and residuals."""
        moved = _SMALL_PASSES * _ACTIVATION_BYTES * num_tokens * self._network.hidden_size
        passing = _NS * moved / (_SMALL_EFFICIENCY * self._gpu.memory_bytes_per_s)
        return _NUM_SMALL_KERNELS * self._gpu.kernel_ns + passing

    def decode_ns(self, num_sequences: int) -> float:
        """Price a layer's decode attention without contexts; each context token adds `decode_token_ns`."""
        return 2 * self._gpu.kernel_ns + num_sequences * self.decode_sequence_ns

    def prefill_ns(self, chunks: Chunks, window: int | None) -> float:
        """Price a layer's attention over prefill chunks: arithmetic, or reading the cached KV of short chunks."""
        pair_s, token_s, expand_s = self._prefill_s
        num_new, total_s = 0, 0.0
        for cached, new in chunks:
            num_new += new
            num_read = new + (cached if window is None else min(cached, window))
            total_s += max(pair_s * twice_num_pairs(cached, new, window), token_s * num_read) + expand_s * num_read
        return 2 * self._gpu.kernel_ns + num_new * self._gpu.attention_token_ns + _NS * total_s

    def experts_ns(self, num_activated: _Number, num_copies: _Number) -> _Number:
        """Price a layer's fused experts on one rank: reading weights and arithmetic, overlapped as on this GPU."""
        gpu, experts = self._gpu, self._network.experts
        assert experts is not None, "a dense network has no experts to price"
        memory_s = num_activated * self._network.expert_bytes / (gpu.memory_bytes_per_s * gpu.expert_memory)
        flops = 6.0 * num_copies * self._network.hidden_size * experts.intermediate_size
        compute_s = flops / (self._flops_per_s * gpu.expert_compute)
        p = gpu.expert_overlap
        together_s: _Number = (memory_s**p + compute_s**p) ** (1 / p)
        return gpu.expert_start_ns + _NS * together_s

    def one_expert_ns(self, num_rows: int) -> float:
        """Price one expert over `num_rows` tokens: two products, gate and up being one."""
        hidden_size, experts = self._network.hidden_size, self._network.experts
        assert experts is not None, "a dense network has no experts to price"
        up, down = (2 * experts.intermediate_size, hidden_size), (hidden_size, experts.intermediate_size)
        return sum(self.gemm_ns(num_rows, shape, experts.bytes_per_weight) for shape in (up, down))

    def all_to_all_ns(self, num_tokens: int) -> float:
        """Price sending one rank's tokens to the ranks of their experts, or back; 0 without expert parallelism."""
        ranks, experts, gpu = self._num_ep_ranks, self._network.experts, self._gpu
        if ranks == 1 or experts is None:
            return 0.0
        sent = num_tokens * self._network.hidden_size * _ACTIVATION_BYTES * min(experts.top_k, ranks)
        sent_away = sent * (ranks - 1) / ranks
        return gpu.all_to_all_start_ns + _NS * sent_away / (gpu.link_bytes_per_s * _ALL_TO_ALL_EFFICIENCY)

    def head_ns(self, num_sequences: int) -> float:
        """Price the head over the last token of each sequence."""
        return self.gemm_ns(num_sequences, (self._network.vocab_size, self._network.hidden_size), 2.0)


def twice_num_pairs(cached: int, new: int, window: int | None) -> int:
    """Twice the number of (query, key) pairs in a chunk's causal attention: the integer 2 q c + q**2.

    Args:
        cached, new: tokens in the KV cache, and queries.
        window: tokens that a query attends to at most; None means all.
    """
    if window is None:
        return new * (2 * cached + new)
    growing = min(max(window - cached, 0), new)  # queries that still attend to everything before them
    return growing * (2 * cached + growing) + 2 * (new - growing) * window


PS_PER_NS = 1000
Floats = NDArray[np.float64]

_PS_PER_NS = np.array(PS_PER_NS)  # a column is divided by it faster
_INT64, _FLOAT64 = np.dtype(np.int64), np.dtype(np.float64)  # conversions to a type object take longer


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Time that the engine's own code adds to a step: a constant, and a part for each sequence."""

    step_ns: float
    sequence_ns: float


VLLM_HOST = HostCost(step_ns=1_500_000, sequence_ns=30_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineSettings:
    """Subject of a roofline.

    Attributes:
        network, gpu: the network and the GPU that runs it.
        host: cost of the engine's own code.
        num_ep_ranks: ranks in lock-step that share the experts, each with attention over its own requests.
        gating: how tokens fall on experts and ranks; None means Zipf popularity with exponent 0.6, spread evenly.
        all_reduce: all-reduces of each rank's GPUs, where a rank is a tensor-parallel group and `network` is the share
            of one of its GPUs. None means that a rank is one GPU.
    """

    network: NetworkShape
    gpu: Gpu
    host: HostCost = VLLM_HOST
    num_ep_ranks: int = 1
    gating: Gating | None = None
    all_reduce: AllReduce | None = None


class _Attention(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Attention cost of one rank's batch in each layer group: constant parts, and contexts that decode reads."""

    num_tokens: int
    num_sequences: int
    constant_ps: list[int]
    contexts: Sequence[int | Floats]  # for each group: context tokens, in one step or in each of several steps


class Roofline:
    """Prices steps of one rank, or of a group of ranks in lock-step.

    Parts that depend only on token counts are cached, so that pricing a step takes a few microseconds.

    Args:
        settings: network, GPU, host and gating to price.
    """

    def __init__(self, settings: RooflineSettings) -> None:
        self.settings = settings
        self.network = settings.network
        self._groups = self.network.groups
        self._kernels = Kernels(self.network, settings.gpu, settings.num_ep_ranks)
        self._gating = settings.gating or _even(settings)
        self._patterns = _patterns_of_groups(self._groups, None if self._gating is None else len(self._gating.copies))
        self._decode_token_ps = self._kernels.decode_token_ns * PS_PER_NS
        self._num_layers = [group.num_layers for group in self._groups]
        # The same numbers as arrays, by which a column is multiplied faster.
        self._layer_factors = [np.array(num_layers) for num_layers in self._num_layers]
        self._token_factor = np.array(self._decode_token_ps)
        self._token_parts: dict[int, list[int]] = {}
        self._expert_parts: dict[int, Int64s] = {}
        self._expert_totals: dict[int, int] = {}
        self._sequence_parts: dict[int, int] = {}
        self._decode_totals: dict[tuple[int, int], int] = {}
        self._decode_constants: dict[int, Int64s] = {}
        self._decode_stages: dict[tuple[int, int], int] = {}
        self._group_of = {layer: g for g, group in enumerate(self._groups) for layer in group.layers}

    @property
    def num_ep_ranks(self) -> int:
        """Number of ranks in the group."""
        return self.settings.num_ep_ranks

    # --- one rank ---------------------------------------------------------------------------------------------------

    def step_ns(self, batch: Batch) -> int:
        """Price a step. In a group, price the step of the rank that is slowest apart from its experts."""
        num, num_tokens = len(batch.start), column_sum(batch.num_tokens)
        if num == num_tokens:
            total = self._decode_total_ps(num, batch.num_other_tokens)
            for group in self._groups:
                total += group.num_layers * round(self._decode_token_ps * contexts_of(batch.start, group.window))
            return _ns(total)
        attention, parts = self._attention(batch), self._token_part(num_tokens)
        step = self._sequence_part(num) + self._expert_total(num_tokens + batch.num_other_tokens)
        for g, num_layers in enumerate(self._num_layers):
            reading = round(self._decode_token_ps * int(attention.contexts[g]))
            step += num_layers * (parts[g] + attention.constant_ps[g] + reading)
        return _ns(step)

    def decode_steps_ns(self, start: Ints, num_steps: int) -> Int64s:
        """Implement `CostModel.decode_steps_ns`."""
        num = len(start)
        constant = self._decode_constants.get(num)
        if constant is None:
            constant = np.array(self._decode_total_ps(num, 0) + PS_PER_NS // 2)  # then rounded as `_ns_array` does
            self._decode_constants[num] = constant
        steps: Int64s | None = None
        for g, factor in enumerate(self._layer_factors):
            contexts = contexts_of_steps(start, num_steps, self._groups[g].window)
            contexts *= self._token_factor
            reading = np.rint(contexts, contexts).astype(_INT64)
            reading *= factor
            steps = reading if steps is None else steps + reading
        assert steps is not None, "a network has layers"
        steps += constant
        steps //= _PS_PER_NS
        return steps

    def move_ns(self, num_tokens: int) -> int:
        """Price a copy at the peak of the link to the host."""
        return self.settings.gpu.host_copy_ns(num_tokens * self.network.kv_bytes_per_token)

    # --- a group of ranks -------------------------------------------------------------------------------------------

    def group_step_ns(self, batches: Sequence[Batch | None]) -> int:
        """Implement `GroupCostModel.group_step_ns`."""
        ranks = [self._idle() if batch is None else self._attention(batch) for batch in batches]
        return int(self._group_ns(ranks, 1)[0])

    def group_decode_steps_ns(self, starts: Sequence[Ints], num_steps: int) -> Int64s:
        """Implement `GroupCostModel.group_decode_steps_ns`."""
        ranks = [self._decoding(start, num_steps) if len(start) else self._idle() for start in starts]
        return self._group_ns(ranks, num_steps)

    def _group_ns(self, ranks: Sequence[_Attention], num_steps: int) -> Int64s:
        """int64[num_steps], times of a group: in every layer, host and head, all ranks wait for the slowest."""
        assert len(ranks) == self.num_ep_ranks, f"{len(ranks)} batches for a group of {self.num_ep_ranks} ranks"
        experts = self._expert_part(sum(rank.num_tokens for rank in ranks))
        total = np.full(num_steps, max(self._sequence_part(rank.num_sequences) for rank in ranks), np.int64)
        for g, (group, patterns) in enumerate(zip(self._groups, self._patterns, strict=True)):
            own = np.empty((len(ranks), num_steps), np.int64)
            for r, rank in enumerate(ranks):
                constant = self._token_part(rank.num_tokens)[g] + rank.constant_ps[g]
                own[r] = constant + _rounded(self._decode_token_ps * np.asarray(rank.contexts[g], np.float64))
            if not group.has_experts:
                total += group.num_layers * own.max(axis=0)
                continue
            slowest = (own[None] + experts[patterns][:, :, None]).max(axis=1)
            total += group.num_layers // len(patterns) * slowest.sum(axis=0)
        return _ns_array(total)

    # --- stages -----------------------------------------------------------------------------------------------------

    @property
    def popularity(self) -> NDArray[np.float64] | None:
        """Mean popularity over layers."""
        if self._gating is None:
            return None
        chances = self._gating.hit.sum(axis=1).mean(axis=0)
        popularity: NDArray[np.float64] = chances / chances.sum()
        return popularity

    def attention_ns(self, layer: int, batch: Batch) -> int:
        """Implement `StageCostModel.attention_ns`."""
        g = self._group_of[layer]
        num, num_tokens = len(batch.start), column_sum(batch.num_tokens)
        if num == num_tokens:  # all decode, the common case
            reading = round(self._decode_token_ps * contexts_of(batch.start, self._groups[g].window))
            return _ns(self._decode_stage_ps(g, num) + reading)
        attention = self._attention(batch)
        reading = round(self._decode_token_ps * int(attention.contexts[g]))
        return _ns(self._dense_stage_ps(g, num_tokens) + attention.constant_ps[g] + reading)

    def expert_ns(self, num_rows: int) -> int:
        """Implement `StageCostModel.expert_ns`."""
        return round(self._kernels.one_expert_ns(num_rows))

    def grouped_experts_ns(self, num_activated: Int64s, num_rows: Int64s) -> Int64s:
        """Price the experts of a layer on one worker as one grouped product, which steps in `fused` mode have.

        Args:
            num_activated: int64[...], experts with rows.
            num_rows: int64[...], rows of all of them.

        Returns:
            int64[...], ns; 0 without rows.
        """
        times = self._kernels.experts_ns(num_activated.astype(np.float64), num_rows.astype(np.float64))
        return np.where(num_activated > 0, np.rint(times), 0).astype(np.int64)

    def sample_ns(self, num_sequences: int) -> int:
        """Implement `StageCostModel.sample_ns`."""
        return round(self._kernels.head_ns(num_sequences))

    def _dense_stage_ps(self, g: int, num_tokens: int) -> int:
        """Time of one layer of group `g` without its experts, their exchange, and attention itself."""
        exchange = round(2 * self._kernels.all_to_all_ns(num_tokens) * PS_PER_NS) if self._groups[g].has_experts else 0
        return self._token_part(num_tokens)[g] - exchange

    def _decode_stage_ps(self, g: int, num_sequences: int) -> int:
        """Time of the same part for decodes, which includes their attention without the reads of their contexts."""
        part = self._decode_stages.get((g, num_sequences))
        if part is None:
            part = self._dense_stage_ps(g, num_sequences) + round(self._kernels.decode_ns(num_sequences) * PS_PER_NS)
            self._decode_stages[g, num_sequences] = part
        return part

    # --- parts, in picoseconds --------------------------------------------------------------------------------------

    def _token_part(self, num_tokens: int) -> list[int]:
        """Parts of one layer of each group that depend only on the rank's tokens."""
        part = self._token_parts.get(num_tokens)
        if part is None:
            kernels, part = self._kernels, []
            for group in self._groups:
                cost = kernels.dense_ns(num_tokens, group) + kernels.small_ns(num_tokens)
                exchange = round(2 * kernels.all_to_all_ns(num_tokens) * PS_PER_NS) if group.has_experts else 0
                part.append(round(cost * PS_PER_NS) + exchange + self._all_reduces_ns(group, num_tokens) * PS_PER_NS)
            self._token_parts[num_tokens] = part
        return part

    def _all_reduces_ns(self, group: LayerGroup, num_tokens: int) -> int:
        """Time of a layer's all-reduces inside a tensor-parallel rank: after attention, and after what follows it."""
        all_reduce = self.settings.all_reduce
        if all_reduce is None:
            return 0
        if group.has_experts and self.num_ep_ranks > 1:  # the way back from the experts replaces the second one
            return all_reduce.all_reduce_ns(num_tokens)
        return all_reduce.dense_layer_ns(num_tokens)

    def _expert_part(self, num_group_tokens: int) -> Int64s:
        """int64[P, R], fused experts of one layer of each pattern on each rank."""
        part = self._expert_parts.get(num_group_tokens)
        if part is None:
            if self._gating is None:
                return np.zeros((1, 1), np.int64)
            activated, copies = self._gating.activated(num_group_tokens), num_group_tokens * self._gating.copies
            part = np.array(
                [
                    [round(self._kernels.experts_ns(a, c) * PS_PER_NS) for a, c in zip(row, copied, strict=True)]
                    for row, copied in zip(activated.tolist(), copies.tolist(), strict=True)
                ],
                np.int64,
            )
            self._expert_parts[num_group_tokens] = part
        return part

    def _expert_total(self, num_group_tokens: int) -> int:
        """Time of the experts of all layers on the busiest rank."""
        total = self._expert_totals.get(num_group_tokens)
        if total is None:
            busiest = [max(ranks) for ranks in self._expert_part(num_group_tokens).tolist()]
            total = sum(
                group.num_layers // len(patterns) * sum([busiest[pattern] for pattern in patterns.tolist()])
                for group, patterns in zip(self._groups, self._patterns, strict=True)
                if group.has_experts
            )
            self._expert_totals[num_group_tokens] = total
        return total

    def _sequence_part(self, num_sequences: int) -> int:
        """Time of host and head."""
        part = self._sequence_parts.get(num_sequences)
        if part is None:
            host = self.settings.host
            cost = host.step_ns + host.sequence_ns * num_sequences
            cost += self._kernels.head_ns(num_sequences) if num_sequences else 0.0
            part = self._sequence_parts[num_sequences] = round(cost * PS_PER_NS)
        return part

    def _decode_total_ps(self, num_sequences: int, num_other_tokens: int) -> int:
        """Time of a step of `num_sequences` decodes without reading their contexts."""
        key = (num_sequences, num_other_tokens)
        total = self._decode_totals.get(key)
        if total is None:
            attention = round(self._kernels.decode_ns(num_sequences) * PS_PER_NS)
            total = self._sequence_part(num_sequences) + self._expert_total(num_sequences + num_other_tokens)
            for group, part in zip(self._groups, self._token_part(num_sequences), strict=True):
                total += group.num_layers * (part + attention)
            self._decode_totals[key] = total
        return total

    # --- attention of a batch ---------------------------------------------------------------------------------------

    def _attention(self, batch: Batch) -> _Attention:
        start, num_tokens = batch.start.tolist(), batch.num_tokens.tolist()
        chunks: list[tuple[int, int]] = []
        num_cached = 0
        for row, num in enumerate(num_tokens):
            if num > 1:
                chunks.append((start[row], num))
                num_cached += start[row]
        kernels, num_decodes = self._kernels, len(start) - len(chunks)
        constant = round(kernels.decode_ns(num_decodes) * PS_PER_NS) if num_decodes else 0
        constant_ps, contexts = [], []
        for group in self._groups:
            prefill = round(kernels.prefill_ns(chunks, group.window) * PS_PER_NS) if chunks else 0
            constant_ps.append(constant + prefill)
            if group.window is not None and num_decodes:
                contexts.append(contexts_of(batch.start[batch.num_tokens == 1], group.window))
            else:  # a sum less a few numbers costs less than a selection
                contexts.append(sum(start) + num_decodes - num_cached)
        return _Attention(sum(num_tokens), len(start), constant_ps, contexts)

    def _decoding(self, start: Ints, num_steps: int) -> _Attention:
        constant = round(self._kernels.decode_ns(len(start)) * PS_PER_NS)
        return _Attention(
            num_tokens=len(start),
            num_sequences=len(start),
            constant_ps=[constant] * len(self._groups),
            contexts=[contexts_of_steps(start, num_steps, group.window) for group in self._groups],
        )

    def _idle(self) -> _Attention:
        """Attention of a rank without requests: one dummy token, no attention, no head."""
        return _Attention(1, 0, [0] * len(self._groups), [0] * len(self._groups))


def contexts_of(start: Ints, window: int | None) -> int:
    """Tokens that decoding sequences attend to, themselves included; `start` counts tokens in the KV cache."""
    if window is None:
        return column_sum(start) + len(start)
    return int(np.minimum(start + 1, window).sum())


def contexts_of_steps(start: Ints, num_steps: int, window: int | None) -> Floats:
    """float64[num_steps], `contexts_of(start + i, window)` for step i, without a loop over steps."""
    num = len(start)
    first = column_sum(start) + num if window is None else contexts_of(start, window)
    contexts: Floats = np.arange(first, first + num * num_steps, num, dtype=_FLOAT64)  # exact up to 2 ** 53
    if window is not None:
        # A sequence at its window stops growing. Counting the steps of these stops tells how many still grow in each.
        room = np.clip(window - 1 - start, 0, num_steps)
        growing = num - np.cumsum(np.bincount(room, minlength=num_steps + 1)[:num_steps])
        contexts[1:] = first + np.cumsum(growing[: num_steps - 1])
    return contexts


def _even(settings: RooflineSettings) -> Gating | None:
    experts = settings.network.experts
    if experts is None:
        return None
    return even_gating(zipf_popularity(experts.num_experts, 0.6), experts.top_k, settings.num_ep_ranks)


def _patterns_of_groups(groups: Sequence[LayerGroup], num_patterns: int | None) -> list[Int64s]:
    """Gating pattern of each layer of each group: the only one, or one for each layer with experts, in order."""
    with_experts = sorted(layer for group in groups if group.has_experts for layer in group.layers)
    if num_patterns in (1, None):
        return [np.zeros(1, np.int64) for _ in groups]
    assert num_patterns == len(with_experts), f"{num_patterns} patterns for {len(with_experts)} layers with experts"
    return [np.searchsorted(with_experts, [x for x in group.layers if group.has_experts]) for group in groups]


def _rounded(picoseconds: NDArray[np.floating[Any]]) -> Int64s:
    """Round elementwise, half to even, as `round` does."""
    result: Int64s = np.rint(picoseconds).astype(np.int64)
    return result


def _ns(picoseconds: int) -> int:
    return (picoseconds + PS_PER_NS // 2) // PS_PER_NS


def _ns_array(picoseconds: Int64s) -> Int64s:
    result: Int64s = (picoseconds + PS_PER_NS // 2) // PS_PER_NS
    return result
