"""Prices of one layer's kernels in nanoseconds: each is the longer of reading and computing, at fitted efficiency.

The model and its constants come from tables of single operations (AIConfigurator's and Frontier's grids, InferSim's
utilisations). `docs/costs.md` states the model and compares it with published end-to-end figures.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from moestro.cost.gpus import Gpu
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
