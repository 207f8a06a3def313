"""A small network whose stages cost what a test says, gates without randomness, and lock-step steps over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moestro.cost.drawn_step import DrawnStep, KeyedBatch, StepPricer
from moestro.cost.model import Batch
from moestro.cost.networks import LayerGroup, NetworkShape, network_named

MIXTRAL = network_named("mixtral-8x7b")


def network(num_layers: int = 4, num_experts: int = 8, top_k: int = 1, dense: tuple[int, ...] = ()) -> NetworkShape:
    """Mixtral with other numbers of layers and experts; the layers `dense` have none."""
    sparse = tuple(layer for layer in range(num_layers) if layer not in dense)
    groups = tuple(
        LayerGroup(layers=layers, dense_size=0, has_experts=has)
        for layers, has in ((dense, False), (sparse, True))
        if layers
    )
    return replace(MIXTRAL, groups=groups, experts=replace(MIXTRAL.experts, num_experts=num_experts, top_k=top_k))


@dataclass(frozen=True)
class PlainStages:
    """A `StageCostModel` of constants: each stage costs a fixed part and a part for each token or row, ns."""

    network: NetworkShape
    attention: tuple[int, int] = (0, 100)
    expert: tuple[int, int] = (0, 1000)
    sample: tuple[int, int] = (0, 10)
    popularity = None

    def attention_ns(self, layer: int, batch: Batch) -> int:
        return self.attention[0] + self.attention[1] * int(batch.num_tokens.sum())

    def expert_ns(self, num_rows: int) -> int:
        return self.expert[0] + self.expert[1] * num_rows

    def sample_ns(self, num_sequences: int) -> int:
        return self.sample[0] + self.sample[1] * num_sequences

    def move_ns(self, num_tokens: int) -> int:
        return 0


@dataclass(frozen=True)
class DealingGate:
    """Deals experts to tokens in turn: token t visits experts t, t + 1, ... modulo their number, in every layer."""

    num_experts: int
    top_k: int = 1

    def count(self, tokens, layers: range):
        chosen = (tokens.astype(np.int64)[:, None] + np.arange(self.top_k)) % self.num_experts
        counts = np.bincount(chosen.ravel(), minlength=self.num_experts)
        return np.tile(counts, (len(layers), 1))


@dataclass(frozen=True)
class OneExpertGate:
    """Sends every token to the same expert; the hot expert of layer l is `hot[l % len(hot)]`."""

    num_experts: int
    hot: tuple[int, ...] = (0,)

    def count(self, tokens, layers: range):
        counts = np.zeros((len(layers), self.num_experts), np.int64)
        for row, layer in enumerate(layers):
            counts[row, self.hot[layer % len(self.hot)]] = len(tokens)
        return counts


def decodes(keys) -> KeyedBatch | None:
    """A batch of decodes with these token keys; None for none."""
    keys = np.asarray(keys, np.uint64)
    if not len(keys):
        return None
    return KeyedBatch(Batch(np.full(len(keys), 7, np.int32), np.ones(len(keys), np.int32)), keys)


def step_of(deployment, batches, num_segments: int = 1) -> DrawnStep:
    """One step of the group with these batches."""
    return StepPricer(deployment, num_segments).draw(batches)
