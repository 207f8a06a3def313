"""Popularity of experts: how likely a token's gate chooses each of them, by layer and by the request's domain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from moestro.core.setting_checks import CheckedSettings, at_least, between
from moestro.core.token_keys import MAX_DOMAINS

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
