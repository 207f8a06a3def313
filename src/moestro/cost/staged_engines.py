"""Engines whose steps are far from a roofline, with their papers' times: QLLM's and AMoE's.

Both run a layer in stages that cost a constant and a part for each token; much of it is the engines' own code.
The papers publish totals. Their split into stages is an assumption, stated beside each constant.
For AMoE's design with other code than its prototype's, `Roofline` prices kernels, and `HostOverhead` adds the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moestro.cost.gating import even_gating
from moestro.cost.gpus import A100, Gpu
from moestro.cost.hf_config import network_named
from moestro.cost.kernels import Kernels
from moestro.cost.model import Batch, Int64s, Ints
from moestro.cost.networks import NetworkShape
from moestro.cost.popularity import AMOE_RATE, Floats, exponential_popularity, zipf_popularity


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of one layer's stages.

    Attributes:
        attention_ns, attention_token_ns: one attention stage, and each token in it.
        expert_ns, expert_row_ns: one call of one expert, and each of its rows.
        expert_read_ns: reading the weights of an expert, which the arithmetic of its rows hides or is hidden by.
        has_own_expert_devices: whether each expert has its own device, so that all run at once.
        zipf: exponent of the experts' popularity, which decides how many are called.
    """

    attention_ns: float
    attention_token_ns: float
    expert_ns: float
    expert_row_ns: float
    expert_read_ns: float = 0.0
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

# AMoE (figure 13, a step of figure 9b's run): an attention step of 2.7 ms and an expert step of 0.8 ms on A100 80 GB,
# for token counts that the paper does not print. Assumptions:
#  - An attention step has 1,000 tokens. Figure 11's load of 250 requests a second, 80 % of the most, is 37,500 tokens a
#    second, so a GPU's share in a second of steps of 2.7 ms is 810 tokens a step, or 1,010 at the most.
#  - 0.45 ms of it do not depend on tokens. The rest is 2.25 us a token, mostly page table and post-processing.
#  - An expert step is mostly kernel: 0.12 ms to schedule and launch, then 1.53 us a row, which is 230 TFLOP/s of
#    Mixtral's expert, or reading its weights if that takes longer. 0.8 ms is then 444 rows.
# Contexts add nothing: 1,000 contexts of 250 tokens take 0.09 ms to read with multi-query attention.
AMOE = StageTimes(
    attention_ns=450_000,
    attention_token_ns=2_250,
    expert_ns=120_000,
    expert_row_ns=1_530,
    expert_read_ns=228_000,
    has_own_expert_devices=True,
)


class StagedEngine:
    """Prices stages, and steps as the sum of their stages.

    Contexts are free here, because they are small beside the constants.

    Args:
        times: times of the stages.
        network: network whose sizes give the numbers of layers and experts.
        gpu: GPU of the head and of copies to the host.
        popularity: float64[num_experts], popularity of experts; None means zipf with the times' exponent.

    Attributes:
        network, popularity: as in `StageCostModel`.
    """

    def __init__(
        self, times: StageTimes, network: NetworkShape, gpu: Gpu = A100, popularity: Floats | None = None
    ) -> None:
        assert network.experts is not None, "the staged engines run Mixture-of-Experts networks"
        self.network = network
        self.popularity = zipf_popularity(network.experts.num_experts, times.zipf) if popularity is None else popularity
        self._times, self._num_layers, self._experts = times, network.num_layers, network.experts
        self._gating = even_gating(self.popularity, network.experts.top_k)
        self._gpu, self._head = gpu, Kernels(network, gpu, num_ep_ranks=1)
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
        """Price a copy at the peak of the GPU's link to the host."""
        return self._gpu.host_copy_ns(num_tokens * self.network.kv_bytes_per_token)

    def attention_ns(self, layer: int, batch: Batch) -> int:
        """Implement `StageCostModel.attention_ns`."""
        return round(self._attention_ns(int(batch.num_tokens.sum())))

    def expert_ns(self, num_rows: int) -> int:
        """Implement `StageCostModel.expert_ns`."""
        times = self._times
        return round(times.expert_ns + max(times.expert_read_ns, times.expert_row_ns * num_rows))

    def sample_ns(self, num_sequences: int) -> int:
        """Implement `StageCostModel.sample_ns`."""
        return round(self._head.head_ns(num_sequences))

    def _attention_ns(self, num_tokens: int) -> float:
        return self._times.attention_ns + self._times.attention_token_ns * num_tokens

    def _experts_ns(self, num_tokens: int) -> float:
        """Time of a layer's expert calls. On separate devices no call waits for another, so only the mean counts."""
        times, num_copies = self._times, num_tokens * self._experts.top_k
        if times.has_own_expert_devices:
            return self.expert_ns(round(num_copies / self._experts.num_experts))
        num_calls = float(self._gating.activated(num_tokens)[0, 0])
        return num_calls * times.expert_ns + max(num_calls * times.expert_read_ns, times.expert_row_ns * num_copies)


def in_4_bits(network: NetworkShape) -> NetworkShape:
    """Return the network with half a byte for each weight except embedding and head, as QLLM loads it."""
    experts = replace(network.experts, bytes_per_weight=0.5) if network.experts else None
    return replace(network, bytes_per_weight=0.5, experts=experts)


def qllm() -> StagedEngine:
    """QLLM's engine with Mixtral 8x7B."""
    return StagedEngine(QLLM, network_named("mixtral-8x7b"))


def amoe(network: NetworkShape | None = None, gpu: Gpu = A100) -> StagedEngine:
    """AMoE's prototype.

    Args:
        network: a Mixtral of multi-query attention; None means its 8 experts with top-2.
        gpu: an A100 of either memory size, which decides how long reading an expert's weights takes.
    """
    network = network or network_named("mixtral-8x7b-mqa")
    assert network.experts is not None, "AMoE runs Mixture-of-Experts networks"
    times = replace(AMOE, expert_read_ns=Kernels(network, gpu, num_ep_ranks=1).one_expert_ns(1))
    return StagedEngine(times, network, gpu, exponential_popularity(network.experts.num_experts, AMOE_RATE))
