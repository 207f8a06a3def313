"""Engines whose steps are far from a roofline, with their papers' times: QLLM's and AMoE's.

Both run a layer in stages that cost a constant and a part for each token; nearly all of it is the engines' own code.
The papers publish totals. Their split into stages is an assumption, stated beside each constant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moestro.cost.gating import even_gating
from moestro.cost.gpus import A100
from moestro.cost.hf_config import network_named
from moestro.cost.kernels import Kernels
from moestro.cost.model import Batch, Int64s, Ints
from moestro.cost.networks import NetworkShape
from moestro.cost.popularity import zipf_popularity


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of one layer's stages.

    Attributes:
        attention_ns, attention_token_ns: one attention stage, and each token in it.
        expert_ns, expert_row_ns: one call of one expert, and each of its rows.
        has_own_expert_devices: whether each expert has its own device, so that all run at once.
        zipf: exponent of the experts' popularity, which decides how many are called.
    """

    attention_ns: float
    attention_token_ns: float
    expert_ns: float
    expert_row_ns: float
    has_own_expert_devices: bool
    zipf: float = 0.3


# QLLM (section 2.4): 300 to 400 ms for each decode iteration of Mixtral in 4 bits on an A100, with Hugging Face's loop
# over experts. Assumed split: 8 calls a layer, each about 1.2 ms to dequantise and launch and 2.3 us a row (an expert's
# arithmetic at half of the A100's peak), and 1.5 ms of attention. One call is the unit of preemption.
QLLM = StageTimes(
    attention_ns=1_500_000,
    attention_token_ns=0,
    expert_ns=1_200_000,
    expert_row_ns=2_300,
    has_own_expert_devices=False,
)

# AMoE (figure 13): an attention step of 2.7 ms and an expert step of 0.8 ms on A100s. Assumed split: attention 1.0 ms
# and 10 us a token, of which a full batch has 160; an expert 0.2 ms of scheduling, 0.28 ms to read its weights, and
# 1.1 us a row.
AMOE = StageTimes(
    attention_ns=1_000_000,
    attention_token_ns=10_000,
    expert_ns=480_000,
    expert_row_ns=1_100,
    has_own_expert_devices=True,
)


class StagedEngine:
    """Prices stages, and steps as the sum of their stages.

    Contexts are free here, because they are small beside the constants.

    Args:
        times: times of the stages.
        network: network whose sizes give the numbers of layers and experts.

    Attributes:
        network, popularity: as in `StageCostModel`.
    """

    def __init__(self, times: StageTimes, network: NetworkShape) -> None:
        assert network.experts is not None, "the staged engines run Mixture-of-Experts networks"
        self.network = network
        self.popularity = zipf_popularity(network.experts.num_experts, times.zipf)
        self._times, self._num_layers, self._experts = times, network.num_layers, network.experts
        self._gating = even_gating(self.popularity, network.experts.top_k)
        self._head = Kernels(network, A100, num_ep_ranks=1)
        self._step_of: dict[tuple[int, int], int] = {}

    def step_ns(self, batch: Batch) -> int:
        """Price a step: all layers, one after the other."""
        key = (int(batch.num_tokens.sum()), len(batch.start))
        step = self._step_of.get(key)
        if step is None:
            num_tokens, num_sequences = key
            layer_ns = self._attention_ns(num_tokens) + self._experts_ns(num_tokens)
            step = self._step_of[key] = round(self._num_layers * layer_ns) + self.sample_ns(num_sequences)
        return step

    def decode_steps_ns(self, start: Ints, num_steps: int) -> Int64s:
        """Implement `CostModel.decode_steps_ns`."""
        return np.full(num_steps, self.step_ns(Batch(start, np.ones_like(start))), np.int64)

    def move_ns(self, num_tokens: int) -> int:
        """Price a copy at the peak of the A100's link to the host."""
        return A100.host_copy_ns(num_tokens * self.network.kv_bytes_per_token)

    def attention_ns(self, layer: int, batch: Batch) -> int:
        """Implement `StageCostModel.attention_ns`."""
        return round(self._attention_ns(int(batch.num_tokens.sum())))

    def expert_ns(self, num_rows: int) -> int:
        """Implement `StageCostModel.expert_ns`."""
        return round(self._times.expert_ns + self._times.expert_row_ns * num_rows)

    def sample_ns(self, num_sequences: int) -> int:
        """Implement `StageCostModel.sample_ns`."""
        return round(self._head.head_ns(num_sequences))

    def _attention_ns(self, num_tokens: int) -> float:
        return self._times.attention_ns + self._times.attention_token_ns * num_tokens

    def _experts_ns(self, num_tokens: int) -> float:
        """Time of a layer's expert calls. On separate devices no call waits for another, so only the mean counts."""
        times, num_copies = self._times, num_tokens * self._experts.top_k
        if times.has_own_expert_devices:
            return times.expert_ns + times.expert_row_ns * num_copies / self._experts.num_experts
        return float(self._gating.activated(num_tokens)[0, 0]) * times.expert_ns + times.expert_row_ns * num_copies


def in_4_bits(network: NetworkShape) -> NetworkShape:
    """Return the network with half a byte for each weight except embedding and head, as QLLM loads it."""
    experts = replace(network.experts, bytes_per_weight=0.5) if network.experts else None
    return replace(network, bytes_per_weight=0.5, experts=experts)


def qllm() -> StagedEngine:
    """QLLM's engine with Mixtral 8x7B."""
    return StagedEngine(QLLM, network_named("mixtral-8x7b"))


def amoe() -> StagedEngine:
    """AMoE's engine with its Mixtral of multi-query attention."""
    return StagedEngine(AMOE, network_named("mixtral-8x7b-mqa"))
