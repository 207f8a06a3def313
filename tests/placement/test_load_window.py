"""The window of expert load against an explicit sum over all steps, and the sum of several windows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moestro.core.experts.expert_load import SourceLoad, merge_sources, pair_codes
from moestro.errors import ConfigError
from moestro.placement import load_window
from moestro.placement.load_window import PAIRS_PER_EXPERT, LoadWindow, PairWindow
from moestro.placement.settings import ExpertLoadSettings

LAYERS, EXPERTS, CHOSEN = 3, 6, 2


def random_steps(seed: int, num_steps: int) -> list[np.ndarray | None]:
    """Choices int32[layers, tokens, chosen] of each step; None is a step without tokens of this source."""
    rng = np.random.default_rng(seed)
    steps: list[np.ndarray | None] = []
    for _ in range(num_steps):
        num_tokens = int(rng.integers(0, 5))
        ids = [[rng.permutation(EXPERTS)[:CHOSEN] for _ in range(num_tokens)] for _ in range(LAYERS)]
        steps.append(np.array(ids, np.int32) if num_tokens else None)
    return steps


def counts_of(choices: np.ndarray | None) -> np.ndarray:
    if choices is None:
        return np.zeros((LAYERS, EXPERTS), np.int64)
    return np.array([np.bincount(layer.ravel(), minlength=EXPERTS) for layer in choices])


def window_of(steps: list[np.ndarray | None], half_life: float, *, with_choices: bool = False) -> LoadWindow:
    window = LoadWindow(LAYERS, EXPERTS, half_life)
    for choices in steps:
        if choices is None:
            window.skip(1)
            continue
        window.observe(counts_of(choices))
        if with_choices:
            window.observe_choices(choices, choices.shape[1])
    return window


def assert_load_is(load: SourceLoad, steps: list[np.ndarray | None], weights: np.ndarray) -> None:
    """Compare with the weighted mean of whole arrays, one entry a step."""
    every = np.array([counts_of(each) for each in steps])
    mean = np.average(every, axis=0, weights=weights)
    np.testing.assert_allclose(load.mean, mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(load.variance, np.average((every - mean) ** 2, axis=0, weights=weights), atol=1e-9)
    np.testing.assert_allclose(load.activated, np.average(every > 0, axis=0, weights=weights), rtol=1e-9)
    assert load.weight == pytest.approx(weights.sum())
    assert (load.counts == every.sum(axis=0)).all()
    assert load.num_steps == len(steps)


@pytest.mark.parametrize("seed", range(10))
def test_without_decay_the_window_is_a_plain_recount(seed):
    steps = random_steps(seed, 40)
    assert_load_is(window_of(steps, 0).load(), steps, np.ones(len(steps)))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("max_gain", [load_window._MAX_GAIN, 8.0])
def test_with_decay_a_step_counts_half_after_the_half_life(seed, max_gain, monkeypatch):
    monkeypatch.setattr(load_window, "_MAX_GAIN", max_gain)
    half_life, steps = float(1 + 3 * seed), random_steps(seed, 60)
    weights = 2.0 ** (-np.arange(len(steps))[::-1] / half_life)
    assert_load_is(window_of(steps, half_life).load(), steps, weights)


def test_a_cleared_window_is_as_a_new_one_but_the_counts_go_on():
    before, after = random_steps(1, 9), random_steps(2, 9)
    window = window_of(before, 4, with_choices=True)
    window.clear()
    assert window.load(with_pairs=True).pairs is None
    assert not window.load().mean.any()
    for choices in after:
        window.skip(1) if choices is None else window.observe(counts_of(choices))
    cleared, fresh = window.load(), window_of(after, 4).load()
    np.testing.assert_allclose(cleared.mean, fresh.mean)
    assert cleared.num_steps == fresh.num_steps == 9
    assert (cleared.counts == fresh.counts + sum(map(counts_of, before))).all()


@pytest.mark.parametrize(("half_life", "max_gain"), [(0.0, 8.0), (5.0, load_window._MAX_GAIN), (5.0, 8.0)])
def test_pairs_are_those_of_consecutive_layers_in_tokens_per_step(half_life, max_gain, monkeypatch):
    monkeypatch.setattr(load_window, "_MAX_GAIN", max_gain)
    steps = random_steps(3, 30)
    found = window_of(steps, half_life, with_choices=True).load(with_pairs=True).pairs
    weights = 2.0 ** (-np.arange(len(steps))[::-1] / half_life) if half_life else np.ones(len(steps))
    expected = np.zeros((LAYERS - 1, EXPERTS, EXPERTS))
    for choices, weight in zip(steps, weights, strict=True):
        for layer, token in np.ndindex(LAYERS - 1, 0 if choices is None else choices.shape[1]):
            for first in choices[layer, token]:
                for second in choices[layer + 1, token]:
                    expected[layer, first, second] += weight / weights.sum()
    table = np.zeros_like(expected)
    table[found.layer, found.expert, found.next_expert] = found.count
    np.testing.assert_allclose(table, expected, rtol=1e-9)
    assert (np.diff(found.count) <= 0).all()


def test_a_sample_of_steps_and_tokens_stands_for_all_of_them():
    choices = np.tile(np.array([[[0, 1]], [[2, 3]], [[4, 5]]], np.int32), (1, 8, 1))
    window = LoadWindow(LAYERS, EXPERTS, 0)
    for step in range(6):
        window.observe(counts_of(choices))
        if step % 3 == 0:
            window.observe_choices(choices[:, ::4], 8)
    window.skip(2)
    pairs = window.load(with_pairs=True).pairs
    assert len(pairs.count) == 2 * CHOSEN**2
    np.testing.assert_allclose(pairs.count, 8 * 6 / 8)


def test_of_many_pairs_the_most_frequent_ones_are_kept():
    rng = np.random.default_rng(0)
    num_experts = 40
    popular = np.exp(-np.arange(num_experts) / 8)
    window = PairWindow(num_experts)
    choices = rng.choice(num_experts, (2, 20_000, 1), p=popular / popular.sum()).astype(np.int32)
    window.add(choices, 20_000, 1.0)
    found = window.most_frequent(1.0)
    every = np.bincount(choices[0, :, 0] * num_experts + choices[1, :, 0], minlength=num_experts**2)
    kept = PAIRS_PER_EXPERT * num_experts
    assert found.count.tolist() == np.sort(every)[::-1][:kept].tolist()
    assert (every[pair_codes(found, num_experts)] == found.count).all()


def test_counts_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="came after"):
        LoadWindow(2, 3, 0).observe(np.zeros((2, 4), np.int64))


def test_a_half_life_below_a_step_is_refused():
    with pytest.raises(ConfigError, match="0, or 1 step"):
        ExpertLoadSettings(expert_load_half_life=0.5)


def test_windows_of_sources_that_keep_step_add_up_to_that_of_the_group():
    """The mean is exact. Variance and activity hold for sources that are independent."""
    sources = [random_steps(seed, 3000) for seed in (5, 6)]
    loads = [window_of(steps, 0, with_choices=True).load(with_pairs=True) for steps in sources]
    load, layers = merge_sources(loads)
    assert layers.tolist() == list(range(LAYERS))
    both = np.array([[counts_of(each) for each in steps] for steps in sources])
    np.testing.assert_allclose(load.tokens, both.mean(axis=1))
    np.testing.assert_allclose(load.variance, both.sum(axis=0).var(axis=0), rtol=0.1)
    np.testing.assert_allclose(load.activated, (both.sum(axis=0) > 0).mean(axis=0), rtol=0.05)
    assert load.num_steps == 3000
    assert load.pairs.count.sum() == pytest.approx(load.total.sum() / LAYERS * (LAYERS - 1) * CHOSEN)


def test_a_source_with_fewer_steps_is_idle_in_the_others():
    steps = random_steps(7, 200)
    whole = window_of([*steps, *[None] * 200], 0).load()
    short = dataclasses.replace(window_of(steps, 0).load())
    other = window_of([np.zeros((LAYERS, 0, CHOSEN), np.int32)] * 400, 0).load()
    load, _ = merge_sources([short, None, other])
    np.testing.assert_allclose(load.tokens[0], whole.mean)
    np.testing.assert_allclose(load.variance, whole.variance)
    np.testing.assert_allclose(load.activated, whole.activated)
    assert load.tokens.shape == (3, LAYERS, EXPERTS)
    assert not load.tokens[1:].any()


def test_dense_layers_are_left_out_and_nothing_is_no_load():
    window = LoadWindow(4, 2, 0)
    window.observe(np.array([[0, 0], [1, 2], [0, 0], [3, 0]]))
    load, layers = merge_sources([window.load()])
    assert layers.tolist() == [1, 3]
    assert load.total.tolist() == [[1, 2], [3, 0]]
    assert merge_sources([None, LoadWindow(2, 2, 0).load()]) is None
    with pytest.raises(ValueError, match="shapes"):
        merge_sources([window.load(), window_of(random_steps(0, 5), 0).load()])


@pytest.mark.parametrize("half_life", [0, 5.0])
def test_reading_between_steps_changes_no_bit(half_life, monkeypatch):
    """Counts are buffered; the sums are those of one step after the other."""
    monkeypatch.setattr(load_window, "_MAX_GAIN", 50.0)
    steps = [counts_of(choices) for choices in random_steps(3, 80)]
    read, unread = LoadWindow(LAYERS, EXPERTS, half_life), LoadWindow(LAYERS, EXPERTS, half_life)
    for counts in steps:
        read.observe(counts)
        read.load()
        unread.observe(counts)
    one, other = read.load(), unread.load()
    for name in ("counts", "mean", "variance", "activated"):
        assert (getattr(one, name) == getattr(other, name)).all(), name
    assert one.weight == other.weight
