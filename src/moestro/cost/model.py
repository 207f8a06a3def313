"""The interface of cost models, and the experts that a step touches. Prices are integer nanoseconds.

The popularity of experts and their placement give the activated experts and the token copies on each rank. In decode,
experts take as long as reading their weights does, so the number of *activated* experts decides. In prefill, arithmetic
dominates, so the number of token copies on the busiest rank decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.setting_checks import CheckedSettings, at_least, between
from moestro.core.work import MAX_DOMAINS
from moestro.cost.networks import NetworkShape

Ints = NDArray[np.int32] | NDArray[np.int64]
Int64s = NDArray[np.int64]


class Batch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The units of one step, as far as they affect its cost, one row each. The columns are those of `core.work.Units`.

    A row of one token is a decode; a prompt's last token alone costs the same. Any other row is a prefill chunk.

    Attributes:
        start: int[n], tokens of the sequence that are already in the KV cache.
        num_tokens: int[n], tokens to compute, at least 1.
        num_other_tokens: tokens that the other ranks of an expert-parallel group compute in the same step, where these
            are priced separately; an idle rank counts 1.
    """

    start: Ints
    num_tokens: Ints
    num_other_tokens: int = 0


class CostModel(Protocol):
    """Prices steps of one rank."""

    def step_ns(self, batch: Batch) -> int:
        """Time of one step, from its plan to its sampled tokens; `batch` has at least one row."""
        ...

    def decode_steps_ns(self, start: Ints, num_steps: int) -> Int64s:
        """Time of each of the next `num_steps` decode steps, in which every sequence decodes one token.

        Args:
            start: int[n], tokens of each sequence in the KV cache before the first step.

        Returns:
            int64[num_steps]; entry i equals `step_ns` of a batch that starts at `start + i`.
        """
        ...

    def move_ns(self, num_tokens: int) -> int:
        """Time to copy the KV of `num_tokens` tokens between the device and host memory."""
        ...


class GroupCostModel(CostModel, Protocol):
    """Prices steps of ranks in lock-step: an expert-parallel group waits for its slowest rank in every layer."""

    @property
    def num_ep_ranks(self) -> int:
        """Number of ranks in the group."""
        ...

    def group_step_ns(self, batches: Sequence[Batch | None]) -> int:
        """Time of one barrier step.

        Args:
            batches: batch of each rank; None means an idle rank, which computes one dummy token so that the others can
                proceed. At least one rank has a batch. Their `num_other_tokens` are ignored.
        """
        ...

    def group_decode_steps_ns(self, starts: Sequence[Ints], num_steps: int) -> Int64s:
        """Time of each of the next decode steps of a group: entry i equals `group_step_ns` of that step.

        Args:
            starts: int[n] for each rank; empty means an idle rank.
        """
        ...


class StageCostModel(Protocol):
    """Prices what a flow device runs at once: one stage of one layer."""

    @property
    def network(self) -> NetworkShape:
        """Network whose stages are priced."""
        ...

    @property
    def popularity(self) -> NDArray[np.float64] | None:
        """float64[num_experts], sums to 1: chance that a token chooses each expert; None for a dense network."""
        ...

    def attention_ns(self, layer: int, batch: Batch) -> int:
        """Time of one layer between two expert stages: norms, projections, attention, gate."""
        ...

    def expert_ns(self, num_rows: int) -> int:
        """Time of one expert over `num_rows` tokens."""
        ...

    def sample_ns(self, num_sequences: int) -> int:
        """Time of the head and the sampler for `num_sequences` sequences."""
        ...

    def move_ns(self, num_tokens: int) -> int:
        """Implement `CostModel.move_ns`."""
        ...


Floats = NDArray[np.float64]

# AMoE (section 5) fits the expert loads of Mixtral 8x7B on Dolly to an exponential distribution and does not print its
# rate. Its figure 4 has GPUs stall for up to 70 % of the time: the hottest expert then has 1 / 0.3 times the mean load.
# An assumption: this rate gives 3.34 times the mean with 8 experts, and 6.58 times with 16.
AMOE_RATE = 0.53


def zipf_popularity(num_experts: int, exponent: float) -> Floats:
    """float64[num_experts], sums to 1: expert e has weight (e + 1) ** -exponent; exponent 0 is uniform."""
    return _normalised(np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent)


def exponential_popularity(num_experts: int, rate: float) -> Floats:
    """float64[num_experts], sums to 1: expert e has weight exp(-rate * e); rate 0 is uniform."""
    return _normalised(np.exp(-rate * np.arange(num_experts, dtype=np.float64)))


def _normalised(weight: Floats) -> Floats:
    popularity: Floats = weight / weight.sum()
    return popularity


@dataclass(frozen=True, kw_only=True)
class PopularityForm(CheckedSettings):
    """Popularity of the experts of a network.

    Attributes:
        family: form of the weights, by rank from the hottest expert: `uniform`, `zipf`, or `exponential`.
        skew: exponent of `zipf`, or rate of `exponential`; at least 0.
        hot_ids: `same` gives the same experts to all layers; `permuted` shuffles the experts of each layer.
        num_domains: source domains of requests. Each domain shuffles the experts anew; domain 0 with `same` does not.
        seed: seed of the shuffles.
    """

    PLACE: ClassVar[str | None] = "[popularity] "

    family: Literal["uniform", "zipf", "exponential"] = "zipf"
    skew: Annotated[float, at_least(0)] = 0.6
    hot_ids: Literal["same", "permuted"] = "same"
    num_domains: Annotated[int, between(1, MAX_DOMAINS)] = 1
    seed: Annotated[int, at_least(0)] = 0

    def by_rank(self, num_experts: int) -> Floats:
        """float64[num_experts], sums to 1: popularity from the hottest expert to the coldest."""
        if self.family == "exponential":
            return exponential_popularity(num_experts, self.skew)
        return zipf_popularity(num_experts, self.skew if self.family == "zipf" else 0.0)

    def by_layer(self, num_layers: int, num_experts: int) -> Floats:
        """float64[num_domains, num_layers, num_experts]; with `same` the second axis has length 1."""
        by_rank, is_permuted = self.by_rank(num_experts), self.hot_ids == "permuted"
        popularity = np.empty((self.num_domains, num_layers if is_permuted else 1, num_experts))
        for domain, layers in enumerate(popularity):
            for layer, row in enumerate(layers):
                row[:] = by_rank
                if domain or is_permuted:
                    row[:] = by_rank[np.random.default_rng([self.seed, domain, layer]).permutation(num_experts)]
        return popularity


@dataclass(frozen=True, slots=True, eq=False)
class Gating:
    """How tokens fall on the experts of each rank.

    P counts patterns: 1 if all layers are alike, else one for each layer with experts. R is the number of ranks, or 1
    where ranks are alike.

    Attributes:
        hit: float64[P, R, E], chance that one token has a copy computed by this rank's expert.
        held: float64[P, R, E], part of the expert that the rank holds: 0 or 1, or a share where the placement is open.
        copies: float64[P, R], copies of one token that the rank computes; the sum over ranks is top-k.
    """

    hit: Floats
    held: Floats
    copies: Floats

    def activated(self, num_tokens: int) -> Floats:
        """float64[P, R], expected number of distinct experts that `num_tokens` independent tokens choose."""
        result: Floats = (self.held * (1 - (1 - self.hit) ** num_tokens)).sum(axis=-1)
        return result


def even_gating(popularity: Floats, top_k: int, num_ep_ranks: int = 1, imbalance: float = 1.0) -> Gating:
    """Gating under an unspecified placement that gives every rank an equal share of activated experts.

    Args:
        popularity: float64[E], sums to 1.
        imbalance: copies on the busiest rank over the mean, at least 1. Only the busiest rank is priced.
    """
    hit = np.minimum(1.0, top_k * popularity)[None, None, :]
    held = np.full_like(hit, 1 / num_ep_ranks)
    return Gating(hit, held, np.array([[top_k / num_ep_ranks * imbalance]]))


def placed_gating(popularity: Floats, top_k: int, share: Floats) -> Gating:
    """Gating under a known placement.

    Args:
        popularity: float64[P, E]; each pattern sums to 1.
        share: float64[P, R, E], part of the expert's tokens that each rank computes: 1 on the rank with the only copy,
            a fraction where several ranks hold copies; the sum over ranks is 1.
    """
    chance = np.minimum(1.0, top_k * popularity)[:, None, :]
    copies = (top_k * popularity[:, None, :] * share).sum(axis=-1)
    return Gating(chance * share, (share > 0).astype(np.float64), copies)
