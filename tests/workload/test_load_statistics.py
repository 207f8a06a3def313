"""Load of experts from choices and counts, against a count of one choice at a time."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.workload.experts.sglang_dumps import (
    NO_EXPERT,
    PAIRS_PER_EXPERT,
    TokenChoices,
    deal_to_steps,
    load_of_steps,
    load_of_tokens,
    load_without_steps,
    pairs_of_tokens,
)


def random_choices(seed: int) -> tuple[list[TokenChoices], int]:
    rng = np.random.default_rng(seed)
    num_experts, num_layers, top_k = int(rng.integers(3, 9)), int(rng.integers(1, 5)), int(rng.integers(1, 3))
    sources = []
    for _ in range(int(rng.integers(1, 4))):
        experts = rng.integers(NO_EXPERT, num_experts, (int(rng.integers(5, 30)), num_layers, top_k))
        sources.append(TokenChoices(experts, rng.integers(0, 4, len(experts))))
    sources[0].step[0] = 3  # the last step is used
    return sources, num_experts


@pytest.mark.parametrize("seed", range(30))
def test_load_is_that_of_a_count_of_single_choices(seed):
    sources, num_experts = random_choices(seed)
    num_layers = sources[0].experts.shape[1]
    by_step = np.zeros((4, len(sources), num_layers, num_experts))
    pairs: dict[tuple[int, int, int], float] = {}
    for s, source in enumerate(sources):
        for token, step in zip(source.experts.tolist(), source.step.tolist(), strict=True):
            for layer, chosen in enumerate(token):
                for expert in chosen:
                    if expert != NO_EXPERT:
                        by_step[step, s, layer, expert] += 1
                        for after in token[layer + 1] if layer + 1 < num_layers else []:
                            if after != NO_EXPERT:
                                key = (layer, expert, after)
                                pairs[key] = pairs.get(key, 0) + 0.25
    load = load_of_tokens(sources, num_experts)
    assert load.num_steps == 4
    assert load.tokens == pytest.approx(by_step.mean(axis=0))
    assert load.variance == pytest.approx(by_step.sum(axis=1).var(axis=0))
    assert load.activated == pytest.approx((by_step.sum(axis=1) > 0).mean(axis=0))
    same = load_of_steps(by_step)
    for name in ("tokens", "variance", "activated"):
        assert getattr(load, name) == pytest.approx(getattr(same, name))
    if num_layers == 1:
        assert load.pairs is None
        return
    found = load.pairs
    keys = zip(found.layer.tolist(), found.expert.tolist(), found.next_expert.tolist(), strict=True)
    assert dict(zip(keys, found.count.tolist(), strict=True)) == pytest.approx(pairs)


def test_only_the_most_frequent_pairs_are_kept():
    rng = np.random.default_rng(0)
    experts = rng.integers(0, 40, (20_000, 2, 2))
    found = pairs_of_tokens([experts], 40, 1)
    assert len(found.count) == 40 * PAIRS_PER_EXPERT
    assert (np.diff(found.count) <= 0).all()
    assert found.count.min() >= np.sort(np.bincount((experts[:, 0, :, None] * 40 + experts[:, 1, None]).ravel()))[-320]


def test_pairs_of_many_tokens_are_estimated_from_a_sample():
    rng = np.random.default_rng(1)
    experts = np.stack([rng.choice(4, 100_000, p=[0.4, 0.3, 0.2, 0.1]) for _ in range(2)], axis=1)[:, :, None]
    found = pairs_of_tokens([experts], 4, 100)
    assert found.count.sum() == pytest.approx(1000)
    assert found.count[0] == pytest.approx(160, rel=0.05)


def test_tokens_are_dealt_to_steps_in_turn():
    dealt = deal_to_steps([np.zeros((7, 1, 1), int), np.zeros((5, 1, 1), int)], 4)
    assert [each.step.tolist() for each in dealt] == [[0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 0, 1]]
    (few,) = deal_to_steps([np.zeros((3, 1, 1), int)], 100)
    assert few.step.tolist() == [0, 0, 0]


def test_activation_without_steps_is_that_of_independent_choices():
    rng = np.random.default_rng(2)
    chances = np.array([0.6, 0.3, 0.08, 0.02])
    steps = np.stack([np.bincount(rng.choice(4, 12, p=chances), minlength=4) for _ in range(20_000)])
    counted = load_of_steps(steps[:, None, None])
    estimated = load_without_steps(steps.sum(axis=0)[None, None], 12)
    assert estimated.activated == pytest.approx(counted.activated, abs=0.01)
    assert estimated.tokens == pytest.approx(counted.tokens)
    assert estimated.num_steps == pytest.approx(20_000)
    assert not estimated.variance.any()
