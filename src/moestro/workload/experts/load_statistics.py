"""Load of experts from recorded gate choices or counts: means, variance, activation, and pairs of neighbouring layers.

A step of a decoding engine has one token each of many sequences, but a recording holds one sequence after another. A
recording without steps is therefore dealt to steps in turn, so that each step has tokens from all parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]

NO_EXPERT = -1  # choice of a token that used fewer experts, or none
# Pairs are means over tokens, and a sample of 32,768 of them has each frequent pair within a few per cent. The kept
# ones are a multiple of the experts that a layer has, because an expert has a few frequent successors.
PAIR_SAMPLE_TOKENS, PAIRS_PER_EXPERT = 32_768, 8


@dataclass(frozen=True, slots=True, eq=False)
class TokenChoices:
    """Gate choices of the tokens of one source.

    Attributes:
        experts: int[tokens, layers, top_k], logical experts; NO_EXPERT for a choice that was not made.
        step: int64[tokens], step in which each token was computed, from 0.
    """

    experts: NDArray[Any]
    step: Int64s


def deal_to_steps(recordings: Sequence[NDArray[Any]], tokens_per_step: int) -> list[TokenChoices]:
    """Deal the tokens of each source to steps in turn.

    Args:
        recordings: int[tokens, layers, top_k] of each source.
        tokens_per_step: tokens of all sources in a step; fewer if there are not as many.
    """
    num_steps = max(1, sum(map(len, recordings)) // tokens_per_step)
    return [TokenChoices(experts, np.arange(len(experts), dtype=np.int64) % num_steps) for experts in recordings]


def load_of_tokens(sources: Sequence[TokenChoices], num_experts: int) -> ExpertLoad:
    """Count the load of experts from the choices of each token.

    Args:
        sources: choices of each source, with the same layers.
        num_experts: logical experts of a layer.
    """
    num_steps = 1 + max((int(source.step.max(initial=0)) for source in sources), default=0)
    num_layers = sources[0].experts.shape[1]
    tokens = np.empty((len(sources), num_layers, num_experts))
    variance, activated = np.empty((num_layers, num_experts)), np.empty((num_layers, num_experts))
    for layer in range(num_layers):
        of_all = np.zeros((num_steps, num_experts), np.int64)
        for s, source in enumerate(sources):
            counts = _counts_by_step(source, layer, (num_steps, num_experts))
            tokens[s, layer] = counts.sum(axis=0) / num_steps
            of_all += counts
        variance[layer], activated[layer] = of_all.var(axis=0), (of_all > 0).mean(axis=0)
    pairs = pairs_of_tokens([source.experts for source in sources], num_experts, num_steps)
    return ExpertLoad(tokens, variance, activated, float(num_steps), pairs)


def _counts_by_step(source: TokenChoices, layer: int, shape: tuple[int, int]) -> Int64s:
    num_steps, num_experts = shape
    chosen = source.experts[:, layer].astype(np.int64)
    places = (source.step[:, None] * num_experts + chosen)[chosen != NO_EXPERT]
    return np.bincount(places, minlength=num_steps * num_experts).reshape(shape)


def pairs_of_tokens(recordings: Sequence[NDArray[Any]], num_experts: int, num_steps: int) -> LayerPairs | None:
    """Return the most frequent pairs of experts in consecutive layers, from a sample of the tokens.

    Args:
        recordings: int[tokens, layers, top_k] of each source.
        num_experts: logical experts of a layer.
        num_steps: steps of the recordings, by which counts are divided.

    Returns:
        At most PAIRS_PER_EXPERT * num_experts pairs for each layer, the most frequent first. None for a single layer.
    """
    num_layers, num_tokens = recordings[0].shape[1], sum(map(len, recordings))
    every = max(1, -(-num_tokens // PAIR_SAMPLE_TOKENS))
    sample = np.concatenate([experts[::every] for experts in recordings]).astype(np.int64)
    if num_layers < 2 or not len(sample):
        return None
    scale = num_tokens / len(sample) / num_steps
    columns: list[tuple[NDArray[Any], ...]] = []
    for layer in range(num_layers - 1):
        before, after = sample[:, layer, :, None], sample[:, layer + 1, None, :]
        both = (before != NO_EXPERT) & (after != NO_EXPERT)
        counts = np.bincount((before * num_experts + after)[both], minlength=num_experts**2)
        best = np.argsort(-counts, kind="stable")[: PAIRS_PER_EXPERT * num_experts]
        best = best[counts[best] > 0]
        columns.append((np.full(len(best), layer), best, counts[best] * scale))
    layer_of, pair, count = (np.concatenate(column) for column in zip(*columns, strict=True))
    return LayerPairs(
        layer_of.astype(np.int32), (pair // num_experts).astype(np.int32), (pair % num_experts).astype(np.int32), count
    )


def load_of_steps(counts: NDArray[Any], pairs: LayerPairs | None = None) -> ExpertLoad:
    """Return the load of experts from their counts in each step.

    Args:
        counts: int[steps, sources, layers, experts], tokens.
        pairs: pairs that were counted in the same steps.
    """
    of_all = counts.sum(axis=1)
    return ExpertLoad(counts.mean(axis=0), of_all.var(axis=0), (of_all > 0).mean(axis=0), float(len(counts)), pairs)


def load_without_steps(counts: NDArray[Any], choices_per_step: float) -> ExpertLoad:
    """Estimate the load of experts from their total counts.

    Choices are taken as independent: an expert with the share p of its layer's choices is used in a part
    1 - (1 - p)**choices of the steps. The variance is unknown, and stays 0.

    Args:
        counts: int or float[sources, layers, experts], tokens of the whole recording.
        choices_per_step: tokens of a step times experts of a token, of all sources.
    """
    total = counts.sum(axis=0)
    in_layer = np.maximum(total.sum(axis=1, keepdims=True), 1e-300)
    activated = 1 - (1 - total / in_layer) ** choices_per_step
    num_steps = max(1.0, float(total.sum(axis=1).max(initial=0.0)) / choices_per_step)
    return ExpertLoad(counts / num_steps, np.zeros(total.shape), activated, num_steps)
