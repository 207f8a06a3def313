"""The overlap of two profiles' pairs against sets of pairs."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs
from moestro.placement.load_window import independent_pairs, pair_overlap

LAYERS, EXPERTS = 4, 8


def pairs_of(table: np.ndarray) -> LayerPairs:
    """Pairs of a table float64[layers - 1, experts, experts], in any order."""
    order = np.random.default_rng(0).permutation(np.flatnonzero(table))
    layer, first, second = np.unravel_index(order, table.shape)
    return LayerPairs(layer.astype(np.int32), first.astype(np.int32), second.astype(np.int32), table.ravel()[order])


@pytest.mark.parametrize("seed", range(10))
def test_shared_is_the_share_of_the_most_frequent_pairs_of_each_layer_that_both_have(seed):
    rng = np.random.default_rng(seed)
    tables = [rng.random((LAYERS - 1, EXPERTS, EXPERTS)) for _ in range(2)]
    found = pair_overlap(pairs_of(tables[0]), pairs_of(tables[1]), LAYERS, EXPERTS)
    tops = [[set(np.argsort(-layer.ravel())[:EXPERTS].tolist()) for layer in table] for table in tables]
    expected = [len(first & second) / EXPERTS for first, second in zip(*tops, strict=True)]
    assert found.shared.tolist() == expected
    assert found.mean == pytest.approx(np.mean(expected))
    assert (found.num_compared, found.by_chance) == (EXPERTS, 1 / EXPERTS)


def test_a_profile_agrees_with_itself_and_missing_pairs_agree_with_none():
    table = np.random.default_rng(1).random((LAYERS - 1, EXPERTS, EXPERTS))
    few = table * (table > np.sort(table, axis=None)[-3])
    whole = pairs_of(table)
    assert pair_overlap(whole, whole, LAYERS, EXPERTS).mean == 1
    assert pair_overlap(pairs_of(few), pairs_of(few), LAYERS, EXPERTS).shared.sum() == pytest.approx(2 / EXPERTS)
    assert pair_overlap(whole, whole, 1, EXPERTS).mean == 1


def test_independent_experts_have_the_pairs_that_their_loads_explain():
    total = np.random.default_rng(2).random((LAYERS, EXPERTS))
    load = ExpertLoad(total[None], total * 0, total * 0, 1.0)
    product = pairs_of(total[:-1, :, None] * total[1:, None, :])
    assert pair_overlap(independent_pairs(load), product, LAYERS, EXPERTS).mean == 1
    single = ExpertLoad(total[None, :1], total[:1], total[:1], 1.0)
    assert not len(independent_pairs(single).layer)
